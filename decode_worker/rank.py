"""One rank process of a decode group: joins its group, loads its weights, makes its pools, runs its loop.

A plain class: the cluster wraps it in a Ray actor, tests run it in a process of their own.
"""

from __future__ import annotations

import logging
import queue
from pathlib import Path

from common.kv_layout import KVGeometry
from common.metrics_server import MetricsServer
from common.proto import plan_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from common.rank_spec import RankSpec
from common.token_bytes import TokenBytes
from common.tracing import Tracing, make_tracing
from decode_worker import commands as cmd
from decode_worker.engine import DecodeEngine, ModelFacts
from decode_worker.executor import DecodeExecutor
from decode_worker.follower import follow
from decode_worker.metrics import DecodeMetrics
from decode_worker.reservations import Reservations
from decode_worker.scheduler import DecodeScheduler, sliding_pool_of
from decode_worker.service import DecodeService
from kv_transfer.ledger import TransferLedger
from kv_transfer.pool_memory import make_pool_memory, offered_transports
from kv_transfer.pool_view import PoolView
from kv_transfer.quiet import GPU_QUIET_S, Quiet
from kv_transfer.receiver import Receiver
from model.build import BuildModel, build_model
from model.control import FollowerChannel, LeaderChannel
from model.kv_cache import KVCache
from model.rank_life import RankLife
from model.rank_start import StartedRank, start_rank

logger = logging.getLogger(__name__)
_GRACE_S = 0.2


class DecodeRank:
    """`build` makes the forward pass; tests hand in another."""

    def __init__(self, spec: RankSpec, build: BuildModel = build_model):
        self.spec = spec
        self._build = build
        self._life = RankLife()
        self._commands: queue.SimpleQueue[cmd.Command] = queue.SimpleQueue()
        self._service: DecodeService | None = None
        self._transports = offered_transports(spec.transport, spec.device)

    def start(self) -> types_pb2.GroupDescription | None:
        """Returns once this rank serves: the group's description on rank 0, None on the others.

        Raises: ServingError; then nothing runs
        """
        started = start_rank(self.spec, self._build, self._life, self._sliding_blocks, self.spec.max_batch)
        try:
            executor = self._executor(started)
            control = started.links.control
            if isinstance(control, LeaderChannel):
                return self._lead(started, executor, control)
            self._follow(started, executor, control)
            return None
        except BaseException:
            started.close()
            raise

    def stop(self) -> None:
        """Asks the group to end; only rank 0's call counts, the others end with it. Returns at once."""
        self._commands.put(cmd.ShutDown())

    def doing(self) -> str:
        """What a rank that starts is at, in words."""
        return self._life.doing

    def alive(self) -> bool:
        return self._life.alive()

    def wait_ended(self, timeout_s: float | None = None) -> str:
        """Blocks until the rank's loop has ended. Returns: why, empty if it was stopped"""
        return self._life.wait_ended(timeout_s)

    def _sliding_blocks(self, geometry: KVGeometry, _max_len: int) -> int:
        return sliding_pool_of(geometry, self.spec.max_batch)

    def _executor(self, started: StartedRank) -> DecodeExecutor:
        spec, geometry, facts = self.spec, started.geometry, started.facts
        blocks = (facts.full_blocks, facts.sliding_blocks)
        nbytes = KVCache.nbytes(geometry, spec.tp, spec.rank, *blocks)
        buffer = make_pool_memory(spec.device, nbytes)
        kv = KVCache(geometry, spec.tp, spec.rank, *blocks, spec.device, buffer.tensor()[:nbytes])
        receiver = Receiver(
            PoolView(kv.full, kv.sliding, geometry, spec.tp, spec.rank),
            key=started.wire.keys,
            incarnation=spec.incarnation,
            listen_host=spec.listen_host,
            transports=self._transports,
            buffer=buffer,
        )
        return DecodeExecutor(started.built.decode_step(kv, spec.device), geometry, receiver)

    def _lead(self, started: StartedRank, executor: DecodeExecutor, control: LeaderChannel) -> types_pb2.GroupDescription:
        spec, server = self.spec, started.server
        description = started.describe(types_pb2.ROLE_DECODE, list(self._transports))
        template = self._reservation_template(executor, control, description)
        metrics = DecodeMetrics(spec.pool)
        tracing = make_tracing(spec.tracing, "decode")
        engine = self._engine(started, executor, control, template, metrics, tracing)
        exporter = MetricsServer(metrics.metrics, lambda: metrics.refresh(engine.load, executor.received()))
        description.metrics_address = server.call(exporter.start(spec.metrics_host, spec.metrics_port, spec.listen_host))

        def register(grpc_server) -> None:
            self._service = DecodeService(description, self._commands, lambda: engine.load, started.wire, spec.router_lease_s)
            worker_pb2_grpc.add_DecodeGroupServicer_to_server(self._service, grpc_server)

        server.serve(register)
        watch = started.watch(self._life)

        def clean_up() -> None:
            watch.stop()
            server.call(exporter.close())
            server.call(self._serving().close())
            server.stop(_GRACE_S)
            if tracing is not None:
                tracing.close()
            executor.close()
            started.links.close()

        self._life.start(engine.run, clean_up)
        logger.info("decode group %s serves at %s", spec.group, server.address)
        return description

    def _engine(
        self,
        started: StartedRank,
        executor: DecodeExecutor,
        control: LeaderChannel,
        template: worker_pb2.Reservation,
        metrics: DecodeMetrics,
        tracing: Tracing | None,
    ) -> DecodeEngine:
        spec, config = self.spec, started.built.config
        scheduler = DecodeScheduler(started.geometry, started.facts.full_blocks, started.facts.sliding_blocks, spec.max_batch)
        reservations = Reservations(
            scheduler,
            TransferLedger(spec.incarnation),
            started.geometry,
            template,
            started.wire.keys,
            lambda transfer_id, writer: self._serving().fence(transfer_id, writer),
            metrics,
            Quiet(0.0 if spec.device == "cpu" else GPU_QUIET_S),
        )
        facts = ModelFacts(
            vocab_size=config.vocab_size,
            max_len=started.max_len,
            eos_token_ids=frozenset(config.eos_token_ids),
            token_bytes=TokenBytes(Path(spec.vocab)).load().of if spec.vocab else None,
        )
        return DecodeEngine(
            scheduler,
            reservations,
            executor,
            control,
            facts,
            self._commands,
            lambda step, outputs, load: self._serving().publish(step, outputs, load),
            metrics,
            tracing=tracing,
        )

    def _reservation_template(
        self, executor: DecodeExecutor, control: LeaderChannel, description: types_pb2.GroupDescription
    ) -> worker_pb2.Reservation:
        """What every reservation of this group says. Waits until all ranks have their pools."""
        readies = map(plan_pb2.RankReady.FromString, control.collect())
        endpoints = [executor.endpoints(), *(list(ready.endpoints) for ready in readies)]
        return worker_pb2.Reservation(
            incarnation=self.spec.incarnation,
            decode_address=description.address,
            layout=description.layout,
            kv=description.kv,
            ranks=[worker_pb2.RankEndpoints(rank=rank, endpoints=mine) for rank, mine in enumerate(endpoints)],
            lease_ms=int(self.spec.lease_s * 1000),
        )

    def _follow(self, started: StartedRank, executor: DecodeExecutor, control: FollowerChannel) -> None:
        control.reply(plan_pb2.RankReady(endpoints=executor.endpoints()).SerializeToString())
        watch = started.watch(self._life)

        def clean_up() -> None:
            watch.stop()
            executor.close()
            started.links.close()

        self._life.start(lambda: follow(control, executor), clean_up)

    def _serving(self) -> DecodeService:
        assert self._service is not None  # the engine starts after it
        return self._service
