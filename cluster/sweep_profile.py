"""From a sweep's results to a profile. Pure but for the date and the versions of what is installed. Called by `sweep.py`."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

from cluster.profile import DecodeCell, DecodeRoom, DecodeTable, PrefillCell, PrefillTable, Profile, TransferCell
from cluster.sweep_bench import Cell, Layout, Result, Role, SweepSettings, layout_of, one_per_layout
from cluster.sweep_fit import cell_bytes
from common.proto import types_pb2
from common.versions import NOT_INSTALLED, version_of

ROLES: tuple[Role, ...] = ("prefill", "decode")
SOFTWARE = ("tandem", "torch", "triton", "grpcio")


def profile_of(
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


def with_room(
    profile: Profile, groups: Sequence[types_pb2.GroupDescription], settings: SweepSettings, rooms: Mapping[Layout, DecodeRoom]
) -> Profile:
    """The profile with what fits, and each cell's memory."""
    decodes = {layout_of(group): group for group in one_per_layout(groups, types_pb2.ROLE_DECODE)}
    tables = []
    for table in profile.decode:
        group, room = decodes.get((table.tp, table.ep, table.weights)), rooms.get((table.tp, table.ep, table.weights))
        if group is None or settings.role == "prefill":
            tables.append(table)
            continue
        cells = []
        for cell in table.cells:
            kv_bytes, rank_bytes = cell_bytes(group, room.memory if room else None, cell.batch, cell.context_tokens)
            cells.append(cell.model_copy(update={"kv_bytes": kv_bytes, "rank_bytes": rank_bytes}))
        tables.append(table.model_copy(update={"cells": tuple(cells), "room": room}))
    return profile.model_copy(update={"decode": tuple(tables)})


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
