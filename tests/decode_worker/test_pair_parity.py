"""The real model, disaggregated: every pair of layouts gives the greedy tokens of transformers in fp32 and of our model in one process."""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.requests import SamplingParams
from model.gpt_oss import GptOss
from model.parallel import LocalGroup
from model.weights import load_shard
from tests.support.groups import rank_spec, running
from tests.support.hf_reference import build_hf_model, hf_greedy
from tests.support.paged_run import PagedRun, greedy
from tests.support.pair_client import PairClient
from tests.support.tiny_checkpoint import Tiny, write_tiny

NEW_TOKENS = 40
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, seed=1, ignore_eos=True)
LENGTHS = (1, 17, 129, 257)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> Callable[[tuple[int, ...]], dict[int, list[int]]]:
    """What transformers says, by prompt length; each is computed once."""
    torch.set_num_threads(1)
    model = build_hf_model(tiny.config, tiny.tensors)
    one = functools.cache(lambda length: hf_greedy(model, prompt_of(length), NEW_TOKENS))
    return lambda lengths: {length: one(length) for length in lengths}


def prompt_of(length: int) -> list[int]:
    return torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


async def answers(checkpoint: Path, prefill: dict, decode: dict, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    specs = (
        rank_spec("prefill", model_path=checkpoint, **({"chunk_tokens": 100} | prefill)),
        rank_spec("decode", model_path=checkpoint, **decode),
    )
    with running(*specs) as groups:
        async with PairClient(*groups) as client:
            got = await asyncio.gather(*(client.generate(prompt_of(length), GREEDY) for length in lengths))
            await client.wait_idle(1.0)
    assert not [answer.message for answer in got if answer.error]
    return {length: answer.tokens for length, answer in zip(lengths, got, strict=True)}


async def test_tp1_prefill_and_ep4_decode_agree_with_transformers(tiny, expected):
    got = await answers(tiny.path, {"tp": 1}, {"tp": 4, "ep": 4}, LENGTHS)
    assert got == expected(LENGTHS)


def test_one_process_alone_agrees_with_transformers(tiny, expected):
    weights = load_shard(tiny.path, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    model = GptOss(tiny.config, weights, LocalGroup(), "cpu")
    prompts = [prompt_of(length) for length in LENGTHS]
    got = greedy(PagedRun(tiny.config, model, num_sequences=len(prompts)), prompts, NEW_TOKENS)
    assert dict(zip(LENGTHS, got, strict=True)) == expected(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("prefill", "decode"), [((2, 1), (1, 1)), ((1, 1), (2, 2)), ((2, 2), (4, 1)), ((4, 4), (2, 1)), ((8, 1), (4, 4))])
async def test_every_pair_of_layouts_agrees_with_transformers(tiny, expected, prefill, decode, transport):
    sides = [{"tp": tp, "ep": ep, "transport": transport} for tp, ep in (prefill, decode)]
    lengths = (1, 16, 130, 257)
    assert await answers(tiny.path, *sides, lengths) == expected(lengths)


@pytest.mark.slow
async def test_all_lengths_around_block_and_window_in_one_batch(tiny, expected):
    lengths = (1, 15, 16, 17, 127, 128, 129, 130)
    got = await answers(tiny.path, {"tp": 2, "chunk_tokens": 48}, {"tp": 4, "ep": 4}, lengths)
    got |= await answers(tiny.path, {"tp": 1, "chunk_tokens": 256}, {"tp": 4, "ep": 4}, (257, 1000))
    assert got == expected((*lengths, 257, 1000))
