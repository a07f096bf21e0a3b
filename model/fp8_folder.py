"""The folder of FP8 expert weights beside a checkpoint: its names, its manifest, and whether it still belongs to the checkpoint.

Written whole or not at all by `model/convert.py`, read by `model/weights.py`. One file per layer; biases stay in the checkpoint, because
rows keep their order.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from common.errors import ConfigError
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.tensor_file import TensorFile

FOLDER = "tandem-fp8"
MANIFEST = "manifest.json"
FORMAT = 1
FP8_BLOCK = 128
_SAMPLES, _SAMPLE_BYTES = 64, 4096


@dataclass(frozen=True)
class SourceFile:
    """A checkpoint file as it was when it was converted. `samples_sha256`: over bytes at fixed places of the file."""

    name: str
    num_bytes: int
    mtime_ns: int
    header_sha256: str
    samples_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a conversion read and wrote. `values`, `exact_values`: expert weights, and those among them equal to the MXFP4 value."""

    format: int
    sources: tuple[SourceFile, ...]
    files: dict[str, int]
    values: int
    exact_values: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def layer_file(layer: int) -> str:
    return f"layer-{layer:05d}.safetensors"


def padded(size: int) -> int:
    """`size` rounded up to whole FP8 blocks."""
    return -(-size // FP8_BLOCK) * FP8_BLOCK


def describe_sources(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    """Effects: reads a few pages of each file"""
    return tuple(
        SourceFile(file.path.name, file.num_bytes, file.path.stat().st_mtime_ns, file.header_sha256, _sample(file))
        for file in checkpoint.files
    )


class Fp8Folder:
    """FP8 experts that belong to the checkpoint beside them. Tensors are views over mapped files."""

    def __init__(self, files: tuple[TensorFile, ...], manifest: Manifest):
        self._files = files
        self.manifest = manifest

    def tensor(self, layer: int, name: str) -> Tensor:
        """Returns: `gate_up.values`, `gate_up.scales`, `down.values` or `down.scales` of a layer, over the mapped file"""
        return self._files[layer].view(name)

    def release(self, layer: int) -> None:
        """Effects: gives the pages read so far back to the system"""
        self._files[layer].release()


def open_fp8_folder(path: Path, config: ModelConfig, checkpoint: Checkpoint) -> Fp8Folder:
    """Opens what `tandem convert` wrote.

    Raises: ConfigError listing what is absent, stale or damaged, and saying to run `tandem convert`
    """
    folder = path / FOLDER
    manifest, problems = _read_manifest(folder)
    files: list[TensorFile] = []
    if manifest is not None:
        problems += _stale_sources(manifest, checkpoint)
        files = [TensorFile(folder / layer_file(layer)) for layer in range(config.num_layers)]
        for file in files:
            problems += file.problems or _layer_problems(file, config, manifest)
    if problems or manifest is None:
        raise ConfigError(f"FP8 weights {folder}: " + "; ".join(problems) + f"; run `tandem convert {path}`")
    return Fp8Folder(tuple(files), manifest)


def _read_manifest(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest, or None and why not."""
    try:
        tree = json.loads((folder / MANIFEST).read_bytes())
        manifest = Manifest(
            format=tree["format"],
            sources=tuple(SourceFile(**source) for source in tree["sources"]),
            files=dict(tree["files"]),
            values=tree["values"],
            exact_values=tree["exact_values"],
        )
    except FileNotFoundError:
        return None, ["not there" if not folder.is_dir() else f"{MANIFEST} is missing"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return None, [f"{MANIFEST} can't be read ({type(exc).__name__}: {exc})"]
    if manifest.format != FORMAT:
        return None, [f"written in format {manifest.format}, this version reads {FORMAT}"]
    return manifest, []


def _stale_sources(manifest: Manifest, checkpoint: Checkpoint) -> list[str]:
    """What changed in the checkpoint since it was converted. A changed mtime alone (a copy) is looked into, not refused."""
    then = {source.name: source for source in manifest.sources}
    now = {file.path.name: file for file in checkpoint.files}
    problems = [f"checkpoint file {name} was not there when it was converted" for name in now.keys() - then.keys()]
    problems += [f"checkpoint file {name} is gone since" for name in then.keys() - now.keys()]
    for name in sorted(then.keys() & now.keys()):
        source, file = then[name], now[name]
        same = (source.num_bytes, source.header_sha256) == (file.num_bytes, file.header_sha256)
        if same and source.mtime_ns != file.path.stat().st_mtime_ns:
            same = source.samples_sha256 == _sample(file)
        if not same:
            problems.append(f"checkpoint file {name} has changed since")
    return problems


def _layer_problems(file: TensorFile, config: ModelConfig, manifest: Manifest) -> list[str]:
    experts, hidden, inner = config.num_experts, padded(config.hidden_size), padded(config.intermediate_size)
    wide = padded(2 * config.intermediate_size)
    expected = {
        "gate_up.values": ("F8_E4M3", (experts, wide, hidden)),
        "gate_up.scales": ("F32", (experts, wide // FP8_BLOCK, hidden // FP8_BLOCK)),
        "down.values": ("F8_E4M3", (experts, hidden, inner)),
        "down.scales": ("F32", (experts, hidden // FP8_BLOCK, inner // FP8_BLOCK)),
    }
    found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    problems = [] if found == expected else [f"file {file.path.name} holds {found}, expected {expected}"]
    if manifest.files.get(file.path.name) != file.num_bytes:
        problems.append(f"file {file.path.name} has {file.num_bytes} bytes, {MANIFEST} says {manifest.files.get(file.path.name)}")
    return problems


def _sample(file: TensorFile) -> str:
    digest = hashlib.sha256()
    with file.path.open("rb") as stream:
        for i in range(_SAMPLES):
            stream.seek(i * max(file.num_bytes - _SAMPLE_BYTES, 0) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
