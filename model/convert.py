"""`tandem convert`: FP8 expert weights in 128x128 blocks from a checkpoint's MXFP4 ones, written beside it.

Rows keep their order (gate and up interleaved), so biases stay valid as they are. The folder appears whole or not at all.
Called by the CLI; the result is read through `model/fp8_folder.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.errors import ConfigError
from kernels.reference import fp8_dequant_blocks_ref, fp8_quant_blocks_ref, mxfp4_dequant_ref
from model.checkpoint import Checkpoint, open_checkpoint
from model.config import ModelConfig, load_model_config
from model.fp8_folder import (
    FOLDER,
    FORMAT,
    FP8_BLOCK,
    MANIFEST,
    Manifest,
    describe_sources,
    layer_file,
    open_fp8_folder,
    padded,
)


@dataclass(frozen=True)
class ConversionReport:
    """`values`: expert weights in the checkpoint; `exact_values`: those whose FP8 value is the MXFP4 value; `reused`: nothing was done."""

    folder: Path
    values: int
    exact_values: int
    num_bytes: int
    reused: bool

    @property
    def exact_fraction(self) -> float:
        return self.exact_values / self.values


def convert_checkpoint(
    path: Path, *, force: bool = False, device: torch.device | str = "cpu", progress: Callable[[int, int], None] | None = None
) -> ConversionReport:
    """Converts the checkpoint in `path`, one layer in memory at a time; a conversion that is up to date is left alone.

    Units: progress(done, total) counts layers; device: where the arithmetic runs
    Effects: writes `path/tandem-fp8` through a neighbouring folder that is renamed at the end; an older conversion is replaced
    Raises: ConfigError if the checkpoint is damaged, the disk too small, the folder can't be written, or another conversion is at it
    """
    config = load_model_config(path)
    checkpoint = open_checkpoint(path, config)
    with _only_one(path):
        return _convert(path, config, checkpoint, force, torch.device(device), progress)


def _convert(
    path: Path,
    config: ModelConfig,
    checkpoint: Checkpoint,
    force: bool,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> ConversionReport:
    folder = path / FOLDER
    manifest = None if force else _current(path, config, checkpoint)
    if manifest is not None:
        return ConversionReport(folder, manifest.values, manifest.exact_values, sum(manifest.files.values()), reused=True)
    partial = path / f"{FOLDER}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run left
        partial.mkdir()
        _check_disk(path, config)
        manifest = _write_layers(partial, config, checkpoint, device, progress)
        _replace(folder, partial)
    except OSError as exc:
        raise ConfigError(f"FP8 weights can't be written to {path}: {exc.strerror or exc}") from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ConversionReport(folder, manifest.values, manifest.exact_values, sum(manifest.files.values()), reused=False)


def converted_bytes(config: ModelConfig) -> int:
    """Bytes that a conversion takes on disk, headers aside."""
    hidden, inner, wide = padded(config.hidden_size), padded(config.intermediate_size), padded(2 * config.intermediate_size)
    values = config.num_layers * config.num_experts * hidden * (wide + inner)
    return values + values // FP8_BLOCK**2 * 4


def quantise_experts(blocks: Tensor, scales: Tensor, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """MXFP4 to FP8, expert by expert.

    Shapes: blocks [E, R, G, 16] uint8; scales [E, R, G] uint8
    Returns: values [E, R', C'] float8_e4m3fn and scales [E, R'/128, C'/128] fp32 on the CPU; count of values that stayed exact
    """
    experts, rows, groups = scales.shape
    columns = groups * 32
    values = torch.empty((experts, padded(rows), padded(columns)), dtype=torch.float8_e4m3fn)
    block_scales = torch.empty((experts, padded(rows) // FP8_BLOCK, padded(columns) // FP8_BLOCK))
    exact = 0
    for expert in range(experts):
        wanted = mxfp4_dequant_ref(blocks[expert].to(device), scales[expert].to(device))
        q, scale = fp8_quant_blocks_ref(wanted)
        exact += int((fp8_dequant_blocks_ref(q, scale, rows, columns) == wanted).sum())
        values[expert], block_scales[expert] = q, scale
    return values, block_scales, exact


def _write_layers(
    out: Path, config: ModelConfig, checkpoint: Checkpoint, device: torch.device, progress: Callable[[int, int], None] | None
) -> Manifest:
    files: dict[str, int] = {}
    count = exact = 0
    for layer in range(config.num_layers):
        tensors = {}
        for name in ("gate_up", "down"):
            prefix = f"model.layers.{layer}.mlp.experts.{name}_proj"
            blocks, scales = checkpoint.tensor(prefix + "_blocks"), checkpoint.tensor(prefix + "_scales")
            tensors[name + ".values"], tensors[name + ".scales"], exact_here = quantise_experts(blocks, scales, device)
            checkpoint.release()
            count += 2 * blocks.numel()
            exact += exact_here
        file = out / layer_file(layer)
        save_file(tensors, file)
        _flush(file)
        files[file.name] = file.stat().st_size
        if progress:
            progress(layer + 1, config.num_layers)
    manifest = Manifest(FORMAT, describe_sources(checkpoint), files, count, exact)
    (out / MANIFEST).write_text(manifest.to_json())
    _flush(out / MANIFEST)
    return manifest


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds the checkpoint folder against a second conversion; the lock ends with the process."""
    folder = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as exc:
        raise ConfigError(f"another conversion of {path} is running") from exc
    finally:
        os.close(folder)


def _current(path: Path, config: ModelConfig, checkpoint: Checkpoint) -> Manifest | None:
    try:
        return open_fp8_folder(path, config, checkpoint).manifest
    except ConfigError:
        return None


def _check_disk(path: Path, config: ModelConfig) -> None:
    free, wanted = shutil.disk_usage(path).free, converted_bytes(config)
    if free < wanted:
        raise ConfigError(f"FP8 weights take {wanted / 1e9:.1f} GB, {path} has {free / 1e9:.1f} GB free")


def _replace(folder: Path, partial: Path) -> None:
    old = folder.with_name(f"{FOLDER}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _flush(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
