"""Builds and calls the CUDA C++ sources in `kernels/cuda/`: nvcc to one shared library a source, ctypes to call it.

No torch headers, so a build takes seconds and no ABI ties it to a torch version. Called by the kernels' modules; nothing is
built at import. Libraries are cached under the user's cache folder by a hash of the sources and the compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from common.errors import KernelError, UnsupportedArch

SOURCES = Path(__file__).parent / "cuda"
NAMES = (
    "moe_decode", "dense_decode", "attention_full", "attention_sliding", "decode_fused", "sampling", "peers", "kv_copy", "device_memory",
    "experts_prefill", "expert_rows", "vocabulary",
)  # fmt: skip
FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-shared", "-lineinfo")


def build(name: str) -> Path:
    """Compiles one source unless its library is cached.

    Returns: path of the shared library
    Raises: UnsupportedArch without nvcc; KernelError with the compiler's output when it fails
    """
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        raise UnsupportedArch("the CUDA kernels are compiled at first use and nvcc is not on PATH; install the CUDA toolkit")
    digest = hashlib.sha256(" ".join((nvcc, *FLAGS)).encode())
    for path in (*sorted(SOURCES.glob("*.cuh")), SOURCES / f"{name}.cu"):
        digest.update(path.read_bytes())
    folder = Path.home() / ".cache" / "tandem" / "kernels"
    target = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / target.name
        result = subprocess.run([nvcc, *FLAGS, str(SOURCES / f"{name}.cu"), "-o", str(built)], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise KernelError(f"nvcc failed on {name}.cu:\n{result.stdout}{result.stderr}")
        built.replace(target)
    return target


def build_all(names: tuple[str, ...] = NAMES) -> None:
    """Compiles the sources at the same time, so that the first step waits for the slowest only."""
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(build, names))


@cache
def load(name: str) -> ctypes.CDLL:
    """The library of one source, built when needed."""
    return ctypes.CDLL(str(build(name)))


def runs(tensor: Tensor) -> bool:
    """Whether kernels take this tensor; others go to the plain torch twins."""
    return tensor.is_cuda


def call(name: str, function: str, *arguments: Tensor | int | float | bool | None) -> None:
    """Calls `function` of library `name` on the current stream of the first tensor's device.

    Units: tensors pass as their address, None as a null pointer, int and bool as int32, float as fp32; the stream is added last
    Raises: KernelError when the launch is refused
    """
    device = next(a for a in arguments if isinstance(a, Tensor)).device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    converted = [_convert(a) for a in arguments]
    status = getattr(load(name), function)(*converted, ctypes.c_void_p(stream))
    if status != 0:
        reason = "no instance for this shape" if status == -1 else f"CUDA error {status}"
        raise KernelError(f"{function}: {reason}")


def _convert(argument):
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int(int(argument))


@cache
def multiprocessors(device_index: int) -> int:
    """Streaming multiprocessors of a device: the size of a persistent grid."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count
