"""The autoscaler over simulated pools: it is told what the controller would tell it, and its answer starts and drains groups."""

from __future__ import annotations

from cluster.autoscaler.decide import decide, start_state
from cluster.autoscaler.types import Change, DecodeLoad, Observation, Policy, PoolState, PrefillLoad
from cluster.cost_model import PairLoad, Shape, itl_ms
from cluster.router.pool import DecodePool, PrefillPool
from cluster.sim.simulation import Simulation


class Scaling:
    """`start_s`: from the decision until a new group serves. `mean`: a typical request, for how many fit a decode group. `changes`: all
    decisions so far. `start` once, before the simulation runs."""

    def __init__(self, simulation: Simulation, policy: Policy, *, start_s: float, mean: Shape):
        self._simulation = simulation
        self._policy = policy
        self._start_s = start_s
        self._mean = mean
        self._state = dict(start_state(policy))
        self.changes: list[Change] = []

    def start(self) -> None:
        for pool in self._simulation.pools.all():
            if pool.spec.name in self._state:
                self._state[pool.spec.name] = PoolState(len(pool.links))
        self._simulation.clock.after(self._policy.interval_s, self._decide)

    def _decide(self) -> None:
        simulation = self._simulation
        seen = {}
        for policy in self._policy.pools:
            pool = simulation.pools.find(policy.name)
            if isinstance(pool, PrefillPool):
                seen[policy.name] = Observation(self._prefill_load(pool), len(pool.order))
            elif isinstance(pool, DecodePool):
                seen[policy.name] = Observation(self._decode_load(pool, policy.target_itl_ms), len(pool.order))
        decision = decide(self._policy, self._state, seen, simulation.clock.now_s)
        self._state = dict(decision.state)
        for change in decision.changes:
            self.changes.append(change)
            pool = simulation.pools.find(change.pool)
            assert isinstance(pool, PrefillPool | DecodePool)
            for _ in range(change.after - change.before):
                simulation.clock.after(self._start_s, simulation.add_group, pool)
            for _ in range(change.before - change.after):
                self._drain_one(pool)
        simulation.clock.after(self._policy.interval_s, self._decide)

    def _prefill_load(self, pool: PrefillPool) -> PrefillLoad:
        now_s = self._simulation.clock.now_s
        arrived_ms = self._simulation.arriving_ms.pop(pool.spec.name, 0.0)
        running_ms = sum(group.book.busy_ms(now_s) for group in pool.order)
        return PrefillLoad(
            arriving_s_per_s=arrived_ms / 1e3 / self._policy.interval_s,
            backlog_s=(running_ms + pool.queue.service_ms) / 1e3,
            queue_wait_s=pool.wait_ms(pool.order, now_s) / 1e3 if pool.order else 0.0,
            waiting=len(pool.queue) if not pool.order else 0,
        )

    def _decode_load(self, pool: DecodePool, target_itl_ms: float | None) -> DecodeLoad:
        groups = list(pool.order)
        return DecodeLoad(
            sequences=sum(group.book.batch for group in groups) + len(pool.expected),
            sequences_per_group=self._fit(pool, target_itl_ms),
            itl_ms=max((group.step_ms for group in groups), default=0.0),
            kv_blocks_used=sum(group.used_blocks for group in groups),
            kv_blocks_per_group=groups[0].total_blocks if groups else 0,
            waiting=len(pool.expected) if not groups else 0,
        )

    def _fit(self, pool: DecodePool, target_itl_ms: float | None) -> float:
        """Most sequences of the typical request on one group."""
        if target_itl_ms is None:
            return pool.spec.max_batch
        mean = self._mean
        for batch in range(pool.spec.max_batch, 1, -1):
            if itl_ms(pool.prepared, PairLoad(0.0, batch - 1, (batch - 1) * (mean.prompt + mean.output / 2)), mean) <= target_itl_ms:
                return batch
        return 1

    def _drain_one(self, pool: PrefillPool | DecodePool) -> None:
        """The group with the least to do: its running requests finish, new ones go elsewhere."""
        if not pool.order:
            return
        group = min(pool.order, key=lambda g: len(g.book.given) if isinstance(pool, PrefillPool) else g.book.batch)
        group.is_draining = True
        pool.refresh(group)
        if group.is_idle:
            pool.remove(group)
            self._simulation.record.group_left(pool.spec, group, self._simulation.clock.now_s)
