"""Whatever is rendered, from presets and from thirty generated value sets, is valid and keeps the rules that hold for every pod."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from common.config import load_config, parse_config
from tests.support.chart import CHART, Rendered, helm, render, validate
from tests.support.chart_values import generated_values

PRESETS = ["20b-1xh200", "120b-8xh200", "cpu"]
EVERYBODY = re.compile(r"0\.0\.0\.0|\[::\]")
MAY_LISTEN_EVERYWHERE = {"router.listen", "cluster.controller_listen", "metrics.host", "frontend.listen"}
QUANTITY = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_pass_the_linter(preset):
    result = helm("lint", "--strict", str(CHART), "-f", str(CHART / f"values-{preset}.yaml"))
    assert result.returncode == 0, result.stdout


def test_every_preset_is_tested():
    assert {path.stem for path in CHART.glob("values-*.yaml")} == {f"values-{preset}" for preset in PRESETS}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_keep_the_rules(preset, tmp_path):
    rendered = render(preset=preset)
    check(rendered, tmp_path)
    validate(rendered)


@pytest.mark.parametrize("seed", range(30))
def test_generated_values_are_valid_and_keep_the_rules(seed, tmp_path):
    values = generated_values(seed)
    rendered = render(values)
    check(rendered, tmp_path)
    assert pools_of(config_of(rendered, tmp_path)) == pools_of(parse_config({key: values[key] for key in ("model", "pools", "autoscale")}))
    validate(rendered)


def test_a_config_file_is_a_values_file(tmp_path):
    for path in sorted((CHART.parents[1] / "examples" / "configs").glob("gpt-oss-*.yaml")):
        rendered = render(yaml.safe_load(path.read_text()))
        assert pools_of(config_of(rendered, tmp_path)) == pools_of(load_config(path))


def config_of(rendered: Rendered, folder: Path):
    (folder / "config.yaml").write_text(rendered.config)
    return load_config(folder / "config.yaml")


def pools_of(config):
    """The pools, without the label that sends each to pods of its own."""
    return [
        pool.model_copy(update={"node_labels": {k: v for k, v in pool.node_labels.items() if k != "tandem.dev/pool"}})
        for pool in config.pools
    ]


def check(rendered: Rendered, folder: Path) -> None:
    config = config_of(rendered, folder)
    for where, container in rendered.containers():
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys() & resources["limits"].keys(), where
        for name, amount in resources["requests"].items():
            assert amount_of(amount) <= amount_of(resources["limits"][name]), f"{where} {name}"
        tag = container["image"].rpartition(":")[2]
        assert tag not in ("", "latest", container["image"]), where
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False, where
        assert context["capabilities"]["drop"] == ["ALL"], where
        told = [*container.get("command", []), *container.get("args", [])]
        for word in told:
            assert not EVERYBODY.search(word), f"{where}: {word}"
    for where, pod in rendered.pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, where
        assert pod["securityContext"]["runAsUser"] > 0, where
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", where
        assert pod["topologySpreadConstraints"], where
        assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")), where
        mounted = {m["name"] for c in [*pod.get("initContainers", []), *pod["containers"]] for m in c["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}, where
    assert {path for path, value in leaves(yaml.safe_load(rendered.config)) if EVERYBODY.search(str(value))} - {
        "frontend.grpc_listen"
    } == MAY_LISTEN_EVERYWHERE
    dashboard = rendered.ray["headGroupSpec"]["rayStartParams"]["dashboard-host"]
    assert dashboard == ("127.0.0.1" if rendered.has("RayCluster") else "0.0.0.0")  # the operator of a RayService must reach it
    for pool in config.pools:
        group = rendered.group(pool.name)
        ray_worker = group["template"]["spec"]["containers"][0]
        gpus = 0 if config.cluster.device == "cpu" else pool.layout.tp
        assert group["rayStartParams"]["num-gpus"] == str(gpus)
        offered = [name for name in ray_worker["resources"]["limits"] if name not in ("cpu", "memory")]
        assert [ray_worker["resources"]["limits"][name] for name in offered] == [str(gpus)] * bool(gpus)
        assert group["labels"] == pool.node_labels, "a group asks for the nodes that its pods are"
        assert group["labels"]["tandem.dev/pool"] == pool.name
    shown = str([document for document in rendered if document["kind"] != "Secret"])
    for secret in (document for document in rendered if document["kind"] == "Secret"):
        assert not any(value in shown for value in secret["data"].values()), "a secret stands outside its Secret"


def leaves(node, path=""):
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}.{index}")
    else:
        yield path, node


def amount_of(quantity) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(quantity)).groups()
    return float(number) * QUANTITY[unit]
