"""Checkpoints that several tests read: written once per session, never changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.convert import convert_checkpoint
from tests.support.tiny_checkpoint import Tiny, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """8 query heads on 2 KV heads, so that tp 4 and 8 replicate KV; converted to FP8 as well."""
    return _converted(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def tiny_8kv(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """16 query heads on 8 KV heads, so that every tp cuts KV; intermediate of 352: no multiple of 128, uneven in groups of 32."""
    size = {"num_qo_heads": 16, "num_kv_heads": 8, "head_dim": 32, "num_layers": 2, "intermediate_size": 352, "num_experts": 16}
    return _converted(write_tiny(tmp_path_factory.mktemp("tiny_8kv"), **size))


def _converted(checkpoint: Tiny) -> Tiny:
    convert_checkpoint(Path(checkpoint.path))
    return checkpoint
