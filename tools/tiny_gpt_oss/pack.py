"""The shipped file and what it expands to: an official-layout checkpoint folder with the full vocabulary.

A packed file is an xz-compressed safetensors file: kept vocabulary rows, MXFP4 blocks and scales, the rest in bf16.
Row 0 of embedding and head stands for every token that is not kept. `expand` is the public entry, used by the fixture
command; the rest serves `train` and `evaluate`.
"""

import json
import lzma
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from tools.tiny_gpt_oss.attention import (
    ROPE_BETA_FAST,
    ROPE_BETA_SLOW,
    ROPE_FACTOR,
    ROPE_ORIGINAL_TOKENS,
    ROPE_THETA,
    SLIDING_WINDOW,
)
from tools.tiny_gpt_oss.mxfp4 import pack_mxfp4, unpack_mxfp4
from tools.tiny_gpt_oss.network import NORM_EPS, SWIGLU_LIMIT, TinyConfig, TinyGptOss
from tools.tiny_gpt_oss.sample import DataError
from tools.tiny_gpt_oss.vocabulary import FULL_VOCABULARY_ROWS, Vocabulary

_VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
_EXPERT_TENSORS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_IDS = "official_ids"
_CONFIG = "tiny_config"
_UNKNOWN_ROW = 0


def _is_expert(name: str) -> bool:
    return name.endswith(_EXPERT_TENSORS)


def save_packed(path: Path, model: TinyGptOss, vocabulary: Vocabulary) -> None:
    """Writes the shipped file: experts to MXFP4, everything else rounded to bf16, kept vocabulary rows only."""
    tensors: dict[str, Tensor] = {_IDS: torch.from_numpy(vocabulary.official_ids).to(torch.int32)}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if _is_expert(name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack_mxfp4(value)
        else:
            rows = vocabulary.num_rows if name in _VOCABULARY_TENSORS else len(value)
            tensors[name] = value[:rows].bfloat16().contiguous()
    raw = save(tensors, metadata={_CONFIG: json.dumps(asdict(model.config))})
    path.write_bytes(lzma.compress(raw, preset=6))


def read_packed(path: Path) -> tuple[TinyConfig, dict[str, Tensor]]:
    """(sizes, tensors) of a packed file. Raises DataError if it is none."""
    try:
        raw = lzma.decompress(path.read_bytes())
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        return TinyConfig(**json.loads(header["__metadata__"][_CONFIG])), load(raw)
    except (lzma.LZMAError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a packed tiny gpt-oss: {error}") from error


def packed_state(model: TinyGptOss) -> dict[str, Tensor]:
    """The state that a packed file would hold, decoded to fp32."""
    state = {}
    for name, value in model.state_dict().items():
        rounded = unpack_mxfp4(*pack_mxfp4(value.detach().cpu())) if _is_expert(name) else value.bfloat16().float()
        state[name] = rounded.to(value.device)
    return state


def load_packed(path: Path) -> tuple[TinyGptOss, Tensor]:
    """(model over compact rows with fp32 copies of the packed weights, official ids of rows 1..)."""
    config, tensors = read_packed(path)
    model = TinyGptOss(config)
    state = model.state_dict()
    for name in state:
        if _is_expert(name):
            state[name] = unpack_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        else:
            state[name][: len(tensors[name])] = tensors[name].float()
    model.load_state_dict(state)
    return model.eval(), tensors[_IDS]


def expand(packed: Path, out: Path) -> None:
    """Writes the checkpoint folder: Hugging Face names, `_blocks`/`_scales`, two shards with an index, configs.

    Raises: DataError if `packed` is not a packed file.
    """
    config, tensors = read_packed(packed)
    ids = tensors.pop(_IDS).long()
    for name in _VOCABULARY_TENSORS:
        kept = tensors[name]
        full = kept[_UNKNOWN_ROW].repeat(FULL_VOCABULARY_ROWS, 1)
        full[ids] = kept[1:]
        tensors[name] = full
    out.mkdir(parents=True, exist_ok=True)
    first = {name: value for name, value in tensors.items() if name in _VOCABULARY_TENSORS}
    second = {name: value for name, value in tensors.items() if name not in first}
    shards = {"model-00000-of-00001.safetensors": first, "model-00001-of-00001.safetensors": second}
    for file, shard in shards.items():
        save_file(shard, out / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(value.nbytes for value in tensors.values())},
        "weight_map": {name: file for file, shard in shards.items() for name in sorted(shard)},
    }
    _write_json(out / "model.safetensors.index.json", index)
    _write_json(out / "config.json", published_config(config))
    _write_json(
        out / "generation_config.json",
        {"bos_token_id": 199998, "do_sample": False, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999},
    )


def published_config(config: TinyConfig) -> dict:
    """config.json in the keys of the published checkpoints."""
    layers = config.num_hidden_layers
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": config.num_experts_per_tok,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initial_context_length": ROPE_ORIGINAL_TOKENS,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "max_position_embeddings": int(ROPE_ORIGINAL_TOKENS * ROPE_FACTOR),
        "model_type": "gpt_oss",
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_local_experts": config.num_local_experts,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": NORM_EPS,
        "rope_scaling": {
            "beta_fast": ROPE_BETA_FAST,
            "beta_slow": ROPE_BETA_SLOW,
            "factor": ROPE_FACTOR,
            "original_max_position_embeddings": ROPE_ORIGINAL_TOKENS,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": ROPE_THETA,
        "router_aux_loss_coef": 0.9,
        "sliding_window": SLIDING_WINDOW,
        "swiglu_limit": SWIGLU_LIMIT,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": FULL_VOCABULARY_ROWS,
    }


def save_checkpoint(out: Path, model: TinyGptOss) -> None:
    """The unrounded weights for further training, in two files: experts in bf16, the rest in fp32."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    experts = {name: value.bfloat16() for name, value in state.items() if _is_expert(name)}
    save_file(experts, out / "checkpoint_experts.safetensors")
    save_file({k: v for k, v in state.items() if k not in experts}, out / "checkpoint_rest.safetensors")


def load_checkpoint(folder: Path, model: TinyGptOss) -> None:
    """Loads what `save_checkpoint` wrote into `model`."""
    state = {}
    for part in ("experts", "rest"):
        path = folder / f"checkpoint_{part}.safetensors"
        if not path.is_file():
            raise DataError(f"no {path}: give the folder of an earlier run")
        state |= {name: value.float() for name, value in load_file(path).items()}
    model.load_state_dict(state)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
