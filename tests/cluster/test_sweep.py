"""The sweep over fake groups with known times: what it plans, what it measures, and that it goes on where it stopped."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.profile import builtin_profile, load_profile, save_profile
from cluster.sweep import plan_sweep, sweep
from cluster.sweep_bench import SweepSettings
from cluster.sweep_fit import Planned
from cluster.tables import to_markdown
from common.errors import ConfigError, WorkerLost
from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup

SETTINGS = SweepSettings(prefill_tokens=(16, 64, 256), batches=(1, 3), contexts=(32, 128), runs=3, steps=8)
GUESS = builtin_profile(None, on_cuda=False)


@asynccontextmanager
async def groups():
    fast = FakePrefillGroup("p2", "p2-0", tp=2, prefill_ms=lambda tokens: 1.0 + tokens / 100)
    slow = FakePrefillGroup("p1", "p1-0", prefill_ms=lambda tokens: 1.0 + tokens / 50)
    decode = FakeDecodeGroup(step_ms=3.0)
    all_groups = [fast, slow, decode]
    for group in all_groups:
        await group.start()
    try:
        yield all_groups
    finally:
        await asyncio.gather(*(group.kill() for group in all_groups))


def described(found):
    return [group.description for group in found]


async def run(found, path, settings=SETTINGS, **kwargs):
    return await sweep(described(found), settings, path, model="fake", hardware="none", guess=GUESS, **kwargs)


async def test_plan_lists_every_cell_that_fits_with_an_estimate():
    async with groups() as found:
        cells = plan_sweep(described(found), SETTINGS, GUESS)
        assert len(cells) == 2 * 3 + 2 * 2
        assert all(cell.estimated_s > 0 for cell in cells)
        found[2].description.capacity_tokens = 400
        found[2].description.max_model_len = 300
        planned = [cell for cell in plan_sweep(described(found), SETTINGS, GUESS) if cell.role == "decode"]
        assert [(cell.tokens, cell.batch) for cell in planned if not cell.skip] == [(32, 1), (32, 3), (128, 1)]
        (skipped,) = [cell for cell in planned if cell.skip]
        assert "3 x 14 KV blocks are needed, it has 25" in skipped.skip


async def test_sweep_measures_each_layout_and_writes_the_profile(tmp_path):
    seen = []
    async with groups() as found:
        profile = await run(
            found, tmp_path / "p.json", on_progress=lambda done, total, cell, result: seen.append((done, total, result is None))
        )
        assert found[2].free_blocks == found[2].total_blocks
    assert load_profile(tmp_path / "p.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    by_tp = {table.tp: {cell.tokens: cell.ms for cell in table.cells} for table in profile.prefill}
    assert by_tp == {1: {t: 1.0 + t / 50 for t in SETTINGS.prefill_tokens}, 2: {t: 1.0 + t / 100 for t in SETTINGS.prefill_tokens}}
    (table,) = profile.decode
    assert {(cell.batch, cell.context_tokens): cell.ms for cell in table.cells} == {(b, c): 3.0 for b in (1, 3) for c in (32, 128)}
    assert all(cell.how == "measured" for cell in table.cells)
    assert seen[-1][:2] == (10, 10)
    assert profile.transfer.how == "measured"


async def test_one_role_alone_leaves_the_other_half_as_it_was(tmp_path):
    """That of the file; where there is none, the shipped profile's."""
    path = tmp_path / "p.json"
    prefill, decode = (replace(SETTINGS, role=role) for role in ("prefill", "decode"))
    async with groups() as found:
        first = await run(found[:2], path, prefill)  # no decode group is needed
        assert (first.decode, first.transfer) == (GUESS.decode, GUESS.transfer)
        assert GUESS.obtained in first.obtained
        second = await run(found, path, decode)
        assert second.prefill == first.prefill
        assert {cell.ms for table in second.decode for cell in table.cells} == {3.0}
        with pytest.raises(ConfigError, match="no decode group"):
            await run(found[:2], path, decode)
    assert load_profile(path) == second


async def test_one_role_alone_is_not_put_into_the_profile_of_another_model_or_hardware(tmp_path):
    path, prefill = tmp_path / "p.json", replace(SETTINGS, role="prefill")
    for other in ({"model": "other"}, {"hardware": "other"}):
        save_profile(GUESS.model_copy(update={"model": "fake", "hardware": "none"} | other), path)
        before = path.read_text()
        async with groups() as found:
            with pytest.raises(ConfigError, match="other"):
                await run(found, path, prefill)
        assert path.read_text() == before


async def test_decode_alone_needs_a_prefill_group_that_fills_its_contexts(tmp_path):
    async with groups() as found:
        with pytest.raises(ConfigError, match="no prefill group"):
            await run(found[2:], tmp_path / "p.json", replace(SETTINGS, role="decode"))


async def test_a_broken_off_sweep_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "p.json"

    def stop_after_4(done, total, cell, result):
        if done == 4 and result is not None:
            raise KeyboardInterrupt

    async with groups() as found:
        with pytest.raises(KeyboardInterrupt):
            await run(found, path, on_progress=stop_after_4)
        assert not path.exists()
        measured = []
        await run(found, path, on_progress=lambda done, total, cell, result: measured.append(cell.key) if result is None else None)
        assert len(measured) == 6
    assert path.exists()


async def test_a_journal_of_another_model_is_refused(tmp_path):
    path = tmp_path / "p.json"
    (tmp_path / "p.json.journal").write_text('{"subject": "other on none"}\n')
    async with groups() as found:
        with pytest.raises(ConfigError, match="other on none"):
            await run(found, path)
        (tmp_path / "p.json.journal").write_text("{broken")
        with pytest.raises(ConfigError, match="delete it"):
            await run(found, path)


async def test_a_group_that_dies_ends_the_sweep_typed(tmp_path):
    async with groups() as found:

        def kill(done, total, cell, result):
            if cell.role == "decode" and result is None:
                asyncio.get_running_loop().create_task(found[2].kill())

        with pytest.raises(WorkerLost):
            await run(found, tmp_path / "p.json", on_progress=kill)


async def test_sweep_without_a_role_is_refused(tmp_path):
    async with groups() as found:
        with pytest.raises(ConfigError, match="no decode group"):
            await sweep(described(found[:2]), SETTINGS, tmp_path / "p.json", model="m", hardware="h", guess=GUESS)


class Around:
    """Surroundings that remember what they were told; `another` gives the groups that run after a loss."""

    def __init__(self, another=None):
        self.told, self.lost = [], []
        self._another = another

    def doing(self, text):
        pass

    def tell(self, text):
        self.told.append(text)

    async def after_loss(self, lost):
        self.lost += [group.group for group in lost]
        return await self._another()


async def test_the_largest_batch_is_confirmed_by_places_that_the_group_really_gives(tmp_path):
    """32 tokens are 2 blocks and 128 are 8: of 100 blocks the batch of 20 decides at 32 tokens, the blocks at 128."""
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(capacity_tokens=1600, max_batch=20)
    around = Around()
    for group in (prefill, decode):
        await group.start()
    try:
        profile = await run([prefill, decode], tmp_path / "p.json", planned={(1, 1, "mxfp4"): Planned(100, None)}, surroundings=around)
        assert decode.free_blocks == decode.total_blocks
    finally:
        await asyncio.gather(prefill.kill(), decode.kill())
    room = profile.decode[0].room
    assert (room.kv_blocks_computed, room.kv_blocks_confirmed) == (100, 100)
    assert [(b.context_tokens, b.computed, b.computed_limit) for b in room.largest] == [(32, 20, "max_batch"), (128, 12, "KV blocks")]
    assert [(b.context_tokens, b.confirmed, b.confirmed_limit) for b in room.largest] == [(32, 20, "max_batch"), (128, 12, "KV blocks")]
    assert all("blocks wanted" in b.refusal for b in room.largest)
    assert around.told == []
    table = to_markdown(profile, SETTINGS.contexts, 3.0)
    assert "| TP1 mxfp4 | 32 | 100 | 100 | 20 | 20 | max_batch 20 |" in table
    assert "| TP1 mxfp4 | 128 | 100 | 100 | 12 | 12 | KV blocks |" in table
    assert "| step ms |" in table
    assert "| **2.00** |" in table


async def test_a_group_that_is_not_what_its_configuration_makes_it_is_told_loudly(tmp_path):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(capacity_tokens=1600, max_batch=20)
    around = Around()
    for group in (prefill, decode):
        await group.start()
    try:
        profile = await run([prefill, decode], tmp_path / "p.json", planned={(1, 1, "mxfp4"): Planned(120, None)}, surroundings=around)
    finally:
        await asyncio.gather(prefill.kill(), decode.kill())
    assert [line.partition(": ")[2] for line in around.told] == [
        "KV blocks: 120 computed, 100 confirmed (-16.7%)",
        "largest batch at 128 tokens: 15 computed, 12 confirmed (-20.0%)",
    ]
    assert to_markdown(profile, SETTINGS.contexts, 3.0).count("**DIFFERENCE**") == 2


async def test_cells_that_do_not_fit_are_left_out_with_their_reason(tmp_path):
    prefill, decode = FakePrefillGroup(), FakeDecodeGroup(capacity_tokens=400, max_batch=2)
    for group in (prefill, decode):
        await group.start()
    try:
        profile = await run([prefill, decode], tmp_path / "p.json")
    finally:
        await asyncio.gather(prefill.kill(), decode.kill())
    assert [(cell.batch, cell.context_tokens) for cell in profile.decode[0].cells] == [(1, 32), (1, 128)]
    assert profile.unmeasured == tuple(
        f"decode tp1 ep1 mxfp4 tokens={context} batch=3: skipped, its max_batch is 2" for context in SETTINGS.contexts
    )
    assert "## Not measured" in to_markdown(profile, SETTINGS.contexts, 3.0)


async def test_cells_know_the_memory_of_a_rank(tmp_path):
    """Two full and two sliding layers of 8 heads, K and V, 64 bf16 values: 65,536 bytes a block of each kind."""
    async with groups() as found:
        profile = await run(found, tmp_path / "p.json")
    by_cell = {(cell.batch, cell.context_tokens): cell for cell in profile.decode[0].cells}
    assert by_cell[3, 32].kv_bytes == 3 * (2 + 2) * 65536
    assert by_cell[1, 128].kv_bytes == (8 + 8) * 65536
    assert by_cell[1, 128].rank_bytes is None


async def test_a_sweep_goes_on_with_the_group_that_takes_the_place_of_one_that_ended(tmp_path):
    path, measured = tmp_path / "p.json", []
    async with groups() as found:
        decode = found[2]

        async def another():
            await decode.restart()
            return described(found)

        def kill_once(done, total, cell, result):
            measured.append((cell.role, cell.tokens, cell.batch, result is None))
            if measured == [*measured[:-1], ("decode", 32, 3, True)] and not around.lost:
                asyncio.get_running_loop().create_task(decode.kill())

        around = Around(another)
        profile = await run(found, path, on_progress=kill_once, surroundings=around)
        assert around.lost == ["decode-0"]
        assert [(cell.batch, cell.context_tokens) for cell in profile.decode[0].cells] == [(1, 32), (1, 128), (3, 128)]
        (left_out,) = profile.unmeasured
        assert left_out.startswith("decode tp1 ep1 mxfp4 tokens=32 batch=3: failed, WorkerLost")
        assert left_out.partition(": failed, ")[2] in around.told[0]
        again = await run(found, path, surroundings=around)  # the journal has all but that one
    assert again.unmeasured == ()
    assert (3, 32) in {(cell.batch, cell.context_tokens) for cell in again.decode[0].cells}
    assert not path.with_name("p.json.journal").exists()


async def test_cells_of_a_group_whose_place_nobody_takes_are_left_out(tmp_path):
    async with groups() as found:

        def kill(done, total, cell, result):
            if (cell.role, cell.tp, cell.tokens, result) == ("prefill", 1, 64, None):
                asyncio.get_running_loop().create_task(found[1].kill())

        found[1].prefill_ms = lambda tokens: 50.0

        async def another():
            return described([found[0], found[2]])

        profile = await run(found, tmp_path / "p.json", on_progress=kill, surroundings=Around(another))
    assert [(table.tp, len(table.cells)) for table in profile.prefill] == [(1, 1), (2, 3)]
    assert len(profile.decode[0].cells) == 4
    assert [line.partition(": failed, ")[2].partition(":")[0] for line in profile.unmeasured] == [
        "WorkerLost",
        "its group ended, and no other took its place",
    ]
