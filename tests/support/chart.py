"""Renders the chart with the real helm and checks what comes out against Kubernetes' and KubeRay's own schemas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "tandem"
KUBERNETES = "1.37"
RELEASE = "demo"
OUTSIDE_KUBERNETES = ("ray.io/", "monitoring.coreos.com/", "cert-manager.io/")

Document = dict[str, Any]


class Rendered(list[Document]):
    """Documents of one `helm template`."""

    def one(self, kind: str, name: str = "") -> Document:
        """The only document of that kind, or the one that is named so after the release's own name ("-config")."""
        found = [d for d in self if d["kind"] == kind and (not name or d["metadata"]["name"] == self.fullname + name)]
        assert len(found) == 1, f"{kind} {name}: {[d['metadata']['name'] for d in self if d['kind'] == kind]}"
        return found[0]

    def has(self, kind: str) -> bool:
        return any(d["kind"] == kind for d in self)

    @property
    def fullname(self) -> str:
        return next(d["metadata"]["name"] for d in self if d["apiVersion"] == "ray.io/v1")

    @property
    def ray(self) -> Document:
        """The spec of the RayCluster, also where a RayService holds it."""
        top = next(d for d in self if d["apiVersion"] == "ray.io/v1")
        return top["spec"] if top["kind"] == "RayCluster" else top["spec"]["rayClusterConfig"]

    def group(self, pool: str) -> Document:
        return next(g for g in self.ray["workerGroupSpecs"] if g["groupName"] == pool)

    @property
    def config(self) -> str:
        return self.one("ConfigMap", "-config")["data"]["config.yaml"]

    def pods(self) -> Iterator[tuple[str, Document]]:
        """Each pod template's spec, with where it came from."""
        yield "head", self.ray["headGroupSpec"]["template"]["spec"]
        for group in self.ray["workerGroupSpecs"]:
            yield group["groupName"], group["template"]["spec"]
        for document in self:
            if document["kind"] == "Deployment":
                yield document["metadata"]["name"], document["spec"]["template"]["spec"]

    def containers(self) -> Iterator[tuple[str, Document]]:
        for pod, spec in self.pods():
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                yield f"{pod}/{container['name']}", container


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("helm is not installed; `python -m tools.chart.get_helm` fetches it")
    return subprocess.run([binary, *args], capture_output=True, text=True, timeout=60)


def template(values: Document | None = None, *options: str, preset: str | None = None) -> subprocess.CompletedProcess[str]:
    """`helm template`, with values laid over a preset."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values or {}, file)
        file.flush()
        presets = ["-f", str(CHART / f"values-{preset}.yaml")] if preset else []
        return helm("template", RELEASE, str(CHART), *presets, "-f", file.name, *options)


def render(values: Document | None = None, *options: str, preset: str | None = None) -> Rendered:
    result = template(values, *options, preset=preset)
    assert result.returncode == 0, result.stderr
    return Rendered(document for document in yaml.safe_load_all(result.stdout) if document)


def validate(rendered: Rendered) -> None:
    """Raises: AssertionError or a schema's own error, naming the document"""
    names = [(d["kind"], d["metadata"]["name"]) for d in rendered]
    assert len(set(names)) == len(names), f"rendered twice: {names}"
    for document in rendered:
        where = f"{document['kind']} {document['metadata']['name']}"
        if document["apiVersion"] == "ray.io/v1":
            errors = [f"{where} {e.json_path}: {e.message[:300]}" for e in _kuberay(document["kind"]).iter_errors(document)]
            assert errors == []
            _check_as_the_operator_does(document)
        elif not document["apiVersion"].startswith(OUTSIDE_KUBERNETES):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


@cache
def kuberay_schemas() -> Path:
    """Skips where there are none: they are KubeRay's, not ours to ship."""
    given = os.environ.get("TANDEM_KUBERAY_SCHEMAS")
    places = [Path(given)] if given else [parent / "shared" / "kuberay" for parent in ROOT.parents]
    for place in places:
        if (place / "RayCluster-v1.json").exists():
            return place
    pytest.skip("KubeRay's schemas are not here; TANDEM_KUBERAY_SCHEMAS names the folder with RayCluster-v1.json and RayService-v1.json")


@cache
def _kuberay(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((kuberay_schemas() / f"{kind}-v1.json").read_text()))


def _check_as_the_operator_does(document: Document) -> None:
    """Rules of KubeRay's own validation that its schemas don't say (utils/validation.go of 1.7.0)."""
    name = document["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= (53 if document["kind"] == "RayCluster" else 47)
    spec = document["spec"] if document["kind"] == "RayCluster" else document["spec"]["rayClusterConfig"]
    assert spec["rayVersion"], "token authentication needs it"
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        params = group["rayStartParams"]
        assert "labels" not in params, "labels belong in the group's field"
        assert "resources" not in group, "given twice: rayStartParams has num-cpus"
        assert all(isinstance(value, str) for value in params.values())
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never", "autoscaler v2 wants it so"
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert len(group["groupName"]) <= 63
