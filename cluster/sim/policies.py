"""What the router's choice is compared with: round robin, least loaded, shortest queue. They see the same pools and the same exclusions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from cluster.cost_model import Shape
from cluster.router.choice import Aim, Decision
from cluster.router.chooser import Chooser
from cluster.router.pool import DecodePool, PoolSet, PrefillPool

Key = Callable[[PrefillPool | DecodePool], float]


class RoundRobin:
    """Each side in turn."""

    def __init__(self, chooser: Chooser):
        self._chooser = chooser
        self._turns = itertools.count()

    def plan(self, shape: Shape, aim: Aim, now_s: float, *, number: int) -> Decision:
        turn = next(self._turns)

        def key(pair: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
            return ((pair[0] - turn) % rows, (pair[1] - turn) % columns)

        decision = self._chooser.plan(shape, Aim(aim.latency_weight), now_s, number=number)
        return _with_pair(decision, key)


class Least:
    """The pools whose key is least, each side on its own; equals in turn."""

    def __init__(self, chooser: Chooser, pools: PoolSet, key: Key):
        self._chooser = chooser
        self._pools = pools
        self._key = key
        self._turns = itertools.count()

    def plan(self, shape: Shape, aim: Aim, now_s: float, *, number: int) -> Decision:
        turn = next(self._turns)
        prefill = [self._key(pool) for pool in self._pools.prefill.values()]
        decode = [self._key(pool) for pool in self._pools.decode.values()]

        def key(pair: tuple[int, int], rows: int, columns: int) -> tuple[float, int, float, int]:
            return (prefill[pair[0]], (pair[0] - turn) % rows, decode[pair[1]], (pair[1] - turn) % columns)

        decision = self._chooser.plan(shape, Aim(aim.latency_weight), now_s, number=number)
        return _with_pair(decision, key)


def least_loaded(pool: PrefillPool | DecodePool) -> float:
    """Work per place: of a prefill pool requests per group, of a decode pool the part of its batch places that is taken."""
    groups = max(len(pool.order), 1)
    if isinstance(pool, PrefillPool):
        return (len(pool.queue) + sum(len(group.book.given) for group in pool.order)) / groups
    return (len(pool.expected) + sum(group.book.batch for group in pool.order)) / (groups * pool.spec.max_batch)


def shortest_queue(pool: PrefillPool | DecodePool) -> float:
    """Requests that the next one would share its group with."""
    if isinstance(pool, PrefillPool):
        return len(pool.queue) + min((len(group.book.given) for group in pool.order), default=0)
    return len(pool.expected) + min((group.book.batch for group in pool.order), default=0)


def policy_named(name: str, chooser: Chooser, pools: PoolSet):
    """Returns: the policy of that name. Raises: KeyError"""
    return {
        "cost-aware": lambda: chooser,
        "round-robin": lambda: RoundRobin(chooser),
        "least-loaded": lambda: Least(chooser, pools, least_loaded),
        "shortest-queue": lambda: Least(chooser, pools, shortest_queue),
    }[name]()


POLICIES = ("cost-aware", "round-robin", "least-loaded", "shortest-queue")


def _with_pair(decision: Decision, key) -> Decision:
    """The decision with the pair of least key among those that are not excluded."""
    rows, columns = decision.scores.shape
    pairs = [(i, j) for i in range(rows) for j in range(columns) if (i, j) not in decision.exclusions]
    decision.chosen = min(pairs, key=lambda pair: key(pair, rows, columns))
    return decision
