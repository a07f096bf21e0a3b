"""The sweep on the real local cluster: real groups, real hand-overs, and every block back afterwards."""

from __future__ import annotations

import pytest

from cluster.profile import builtin_profile, load_profile
from cluster.sweep import sweep
from cluster.sweep_bench import SweepSettings, layout_of
from cluster.sweep_fit import planned_of
from common.proto import router_pb2, router_pb2_grpc, types_pb2
from tests.support.local_cluster import VOCAB_SIZE, channel_of, wait_idle

SETTINGS = SweepSettings(prefill_tokens=(16, 256), batches=(1, 4), contexts=(64,), runs=2, steps=8, vocab_size=VOCAB_SIZE)


@pytest.mark.slow
async def test_sweep_measures_the_real_groups_and_leaves_nothing_behind(local_cluster, tmp_path):
    path = tmp_path / "cpu.json"
    async with channel_of(local_cluster) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        loads = await stub.GetLoads(router_pb2.GetLoadsRequest())
        groups = [group.description for group in loads.groups]
        planned = {layout_of(g): planned_of(g, local_cluster.config, None) for g in groups if g.role == types_pb2.ROLE_DECODE}
        guess = builtin_profile(None, on_cuda=False)
        profile = await sweep(groups, SETTINGS, path, model="tiny", hardware="CPU", guess=guess, planned=planned)
        await wait_idle(stub, 5.0)
    assert load_profile(path) == profile
    assert {(table.tp, len(table.cells)) for table in profile.prefill} == {(1, 2), (2, 2)}
    for table in profile.prefill:
        short, long = table.cells
        assert 0 < short.ms < long.ms
    (decode,) = profile.decode
    assert [(cell.batch, cell.context_tokens) for cell in decode.cells] == [(1, 64), (4, 64)]
    assert profile.transfer.gbytes_per_s > 0
    assert decode.room is not None
    (row,) = decode.room.largest
    assert (decode.room.kv_blocks_computed, decode.room.kv_blocks_confirmed) == (4096, 4096)
    assert (row.computed, row.confirmed, row.confirmed_limit) == (64, 64, "max_batch")
    assert "places of the batch are taken" in row.refusal
