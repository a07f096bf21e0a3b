"""Groups that can't start, ranks that fail alone or together, and groups that end."""

import asyncio
import time
from dataclasses import dataclass, replace

import grpc
import pytest

from common.errors import KernelError, ServingError, WorkerLost
from common.proto import worker_pb2, worker_pb2_grpc
from common.requests import SamplingParams
from decode_worker.rank import DecodeRank
from model.build import BuiltModel
from prefill_worker.rank import PrefillRank
from tests.support.fake_model import CONFIG, NEVER_SAMPLED, FakeModel, FakeModelBuilder, expected_tokens
from tests.support.groups import Group, rank_spec, running
from tests.support.pace import within
from tests.support.pair_client import PairClient

GREEDY = SamplingParams(max_tokens=10, temperature=0, seed=1, ignore_eos=True)
ONE_TOKEN = replace(GREEDY, max_tokens=1)


@dataclass(frozen=True)
class FailsAlone:
    """A fake whose rank `rank` alone raises on NEVER_SAMPLED, in the middle of a forward pass that the others take part in."""

    rank: int

    def __call__(self, spec, group) -> BuiltModel:
        fail_token = NEVER_SAMPLED if spec.rank == self.rank else None
        return BuiltModel(CONFIG, FakeModel(FakeModelBuilder(fail_token=fail_token), group))


@dataclass(frozen=True)
class CannotLoad:
    """Loading fails on one rank."""

    rank: int

    def __call__(self, spec, group) -> BuiltModel:
        if spec.rank == self.rank:
            raise KernelError("this rank has no weights")
        return FakeModelBuilder()(spec, group)


def misses_a_sum(spec, group) -> BuiltModel:
    """A fake whose passes turn out to be void: on GPUs a rank that hangs is noticed by the others' kernels."""

    def check() -> None:
        raise WorkerLost("a rank of the group did not take part in a sum in time", rank=1)

    return replace(FakeModelBuilder()(spec, group), check=check)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("bad_rank", [0, 2])
def test_group_whose_rank_can_not_load_does_not_start_and_says_why(role, bad_rank):
    started = time.monotonic()
    group = Group(rank_spec(role, tp=4), CannotLoad(bad_rank))
    errors = []
    for rank in range(4):
        kind, data = group.pipes[rank].recv() if group.pipes[rank].poll(within(20)) else ("silence", "")
        assert kind == "error"
        errors.append(data)
    group.stop()
    assert "this rank has no weights" in errors[bad_rank]
    assert all("WorkerLost" in text for rank, text in enumerate(errors) if rank != bad_rank)
    assert time.monotonic() - started < within(20)


@pytest.mark.parametrize("make", [PrefillRank, DecodeRank])
def test_a_rank_that_starts_says_what_it_is_at(make):
    role, said = ("prefill" if make is PrefillRank else "decode"), []

    def build(spec, group) -> BuiltModel:
        built = FakeModelBuilder()(spec, group)
        said.append(rank.doing())
        return replace(built, warm=lambda kv: said.append(rank.doing()) or built.model)

    rank = make(rank_spec(role), build)
    assert rank.doing() == ""
    rank.start()
    assert said == ["reads weights", "makes KV pools, compiles kernels, records graphs"]
    assert rank.doing() == ""
    rank.stop()
    assert rank.wait_ended(within(20)) == ""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_path": "/nowhere"}, "no config.json"),
        ({"device": "tpu"}, "cpu"),
        ({"listen_host": "203.0.113.1"}, "can't listen"),
    ],
)
def test_start_is_refused_with_the_reason(options, reason):
    build = FakeModelBuilder() if "listen_host" in options else None
    with pytest.raises(ServingError, match=reason), running(rank_spec("prefill", **options), **({"build": build} if build else {})):
        pass


async def one_token(group: Group, prompt: list[int]) -> list[int]:
    async with grpc.aio.insecure_channel(group.description.address) as channel:
        stub = worker_pb2_grpc.PrefillGroupStub(channel)
        task = worker_pb2.PrefillTask(work=PairClient(group, group).work(prompt, ONE_TOKEN))
        return [token async for event in stub.Prefill(task) for token in event.first_token.output.token_ids]


async def test_forward_that_fails_on_all_ranks_fails_its_request_and_the_group_goes_on():
    """Report P11 with two ranks."""
    with running(rank_spec("prefill", tp=2, chunk_tokens=16), build=FakeModelBuilder(fail_token=NEVER_SAMPLED)) as (group,):
        for _ in range(3):
            started = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await one_token(group, [5] * 40 + [NEVER_SAMPLED])
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert time.monotonic() - started < within(1.0)
            assert await one_token(group, [5, 6, 7]) == expected_tokens([5, 6, 7], 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_forward_that_fails_on_one_rank_alone_ends_the_group(rank):
    """The other ranks wait in a collective that will never come; nobody may serve from such a group again."""
    with running(rank_spec("prefill", tp=2), build=FailsAlone(rank)) as (group,):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(one_token(group, [5, NEVER_SAMPLED]), within(20))
        assert failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert group.wait_gone(3.0)


async def test_no_token_comes_of_a_pass_that_a_rank_did_not_take_part_in():
    with running(rank_spec("prefill", tp=2), build=misses_a_sum) as (group,):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await asyncio.wait_for(one_token(group, [5, 6, 7]), within(20))
        assert failed.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert group.wait_gone(3.0)


async def test_group_that_is_stopped_ends_clean_and_its_streams_with_a_status():
    slow = FakeModelBuilder(decode_s=0.01)
    with running(rank_spec("prefill", tp=2), rank_spec("decode", tp=2, ep=2), build=slow) as groups:
        async with PairClient(*groups) as client:
            running_on = asyncio.create_task(client.generate([5] * 20, replace(GREEDY, max_tokens=1000)))
            await asyncio.sleep(0.4)
            for group in groups:
                await asyncio.to_thread(group.stop)
                assert group.exit_codes == [0, 0]
            answer = await asyncio.wait_for(running_on, within(2))
            assert answer.error == "UNAVAILABLE"
            assert answer.tokens == expected_tokens([5] * 20, len(answer.tokens))
