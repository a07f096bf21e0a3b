"""Tokens and roles: what a guard lets through, files that change, and files that are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest

from cluster.router.server import RouterServer
from common.access import Role, Tokens
from common.config import parse_config
from common.errors import ConfigError
from common.keyring import Keyring
from common.proto import router_pb2, router_pb2_grpc
from common.wire import Security, Wire
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup
from tests.support.router_bed import bed, request_of

CLIENT, OPERATOR = "client-token-0123456789", "operator-token-0123456789"
KEY = b"k" * 32


@pytest.fixture
def security(tmp_path: Path) -> Security:
    digest = hashlib.sha256(OPERATOR.encode()).hexdigest()
    (tmp_path / "tokens.yaml").write_text(f"- {{token: {CLIENT}, name: app}}\n- {{sha256: {digest}, name: ops, role: operator}}\n")
    (tmp_path / "key").write_bytes(KEY + b"\n")
    return Security(key_file=str(tmp_path / "key"), tokens_file=str(tmp_path / "tokens.yaml"), requires_tokens=True)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),) if token else ()


async def status_of(call) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as exc:
        return exc.code().name
    return "OK"


async def test_a_clients_token_generates_and_cannot_drain_a_pool(security: Security):
    async with bed(FakePrefillGroup(), FakeDecodeGroup(pool="d"), wire=Wire(security), token=OPERATOR) as router:
        drain = router_pb2.SetPoolStateRequest(pool="d", state=router_pb2.POOL_STATE_DRAINING)
        stub = router_pb2_grpc.RouterStub(router.channel)
        for token, generates, lists, drains in (
            ("", "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED"),
            ("wrong-token-0123456789", "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED"),
            (CLIENT, "OK", "OK", "PERMISSION_DENIED"),
            (OPERATOR, "OK", "OK", "OK"),
        ):
            shown = metadata(token)

            async def generate(shown=shown) -> None:
                async for _ in stub.Generate(request_of(), timeout=10, metadata=shown):
                    pass

            assert await status_of(generate()) == generates, token
            assert await status_of(stub.ListPools(router_pb2.ListPoolsRequest(), metadata=shown)) == lists
            assert await status_of(stub.SetPoolState(drain, metadata=shown)) == drains
            pools = (await stub.ListPools(router_pb2.ListPoolsRequest(), metadata=metadata(OPERATOR))).pools
            assert {p.state for p in pools if p.name == "d"} == {
                router_pb2.POOL_STATE_DRAINING if drains == "OK" else router_pb2.POOL_STATE_ACTIVE
            }


def test_tokens_come_and_go_with_their_file(tmp_path: Path):
    file = tmp_path / "tokens.yaml"
    file.write_text(f"- {{token: {CLIENT}}}\n")
    tokens = Tokens(file, Keyring((KEY,)))
    book = tokens._book
    assert book is not None
    assert tokens.role_of(f"Bearer {CLIENT}") is Role.CLIENT
    file.write_text(f"- {{token: {OPERATOR}, role: operator}}\n")
    book._next_look_s = 0.0
    assert tokens.role_of(f"Bearer {CLIENT}") is None
    assert tokens.role_of(f"bearer {OPERATOR}") is Role.OPERATOR
    file.write_text("- {token: short}\n")
    book._next_look_s = 0.0
    assert tokens.role_of(f"Bearer {OPERATOR}") is Role.OPERATOR, "a wrong file changes nothing"


def test_the_clusters_own_token_is_known_by_every_key_that_is_still_good():
    old, new = b"o" * 32, b"n" * 32
    shown = Keyring((old,)).tokens()[0]
    assert Tokens(None, Keyring((new, old))).role_of(f"Bearer {shown}") is Role.INTERNAL
    assert Tokens(None, Keyring((new,))).role_of(f"Bearer {shown}") is None
    assert old.hex() not in shown


@pytest.mark.parametrize(
    "text", ["{}", "- {token: short}", "- {role: client}", "- {token: long-enough-token-0, role: root}", "- [", f"- {{sha256: {'g' * 64}}}"]
)
def test_a_wrong_tokens_file_is_refused_without_its_tokens_in_the_message(tmp_path: Path, text: str):
    file = tmp_path / "tokens.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        Tokens(file, Keyring((KEY,)))
    assert "tokens.yaml" in str(error.value)
    assert "long-enough" not in str(error.value)


def test_tokens_without_a_key_file_are_refused(tmp_path: Path):
    tree = {
        "model": {"path": "x"},
        "pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
        "security": {"tokens_file": str(tmp_path / "t")},
    }
    with pytest.raises(ConfigError, match=r"cluster\.key_file"):
        parse_config(tree)


def test_every_method_of_the_router_has_a_role():
    assert RouterServer.ROLES == {"SetPoolState": Role.OPERATOR}
    methods = {m.name for m in router_pb2.DESCRIPTOR.services_by_name["Router"].methods}
    assert set(RouterServer.ROLES) <= methods
