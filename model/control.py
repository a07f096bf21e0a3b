"""How the leader of a group tells the other ranks what to do next, and hears back.

Carries opaque bytes (serialized plans and replies, common/proto/plan.proto); plans are made and carried out by the workers. Followers
block in `receive` between plans, so that an idle group costs nothing.
"""

from __future__ import annotations

from model.star import Link

DISAGREEMENT_S = 3.0  # a rank whose forward pass failed waits so long for the others to fail alike; else the group can't go on


class LeaderChannel:
    """Rank 0's end; with no other ranks every method is trivial."""

    def __init__(self, links: list[Link]):
        """`links`: to ranks 1, 2, ... in this order."""
        self._links = links

    def send(self, data: bytes) -> None:
        """Raises: WorkerLost if a rank is gone"""
        for link in self._links:
            link.send(data)

    def collect(self, timeout_s: float | None = None) -> list[bytes]:
        """Waits for one reply of every other rank. Returns: in rank order, rank 1 first

        Raises: WorkerLost if a rank is gone or silent for `timeout_s`
        """
        return [bytes(link.receive(timeout_s)) for link in self._links]

    def close(self) -> None:
        for link in self._links:
            link.close()


class FollowerChannel:
    """The other end, of each rank above 0."""

    def __init__(self, link: Link):
        self._link = link

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Blocks for the leader's next message. Raises: WorkerLost if the leader is gone or silent for `timeout_s`"""
        return bytes(self._link.receive(timeout_s))

    def reply(self, data: bytes) -> None:
        """Raises: WorkerLost if the leader is gone"""
        self._link.send(data)

    def close(self) -> None:
        self._link.close()
