"""Trains the model within a wall-clock budget, then packs and evaluates it: the one command of the GPU run.

`python -m tools.tiny_gpt_oss.train --data DIR --out DIR --minutes 6.5`. The budget counts from the start of the
process to the end of training. Owns the loop and its progress lines; the model, data and optimizers live elsewhere.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.tiny_gpt_oss.attention import PackedBlockMasks, attend_explicit, attend_flex, explicit_masks
from tools.tiny_gpt_oss.evaluate import evaluate_and_report
from tools.tiny_gpt_oss.network import TinyConfig, TinyGptOss
from tools.tiny_gpt_oss.optimizer import Optimizers, Rates, lr_share
from tools.tiny_gpt_oss.pack import load_checkpoint, save_checkpoint, save_packed
from tools.tiny_gpt_oss.packing import PackedRow, packed_rows, prefetch
from tools.tiny_gpt_oss.sample import DataError
from tools.tiny_gpt_oss.shards import PROMPT, TARGET, TokenDocs, read_all_docs, read_docs, read_examples
from tools.tiny_gpt_oss.vocabulary import Vocabulary

REPORT_EVERY_S = 15.0
BALANCE_WEIGHT = 0.01
PADDED_LOGIT = -1e4
MIN_AGREEMENT = 0.9
MAX_SAMPLE_TOKENS = 4096


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run. `quantise_from`: share of the training time after which MXFP4 is on."""

    data: Path
    out: Path
    minutes: float
    tokens_per_step: int = 65_536
    prompt_weight: float = 0.03
    quantise_from: float = 0.25
    seed: int = 1
    smoke: bool = False
    resume: Path | None = None
    rates: Rates = field(default_factory=Rates)

    def config(self, vocabulary_rows: int) -> TinyConfig:
        if self.smoke:
            return TinyConfig(vocabulary_rows, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
        return TinyConfig(vocabulary_rows)


class Trainer:
    """Model, optimizers and the attention path of one device: flex and compiled on a GPU, explicit on the CPU."""

    def __init__(self, recipe: Recipe, vocabulary: Vocabulary, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.is_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.model = TinyGptOss(recipe.config(vocabulary.num_rows))
        if recipe.resume is not None:
            load_checkpoint(recipe.resume, self.model)
        self.model.to(device)
        self.optimizers = Optimizers(self.model, recipe.rates)
        self.quantised_share = torch.zeros((), device=device)
        self.loss_function = token_losses
        self.layers = list(self.model.model.layers)
        if self.is_gpu:
            self.layers = [torch.compile(layer, dynamic=False) for layer in self.layers]
            self.loss_function = torch.compile(token_losses, dynamic=False)
            self.block_masks = PackedBlockMasks(recipe.tokens_per_step, device)
        # In the full model the unknown row stands for every id that is not kept; padding rows do not exist there.
        offset = torch.zeros(self.model.config.padded_rows)
        offset[0] = torch.log(torch.tensor(float(vocabulary.num_unused_ids)))
        offset[vocabulary.num_rows :] = PADDED_LOGIT
        self.logit_offset = offset.to(device)

    def losses(self, row: PackedRow) -> tuple[Tensor, Tensor, Tensor]:
        """(loss 0-dim, is_right [T] bool, kinds [T]) of a packed row; is_right: the argmax is the target."""
        rows, targets, kinds, documents, positions = (
            torch.from_numpy(array).to(self.device, non_blocking=True)
            for array in (row.rows, row.targets, row.kinds, row.documents, row.positions)
        )
        if self.is_gpu:
            masks, attend = self.block_masks.update(documents), attend_flex
        else:
            masks, attend = explicit_masks(documents[None], positions[None]), attend_explicit
        hidden, balance = self.model(
            rows[None],
            positions[None],
            masks,
            self.quantised_share,
            attend=attend,
            layers=self.layers,
            dtype=self.dtype,
        )
        weights = (kinds == TARGET).float() + self.recipe.prompt_weight * (kinds == PROMPT).float()
        loss, is_right = self.loss_function(self.model, hidden[0], targets, weights, self.logit_offset)
        return loss + BALANCE_WEIGHT * balance, is_right, kinds

    def step(self, row: PackedRow, rate: float) -> tuple[Tensor, Tensor]:
        """(loss, share of target tokens right), both 0-dim on the device."""
        loss, is_right, kinds = self.losses(row)
        loss.backward()
        self.optimizers.step(rate)
        is_target = kinds == TARGET
        return loss.detach(), (is_right & is_target).sum() / is_target.sum().clamp(min=1)

    def agreement_with_explicit(self, row: PackedRow) -> float:
        """Share of the first documents' target tokens that the flex and the explicit path judge alike."""
        _, fast, kinds = self.losses(row)
        keep = int(np.flatnonzero(row.positions[:MAX_SAMPLE_TOKENS] == 0)[-1]) or MAX_SAMPLE_TOKENS
        rows, targets, documents, positions = (
            torch.from_numpy(array[:keep]).to(self.device) for array in (row.rows, row.targets, row.documents, row.positions)
        )
        masks = explicit_masks(documents[None], positions[None])
        with torch.no_grad():  # not around the compiled path: it would compile once more
            hidden, _ = self.model(rows[None], positions[None], masks, self.quantised_share, dtype=self.dtype)
            slow = (self.model.logits(hidden[0]) + self.logit_offset).argmax(-1) == targets
        is_target = kinds[:keep] == TARGET
        return float((fast[:keep] == slow)[is_target].float().mean())

    def exact_by_task(self, rows: list[PackedRow], names: list[str]) -> dict[str, float]:
        """Share of held-out conversations with every target token right, given the right ones before it."""
        right, total = torch.zeros(len(names) + 1), torch.zeros(len(names) + 1)
        for row in rows:
            _, is_right, kinds = self.losses(row)
            wrong = torch.zeros(len(row.tasks), device=self.device)
            documents = torch.from_numpy(row.documents).to(self.device).long()
            wrong.index_add_(0, documents, ((kinds == TARGET) & ~is_right).float())
            tasks = torch.from_numpy(row.tasks)
            right.index_add_(0, tasks % (len(names) + 1), (wrong.cpu() == 0).float())
            total.index_add_(0, tasks % (len(names) + 1), torch.ones(len(tasks)))
        return {name: float(right[i] / total[i]) for i, name in enumerate(names) if total[i] > 0}


def token_losses(model: TinyGptOss, hidden: Tensor, targets: Tensor, weights: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean cross-entropy over the full vocabulary, and where the argmax is right.

    Shapes: hidden [T, hidden_size]; targets [T] int64; weights [T] fp32; offset [padded_rows] fp32
    """
    logits = model.logits(hidden) + offset
    losses = logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]
    return (losses * weights).sum() / weights.sum().clamp(min=1e-6), logits.argmax(-1) == targets


def train(recipe: Recipe, began_s: float) -> tuple[TinyGptOss, Vocabulary, dict]:
    """Runs until the budget is used; returns the model, its vocabulary and the facts of the run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    vocabulary = Vocabulary.load(recipe.data / "vocabulary.json")
    facts = json.loads((recipe.data / "data.json").read_text())
    docs, heldout = read_all_docs(recipe.data), read_docs(recipe.data / "heldout.npz.xz")
    trainer = Trainer(recipe, vocabulary, device)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    _say(began_s, f"{len(docs.lengths):,} conversations, {len(docs.rows):,} tokens, {parameters:,} parameters, {device}")
    steps = run_loop(trainer, docs, heldout, facts["tasks"], began_s)
    facts |= {
        "parameters": parameters,
        "steps": steps,
        "tokens_trained": steps * recipe.tokens_per_step,
        "train_minutes": (time.monotonic() - began_s) / 60,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "recipe": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(recipe).items()},
    }
    return trainer.model, vocabulary, facts


def run_loop(trainer: Trainer, docs: TokenDocs, heldout: TokenDocs, names: list[str], began_s: float) -> int:
    recipe = trainer.recipe
    rows = prefetch(packed_rows(docs, recipe.tokens_per_step, recipe.seed, is_endless=True))
    checked = list(packed_rows(heldout, recipe.tokens_per_step, 0, is_endless=False))
    end_s = began_s + recipe.minutes * 60
    loss, right = trainer.step(next(rows), 0.0)  # compiles; no update, so that the clock starts after it
    if not torch.isfinite(loss):
        raise DataError(f"the first loss is {loss.item()}: the attention or data path is broken")
    _say(began_s, f"compiled, first loss {loss.item():.3f}")
    start_s = reported_s = time.monotonic()
    step = reported_step = reports = 0
    while (now_s := time.monotonic()) < end_s:
        progress = (now_s - start_s) / (end_s - start_s)
        trainer.quantised_share.fill_(float(progress >= recipe.quantise_from))
        loss, right = trainer.step(next(rows), lr_share(step, progress))
        step += 1
        if step % 10 == 0 and trainer.is_gpu:
            torch.cuda.synchronize()  # keeps the clock honest: the queue of launches stays short
        if time.monotonic() - reported_s >= REPORT_EVERY_S:
            speed = (step - reported_step) * recipe.tokens_per_step / (time.monotonic() - reported_s)
            _say(began_s, f"step {step} {progress:.0%} loss {loss.item():.4f} targets {right.item():.4f} {speed:,.0f} tok/s")
            reports += 1
            if reports == 1 and trainer.is_gpu:
                check_attention(trainer, checked[0], began_s)
            if reports % 3 == 1:
                exact = trainer.exact_by_task(checked, names)
                _say(began_s, "held-out exact: " + " ".join(f"{k} {v:.3f}" for k, v in exact.items()))
            reported_s, reported_step = time.monotonic(), step
    trainer.quantised_share.fill_(1.0)
    exact = trainer.exact_by_task(checked, names)
    _say(began_s, "held-out exact at the end: " + " ".join(f"{k} {v:.3f}" for k, v in exact.items()))
    return step


def check_attention(trainer: Trainer, row: PackedRow, began_s: float) -> None:
    """Stops a run whose compiled attention differs from the reference, before it wastes its budget."""
    agreement = trainer.agreement_with_explicit(row)
    _say(began_s, f"compiled and explicit attention judge {agreement:.2%} of the target tokens alike")
    if agreement < MIN_AGREEMENT:
        raise DataError(f"compiled attention differs from the reference: agreement {agreement:.2%}, want {MIN_AGREEMENT:.0%}")


def _say(began_s: float, text: str) -> None:
    print(f"[{time.monotonic() - began_s:6.1f} s] {text}", flush=True)


def parse_recipe() -> Recipe:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.5)
    parser.add_argument("--tokens-per-step", type=int, default=Recipe.tokens_per_step)
    parser.add_argument("--prompt-weight", type=float, default=Recipe.prompt_weight)
    parser.add_argument("--quantise-from", type=float, default=Recipe.quantise_from)
    parser.add_argument("--matrix-lr", type=float, default=Rates.matrix_lr)
    parser.add_argument("--other-lr", type=float, default=Rates.other_lr)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--resume", type=Path, help="folder of an earlier checkpoint to go on from")
    parser.add_argument("--smoke", action="store_true", help="a much smaller model, for a CPU")
    given = vars(parser.parse_args())
    rates = Rates(matrix_lr=given.pop("matrix_lr"), other_lr=given.pop("other_lr"))
    return Recipe(**given, rates=rates)


def main() -> None:
    began_s = time.monotonic()
    recipe = parse_recipe()
    recipe.out.mkdir(parents=True, exist_ok=True)
    model, vocabulary, facts = train(recipe, began_s)
    save_checkpoint(recipe.out, model)
    packed = recipe.out / "tiny_gpt_oss.safetensors.xz"
    save_packed(packed, model, vocabulary)
    _say(began_s, f"packed: {packed.stat().st_size:,} bytes")
    examples = read_examples(recipe.data / "examples.jsonl.xz")
    evaluate_and_report(model, vocabulary, examples, recipe.out, facts, lambda text: _say(began_s, text))
    _say(began_s, "done")


if __name__ == "__main__":
    main()
