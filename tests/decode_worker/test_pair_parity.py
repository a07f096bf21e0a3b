"""The real model, disaggregated: every pair of layouts gives the greedy tokens of transformers in fp32 and of our model in one process."""

import asyncio
import functools
import itertools
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


PAIRS = list(itertools.product((1, 2, 4, 8), (1, 2, 4)))


def sides(prefill_tp: int, decode_tp: int, transport: str) -> list[dict]:
    """Whole experts per rank on the decode side, cut ones and whole ones in turn on the prefill side."""
    prefill_ep = prefill_tp if decode_tp == 2 else 1
    pair = ((prefill_tp, prefill_ep), (decode_tp, decode_tp))
    return [{"tp": tp, "ep": ep, "transport": transport} for tp, ep in pair]


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
async def test_every_pair_of_layouts_agrees_with_transformers(tiny, expected, prefill_tp, decode_tp):
    transport = ("shm", "tcp")[PAIRS.index((prefill_tp, decode_tp)) % 2]
    lengths = (1, 16, 130, 257)
    assert await answers(tiny.path, *sides(prefill_tp, decode_tp, transport), lengths) == expected(lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 4), (2, 4), (4, 2), (8, 4), (8, 1)])
async def test_pairs_that_cut_eight_kv_heads_agree_with_one_process(tmp_path, prefill_tp, decode_tp):
    """No replicas here: every rank holds other heads, as with the real model."""
    eight = write_tiny(tmp_path, num_qo_heads=16, num_kv_heads=8, head_dim=32, num_layers=2)
    weights = load_shard(eight.path, eight.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    lengths = (17, 130)
    run = PagedRun(eight.config, GptOss(eight.config, weights, LocalGroup(), "cpu"), num_sequences=len(lengths))
    wanted = greedy(run, [prompt_of(length) for length in lengths], NEW_TOKENS)
    got = await answers(eight.path, *sides(prefill_tp, decode_tp, "shm"), lengths)
    assert got == dict(zip(lengths, wanted, strict=True))


@pytest.mark.slow
async def test_all_lengths_around_block_and_window_in_one_batch(tiny, expected):
    lengths = (1, 15, 16, 17, 127, 128, 129, 130)
    got = await answers(tiny.path, {"tp": 2, "chunk_tokens": 48}, {"tp": 4, "ep": 4}, lengths)
    got |= await answers(tiny.path, {"tp": 1, "chunk_tokens": 256}, {"tp": 4, "ep": 4}, (257, 1000))
    assert got == expected((*lengths, 257, 1000))
