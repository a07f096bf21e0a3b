"""Small gpt-oss checkpoints for tests: random ones, and ones with chosen tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import hf_specs
from model.config import ModelConfig
from model.fixture import fixture_config, random_tensors, write_checkpoint

TORCH_DTYPE = {"BF16": torch.bfloat16, "U8": torch.uint8}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint on disk in Hugging Face's layout, its config, and its tensors by Hugging Face's names."""

    path: Path
    config: ModelConfig
    tensors: dict[str, Tensor]


def write_tiny(folder: Path, *, vocab_size: int = 1024, num_shards: int = 3, seed: int = 20250805, **size: int) -> Tiny:
    """A random checkpoint; `size` as in `model.fixture.FixtureSize`."""
    config = fixture_config(vocab_size=vocab_size, **size)
    tensors = random_tensors(config, seed)
    write_checkpoint(folder, config, tensors, num_shards=num_shards)
    return Tiny(folder, config, tensors)


def write_chosen(folder: Path, config: ModelConfig, chosen: dict[str, Tensor]) -> Tiny:
    """A checkpoint of zeros but for the tensors whose names end in a key of `chosen`; those are filled with (or set to) the value."""
    tensors = {}
    for name, spec in hf_specs(config).items():
        tensor = torch.zeros(spec.shape, dtype=TORCH_DTYPE[spec.dtypes[0]])
        for ending, value in chosen.items():
            if name.endswith(ending):
                tensor += value.to(tensor.dtype)
        tensors[name] = tensor
    write_checkpoint(folder, config, tensors)
    return Tiny(folder, config, tensors)
