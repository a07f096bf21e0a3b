"""An official gpt-oss checkpoint on disk, in either published layout, checked as a whole before anything is read.

Owns names, shapes and dtypes of both layouts (Hugging Face's, and that of `original/`); callers use Hugging Face's names for both.
Called by `model/weights.py` and `model/convert.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from common.errors import ConfigError
from model.config import MXFP4_GROUP, ModelConfig
from model.tensor_file import TensorEntry, TensorFile

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor must be. `dtypes`: safetensors names, any of which is taken."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class RowSpan:
    """Rows [first, first + count) of a tensor in a file."""

    name: str
    first: int
    count: int


class Checkpoint:
    """A checkpoint whose headers were all found right. Tensors are views over mapped files, named as by Hugging Face."""

    def __init__(self, files: tuple[TensorFile, ...], spans: dict[str, RowSpan]):
        self.files = files
        self._spans = spans
        self._file_of = {name: file for file in files for name in file.entries}

    def tensor(self, name: str) -> Tensor:
        """Returns: a view of the mapped file, valid as long as this object"""
        span = self._spans[name]
        return self._file_of[span.name].view(span.name)[span.first : span.first + span.count]

    def release(self) -> None:
        """Effects: gives the pages read so far back to the system"""
        for file in self.files:
            file.release()


def open_checkpoint(path: Path, config: ModelConfig) -> Checkpoint:
    """Checks every file and tensor of a checkpoint folder by headers alone.

    Raises: ConfigError listing every absent, truncated or broken file and every missing, unexpected, doubled or wrong tensor
    """
    folder = _weights_folder(path)
    names, index, problems = _shard_names(folder)
    files = tuple(TensorFile(folder / name) for name in names)
    for file in files:
        problems += file.problems
    is_original = any(name.startswith(("block.", "embedding.")) for file in files for name in file.entries)
    spans = original_spans(config) if is_original else {name: RowSpan(name, 0, spec.shape[0]) for name, spec in hf_specs(config).items()}
    problems += _tensor_problems(files, file_specs(config, spans), index)
    if problems:
        raise ConfigError(f"checkpoint {folder} can't be served, {len(problems)} problem(s): " + "; ".join(problems))
    return Checkpoint(files, spans)


def hf_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of the Hugging Face layout, by name."""
    c = config
    norm, dense = ("BF16", "F32"), ("BF16",)
    q_rows, kv_rows = c.num_qo_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = {
        "input_layernorm.weight": TensorSpec((c.hidden_size,), norm),
        "post_attention_layernorm.weight": TensorSpec((c.hidden_size,), norm),
        "self_attn.sinks": TensorSpec((c.num_qo_heads,), norm),
        "self_attn.o_proj.weight": TensorSpec((c.hidden_size, q_rows), dense),
        "self_attn.o_proj.bias": TensorSpec((c.hidden_size,), dense),
        "mlp.router.weight": TensorSpec((c.num_experts, c.hidden_size), dense),
        "mlp.router.bias": TensorSpec((c.num_experts,), dense),
    }
    for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        layer[f"self_attn.{name}_proj.weight"] = TensorSpec((rows, c.hidden_size), dense)
        layer[f"self_attn.{name}_proj.bias"] = TensorSpec((rows,), dense)
    for name, rows, columns in (("gate_up", 2 * c.intermediate_size, c.hidden_size), ("down", c.hidden_size, c.intermediate_size)):
        shape = (c.num_experts, rows, columns // MXFP4_GROUP)
        layer[f"mlp.experts.{name}_proj_blocks"] = TensorSpec((*shape, MXFP4_GROUP // 2), ("U8",))
        layer[f"mlp.experts.{name}_proj_scales"] = TensorSpec(shape, ("U8",))
        layer[f"mlp.experts.{name}_proj_bias"] = TensorSpec((c.num_experts, rows), dense)
    table = TensorSpec((c.vocab_size, c.hidden_size), dense)
    specs = {f"model.layers.{i}.{name}": spec for i in range(c.num_layers) for name, spec in layer.items()}
    return specs | {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": TensorSpec((c.hidden_size,), norm)}


def original_spans(config: ModelConfig) -> dict[str, RowSpan]:
    """Where each Hugging Face tensor lies in the `original/` layout (q, k and v share one tensor there)."""
    specs = hf_specs(config)
    spans = {
        name: RowSpan(original, 0, specs[name].shape[0])
        for name, original in (
            ("model.embed_tokens.weight", "embedding.weight"),
            ("lm_head.weight", "unembedding.weight"),
            ("model.norm.weight", "norm.scale"),
        )
    }
    for layer in range(config.num_layers):
        hf, original = f"model.layers.{layer}.", f"block.{layer}."
        for name, other in _ORIGINAL_NAMES.items():
            spans[hf + name] = RowSpan(original + other, 0, specs[hf + name].shape[0])
        for kind in ("weight", "bias"):
            first = 0
            for part in "qkv":
                name = f"{hf}self_attn.{part}_proj.{kind}"
                spans[name] = RowSpan(f"{original}attn.qkv.{kind}", first, specs[name].shape[0])
                first += specs[name].shape[0]
    return spans


_ORIGINAL_NAMES = {
    "input_layernorm.weight": "attn.norm.scale",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "self_attn.sinks": "attn.sinks",
    "self_attn.o_proj.weight": "attn.out.weight",
    "self_attn.o_proj.bias": "attn.out.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}


def file_specs(config: ModelConfig, spans: dict[str, RowSpan]) -> dict[str, TensorSpec]:
    """The tensors that the files must hold: parts that share one tensor joined along their rows."""
    specs = hf_specs(config)
    joined: dict[str, TensorSpec] = {}
    for name, span in spans.items():
        rows = max(span.first + span.count, joined[span.name].shape[0] if span.name in joined else 0)
        joined[span.name] = TensorSpec((rows, *specs[name].shape[1:]), specs[name].dtypes)
    return joined


def _weights_folder(path: Path) -> Path:
    for folder in (path, path / "original"):
        if (folder / INDEX).is_file() or any(folder.glob("*.safetensors")):
            return folder
    raise ConfigError(f"checkpoint {path}: no .safetensors file and no {INDEX} there nor in its original/ folder")


def _shard_names(folder: Path) -> tuple[list[str], dict[str, str] | None, list[str]]:
    """Returns: file names, the index' map from tensor to file if there is one, problems. Names are never parsed for counts."""
    index_file = folder / INDEX
    present = sorted(file.name for file in folder.glob("*.safetensors"))
    if not index_file.is_file():
        return present, None, []
    try:
        weight_map = json.loads(index_file.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        return present, None, [f"{INDEX}: {type(exc).__name__}: {exc}"]
    outside = [f"{INDEX}: {name!r} is not a file of this folder" for name in names if Path(name).name != name]
    return [name for name in names if Path(name).name == name], weight_map, outside


def _tensor_problems(files: tuple[TensorFile, ...], specs: dict[str, TensorSpec], index: dict[str, str] | None) -> list[str]:
    found: dict[str, tuple[TensorEntry, str]] = {}
    problems = []
    for file in files:
        for name, entry in file.entries.items():
            where = file.path.name
            if name in found:
                problems.append(f"tensor {name} is in {found[name][1]} and in {where}")
            elif index is not None and index.get(name) != where:
                problems.append(f"tensor {name} is in {where}, {INDEX} says {index.get(name, 'nothing of it')}")
            found[name] = (entry, where)
    unreadable = {file.path.name for file in files if file.problems and not file.entries}
    for name, spec in specs.items():
        if name in found:
            problems += _spec_problems(name, found[name][0], spec)
        elif index is None or index.get(name) not in unreadable:
            problems.append(f"tensor {name} is missing")
    return problems + [f"tensor {name} in {where} is not one of gpt-oss" for name, (_, where) in found.items() if name not in specs]


def _spec_problems(name: str, entry: TensorEntry, spec: TensorSpec) -> list[str]:
    problems = []
    if entry.shape != spec.shape:
        problems.append(f"tensor {name} has shape {list(entry.shape)}, expected {list(spec.shape)}")
    if entry.dtype not in spec.dtypes:
        problems.append(f"tensor {name} is {entry.dtype}, expected {' or '.join(spec.dtypes)}")
    return problems
