"""The tiny trained model through the prefill forward that a GPU pool serves with, against the plain fp32 forward on the CPU.

From checkpoint folder to first tokens: conversion, loading, graphs, eager launches, prompts in chunks. A check of `benchmarks/prefill.py`
and of the GPU tests.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from common.rank_spec import RankSpec
from model.batch import SequenceView, build_prefill_batch
from model.build import build_model
from model.convert import convert_checkpoint
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.trained_fixture import PACKED, read_packed, write_trained_fixture
from model.weights import load_shard

BLOCK_SIZE, BLOCKS = 16, 64
PROMPTS = ((1,), (17,), (128,), (129,), (700,), (300, 2, 1, 97), (128, 128, 128))  # new tokens of each chunk


def check_served(device: str = "cuda") -> str:
    """First tokens of prompts of several lengths, whole and in chunks, and the K and V that they leave.

    Returns: a line for the table
    Raises: AssertionError if more than one first token is not the plain forward's likeliest, or K and V are not near
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_trained_fixture(path)
        convert_checkpoint(path)
        spec = RankSpec("prefill", "g", "prefill", str(path), 1, 1, 0, "", 1, b"", device=device, weights="fp8", max_model_len=1024)
        built = build_model(spec, LocalGroup())
        config = built.config
        weights = load_shard(path, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    plain = GptOss(config, weights, LocalGroup(), "cpu")
    kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), 1, 0, BLOCKS, BLOCKS, device)
    host = KVCache(config.kv_geometry(BLOCK_SIZE, "float32"), 1, 0, BLOCKS, BLOCKS, "cpu")
    forward = built.ready(kv)
    known = read_packed(PACKED)[1]["official_ids"].tolist()
    generator = torch.Generator().manual_seed(5)
    agreed, distances, kv_errors = 0, [], []
    for chunks in PROMPTS:
        tokens = [known[i] for i in torch.randint(0, len(known), (sum(chunks),), generator=generator).tolist()]
        blocks = torch.randperm(BLOCKS, generator=generator).tolist()[: -(-len(tokens) // BLOCK_SIZE)]
        expected = plain.forward(build_prefill_batch(SequenceView(tokens, 0, blocks, 0, blocks), BLOCK_SIZE, "cpu"), host)[0]
        start, logits = 0, None
        for count in chunks:
            is_last = start + count == len(tokens)
            view = SequenceView(tokens[start : start + count], start, blocks, 0, blocks)
            logits = forward.forward(build_prefill_batch(view, BLOCK_SIZE, "cpu", logits="last" if is_last else "none"), kv)
            start += count
        chosen = int(logits[-1].argmax())
        distances.append(float((expected.max() - expected[chosen]) / expected.std()))
        agreed += int(chosen == int(expected.argmax()))
        for mine, theirs in ((kv.full, host.full), (kv.sliding, host.sliding)):
            whole = blocks[: len(tokens) // BLOCK_SIZE]
            if whole:
                error = (mine[:, whole].float().cpu() - theirs[:, whole]).square().mean().sqrt() / theirs[:, whole].square().mean().sqrt()
                kv_errors.append(float(error))
    assert agreed >= len(PROMPTS) - 1, f"{agreed} of {len(PROMPTS)} first tokens agree"  # random prompts: one may be a tie that FP8 turns
    assert max(kv_errors) < 0.1, f"K and V differ by {max(kv_errors):.3f} of their size"
    return (
        f"{agreed} of {len(PROMPTS)} first tokens are the plain forward's, the worst {max(distances):.1e} deviations below its best; "
        f"K and V within {max(kv_errors):.1e} of their size"
    )
