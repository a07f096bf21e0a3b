"""The tiny trained gpt-oss that ships with the project, and how it becomes an official checkpoint folder.

A packed file is an xz-compressed safetensors file: the vocabulary rows that training used, MXFP4 blocks and scales, the rest in bf16. Row 0
of embedding and head stands for every token without a row of its own. Trained and packed by `tools/tiny_gpt_oss`; never used to serve
anybody. Called by `tandem fixture trained`, the demo and the tests.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from common.errors import ConfigError
from model.fixture import HARMONY_VOCAB, fixture_config, write_checkpoint

PACKED = Path(__file__).parent / "trained" / "tiny_gpt_oss.safetensors.xz"
VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
OFFICIAL_IDS = "official_ids"
SIZES = "tiny_config"
_UNKNOWN_ROW = 0


def write_trained_fixture(out: Path) -> None:
    """Writes the shipped model as a checkpoint folder in the Hugging Face layout (110 M parameters, seconds)."""
    expand(PACKED, out)


def expand(packed: Path, out: Path) -> None:
    """Writes any packed file as a checkpoint folder: two shards with an index, published config spelling.

    Raises: ConfigError if `packed` is no packed file
    """
    sizes, tensors = read_packed(packed)
    ids = tensors.pop(OFFICIAL_IDS).long()
    for name in VOCABULARY_TENSORS:
        kept = tensors[name]
        full = kept[_UNKNOWN_ROW].repeat(HARMONY_VOCAB, 1)
        full[ids] = kept[1:]
        tensors[name] = full
    config = fixture_config(
        vocab_size=HARMONY_VOCAB,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_experts=sizes["num_local_experts"],
        experts_per_token=sizes["num_experts_per_tok"],
        num_qo_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
    )
    write_checkpoint(out, config, tensors, num_shards=2)


def read_packed(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Returns: (sizes as the training wrote them, tensors by Hugging Face name and `official_ids`)

    Raises: ConfigError if `path` is no packed file
    """
    try:
        raw = lzma.decompress(path.read_bytes())
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        sizes, tensors = json.loads(header["__metadata__"][SIZES]), load(raw)
    except (OSError, lzma.LZMAError, ValueError, KeyError) as exc:
        raise ConfigError(f"{path} is not a packed tiny gpt-oss: {exc}") from exc
    if tensors[OFFICIAL_IDS].dtype != torch.int32:
        raise ConfigError(f"{path}: {OFFICIAL_IDS} is {tensors[OFFICIAL_IDS].dtype}, expected int32")
    return sizes, tensors
