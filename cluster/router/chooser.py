"""Turns a request's wishes into a decision on the state of this moment: expected length, objective, seed, the board's view of all pools.

Pure but for the state it reads. One per router; the simulator runs the same one on its own clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.correction import OutputLength
from cluster.cost_model import Shape
from cluster.profile import Profile
from cluster.router.board import Board
from cluster.router.choice import Aim, Decision, choose
from cluster.router.pool import PoolSet
from common.errors import OverloadedError, WorkerLost


@dataclass(frozen=True)
class Objective:
    """The router's own wishes. `latency_weight`: for requests that set none."""

    latency_weight: float = 0.5
    max_model_len: int = 131072


class Chooser:
    def __init__(self, pools: PoolSet, profile: Profile, objective: Objective, seed: int):
        self.output_length = OutputLength()
        self._pools = pools
        self._profile = profile
        self._objective = objective
        self._board = Board(pools, profile)
        self._seed = seed

    def shape_of(self, prompt: int, max_tokens: int) -> Shape:
        """`max_tokens` as large as the context counts as not set: then the observed mean is expected."""
        room = self._objective.max_model_len - prompt
        expected = max_tokens if max_tokens < room else min(max_tokens, round(self.output_length.tokens))
        return Shape(prompt=prompt, output=max(1, expected), worst=prompt + max_tokens)

    def aim_of(self, latency_weight: float | None, ttft_slo_ms: float | None, itl_slo_ms: float | None) -> Aim:
        return Aim(self._objective.latency_weight if latency_weight is None else latency_weight, ttft_slo_ms, itl_slo_ms)

    def check_room(self, prompt_tokens: int, priority: int, now_s: float) -> None:
        """Says no to what `plan` would say no to since all queues are full, at a fraction of the cost: refusals come in floods.

        Raises: OverloadedError with the time after which a place is likely
        """
        refusals: dict[str, float] = {}
        for pool in self._pools.prefill.values():
            if not pool.is_open or not pool.order or prompt_tokens > pool.spec.longest_tokens:
                continue
            if not pool.queue:
                return  # whether it can take the request only `plan` says
            wait_ms = pool.wait_ms(pool.order, now_s, priority)
            refusal = pool.queue.refusal(prompt_tokens, wait_ms)
            if not refusal:
                return
            refusals[f"{pool.spec.name}: {refusal}"] = pool.queue.retry_after_s(wait_ms)
        if refusals:
            text = "; ".join(refusals)
            raise OverloadedError(f"the queues of all pools are full: {text}", retry_after_s=min(refusals.values()))

    def plan(
        self, shape: Shape, aim: Aim, now_s: float, priority: int = 0, number: int = 0, avoid: frozenset[int] = frozenset()
    ) -> Decision:  # fmt: skip
        """`number`: of the request, spreads equals; `avoid`: incarnations that must not be counted on.

        Raises: ServingError if no pair can take it
        """
        if not self._pools.prefill or not self._pools.decode:
            raise WorkerLost(f"no {'decode' if self._pools.prefill else 'prefill'} pool is known yet")
        seed = (self._seed + number) & 0xFFFFFFFFFFFFFFFF
        prefills = self._board.prefill(shape, now_s, priority, avoid)
        decodes = self._board.decode(shape, now_s, avoid)
        return choose(self._profile, prefills, decodes, self._board.pairs(), shape, aim, seed)
