"""What a Ray worker of a fault run is: the real rank actor over the fake model, with faulty links and calls.

`HOOK` makes Ray run `install` in each of its workers. The product has no switch for any of it.
"""

from __future__ import annotations

from typing import Any

from tests.support.faults.plan import FaultPlan, FaultSettings

HOOK = {
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "tests.support.faults.ranks.install",
    "RAY_worker_niceness": "0",  # Ray's default lets whatever else runs on the machine go first
}


def install() -> None:
    """Light until a rank starts: controllers are workers too."""
    from cluster import rank_actor

    rank_actor.RankActor.start = _start  # type: ignore[method-assign]


def _start(self: Any, spec: Any) -> bytes:
    from common.wire import Wire
    from decode_worker.rank import DecodeRank
    from prefill_worker.rank import PrefillRank
    from tests.support.fake_model import FakeModelBuilder
    from tests.support.faults.links import FaultyOpener
    from tests.support.faults.messages import FaultyCalls

    settings = FaultSettings.from_environment()
    plan = FaultPlan(settings, f"{spec.group}-{spec.rank}")
    build = FakeModelBuilder(settings.prefill_s_per_token, settings.decode_s)

    class FaultyPrefillRank(PrefillRank):
        def _executor(self, *arguments: Any) -> Any:
            executor = super()._executor(*arguments)
            sender = executor._sender
            sender._opener = FaultyOpener(sender._opener, plan)
            return executor

    if settings.one_in:
        plain = Wire.channel

        def channel(wire: Wire, address: str, options: Any = ()) -> Any:
            made = plain(wire, address, options)
            made._unary_unary_interceptors.append(FaultyCalls(plan))
            return made

        Wire.channel = channel  # type: ignore[method-assign]
    self._rank = FaultyPrefillRank(spec, build) if spec.role == "prefill" else DecodeRank(spec, build)
    description = self._rank.start()
    return description.SerializeToString() if description is not None else b""
