"""The shipped trained model as a checkpoint folder, and held-out decisions to ask it for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from openai_harmony import HarmonyEncoding

from model.trained_fixture import write_trained_fixture
from tools.tiny_gpt_oss.grading import Grade, grade
from tools.tiny_gpt_oss.prepare import make_examples
from tools.tiny_gpt_oss.rendering import Renderer
from tools.tiny_gpt_oss.shards import Example


@dataclass(frozen=True)
class Trained:
    path: Path
    encoding: HarmonyEncoding
    examples: dict[str, Example]  # one held-out decision of each task

    def grade(self, task: str, tokens: list[int]) -> Grade:
        example = self.examples[task]
        return grade(task, self.encoding.decode(example.gold), example.values, self.encoding.decode(tokens))


def make_trained(folder: Path, seed: int = 20) -> Trained:
    write_trained_fixture(folder / "trained")
    renderer = Renderer(folder / "vocabulary")
    examples: dict[str, Example] = {}
    for example in make_examples(renderer, seed, 1):
        examples.setdefault(example.task, example)
    return Trained(folder / "trained", renderer.encoding, examples)
