"""One rank process of a prefill group: joins its group, loads its weights, makes its pools, runs its loop.

A plain class: the cluster wraps it in a Ray actor, tests run it in a process of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from common.kv_layout import KVGeometry
from common.metrics_server import MetricsServer
from common.proto import types_pb2, worker_pb2, worker_pb2_grpc
from common.rank_spec import RankSpec
from common.token_bytes import TokenBytes
from common.tracing import make_tracing
from kv_transfer.pool_memory import offered_transports
from kv_transfer.pool_view import PoolView
from kv_transfer.sender import Sender
from model.build import BuildModel, build_model
from model.control import FollowerChannel, LeaderChannel
from model.kv_cache import KVCache
from model.rank_life import RankLife
from model.rank_start import StartedRank, start_rank
from prefill_worker.engine import PrefillEngine, ShutDown
from prefill_worker.executor import PrefillExecutor
from prefill_worker.follower import follow
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.report import PushReporter
from prefill_worker.scheduler import PrefillScheduler, sliding_blocks_for
from prefill_worker.service import PrefillFacts, PrefillService

logger = logging.getLogger(__name__)
_PUSHES_AHEAD = 8  # prompts whose hand-over may be under way while the next one computes
_PROMPTS_KEPT = 4
_GRACE_S = 0.2


class PrefillRank:
    """`build` makes the forward pass; tests hand in another."""

    def __init__(self, spec: RankSpec, build: BuildModel = build_model):
        self.spec = spec
        self._build = build
        self._life = RankLife()
        self._engine: PrefillEngine | None = None
        self._service: PrefillService | None = None

    def start(self) -> types_pb2.GroupDescription | None:
        """Returns once this rank serves: the group's description on rank 0, None on the others.

        Raises: ServingError; then nothing runs
        """
        started = start_rank(self.spec, self._build, self._life, self._sliding_blocks, _PROMPTS_KEPT)
        try:
            control = started.links.control
            if isinstance(control, LeaderChannel):
                return self._lead(started, control)
            self._follow(started, control)
            return None
        except BaseException:
            started.close()
            raise

    def stop(self) -> None:
        """Asks the group to end; only rank 0's call counts, the others end with it. Returns at once."""
        if self._engine is not None:
            self._engine.commands.put(ShutDown())

    def doing(self) -> str:
        """What a rank that starts is at, in words."""
        return self._life.doing

    def alive(self) -> bool:
        return self._life.alive()

    def wait_ended(self, timeout_s: float | None = None) -> str:
        """Blocks until the rank's loop has ended. Returns: why, empty if it was stopped"""
        return self._life.wait_ended(timeout_s)

    def _sliding_blocks(self, geometry: KVGeometry, max_len: int) -> int:
        return sliding_blocks_for(geometry, min(self.spec.chunk_tokens, max_len), _PUSHES_AHEAD)

    def _executor(self, started: StartedRank, report: Callable[[worker_pb2.PushReport], None]) -> PrefillExecutor:
        spec, geometry, facts = self.spec, started.geometry, started.facts
        kv = KVCache(geometry, spec.tp, spec.rank, facts.full_blocks, facts.sliding_blocks, spec.device)
        view = PoolView(kv.full, kv.sliding, geometry, spec.tp, spec.rank)
        sender = Sender(view, key=started.wire.keys, rank=spec.rank, preference=spec.transport, io_timeout_s=spec.lease_s)
        return PrefillExecutor(started.built.ready(kv), kv, sender, spec.rank, report, started.built.check)

    def _lead(self, started: StartedRank, control: LeaderChannel) -> types_pb2.GroupDescription:
        spec, server, facts = self.spec, started.server, started.facts
        executor = self._executor(started, lambda report: self._serving().take_report(report))
        chunk_tokens = min(spec.chunk_tokens, started.max_len)
        scheduler = PrefillScheduler(started.geometry, facts.full_blocks, facts.sliding_blocks, chunk_tokens)
        engine = self._engine = PrefillEngine(scheduler, executor, control)
        service_facts = self._facts(started)
        metrics = PrefillMetrics(spec.pool)
        tracing = make_tracing(spec.tracing, "prefill")
        exporter = MetricsServer(metrics.metrics, lambda: metrics.refresh(engine.load))
        service_facts.description.metrics_address = server.call(exporter.start(spec.metrics_host, spec.metrics_port, spec.listen_host))

        def register(grpc_server) -> None:
            self._service = PrefillService(engine, service_facts, metrics, tracing)
            worker_pb2_grpc.add_PrefillGroupServicer_to_server(self._service, grpc_server)

        server.serve(register)
        watch = started.watch(self._life)

        def clean_up() -> None:
            watch.stop()
            executor.close()
            server.call(exporter.close())
            server.call(self._serving().close())
            server.stop(_GRACE_S)
            if tracing is not None:
                tracing.close()
            started.links.close()

        self._life.start(engine.run, clean_up)
        logger.info("prefill group %s serves at %s", spec.group, server.address)
        return service_facts.description

    def _facts(self, started: StartedRank) -> PrefillFacts:
        spec, config = self.spec, started.built.config
        transports = list(offered_transports(spec.transport, spec.device))
        return PrefillFacts(
            description=started.describe(types_pb2.ROLE_PREFILL, transports),
            geometry=started.geometry,
            vocab_size=config.vocab_size,
            eos_token_ids=frozenset(config.eos_token_ids),
            token_bytes=TokenBytes(Path(spec.vocab)).load().of if spec.vocab else None,
            wire=started.wire,
            lease_s=spec.lease_s,
        )

    def _follow(self, started: StartedRank, control: FollowerChannel) -> None:
        reporter = PushReporter(started.facts.leader_address, started.wire)
        executor = self._executor(started, reporter.send)
        watch = started.watch(self._life)

        def clean_up() -> None:
            watch.stop()
            executor.close()
            reporter.close()
            started.links.close()

        self._life.start(lambda: follow(control, executor), clean_up)

    def _serving(self) -> PrefillService:
        assert self._service is not None  # the engine starts after it
        return self._service
