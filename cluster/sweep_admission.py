"""Asks a running decode group for places until it refuses one: how many sequences of a length it holds, tried and not computed.

A place is a real reservation: the group takes a place of its batch and all blocks that the sequence may ever need. No prompt is computed
for it, and all is given back. Called by `sweep_bench.py`; nothing else should run on the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import grpc

from cluster.router.decode_link import DecodeLink
from cluster.router.status import from_rpc_error
from cluster.sweep_fit import Admission
from common.errors import CapacityError
from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams, sampling_to_proto

AT_ONCE = 16
ANSWER_S = 30.0
FREE_S = 30.0
RENEW_S = 1.0  # far below any lease


async def admit_all(
    link: DecodeLink, writer: types_pb2.GroupDescription, router_id: str, tokens: int, expected: int
) -> Admission:  # fmt: skip
    """How many sequences of `tokens` tokens the group admits at once.

    Units: expected: so many are asked for before it goes on one by one
    Raises: CapacityError if blocks are held by others; ServingError if the group fails
    """
    await _until_free(link)
    places = _Places(link, writer, router_id, tokens)
    renewing = asyncio.create_task(places.renew_forever())
    try:
        await places.take(expected)
        while not places.refusal and len(places.taken) <= link.description.max_batch:
            await places.take(1)
        load = await _load(link)
        return Admission(tokens, load.total_full_blocks, load.free_full_blocks, len(places.taken), places.refusal)
    finally:
        renewing.cancel()
        await places.give_back()
        await _until_free(link)


class _Places:
    """The places taken so far, by their internal ids; `refusal`: the group's words, once it has refused one."""

    def __init__(self, link: DecodeLink, writer: types_pb2.GroupDescription, router_id: str, tokens: int):
        self._link, self._writer, self._router_id = link, writer, router_id
        self._prompt = [0] * max(tokens - 1, 1)
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.taken: dict[str, int] = {}
        self.refusal = ""

    async def take(self, count: int) -> None:
        """Raises: ServingError if the group does not answer with a place or a refusal"""
        ended = await asyncio.gather(*(self._take() for _ in range(count)), return_exceptions=True)
        for error in (e for e in ended if e is not None):
            raise error

    async def _take(self) -> None:
        work = worker_pb2.Work(
            internal_id=f"{self._router_id}-{secrets.token_hex(8)}",
            label="sweep",
            prompt_ids=self._prompt,
            sampling=sampling_to_proto(SamplingParams(max_tokens=1, temperature=0.0, seed=0)),
        )
        request = worker_pb2.ReserveRequest(
            work=work, router_id=self._router_id, writer=self._writer, incarnation=self._link.description.incarnation
        )
        async with self._turns:
            try:
                answer = await self._link.stub.Reserve(request, timeout=ANSWER_S)
            except grpc.RpcError as exc:
                error = from_rpc_error(exc, f"group {self._link.name}")
                if not isinstance(error, CapacityError):
                    raise error from exc
                self.refusal = exc.details() or "refused"
            else:
                self.taken[work.internal_id] = answer.transfer_id

    async def renew_forever(self) -> None:
        """Nobody writes into these reservations, so nobody else renews their lease."""
        while True:
            await asyncio.sleep(RENEW_S)
            request = worker_pb2.RenewRequest(transfer_ids=self.taken.values(), incarnation=self._link.description.incarnation)
            with contextlib.suppress(grpc.RpcError):
                await self._link.stub.Renew(request, timeout=ANSWER_S)

    async def give_back(self) -> None:
        await asyncio.gather(*(self._link.abort_and_wait(internal_id, "counted") for internal_id in self.taken))


async def _until_free(link: DecodeLink) -> None:
    """Raises: CapacityError if blocks do not come back"""
    give_up_s = asyncio.get_running_loop().time() + FREE_S
    while (load := await _load(link)).free_full_blocks < load.total_full_blocks:
        if asyncio.get_running_loop().time() > give_up_s:
            raise CapacityError(f"group {link.name}: {load.total_full_blocks - load.free_full_blocks} of its KV blocks are held by others")
        await asyncio.sleep(0.05)


async def _load(link: DecodeLink) -> types_pb2.GroupLoad:
    try:
        return await link.stub.GetLoad(worker_pb2.LoadRequest(), timeout=ANSWER_S)
    except grpc.RpcError as exc:
        raise from_rpc_error(exc, f"group {link.name}") from exc
