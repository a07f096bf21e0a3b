"""The colocated run of `transfer_served.py`: prefill and decode on one device in one process, blocks copied from pool to pool, no transfer.

Uses the forward passes and weights that the two pools serve with, so that what differs is the way between them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.rank_spec import RankSpec
from common.requests import SamplingParams
from model.batch import SequenceView, build_prefill_batch
from model.build import build_model
from model.decode_step import StepRows
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.sampling import SamplingState, TokenChoice

BLOCK_SIZE = 16


@dataclass
class Running:
    """A sequence whose blocks are its own for life; sliding layers use the ids of full ones."""

    blocks: list[int]
    tokens: list[int]
    state: SamplingState

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

    def admit(self, prompt: list[int], place: int, max_tokens: int) -> Running:
        blocks = [place * self._blocks_each + i for i in range(self._blocks_each)]
        own = list(range(-(-len(prompt) // BLOCK_SIZE)))
        logits = self._forward.forward(build_prefill_batch(SequenceView(prompt, 0, own, 0, own), BLOCK_SIZE, "cpu"), self._prompt_kv)
        assert logits is not None
        for mine, theirs in ((self._kv.full, self._prompt_kv.full), (self._kv.sliding, self._prompt_kv.sliding)):
            mine[:, blocks[: len(own)]] = theirs[:, own]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=1, ignore_eos=True)
        running = Running(
            blocks, [*prompt, int(logits[-1].argmax())], SamplingState(params, prompt, [], frozenset(), self._config.vocab_size)
        )
        running.state.record(running.tokens[-1])
        return running

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy, all prompts in every step. Returns: new tokens"""
        running = [self.admit(prompt, place, max_tokens) for place, prompt in enumerate(prompts)]
        for _ in range(max_tokens - 1):
            views = [sequence.view(self._config.window_tokens) for sequence in running]
            rows = StepRows(views, [id(sequence) for sequence in running], [False] * len(running), is_greedy=True)
            self._step.launch(rows, [sequence.state for sequence in running])
            for sequence, choice in zip(running, self._step.finish() or [], strict=True):
                assert isinstance(choice, TokenChoice), choice
                sequence.tokens.append(choice.token_id)
                sequence.state.record(choice.token_id)
        return [sequence.tokens[len(prompt) :] for sequence, prompt in zip(running, prompts, strict=True)]


def main() -> None:
    """`PLAN OUT`: files of JSON. A process of its own, once the cluster has left the devices."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    prompts, max_tokens = plan["prompts"], plan["max_tokens"]
    longest = max(map(len, prompts)) + max_tokens
    rows = plan["rows"]
    colocated = Colocated(plan["path"], plan["device"], plan["weights"], plan["kv_dtype"], rows, longest)
    answers: list[list[int]] = []
    with torch.inference_mode():
        for first in range(0, len(prompts), rows):
            answers += colocated.run(prompts[first : first + rows], max_tokens)
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
