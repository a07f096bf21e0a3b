"""What this hardware takes: prefill ms by layout and length, decode step ms by layout, batch and context, and transfer speed.

A profile is a versioned file, written by `tandem sweep` or shipped in `cluster/profiles/`, never changed after load. Curves and surfaces
made from it interpolate linearly between its cells and never fall when tokens, batch or context grow. Read by the cost model.
"""

from __future__ import annotations

import bisect
import json
import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError

BUILTIN_FOLDER = Path(__file__).parent / "profiles"
SCALING_EXPONENT = 0.7  # time of an unmeasured tp: that of the nearest measured one times (tp_measured / tp) ** this
FAR = 16  # grids are extended to this multiple of their last point, then held
BIGGER_BATCH = 4

How = Literal["measured", "derived", "assumed"]


class Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PrefillCell(Node):
    tokens: int = Field(ge=1)
    ms: float = Field(gt=0, description="median")
    spread_ms: float = Field(default=0.0, ge=0, description="largest minus smallest run")
    how: How
    note: str = Field(default="", description="formula of a derived cell")


class DecodeCell(Node):
    batch: int = Field(ge=1, description="sequences in the step")
    context_tokens: int = Field(ge=1, description="mean over the sequences")
    ms: float = Field(gt=0, description="median of one step")
    spread_ms: float = Field(default=0.0, ge=0)
    how: How
    note: str = ""
    kv_bytes: int | None = Field(default=None, ge=0, description="KV blocks of these sequences on one rank, computed; null: unknown")
    rank_bytes: int | None = Field(
        default=None, ge=0, description="device memory that a rank needs for this cell in all, KV included, computed; null: unknown"
    )


class RankMemory(Node):
    """A decode rank's device memory, computed from the model's shapes, layout and weight format, for the rank that has the least left."""

    device_bytes: int = Field(ge=0, description="all memory of one GPU")
    process_bytes: int = Field(ge=0, description="CUDA context and loaded kernels; assumed")
    weights_bytes: int = Field(ge=0, description="as the kernels want them packed")
    step_bytes: int = Field(ge=0, description="buffers of a step of max_batch sequences, and what other ranks see of them")
    margin_bytes: int = Field(ge=0, description="what the engine leaves free for libraries, graphs and transfers")

    @property
    def besides_kv(self) -> int:
        return self.process_bytes + self.weights_bytes + self.step_bytes + self.margin_bytes


class LargestBatch(Node):
    """How many sequences of one length a decode group holds at once."""

    context_tokens: int = Field(ge=1, description="of each sequence, prompt and output together")
    computed: int | None = Field(default=None, ge=0, description="from its configuration's KV blocks and max_batch; null: not at hand")
    computed_limit: Literal["max_batch", "KV blocks"] | None = Field(default=None, description="what decides the computed number")
    confirmed: int | None = Field(
        default=None, ge=0, description="sequences that the running group admitted at once before it refused one more; null: not asked"
    )
    confirmed_limit: Literal["max_batch", "KV blocks"] | None = Field(default=None, description="what the group was out of")
    refusal: str = Field(default="", description="the group's words for the one that was too many")


class DecodeRoom(Node):
    """What fits a decode group: computed from the configuration, confirmed by the running group."""

    kv_blocks_computed: int | None = Field(default=None, ge=0, description="KV blocks of the full layers; null: unknown")
    kv_blocks_confirmed: int | None = Field(default=None, ge=0, description="those that the running group has; null: not asked")
    max_batch: int = Field(ge=1)
    memory: RankMemory | None = Field(default=None, description="null: not a GPU, or its memory is not known")
    largest: tuple[LargestBatch, ...] = ()


class PrefillTable(Node):
    tp: int = Field(ge=1)
    ep: int = Field(ge=1)
    weights: str
    cells: tuple[PrefillCell, ...] = Field(min_length=1)


class DecodeTable(Node):
    tp: int = Field(ge=1)
    ep: int = Field(ge=1)
    weights: str
    cells: tuple[DecodeCell, ...] = Field(min_length=1)
    room: DecodeRoom | None = Field(default=None, description="null: not looked at")


class TransferCell(Node):
    gbytes_per_s: float = Field(gt=0, description="one prefill rank to one decode rank")
    fixed_ms: float = Field(ge=0, description="reservation, commit and the last layer's latency")
    how: How
    note: str = ""


class Profile(Node):
    """One file per model and hardware. Times in ms, sizes in tokens, rates in GB/s (10^9 bytes)."""

    schema_version: Literal[1] = 1
    model: str
    hardware: str
    created: str = Field(description="ISO date")
    obtained: str = Field(description="how the numbers came about, in a sentence")
    software: dict[str, str] = {}
    prefill: tuple[PrefillTable, ...] = Field(min_length=1)
    decode: tuple[DecodeTable, ...] = Field(min_length=1)
    transfer: TransferCell
    unmeasured: tuple[str, ...] = Field(default=(), description="cells of the sweep that were left out, each with its reason")

    @property
    def label(self) -> str:
        return f"{self.model} on {self.hardware}, {self.created}"


class Curve:
    """Prefill ms over tokens: piecewise linear, constant below the first cell; above the last the time per token goes on growing as it did
    between the last two (attention is quadratic)."""

    def __init__(self, cells: tuple[PrefillCell, ...] | list[PrefillCell], scale: float = 1.0):
        by_tokens = {cell.tokens: cell.ms * scale for cell in cells}
        self._x = sorted(by_tokens)
        self._y = _rising([by_tokens[x] for x in self._x])
        last = self._x[-1]
        for factor in (2, 4, FAR):
            self._y.append(self._beyond(last * factor, len(by_tokens)))
            self._x.append(last * factor)
        self._y = _rising(self._y)

    @property
    def points(self) -> list[int]:
        """Tokens between which it is linear; outside it is constant."""
        return self._x

    def at(self, tokens: float) -> float:
        """Returns: ms"""
        return _interpolate(self._x, self._y, tokens)

    def _beyond(self, tokens: int, measured: int) -> float:
        last, last_ms = self._x[measured - 1], self._y[measured - 1]
        rate = last_ms / last
        growth = 0.0
        if measured > 1:
            before = self._x[measured - 2]
            growth = max(0.0, (rate - self._y[measured - 2] / before) / (last - before))
        return tokens * (rate + growth * (tokens - last))


class Surface:
    """Decode step ms over batch and the sum of all contexts: bilinear on the grid of all batches and sums that occur. Holes are filled by
    going on along the batch, the outside with the nearest slope.

    The sum and not the mean, since a short sequence that joins lowers the mean and yet never makes a step faster.
    """

    def __init__(self, cells: tuple[DecodeCell, ...] | list[DecodeCell], scale: float = 1.0):
        rows: dict[int, dict[int, float]] = {}
        for cell in cells:
            rows.setdefault(cell.context_tokens, {})[cell.batch] = cell.ms * scale
        batches = sorted({cell.batch for cell in cells})
        self._batches = [*batches, batches[-1] * BIGGER_BATCH, batches[-1] * FAR]
        contexts = sorted(rows)
        columns = [[_extend(rows[c], batch) for c in contexts] for batch in self._batches]
        sums = sorted({batch * context for batch in batches for context in contexts})
        self._sums = [0, *sums, sums[-1] * FAR]
        self._grid: list[list[float]] = []
        for total in self._sums:
            row = [_along_context(contexts, column, total / batch) for batch, column in zip(self._batches, columns, strict=True)]
            below = self._grid[-1] if self._grid else row
            self._grid.append(_rising([max(pair) for pair in zip(row, below, strict=True)]))

    @property
    def batches(self) -> list[int]:
        """Batches between which it is linear; outside it is constant. `sums` are the same for the sum of contexts."""
        return self._batches

    @property
    def sums(self) -> list[int]:
        return self._sums

    def at(self, batch: float, total_context_tokens: float) -> float:
        """Returns: ms of one step of `batch` sequences that hold `total_context_tokens` together"""
        sums, grid = self._sums, self._grid
        row = min(max(bisect.bisect_right(sums, total_context_tokens) - 1, 0), len(sums) - 2)
        part = min(max((total_context_tokens - sums[row]) / (sums[row + 1] - sums[row]), 0.0), 1.0)
        low = _interpolate(self._batches, grid[row], batch)
        return low + part * (_interpolate(self._batches, grid[row + 1], batch) - low)


def load_profile(path: Path) -> Profile:
    """Raises: ConfigError naming the file and the field"""
    try:
        return Profile.model_validate_json(path.read_text())
    except OSError as exc:
        raise ConfigError(f"profile {path}: {exc.strerror}") from exc
    except (ValidationError, UnicodeDecodeError) as exc:
        detail = (
            "; ".join(".".join(map(str, e["loc"])) + ": " + e["msg"] for e in exc.errors())
            if isinstance(exc, ValidationError)
            else str(exc)
        )
        raise ConfigError(f"profile {path}: {detail}") from exc


def save_profile(profile: Profile, path: Path) -> None:
    """Writes beside the target and renames, so that a reader never sees half a file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(profile.model_dump(mode="json", exclude_none=True), indent=1) + "\n")
    partial.replace(path)


def builtin_profile(num_layers: int | None, *, on_cuda: bool) -> Profile:
    """The shipped profile that fits best. `num_layers` of the model: 36 is gpt-oss-120b, 24 is gpt-oss-20b."""
    if on_cuda and num_layers is not None and num_layers >= 24:
        return load_profile(BUILTIN_FOLDER / ("h200_gpt-oss-120b.json" if num_layers >= 36 else "h200_gpt-oss-20b.json"))
    return load_profile(BUILTIN_FOLDER / "cpu_tiny.json")


def prefill_curve(profile: Profile, tp: int, ep: int, weights: str) -> Curve:
    """The curve of this layout, else of the nearest one in the profile scaled by `SCALING_EXPONENT`."""
    table = min(profile.prefill, key=lambda t: _distance(t, tp, ep, weights))
    return Curve(table.cells, (table.tp / tp) ** SCALING_EXPONENT)


def decode_surface(profile: Profile, tp: int, ep: int, weights: str) -> Surface:
    """As `prefill_curve`, for decode steps."""
    table = min(profile.decode, key=lambda t: _distance(t, tp, ep, weights))
    return Surface(table.cells, (table.tp / tp) ** SCALING_EXPONENT)


def _distance(table: PrefillTable | DecodeTable, tp: int, ep: int, weights: str) -> tuple[bool, float, float]:
    return (table.weights != weights, abs(math.log2(table.tp / tp)), abs(math.log2(table.ep / ep)))


def _interpolate(xs: list, ys: list[float], x: float) -> float:
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect.bisect_right(xs, x)
    x0, y0 = xs[i - 1], ys[i - 1]
    return y0 + (ys[i] - y0) * (x - x0) / (xs[i] - x0)


def _rising(values: list[float]) -> list[float]:
    """Each value at least the one before: noise in a sweep must not make more work look cheaper."""
    out: list[float] = []
    for value in values:
        out.append(max(value, out[-1]) if out else value)
    return out


def _extend(row: dict[int, float], batch: int) -> float:
    xs = sorted(row)
    ys = [row[x] for x in xs]
    if batch <= xs[-1]:
        return _interpolate(xs, ys, batch)
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else 0.0
    return ys[-1] + slope * (batch - xs[-1])


def _along_context(contexts: list[int], column: list[float], context: float) -> float:
    """Linear between the contexts of one batch, and on with the first or last slope outside, never below a third of the first value."""
    if len(contexts) == 1:
        return column[0]
    i = min(max(bisect.bisect_right(contexts, context), 1), len(contexts) - 1)
    slope = max(0.0, (column[i] - column[i - 1]) / (contexts[i] - contexts[i - 1]))
    return max(column[i - 1] + slope * (context - contexts[i - 1]), column[0] / 3)
