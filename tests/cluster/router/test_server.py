"""The router over fake groups: the main path, n, ids, what ends at the first token, and the methods besides `Generate`."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.proto import router_pb2, types_pb2
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, pick_token, tokens_of
from tests.support.pace import within
from tests.support.router_bed import bed, request_of, until


async def test_generate_streams_all_tokens_and_one_complete():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of((5, 6, 7), max_tokens=10, request_id="mine"))
    assert answer.tokens == {0: tokens_of((5, 6, 7), 10)}
    complete = answer.completes[0]
    assert (complete.usage.prompt_tokens, complete.usage.completion_tokens) == (3, 10)
    assert complete.finish_reason.reason == types_pb2.FINISH_REASON_LENGTH
    assert decode.free_blocks == decode.total_blocks
    assert prefill.prefilled[0].label == "mine"


async def test_complete_carries_predicted_and_actual_route():
    prefill, decode = FakePrefillGroup(prefill_ms=lambda tokens: 30.0), FakeDecodeGroup(step_ms=5)
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of(max_tokens=11))
    route = answer.completes[0].route
    (candidate,) = route.decision.candidates
    assert candidate.chosen
    assert (candidate.prefill_pool, candidate.decode_pool) == ("prefill", "decode")
    assert (candidate.prefill_group, candidate.decode_group) == ("prefill-0", "decode-0")
    assert candidate.prediction.ttft_ms > 0
    assert candidate.prediction.cost_usd > 0
    assert route.decision.expected_output_tokens == 11
    assert route.attempts == 1
    assert route.actual.prefill_ms == 30.0
    assert route.actual.ttft_ms >= 30.0
    assert 4.0 <= route.actual.itl_ms <= within(50.0)
    assert route.actual.latency_s * 1e3 >= route.actual.ttft_ms
    assert route.actual.cost_usd > 0


async def test_first_token_does_not_wait_for_the_transfer():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    prefill.transfer_ms = 400.0
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of(max_tokens=4))
    assert answer.arrivals_s[1] - answer.arrivals_s[0] >= 0.3


async def test_64_at_once_all_get_their_own_tokens():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        prompts = [(i, i + 1, i + 2) for i in range(64)]
        answers = await asyncio.gather(*(router.generate(request_of(p, max_tokens=20)) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == {0: tokens_of(prompt, 20)}
    assert decode.free_blocks == decode.total_blocks


async def test_n_runs_independent_choices_with_seeds_in_a_row():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of((9, 9), max_tokens=6, n=3, seed=2**63 - 2))
    assert answer.tokens == {index: tokens_of((9, 9), 6) for index in range(3)}
    assert sorted(answer.completes) == [0, 1, 2]
    works = prefill.prefilled
    assert [work.sampling.seed for work in works] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert {work.sampling.n for work in works} == {1}
    assert len({work.internal_id for work in works}) == 3


async def test_every_default_is_filled_in_before_a_group_sees_the_request():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        await router.generate(request_of(max_tokens=2))
    sampling = prefill.prefilled[0].sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "seed", "n"):
        assert sampling.HasField(name), name
    assert prefill.prefilled[0].deadline_ms > 0


async def test_max_tokens_1_makes_no_reservation():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of((4, 5), max_tokens=1))
    assert answer.tokens == {0: tokens_of((4, 5), 1)}
    assert decode.calls == []
    (candidate,) = answer.completes[0].route.decision.candidates
    assert (candidate.decode_pool, candidate.decode_group) == ("", "")


async def test_a_stop_at_the_first_token_frees_the_reservation():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of(max_tokens=50, logit_bias={200002: 100.0}, stop_token_ids=[200002]))
        await until(lambda: decode.free_blocks == decode.total_blocks)
    assert answer.tokens == {0: [200002]}
    assert answer.completes[0].finish_reason.stop_token_id == 200002
    assert decode.peak_running == 0


@pytest.mark.parametrize("max_tokens", [0, -1, 131072, -(2**31)])
async def test_max_tokens_out_of_range_is_refused(max_tokens):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        with pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of(max_tokens=max_tokens))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling_params.max_tokens" in refused.value.details()


async def test_unset_max_tokens_means_the_rest_of_the_context():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        await router.generate(request_of((1, 2, 3), max_tokens=None, logit_bias={200002: 100.0}, stop_token_ids=[200002]))
    assert prefill.prefilled[0].sampling.max_tokens == 131072 - 3


@pytest.mark.parametrize("label", ["", "None", "same", "x" * 256])
async def test_one_client_id_on_two_requests_at_once(label):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        first, second = await asyncio.gather(
            router.generate(request_of((1,), max_tokens=12, request_id=label)),
            router.generate(request_of((2,), max_tokens=12, request_id=label)),
        )
        third = await router.generate(request_of((1,), max_tokens=3, request_id=label))
    assert first.tokens[0] == tokens_of((1,), 12)
    assert second.tokens[0] == tokens_of((2,), 12)
    assert third.tokens[0] == tokens_of((1,), 3)
    assert len({work.internal_id for work in prefill.prefilled}) == 3
    assert decode.free_blocks == decode.total_blocks


async def test_a_client_id_of_1_mb_is_refused():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        with pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of(request_id="x" * (1 << 20)))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("request_id")


async def test_abort_ends_every_request_with_that_label_and_no_other():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=10)
    async with bed(prefill, decode) as router:
        doomed = [asyncio.create_task(router.generate(request_of((i,), max_tokens=2000, request_id="doomed"))) for i in range(3)]
        other = asyncio.create_task(router.generate(request_of((7,), max_tokens=40, request_id="other")))
        await until(lambda: len(decode.running) == 4)
        reply = await router.stub.Abort(router_pb2.AbortRequest(request_id="doomed"))
        assert reply.aborted == 3
        for task in doomed:
            with pytest.raises(grpc.RpcError) as aborted:
                await task
            assert aborted.value.code() == grpc.StatusCode.CANCELLED
        assert (await other).tokens[0] == tokens_of((7,), 40)
        await until(lambda: decode.free_blocks == decode.total_blocks, 1.0)
        again = await router.generate(request_of((1,), max_tokens=5, request_id="doomed"))
        assert again.tokens[0] == tokens_of((1,), 5)
        assert (await router.stub.Abort(router_pb2.AbortRequest(request_id="nobody"))).aborted == 0
        with pytest.raises(grpc.RpcError) as refused:
            await router.stub.Abort(router_pb2.AbortRequest())
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_plan_route_lists_every_candidate_and_runs_nothing():
    groups = [FakePrefillGroup("p1", "p1-0"), FakePrefillGroup("p4", "p4-0", tp=4), FakeDecodeGroup()]
    async with bed(*groups) as router:
        decision = await router.stub.PlanRoute(router_pb2.PlanRouteRequest(prompt_tokens=2000, max_tokens=100, latency_weight=1.0))
        assert {(c.prefill_pool, c.decode_pool) for c in decision.candidates} == {("p1", "decode"), ("p4", "decode")}
        assert sum(c.chosen for c in decision.candidates) == 1
        assert all(c.reason for c in decision.candidates)
        assert decision.latency_weight == 1.0
        assert all(not group.calls for group in groups)
        for wrong, field in (
            (router_pb2.PlanRouteRequest(), "prompt_tokens"),
            (router_pb2.PlanRouteRequest(prompt_tokens=5, max_tokens=0), "max_tokens"),
            (router_pb2.PlanRouteRequest(prompt_tokens=5, latency_weight=2.0), "latency_weight"),
            (router_pb2.PlanRouteRequest(prompt_tokens=5, slo=types_pb2.Slo(ttft_ms=-1.0)), "slo.ttft_ms"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                await router.stub.PlanRoute(wrong)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert field in refused.value.details()


async def test_a_drained_pool_takes_nothing_new_and_finishes_what_runs():
    first, second, decode = FakePrefillGroup("a", "a-0"), FakePrefillGroup("b", "b-0"), FakeDecodeGroup(step_ms=5)
    async with bed(first, second, decode) as router:
        running = asyncio.create_task(router.generate(request_of(max_tokens=60)))
        await until(lambda: decode.running)
        draining = router_pb2.SetPoolStateRequest(pool="a", state=router_pb2.POOL_STATE_DRAINING)
        assert (await router.stub.SetPoolState(draining)).pool.state == router_pb2.POOL_STATE_DRAINING
        before = len(first.prefilled)
        answers = await asyncio.gather(*(router.generate(request_of((i,), max_tokens=3)) for i in range(6)))
        assert all(answer.tokens for answer in answers)
        assert len(first.prefilled) == before
        assert len((await running).tokens[0]) == 60
        states = {pool.name: pool.state for pool in (await router.stub.ListPools(router_pb2.ListPoolsRequest())).pools}
        assert states["a"] == router_pb2.POOL_STATE_DRAINING
        assert states["b"] == router_pb2.POOL_STATE_ACTIVE
        with pytest.raises(grpc.RpcError) as refused:
            await router.stub.SetPoolState(router_pb2.SetPoolStateRequest(pool="zzz", state=router_pb2.POOL_STATE_ACTIVE))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_info_methods():
    prefill, decode = FakePrefillGroup(tp=2), FakeDecodeGroup(tp=4)
    async with bed(prefill, decode) as router:
        model = await router.stub.GetModelInfo(router_pb2.GetModelInfoRequest())
        assert (model.model, model.vocab_size, model.max_model_len) == ("fake", 201088, 131072)
        assert list(model.eos_token_ids) == [200002, 200012]
        info = await router.stub.GetServerInfo(router_pb2.GetServerInfoRequest())
        assert info.router_id == "router-test"
        assert info.uptime_s >= 0
        assert info.profile
        pools = {pool.name: pool for pool in (await router.stub.ListPools(router_pb2.ListPoolsRequest())).pools}
        assert pools["decode"].gpus_per_group == 4
        assert pools["prefill"].layout.tp == 2
        assert pools["prefill"].role == types_pb2.ROLE_PREFILL
        loads = await router.stub.GetLoads(router_pb2.GetLoadsRequest())
        assert {group.description.group for group in loads.groups} == {"prefill-0", "decode-0"}
        assert [queue.pool for queue in loads.queues] == ["prefill"]
        assert loads.running_requests == 0


async def test_health_and_reflection():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        health = health_pb2_grpc.HealthStub(router.channel)

        async def status(service: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

        async def is_ready() -> bool:
            return await status("tandem.router.v1.Router") == health_pb2.HealthCheckResponse.SERVING

        assert await status("") == health_pb2.HealthCheckResponse.SERVING
        await until(is_ready)
        stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name async for answer in call for service in answer.list_services_response.service}
        assert {"tandem.router.v1.Router", "grpc.health.v1.Health"} <= names
        await decode.kill()

        async def is_not_ready() -> bool:
            return not await is_ready()

        await until(is_not_ready)
        assert await status("") == health_pb2.HealthCheckResponse.SERVING


async def test_draining_router_refuses_new_requests_and_finishes_running_ones():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=5)
    async with bed(prefill, decode) as router:
        running = [asyncio.create_task(router.generate(request_of((i,), max_tokens=80))) for i in range(4)]
        await until(lambda: len(decode.running) == 4)
        drain = asyncio.create_task(router.router.server.drain(10.0))
        await asyncio.sleep(0.02)
        health = health_pb2_grpc.HealthStub(router.channel)
        status = (await health.Check(health_pb2.HealthCheckRequest(service="tandem.router.v1.Router"))).status
        assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            await router.generate(request_of())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        for i, answer in enumerate(await asyncio.gather(*running)):
            assert answer.tokens[0] == tokens_of((i,), 80)
        await drain


async def test_drain_ends_what_does_not_finish_with_a_typed_error():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(step_ms=20)
    async with bed(prefill, decode) as router:
        running = asyncio.create_task(router.generate(request_of(max_tokens=10_000)))
        await until(lambda: decode.running)
        await router.router.server.drain(0.1)
        with pytest.raises(grpc.RpcError) as ended:
            await running
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "stopped" in ended.value.details()


async def test_logit_bias_reaches_the_groups_unchanged():
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup()
    async with bed(prefill, decode) as router:
        answer = await router.generate(request_of((3,), max_tokens=4, logit_bias={77: 100.0, 78: -1.5}))
    assert answer.tokens[0] == [77] * 4
    assert dict(prefill.prefilled[0].sampling.logit_bias) == {77: 100.0, 78: -1.5}
    assert pick_token(prefill.prefilled[0], 0) == 77


async def test_the_report_lists_every_candidate_only_if_asked_to():
    groups = [FakePrefillGroup("p1", "p1-0"), FakePrefillGroup("p4", "p4-0", tp=4), FakeDecodeGroup()]
    async with bed(*groups) as router:
        brief = await router.generate(request_of(max_tokens=3))
        full = await router.generate(request_of(max_tokens=3, explain=True))
    (chosen,) = brief.completes[0].route.decision.candidates
    assert chosen.chosen
    assert chosen.reason
    assert {c.prefill_pool for c in full.completes[0].route.decision.candidates} == {"p1", "p4"}
