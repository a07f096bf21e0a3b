"""The colocated run of `transfer_served.py`: prefill and decode on one device in one process, blocks copied from pool to pool, no transfer.

Uses the forward passes and weights that the two pools serve with, so that what differs is the way between them. Answers of others are
judged by going along with them: after each of their tokens, how far below the likeliest one is the next?
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common.rank_spec import RankSpec
from common.requests import SamplingParams
from model.batch import SequenceView, build_prefill_batch
from model.build import build_model
from model.decode_step import StepRows
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.sampling import SamplingState, TokenChoice

BLOCK_SIZE, TOP = 16, 20


@dataclass
class Running:
    """A sequence whose blocks are its own for life; sliding layers use the ids of full ones."""

    blocks: list[int]
    tokens: list[int]
    state: SamplingState

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.state.record(token)

    def view(self, window_tokens: int) -> SequenceView:
        position = len(self.tokens) - 1
        first, last = max(0, position + 1 - window_tokens) // BLOCK_SIZE, position // BLOCK_SIZE + 1
        return SequenceView(self.tokens[-1:], position, self.blocks[:last], first, self.blocks[first:last])


class Colocated:
    """Units: at_once: rows of a decode step; num_tokens: the most of one sequence"""

    def __init__(self, path: str, device: str, weights: dict[str, str], kv_dtype: str, at_once: int, num_tokens: int):
        def spec(role: str) -> RankSpec:
            return RankSpec(
                role, "g", role, path, 1, 1, 0, "", 1, b"", device=device, weights=weights[role], kv_dtype=kv_dtype,  # type: ignore[arg-type]
                compute_dtype="float32", max_batch=at_once, max_model_len=2048,
            )  # fmt: skip

        self._blocks_each = -(-num_tokens // BLOCK_SIZE)
        prefill, decode = build_model(spec("prefill"), LocalGroup()), build_model(spec("decode"), LocalGroup())
        self._config = prefill.config
        geometry = self._config.kv_geometry(BLOCK_SIZE, kv_dtype)
        self._prompt_kv = KVCache(geometry, 1, 0, self._blocks_each, self._blocks_each, device)
        self._kv = KVCache(geometry, 1, 0, at_once * self._blocks_each, at_once * self._blocks_each, device)
        self._forward = prefill.ready(self._prompt_kv)
        self._step = decode.decode_step(self._kv, device)

    def admit(self, prompt: list[int], place: int, params: SamplingParams) -> tuple[Running, Tensor]:
        """Returns: the sequence, its first token not chosen yet; that token's logits [V]"""
        blocks = [place * self._blocks_each + i for i in range(self._blocks_each)]
        own = list(range(-(-len(prompt) // BLOCK_SIZE)))
        logits = self._forward.forward(build_prefill_batch(SequenceView(prompt, 0, own, 0, own), BLOCK_SIZE, "cpu"), self._prompt_kv)
        assert logits is not None
        for mine, theirs in ((self._kv.full, self._prompt_kv.full), (self._kv.sliding, self._prompt_kv.sliding)):
            mine[:, blocks[: len(own)]] = theirs[:, own]
        state = SamplingState(params, prompt, [], frozenset(), self._config.vocab_size)
        return Running(blocks, list(prompt), state), logits[-1].float()

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy, all prompts in every step. Returns: new tokens"""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True)
        running = []
        for place, prompt in enumerate(prompts):
            sequence, logits = self.admit(prompt, place, params)
            sequence.take(int(logits.argmax()))
            running.append(sequence)
        for _ in range(max_tokens - 1):
            for sequence, choice in zip(running, self._next(running, is_greedy=True), strict=True):
                sequence.take(choice.token_id)
        return [sequence.tokens[len(prompt) :] for sequence, prompt in zip(running, prompts, strict=True)]

    def judge(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[float]]:
        """All prompts in every step, each going along with its answer, all of one length.

        Returns: how far each token's log-probability is below the likeliest token's; at least that, for a token that is not among the `TOP`
        """
        params = SamplingParams(max_tokens=len(answers[0]), temperature=0.0, seed=1, ignore_eos=True, logprobs=TOP)
        running, gaps = [], []
        for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            sequence, logits = self.admit(prompt, place, params)
            gaps.append([float(logits.max() - logits[answer[0]])])
            sequence.take(answer[0])
            running.append(sequence)
        for position in range(1, len(answers[0])):
            choices = self._next(running, is_greedy=False)
            for sequence, choice, answer, mine in zip(running, choices, answers, gaps, strict=True):
                assert choice.logprobs is not None
                top = choice.logprobs.top
                found = next((entry.logprob for entry in top if entry.token_id == answer[position]), top[-1].logprob)
                mine.append(top[0].logprob - found)
                sequence.take(answer[position])
        return gaps

    def _next(self, running: Sequence[Running], *, is_greedy: bool) -> list[TokenChoice]:
        views = [sequence.view(self._config.window_tokens) for sequence in running]
        rows = StepRows(views, [id(sequence) for sequence in running], [False] * len(running), is_greedy=is_greedy)
        self._step.launch(rows, [sequence.state for sequence in running])
        choices = self._step.finish() or []
        failed = [choice for choice in choices if not isinstance(choice, TokenChoice)]
        assert not failed, failed
        return [choice for choice in choices if isinstance(choice, TokenChoice)]


def main() -> None:
    """`PLAN OUT`: files of JSON. A process of its own, once the cluster has left the devices."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    prompts, max_tokens = plan["prompts"], plan["max_tokens"]
    longest = max(map(len, prompts)) + max_tokens
    colocated = Colocated(plan["path"], plan["device"], plan["weights"], plan["kv_dtype"], len(prompts), longest)
    with torch.inference_mode():
        together = colocated.run(prompts, max_tokens)
        alone = [colocated.run([prompt], max_tokens)[0] for prompt in prompts[: plan["alone"]]]
        gaps = {name: colocated.judge(prompts, answers) for name, answers in plan["answers"].items()}
        gaps["alone"] = colocated.judge(prompts[: plan["alone"]], alone)
    Path(sys.argv[2]).write_text(json.dumps({"together": together, "alone": alone, "gaps": gaps}))


if __name__ == "__main__":
    main()
