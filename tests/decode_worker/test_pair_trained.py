"""The trained model, disaggregated: what it answers must be right, not only equal to something."""

from __future__ import annotations

import asyncio

import pytest

from common.requests import SamplingParams
from tests.support.groups import rank_spec, running
from tests.support.pair_client import PairClient
from tests.support.trained import Trained, make_trained

RETURN, CALL = 200002, 200012
STOPS = frozenset((RETURN, CALL))
TASKS = ("arithmetic", "tool", "refusal", "retrieval_200_1000")
LONG_TASKS = ("retrieval_1000_3000", "retrieval_200_1000")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    return make_trained(tmp_path_factory.mktemp("model"))


async def ask(trained: Trained, tasks: tuple[str, ...], prefill: dict, decode: dict) -> dict[str, list[int]]:
    """Greedy answers of one pair of groups to all tasks at once."""
    specs = (
        rank_spec("prefill", model_path=trained.path, **({"kv_blocks": 400} | prefill)),
        rank_spec("decode", model_path=trained.path, **({"kv_blocks": 800} | decode)),
    )
    sampling = SamplingParams(max_tokens=120, temperature=0, seed=1, stop_token_ids=STOPS)
    with running(*specs) as groups:
        async with PairClient(*groups) as client:
            got = await asyncio.gather(*(client.generate(trained.examples[task].prompt, sampling) for task in tasks))
            await client.wait_idle(1.0)
    assert not [answer.message for answer in got if answer.error]
    return {task: answer.tokens for task, answer in zip(tasks, got, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "transport"), [(1, 4, "shm"), (4, 2, "tcp"), (2, 1, "shm")])
async def test_answers_are_right_whatever_the_layouts(trained, prefill_tp, decode_tp, transport):
    prefill = {"tp": prefill_tp, "transport": transport, "chunk_tokens": 256}
    decode = {"tp": decode_tp, "ep": decode_tp, "transport": transport}
    for task, tokens in (await ask(trained, TASKS, prefill, decode)).items():
        assert trained.grade(task, tokens).is_right, trained.encoding.decode(tokens)
        assert tokens[-1] == (CALL if task == "tool" else RETURN), "the answer ends in its own stop token"
        assert not STOPS & set(tokens[:-1])


@pytest.mark.slow
async def test_facts_far_back_are_found_across_chunks_and_windows(trained):
    """The facts lie thousands of tokens back, so only the full layers' handed-over KV can tell them; each prompt is many chunks."""
    prompts = [len(trained.examples[task].prompt) for task in LONG_TASKS]
    assert max(prompts) > 1000
    small = await ask(trained, LONG_TASKS, {"tp": 2, "chunk_tokens": 100}, {"tp": 2, "ep": 2})
    for task, tokens in small.items():
        assert trained.grade(task, tokens).is_right, trained.encoding.decode(tokens)
