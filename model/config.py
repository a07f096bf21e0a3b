"""The numbers of one gpt-oss checkpoint, read from either spelling of its config, and which layouts can serve it.

Owns parsing and checking of `config.json`; opens no weights. Called by the controller (to refuse a config early), every rank and the CLI.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.kv_layout import KVGeometry

MXFP4_GROUP = 32
RETURN_TOKEN, CALL_TOKEN = 200002, 200012  # what ends an assistant's action in Harmony


@dataclass(frozen=True)
class ModelConfig:
    """gpt-oss in numbers.

    Units: window_tokens: keys a sliding layer's query sees, itself included; max_position [tokens]; sliding[l]: layer l slides
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    window_tokens: int
    sliding: tuple[bool, ...]
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float
    rope_original_context: int
    rope_beta_fast: float
    rope_beta_slow: float
    swiglu_alpha: float
    swiglu_limit: float
    max_position: int
    eos_token_ids: tuple[int, ...]

    def kv_geometry(self, block_size: int, dtype: str) -> KVGeometry:
        """Units: block_size [tokens]; dtype "bfloat16" or "float32" of the KV cache"""
        return KVGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size_tokens=block_size,
            dtype=dtype,
            window_tokens=self.window_tokens,
            sliding=self.sliding,
        )


def config_folder(path: Path) -> Path:
    """The folder that holds the checkpoint's `config.json`: `path` itself, else its `original/`.

    Raises: ConfigError if neither has one
    """
    for folder in (path, path / "original"):
        if (folder / "config.json").is_file():
            return folder
    raise ConfigError(f"model {path}: no config.json there nor in its original/ folder; expected an official gpt-oss checkpoint folder")


def load_model_config(path: Path) -> ModelConfig:
    """Reads a checkpoint folder's config in Hugging Face's spelling (old or new) or in that of `original/`.

    Raises: ConfigError listing everything that is missing, wrong or not gpt-oss
    """
    file = config_folder(path) / "config.json"
    tree = _read_object(file)
    generation = file.with_name("generation_config.json")
    fields = _Fields(tree)
    config = _parse(fields, _read_object(generation) if generation.is_file() else {})
    if not fields.problems:
        fields.problems += _inconsistencies(config, tree)
    if fields.problems:
        raise ConfigError(f"{file}: " + "; ".join(fields.problems))
    return config


def check_layout(config: ModelConfig, tp: int, ep: int) -> None:
    """Refuses a layout that this model can't be cut into, with every reason.

    Raises: ConfigError
    """
    reasons = []
    if tp not in (1, 2, 4, 8):
        reasons.append(f"tp is {tp}; 1, 2, 4 and 8 exist")
    elif ep not in (1, tp):
        reasons.append(f"ep is {ep}; it must be 1 or equal tp ({tp})")
    if tp < 1 or ep < 1:
        raise ConfigError(f"layout tp {tp}, ep {ep}: " + "; ".join(reasons))
    if config.num_qo_heads % tp:
        reasons.append(f"{config.num_qo_heads} query heads can't be shared by {tp} ranks")
    if config.num_kv_heads % tp and tp % config.num_kv_heads:
        reasons.append(f"{config.num_kv_heads} KV heads and tp {tp}: one must divide the other")
    if config.num_experts % ep:
        reasons.append(f"{config.num_experts} experts can't be shared by {ep} ranks")
    if config.vocab_size < tp:
        reasons.append(f"vocabulary of {config.vocab_size} is smaller than tp {tp}")
    if reasons:
        raise ConfigError(f"layout tp {tp}, ep {ep}: " + "; ".join(reasons))


def _read_object(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{file}: {exc}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(tree).__name__}")
    return tree


class _Fields:
    """Typed look-ups that collect problems instead of stopping at the first."""

    def __init__(self, tree: dict[str, Any]):
        rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
        self.tree = tree
        self.rope = rope if isinstance(rope, dict) else {}
        self.problems: list[str] = [] if isinstance(rope, dict) else ["rope_parameters / rope_scaling: expected an object"]

    def integer(self, *names: str, default: int | None = None) -> int:
        return self._number(names, default, "a whole number above 0", lambda x: type(x) is int and x > 0) or 0

    def real(self, *names: str, default: float | None = None) -> float:
        return float(self._number(names, default, "a number above 0", lambda x: type(x) in (int, float) and 0 < x < float("inf")) or 0)

    def _number(self, names: tuple[str, ...], default: Any, kind: str, is_ok: Callable[[Any], bool]) -> Any:
        for name in names:
            tree = self.rope if name.startswith("rope.") else self.tree
            value = tree.get(name.removeprefix("rope."))
            if value is None:
                continue
            if is_ok(value):
                return value
            self.problems.append(f"{name} is {value!r}; expected {kind}")
            return None
        if default is None:
            self.problems.append(f"{' or '.join(names)} is missing")
        return default


def _parse(get: _Fields, generation: dict[str, Any]) -> ModelConfig:
    num_layers = get.integer("num_hidden_layers")
    factor = get.real("rope.factor", "rope_scaling_factor")
    original = get.integer("rope.original_max_position_embeddings", "initial_context_length")
    vocab_size = get.integer("vocab_size")
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=get.integer("hidden_size"),
        intermediate_size=get.integer("intermediate_size"),
        num_experts=get.integer("num_local_experts", "num_experts"),
        experts_per_token=get.integer("num_experts_per_tok", "experts_per_token"),
        num_qo_heads=get.integer("num_attention_heads"),
        num_kv_heads=get.integer("num_key_value_heads"),
        head_dim=get.integer("head_dim"),
        vocab_size=vocab_size,
        window_tokens=get.integer("sliding_window"),
        sliding=_sliding_layers(get, num_layers),
        rms_norm_eps=get.real("rms_norm_eps", default=1e-5),
        rope_theta=get.real("rope.rope_theta", "rope_theta"),
        rope_factor=factor,
        rope_original_context=original,
        rope_beta_fast=get.real("rope.beta_fast", "rope_ntk_beta", default=32.0),
        rope_beta_slow=get.real("rope.beta_slow", "rope_ntk_alpha", default=1.0),
        swiglu_alpha=get.real("swiglu_alpha", default=1.702),
        swiglu_limit=get.real("swiglu_limit", default=7.0),
        max_position=get.integer("max_position_embeddings", default=int(original * factor)),
        eos_token_ids=_eos_ids(get, generation, vocab_size),
    )


def _sliding_layers(get: _Fields, num_layers: int) -> tuple[bool, ...]:
    kinds = get.tree.get("layer_types")
    if kinds is None:
        return tuple(layer % 2 == 0 for layer in range(num_layers))
    known = {"sliding_attention": True, "full_attention": False}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        get.problems.append(f"layer_types: expected {num_layers} entries of {sorted(known)}")
        return ()
    return tuple(known[kind] for kind in kinds)


def _eos_ids(get: _Fields, generation: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """What the checkpoint names, and with Harmony's vocabulary always its two ends of an action (`config.json` names one of them)."""
    named = generation.get("eos_token_id", get.tree.get("eos_token_id"))
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if any(type(token) is not int or not 0 <= token < max(vocab_size, 1) for token in ids):
        get.problems.append(f"eos_token_id is {named!r}; expected ids below the vocabulary of {vocab_size}")
        return ()
    harmony = (RETURN_TOKEN, CALL_TOKEN) if vocab_size > CALL_TOKEN else ()
    return tuple(sorted({*ids, *harmony}))


def _inconsistencies(config: ModelConfig, tree: dict[str, Any]) -> list[str]:
    """Numbers that don't fit each other, and settings under which the model would not be gpt-oss."""
    rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    checks = [
        (
            config.num_qo_heads % config.num_kv_heads == 0,
            f"{config.num_qo_heads} query heads, {config.num_kv_heads} KV heads: not a multiple",
        ),
        (config.head_dim % 2 == 0, f"head_dim {config.head_dim} is odd; rotary embedding needs halves"),
        (config.experts_per_token <= config.num_experts, f"{config.experts_per_token} of {config.num_experts} experts per token"),
        (config.hidden_size % MXFP4_GROUP == 0, f"hidden_size {config.hidden_size} is not a multiple of {MXFP4_GROUP}, an MXFP4 group"),
        (config.intermediate_size % MXFP4_GROUP == 0, f"intermediate_size {config.intermediate_size} is not a multiple of {MXFP4_GROUP}"),
        (tree.get("model_type", "gpt_oss") == "gpt_oss", f"model_type is {tree.get('model_type')!r}; only gpt_oss is served"),
        (rope.get("rope_type", "yarn") == "yarn", f"rope_type is {rope.get('rope_type')!r}; gpt-oss uses yarn"),
        (not rope.get("truncate", False), "rope truncate is true; gpt-oss was trained with unrounded YaRN bounds (false)"),
        (tree.get("attention_bias", True) is True, "attention_bias is false; gpt-oss has biases"),
        (not tree.get("tie_word_embeddings", False), "tie_word_embeddings is true; gpt-oss has its own lm_head"),
    ]
    return [message for is_ok, message in checks if not is_ok]
