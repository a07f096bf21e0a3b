"""A whole cluster with mTLS, tokens and a key file: everything rotates under load without an error, and who may do what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from common.proto import control_pb2, control_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from common.wire import Security, Wire
from tests.support.certificates import Authority, Files
from tests.support.local_cluster import LocalCluster, ask, cluster_config, request, running_cluster, wait_idle
from tests.support.pace import within
from tests.support.sockets import Listening, family_of, listening
from tests.support.spans import read_spans

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

CLIENT, OPERATOR = "client-token-0123456789", "operator-token-0123456789"
OLD_KEY, NEW_KEY = "0" * 64, "1" * 64
LOOK_S = 1.3  # longer than a process takes to look at its files again
PERIOD_S = 2.0  # of load between two changes


@pytest.fixture(scope="module")
def old() -> Authority:
    return Authority("old")


@pytest.fixture(scope="module")
def secured(checkpoint: Path, tmp_path_factory, old: Authority):
    folder = tmp_path_factory.mktemp("secured")
    files = Files(folder / "tls").write(old, "tandem.internal")
    (folder / "keys").write_text(OLD_KEY)
    (folder / "tokens.yaml").write_text(f"- {{token: {CLIENT}}}\n- {{token: {OPERATOR}, role: operator}}\n")
    tls = {name: str(files.folder / f"{name.removesuffix('_file')}.pem") for name in ("ca_file", "cert_file", "key_file")}
    config = cluster_config(
        checkpoint,
        pools=[
            {"name": "prefill", "role": "prefill", "layout": {"tp": 2}, "chunk_tokens": 256, "kv_blocks": 512},
            {"name": "decode", "role": "decode", "layout": {"tp": 2, "ep": 2}, "max_batch": 16, "kv_blocks": 1024},
        ],
        kv={"dtype": "float32", "transport": "tcp"},
        security={"tls": tls | {"mutual": "all", "peer_name": "tandem.internal"}, "tokens_file": str(folder / "tokens.yaml")},
        tracing={"exporter": "file", "target": str(folder / "spans")},
        cluster={"device": "cpu", "compute_dtype": "float32", "key_file": str(folder / "keys")},
    )
    with running_cluster("secured", folder / "state", config) as cluster:
        yield cluster, files, folder


@asynccontextmanager
async def router_stub(cluster: LocalCluster, files: Files, token: str) -> AsyncIterator[router_pb2_grpc.RouterStub]:
    wire = Wire(Security(tls=files.tls(peer_name="tandem.internal")), token=token)
    async with wire.channel(cluster.router) as channel:
        yield wire.stub(router_pb2_grpc.RouterStub(channel))


async def status_of(call) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as exc:
        return exc.code().name
    return "OK"


async def test_certificates_authority_and_key_rotate_under_load_without_an_error(secured, old: Authority):
    cluster, files, folder = secured
    new = Authority("new")
    done, served = asyncio.Event(), 0

    async def load() -> None:
        nonlocal served
        while not done.is_set():
            async with router_stub(cluster, files, CLIENT) as stub:  # a new connection, with the files of now
                for _ in range(3):
                    answer = await ask(stub, request([1 + served % 900, 2, 3, 4], max_tokens=6), timeout_s=120)
                    assert len(answer.tokens) == 6
                    served += 1

    workers = [asyncio.create_task(load()) for _ in range(3)]
    try:
        for change in (
            lambda: files.write(old, "tandem.internal", trust=old.pem + new.pem),
            lambda: files.write(new, "tandem.internal", trust=old.pem + new.pem),
            lambda: files.write(new, "tandem.internal"),
            lambda: (folder / "keys").write_text(f"{OLD_KEY}\n{NEW_KEY}\n"),
            lambda: (folder / "keys").write_text(f"{NEW_KEY}\n{OLD_KEY}\n"),
            lambda: (folder / "keys").write_text(f"{NEW_KEY}\n"),
        ):
            seen = served
            change()
            await asyncio.sleep(max(LOOK_S, PERIOD_S))
            while served < seen + 4:
                failed = [worker.exception() for worker in workers if worker.done()]
                assert not failed, failed
                await asyncio.sleep(0.05)
    finally:
        done.set()
        await asyncio.gather(*workers)
    assert served >= 24
    async with router_stub(cluster, files, CLIENT) as stub:
        await wait_idle(stub, 60)


async def test_a_clients_token_can_not_drain_or_scale_and_no_token_reaches_a_group(secured):
    cluster, files, _ = secured
    drain = router_pb2.SetPoolStateRequest(pool="decode", state=router_pb2.POOL_STATE_DRAINING)
    async with router_stub(cluster, files, CLIENT) as stub:
        assert await status_of(stub.SetPoolState(drain)) == "PERMISSION_DENIED"
        pools = (await stub.ListPools(router_pb2.ListPoolsRequest())).pools
        assert {pool.state for pool in pools} == {router_pb2.POOL_STATE_ACTIVE}
        groups = [g.description for g in (await stub.GetLoads(router_pb2.GetLoadsRequest())).groups]
    async with router_stub(cluster, files, "") as stub:
        assert await status_of(stub.ListPools(router_pb2.ListPoolsRequest())) == "UNAUTHENTICATED"
    state = cluster.state
    wire = Wire(Security(tls=files.tls(peer_name="tandem.internal")))
    async with wire.channel(str(state.controller_address)) as channel:
        scale = control_pb2_grpc.DirectoryStub(channel).Scale
        for token, wanted in ((CLIENT, "PERMISSION_DENIED"), (OPERATOR, "OK")):
            shown = (("authorization", f"Bearer {token}"),)
            assert await status_of(scale(control_pb2.ScaleRequest(pool="decode", replicas=1), metadata=shown)) == wanted
    for group in groups:
        async with wire.channel(group.address) as channel:
            stub = worker_pb2_grpc.DecodeGroupStub(channel)
            for token in ("", CLIENT, OPERATOR):
                shown = (("authorization", f"Bearer {token}"),) if token else ()
                wanted = "PERMISSION_DENIED" if token else "UNAUTHENTICATED"
                if group.pool == "decode":
                    assert await status_of(stub.Drain(worker_pb2.DrainRequest(drain=True), metadata=shown)) == wanted


async def test_one_request_is_one_trace_through_every_process(secured):
    cluster, files, folder = secured
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    wire = Wire(Security(tls=files.tls(peer_name="tandem.internal")))
    shown = (("authorization", f"Bearer {CLIENT}"), ("traceparent", f"00-{trace}-{parent}-01"))
    async with wire.channel(cluster.router) as channel:
        async for _ in router_pb2_grpc.RouterStub(channel).Generate(request([5, 6, 7], max_tokens=5), timeout=60, metadata=shown):
            pass
    deadline = time.monotonic() + within(10)
    while len(spans := read_spans(folder / "spans", trace)) < 5:
        assert time.monotonic() < deadline, list(spans)
        await asyncio.sleep(0.1)
    assert set(spans) == {"generate", "queue", "prefill", "transfer", "decode"}
    assert spans["generate"].parent == parent
    assert {span.parent for name, span in spans.items() if name != "generate"} == {spans["generate"].id}
    assert len({span.raw["resource"]["attributes"]["process.pid"] for span in spans.values()}) == 3
    assert spans["transfer"].raw["attributes"]["tandem.bytes"] > 0
    assert spans["decode"].raw["attributes"]["tandem.tokens"] == 5
    assert spans["prefill"].seconds <= spans["generate"].seconds


async def test_every_port_has_an_owner_a_bind_address_and_a_guard(secured):
    """What listens is what `docs/security.md` lists; a stranger without certificate gets nothing from any port of ours but metrics."""
    cluster, files, _ = secured
    state = cluster.state
    async with router_stub(cluster, files, CLIENT) as stub:
        groups = [g.description for g in (await stub.GetLoads(router_pb2.GetLoadsRequest())).groups]
    grpc_ports = {cluster.router, str(state.controller_address), *(g.address for g in groups)}
    metrics = {cluster.metrics, *(g.metrics_address for g in groups)}
    assert state.ray_process is not None
    assert state.router_process is not None
    found = listening([*family_of(state.ray_process.pid), *family_of(state.router_process.pid)])
    ranks = {p.pid: g for g in groups for p in g.ranks}
    kv = []
    for pid in sorted({one.pid for one in found}):
        mine = [one for one in found if one.pid == pid]
        others = [one for one in mine if f"{one.host}:{one.port}" not in grpc_ports | metrics]
        group = ranks.get(pid)
        if group is not None:
            assert len(others) == (2 if group.pool == "decode" else 1), f"Ray's port, and of a decode rank the one for KV: {mine}"
            kv += [one for one in others if one.host == "127.0.0.1"]
            assert sum(one.host != "127.0.0.1" for one in others) <= 1, f"only Ray's own port may be on all addresses: {others}"
        elif "Controller" in mine[0].name:
            assert len(others) == 1, f"Ray's port beside our own: {mine}"
            assert {one.host for one in mine if one not in others} == {"127.0.0.1"}
        elif pid == state.router_process.pid:
            assert {f"{one.host}:{one.port}" for one in mine} - metrics <= {cluster.router} | _router_metrics(found, pid, cluster)
        else:
            assert "ray" in mine[0].name.lower(), mine
    for address in sorted(grpc_ports):
        async with grpc.aio.insecure_channel(address) as channel:
            call = worker_pb2_grpc.DecodeGroupStub(channel).Drain(worker_pb2.DrainRequest(drain=True), timeout=10)
            assert await status_of(call) == "UNAVAILABLE", f"{address} talks without TLS"
    assert len(kv) >= 2, "both decode ranks"
    for one in kv:
        assert await _hangs_up(one), f"{one} goes on after noise"


def _router_metrics(found: list[Listening], pid: int, cluster: LocalCluster) -> set[str]:
    """The router's second port."""
    others = [one for one in found if one.pid == pid and f"{one.host}:{one.port}" != cluster.router]
    assert len(others) == 1
    return {f"{one.host}:{one.port}" for one in others}


async def _hangs_up(port: Listening) -> bool:
    """Whether noise ends the connection (Ray's gRPC ports and ours both do that)."""
    reader, writer = await asyncio.open_connection(port.host, port.port)
    try:
        writer.write(b"\xff" * 4096)
        async with asyncio.timeout(20):
            while await reader.read(4096):
                pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()
