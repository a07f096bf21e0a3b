"""Measures a profile on running groups: prefill ms by length, decode step ms by batch and context, and the hand-over.

One group of each layout is measured, nothing else should run there. Every finished cell goes to a journal beside the target, so that a
broken-off sweep goes on where it stopped. Called by the CLI; `sweep_bench.py` does the measuring.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from cluster.profile import (
    DecodeCell,
    DecodeTable,
    PrefillCell,
    PrefillTable,
    Profile,
    TransferCell,
    decode_surface,
    load_profile,
    prefill_curve,
    save_profile,
)
from cluster.sweep_bench import Cell, Result, Role, SweepBench, SweepSettings, room_tokens
from common.errors import ConfigError
from common.proto import types_pb2
from common.versions import NOT_INSTALLED, version_of

ROLES: tuple[Role, ...] = ("prefill", "decode")
SOFTWARE = ("tandem", "torch", "triton", "grpcio")


def plan_sweep(groups: Sequence[types_pb2.GroupDescription], settings: SweepSettings, guess: Profile) -> list[Cell]:
    """Every cell that fits the groups, in the order of measuring, with the time it may take: what a dry run shows."""
    cells: list[Cell] = []
    for group in _one_per_layout(groups, types_pb2.ROLE_PREFILL):
        curve = prefill_curve(guess, group.layout.tp, group.layout.ep, group.weights)
        for tokens in settings.prefill_tokens:
            if tokens < _longest(group):
                seconds = (settings.runs + settings.warm_up) * curve.at(tokens) / 1e3
                cells.append(_cell("prefill", group, tokens, 1, seconds))
    for group in _one_per_layout(groups, types_pb2.ROLE_DECODE):
        surface = decode_surface(guess, group.layout.tp, group.layout.ep, group.weights)
        for context in settings.contexts:
            fill_ms = min((prefill_curve(guess, g.layout.tp, g.layout.ep, g.weights).at(context) for g in groups), default=0.0)
            for batch in settings.batches:
                room = context + room_tokens(settings, batch)
                if batch <= group.max_batch and batch * room <= group.capacity_tokens and room <= _longest(group):
                    seconds = (settings.steps * surface.at(batch, batch * context) + batch * fill_ms) / 1e3
                    cells.append(_cell("decode", group, context, batch, seconds))
    return [cell for cell in cells if settings.role in (None, cell.role)]


async def sweep(
    groups: Sequence[types_pb2.GroupDescription],
    settings: SweepSettings,
    path: Path,
    *,
    model: str,
    hardware: str,
    guess: Profile,
    on_progress: Callable[[int, int, Cell, Result | None], None] = lambda done, total, cell, result: None,
) -> Profile:
    """Measures every cell that the journal does not have yet and writes the profile to `path`.

    Where one role is measured alone, the other's tables are those of the profile at `path`, or of `guess` if there is none: a profile is
    always whole, and each cell says whether it was measured.

    `on_progress(done, total, cell, result)`: before each cell with None, after it with what was measured.
    Raises: ConfigError if there is no group of a role, or if journal or kept profile are of another model or hardware; ServingError if a
        group fails
    """
    cells = plan_sweep(groups, settings, guess)
    kept = _kept_profile(path, model, hardware, settings, guess)
    for role in ROLES if settings.role is None else (settings.role,):
        if not any(cell.role == role for cell in cells):
            raise ConfigError(f"sweep: no {role} group that could be measured")
    if not any(group.role == types_pb2.ROLE_PREFILL for group in groups):
        raise ConfigError("sweep: no prefill group, which decode steps need too: it fills their contexts")
    journal = Journal(path.with_name(path.name + ".journal"), f"{model} on {hardware}")
    async with SweepBench(groups, settings) as bench:
        for done, cell in enumerate(cells):
            result = journal.results.get(cell.key)
            if result is None:
                on_progress(done, len(cells), cell, None)
                result = await bench.measure(cell)
                journal.add(cell, result)
            on_progress(done + 1, len(cells), cell, result)
    profile = _profile_of(cells, journal.results, model, hardware, settings, kept)
    save_profile(profile, path)
    journal.remove()
    return profile


class Journal:
    """Results so far, one JSON object a line; the first line names what was measured."""

    def __init__(self, path: Path, subject: str):
        """Raises: ConfigError if the file belongs to another subject or can't be read"""
        self._path = path
        self.results: dict[str, Result] = {}
        if not path.exists():
            path.write_text(json.dumps({"subject": subject}) + "\n")
            return
        try:
            head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
            found = head["subject"]
            for line in lines:
                handovers = tuple((int(n), float(p), float(t)) for n, p, t in line["handovers"])
                self.results[line["key"]] = Result(line["ms"], line["spread_ms"], handovers)
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"journal {path} can't be read ({exc}); delete it to start anew") from exc
        if found != subject:
            raise ConfigError(f"journal {path} is of {found!r}, not of {subject!r}; delete it to start anew")

    def add(self, cell: Cell, result: Result) -> None:
        self.results[cell.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps({"key": cell.key} | asdict(result)) + "\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _kept_profile(path: Path, model: str, hardware: str, settings: SweepSettings, guess: Profile) -> Profile:
    if settings.role is None or not path.exists():
        return guess
    kept = load_profile(path)
    if (kept.model, kept.hardware) != (model, hardware):
        raise ConfigError(
            f"{path} is of {kept.model} on {kept.hardware}, not of {model} on {hardware}: one role alone can't be put into it"
        )
    return kept


def _profile_of(
    cells: Sequence[Cell], results: dict[str, Result], model: str, hardware: str, settings: SweepSettings, kept: Profile
) -> Profile:
    layouts = {(cell.role, cell.tp, cell.ep, cell.weights): None for cell in cells}
    prefill, decode = [], []
    for role, tp, ep, weights in layouts:
        mine = [(cell, results[cell.key]) for cell in cells if (cell.role, cell.tp, cell.ep, cell.weights) == (role, tp, ep, weights)]
        if role == "prefill":
            points = tuple(PrefillCell(tokens=c.tokens, ms=r.ms, spread_ms=r.spread_ms, how="measured") for c, r in mine)
            prefill.append(PrefillTable(tp=tp, ep=ep, weights=weights, cells=points))
        else:
            steps = tuple(
                DecodeCell(batch=c.batch, context_tokens=c.tokens, ms=r.ms, spread_ms=r.spread_ms, how="measured") for c, r in mine
            )
            decode.append(DecodeTable(tp=tp, ep=ep, weights=weights, cells=steps))
    handovers = [h for cell in cells for h in results[cell.key].handovers]
    counts = {"prefill": f"{settings.runs} prefills", "decode": f"{settings.steps} decode steps"}
    obtained = "measured by tandem sweep: median of " + " and of ".join(counts[r] for r in ROLES if settings.role in (None, r))
    if settings.role is not None:
        obtained += f"; the other role's cells: {kept.obtained}"
    return Profile(
        model=model,
        hardware=hardware,
        created=datetime.date.today().isoformat(),
        obtained=obtained,
        software=_software(),
        prefill=tuple(prefill) or kept.prefill,
        decode=tuple(decode) or kept.decode,
        transfer=_transfer_of(handovers) if handovers else kept.transfer,
    )


def _transfer_of(handovers: Sequence[tuple[int, float, float]]) -> TransferCell:
    """What shows after the first token is mostly the fixed part; the rate is a lower bound, since copying ran beside the prefill."""
    fixed_ms = min(transfer_ms for _, _, transfer_ms in handovers)
    gbytes_per_s = max(size / (prefill_ms + transfer_ms) / 1e6 for size, prefill_ms, transfer_ms in handovers)
    return TransferCell(
        gbytes_per_s=max(gbytes_per_s, 1e-6),
        fixed_ms=fixed_ms,
        how="measured",
        note="fixed: least time from first token to commit; rate: most bytes over prefill + transfer time, a lower bound",
    )


def _software() -> dict[str, str]:
    return {name: version for name in SOFTWARE if (version := version_of(name)) != NOT_INSTALLED}


def _one_per_layout(groups: Sequence[types_pb2.GroupDescription], role: int) -> list[types_pb2.GroupDescription]:
    first = {(g.layout.tp, g.layout.ep, g.weights): g for g in reversed(groups) if g.role == role}
    return sorted(first.values(), key=lambda g: (g.weights, g.layout.tp, g.layout.ep))


def _cell(role: Role, group: types_pb2.GroupDescription, tokens: int, batch: int, seconds: float) -> Cell:
    return Cell(role, group.layout.tp, group.layout.ep, group.weights, tokens, batch, seconds)


def _longest(group: types_pb2.GroupDescription) -> int:
    return min(group.max_model_len, group.capacity_tokens or group.max_model_len)
