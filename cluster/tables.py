"""What a profile means in money: prefill latency and $ per 1M input tokens, decode speed against $ per 1M output tokens.

A profile in, rows, text and pictures out: Markdown, CSV, PNG (with matplotlib) and one HTML page. Called by `tandem tables`.
"""

from __future__ import annotations

import base64
import csv
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.profile import DecodeTable, PrefillTable, Profile, decode_surface
from common.errors import ConfigError

DPI = 150
PIXELS = (1350, 900)  # of a plot


@dataclass(frozen=True)
class PrefillRow:
    """One prompt at a time on one group. `usd_per_1m`: $ per million input tokens, all GPUs of the group paid."""

    layout: str
    tokens: int
    ms: float
    usd_per_1m: float
    how: str


@dataclass(frozen=True)
class DecodePoint:
    """A group at one batch size. `ms`: of a step; `tokens_per_s`: of one user; `usd_per_1m`: $ per million output tokens; `is_best`: on the
    Pareto front; `kv_bytes`: KV of these sequences on one rank, `rank_bytes`: all that a rank needs with them, None if not known."""

    layout: str
    batch: int
    ms: float
    tokens_per_s: float
    usd_per_1m: float
    how: str
    kv_bytes: int | None = None
    rank_bytes: int | None = None
    is_best: bool = False


def prefill_rows(profile: Profile, usd_per_gpu_hour: float) -> list[PrefillRow]:
    return [
        PrefillRow(label(table), cell.tokens, cell.ms, table.tp * usd_per_gpu_hour * cell.ms / 3.6e6 / cell.tokens * 1e6, cell.how)
        for table in profile.prefill
        for cell in table.cells
    ]


def decode_points(profile: Profile, context_tokens: int, usd_per_gpu_hour: float, *, only_cells: bool = False) -> list[DecodePoint]:
    """Every layout and measured batch size at this context, interpolated where the context was not measured; the Pareto front is marked.

    `only_cells`: nothing is interpolated, as after a sweep, where cells that are missing did not fit
    """
    points = []
    for table in profile.decode:
        surface = decode_surface(profile, table.tp, table.ep, table.weights)
        for batch in sorted({cell.batch for cell in table.cells}):
            exact = next((c for c in table.cells if (c.batch, c.context_tokens) == (batch, context_tokens)), None)
            if exact is None and only_cells:
                continue
            ms = surface.at(batch, batch * context_tokens)
            usd = table.tp * usd_per_gpu_hour * ms / 3.6e6 / batch * 1e6
            how, *memory = (exact.how, exact.kv_bytes, exact.rank_bytes) if exact else ("interpolated", None, None)
            points.append(DecodePoint(label(table), batch, ms, 1e3 / ms, usd, how, *memory))
    front = pareto([(point.tokens_per_s, point.usd_per_1m) for point in points])
    return [DecodePoint(**{**vars(point), "is_best": best}) for point, best in zip(points, front, strict=True)]


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (speed, price) no other point beats in one without losing in the other."""
    return [not any(s >= speed and p <= price and (s, p) != (speed, price) for s, p in points) for speed, price in points]


def label(table: PrefillTable | DecodeTable) -> str:
    return f"TP{table.tp}{f' EP{table.ep}' if table.ep > 1 else ''} {table.weights}"


def prefill_markdown(profile: Profile, usd_per_gpu_hour: float) -> str:
    """Layouts down, prompt lengths across; each cell `ms ($ per 1M input tokens)`."""
    rows = prefill_rows(profile, usd_per_gpu_hour)
    lengths = sorted({row.tokens for row in rows})
    by_cell = {(row.layout, row.tokens): row for row in rows}
    lines = [_line(["layout", *(f"{n:,}" for n in lengths)]), _line(["---"] + ["---:"] * len(lengths))]
    for layout in dict.fromkeys(row.layout for row in rows):
        cells = [by_cell.get((layout, n)) for n in lengths]
        lines.append(_line([layout, *(f"{c.ms:.1f} ms (${c.usd_per_1m:.3f})" if c else "" for c in cells)]))
    return "\n".join(lines) + "\n"


def decode_markdown(profile: Profile, context_tokens: int, usd_per_gpu_hour: float, *, only_cells: bool = False) -> str:
    """One line per layout and batch, fastest first; the Pareto front in bold. Memory where the profile knows it."""
    points = sorted(decode_points(profile, context_tokens, usd_per_gpu_hour, only_cells=only_cells), key=lambda p: -p.tokens_per_s)
    if not points:
        return "No cell of this context.\n"
    heads = ["layout", "batch", "step ms", "tokens/s per user", "$ per 1M output tokens"]
    has_memory = any(p.kv_bytes is not None for p in points)
    heads += ["KV MiB per rank", "MiB per rank in all"] if has_memory else []
    lines = [_line(heads), _line(["---"] + ["---:"] * (len(heads) - 1))]
    for p in points:
        cells = [p.layout, str(p.batch), f"{p.ms:.2f}", f"{p.tokens_per_s:.1f}", f"{p.usd_per_1m:.3f}"]
        cells += [_mib(p.kv_bytes), _mib(p.rank_bytes)] if has_memory else []
        lines.append(_line([f"**{cell}**" for cell in cells] if p.is_best else cells))
    return "\n".join(lines) + "\n"


def room_markdown(profile: Profile) -> str:
    """The largest batch of each layout and context, computed beside confirmed, and what a rank's memory goes to; "" if nobody looked."""
    tables = [(table, table.room) for table in profile.decode if table.room is not None]
    if not tables:
        return ""
    heads = ["layout", "context", "KV blocks computed", "confirmed", "largest batch computed", "confirmed", "decided by"]
    lines = [_line(heads), _line(["---"] + ["---:"] * 5 + ["---"])]
    after = []
    for table, room in tables:
        for row in room.largest:
            numbers = (room.kv_blocks_computed, room.kv_blocks_confirmed, row.computed, row.confirmed)
            differs = any(a is not None and b is not None and a != b for a, b in (numbers[:2], numbers[2:]))
            limit = row.confirmed_limit or row.computed_limit or "-"
            cells = [
                label(table),
                f"{row.context_tokens:,}",
                *map(_count, numbers),
                f"max_batch {room.max_batch}" if limit == "max_batch" else limit,
            ]
            lines.append(_line([*cells[:-1], f"{cells[-1]}; **DIFFERENCE**"] if differs else cells))
        if (m := room.memory) is not None:
            after.append(
                f"{label(table)}, MiB of one rank, computed: {_mib(m.device_bytes)} in all, weights {_mib(m.weights_bytes)}, step buffers "
                f"{_mib(m.step_bytes)}, process {_mib(m.process_bytes)} (assumed), left free by the engine {_mib(m.margin_bytes)}."
            )
    return "\n".join([*lines, *("\n" + line for line in after)]) + "\n"


def to_csv(rows: Sequence[PrefillRow] | Sequence[DecodePoint]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(vars(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(row) for row in rows)
    return out.getvalue()


def to_markdown(profile: Profile, contexts: Sequence[int], usd_per_gpu_hour: float, *, only_cells: bool = False) -> str:
    """Both tables, what fits, and what was not measured. `only_cells`: as for `decode_points`"""
    parts = [f"# {profile.label}\n", f"{profile.obtained}. ${usd_per_gpu_hour:.2f} per GPU-hour.\n", "## Prefill, one prompt at a time\n"]
    parts.append(prefill_markdown(profile, usd_per_gpu_hour))
    for context in contexts:
        table = decode_markdown(profile, context, usd_per_gpu_hour, only_cells=only_cells)
        parts += [f"## Decode at {context:,} tokens of context\n", table]
    if room := room_markdown(profile):
        parts += ["## The largest batch that fits, computed and confirmed\n", room]
    if profile.unmeasured:
        parts += ["## Not measured\n", "\n".join(f"- {line}" for line in profile.unmeasured) + "\n"]
    return "\n".join(parts)


def to_html(profiles: Sequence[Profile], plots: Mapping[tuple[str, int], bytes], usd_per_gpu_hour: float) -> str:
    """Tables and plots of all profiles in one page that needs nothing else. `plots`: PNG by model and context."""
    body = []
    for profile in profiles:
        body += [f"<h1>{html.escape(profile.label)}</h1>", f"<p>{html.escape(profile.obtained)}. ${usd_per_gpu_hour:.2f} per GPU-hour.</p>"]
        body += ["<h2>Prefill, one prompt at a time</h2>", _html_table(prefill_markdown(profile, usd_per_gpu_hour))]
        for context in (context for model, context in plots if model == profile.model):
            image = base64.b64encode(plots[profile.model, context]).decode()
            body.append(f"<h2>Decode at {context:,} tokens of context</h2>")
            body.append(f'<img alt="decode speed against price" width="{PIXELS[0] // 2}" src="data:image/png;base64,{image}">')
            body.append(_html_table(decode_markdown(profile, context, usd_per_gpu_hour)))
    style = (
        "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 8px;border:1px solid #ccc;text-align:right}"
    )
    title = html.escape(", ".join(profile.label for profile in profiles))
    return f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{style}</style>{''.join(body)}\n"


def decode_png(profile: Profile, context_tokens: int, usd_per_gpu_hour: float) -> bytes:
    """Speed per user across, price up, both logarithmic; one line per layout, the Pareto front as large dots on a dashed line.

    Raises: ConfigError without matplotlib
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, StrMethodFormatter
    except ImportError as exc:
        raise ConfigError("plots need matplotlib: pip install tandem[plots]") from exc
    points = decode_points(profile, context_tokens, usd_per_gpu_hour)
    figure = Figure(figsize=(PIXELS[0] / DPI, PIXELS[1] / DPI), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    for layout in dict.fromkeys(p.layout for p in points):
        mine = [p for p in points if p.layout == layout]
        axes.plot([p.tokens_per_s for p in mine], [p.usd_per_1m for p in mine], marker=".", linewidth=1, label=layout)
    front = sorted((p for p in points if p.is_best), key=lambda p: p.tokens_per_s)
    axes.plot(
        [p.tokens_per_s for p in front], [p.usd_per_1m for p in front], "ko--", linewidth=1, markersize=5, label="Pareto front", zorder=0
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(LogLocator(subs=()))
    axes.set_xlabel("tokens/s per user")
    axes.set_ylabel("$ per 1M output tokens")
    price = f"${usd_per_gpu_hour:.2f}/GPU-hour"
    axes.set_title(f"{profile.model} on {profile.hardware}: decode at {context_tokens:,} tokens of context, {price}")
    axes.grid(alpha=0.3)
    axes.legend()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def write_all(profiles: Sequence[Profile], contexts: Sequence[int], usd_per_gpu_hour: float, folder: Path) -> list[Path]:
    """`tables.md`, `tables.html`, and per model the CSV of each table and the PNG of each plot. Returns: what was written

    Raises: ConfigError without matplotlib, or if two profiles are of the same model
    """
    if len({profile.model for profile in profiles}) < len(profiles):
        raise ConfigError("tables: profiles of the same model would overwrite each other's files")
    plots = {(p.model, context): decode_png(p, context, usd_per_gpu_hour) for p in profiles for context in contexts}
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | bytes] = {
        "tables.md": "\n".join(to_markdown(p, contexts, usd_per_gpu_hour) for p in profiles),
        "tables.html": to_html(profiles, plots, usd_per_gpu_hour),
    }
    for profile in profiles:
        name = profile.model.replace(" ", "_").replace("/", "_")
        files[f"{name}_prefill.csv"] = to_csv(prefill_rows(profile, usd_per_gpu_hour))
        for context in contexts:
            files[f"{name}_decode_{context}.csv"] = to_csv(decode_points(profile, context, usd_per_gpu_hour))
            files[f"{name}_decode_{context}.png"] = plots[profile.model, context]
    for file, content in files.items():
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    return [folder / file for file in files]


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 20):,.1f}"


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _html_table(markdown: str) -> str:
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if not line.startswith("| ---")]
    cells = [["<b>" + html.escape(c.strip("*")) + "</b>" if c.startswith("**") else html.escape(c) for c in row] for row in rows]
    return "<table>" + "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells) + "</table>"
