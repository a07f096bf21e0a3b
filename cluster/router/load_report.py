"""What a router tells the controller of its load, so that pools can grow and shrink. Reads pools, changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import grpc

from cluster.cost_model import PreparedPool
from cluster.router.decode_link import DecodeLink
from cluster.router.directory import CHANNEL_OPTIONS
from cluster.router.pool import DecodePool, PrefillPool, base_name
from cluster.router.pools import Pools
from common.proto import control_pb2, control_pb2_grpc, types_pb2
from common.wire import Wire

logger = logging.getLogger(__name__)
REPORT_S = 1.0
REPORT_TIMEOUT_S = 2.0


async def report_forever(pools: Pools, itl_targets: Mapping[str, float], address: str, wire: Wire) -> None:
    """`itl_targets`: [ms] by decode pool, those that have one. Runs until cancelled; a controller that is away misses nothing that matters:
    what counts up goes on counting. A request that starts to wait for a pool that sleeps is told at once."""
    async with wire.channel(address, CHANNEL_OPTIONS) as channel:
        stub = wire.stub(control_pb2_grpc.DirectoryStub(channel))
        while True:
            groups = [link.name for pool in pools.set.all() for link in pool.order]
            report = control_pb2.LoadReport(router_id=pools.router_id, pools=loads_of(pools, itl_targets, _now_s()), groups=groups)
            try:
                await stub.Report(report, timeout=REPORT_TIMEOUT_S)
            except grpc.RpcError as exc:
                logger.debug("load not reported: %s", exc.code())
            try:
                async with asyncio.timeout(REPORT_S):
                    await pools.wait_for_sleeper()
            except TimeoutError:
                continue
            await asyncio.sleep(REPORT_S / 20)  # requests that come in a row are told once


def loads_of(pools: Pools, itl_targets: Mapping[str, float], now_s: float) -> list[control_pb2.PoolLoad]:
    """One row per pool; several configurations of one pool, as while it is replaced, are one."""
    rows: dict[str, control_pb2.PoolLoad] = {}
    for prefill in pools.set.prefill.values():
        _add_prefill(rows.setdefault(base_name(prefill.spec.name), control_pb2.PoolLoad()), prefill, now_s)
    for decode in pools.set.decode.values():
        name = base_name(decode.spec.name)
        row = rows.setdefault(name, control_pb2.PoolLoad(sequences_per_group=decode.spec.max_batch))
        _add_decode(row, decode, itl_targets.get(name), now_s)
    for name, row in rows.items():
        row.pool = name
        row.waiting = pools.waiting_for(row.role)
    return list(rows.values())


def _add_prefill(row: control_pb2.PoolLoad, pool: PrefillPool, now_s: float) -> None:
    links = list(pool.order)
    row.role = types_pb2.ROLE_PREFILL
    row.groups += len(links)
    row.arrived_prefill_s += pool.arrived_ms / 1e3
    row.queued_s += pool.queue.service_ms / 1e3
    row.running_s += sum(link.book.busy_ms(now_s) for link in links) / 1e3
    row.queue_wait_s = max(row.queue_wait_s, pool.wait_ms(links, now_s) / 1e3 if links else 0.0)


def _add_decode(row: control_pb2.PoolLoad, pool: DecodePool, target_ms: float | None, now_s: float) -> None:
    links: list[DecodeLink] = list(pool.order)
    row.role = types_pb2.ROLE_DECODE
    row.groups += len(links)
    own = sum(link.own_sequences for link in pool.links.values())
    row.sequences += own + len(pool.expected)
    row.itl_ms = max([row.itl_ms, *(link.load.last_step_ms for link in links if link.load.running)])
    row.kv_blocks_used += sum(link.load.total_full_blocks - link.load.free_full_blocks for link in links)
    row.kv_blocks_total += sum(link.load.total_full_blocks for link in links)
    if target_ms is not None:
        context = sum(link.book.context_tokens for link in links) / max(sum(link.book.batch for link in links), 1)
        fits = fitting_batch(pool.prepared, context, target_ms, pool.itl.factor(now_s))
        row.sequences_per_group = min(row.sequences_per_group, fits)


def fitting_batch(pool: PreparedPool, context_tokens: float, target_ms: float, factor: float) -> int:
    """Most sequences of this context with which a step stays within the target, at least 1. `factor`: on the profile's step times."""
    assert pool.surface is not None
    low, high = 1, pool.spec.max_batch
    while low < high:
        middle = (low + high + 1) // 2
        if pool.surface.at(middle, middle * context_tokens) * factor <= target_ms:
            low = middle
        else:
            high = middle - 1
    return low


def _now_s() -> float:
    return asyncio.get_running_loop().time()
