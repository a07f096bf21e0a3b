"""The loop of every rank above 0: receive a plan, carry it out, reply where a reply is due."""

from __future__ import annotations

from common.proto import plan_pb2
from model.control import DISAGREEMENT_S, FollowerChannel
from prefill_worker.executor import PrefillExecutor, wants_reply


def follow(channel: FollowerChannel, executor: PrefillExecutor) -> None:
    """Runs until the leader shuts the group down.

    Raises: WorkerLost if the leader or a rank in a collective is gone, or if a forward pass failed here and not on the others
    """
    timeout_s = None
    while True:
        plan = plan_pb2.PrefillPlan.FromString(channel.receive(timeout_s))
        if plan.shut_down:
            return
        reply, _ = executor.run(plan)
        if wants_reply(plan):
            channel.reply(reply.SerializeToString())
        timeout_s = DISAGREEMENT_S if reply.error_status else None
