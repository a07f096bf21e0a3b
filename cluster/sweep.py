"""Measures a profile on running groups: prefill ms by length, decode step ms by batch and context, the hand-over, and what fits.

One group of each layout is measured, nothing else should run there. Every finished cell goes to a journal beside the target, so that a
broken-off sweep goes on where it stopped. Called by the CLI; `sweep_bench.py` does the measuring, `sweep_fit.py` the counting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from cluster.profile import DecodeRoom, Profile, decode_surface, load_profile, prefill_curve, save_profile
from cluster.sweep_bench import CELL_TIMEOUT_S, Cell, Layout, Result, SweepBench, SweepSettings, layout_of, one_per_layout, room_tokens
from cluster.sweep_fit import Admission, Planned, differences, room_of, why_not
from cluster.sweep_journal import Journal
from cluster.sweep_profile import ROLES, profile_of, with_room
from common.errors import ConfigError, ServingError, WorkerLost
from common.kv_proto import geometry_from_proto
from common.proto import types_pb2
from decode_worker.scheduler import largest_batch

Groups = Sequence[types_pb2.GroupDescription]
T = TypeVar("T")


class Surroundings(Protocol):
    """What the sweep tells and asks of the cluster around it."""

    def doing(self, text: str) -> None:
        """Something that is no cell and takes a while."""

    def tell(self, text: str) -> None:
        """A line that must not be overlooked."""

    async def after_loss(self, lost: Groups) -> list[types_pb2.GroupDescription]:
        """Tells why these groups ended and waits for others in their place. Returns: all groups that run now"""


@dataclass
class Found:
    """What a sweep has brought: results by a cell's key, by decode layout what fits, by a cell's key why it failed."""

    results: dict[str, Result]
    admissions: dict[Layout, list[Admission]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def plan_sweep(groups: Groups, settings: SweepSettings, guess: Profile) -> list[Cell]:
    """Every cell in the order of measuring, with the time it may take: what a dry run shows. Those that do not fit their group say why."""
    cells: list[Cell] = []
    for group in one_per_layout(groups, types_pb2.ROLE_PREFILL):
        curve = prefill_curve(guess, *layout_of(group))
        for tokens in settings.prefill_tokens:
            seconds = (settings.runs + settings.warm_up) * curve.at(tokens) / 1e3
            skip = "" if tokens < _longest(group) else f"the longest prompt it takes with an answer has {_longest(group) - 1:,} tokens"
            cells.append(Cell("prefill", *layout_of(group), tokens, 1, seconds, skip))
    for group in one_per_layout(groups, types_pb2.ROLE_DECODE):
        surface = decode_surface(guess, *layout_of(group))
        for context in settings.contexts:
            fill_ms = min((prefill_curve(guess, *layout_of(g)).at(context) for g in groups), default=0.0)
            for batch in settings.batches:
                seconds = (settings.steps * surface.at(batch, batch * context) + batch * fill_ms) / 1e3
                skip = why_not(group, batch, context + room_tokens(settings, batch))
                cells.append(Cell("decode", *layout_of(group), context, batch, seconds, skip))
    return [cell for cell in cells if settings.role in (None, cell.role)]


async def sweep(
    groups: Groups,
    settings: SweepSettings,
    path: Path,
    *,
    model: str,
    hardware: str,
    guess: Profile,
    planned: Mapping[Layout, Planned] | None = None,
    surroundings: Surroundings | None = None,
    on_progress: Callable[[int, int, Cell, Result | None], None] = lambda done, total, cell, result: None,
) -> Profile:
    """Measures every cell that the journal does not have yet and writes the profile to `path`.

    Where one role is measured alone, the other's tables are those of the profile at `path`, or of `guess` if there is none: a profile is
    always whole, and each cell says whether it was measured. Before decode cells each group is asked how many sequences it admits.

    `on_progress(done, total, cell, result)`: before each cell with None, after it with what was measured. `planned`: what decode groups
    have by their configuration. `surroundings`: with them, a cell that fails is left out and the sweep goes on; the journal stays
    Raises: ConfigError if there is no group of a role, or if journal or kept profile are of another model or hardware; ServingError if a
        group fails, with `surroundings` only if nothing of a role could be measured
    """
    plan = plan_sweep(groups, settings, guess)
    cells = [cell for cell in plan if not cell.skip]
    kept = _kept_profile(path, model, hardware, settings, guess)
    roles = ROLES if settings.role is None else (settings.role,)
    for role in roles:
        if not any(cell.role == role for cell in cells):
            why = "".join(f"; {cell.key}: {cell.skip}" for cell in plan if cell.role == role)
            raise ConfigError(f"sweep: no {role} group that could be measured{why}")
    if not any(group.role == types_pb2.ROLE_PREFILL for group in groups):
        raise ConfigError("sweep: no prefill group, which decode steps need too: it fills their contexts")
    journal = Journal(path.with_name(path.name + ".journal"), f"{model} on {hardware}")
    run = _Run(groups, settings, journal, surroundings)
    found = await run.over(cells, on_progress)
    for role in roles:
        if not any(cell.key in found.results for cell in cells if cell.role == role):
            raise WorkerLost(f"sweep: no {role} cell could be measured: " + "; ".join(f"{k}: {why}" for k, why in found.failed.items()))
    rooms = _rooms_of(groups, settings, planned or {}, found)
    if surroundings is not None:
        for layout, room in rooms.items():
            for line in differences(room):
                surroundings.tell(f"DIFFERENCE in decode tp{layout[0]} ep{layout[1]} {layout[2]}: {line}")
    measured = [cell for cell in cells if cell.key in found.results]
    profile = profile_of(measured, found.results, model, hardware, settings, kept)
    left_out = [f"{cell.key}: skipped, {cell.skip}" for cell in plan if cell.skip]
    left_out += [f"{key}: failed, {why}" for key, why in found.failed.items()]
    profile = with_room(profile.model_copy(update={"unmeasured": tuple(left_out)}), groups, settings, rooms)
    save_profile(profile, path)
    if not found.failed:
        journal.remove()
    return profile


class _Run:
    """One pass over the cells. A group that ends takes its cell with it; the sweep goes on with the group that takes its place."""

    def __init__(self, groups: Groups, settings: SweepSettings, journal: Journal, surroundings: Surroundings | None):
        self._groups, self._settings, self._journal, self._around = groups, settings, journal, surroundings
        self._bench = SweepBench(groups, settings)
        self.found = Found(journal.results)

    async def over(self, cells: Sequence[Cell], on_progress: Callable[[int, int, Cell, Result | None], None]) -> Found:
        await self._bench.open()
        try:
            for group in one_per_layout(self._groups, types_pb2.ROLE_DECODE) if any(c.role == "decode" for c in cells) else ():
                await self._admissions(group)
            for done, cell in enumerate(cells):
                result = self.found.results.get(cell.key)
                if result is None:
                    on_progress(done, len(cells), cell, None)
                    result = await self._tried(cell.key, cell, partial(self._bench.measure, cell))
                    if result is not None:
                        self._journal.add(cell, result)
                on_progress(done + 1, len(cells), cell, result)
        finally:
            await self._bench.close()
        return self.found

    async def _admissions(self, group: types_pb2.GroupDescription) -> None:
        geometry, layout = geometry_from_proto(group.kv), layout_of(group)
        blocks = group.capacity_tokens // geometry.block_size_tokens
        for tokens in _contexts_of(group, self._settings):
            cell = Cell("decode", *layout, tokens)
            if self._around is not None:
                self._around.doing(f"admitting {tokens:,}-token sequences")
            expected = largest_batch(geometry, blocks, group.max_batch, tokens)
            key = f"largest batch of decode tp{cell.tp} ep{cell.ep} {cell.weights} tokens={tokens}"
            admission = await self._tried(key, cell, partial(self._bench.admit, layout, tokens, expected))
            if admission is not None:
                self.found.admissions.setdefault(layout, []).append(admission)

    async def _tried(self, key: str, cell: Cell, work: Callable[[], Awaitable[T]]) -> T | None:
        """Returns: None if it failed and the sweep goes on. Raises: as the work, without surroundings"""
        if not self._bench.can_measure(cell):
            self.found.failed[key] = "its group ended, and no other took its place"
            return None
        try:
            return await work()
        except (ServingError, TimeoutError) as exc:
            if self._around is None:
                raise
            self.found.failed[key] = f"{type(exc).__name__}: {exc}" if str(exc) else f"took longer than {CELL_TIMEOUT_S:.0f} s"
            self._around.tell(f"{key}: {self.found.failed[key]}")
            await self._recover(self._around)
            return None

    async def _recover(self, around: Surroundings) -> None:
        lost = await self._bench.silent()
        await self._bench.stop()
        if lost:
            await self._bench.close()
            self._bench = SweepBench(await around.after_loss(lost), self._settings)
            await self._bench.open()


def _kept_profile(path: Path, model: str, hardware: str, settings: SweepSettings, guess: Profile) -> Profile:
    if settings.role is None or not path.exists():
        return guess
    kept = load_profile(path)
    if (kept.model, kept.hardware) != (model, hardware):
        raise ConfigError(
            f"{path} is of {kept.model} on {kept.hardware}, not of {model} on {hardware}: one role alone can't be put into it"
        )
    return kept


def _rooms_of(
    groups: Groups, settings: SweepSettings, planned: Mapping[Layout, Planned], found: Found
) -> dict[Layout, DecodeRoom]:  # fmt: skip
    """By layout, of those that were asked."""
    decodes = {layout_of(group): group for group in one_per_layout(groups, types_pb2.ROLE_DECODE)}
    return {
        layout: room_of(decodes[layout], planned.get(layout), _contexts_of(decodes[layout], settings), admissions)
        for layout, admissions in found.admissions.items()
    }


def _contexts_of(group: types_pb2.GroupDescription, settings: SweepSettings) -> list[int]:
    """Those that a sequence of this group may reach."""
    return [tokens for tokens in settings.contexts if tokens <= _longest(group)]


def _longest(group: types_pb2.GroupDescription) -> int:
    return min(group.max_model_len, group.capacity_tokens or group.max_model_len)
