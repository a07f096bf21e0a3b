"""A decode or prefill group in a process of its own, so that tests can stop and kill it.

Children come from a fork server that has imported torch once. Over the pipe go tuples: a command's name and arguments, and its answer.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection

from common.proto import worker_pb2
from tests.support.kv_groups import DecodeGroup, PrefillGroup, assert_handed_over, geometry


class PeerProcess:
    """The test's handle. `role`: decode or prefill, of one rank and the default geometry."""

    def __init__(self, role: str, transport: str):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(role, transport, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._pipe.recv()

    def ask(self, *command: object):
        self._pipe.send(command)
        return self._pipe.recv()

    def reserve(self, transfer_id: int, num_tokens: int) -> worker_pb2.Reservation:
        return worker_pb2.Reservation.FromString(self.ask("reserve", transfer_id, num_tokens))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        self.kill()
        self._pipe.close()
        self._process.close()


def _serve(role: str, transport: str, pipe: Connection) -> None:
    actor = _Decode(transport) if role == "decode" else _Prefill(transport)
    pipe.send(os.getpid())
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(actor, name)(*arguments))


class _Decode:
    def __init__(self, transport: str):
        self._group = DecodeGroup(geometry(2), 1, (transport,))
        self._tokens: dict[int, int] = {}

    def reserve(self, transfer_id: int, num_tokens: int) -> bytes:
        self._tokens[transfer_id] = num_tokens
        return self._group.reserve(transfer_id, num_tokens).SerializeToString()

    def is_right(self, transfer_id: int, seed: int) -> bool:
        assert_handed_over(PrefillGroup(self._group.geometry, 1, self._tokens[transfer_id], seed=seed), self._group, transfer_id)
        return True


class _Prefill:
    def __init__(self, transport: str):
        self._transport = transport
        self._groups: list[PrefillGroup] = []

    def push(self, reservation: bytes, num_tokens: int, chunks: int) -> bool:
        """Begins a transfer and pushes some chunks of 16 tokens; it stays open."""
        message = worker_pb2.Reservation.FromString(reservation)
        group = PrefillGroup(geometry(2), 1, num_tokens, self._transport)
        self._groups.append(group)
        group.begin(message)
        for i in range(chunks):
            group.push_chunk(message.transfer_id, 16 * i, 16 * (i + 1))
        return True
