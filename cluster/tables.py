"""What a profile means in money: prefill latency and $ per 1M input tokens, decode speed against $ per 1M output tokens.

Pure: a profile in, rows and text out (Markdown, CSV, one HTML page with SVG plots that needs nothing else). Called by `tandem tables`.
"""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.profile import DecodeTable, PrefillTable, Profile, decode_surface

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
WIDTH, HEIGHT, MARGIN = 640, 400, 60


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
    """A group at one batch size. `tokens_per_s`: of one user; `usd_per_1m`: $ per million output tokens; `is_best`: on the Pareto front."""

    layout: str
    batch: int
    tokens_per_s: float
    usd_per_1m: float
    how: str
    is_best: bool = False


def prefill_rows(profile: Profile, usd_per_gpu_hour: float) -> list[PrefillRow]:
    return [
        PrefillRow(label(table), cell.tokens, cell.ms, table.tp * usd_per_gpu_hour * cell.ms / 3.6e6 / cell.tokens * 1e6, cell.how)
        for table in profile.prefill
        for cell in table.cells
    ]


def decode_points(profile: Profile, context_tokens: int, usd_per_gpu_hour: float) -> list[DecodePoint]:
    """Every layout and measured batch size at this context, interpolated where the context was not measured; the Pareto front is marked."""
    points = []
    for table in profile.decode:
        surface = decode_surface(profile, table.tp, table.ep, table.weights)
        for batch in sorted({cell.batch for cell in table.cells}):
            exact = next((c for c in table.cells if (c.batch, c.context_tokens) == (batch, context_tokens)), None)
            ms = surface.at(batch, batch * context_tokens)
            usd = table.tp * usd_per_gpu_hour * ms / 3.6e6 / batch * 1e6
            points.append(DecodePoint(label(table), batch, 1e3 / ms, usd, exact.how if exact else "interpolated"))
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


def decode_markdown(profile: Profile, context_tokens: int, usd_per_gpu_hour: float) -> str:
    """One line per layout and batch, fastest first; the Pareto front in bold."""
    lines = [_line(["layout", "batch", "tokens/s per user", "$ per 1M output tokens"]), _line(["---", "---:", "---:", "---:"])]
    for p in sorted(decode_points(profile, context_tokens, usd_per_gpu_hour), key=lambda p: -p.tokens_per_s):
        cells = [p.layout, str(p.batch), f"{p.tokens_per_s:.1f}", f"{p.usd_per_1m:.3f}"]
        lines.append(_line([f"**{cell}**" for cell in cells] if p.is_best else cells))
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[PrefillRow] | Sequence[DecodePoint]) -> str:
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(vars(rows[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(row) for row in rows)
    return out.getvalue()


def to_markdown(profile: Profile, contexts: Sequence[int], usd_per_gpu_hour: float) -> str:
    parts = [f"# {profile.label}\n", f"{profile.obtained}. ${usd_per_gpu_hour:.2f} per GPU-hour.\n", "## Prefill, one prompt at a time\n"]
    parts.append(prefill_markdown(profile, usd_per_gpu_hour))
    for context in contexts:
        parts += [f"## Decode at {context:,} tokens of context\n", decode_markdown(profile, context, usd_per_gpu_hour)]
    return "\n".join(parts)


def to_html(profile: Profile, contexts: Sequence[int], usd_per_gpu_hour: float) -> str:
    """Tables and plots in one page."""
    body = [f"<h1>{html.escape(profile.label)}</h1>", f"<p>{html.escape(profile.obtained)}. ${usd_per_gpu_hour:.2f} per GPU-hour.</p>"]
    body += ["<h2>Prefill, one prompt at a time</h2>", _html_table(prefill_markdown(profile, usd_per_gpu_hour))]
    for context in contexts:
        body.append(f"<h2>Decode at {context:,} tokens of context</h2>")
        body.append(decode_svg(decode_points(profile, context, usd_per_gpu_hour)))
        body.append(_html_table(decode_markdown(profile, context, usd_per_gpu_hour)))
    style = (
        "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 8px;border:1px solid #ccc;text-align:right}"
    )
    return f"<!doctype html><meta charset=utf-8><title>{html.escape(profile.label)}</title><style>{style}</style>{''.join(body)}\n"


def decode_svg(points: Sequence[DecodePoint]) -> str:
    """Speed per user across, price up, both logarithmic; one line per layout, the Pareto front as filled dots."""
    xs, ys = [p.tokens_per_s for p in points], [p.usd_per_1m for p in points]
    place_x, place_y = _log_scale(min(xs), max(xs), MARGIN, WIDTH - 150), _log_scale(min(ys), max(ys), HEIGHT - MARGIN, 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" font-family="sans-serif" font-size="11">'
    ]
    for value in _ticks(min(xs), max(xs)):
        parts.append(f'<text x="{place_x(value):.0f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{value:g}</text>')
    for value in _ticks(min(ys), max(ys)):
        parts.append(f'<text x="{MARGIN - 8}" y="{place_y(value) + 4:.0f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text x="{(MARGIN + WIDTH - 150) / 2}" y="{HEIGHT - 20}" text-anchor="middle">tokens/s per user</text>')
    parts.append(
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">$ per 1M output tokens</text>'
    )
    for i, layout in enumerate(dict.fromkeys(p.layout for p in points)):
        colour, mine = COLOURS[i % len(COLOURS)], [p for p in points if p.layout == layout]
        line = " ".join(f"{place_x(p.tokens_per_s):.1f},{place_y(p.usd_per_1m):.1f}" for p in mine)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for p in mine:
            fill = colour if p.is_best else "white"
            title = f"{layout}, batch {p.batch}: {p.tokens_per_s:.1f} tokens/s, ${p.usd_per_1m:.3f}"
            dot = f'cx="{place_x(p.tokens_per_s):.1f}" cy="{place_y(p.usd_per_1m):.1f}" r="4" fill="{fill}" stroke="{colour}"'
            parts.append(f"<circle {dot}><title>{html.escape(title)}</title></circle>")
        parts.append(f'<text x="{WIDTH - 140}" y="{30 + 16 * i}" fill="{colour}">{html.escape(layout)}</text>')
    return "".join(parts) + "</svg>"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _html_table(markdown: str) -> str:
    rows = [line.strip("| ").split(" | ") for line in markdown.splitlines() if not line.startswith("| ---")]
    cells = [["<b>" + html.escape(c.strip("*")) + "</b>" if c.startswith("**") else html.escape(c) for c in row] for row in rows]
    return "<table>" + "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells) + "</table>"


def _log_scale(low: float, high: float, start: float, end: float):
    span = math.log(high / low) or 1.0
    return lambda value: start + (end - start) * math.log(value / low) / span


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside the range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for step in (1, 2, 5) if low <= (tick := step * 10.0**power) <= high]
