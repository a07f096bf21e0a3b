"""Fills the figures of the model card from results.json files: `python -m tools.tiny_gpt_oss.model_card RESULTS ...`.

Rewrites what lies between the two marks of README.md and nothing else, so that no figure is typed by hand. Without arguments it takes the
shipped model's own: of its training run, and of the local cluster that served it (`evaluate_served`).
"""

import argparse
import json
from pathlib import Path

from tools.tiny_gpt_oss.sample import DataError

README = Path(__file__).with_name("README.md")
RESULTS = tuple(Path(__file__).parent / "results" / name for name in ("training.json", "served.json"))
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def figures(results: dict) -> str:
    """Markdown of the run's facts and of the table, a column per weight format."""
    facts, tables, goals = results["facts"], results["tables"], results["goals"]
    shown = ("date", "device", "torch", "train_minutes", "steps", "tokens_trained", "parameters", "vocabulary_rows")
    lines = [f"- {name.replace('_', ' ')}: {_plain(facts[name])}" for name in shown if name in facts]
    names = list(tables)
    lines += ["", f"| held-out, greedy | goal | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for metric in dict.fromkeys(metric for table in tables.values() for metric in table):
        goal = f"{goals[metric]:.1%}" if metric in goals else ""
        rows = (tables[name].get(metric) for name in names)
        cells = (f"{row['share']:.2%} of {row['total']}" if row else "" for row in rows)
        lines.append(f"| {metric.replace('_', ' ')} | {goal} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(card: str, *results: dict) -> str:
    """Every result's facts and table, one after the other. Raises: DataError if the card has no place for them"""
    head, begin, rest = card.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise DataError(f"the model card has no {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{chr(10).join(figures(result) + chr(10) for result in results)}{END}{tail}"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="*", default=RESULTS)
    results = [json.loads(path.read_text()) for path in parser.parse_args().results]
    README.write_text(fill(README.read_text(), *results))


if __name__ == "__main__":
    main()
