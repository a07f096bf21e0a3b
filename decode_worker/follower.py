"""The loop of every rank above 0: receive a plan, carry it out, reply where a reply is due."""

from __future__ import annotations

from common.proto import plan_pb2
from decode_worker.executor import DecodeExecutor, wants_reply
from model.control import FollowerChannel


def follow(channel: FollowerChannel, executor: DecodeExecutor) -> None:
    """Runs until the leader shuts the group down.

    Raises: WorkerLost if the leader or a rank in a collective is gone
    """
    while True:
        plan = plan_pb2.DecodePlan.FromString(channel.receive())
        if plan.shut_down:
            return
        reply = executor.operate(plan)
        if wants_reply(plan):
            channel.reply(reply.SerializeToString())
        if plan.rows:
            executor.launch(plan, None)
            executor.catch_up()
