"""Chooses how to reach a decode rank: `auto` opens every way that both sides have, measures each, takes the fastest, and says why.

Used by the sender. A transport asked for by name is the only candidate; it is measured too, so that a slow path never goes unnoticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError, KVTransferError, NotSupportedError
from common.keyring import Key
from common.proto import worker_pb2
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device
from kv_transfer.pool_view import PoolView
from kv_transfer.transports import nixl
from kv_transfer.transports.base import Link, Target
from kv_transfer.transports.cuda_ipc import CudaIpcLink
from kv_transfer.transports.nccl import NcclLink
from kv_transfer.transports.nixl import NixlLink, NixlSource
from kv_transfer.transports.shm import ShmLink
from kv_transfer.transports.staged import DigestedLink, StagedLink
from kv_transfer.transports.tcp import TcpLink

logger = logging.getLogger(__name__)

ON_HOST = ("shm", "nixl", "tcp")
ON_DEVICE = ("cuda_ipc", "nccl", "nixl", "tcp")
FLOOR_GB_PER_S = {"host": 0.05, "device": 20.0}  # below this a hand-over of a long prompt no longer hides behind its prefill
_PROBE_ROUNDS = 3
_PROBE_TIMEOUT_S = 2.0
_RATES_KEPT = 1024  # of decode ranks that were not seen to be gone; one that is no longer among them is measured anew


@dataclass(frozen=True)
class LinkRate:
    """What was measured when a decode rank was first reached. Units: gb_per_s: of a probe alone on the link; None: nothing to probe with"""

    incarnation: int
    rank: int
    transport: str
    gb_per_s: float | None


class LinkOpener:
    """Opens links from one prefill rank's pools.

    Units: preference: "auto" or the name of a transport; io_timeout_s: longest wait for a peer without progress; device: what the pools lie
        on, None: the CPU
    Raises: ConfigError for any other preference; NotSupportedError for "nixl" where it is not installed
    """

    def __init__(self, view: PoolView, *, key: Key, preference: str, io_timeout_s: float, device: Device | None = None):
        usable = ON_HOST if device is None else ON_DEVICE
        if preference not in ("auto", *usable):
            raise ConfigError(f"transport {preference!r}: auto, {', '.join(usable)} exist for pools on this device")
        self._view = view
        self._key = key
        self._io_timeout_s = io_timeout_s
        self._device = device
        self._wanted = [name for name in usable if name != "nixl" or nixl.is_installed()] if preference == "auto" else [preference]
        self._lock = threading.Lock()  # guards what follows
        self._nixl = NixlSource(view) if preference == "nixl" else None  # slow to make: now, not with the first transfer
        self._rates: dict[tuple[int, int], LinkRate] = {}

    def candidates(self, endpoints: Sequence[worker_pb2.Endpoint], dst_rank: int) -> list[worker_pb2.Endpoint]:
        """Returns: endpoints to try, likely fastest first

        Raises: KVTransferError if there is none
        """
        offered = {endpoint.transport: endpoint for endpoint in endpoints}
        chosen = [offered[name] for name in self._wanted if name in offered]
        if not chosen:
            raise KVTransferError(f"decode rank {dst_rank} offers {sorted(offered)}, this rank wants {' or '.join(self._wanted)}")
        return chosen

    def open(self, endpoints: Sequence[worker_pb2.Endpoint], target: Target, deadline: Deadline) -> Link:
        """Opens the fastest candidate, which at the first time is found by measuring all that open.

        Raises: what the last candidate raised if none opens
        """
        place = (target.incarnation, target.rank)
        known = self._rates.get(place)
        candidates = self.candidates(endpoints, target.rank)
        if known is not None:
            candidates.sort(key=lambda endpoint: endpoint.transport != known.transport)
        measured: list[tuple[float | None, Link]] = []
        reasons: list[str] = []
        for i, endpoint in enumerate(candidates):
            try:
                link = self._open(endpoint, target, deadline)
            except (KVTransferError, NotSupportedError) as exc:
                reasons.append(f"not {endpoint.transport}: {exc.message}")
                if i == len(candidates) - 1 and not measured:
                    raise
                continue
            if known is not None and known.transport == endpoint.transport:
                return link
            try:
                measured.append((self._measure(link, deadline), link))
            except KVTransferError as exc:
                reasons.append(f"not {endpoint.transport}: {exc.message}")
                link.close()
                if i == len(candidates) - 1 and not measured:
                    raise
        is_whole = all(rate is not None for rate, _ in measured)
        best = max(measured, key=lambda pair: pair[0] or 0.0) if is_whole else measured[0]
        for entry in measured:
            if entry is not best:
                reasons.append(f"not {entry[1].transport}: {_rate(entry[0])}")
                entry[1].close()
        self._report(LinkRate(*place, best[1].transport, best[0]), reasons)
        return best[1]

    def rates(self) -> list[LinkRate]:
        """Returns: one per decode rank that was reached so far and has not been forgotten"""
        with self._lock:
            return list(self._rates.values())

    def forget(self, incarnation: int, rank: int) -> None:
        """That decode rank is gone."""
        with self._lock:
            self._rates.pop((incarnation, rank), None)

    def close(self) -> None:
        """Effects: gives NIXL's agent back, if there is one; open links keep it until they are closed"""
        self._nixl = None

    def _open(self, endpoint: worker_pb2.Endpoint, target: Target, deadline: Deadline) -> Link:
        if endpoint.transport == "shm":
            return ShmLink(endpoint.detail, target)
        if endpoint.transport == "nixl":
            with self._lock:
                self._nixl = self._nixl or NixlSource(self._view)
            nixl_link = NixlLink(endpoint.detail, target, self._nixl, io_timeout_s=self._io_timeout_s)
            return nixl_link if self._device is None else DigestedLink(nixl_link, self._device, target)
        if endpoint.transport == "cuda_ipc":
            assert self._device is not None  # not wanted otherwise
            return CudaIpcLink(
                endpoint.detail, target, self._view, self._device, key=self._key, io_timeout_s=self._io_timeout_s, deadline=deadline
            )
        if endpoint.transport == "nccl":
            assert self._device is not None
            return NcclLink(endpoint.detail, target, self._device, key=self._key, io_timeout_s=self._io_timeout_s, deadline=deadline)
        link = TcpLink(endpoint.detail, target, key=self._key, io_timeout_s=self._io_timeout_s, deadline=deadline)
        return link if self._device is None else StagedLink(link, self._device)

    def _measure(self, link: Link, deadline: Deadline) -> float | None:
        """Returns: GB/s, the best of a few probes: what the link can do rather than what else is going on"""
        best_s, nbytes = float("inf"), 0
        for _ in range(_PROBE_ROUNDS):
            began = time.perf_counter()
            nbytes = link.probe(deadline.part(_PROBE_TIMEOUT_S))
            best_s = min(best_s, time.perf_counter() - began)
        return nbytes / best_s / 1e9 if nbytes else None

    def _report(self, rate: LinkRate, reasons: list[str]) -> None:
        with self._lock:
            self._rates[rate.incarnation, rate.rank] = rate
            if len(self._rates) > _RATES_KEPT:
                del self._rates[next(iter(self._rates))]
        why = "".join(f"; {reason}" for reason in reasons)
        name = f"kv transfer to rank {rate.rank} of {rate.incarnation:x}"
        logger.info("%s goes over %s at %s%s", name, rate.transport, _rate(rate.gb_per_s), why)
        floor = FLOOR_GB_PER_S["host" if self._device is None else "device"]
        if rate.gb_per_s is not None and rate.gb_per_s < floor:
            logger.warning("%s is slow: %s over %s, expected %g at least%s", name, _rate(rate.gb_per_s), rate.transport, floor, why)


def _rate(gb_per_s: float | None) -> str:
    return "an unmeasured rate" if gb_per_s is None else f"{gb_per_s:.2f} GB/s"
