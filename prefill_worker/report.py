"""Brings a follower rank's push reports to its leader, from a thread of its own: transport threads must not wait for the network."""

from __future__ import annotations

import logging
import queue
import threading
import time

import grpc

from common.proto import worker_pb2, worker_pb2_grpc
from common.server_thread import GRPC_OPTIONS
from common.wire import PLAIN, Wire

logger = logging.getLogger(__name__)
_TIMEOUT_S = 2.0
_RETRY_S = 0.1


class PushReporter:
    """Queue of reports: producers are the transport threads and the rank's loop (`send`), consumer is the thread here. A report is sent
    until the leader has taken it: without it the leader can't let the decode group reuse its blocks."""

    def __init__(self, leader_address: str, wire: Wire = PLAIN):
        self._queue: queue.SimpleQueue[worker_pb2.PushReport | None] = queue.SimpleQueue()
        self._leader_address = leader_address
        self._wire = wire
        self._connect()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="push-reports", daemon=True).start()

    def send(self, report: worker_pb2.PushReport) -> None:
        self._queue.put(report)

    def close(self) -> None:
        """What was not taken yet is dropped: the group is ending."""
        self._closed.set()
        self._queue.put(None)

    def _run(self) -> None:
        while (report := self._queue.get()) is not None and not self._closed.is_set():
            self._deliver(report)
        self._channel.close()

    def _deliver(self, report: worker_pb2.PushReport) -> None:
        while not self._closed.is_set():
            try:
                self._stub.ReportPush(report, timeout=_TIMEOUT_S)
                return
            except grpc.RpcError as exc:
                logger.warning("report of transfer %x was not taken, trying again: %s", report.transfer_id, exc.code())
                time.sleep(_RETRY_S)
                self._channel.close()
                self._connect()  # with the certificates of now

    def _connect(self) -> None:
        self._channel = self._wire.blocking_channel(self._leader_address, GRPC_OPTIONS)
        self._stub = self._wire.stub(worker_pb2_grpc.PrefillGroupStub(self._channel))
