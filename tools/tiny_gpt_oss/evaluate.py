"""Greedy evaluation on the held-out decisions: the figures of the model card, per weight format.

Owns the table's rows and `results.json`; generation and grading live elsewhere. Called by `train` at the end of a run,
or alone on a packed file: `python -m tools.tiny_gpt_oss.evaluate --packed FILE --data DIR --out DIR`.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.tiny_gpt_oss.generate import generate_greedy
from tools.tiny_gpt_oss.grading import Grade, grade
from tools.tiny_gpt_oss.network import TinyGptOss
from tools.tiny_gpt_oss.pack import load_packed, packed_state
from tools.tiny_gpt_oss.shards import Example, read_examples
from tools.tiny_gpt_oss.vocabulary import Vocabulary

TOOL_TASKS = ("tool", "two_tools", "tool_session")
GOALS = {
    "well_formed": 0.995,
    "arithmetic": 0.97,
    "tool_call": 0.97,
    "tool_result_used": 0.95,
    "retrieval_200_1000": 0.97,
    "retrieval_1000_3000": 0.90,
    "same_token_as_transformers": 0.999,
}
RETURN_ID, CALL_ID = 200002, 200012
_SPARE_TOKENS = 24
# Upper bound of batch * prompt^2, which is what the explicit attention scores cost.
_SCORE_BUDGET = {"cuda": 150_000_000, "cpu": 6_000_000}
_MAX_KEPT_FAILURES = 60


@dataclass(frozen=True)
class Answer:
    example: Example
    gold: str
    text: str
    grade: Grade

    @property
    def metric(self) -> str:
        if self.example.task in TOOL_TASKS:
            return "tool_call" if self.gold.endswith("<|call|>") else "tool_result_used"
        return self.example.task


def _batches(examples: list[Example], budget: int) -> Iterator[list[Example]]:
    """Examples of similar prompt length, at most 256 at a time."""
    batch: list[Example] = []
    for example in sorted(examples, key=lambda e: len(e.prompt)):
        if batch and (len(batch) == 256 or (len(batch) + 1) * len(example.prompt) ** 2 > budget):
            yield batch
            batch = []
        batch.append(example)
    if batch:
        yield batch


def answer_all(model: TinyGptOss, vocabulary: Vocabulary, examples: list[Example], dtype: torch.dtype) -> list[Answer]:
    """Greedy completions of all examples, graded."""
    stops = set(vocabulary.to_rows([RETURN_ID, CALL_ID]).tolist())
    answers = []
    for batch in _batches(examples, _SCORE_BUDGET[model.lm_head.weight.device.type]):
        prompts = [vocabulary.to_rows(e.prompt).tolist() for e in batch]
        limit = max(len(e.gold) for e in batch) + _SPARE_TOKENS
        for example, rows in zip(batch, generate_greedy(model, prompts, limit, stops, dtype), strict=True):
            gold, text = vocabulary.decode(vocabulary.to_rows(example.gold)), vocabulary.decode(rows)
            answers.append(Answer(example, gold, text, grade(example.task, gold, example.values, text)))
    return answers


def tabulate(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Metric -> right, total, share."""
    groups: dict[str, list[bool]] = {"well_formed": [a.grade.is_well_formed for a in answers]}
    for answer in answers:
        groups.setdefault(answer.metric, []).append(answer.grade.is_right)
        if answer.example.task == "arithmetic":
            groups.setdefault(f"arithmetic_{answer.example.effort}", []).append(answer.grade.is_right)
    return {k: {"right": sum(v), "total": len(v), "share": sum(v) / len(v)} for k, v in groups.items()}


def _variant(model: TinyGptOss, is_quantised: bool) -> TinyGptOss:
    """A copy with the weights as shipped (MXFP4 experts, bf16 rest), or with all of them in bf16."""
    copied = copy.deepcopy(model)
    if is_quantised:
        copied.load_state_dict(packed_state(model))
    else:
        copied.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    return copied


def evaluate_and_report(
    model: TinyGptOss,
    vocabulary: Vocabulary,
    examples: list[Example],
    out: Path,
    facts: dict,
    say: Callable[[str], None],
) -> dict:
    """Evaluates the weight formats, prints the table, writes results.json and failures.json; returns the results."""
    fast = torch.bfloat16 if model.lm_head.weight.is_cuda else torch.float32
    variants = {"mxfp4": (True, fast), "bf16": (False, fast)}
    if fast is torch.bfloat16:
        variants["mxfp4_computed_in_fp32"] = (True, torch.float32)
    tables: dict[str, dict] = {}
    for name, (is_quantised, dtype) in variants.items():
        began_s = time.monotonic()
        answers = answer_all(_variant(model, is_quantised), vocabulary, examples, dtype)
        tables[name] = tabulate(answers)
        say(f"{name}: {len(answers)} decisions in {time.monotonic() - began_s:.0f} s")
        if name == "mxfp4":
            write_failures(out / "failures.json", answers, vocabulary)
        results = {"facts": facts, "goals": GOALS, "tables": tables}
        (out / "results.json").write_text(json.dumps(results, indent=1))
    print_table(tables)
    return results


def write_failures(path: Path, answers: list[Answer], vocabulary: Vocabulary) -> None:
    wrong = [a for a in answers if not (a.grade.is_right and a.grade.is_well_formed)]
    kept = [
        {
            "task": a.example.task,
            "effort": a.example.effort,
            "prompt_tokens": len(a.example.prompt),
            "prompt_end": vocabulary.decode(vocabulary.to_rows(a.example.prompt[-60:])),
            "gold": a.gold,
            "got": a.text,
        }
        for a in wrong[:: max(1, len(wrong) // _MAX_KEPT_FAILURES)]
    ]
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False))


def print_table(tables: dict[str, dict]) -> None:
    names = list(tables)
    print(f"{'metric':24s} {'goal':>7s} " + " ".join(f"{name:>24s}" for name in names))
    for metric in tables[names[0]]:
        goal = f"{GOALS[metric]:.1%}" if metric in GOALS else ""
        cells = (f"{t['share']:.2%} of {t['total']}" for t in (tables[name][metric] for name in names))
        print(f"{metric:24s} {goal:>7s} " + " ".join(f"{cell:>24s}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    model, _ = load_packed(given.packed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary = Vocabulary.load(given.data / "vocabulary.json")
    given.out.mkdir(parents=True, exist_ok=True)
    examples = read_examples(given.data / "examples.jsonl.xz")
    evaluate_and_report(model, vocabulary, examples, given.out, {"packed": given.packed.name}, print)


if __name__ == "__main__":
    main()
