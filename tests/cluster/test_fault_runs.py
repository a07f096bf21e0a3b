"""A whole cluster under every kind of fault at once, small: the runs of `benchmarks/faults` are the same at size."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.faults.storms import following
from tests.support.faults.bed import PoolPlan, fault_bed, fault_config
from tests.support.faults.load import Clients, Shape
from tests.support.faults.plan import FaultSettings, counts_of

POOLS = (PoolPlan("prefill", 1, 1), PoolPlan("prefill", 2, 1), PoolPlan("decode", 1, 2))
REQUESTS = 150


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_spoilt_messages_a_kill_a_stop_and_clients_that_leave_cost_no_token_no_block_and_no_ending(tmp_path):
    settings = FaultSettings(str(tmp_path), seed=3, one_in=16, delay_s=0.2)
    with fault_bed(tmp_path, fault_config(tmp_path, POOLS), settings) as bed:
        asyncio.run(trouble(bed))
    counts = counts_of(tmp_path)
    assert sum(count for key, count in counts.items() if key.startswith("data")) > 10
    assert {key.split()[1] for key in counts} == {"drop", "delay", "reorder", "duplicate", "truncate", "flip"}


async def trouble(bed) -> None:
    rng = random.Random(5)
    cancelled = {number: rng.uniform(0, 1) for number in range(0, REQUESTS, 5)}
    clients = Clients(bed.router_address, Shape(), bed.oracle)

    def ended() -> int:
        return sum(bool(record.ends) for record in bed.oracle.records)

    async def hurt() -> None:
        while ended() < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        decodes = [group for group in bed.groups.values() if group.pool == "decode-tp1"]
        bed.kill(decodes[0], 0)
        while ended() < 80:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await bed.stop(decodes[1], 0, 0.5)
        twins = next(group for group in bed.groups.values() if group.pool == "prefill-tp2")
        bed.kill(twins, 1)

    async with following(bed):
        await bed.until_whole()
        await asyncio.gather(clients.closed_loop(REQUESTS, 16, cancelled.get), hurt())
        await bed.until_whole()
        await bed.until_idle(30.0)
    await clients.close()
    oracle = bed.oracle
    assert len(oracle.records) == REQUESTS
    assert (oracle.lost(), oracle.double(), oracle.wrong()) == ([], [], [])
    assert [fault.kind for fault in oracle.faults] == ["kill", "stop", "kill"]
    assert oracle.success_percent() > 80, oracle.ends()
    assert any(record.attempts > 1 for record in oracle.records), "nothing was ever tried again"
