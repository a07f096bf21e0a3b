"""The two attention paths and their masks agree; YaRN has the published numbers."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from tools.tiny_gpt_oss.attention import (
    PackedBlockMasks,
    attend_explicit,
    attend_flex,
    explicit_masks,
    yarn_inverse_frequencies,
)

LENGTHS = (50, 300, 130, 32)  # crosses the window, ends inside a block, has a document within one block


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).int()
    return documents, torch.cat([torch.arange(n) for n in LENGTHS])


def test_yarn_frequencies_are_the_published_ones() -> None:
    frequencies = yarn_inverse_frequencies(64)
    assert frequencies[:4].tolist() == pytest.approx([1.0, 0.6890443, 0.4747820, 0.3271459], abs=1e-6)
    assert frequencies[31].item() == pytest.approx(3.0235114e-7, rel=1e-5)
    assert frequencies.sum().item() == pytest.approx(3.1804383, abs=1e-5)


@pytest.mark.parametrize("kind", [0, 1], ids=["sliding", "full"])
def test_block_masks_are_the_explicit_masks(kind: int) -> None:
    documents, positions = packed()
    block_mask = PackedBlockMasks(len(documents), torch.device("cpu")).update(documents)[kind]
    explicit = explicit_masks(documents[None], positions[None])[kind][0]
    n = len(documents)
    assert torch.equal(flex.create_mask(block_mask.mask_mod, 1, 1, n, n, device="cpu")[0, 0], explicit)
    tiles = explicit.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(block_mask.to_dense()[0, 0].bool(), tiles.any(3).any(1))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", [0, 1], ids=["sliding", "full"])
def test_flex_with_the_sink_equals_the_reference(kind: int) -> None:
    torch.manual_seed(kind)
    documents, positions = packed()
    n = len(documents)
    query, key, value = (torch.randn(1, n, heads, 64) for heads in (8, 2, 2))
    sink = torch.randn(8)
    masks = PackedBlockMasks(n, torch.device("cpu")).update(documents)
    fast = attend_flex(query, key, value, sink, masks[kind])
    slow = attend_explicit(query, key, value, sink, explicit_masks(documents[None], positions[None])[kind])
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
