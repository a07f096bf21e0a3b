"""Index tensors of a step, value by value."""

from __future__ import annotations

import pytest
import torch

from common.errors import ServingError
from model.batch import SequenceView, build_batch, build_decode_batch, build_prefill_batch

LONG = SequenceView(token_ids=[5, 6, 7], start=30, full_blocks=[9, 4, 2], sliding_first=1, sliding_blocks=[8, 3])
SHORT = SequenceView(token_ids=[1], start=0, full_blocks=[7], sliding_first=0, sliding_blocks=[6])
IDLE = SequenceView(token_ids=[], start=20, full_blocks=[1, 5], sliding_first=1, sliding_blocks=[2])


def test_two_sequences_become_one_ragged_batch():
    batch = build_batch([LONG, SHORT], 16, "cpu", "last")
    assert batch.token_ids.tolist() == [5, 6, 7, 1]
    assert batch.positions.tolist() == [30, 31, 32, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [33, 1]
    assert batch.logits_rows.tolist() == [2, 3]
    assert batch.full.block_table.tolist() == [[9, 4, 2], [7, -1, -1]]
    assert batch.full.kv_start.tolist() == [0, 0]
    assert batch.full.slot_mapping.tolist() == [4 * 16 + 14, 4 * 16 + 15, 2 * 16, 7 * 16]
    assert batch.sliding.block_table.tolist() == [[8, 3], [6, -1]]
    assert batch.sliding.kv_start.tolist() == [16, 0]
    assert batch.sliding.slot_mapping.tolist() == [8 * 16 + 14, 8 * 16 + 15, 3 * 16, 6 * 16]


def test_dtypes_are_those_of_the_contract():
    batch = build_batch([LONG], 16, "cpu", "all")
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.logits_rows)} == {torch.int64}
    assert {t.dtype for t in (batch.full.slot_mapping, batch.sliding.slot_mapping)} == {torch.int64}
    assert {t.dtype for t in (batch.cu_seqlens_q, batch.seq_lens, batch.full.block_table, batch.full.kv_start)} == {torch.int32}


@pytest.mark.parametrize(("logits", "rows"), [("last", [2, 3]), ("all", [0, 1, 2, 3]), ("none", [])])
def test_wanted_rows(logits, rows: list[int]):
    assert build_batch([LONG, IDLE, SHORT], 16, "cpu", logits).logits_rows.tolist() == rows


def test_a_token_whose_sliding_block_is_gone_or_not_yet_there_has_no_slot():
    gone = SequenceView(token_ids=list(range(40)), start=0, full_blocks=[0, 1, 2], sliding_first=1, sliding_blocks=[5])
    slots = build_batch([gone], 16, "cpu", "none").sliding.slot_mapping.tolist()
    assert slots == [-1] * 16 + list(range(80, 96)) + [-1] * 8


def test_a_token_without_a_full_block_is_refused():
    with pytest.raises(ServingError, match="2 full blocks of 16 tokens can't hold 33"):
        build_batch([SequenceView([1, 2, 3], 30, [9, 4], 1, [8, 3])], 16, "cpu", "last")


def test_no_sequences_make_an_empty_batch():
    batch = build_batch([], 16, "cpu", "last")
    assert batch.token_ids.shape == (0,)
    assert batch.cu_seqlens_q.tolist() == [0]
    assert batch.full.block_table.shape == (0, 1)


def test_prefill_and_decode_batches():
    assert build_prefill_batch(LONG, 16, "cpu").logits_rows.tolist() == [2]
    assert build_prefill_batch(LONG, 16, "cpu", logits="none").logits_rows.tolist() == []
    assert build_decode_batch([SHORT, SHORT], 16, "cpu").logits_rows.tolist() == [0, 1]
    with pytest.raises(ServingError, match="exactly one new token"):
        build_decode_batch([SHORT, LONG], 16, "cpu")
