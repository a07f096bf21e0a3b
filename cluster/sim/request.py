"""One simulated request: what it asks, where it is, and the stamps of its life."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.router.job import Stamps

if TYPE_CHECKING:
    from cluster.router.choice import Decision
    from cluster.router.queue import Ticket
    from cluster.sim.engines import SimDecode


class SimRequest:
    """`prompt`, `output` [tokens]. `decode`: the group that keeps a place for it."""

    __slots__ = ("decision", "decode", "number", "output", "prompt", "stamps", "ticket", "tries", "worst_tokens")

    def __init__(self, number: int, prompt: int, output: int, arrived_s: float):
        self.number = number
        self.prompt = prompt
        self.output = output
        self.stamps = Stamps(arrived_s)
        self.tries = 0
        self.worst_tokens = 0
        self.decision: Decision | None = None
        self.ticket: Ticket | None = None
        self.decode: SimDecode | None = None
