"""Writes gpt-oss checkpoints in the official layouts: a tiny random one with known numbers, or any dense tensors handed in.

Random weights are for numbers, not for sense. Called by `tandem fixture`, the demo and the tests; nothing here is used to serve.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.reference import mxfp4_dequant_ref, mxfp4_quant_ref
from model.checkpoint import INDEX, hf_specs, original_spans
from model.config import CALL_TOKEN, RETURN_TOKEN, ModelConfig

DEFAULT_SEED = 20250805
HARMONY_VOCAB = 201088
Layout = Literal["hf", "original"]


@dataclass(frozen=True)
class FixtureSize:
    """What a random checkpoint may vary. Hidden and intermediate size differ on purpose: equal ones hide a transposition."""

    vocab_size: int = HARMONY_VOCAB
    num_layers: int = 4
    hidden_size: int = 256
    intermediate_size: int = 192
    num_experts: int = 8
    experts_per_token: int = 4
    num_qo_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64


def fixture_config(**size: int) -> ModelConfig:
    """The config of a random checkpoint; keywords as in `FixtureSize`. All else is as published."""
    chosen = replace(FixtureSize(), **size)
    has_harmony = chosen.vocab_size > CALL_TOKEN
    return ModelConfig(
        **vars(chosen),
        window_tokens=128,
        sliding=tuple(layer % 2 == 0 for layer in range(chosen.num_layers)),
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_factor=32.0,
        rope_original_context=4096,
        rope_beta_fast=32.0,
        rope_beta_slow=1.0,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        max_position=131072,
        eos_token_ids=(RETURN_TOKEN, CALL_TOKEN) if has_harmony else (2,),
    )


def write_random_fixture(
    out: Path, *, layout: Layout = "hf", num_shards: int = 1, with_index: bool | None = None, seed: int = DEFAULT_SEED, **size: int
) -> ModelConfig:
    """Writes a small random gpt-oss. The same size and seed give the same bytes everywhere.

    Units: size: keywords as in `FixtureSize`; num_shards: files (Hugging Face layout); with_index: write the index file (default: if
        there are several shards)
    Returns: the config of what was written
    Effects: files in `out` (layout "hf") or `out/original`
    """
    config = fixture_config(**size)
    write_checkpoint(out, config, random_tensors(config, seed), layout=layout, num_shards=num_shards, with_index=with_index)
    return config


def random_tensors(config: ModelConfig, seed: int = DEFAULT_SEED) -> dict[str, Tensor]:
    """Tensors of the Hugging Face layout, drawn in the order of the sorted names of the dense model, all exact in bf16.

    Returns: by name: bf16, and uint8 blocks and scales for the experts' matrices
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(_dense_shapes(config).items()):
        draw = torch.from_numpy(rng.standard_normal(shape, dtype=np.float64).astype(np.float32))
        if name.endswith(("gate_up_proj", "down_proj")):  # drawn [E, in, out]; stored [E, out, in]
            tensors[name + "_blocks"], tensors[name + "_scales"] = mxfp4_quant_ref((draw * 0.12).transpose(1, 2).contiguous())
        else:
            tensors[name] = (1.0 + 0.1 * draw if "norm" in name else _spread(name) * draw).to(torch.bfloat16)
    return tensors


def dense_tensors(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint as `transformers` holds it in memory: experts decoded and as [E, in, out], bf16."""
    dense = {}
    for name in _dense_shapes(config):
        if name in tensors:
            dense[name] = tensors[name]
        else:
            dense[name] = (
                mxfp4_dequant_ref(tensors[name + "_blocks"], tensors[name + "_scales"], torch.bfloat16).transpose(1, 2).contiguous()
            )
    return dense


def write_checkpoint(
    out: Path,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    *,
    layout: Layout = "hf",
    num_shards: int = 1,
    with_index: bool | None = None,
) -> None:
    """Writes tensors (Hugging Face names, experts as blocks and scales) in an official layout, with its config files.

    Effects: files in `out` (layout "hf") or `out/original`
    """
    if layout == "original":
        _write_original(out / "original", config, tensors)
        return
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / "config.json", _hf_config(config))
    _write_json(out / "generation_config.json", {"eos_token_id": list(config.eos_token_ids), "do_sample": True})
    names = sorted(hf_specs(config))
    size = -(-len(names) // num_shards)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        # counted from 0 "of" the last number, as in the published checkpoints
        file = "model.safetensors" if num_shards == 1 else f"model-{shard:05d}-of-{num_shards - 1:05d}.safetensors"
        part = names[shard * size : (shard + 1) * size]
        save_file({name: tensors[name].contiguous() for name in part}, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if num_shards > 1 if with_index is None else with_index:
        total = sum(tensors[name].nbytes for name in names)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_original(out: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, span in original_spans(config).items():
        parts.setdefault(span.name, []).append((span.first, tensors[name]))
    joined = {name: torch.cat([tensor for _, tensor in sorted(items, key=lambda item: item[0])]) for name, items in parts.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(joined, out / "model.safetensors")
    _write_json(out / "config.json", _original_config(config))


def _dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model in `transformers`' memory."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, spec in hf_specs(config).items():
        if name.endswith("_blocks"):
            experts, rows, groups, _ = spec.shape
            shapes[name.removesuffix("_blocks")] = (experts, groups * 32, rows)
        elif not name.endswith("_scales"):
            shapes[name] = spec.shape
    return shapes


def _spread(name: str) -> float:
    if name.endswith("sinks") or "embed_tokens" in name:
        return 1.0
    if "lm_head" in name:
        return 0.15
    return 0.1 if name.endswith("bias") else 0.08


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    """`config.json` in the published spelling."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "experts_per_token": config.experts_per_token,
        "num_attention_heads": config.num_qo_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "sliding_window": config.window_tokens,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in config.sliding],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "beta_fast": config.rope_beta_fast,
            "beta_slow": config.rope_beta_slow,
            "original_max_position_embeddings": config.rope_original_context,
            "truncate": False,
        },
        "initial_context_length": config.rope_original_context,
        "max_position_embeddings": config.max_position,
        "swiglu_limit": config.swiglu_limit,
        "hidden_act": "silu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": 199999 if config.vocab_size > CALL_TOKEN else 1,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    }


def _original_config(config: ModelConfig) -> dict[str, Any]:
    """`original/config.json`; it names no end-of-sequence ids."""
    return {
        "num_hidden_layers": config.num_layers,
        "num_experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "swiglu_limit": config.swiglu_limit,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_qo_heads,
        "num_key_value_heads": config.num_kv_heads,
        "sliding_window": config.window_tokens,
        "initial_context_length": config.rope_original_context,
        "rope_theta": config.rope_theta,
        "rope_scaling_factor": config.rope_factor,
        "rope_ntk_alpha": config.rope_beta_slow,
        "rope_ntk_beta": config.rope_beta_fast,
    }


def _write_json(file: Path, tree: dict[str, Any]) -> None:
    file.write_text(json.dumps(tree, indent=2) + "\n")
