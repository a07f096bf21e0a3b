"""Asks the router of this host for its health over its own TLS and names what it waits for. For kubelets, which speak no TLS to gRPC."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client import mapped_errors
from cluster.specs import security_of
from common.config import Config
from common.errors import WorkerLost
from common.proto import router_pb2, router_pb2_grpc
from common.wire import Wire

SERVICE = "tandem.router.v1.Router"
TIMEOUT_S = 4.0


def probe_router(config: Config, *, wants_ready: bool) -> str:
    """Returns: a line for the log. Raises: WorkerLost with what the router waits for; ServingError if it does not answer"""
    wire = Wire(security_of(config))
    address = f"127.0.0.1:{config.router.listen.rpartition(':')[2]}"
    with wire.blocking_channel(address) as channel, mapped_errors():
        request = health_pb2.HealthCheckRequest(service=SERVICE if wants_ready else "")
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        if reply.status == health_pb2.HealthCheckResponse.SERVING:
            return "serving"
        raise WorkerLost(f"the router is not ready: {_waits_for(wire, channel)}")


def _waits_for(wire: Wire, channel: grpc.Channel) -> str:
    loads = wire.stub(router_pb2_grpc.RouterStub(channel))
    ready = {group.description.pool for group in loads.GetLoads(router_pb2.GetLoadsRequest(), timeout=TIMEOUT_S).groups if group.healthy}
    pools = loads.ListPools(router_pb2.ListPoolsRequest(), timeout=TIMEOUT_S).pools
    missing = sorted(pool.name for pool in pools if pool.name not in ready)
    return f"waits for a group of {', '.join(missing)}" if missing else "it drains, or no open pair of its pools can be joined"
