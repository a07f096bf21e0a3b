"""Attention of prefill on a GPU against its fp32 twin, over the pool and over a prompt's own rows; window and sink by planted keys."""

from __future__ import annotations

import math

import torch

from benchmarks.prefill_check_tools import DEVICE, HEADS, normal, poison_memory
from benchmarks.prefill_random import BLOCK_SIZE
from kernels.attention_prefill import PrefillAttention, attention_workspace
from kernels.attention_prompt import PromptAttention, window_attention
from kernels.reference import paged_attention_ref


def check_attention() -> str:
    worst = 0.0
    workspace = attention_workspace(DEVICE)
    for window in (None, 128):
        attention = PrefillAttention(HEADS, BLOCK_SIZE, window_tokens=window, workspace=workspace)
        for queries, cached in ((1, 0), (127, 0), (129, 0), (1000, 0), (1, 777), (200, 1003), (2879, 0)):
            seq_len = queries + cached
            blocks = -(-seq_len // BLOCK_SIZE)
            pool = normal(blocks + 3, 2, 8, BLOCK_SIZE, 64)
            table = torch.randperm(blocks + 3, device=DEVICE)[:blocks].int()
            q, sinks = normal(queries, 64, 64), torch.randn(64, device=DEVICE)
            attention.plan(queries, seq_len, table)
            got = attention.run(q, pool, sinks)
            expected = paged_attention_ref(
                q.float(), pool, table[None], *(torch.tensor(v, device=DEVICE) for v in ([0], [seq_len], [0, queries])), sinks,
                window=window, sm_scale=0.125,
            )  # fmt: skip
            error = float((got.float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"window {window}, {queries} after {cached}: relative error {error}"
            worst = max(worst, error)
    return f"relative error {worst:.1e}"


def check_planted_keys() -> str:
    """One key answers the query; its value marks the output. Then equal keys against a sink of known share."""
    workspace = attention_workspace(DEVICE)
    for window in (128, None):
        attention = PrefillAttention(HEADS, BLOCK_SIZE, window_tokens=window, workspace=workspace)
        for seq_len, queries in ((300, 300), (1000, 40)):
            table = torch.randperm(-(-seq_len // BLOCK_SIZE), device=DEVICE).int()
            attention.plan(queries, seq_len, table)
            q = torch.full((queries, 64, 64), 4.0, dtype=torch.bfloat16, device=DEVICE)
            for distance, expected in ((129, 1.0 if window is None else 0.0), (128, 1.0), (1, 1.0)):
                pool = torch.zeros(table.numel(), 2, 8, BLOCK_SIZE, 64, dtype=torch.bfloat16, device=DEVICE)
                place = seq_len - distance
                block, offset = int(table[place // BLOCK_SIZE]), place % BLOCK_SIZE
                pool[block, 0, :, offset], pool[block, 1, :, offset] = 4.0, 1.0
                marked = attention.run(q, pool, torch.full((64,), -50.0, device=DEVICE))[-1].float()
                assert float((marked - expected).abs().max()) < 1e-2, f"window {window}: key at L-{distance} weighs {marked.flatten()[:4]}"
            pool[:, 0], pool[:, 1] = 0.0, 1.0
            visible = seq_len if window is None else min(window, seq_len)
            out = attention.run(q, pool, torch.full((64,), math.log(visible), device=DEVICE))[-1].float()
            assert float((out - 0.5).abs().max()) < 5e-3, f"window {window}: sink share {1 - out.flatten()[:4]}, expected 0.5"
    return "L-128 counts, L-129 does not; the sink counts once"


def check_plans_ahead() -> str:
    """Three chunks of a prompt, all planned and enqueued while the device is still busy: each goes by its own plan."""
    workspace, chunk = attention_workspace(DEVICE), 512
    blocks = 3 * chunk // BLOCK_SIZE
    pool, sinks = normal(blocks, 2, 8, BLOCK_SIZE, 64), torch.randn(64, device=DEVICE)
    table = torch.randperm(blocks, device=DEVICE).int()
    queries = [normal(chunk, 64, 64) for _ in range(3)]
    worst = 0.0
    for window in (None, 128):
        attention = PrefillAttention(HEADS, BLOCK_SIZE, window_tokens=window, workspace=workspace)
        torch.cuda._sleep(1_000_000_000)  # some 0.5 s
        got = []
        for index, q in enumerate(queries):
            attention.plan(chunk, (index + 1) * chunk, table)
            got.append(attention.run(q, pool, sinks))
        for index, (q, out) in enumerate(zip(queries, got, strict=True)):
            seq_len = (index + 1) * chunk
            expected = paged_attention_ref(
                q.float(), pool, table[None], *(torch.tensor(v, device=DEVICE) for v in ([0], [seq_len], [0, chunk])), sinks,
                window=window, sm_scale=0.125,
            )  # fmt: skip
            error = float((out.float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"window {window}, chunk {index} of 3: relative error {error}"
            worst = max(worst, error)
    return f"relative error {worst:.1e}"


def check_attention_rows() -> str:
    """Both kinds over contiguous rows, padding rows included in the plan, and the window's edge."""
    worst = 0.0
    full = PromptAttention(HEADS, workspace=attention_workspace(DEVICE))
    for tokens in (1, 127, 129, 1000, 2879, 4096):
        q, k, v = normal(tokens, 64, 64), normal(tokens, 8, 64), normal(tokens, 8, 64)
        sinks = torch.randn(64, device=DEVICE)
        pool = torch.stack((k, v)).transpose(1, 2)[None].contiguous().float()
        table, bounds = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.tensor([0, tokens], device=DEVICE)
        poison_memory()
        full.plan(tokens)
        for window, got in ((None, full.run(q, k, v, sinks)), (128, window_attention(q, k, v, sinks, 128))):
            expected = paged_attention_ref(
                q.float(), pool, table, bounds[:1], bounds[1:], bounds, sinks, window=window, sm_scale=0.125
            )  # fmt: skip
            error = float((got.float() - expected).norm() / expected.norm())
            assert error < 1e-2, f"window {window}, {tokens} tokens: relative error {error}"
            worst = max(worst, error)
    for distance, weight in ((127, 1.0), (128, 0.0)):
        q = torch.full((300, 64, 64), 4.0, dtype=torch.bfloat16, device=DEVICE)
        k, v = torch.zeros(2, 300, 8, 64, dtype=torch.bfloat16, device=DEVICE).unbind()
        k[299 - distance], v[299 - distance] = 4.0, 1.0
        out = window_attention(q, k, v, torch.full((64,), -50.0, device=DEVICE), 128)[-1].float()
        assert float((out - weight).abs().max()) < 1e-2, f"key {distance} left of the query weighs {out.flatten()[:4]}"
    return f"relative error {worst:.1e}"
