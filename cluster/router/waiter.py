"""A ticket of the prefill queue with a coroutine behind it. Made by `dispatch.py`, answered by `pools.py`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster.router.groups import PrefillLink
from cluster.router.queue import Ticket


@dataclass(eq=False, kw_only=True)
class Waiter(Ticket):
    """`granted` gets the group, or MovedOn if the pool has none left."""

    granted: asyncio.Future[PrefillLink]

    @property
    def is_given_up(self) -> bool:
        return self.granted.done()
