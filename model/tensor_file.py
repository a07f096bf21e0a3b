"""One safetensors file: its header checked against its size, its tensors as memory-mapped views.

Reads no tensor data until asked, and gives pages back after use, so that a loader's host memory does not grow with the file.
Called by `model/checkpoint.py` and `model/fp8_folder.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100 << 20
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the header describes it. `begin`, `end`: bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A safetensors file. `problems` says what is wrong with it; `entries` is what its header describes, as far as it could be read.

    Only a file without problems may be viewed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []
        self.entries: dict[str, TensorEntry] = {}
        self.num_bytes = 0
        self.header_sha256 = ""
        self._map: mmap.mmap | None = None
        try:
            self._read_header()
        except OSError as exc:
            self.problems.append(f"file {path.name}: {exc.strerror or exc}")
        except _BadHeader as exc:
            self.problems.append(f"file {path.name}: {exc}")

    def view(self, name: str) -> Tensor:
        """Returns: the tensor over the mapped file; don't write to it"""
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = (entry.end - entry.begin) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)

    def release(self) -> None:
        """Effects: pages read so far leave this process' memory; views stay valid and would read them again"""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read_header(self) -> None:
        with self.path.open("rb") as file:
            self.num_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if self.num_bytes < 8 or length > min(MAX_HEADER_BYTES, self.num_bytes - 8):
                raise _BadHeader(f"truncated or not safetensors: {self.num_bytes} bytes, its header would have {length}")
            header = file.read(length)
        self.header_sha256 = hashlib.sha256(header).hexdigest()
        self.entries = _parse_header(header)
        end = _check_spans(self.entries, 8 + length)
        if end != self.num_bytes:
            kind = "truncated" if self.num_bytes < end else "too long"
            raise _BadHeader(f"{kind}: {self.num_bytes} bytes, its header describes {end}")


class _BadHeader(Exception):
    pass


def _parse_header(header: bytes) -> dict[str, TensorEntry]:
    try:
        tree = json.loads(header)
        tree.pop("__metadata__", None)
        base = 8 + len(header)
        return {name: _parse_entry(item, base) for name, item in tree.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _BadHeader(f"broken safetensors header ({type(exc).__name__}: {exc})") from exc


def _parse_entry(item: dict, base: int) -> TensorEntry:
    shape = tuple(item["shape"])
    begin, end = item["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"shape {shape}, offsets {begin}, {end}")
    return TensorEntry(str(item["dtype"]), shape, base + begin, base + end)


def _check_spans(entries: dict[str, TensorEntry], base: int) -> int:
    """Tensors must follow each other without gap or overlap, each as long as its shape says. Returns the end."""
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position or entry.end < position:
            raise _BadHeader(f"broken safetensors header: {name} lies at [{entry.begin}, {entry.end}), expected to start at {position}")
        known = DTYPES.get(entry.dtype)
        if known is not None and entry.end - entry.begin != math.prod(entry.shape) * known.itemsize:
            raise _BadHeader(f"broken safetensors header: {name} is {entry.dtype} {entry.shape} in {entry.end - entry.begin} bytes")
        position = entry.end
    return position
