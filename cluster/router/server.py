"""The gRPC server `tandem.router.v1.Router`, with health and reflection: what clients and operators see.

Translates between messages and the parts behind (`generate.py`, `dispatch.py`, `pools.py`); decides nothing itself. Made by `main.py`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from cluster.router.choice import explain
from cluster.router.dispatch import Dispatcher
from cluster.router.generate import Generator
from cluster.router.multiplex import Multiplexer
from cluster.router.pool import Pool, base_name
from cluster.router.pools import Pools
from cluster.router.status import abort
from common.access import Role
from common.errors import ConfigError, InvalidRequestError, ServingError, WorkerLost
from common.proto import router_pb2, types_pb2
from common.requests import ModelLimits, check_request, check_sampling
from common.wire import PLAIN, Wire

logger = logging.getLogger(__name__)

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
MAX_RECEIVE_BYTES = 8 << 20
READY_CHECK_S = 0.1
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


@dataclass(frozen=True)
class ServerFacts:
    """What `GetModelInfo` and `GetServerInfo` answer."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    version: str
    router_id: str


class RouterServicer:
    """The methods besides `Generate`."""

    def __init__(self, facts: ServerFacts, dispatcher: Dispatcher, generator: Generator, limits):
        self._facts = facts
        self._dispatcher = dispatcher
        self._pools = dispatcher.pools
        self._generator = generator
        self._limits = limits
        self._started_s = asyncio.get_running_loop().time()

    async def abort(self, request: router_pb2.AbortRequest) -> router_pb2.AbortResponse:
        """Raises: InvalidRequestError for an empty label, which would hit every request of clients that set none"""
        if not request.request_id:
            raise InvalidRequestError("request_id", "must not be empty")
        return router_pb2.AbortResponse(aborted=self._generator.running.abort(request.request_id))

    async def plan_route(self, request: router_pb2.PlanRouteRequest) -> router_pb2.RouteDecision:
        """A decision on the load of this moment, without running anything. Raises: ServingError as `Generate` would"""
        limits: ModelLimits = self._limits()
        if not 1 <= request.prompt_tokens < limits.max_model_len:
            raise InvalidRequestError("prompt_tokens", f"{request.prompt_tokens}; must lie in [1, {limits.max_model_len - 1}]")
        wanted = types_pb2.SamplingParams()
        if request.HasField("max_tokens"):
            wanted.max_tokens = request.max_tokens
        sampling = check_sampling(wanted, request.prompt_tokens, limits)
        stand_in = router_pb2.GenerateRequest(tokenized=types_pb2.TokenizedInput(input_ids=[0]), slo=request.slo)
        if request.HasField("latency_weight"):
            stand_in.latency_weight = request.latency_weight
        checked = check_request(stand_in, limits)
        chooser = self._dispatcher.chooser
        aim = chooser.aim_of(checked.latency_weight, checked.ttft_slo_ms, checked.itl_slo_ms)
        shape = chooser.shape_of(request.prompt_tokens, sampling.max_tokens)
        return explain(chooser.plan(shape, aim, asyncio.get_running_loop().time()))

    async def get_loads(self, request: router_pb2.GetLoadsRequest) -> router_pb2.GetLoadsResponse:
        groups = [
            router_pb2.GroupStatus(description=link.description, load=link.load, healthy=link.is_healthy)
            for pool in self._pools.set.all()
            for link in pool.links.values()
        ]
        queues = []
        for pool in self._pools.set.prefill.values():
            wait_s = pool.wait_ms(pool.order, asyncio.get_running_loop().time()) / 1e3 if pool.order else 0.0
            queues.append(
                router_pb2.QueueStatus(
                    pool=pool.spec.name, requests=len(pool.queue), prompt_tokens=pool.queue.prompt_tokens, predicted_wait_s=wait_s
                )
            )
        return router_pb2.GetLoadsResponse(groups=groups, queues=queues, running_requests=len(self._generator.running))

    async def list_pools(self, request: router_pb2.ListPoolsRequest) -> router_pb2.ListPoolsResponse:
        return router_pb2.ListPoolsResponse(pools=[pool_to_proto(pool) for pool in self._pools.set.all()])

    async def set_pool_state(self, request: router_pb2.SetPoolStateRequest) -> router_pb2.SetPoolStateResponse:
        pool = self._pools.set.find(request.pool)
        if pool is None:
            known = ", ".join(p.spec.name for p in self._pools.set.all())
            raise InvalidRequestError("pool", f"no pool {request.pool!r}; there are: {known}")
        if request.state not in (router_pb2.POOL_STATE_ACTIVE, router_pb2.POOL_STATE_DRAINING):
            raise InvalidRequestError("state", "must be POOL_STATE_ACTIVE or POOL_STATE_DRAINING")
        for version in self._pools.set.all():
            if base_name(version.spec.name) == pool.spec.name:
                version.set_state(request.state)
        logger.info("pool %s is now %s", pool.spec.name, router_pb2.PoolState.Name(request.state))
        return router_pb2.SetPoolStateResponse(pool=pool_to_proto(pool))

    async def get_model_info(self, request: router_pb2.GetModelInfoRequest) -> router_pb2.GetModelInfoResponse:
        return router_pb2.GetModelInfoResponse(
            model=self._facts.model,
            vocab_size=self._facts.vocab_size,
            max_model_len=self._limits().max_model_len,
            eos_token_ids=self._facts.eos_token_ids,
        )

    async def get_server_info(self, request: router_pb2.GetServerInfoRequest) -> router_pb2.GetServerInfoResponse:
        return router_pb2.GetServerInfoResponse(
            version=self._facts.version,
            router_id=self._facts.router_id,
            uptime_s=asyncio.get_running_loop().time() - self._started_s,
            profile=self._pools.profile.label,
        )


def pool_to_proto(pool: Pool) -> router_pb2.Pool:
    spec = pool.spec
    return router_pb2.Pool(
        name=spec.name,
        role=pool.role,
        layout=types_pb2.Layout(tp=spec.tp, ep=spec.ep, dp=1),
        state=pool.state,
        groups=len(pool.links),
        gpus_per_group=spec.gpus,
        usd_per_gpu_hour=spec.usd_per_gpu_hour,
        weights=spec.weights,
    )


def is_ready(pools: Pools) -> bool:
    """Whether some pair of open, healthy pools can be joined, or one comes to life as soon as somebody asks."""
    if pools.may_wake():
        return True
    prefills = [pool.spec.name for pool in pools.set.prefill.values() if pool.is_open and pool.order]
    decodes = [pool.spec.name for pool in pools.set.decode.values() if pool.is_open and pool.order]
    return any((p, d) not in pools.set.not_joinable for p in prefills for d in decodes)


class RouterServer:
    """The listening server. `start`, then `drain` once. `ROLES`: of the methods that more than a client's token is needed for."""

    ROLES: ClassVar[dict[str, Role]] = {"SetPoolState": Role.OPERATOR}

    def __init__(self, servicer: RouterServicer, generator: Generator, pools: Pools, wire: Wire = PLAIN):
        self._wire = wire
        self._generator = generator
        self._pools = pools
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(options=OPTIONS, interceptors=wire.guards(self.ROLES, Role.CLIENT))
        self._multiplexer = Multiplexer(generator.handle)
        self._server.add_generic_rpc_handlers((_handlers(servicer, generator, self._multiplexer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), self._server
        )
        self._watch: asyncio.Task | None = None

    async def start(self, listen: str) -> str:
        """Returns: host:port that it listens on. Raises: ConfigError if the address can't be had"""
        try:
            port = self._wire.bind(self._server, listen, internal=False)
        except RuntimeError as exc:
            raise ConfigError(f"can't listen on {listen}: {exc}") from exc
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        self._watch = asyncio.create_task(self._report_readiness())
        return f"{listen.rpartition(':')[0]}:{port}"

    async def drain(self, grace_s: float) -> None:
        """NOT_SERVING and no new request at once; running ones get `grace_s` to finish, then a typed error."""
        self._generator.is_draining = True
        if self._watch is not None:
            self._watch.cancel()
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            async with asyncio.timeout(grace_s):
                await self._generator.running.wait_idle()
        except TimeoutError:
            self._generator.running.fail_all(WorkerLost("this router has stopped"))
        self._multiplexer.close()
        await self._server.stop(1.0)

    async def _report_readiness(self) -> None:
        shown = False
        while True:
            ready = is_ready(self._pools)
            if ready != shown:
                status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
                await self._health.set(SERVICE, status)
                logger.info("router is %s", "ready" if ready else "not ready: no healthy pair of pools")
                shown = ready
            await asyncio.sleep(READY_CHECK_S)


def _handlers(servicer: RouterServicer, generator: Generator, multiplexer: Multiplexer) -> grpc.GenericRpcHandler:
    """`Generate` takes and writes bytes as they are: broken ones are refused with the field's name, and chunks are serialised once."""
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(generator.handle),
        "GenerateMany": grpc.stream_stream_rpc_method_handler(
            _ends_typed(multiplexer.serve), router_pb2.GenerateManyRequest.FromString, _serialize
        ),
    }
    own = {
        "Abort": servicer.abort,
        "PlanRoute": servicer.plan_route,
        "GetLoads": servicer.get_loads,
        "ListPools": servicer.list_pools,
        "SetPoolState": servicer.set_pool_state,
        "GetModelInfo": servicer.get_model_info,
        "GetServerInfo": servicer.get_server_info,
    }
    for method in router_pb2.DESCRIPTOR.services_by_name["Router"].methods:
        if method.name in own:
            request_type = getattr(router_pb2, method.input_type.name)
            methods[method.name] = grpc.unary_unary_rpc_method_handler(
                _typed(own[method.name]), request_deserializer=request_type.FromString, response_serializer=_serialize
            )
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _typed(method):
    async def handler(request, context: grpc.aio.ServicerContext):
        try:
            return await method(request)
        except ServingError as exc:
            error = exc
        await abort(context, error)

    return handler


def _ends_typed(method):
    async def handler(requests, context: grpc.aio.ServicerContext):
        try:
            await method(requests, context)
            return
        except ServingError as exc:
            error = exc
        await abort(context, error)

    return handler


def _serialize(message) -> bytes:
    return message.SerializeToString()
