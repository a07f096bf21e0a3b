"""One try of one job on one pair of groups: the prefill call, the first token, the decode group's outputs, and the end of both legs.

States: reserved -> prefilling -> first token -> handed over -> decoding -> finished; any of them can fail. Outputs of the decode group may
arrive before the first token does (two connections); they wait here. `dispatch.py` makes attempts and decides what a failure means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from cluster.router.decode_link import DecodeLink
from cluster.router.groups import GroupLink, PrefillLink
from cluster.router.job import Job
from cluster.router.status import from_rpc_error, from_status
from common.errors import KVTransferError, ServingError, WorkerError
from common.proto import types_pb2, worker_pb2

LINGER_S = 1.0  # a prefill call whose request is finished may still report its hand-over for so long


class Attempt:
    def __init__(
        self, job: Job, work: worker_pb2.Work, prefill: PrefillLink, decode: DecodeLink | None, on_first_token: Callable[[], None]
    ):
        """`decode` None: only the first token is wanted. `on_first_token`: the prefill group is free for the next request."""
        self.job = job
        self.work = work
        self.prefill = prefill
        self.decode = decode
        self.suspects: tuple[GroupLink, ...] = ()  # the groups that may have failed the attempt
        self._on_first_token = on_first_token
        self._loop = asyncio.get_running_loop()
        self._outcome: asyncio.Future[types_pb2.Finish] = self._loop.create_future()
        self.has_begun = False  # a group has worked on it
        self._has_first = False
        self._handed_over = False
        self._decoding = False
        self._early: list[worker_pb2.SequenceOutput] = []

    async def run(self, reservation: worker_pb2.Reservation | None) -> types_pb2.Finish:
        """Until the last token. However it ends, both groups know afterwards.

        Raises: ServingError of the group that failed
        """
        internal_id = self.work.internal_id
        self.prefill.check_alive()
        self.prefill.attach(internal_id, self)
        call = self.prefill.stub.Prefill(worker_pb2.PrefillTask(work=self.work, reservation=reservation))
        reader = self.prefill.spawn(self._read_prefill(call))
        finished = False
        try:
            finish = await self._outcome
            finished = True
            return finish
        finally:
            self.prefill.detach(internal_id)
            if finished:
                self._loop.call_later(LINGER_S, call.cancel)
            else:
                call.cancel()
                reader.cancel()

    def fail(self, error: ServingError, *suspects: GroupLink | None) -> None:
        """`suspects`: the groups that the error may be the fault of."""
        if not self._outcome.done():
            self.suspects = tuple(link for link in suspects if link is not None)
            self._outcome.set_exception(error)
            self._outcome.exception()  # whoever gives the attempt up before `run` has no use for it

    # -- what links call ---------------------------------------------------------------------------------------------------------------

    def on_lost(self, error: ServingError) -> None:
        """A group is gone. A prefill group no longer matters once its bytes are over."""
        if self.decode is not None and self.decode.lost is error:
            self.fail(error, self.decode)
        elif not (self._handed_over or self._decoding):
            self.fail(error, self.prefill)

    def on_output(self, output: worker_pb2.SequenceOutput) -> None:
        """From the decode group's frames."""
        assert self.decode is not None
        if output.error_status:
            self._decode_failed(from_status(output.error_status, output.error_message, f"group {self.decode.name}"))
            return
        if not self._has_first:
            self._early.append(output)
            return
        self._decoding = True
        self._deliver(output)

    # -- prefill -----------------------------------------------------------------------------------------------------------------------

    async def _read_prefill(self, call) -> None:
        try:
            async for event in call:
                self._on_event(event)
        except grpc.RpcError as exc:
            if not (self._handed_over or self._decoding or self._outcome.done()):
                error = from_rpc_error(exc, f"group {self.prefill.name}")
                self.prefill.note_failure(error)
                # After the first token only the hand-over is left, and either side may have broken it.
                self.fail(error, self.prefill, self.decode if self._has_first else None)
            return
        if not self._has_first:
            self._prefill_broke("ended without a token")
        elif self.decode is not None and not (self._handed_over or self._decoding):
            self.fail(KVTransferError(f"group {self.prefill.name} ended without a hand-over"), self.prefill)

    def _on_event(self, event: worker_pb2.PrefillEvent) -> None:
        stamps = self.job.stamps
        kind = event.WhichOneof("event")
        if kind == "started":
            self.has_begun = True
            stamps.started_s = self._loop.time()
        elif kind == "first_token":
            stamps.prefill_ms = event.first_token.prefill_ms
            self._first_token(event.first_token.output)
        elif kind == "handed_over":
            stamps.transfer_ms = event.handed_over.transfer_ms
            self._handed_over = True

    def _first_token(self, output: worker_pb2.SequenceOutput) -> None:
        if output.error_status:
            error = from_status(output.error_status, output.error_message, f"group {self.prefill.name}")
            self.prefill.note_failure(error)
            self.fail(error, self.prefill)
            return
        self.prefill.note_success()
        self._has_first = True
        self.job.stamps.saw_first(self._loop.time())
        self._on_first_token()
        self._deliver(output)
        early, self._early = self._early, []
        for late in early:
            self.on_output(late)

    def _prefill_broke(self, what: str) -> None:
        error = WorkerError(f"group {self.prefill.name} {what}")
        self.prefill.note_failure(error)
        self.fail(error, self.prefill)

    # -- tokens ------------------------------------------------------------------------------------------------------------------------

    def _deliver(self, output: worker_pb2.SequenceOutput) -> None:
        if self._outcome.done():
            return
        job = self.job
        token_ids, logprobs = output.token_ids, output.logprobs
        ahead = len(job.tokens) - output.first_index
        if ahead:
            if ahead < 0:
                self._decode_failed(WorkerError(f"tokens {len(job.tokens)} to {output.first_index - 1} are missing"))
                return
            token_ids, logprobs = token_ids[ahead:], logprobs[ahead:]  # sent again after the token stream broke
        if token_ids:
            job.deliver(token_ids, logprobs, self._loop.time())
        if output.HasField("finish"):
            self._outcome.set_result(output.finish)

    def _decode_failed(self, error: ServingError) -> None:
        if self.decode is not None:
            self.decode.note_failure(error)
        self.fail(error, self.decode or self.prefill)
