"""How far each way of computing the trained model is from fp32: top-1 agreement and KL divergence at held-out positions.

`fp32` takes the stored weights (MXFP4 experts, the rest bf16) and computes in fp32: the reference. `bf16` computes the same weights in
bf16; `fp8_weights` takes the converted experts in fp32; `prefill_fp8`, `prefill_bf16_qkv` and `prefill_bf16` run the whole FP8 prefill
forward by its projections, activations rounded too: its kernels on a GPU, their twins on a CPU. Teacher-forced on the gold answers, over
the vocabulary rows that training used and one row for all the others. Reads a checkpoint that `tandem fixture trained` and `tandem convert`
made, and the decisions that `prepare` wrote:
`python -m tools.tiny_gpt_oss.accuracy --checkpoint DIR --data DATA --prompts 1000 --out FILE`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from model.batch import SequenceView, StepBatch, build_prefill_batch
from model.config import ModelConfig, load_model_config
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_weights import Projections, prepare_prefill_weights
from model.shards import ShardWeights
from model.trained_fixture import OFFICIAL_IDS, PACKED, read_packed
from model.weights import WeightFormat, load_shard
from tools.tiny_gpt_oss.shards import Example, read_examples

BLOCK_TOKENS = 16
MAX_TOKENS = 4096
NOISE_MARGIN = 4.0  # times the RMS error of a logit: a top-2 margin that rounding alone does not turn

Logits = Callable[[list[int], int], Tensor]  # (tokens, first wanted position) -> fp32 [positions, V]


@dataclass(frozen=True)
class Sums:
    """What adds up over the examples.

    clear: positions whose fp32 margin is beyond the rounding noise; logits_error: RMS error of the logits over their standard deviation,
    which tells formats apart even where the model is so sure of its next token that the KL is nothing
    """

    positions: int = 0
    same: int = 0
    clear: int = 0
    clear_same: int = 0
    kl: float = 0.0
    max_kl: float = 0.0
    logits_error: float = 0.0

    def add(self, reference: Tensor, other: Tensor) -> Sums:
        """Both fp32 [positions, V]."""
        best = reference.topk(2, dim=-1)
        same = other.argmax(-1) == best.indices[:, 0]
        reference, other = reference.double(), other.double()
        noise = (other - reference).square().mean(-1).sqrt()
        clear = (best.values[:, 0] - best.values[:, 1]) > NOISE_MARGIN * noise
        log_p, log_q = reference.log_softmax(-1), other.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        return Sums(
            self.positions + len(same),
            self.same + int(same.sum()),
            self.clear + int(clear.sum()),
            self.clear_same + int((same & clear).sum()),
            self.kl + float(kl.sum()),
            max(self.max_kl, float(kl.max())),
            self.logits_error + float((noise / reference.std(-1)).sum()),
        )

    def record(self) -> dict[str, float]:
        return {
            "positions": self.positions,
            "top1_agreement": self.same / self.positions,
            "clear_positions": self.clear,
            "clear_top1_agreement": self.clear_same / max(self.clear, 1),
            "mean_kl": self.kl / self.positions,
            "max_kl": self.max_kl,
            "mean_logits_error": self.logits_error / self.positions,
        }


def _used_rows(shard: ShardWeights, rows: Tensor) -> ShardWeights:
    return replace(shard, lm_head=shard.lm_head[rows.to(shard.lm_head.device)].contiguous())


def plain(checkpoint: Path, config: ModelConfig, rows: Tensor, weights: WeightFormat, dtype: torch.dtype, device: str) -> Logits:
    shard = load_shard(checkpoint, config, tp=1, ep=1, rank=0, device=device, dtype=dtype, weights=weights)
    config = replace(config, vocab_size=len(rows))
    model = GptOss(config, _used_rows(shard, rows), LocalGroup(), device)
    name = "float32" if dtype is torch.float32 else "bfloat16"
    return lambda tokens, first: _run(config, model.forward, tokens, first, name, device)


def prefill(checkpoint: Path, config: ModelConfig, rows: Tensor, projections: Projections, device: str) -> Logits:
    """The forward of a prefill pool; on a CPU each kernel is replaced by its twin."""
    shard = load_shard(checkpoint, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights="fp8", packed=True)
    config = replace(config, vocab_size=len(rows))
    packed = prepare_prefill_weights(config, _used_rows(shard, rows), device, projections=projections)
    model = CudaPrefill(config, packed, LocalGroup(), block_size=BLOCK_TOKENS, device=device, max_positions=MAX_TOKENS)
    return lambda tokens, first: _run_each(config, model.forward, tokens, first, device)


def _views(config: ModelConfig, tokens: list[int], dtype: str, device: str) -> tuple[SequenceView, KVCache]:
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    cache = KVCache(config.kv_geometry(BLOCK_TOKENS, dtype), 1, 0, blocks, blocks, device)
    return SequenceView(tokens, 0, list(range(blocks)), 0, list(range(blocks))), cache


def _run(
    config: ModelConfig, forward: Callable[[StepBatch, KVCache], Tensor], tokens: list[int], first: int, dtype: str, device: str
) -> Tensor:
    view, cache = _views(config, tokens, dtype, device)
    batch = build_prefill_batch(view, BLOCK_TOKENS, device, logits="all")
    batch = StepBatch(**{**vars(batch), "logits_rows": batch.logits_rows[first:]})
    return forward(batch, cache).float()


def _run_each(config: ModelConfig, forward: Callable[[StepBatch, KVCache], Tensor], tokens: list[int], first: int, device: str) -> Tensor:
    """The prefill forward gives logits of the last token only: the prompt as one chunk, then one chunk for each token after it."""
    view, cache = _views(config, tokens, "bfloat16", device)
    rows = []
    for begin, end in [(0, first + 1), *((i, i + 1) for i in range(first + 1, len(tokens)))]:
        chunk = SequenceView(tokens[begin:end], begin, view.full_blocks, 0, view.sliding_blocks)
        rows.append(forward(build_prefill_batch(chunk, BLOCK_TOKENS, device), cache)[-1])
    return torch.stack(rows).float()


def ways(checkpoint: Path, device: str) -> dict[str, Logits]:
    """Every way of computing, the reference first."""
    config = load_model_config(checkpoint)
    ids = read_packed(PACKED)[1][OFFICIAL_IDS].long()
    unused = next(i for i in range(config.vocab_size) if i not in set(ids.tolist()))
    rows = torch.cat([ids, torch.tensor([unused])]).to(device)
    found = {
        "fp32": plain(checkpoint, config, rows, "bf16", torch.float32, device),
        "bf16": plain(checkpoint, config, rows, "bf16", torch.bfloat16, device),
        "prefill_fp8": prefill(checkpoint, config, rows, "fp8", device),
        "prefill_bf16_qkv": prefill(checkpoint, config, rows, "bf16_qkv", device),
        "prefill_bf16": prefill(checkpoint, config, rows, "bf16", device),
    }
    if device == "cpu":  # the plain forward takes FP8 experts on a CPU alone
        found["fp8_weights"] = plain(checkpoint, config, rows, "fp8", torch.float32, device)
    return found


def measure(checkpoint: Path, examples: Iterable[Example], answer_tokens: int, device: str = "cpu") -> dict[str, dict[str, float]]:
    """Way -> its record, over the first `answer_tokens` positions of each example's gold answer."""
    computed = ways(checkpoint, device)
    reference = computed.pop("fp32")
    sums = {name: Sums() for name in computed}
    for example in examples:
        tokens = [*example.prompt, *example.gold[: answer_tokens - 1]]
        first = len(example.prompt) - 1
        expected = reference(tokens, first)
        for name, logits in computed.items():
            sums[name] = sums[name].add(expected, logits(tokens, first))
    return {name: total.record() for name, total in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--answer-tokens", type=int, default=12, help="positions compared per prompt")
    parser.add_argument("--max-prompt", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    short = [e for e in read_examples(given.data / "examples.jsonl.xz") if len(e.prompt) <= given.max_prompt]
    examples = short[:: max(1, len(short) // given.prompts)][: given.prompts]
    began_s = time.monotonic()
    records = measure(given.checkpoint, progress(examples), given.answer_tokens, given.device)
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "prompts": len(examples),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    given.out.write_text(json.dumps({**facts, "ways": records}, indent=1) + "\n")
    for name, record in records.items():
        print(name, {key: round(value, 6) for key, value in record.items()})


def progress(examples: list[Example]) -> Iterator[Example]:
    for index, example in enumerate(examples):
        if index % 100 == 0:
            print(f"{index}/{len(examples)}", flush=True)
        yield example


if __name__ == "__main__":
    main()
