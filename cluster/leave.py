"""The last thing that a node does before it is taken away: its groups drain, and it waits until none is left. `tandem leave` runs it.

Asks again until the answer is empty, so that a controller that starts anew meanwhile hears of it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from common.errors import ServingError, WorkerLost
from common.proto import control_pb2, control_pb2_grpc
from common.wire import Wire

POLL_S = 0.5
CALL_TIMEOUT_S = 10.0
AWAY_S = 20.0  # a controller that is silent for so long won't see this node off; then it goes at once, as it would without being asked


def leave(wire: Wire, controller: str, node: str, timeout_s: float, say: Callable[[str], None], away_s: float = AWAY_S) -> None:
    """`controller`: host:port of the directory; `node`: address or id of this node in the Ray cluster.

    Effects: `say` gets a line whenever other groups are left than before
    Raises: WorkerLost if groups are left after `timeout_s`, or the controller is silent for `away_s`; ServingError if it refuses
    """
    started = answered = time.monotonic()
    said: list[str] | None = None
    with wire.blocking_channel(controller) as channel:
        stub = wire.stub(control_pb2_grpc.DirectoryStub(channel))
        while True:
            try:
                groups = sorted(stub.Drain(control_pb2.DrainRequest(target=node), timeout=CALL_TIMEOUT_S).groups)
            except grpc.RpcError as exc:
                if exc.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise ServingError(exc.details() or exc.code().name) from exc
                if time.monotonic() - answered > away_s:
                    raise WorkerLost(f"the controller at {controller} was silent for {away_s:g} s: {exc.details()}") from exc
            else:
                answered = time.monotonic()
                if groups != said:
                    said = groups
                    say(f"waits for {', '.join(groups)}" if groups else "no group is left")
                if not groups:
                    return
            if time.monotonic() - started > timeout_s:
                raise WorkerLost(f"after {timeout_s:g} s still there: {', '.join(said or ['(the controller did not say)'])}")
            time.sleep(POLL_S)
