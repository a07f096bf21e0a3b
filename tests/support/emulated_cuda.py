"""Builds `kernels/cuda/*.cu` for the CPU with `tests/support/cuda/emulation.h`, so that the decode kernels' own code runs in tests."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from kernels import cuda_library

HEADERS = Path(__file__).parent / "cuda"


@cache
def load_emulated(name: str) -> ctypes.CDLL:
    """The library of one source, built with the host compiler. Skips the test where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the emulation of CUDA kernels needs g++")
    source = cuda_library.SOURCES / f"{name}.cu"
    digest = hashlib.sha256()
    for path in (*sorted(HEADERS.glob("*.h")), *sorted(cuda_library.SOURCES.glob("*.cuh")), source):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / "tandem-emulated"
    folder.mkdir(exist_ok=True)
    target = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        built = target.with_suffix(f".{id(digest)}")
        command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-DTANDEM_EMULATE"]
        command += [f"-I{HEADERS}", f"-I{cuda_library.SOURCES}", "-x", "c++", str(source), "-o", str(built)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            pytest.fail(f"g++ failed on {source.name}:\n{result.stderr[-4000:]}")
        built.replace(target)
    return ctypes.CDLL(str(target))


@pytest.fixture
def emulated(monkeypatch):
    """Kernel launches on CPU tensors run in the emulation for this test."""
    monkeypatch.setattr(cuda_library, "load", load_emulated)
    monkeypatch.setattr(cuda_library, "runs", lambda tensor: True)
    monkeypatch.setattr(cuda_library, "multiprocessors", lambda index: 5)
