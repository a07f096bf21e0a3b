"""Chooses how to reach a decode rank: shared memory on one host, else nixl where both sides have it, else tcp; logs which and why.

Used by the sender. `auto` goes on to the next candidate if one can't be opened; a transport asked for by name is the only candidate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from common.errors import ConfigError, KVTransferError, NotSupportedError
from common.keyring import Key
from common.proto import worker_pb2
from kv_transfer.pool_view import PoolView
from kv_transfer.transports import nixl
from kv_transfer.transports.base import Deadline, Link, Target
from kv_transfer.transports.nixl import NixlLink, NixlSource
from kv_transfer.transports.shm import ShmLink
from kv_transfer.transports.tcp import TcpLink

logger = logging.getLogger(__name__)

PREFERENCE = ("shm", "nixl", "tcp")


class LinkOpener:
    """Opens links from one prefill rank's pools.

    Units: preference: "auto" or one of PREFERENCE; io_timeout_s: longest wait for a peer without progress
    Raises: ConfigError for any other preference; NotSupportedError for "nixl" where it is not installed
    """

    def __init__(self, view: PoolView, *, key: Key, preference: str, io_timeout_s: float):
        if preference not in ("auto", *PREFERENCE):
            raise ConfigError(f"transport {preference!r}: auto, {', '.join(PREFERENCE)} exist")
        self._view = view
        self._key = key
        self._io_timeout_s = io_timeout_s
        self._wanted = [name for name in PREFERENCE if name != "nixl" or nixl.is_installed()] if preference == "auto" else [preference]
        self._nixl_lock = threading.Lock()
        self._nixl = NixlSource(view) if preference == "nixl" else None  # slow to make: now, not with the first transfer

    def candidates(self, endpoints: Sequence[worker_pb2.Endpoint], dst_rank: int) -> list[worker_pb2.Endpoint]:
        """Returns: endpoints to try, best first

        Raises: KVTransferError if there is none
        """
        offered = {endpoint.transport: endpoint for endpoint in endpoints}
        chosen = [offered[name] for name in self._wanted if name in offered]
        if not chosen:
            raise KVTransferError(f"decode rank {dst_rank} offers {sorted(offered)}, this rank wants {' or '.join(self._wanted)}")
        return chosen

    def open(self, endpoints: Sequence[worker_pb2.Endpoint], target: Target, deadline: Deadline) -> Link:
        """Opens the first candidate that works.

        Raises: what the last one raised
        """
        *others, last = self.candidates(endpoints, target.rank)
        reasons = ""
        for endpoint in others:
            try:
                return self._log(self._open(endpoint, target, deadline), target, reasons)
            except (KVTransferError, NotSupportedError) as exc:
                reasons += f"; not {endpoint.transport}: {exc.message}"
        return self._log(self._open(last, target, deadline), target, reasons)

    def close(self) -> None:
        """Effects: gives NIXL's agent back, if there is one; open links keep it until they are closed"""
        self._nixl = None

    def _open(self, endpoint: worker_pb2.Endpoint, target: Target, deadline: Deadline) -> Link:
        if endpoint.transport == "shm":
            return ShmLink(endpoint.detail, target)
        if endpoint.transport == "nixl":
            with self._nixl_lock:
                self._nixl = self._nixl or NixlSource(self._view)
            return NixlLink(endpoint.detail, target, self._nixl, io_timeout_s=self._io_timeout_s)
        return TcpLink(endpoint.detail, target, key=self._key, io_timeout_s=self._io_timeout_s, deadline=deadline)

    def _log(self, link: Link, target: Target, reasons: str) -> Link:
        logger.info("kv transfer to rank %d of %x goes over %s%s", target.rank, target.incarnation, link.transport, reasons)
        return link
