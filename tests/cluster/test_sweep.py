"""The sweep over fake groups with known times: what it plans, what it measures, and that it goes on where it stopped."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from cluster.profile import builtin_profile, load_profile, save_profile
from cluster.sweep import plan_sweep, sweep
from cluster.sweep_bench import SweepSettings
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
        fitting = [cell for cell in plan_sweep(described(found), SETTINGS, GUESS) if cell.role == "decode"]
        assert [(cell.tokens, cell.batch) for cell in fitting] == [(32, 1), (32, 3), (128, 1)]


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
