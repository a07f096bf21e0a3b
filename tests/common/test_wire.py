"""TLS between processes: who is refused, and that certificates are replaced under running calls without one error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from common.errors import ConfigError
from common.tls import TlsFiles
from common.wire import PLAIN, Channels, Security, Wire
from tests.support.certificates import Authority, Files
from tests.support.router_bed import until

CHECK = "/grpc.health.v1.Health/Check"


@contextlib.asynccontextmanager
async def serving(tls: TlsFiles | None, *, internal: bool = True) -> AsyncIterator[str]:
    server = grpc.aio.server()
    servicer = health_aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = Wire(Security(tls=tls)).bind(server, "127.0.0.1:0", internal=internal)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def call(address: str, tls: TlsFiles | None) -> str:
    """Returns: OK, or the status that the call ended with"""
    async with Wire(Security(tls=tls)).channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as exc:
            return exc.code().name
    return "OK"


@pytest.fixture
def authority() -> Authority:
    return Authority()


async def test_who_shows_no_certificate_or_a_bad_one_is_refused(authority: Authority, tmp_path: Path):
    server = Files(tmp_path / "server").write(authority)
    good = Files(tmp_path / "good").write(authority, "some client")
    expired = Files(tmp_path / "expired").write(authority, "some client", expired=True)
    stranger = Files(tmp_path / "stranger").write(Authority("stranger"), "some client", trust=authority.pem)
    async with serving(server.tls("internal")) as address:
        assert await call(address, good.tls()) == "OK"
        assert await call(address, good.tls(shows_cert=False)) == "UNAVAILABLE", "no certificate"
        assert await call(address, expired.tls()) == "UNAVAILABLE"
        assert await call(address, stranger.tls()) == "UNAVAILABLE", "another authority's certificate"
        assert await call(address, None) == "UNAVAILABLE", "no TLS at all"


async def test_a_server_with_a_bad_certificate_is_not_believed(authority: Authority, tmp_path: Path):
    client = Files(tmp_path / "client").write(authority)
    for name, kwargs in {"wrong name": {"names": ["10.9.9.9"]}, "expired": {"expired": True}}.items():
        server = Files(tmp_path / name).write(authority, *kwargs.pop("names", []), **kwargs)
        async with serving(server.tls()) as address:
            assert await call(address, client.tls()) == "UNAVAILABLE", name
    stranger = Files(tmp_path / "stranger").write(Authority("stranger"))
    async with serving(stranger.tls("none")) as address:
        assert await call(address, client.tls()) == "UNAVAILABLE", "another authority's certificate"


async def test_one_name_on_all_servers_stands_for_their_addresses(authority: Authority, tmp_path: Path):
    files = Files(tmp_path).write(authority, "tandem.internal")
    async with serving(files.tls()) as address:
        assert await call(address, files.tls()) == "UNAVAILABLE", "the certificate does not name the host"
        assert await call(address, files.tls(peer_name="tandem.internal")) == "OK"
        assert await call(address, files.tls(peer_name="other.internal")) == "UNAVAILABLE"


@pytest.mark.parametrize(("mutual", "internal", "wanted"), [("all", False, "UNAVAILABLE"), ("internal", False, "OK"), ("none", True, "OK")])
async def test_mutual_says_which_servers_ask_for_a_certificate(authority, tmp_path: Path, mutual, internal: bool, wanted: str):
    files = Files(tmp_path).write(authority)
    async with serving(files.tls(mutual), internal=internal) as address:
        assert await call(address, files.tls(shows_cert=False)) == wanted


async def test_certificates_and_authority_are_replaced_under_load_without_an_error(tmp_path: Path, monkeypatch):
    """Each rotation writes the files anew, the authority by way of a bundle of both; calls and new connections go on all the time."""
    old, new = Authority("old"), Authority("new")
    files = Files(tmp_path / "both").write(old)
    watched = Security(tls=files.tls())
    calls, rotations = 0, 0
    async with serving(files.tls()) as address:
        channels = Channels(Wire(watched))
        done = asyncio.Event()

        async def load(fresh: bool) -> None:
            nonlocal calls
            while not done.is_set():
                if fresh:
                    assert await call(address, files.tls()) == "OK"
                else:
                    stub = health_pb2_grpc.HealthStub(channels.get(address))
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                calls += 1

        workers = [asyncio.create_task(load(fresh)) for fresh in (True, False, False)]
        try:
            both = old.pem + new.pem
            for authority, trust in ((old, both), (new, both), (new, new.pem)):
                seen = calls
                files.write(authority, trust=trust)
                rotations += 1
                await asyncio.sleep(1.3)  # longer than files are looked at again
                while calls < seen + 30:
                    assert not any(worker.done() for worker in workers)
                    await asyncio.sleep(0.01)
        finally:
            done.set()
            await asyncio.gather(*workers)
            await channels.close()
        stale = Files(tmp_path / "stale").write(old, "client", trust=new.pem)
        assert await call(address, stale.tls()) == "UNAVAILABLE", "the old authority is no longer believed"
    assert rotations == 3
    assert calls >= 90


async def test_half_written_files_leave_the_last_good_ones_in_use(authority: Authority, tmp_path: Path):
    files = Files(tmp_path / "server").write(authority)
    client = Files(tmp_path / "client").write(authority)
    async with serving(files.tls()) as address:
        (tmp_path / "server" / "key.pem").write_bytes(b"half")
        await asyncio.sleep(1.2)
        assert await call(address, client.tls()) == "OK"


def test_files_that_do_not_fit_are_refused_at_the_start(authority: Authority, tmp_path: Path):
    files = Files(tmp_path).write(authority)
    (tmp_path / "key.pem").write_bytes(authority.issue("other")[1])
    with pytest.raises(ConfigError, match=r"key\.pem"):
        Wire(Security(tls=files.tls()))
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        Wire(Security(tls=TlsFiles(str(tmp_path / "none" / "ca.pem"))))


async def test_channels_to_peers_that_are_gone_do_not_pile_up(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("common.wire.time", SimpleNamespace(monotonic=lambda: now_s))
    channels = Channels(PLAIN, idle_s=60.0)
    used = channels.get("127.0.0.1:1")
    gone = [channels.get(f"127.0.0.1:{port}") for port in range(2, 20)]
    now_s = 40.0
    assert channels.get("127.0.0.1:1") is used
    now_s = 61.0
    fresh = channels.get("127.0.0.1:20")
    await until(lambda: all(channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in gone))
    assert channels.get("127.0.0.1:1") is used
    assert grpc.ChannelConnectivity.SHUTDOWN not in (used.get_state(), fresh.get_state())
    await channels.close()
