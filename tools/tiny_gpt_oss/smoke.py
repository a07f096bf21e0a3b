"""The whole pipeline at a size for a CPU, in about a minute: data, training, evaluation, packing, expanding, comparing.

`python -m tools.tiny_gpt_oss.smoke --out DIR`. Proves that the parts fit together, not that the model is any good.
Needs transformers, which is the reference for the last step.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from model.trained_fixture import expand
from tools.tiny_gpt_oss.attention import explicit_masks
from tools.tiny_gpt_oss.evaluate import evaluate_and_report
from tools.tiny_gpt_oss.generate import generate_greedy
from tools.tiny_gpt_oss.network import TinyGptOss
from tools.tiny_gpt_oss.pack import load_packed, save_checkpoint, save_packed
from tools.tiny_gpt_oss.prepare import prepare
from tools.tiny_gpt_oss.shards import Example, read_examples
from tools.tiny_gpt_oss.train import Recipe, train
from tools.tiny_gpt_oss.vocabulary import Vocabulary

PACKED_FILE = "tiny_gpt_oss.safetensors.xz"
_COMPARED_TOKENS = 400
_EVALUATED = 4
_NEW_TOKENS = 12


@dataclass(frozen=True)
class Comparison:
    """Our forward against transformers in fp32 on the expanded folder."""

    max_logit_error: float
    is_greedy_equal: bool
    unused_ids_logit_spread: float


def run_smoke(out: Path, vocabulary_folder: Path, train_minutes: float) -> tuple[dict, Comparison]:
    """Runs every step into `out`; returns the evaluation results and the comparison."""
    data, checkpoint = out / "data", out / "checkpoint"
    prepare(data, conversations=200, per_task=1, seed=1, workers=1, vocabulary_folder=vocabulary_folder, say=print)
    recipe = Recipe(data, out, train_minutes, tokens_per_step=1024, smoke=True)
    model, vocabulary, facts = train(recipe, time.monotonic())
    save_checkpoint(out, model)
    save_packed(out / PACKED_FILE, model, vocabulary)
    examples = sorted(read_examples(data / "examples.jsonl.xz"), key=lambda e: len(e.prompt))
    results = evaluate_and_report(model, vocabulary, examples[:_EVALUATED], out, facts, print)
    expand(out / PACKED_FILE, checkpoint)
    return results, compare_with_transformers(out / PACKED_FILE, checkpoint, vocabulary, examples[-1])


def compare_with_transformers(packed: Path, checkpoint: Path, vocabulary: Vocabulary, example: Example) -> Comparison:
    """Logits at all positions of a prompt longer than the window, then greedy tokens."""
    from transformers import GptOssForCausalLM

    ours, _ = load_packed(packed)
    reference = GptOssForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    official = example.prompt[-_COMPARED_TOKENS:]
    rows = vocabulary.to_rows(official).tolist()
    expected = reference(torch.tensor([official]), use_cache=False).logits[0].detach()
    kept = torch.from_numpy(vocabulary.official_ids)
    error = (our_logits(ours, rows)[:, 1 : vocabulary.num_rows] - expected[:, kept]).abs().max()
    is_unused = torch.ones(expected.shape[-1], dtype=torch.bool)
    is_unused[kept] = False
    unused = expected[:, is_unused]
    generated = generate_greedy(ours, [rows], _NEW_TOKENS, set(), torch.float32)[0]
    greedy = reference.generate(
        torch.tensor([official]), max_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=199999
    )
    is_equal = vocabulary.to_rows(greedy[0, len(official) :].tolist()).tolist() == generated
    return Comparison(float(error), is_equal, float((unused.amax(-1) - unused.amin(-1)).max()))


@torch.no_grad()
def our_logits(model: TinyGptOss, rows: list[int]) -> torch.Tensor:
    """fp32 logits [T, padded_rows] of one sequence."""
    positions = torch.arange(len(rows))[None]
    masks = explicit_masks(torch.zeros_like(positions), positions)
    hidden, _ = model(torch.tensor([rows]), positions, masks, torch.zeros(()))
    return model.logits(hidden)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary-folder", type=Path, default=Path(".cache/o200k"))
    parser.add_argument("--train-minutes", type=float, default=0.25)
    given = parser.parse_args()
    _, comparison = run_smoke(given.out, given.vocabulary_folder, given.train_minutes)
    print(comparison)


if __name__ == "__main__":
    main()
