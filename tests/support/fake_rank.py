"""Rank actors whose group is a fake one (`fake_groups.py`): controller and Ray are real, nothing is computed, a start takes a moment."""

from __future__ import annotations

import asyncio
import threading

from cluster.rank_actor import Rank, RankActor
from common.proto import types_pb2
from common.rank_spec import RankSpec
from common.server_thread import ServerThread


class FakeRank:
    """Rank 0 serves the fake group, the others only live."""

    def __init__(self, spec: RankSpec, *, start_s: float, prefill_s_per_token: float, step_ms: float, fail: str):
        self._spec = spec
        self._start_s = start_s
        self._prefill_s_per_token = prefill_s_per_token
        self._step_ms = step_ms
        self._fail = fail
        self._ended = threading.Event()
        self._thread: ServerThread | None = None

    def start(self) -> types_pb2.GroupDescription | None:
        from common.errors import ConfigError

        threading.Event().wait(self._start_s)
        if self._fail:
            raise ConfigError(self._fail)
        if self._spec.rank:
            return None
        self._thread = ServerThread("127.0.0.1")
        self._group = self._thread.call(self._serve())
        return self._group.description

    async def _serve(self):
        from tests.support.fake_groups import FakeDecodeGroup, FakePrefillGroup

        spec = self._spec
        capacity = (spec.kv_blocks or 4096) * 16
        if spec.role == "prefill":
            pace_ms = self._prefill_s_per_token * 1e3
            group = FakePrefillGroup(spec.pool, spec.group, tp=spec.tp, capacity_tokens=capacity, prefill_ms=lambda n: n * pace_ms)
        else:
            group = FakeDecodeGroup(
                spec.pool, spec.group, tp=spec.tp, capacity_tokens=capacity, max_batch=spec.max_batch, step_ms=self._step_ms
            )
        group.description.incarnation = spec.incarnation
        group.description.kv_version = spec.kv_version
        await group.start()
        return group

    def doing(self) -> str:
        return "" if self._thread is not None else "fakes its weights"

    def alive(self) -> bool:
        return not self._ended.is_set()

    def wait_ended(self, timeout_s: float | None = None) -> str:
        self._ended.wait(timeout_s)
        return ""

    def stop(self) -> None:
        if self._thread is not None:
            asyncio.run_coroutine_threadsafe(self._group.kill(), self._thread.loop).result(5)
        self._ended.set()


def fake_rank_actor(
    *, start_s: float = 0.0, prefill_s_per_token: float = 0.0001, step_ms: float = 5.0, fail: str = "", slow_pool: str = ""
) -> type[RankActor]:
    """A rank actor class that Ray can carry to another process. `start_s`: how long weights take to load; `fail`: why they can't be;
    both only in `slow_pool` if one is named."""

    class FakeRankActor(RankActor):
        def make_rank(self, spec: RankSpec) -> Rank:
            hit = slow_pool in ("", spec.pool)
            return FakeRank(
                spec,
                start_s=start_s if hit else 0.0,
                prefill_s_per_token=prefill_s_per_token,
                step_ms=step_ms,
                fail=fail if hit else "",
            )

    return FakeRankActor
