"""The router as the CLI runs it: from a config, over a controller's directory, until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.router.main import profile_of, read_model_facts, serve, spec_of_node
from common.config import parse_config
from common.errors import ConfigError
from common.proto import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup, tokens_of
from tests.support.pace import within
from tests.support.router_bed import Answer, request_of, until

POOLS = [
    {"name": "prefill", "role": "prefill", "usd_per_gpu_hour": 5.0},
    {"name": "prefill-tp4", "role": "prefill", "layout": {"tp": 4, "ep": 4}, "replicas": {"min": 0, "max": 1}},
    {"name": "decode", "role": "decode"},
]


def config_of(tmp_path, **router):
    tree = {"model": {"path": str(tmp_path)}, "pools": POOLS, "cluster": {"device": "cpu"}, "router": {"listen": "127.0.0.1:0"} | router}
    return parse_config(tree)


class FakeController(control_pb2_grpc.DirectoryServicer):
    def __init__(self, groups):
        self.groups = groups
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> FakeController:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        control_pb2_grpc.add_DirectoryServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Watch(self, request, context):
        while True:
            yield control_pb2.GroupSet(version=1, groups=[group.description for group in self.groups])
            await asyncio.sleep(0.2)


@asynccontextmanager
async def running(config, *groups):
    for group in groups:
        await group.start()
    controller = await FakeController(groups).start()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    router = asyncio.create_task(serve(config, f"127.0.0.1:{controller.port}", address.set_result))
    async with grpc.aio.insecure_channel(await address) as channel:
        yield controller, router_pb2_grpc.RouterStub(channel), router
    if not router.done():
        os.kill(os.getpid(), signal.SIGTERM)
    await router
    await controller.stop()
    await asyncio.gather(*(group.kill() for group in groups))


async def generate(stub, request) -> Answer:
    answer = Answer()
    async for response in stub.Generate(request, timeout=20):
        answer.add(response)
    return answer


async def healthy_groups(stub) -> int:
    return sum(group.healthy for group in (await stub.GetLoads(router_pb2.GetLoadsRequest())).groups)


async def test_serves_over_the_directory_and_outlives_the_controller(tmp_path):
    async with running(config_of(tmp_path), FakePrefillGroup(), FakeDecodeGroup()) as (controller, stub, _):

        async def both() -> bool:
            return await healthy_groups(stub) == 2

        await until(both)
        assert (await generate(stub, request_of((1,), max_tokens=5))).tokens[0] == tokens_of((1,), 5)
        pools = {pool.name: pool for pool in (await stub.ListPools(router_pb2.ListPoolsRequest())).pools}
        assert set(pools) == {"prefill", "prefill-tp4", "decode"}
        assert (pools["prefill"].usd_per_gpu_hour, pools["decode"].usd_per_gpu_hour) == (5.0, 3.0)
        assert (pools["prefill-tp4"].groups, pools["prefill-tp4"].gpus_per_group) == (0, 4)
        await controller.stop()
        await asyncio.sleep(0.3)
        assert (await generate(stub, request_of((2,), max_tokens=5))).tokens[0] == tokens_of((2,), 5)
        late = await FakePrefillGroup(group="prefill-1").start()
        controller.groups = (*controller.groups, late)
        await controller.start()

        async def three() -> bool:
            return await healthy_groups(stub) == 3

        await until(three)
        await late.kill()


async def test_sigterm_lets_running_streams_finish(tmp_path):
    decode = FakeDecodeGroup(step_ms=10)
    async with running(config_of(tmp_path), FakePrefillGroup(), decode) as (_, stub, router):

        async def both() -> bool:
            return await healthy_groups(stub) == 2

        await until(both)
        streams = [asyncio.create_task(generate(stub, request_of((i,), max_tokens=50))) for i in range(8)]
        await until(lambda: len(decode.running) == 8)
        os.kill(os.getpid(), signal.SIGTERM)
        for i, answer in enumerate(await asyncio.gather(*streams)):
            assert answer.tokens[0] == tokens_of((i,), 50)
        async with asyncio.timeout(within(5)):
            await router


async def test_a_drain_cuts_no_stream_at_the_end_of_its_grace(tmp_path):
    """32 streams run at SIGTERM: short ones finish, long ones end with a typed error after `router.drain_s`, none with a cut socket."""
    decode = FakeDecodeGroup(step_ms=10, capacity_tokens=1 << 20)
    async with running(config_of(tmp_path, drain_s=within(1.0)), FakePrefillGroup(), decode) as (_, stub, router):

        async def both() -> bool:
            return await healthy_groups(stub) == 2

        await until(both)
        lengths = [60 if i % 2 else 20_000 for i in range(32)]
        decode.paused = True
        streams = [asyncio.create_task(generate(stub, request_of((i,), max_tokens=n))) for i, n in enumerate(lengths)]

        async def all_accepted() -> bool:
            return (await stub.GetLoads(router_pb2.GetLoadsRequest())).running_requests == 32

        await until(all_accepted)
        decode.paused = False
        os.kill(os.getpid(), signal.SIGTERM)

        async def refused() -> bool:
            try:
                await generate(stub, request_of((99,), max_tokens=1))
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAVAILABLE
            return False

        await until(refused)
        for i, answer in enumerate(await asyncio.gather(*streams, return_exceptions=True)):
            if lengths[i] == 60:
                assert answer.tokens[0] == tokens_of((i,), 60)
            else:
                assert answer.code() is grpc.StatusCode.UNAVAILABLE
                assert "this router has stopped" in answer.details()
        async with asyncio.timeout(within(5)):
            await router


async def test_context_is_what_the_decode_groups_can_hold(tmp_path):
    async with running(config_of(tmp_path), FakePrefillGroup(), FakeDecodeGroup(capacity_tokens=4096)) as (_, stub, _):

        async def both() -> bool:
            return await healthy_groups(stub) == 2

        await until(both)
        assert (await stub.GetModelInfo(router_pb2.GetModelInfoRequest())).max_model_len == 4096
        answer = await generate(stub, request_of((1,), max_tokens=None, logit_bias={5: 100.0}, stop_token_ids=[5]))
        assert answer.tokens[0] == [5]


def test_model_facts_come_from_the_checkpoint(tmp_path):
    without_files = read_model_facts(config_of(tmp_path))
    assert (without_files.num_layers, without_files.vocab_size, without_files.eos_token_ids) == (None, 201088, (200002, 200012))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 24, "vocab_size": 1024}))
    facts = read_model_facts(config_of(tmp_path))
    assert (facts.name, facts.num_layers, facts.vocab_size) == (tmp_path.name, 24, 1024)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert read_model_facts(config_of(tmp_path)).eos_token_ids == (7, 8)
    for broken in ("{", "[]", '{"vocab_size": "many"}'):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match="config"):
            read_model_facts(config_of(tmp_path))


def test_profile_is_the_file_of_the_config_or_the_built_in_one(tmp_path):
    facts = read_model_facts(config_of(tmp_path))
    assert profile_of(config_of(tmp_path), facts).hardware == "CPU"
    with pytest.raises(ConfigError, match=r"none\.json"):
        profile_of(config_of(tmp_path, profile=str(tmp_path / "none.json")), facts)


def test_spec_of_a_pool_in_the_config(tmp_path):
    config = config_of(tmp_path)
    spec = spec_of_node(config, config.pools[1])
    assert (spec.name, spec.tp, spec.ep, spec.gpus, spec.usd_per_gpu_hour) == ("prefill-tp4", 4, 4, 4, 3.0)
