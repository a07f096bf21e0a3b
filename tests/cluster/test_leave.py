"""A node that is taken away: it asks the controller until none of its groups is left, and never for longer than it was given."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.leave import leave
from cluster.operations import NEEDS
from cluster.specs import security_of
from common.access import Role
from common.config import parse_config
from common.errors import ServingError, WorkerLost
from common.proto import control_pb2, control_pb2_grpc
from common.wire import Wire

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class FakeController(control_pb2_grpc.DirectoryServicer):
    """Answers with the next of `answers`, for ever with the last; a status code is an error."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked: list[str] = []

    async def Drain(self, request, context):
        self.asked.append(request.target)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "said so")
        return control_pb2.DrainReply(groups=answer)


@asynccontextmanager
async def listening(controller: FakeController, wire: Wire | None = None):
    wire = wire or Wire()
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), interceptors=wire.guards(NEEDS, Role.INTERNAL))
    control_pb2_grpc.add_DirectoryServicer_to_server(controller, server)
    port = wire.bind(server, "127.0.0.1:0", internal=True)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def left(address: str, *, timeout_s: float = 60.0, wire: Wire | None = None, away_s: float = 60.0) -> list[str]:
    lines: list[str] = []
    await asyncio.to_thread(leave, wire or Wire(), address, "10.0.0.7", timeout_s, lines.append, away_s)
    return lines


@pytest.fixture(autouse=True)
def _polls_fast(monkeypatch):
    monkeypatch.setattr("cluster.leave.POLL_S", 0.01)


async def test_it_waits_until_the_last_group_has_gone_and_says_each_change_once():
    controller = FakeController(["d-1", "p-2"], ["d-1", "p-2"], ["d-1"], [])
    async with listening(controller) as address:
        assert await left(address) == ["waits for d-1, p-2", "waits for d-1", "no group is left"]
    assert controller.asked == ["10.0.0.7"] * 4


async def test_a_controller_that_starts_again_meanwhile_is_asked_again():
    async with listening(FakeController(["d-1"], UNAVAILABLE, UNAVAILABLE, ["d-1"], [])) as address:
        assert await left(address) == ["waits for d-1", "no group is left"]


async def test_groups_that_do_not_end_are_named_when_the_time_is_up():
    async with listening(FakeController(["d-1"])) as address:
        with pytest.raises(WorkerLost, match=r"after 0\.1 s still there: d-1"):
            await left(address, timeout_s=0.1)


async def test_a_controller_that_is_gone_holds_nobody_up():
    with pytest.raises(WorkerLost, match=r"the controller at 127\.0\.0\.1:1 was silent for 0\.1 s"):
        await left("127.0.0.1:1", away_s=0.1)


async def test_a_refusal_is_passed_on_at_once():
    async with listening(FakeController(grpc.StatusCode.FAILED_PRECONDITION)) as address:
        with pytest.raises(ServingError, match="said so"):
            await left(address)


async def test_a_pod_with_the_clusters_key_needs_no_token_of_an_operator(tmp_path):
    (tmp_path / "key").write_text("k" * 64)
    (tmp_path / "tokens.yaml").write_text("- {token: 0123456789abcdef, name: ops, role: operator}\n")
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
    tree = {"model": {"path": "/m"}, "pools": pools, "cluster": {"key_file": str(tmp_path / "key")}}
    wire = Wire(security_of(parse_config(tree | {"security": {"tokens_file": str(tmp_path / "tokens.yaml")}})))
    async with listening(FakeController([]), wire) as address:
        assert await left(address, wire=wire) == ["no group is left"]
        with pytest.raises(ServingError, match="no known token"):
            await left(address)
