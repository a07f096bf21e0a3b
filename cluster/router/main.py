"""Builds a router from the config and runs it until SIGTERM. Called by the CLI, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.cost_model import PoolSpec
from cluster.profile import Profile, builtin_profile, load_profile
from cluster.router.directory import ControllerDirectory, Directory
from cluster.router.dispatch import Dispatcher, DispatchSettings
from cluster.router.generate import Generator
from cluster.router.groups import Liveness
from cluster.router.load_report import report_forever
from cluster.router.pools import Pools
from cluster.router.queue import QueueLimits
from cluster.router.retry_budget import RetryLimits
from cluster.router.server import RouterServer, RouterServicer, ServerFacts
from cluster.specs import security_of, tracing_of
from common.config import Config, PoolNode
from common.errors import ConfigError
from common.metrics_server import MetricsServer, own_host
from common.proto import types_pb2
from common.requests import ModelLimits
from common.tracing import Tracing, make_tracing
from common.versions import version_of
from common.wire import PLAIN, Wire

logger = logging.getLogger(__name__)

GRACE_S = 30.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
VOCAB_SIZE = 201088
HARMONY_ENDS = {200002, 200012}  # return and call: engines end a turn on them whatever the checkpoint names


@dataclass(frozen=True)
class ModelFacts:
    """What the router reads of the checkpoint folder: `config.json` and `generation_config.json`, as far as they are there."""

    name: str
    num_layers: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass
class Router:
    """The parts of one running router. `server` is not started yet."""

    pools: Pools
    dispatcher: Dispatcher
    generator: Generator
    server: RouterServer

    def refresh_metrics(self) -> None:
        self.dispatcher.metrics.refresh(self.pools.set, len(self.generator.running))


async def serve(config: Config, controller_address: str, ready: Callable[[str], None]) -> None:
    """Runs until SIGTERM or SIGINT, then drains. `ready` gets host:port as soon as it listens; health says when it can serve."""
    wire = Wire(security_of(config))
    tracing = make_tracing(tracing_of(config), "router")
    router = build_router(config, wire, tracing)
    exporter = MetricsServer(router.dispatcher.metrics.metrics, router.refresh_metrics)
    host, _, _ = config.router.listen.rpartition(":")
    metrics_address = await exporter.start(config.metrics.host, config.metrics.router_port, own_host(host))
    directory = ControllerDirectory(controller_address, router.pools.router_id, metrics_address, wire)
    targets = {pool.name: pool.replicas.target_itl_ms for pool in config.pools if pool.replicas.target_itl_ms is not None}
    reporting = asyncio.create_task(report_forever(router.pools, targets, controller_address, wire))
    try:
        await run_until_stopped(router, directory, config.router.listen, ready, config.router.drain_s)
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        await exporter.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def run_until_stopped(
    router: Router, directory: Directory, listen: str, ready: Callable[[str], None], grace_s: float = GRACE_S
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    follow = asyncio.create_task(router.pools.follow(directory))
    try:
        address = await router.server.start(listen)
        logger.info("router listens on %s", address)
        ready(address)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, follow), return_when=asyncio.FIRST_COMPLETED)
        if follow.done():
            follow.result()
        logger.info("router drains")
        await router.server.drain(grace_s)
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        follow.cancel()
        await asyncio.gather(follow, return_exceptions=True)
        await router.pools.close()


def build_router(config: Config, wire: Wire = PLAIN, tracing: Tracing | None = None) -> Router:
    """Must be called on a running loop. Raises: ConfigError"""
    facts = read_model_facts(config)
    node = config.router
    retry = RetryLimits(**node.retry.model_dump())
    pools = Pools(
        profile_of(config, facts),
        specs_of(config),
        router_id=f"router-{secrets.token_hex(8)}",
        limits=QueueLimits(node.queue.max_requests, node.queue.max_prompt_tokens, node.queue.max_wait_s),
        liveness=Liveness(**node.liveness.model_dump()),
        retry=retry,
        usd_per_gpu_hour=config.prices.usd_per_gpu_hour,
        wire=wire,
    )
    settings = DispatchSettings(
        latency_weight=node.objective.latency_weight,
        max_wait_s=node.queue.max_wait_s,
        retry=retry,
        max_model_len=config.model.max_model_len,
    )
    dispatcher = Dispatcher(pools, settings, seed=secrets.randbits(63))

    def limits() -> ModelLimits:
        longest = min(config.model.max_model_len, pools.longest_tokens() or config.model.max_model_len)
        return ModelLimits(facts.vocab_size, longest, has_vocab=config.model.vocab is not None)

    generator = Generator(
        dispatcher,
        limits,
        default_deadline_s=node.default_deadline_s,
        stream_buffer_tokens=node.stream_buffer_tokens,
        tracing=tracing,
    )
    server_facts = ServerFacts(facts.name, facts.vocab_size, facts.eos_token_ids, version_of("tandem"), pools.router_id)
    servicer = RouterServicer(server_facts, dispatcher, generator, limits)
    return Router(pools, dispatcher, generator, RouterServer(servicer, generator, pools, wire))


def read_model_facts(config: Config) -> ModelFacts:
    """Raises: ConfigError naming the file that is there and can't be read"""
    name = config.model.path.name
    tree = _read_json(config.model.path / "config.json")
    generation = _read_json(config.model.path / "generation_config.json")
    named = generation.get("eos_token_id", tree.get("eos_token_id", []))
    try:
        vocab_size = int(tree.get("vocab_size", VOCAB_SIZE))
        ends = {int(token) for token in ([named] if isinstance(named, int) else named)} | (
            HARMONY_ENDS if vocab_size > max(HARMONY_ENDS) else set()
        )
        num_layers = tree.get("num_hidden_layers")
        return ModelFacts(name, None if num_layers is None else int(num_layers), vocab_size, tuple(sorted(ends)))
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"{config.model.path}: config.json or generation_config.json: {exc}") from exc


def _read_json(path: Path) -> dict:
    """The object in the file, empty if there is no file."""
    if not path.exists():
        return {}
    try:
        tree = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected an object, got {type(tree).__name__}")
    return tree


def profile_of(config: Config, facts: ModelFacts) -> Profile:
    if config.router.profile is not None:
        return load_profile(config.router.profile)
    return builtin_profile(facts.num_layers, on_cuda=config.cluster.device != "cpu")


def specs_of(config: Config) -> list[tuple[types_pb2.Role, PoolSpec]]:
    """What a router knows of the pools before it hears from the controller."""
    return [(_role(pool), spec_of_node(config, pool)) for pool in config.pools]


def spec_of_node(config: Config, pool: PoolNode) -> PoolSpec:
    """What the config says of a pool; its groups tell the rest when they appear."""
    return PoolSpec(
        name=pool.name,
        tp=pool.layout.tp,
        ep=pool.layout.ep,
        weights=pool.weights,
        usd_per_gpu_hour=config.usd_per_gpu_hour(pool),
        max_batch=pool.max_batch,
        max_model_len=config.model.max_model_len,
    )


def _role(pool: PoolNode) -> types_pb2.Role:
    return types_pb2.ROLE_PREFILL if pool.role == "prefill" else types_pb2.ROLE_DECODE
