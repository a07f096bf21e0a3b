"""Runs single cells of a sweep: one prefill at a time on a prefill group, and a steady batch of sequences on a decode group.

Owns the links and the sequences that run for the present cell. Knows nothing of files and profiles; `sweep.py` calls it.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import grpc

from cluster.router.decode_link import DecodeLink
from cluster.router.groups import UNARY_TIMEOUT_S, PrefillLink
from cluster.router.status import from_rpc_error, from_status
from cluster.sweep_admission import admit_all
from cluster.sweep_fit import Admission
from common.errors import CapacityError, DeadlineError, ServingError
from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams, sampling_to_proto

Role = Literal["prefill", "decode"]
Layout = tuple[int, int, str]  # tp, ep, weights

READY_S = 30.0
CELL_TIMEOUT_S = 600.0
PROBE_S = 2.0
SETTLE_STEPS = 3  # after a sequence joined; not counted


@dataclass(frozen=True)
class SweepSettings:
    """What to measure. Lengths in tokens; `runs` per prefill length after `warm_up`; `steps` per decode cell; `role` alone, or both."""

    prefill_tokens: tuple[int, ...] = (1, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    runs: int = 5
    warm_up: int = 1
    steps: int = 100
    vocab_size: int = 200_000
    seed: int = 0
    role: Role | None = None


@dataclass(frozen=True)
class Cell:
    """One point to measure. Prefill: `tokens`; decode: `batch` and `tokens` of context. `estimated_s`: by an older profile.
    `skip`: why it is left out, "" if it is not."""

    role: Role
    tp: int
    ep: int
    weights: str
    tokens: int
    batch: int = 1
    estimated_s: float = 0.0
    skip: str = ""

    @property
    def layout(self) -> Layout:
        return self.tp, self.ep, self.weights

    @property
    def key(self) -> str:
        return f"{self.role} tp{self.tp} ep{self.ep} {self.weights} tokens={self.tokens} batch={self.batch}"


@dataclass(frozen=True)
class Result:
    """`ms`: median; `spread_ms`: largest minus smallest. Decode cells also carry their hand-overs: (bytes, prefill ms, transfer ms)."""

    ms: float
    spread_ms: float
    handovers: tuple[tuple[int, float, float], ...] = ()


def room_tokens(settings: SweepSettings, batch: int) -> int:
    """Output tokens that a sequence may need: the steps of its cell, and what it decodes while others join."""
    return 2 * settings.steps + 64 + 4 * batch


class SweepBench:
    """Links to the groups under measurement, and the sequences that run for the present decode layout and context."""

    def __init__(self, groups: Sequence[types_pb2.GroupDescription], settings: SweepSettings):
        self._settings = settings
        self._router_id = f"sweep-{secrets.token_hex(8)}"
        self._random = random.Random(settings.seed)
        self._prefills = [PrefillLink(group, lambda: None) for group in groups if group.role == types_pb2.ROLE_PREFILL]
        self._decodes = [DecodeLink(group, self._router_id, lambda: None) for group in groups if group.role == types_pb2.ROLE_DECODE]
        self._running: list[_Sequence] = []
        self._stepped = asyncio.Event()

    async def open(self) -> None:
        """Raises: DeadlineError if a group does not answer; then nothing is left open"""
        links = [*self._prefills, *self._decodes]
        for link in links:
            link.start()
        give_up_s = asyncio.get_running_loop().time() + READY_S
        while not all(link.is_healthy for link in links):
            if asyncio.get_running_loop().time() > give_up_s:
                await self.close()
                raise DeadlineError(f"groups do not answer: {', '.join(link.name for link in links if not link.is_healthy)}")
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self.stop()
        for link in [*self._prefills, *self._decodes]:
            await link.close()

    def can_measure(self, cell: Cell) -> bool:
        """Whether its group is here, and a prefill group, which decode cells need too."""
        links: Sequence[PrefillLink | DecodeLink] = self._prefills if cell.role == "prefill" else self._decodes
        return bool(self._prefills) and any(layout_of(link.description) == cell.layout for link in links)

    async def silent(self) -> list[types_pb2.GroupDescription]:
        """The groups that do not answer any more, or whose place another one has taken."""

        async def answers(link: PrefillLink | DecodeLink) -> bool:
            try:
                answer = await link.stub.Describe(worker_pb2.DescribeRequest(), timeout=PROBE_S)
            except grpc.RpcError:
                return False
            return answer.incarnation == link.description.incarnation

        await asyncio.sleep(PROBE_S / 2)  # a rank that failed has a last word before its process goes
        links: list[PrefillLink | DecodeLink] = [*self._prefills, *self._decodes]
        alive = await asyncio.gather(*(answers(link) for link in links))
        return [link.description for link, is_alive in zip(links, alive, strict=True) if not is_alive]

    async def admit(self, layout: Layout, tokens: int, expected: int) -> Admission:
        """How many sequences of so many tokens the decode group of a layout admits; see `admit_all`."""
        await self.stop()
        link = next(x for x in self._decodes if layout_of(x.description) == layout)
        async with asyncio.timeout(CELL_TIMEOUT_S):
            return await admit_all(link, self._writer().description, self._router_id, tokens, expected)

    async def measure(self, cell: Cell) -> Result:
        async with asyncio.timeout(CELL_TIMEOUT_S):
            return await (self._measure_prefill(cell) if cell.role == "prefill" else self._measure_decode(cell))

    async def _measure_prefill(self, cell: Cell) -> Result:
        link = _link_for(self._prefills, cell)
        runs = []
        for _ in range(self._settings.warm_up + self._settings.runs):
            work = self._work(cell.tokens, max_tokens=1)
            events = await _events_of(link, worker_pb2.PrefillTask(work=work))
            runs.append(next(e.first_token.prefill_ms for e in events if e.HasField("first_token")))
        runs = runs[self._settings.warm_up :]
        return Result(statistics.median(runs), max(runs) - min(runs))

    async def _measure_decode(self, cell: Cell) -> Result:
        """Sequences of a smaller batch with the same context stay and are joined by more, while they have not grown much."""
        link = _link_for(self._decodes, cell)
        if any(not s.serves(link, cell.tokens) for s in self._running) or len(self._running) > cell.batch:
            await self.stop()
        steps: list[float] = []
        handovers: list[tuple[int, float, float]] = []
        while len(steps) < self._settings.steps:
            self._running = [s for s in self._running if not s.is_over]
            while len(self._running) < cell.batch:
                handovers.append(await self._start(link, cell))
            steps += await self._watch(link, cell.batch, self._settings.steps - len(steps))
        return Result(statistics.median(steps), max(steps) - min(steps), tuple(handovers))

    async def _start(self, link: DecodeLink, cell: Cell) -> tuple[int, float, float]:
        """One more sequence. Returns: bytes handed over, prefill ms, transfer ms"""
        prefill = self._writer()
        work = self._work(cell.tokens, max_tokens=room_tokens(self._settings, cell.batch))
        sequence = _Sequence(link, work.internal_id, cell.tokens, self._stepped)
        self._running.append(sequence)
        link.attach(work.internal_id, sequence, cell.tokens)
        reservation = await self._reserve(link, work, prefill)
        events = await _events_of(prefill, worker_pb2.PrefillTask(work=work, reservation=reservation))
        first = next(e.first_token for e in events if e.HasField("first_token"))
        over = next(e.handed_over for e in events if e.HasField("handed_over"))
        return over.bytes, first.prefill_ms, over.transfer_ms

    def _writer(self) -> PrefillLink:
        return max(self._prefills, key=lambda p: p.description.layout.tp)

    async def _reserve(self, link: DecodeLink, work: worker_pb2.Work, prefill: PrefillLink) -> worker_pb2.Reservation:
        """Waits while blocks of sequences that were just ended are on their way back. Raises: CapacityError if none come"""
        request = worker_pb2.ReserveRequest(
            work=work, router_id=self._router_id, writer=prefill.description, incarnation=link.description.incarnation
        )
        give_up_s = asyncio.get_running_loop().time() + READY_S
        while True:
            try:
                return await link.call(link.stub.Reserve, request, UNARY_TIMEOUT_S)
            except CapacityError:
                if asyncio.get_running_loop().time() > give_up_s:
                    raise
                await asyncio.sleep(0.05)

    async def _watch(self, link: DecodeLink, batch: int, count: int) -> list[float]:
        """Up to `count` step times with exactly `batch` sequences, by the group's own clock; fewer if a sequence ends."""
        steps: list[float] = []
        settled = 0
        while len(steps) < count and not any(sequence.is_over for sequence in self._running):
            self._stepped.clear()
            await self._stepped.wait()
            await asyncio.sleep(0)  # the frame's load is taken after its outputs
            for sequence in self._running:
                sequence.check()
            if link.load.running == batch and link.load.last_step_ms > 0:
                settled += 1
                if settled > SETTLE_STEPS:
                    steps.append(link.load.last_step_ms)
        return steps

    async def stop(self) -> None:
        """Ends the sequences that run for the last decode cell."""
        for sequence in self._running:
            sequence.link.detach(sequence.internal_id)
            await sequence.link.abort_and_wait(sequence.internal_id, "measured")
        self._running = []

    def _work(self, tokens: int, max_tokens: int) -> worker_pb2.Work:
        sampling = sampling_to_proto(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0))
        return worker_pb2.Work(
            internal_id=f"{self._router_id}-{secrets.token_hex(8)}",
            label="sweep",
            prompt_ids=[self._random.randrange(self._settings.vocab_size) for _ in range(tokens)],
            sampling=sampling,
        )


class _Sequence:
    """One running request of the bench, as a sink of its decode link."""

    def __init__(self, link: DecodeLink, internal_id: str, context_tokens: int, stepped: asyncio.Event):
        self.link = link
        self.internal_id = internal_id
        self.is_over = False
        self._context_tokens = context_tokens
        self._grown_tokens = 0
        self._stepped = stepped
        self._error: ServingError | None = None

    def serves(self, link: DecodeLink, context_tokens: int) -> bool:
        """Whether its context is still close enough to what is to be measured."""
        return self.link is link and self._context_tokens == context_tokens and self._grown_tokens <= max(64, context_tokens // 8)

    def on_output(self, output: worker_pb2.SequenceOutput) -> None:
        if output.error_status:
            self._error = from_status(output.error_status, output.error_message, f"group {self.link.name}")
        self._grown_tokens = output.first_index + len(output.token_ids)
        self.is_over = self.is_over or output.HasField("finish")
        self._stepped.set()

    def on_lost(self, error: ServingError) -> None:
        self._error = error
        self._stepped.set()

    def check(self) -> None:
        """Raises: ServingError if the request has failed"""
        if self._error is not None:
            raise self._error


async def _events_of(link: PrefillLink, task: worker_pb2.PrefillTask) -> list[worker_pb2.PrefillEvent]:
    try:
        return [event async for event in link.stub.Prefill(task)]
    except grpc.RpcError as exc:
        raise from_rpc_error(exc, f"group {link.name}") from exc


def layout_of(group: types_pb2.GroupDescription) -> Layout:
    return group.layout.tp, group.layout.ep, group.weights


def one_per_layout(groups: Sequence[types_pb2.GroupDescription], role: int) -> list[types_pb2.GroupDescription]:
    """The first group of each layout, in the order of weights and ranks. Units: role: of `common.v1.Role`"""
    first = {layout_of(g): g for g in reversed(groups) if g.role == role}
    return sorted(first.values(), key=lambda g: (g.weights, g.layout.tp, g.layout.ep))


def _link_for(links: Sequence, cell: Cell):
    return next(x for x in links if layout_of(x.description) == cell.layout)
