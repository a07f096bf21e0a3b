"""Device memory by plain cudaMalloc, which other processes of the host can map by a handle of 64 bytes; and such mappings.

torch's own allocator cuts tensors out of larger pieces and may use virtual memory without handles; this memory has neither problem.
Works where every process sees its own GPU only. Built at first use; needs nvcc. Called by `kv_transfer/device.py`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from common.errors import KernelError
from kernels import cuda_library

HANDLE_BYTES = 64


class DeviceMemory:
    """`nbytes` of zeroed memory of one GPU, freed with the object and the last tensor made from it.

    Raises: KernelError if the device has no room
    """

    def __init__(self, device: torch.device, nbytes: int):
        self.nbytes = nbytes
        self.device_index = device.index or 0
        address = ctypes.c_void_p()
        _check("cudaMalloc", "device_memory_allocate", self.device_index, ctypes.c_ulonglong(nbytes), ctypes.byref(address))
        self.address = int(address.value or 0)

    def __del__(self) -> None:
        address = getattr(self, "address", 0)
        if address:
            cuda_library.load("device_memory").device_memory_free(self.device_index, ctypes.c_void_p(address))

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> Tensor:
        """Returns: [nbytes] uint8 over this memory; keeps it alive"""
        return torch.as_tensor(self, device=torch.device("cuda", self.device_index))

    def handle(self) -> bytes:
        """Returns: what `MappedMemory` of another process of this host needs"""
        data = ctypes.create_string_buffer(HANDLE_BYTES)
        _check("cudaIpcGetMemHandle", "device_memory_export", self.device_index, ctypes.c_void_p(self.address), data)
        return data.raw


class MappedMemory:
    """Another process's memory, mapped for this process's GPU.

    Units: address: for kernels and copies of this process; not a tensor, since its GPU need not be one that this process sees
    Raises: KernelError where driver or hardware don't allow it
    """

    def __init__(self, device: torch.device, handle: bytes):
        self._device_index = device.index or 0
        address = ctypes.c_void_p()
        _check("cudaIpcOpenMemHandle", "device_memory_open", self._device_index, ctypes.c_char_p(handle), ctypes.byref(address))
        self.address = int(address.value or 0)

    def close(self) -> None:
        """Unmaps it. Nothing enqueued may still use it. Effects: waits for the device"""
        address, self.address = self.address, 0
        if address:
            _check("cudaIpcCloseMemHandle", "device_memory_close", self._device_index, ctypes.c_void_p(address))


def plain_copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueues a copy between two addresses by the copy engines: what a benchmark compares kernels with."""
    stream_handle, size = ctypes.c_void_p(stream), ctypes.c_ulonglong(nbytes)
    _check("cudaMemcpyAsync", "device_memory_copy", ctypes.c_void_p(target), ctypes.c_void_p(source), size, stream_handle)


def _check(what: str, function: str, *arguments: object) -> None:
    library = cuda_library.load("device_memory")
    status = getattr(library, function)(*arguments)
    if status != 0:
        library.device_memory_describe_error.restype = ctypes.c_char_p
        raise KernelError(f"{what}: CUDA error {status}, {library.device_memory_describe_error(status).decode()}")
