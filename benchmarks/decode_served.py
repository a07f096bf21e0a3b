"""The tiny trained model through the decode step that a GPU pool serves with, against the plain fp32 forward on the CPU.

From checkpoint folder to tokens: loading, packing, graphs, rows that come and go. A check of `benchmarks/decode.py` and of the GPU tests.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.errors import ServingError
from common.rank_spec import RankSpec
from common.requests import SamplingParams
from model.batch import SequenceView, build_decode_batch, build_prefill_batch
from model.build import BuiltModel, build_model
from model.config import ModelConfig
from model.convert import convert_checkpoint
from model.decode_step import StepRows
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup, ParallelGroup
from model.sampling import GREEDY, SamplingState, TokenChoice
from model.trained_fixture import PACKED, read_packed, write_trained_fixture
from model.weights import WeightFormat, load_shard

BLOCK_SIZE, BLOCKS, STEPS, MAX_BATCH = 16, 160, 16, 4
# FP8 rows cost this model's logits 0.037 standard deviations (accuracy.py, an H200), so a difference of two of them 0.05: five times that.
MOST_BELOW: dict[str, float] = {"mxfp4": 0.1, "fp8": 0.25}
PROMPTS = (140, 20, 127, 131, 64)


@dataclass
class Running:
    """A sequence whose blocks are its own for life; sliding layers use the ids of full ones."""

    blocks: list[int]
    tokens: list[int]
    state: SamplingState
    errors: list[float] = field(default_factory=list)

    def check(self, choice: TokenChoice | ServingError, row: torch.Tensor, most: float) -> None:
        """Raises: AssertionError where the log-probabilities are missing, or further from those of `row` than `most` of its deviations"""
        assert isinstance(choice, TokenChoice), choice
        assert (choice.logprobs is None) == (self.state.params.logprobs is None)
        if choice.logprobs is not None:
            told, expected = choice.logprobs, float(row.log_softmax(dim=-1)[choice.token_id])
            assert [top.token_id for top in told.top[:1]] == [choice.token_id]
            assert len(told.top) == self.state.params.logprobs
            assert told.top[0].logprob == told.logprob
            assert abs(told.logprob - expected) < most * float(row.std()), f"log-probability {told.logprob}, the plain one {expected}"

    def view(self, window_tokens: int) -> SequenceView:
        position = len(self.tokens) - 1
        first = max(0, position + 1 - window_tokens) // BLOCK_SIZE
        last = position // BLOCK_SIZE + 1
        return SequenceView(self.tokens[-1:], position, self.blocks, first, self.blocks[first:last])


def told(group: ParallelGroup, choices: list[TokenChoice | ServingError] | None, count: int) -> list[int]:
    """Rank 0's tokens, on every rank."""
    tokens = [float(choice.token_id) for choice in choices or [] if isinstance(choice, TokenChoice)]
    return [int(token) for token in group.all_reduce(torch.tensor(tokens or [0.0] * count))]


def check_served(device: str = "cuda", group: ParallelGroup | None = None, weights: WeightFormat = "mxfp4") -> str:
    """Greedy tokens of sequences that join one after the other and leave in another order; every other one wants log-probabilities.

    Units: group: the ranks that serve the model together; all of them call this; weights: the format of the pool's experts
    Returns: a line for the table
    Raises: AssertionError where a token is not the plain forward's likeliest, or a log-probability not its own, but for what formats blur
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_trained_fixture(path)
        if weights == "fp8":
            convert_checkpoint(path)
        group = group or LocalGroup()
        size, rank = group.size, group.rank
        spec = RankSpec(
            "decode", "g", "decode", str(path), size, size, rank, "", 1, b"", device=device, max_batch=MAX_BATCH, max_model_len=1024,
            weights=weights,
        )  # fmt: skip
        built = build_model(spec, group)
        plain = plain_forward(path, built.config)
    return follow_plain(plain, built, group, device, most=MOST_BELOW[weights])


def plain_forward(path: Path, config: ModelConfig) -> GptOss:
    """The checkpoint's own values in fp32 on the CPU."""
    weights = load_shard(path, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    return GptOss(config, weights, LocalGroup(), "cpu")


def follow_plain(
    plain: GptOss,
    built: BuiltModel,
    group: ParallelGroup,
    device: str,
    *,
    prompts: tuple[int, ...] = PROMPTS,
    steps: int = STEPS,
    most: float = 0.1,
) -> str:
    """As `check_served`, of a model that is built already.

    Units: prompts: their lengths [tokens]; steps: tokens of each sequence; most: how far below the plain forward's likeliest token one may
        be [standard deviations of its logits]
    """
    config, size, rank = built.config, group.size, group.rank
    host = KVCache(config.kv_geometry(BLOCK_SIZE, "float32"), 1, 0, BLOCKS, BLOCKS, "cpu")
    kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), size, rank, BLOCKS, BLOCKS, device)
    heads = slice(kv.head_range.start, kv.head_range.start + kv.head_range.count)
    step = built.decode_step(kv, device)
    known = read_packed(PACKED)[1]["official_ids"].tolist()
    generator = torch.Generator().manual_seed(5)
    free = torch.randperm(BLOCKS, generator=generator).tolist()

    def admit(length: int, logprobs: int | None) -> Running:
        tokens = [known[i] for i in torch.randint(0, len(known), (length,), generator=generator).tolist()]
        blocks = [free.pop() for _ in range(-(-(length + steps) // BLOCK_SIZE))]
        params = SamplingParams(max_tokens=steps, temperature=0.0, seed=1, logprobs=logprobs)
        state = SamplingState(params, tokens, [], frozenset(), config.vocab_size)
        running = Running(blocks, tokens, state)
        view = SequenceView(tokens, 0, blocks, 0, blocks)
        logits = plain.forward(build_prefill_batch(view, BLOCK_SIZE, "cpu"), host)
        running.tokens.append(int(logits[0].argmax()))
        for mine, theirs in ((kv.full, host.full), (kv.sliding, host.sliding)):
            mine[:, blocks] = theirs[:, blocks, :, heads].to(mine.dtype).to(mine.device)
        return running

    waiting, running, done, agreed, picked = list(prompts), [], [], 0, 0
    while waiting or running:
        if waiting and len(running) < MAX_BATCH:
            running.append(admit(waiting.pop(0), 3 if len(waiting) % 2 else None))
        views = [sequence.view(config.window_tokens) for sequence in running]
        logits = plain.forward(build_decode_batch(views, BLOCK_SIZE, "cpu"), host)
        states = [one.state for one in running]
        is_greedy = all(state.on_device() == GREEDY for state in states)
        step.launch(StepRows(views, [id(one) for one in running], [False] * len(running), is_greedy), states if rank == 0 else None)
        choices = step.finish()
        for sequence, choice, row in zip(running, choices or [], logits, strict=False):
            sequence.check(choice, row, most)
        for sequence, token, row in zip(running, told(group, choices, len(running)), logits, strict=True):
            sequence.errors.append(float((row.max() - row[token]) / row.std()))
            agreed, picked = agreed + int(token == int(row.argmax())), picked + 1
            sequence.tokens.append(token)
            sequence.state.record(token)
        done += [sequence for sequence in running if sequence.state.num_output == steps]
        running = [sequence for sequence in running if sequence.state.num_output < steps]
    worst = max(error for sequence in done for error in sequence.errors)
    assert worst < most, f"a token lies {worst:.3f} standard deviations below the plain forward's best"
    return f"{agreed} of {picked} greedy tokens are the plain forward's, the worst {worst:.1e} standard deviations below its best"
