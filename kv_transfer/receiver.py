"""A decode rank's end of transfers: offers its pools over the transports, keeps the grants, and computes what arrived.

Knows nothing of requests, leases or ranks other than its own; the decode leader's ledger decides, this carries out. Called from the rank's
step loop: `grant`, `check` and `revoke` are operations of the ordered plan, and a revoke comes before any later grant of the same blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from common.errors import ConfigError
from common.keyring import Key, digest_secret
from common.kv_layout import DTYPE_BYTES
from common.proto import worker_pb2
from kernels.digest import MASK, DigestKey, kv_digest
from kernels.kv_copy import Segment, Tally, TileShape
from kv_transfer.cuda_device import device_of
from kv_transfer.device import Device, DeviceBuffer, Lane, Moment, upload_together
from kv_transfer.grants import Grant, GrantTable
from kv_transfer.handle_exchange import HandleServer
from kv_transfer.memory import SharedBuffer
from kv_transfer.pool_view import PoolView
from kv_transfer.transports import cuda_ipc, shm, tcp
from kv_transfer.transports.nccl_server import NcclServer
from kv_transfer.transports.nixl import NixlTarget
from kv_transfer.transports.tcp_server import TcpServer, check_host

_POLL_S = 5e-5
CHECKED_TRANSPORTS = frozenset({"tcp", "nccl"})  # the receiver sees every write and refuses what was revoked


@dataclass(frozen=True)
class VerifyResult:
    """`bytes`: of the hand-over on this rank; a head that came over tcp counts what arrived. `digest`: of what lies in the pool."""

    bytes: int
    digest: int


class Receiver:
    """Grants on one rank's pools.

    Units: key: the cluster's secret; incarnation: of the decode group; listen_host: address of this rank that prefill ranks can reach
    Effects: listens on a free port of listen_host if "tcp" is among the transports
    Raises: ConfigError if a transport can't be offered; NotSupportedError for nixl where it is not installed
    """

    def __init__(
        self,
        view: PoolView,
        *,
        key: Key,
        incarnation: int,
        listen_host: str,
        transports: tuple[str, ...],
        buffer: SharedBuffer | DeviceBuffer | None,
        device: Device | None = None,
    ):
        self._view = view
        self._key = key
        self._buffer = buffer  # peers can attach as long as it is held
        self._grants = GrantTable(view, incarnation)
        self._server: TcpServer | None = None
        self._nixl: NixlTarget | None = None
        self._handles: HandleServer | None = None
        self._nccl: NcclServer | None = None
        self._device: Device | None = device or device_of(view.full)
        self._checker = _DeviceChecker(view, self._device) if self._device is not None else None
        self._keys: dict[int, DigestKey] = {}
        self._endpoints: list[worker_pb2.Endpoint] = []
        for transport in transports:
            self._endpoints.append(
                worker_pb2.Endpoint(transport=transport, detail=self._offer(transport, incarnation, listen_host, buffer))
            )

    def _offer(self, transport: str, incarnation: int, listen_host: str, buffer: SharedBuffer | DeviceBuffer | None) -> bytes:
        if transport == "shm":
            if not isinstance(buffer, SharedBuffer):
                raise ConfigError("transport shm needs KV pools in a SharedBuffer")
            return shm.describe(self._view, buffer)
        if transport == "cuda_ipc":
            if buffer is None or isinstance(buffer, SharedBuffer):
                raise ConfigError("transport cuda_ipc needs KV pools in memory of a GPU that the device allocated")
            self._handles = HandleServer(buffer.handle(), key=self._key, incarnation=incarnation)
            return cuda_ipc.describe(self._view, buffer, self._handles.name)
        if transport == "tcp":
            check_host(listen_host)
            block_bytes = 2 * self._view.heads.count * self._view.geometry.head_block_bytes
            self._server = TcpServer(self._grants, key=self._key, incarnation=incarnation, host=listen_host, max_block_bytes=block_bytes)
            return tcp.describe(listen_host, self._server.port)
        if transport == "nccl":
            if self._device is None:
                raise ConfigError("transport nccl is for KV pools on a GPU")
            check_host(listen_host)
            self._nccl = NcclServer(self._grants, self._device, key=self._key, incarnation=incarnation, host=listen_host)
            return tcp.describe(listen_host, self._nccl.port)
        if transport == "nixl":
            self._nixl = NixlTarget(self._view)
            return self._nixl.describe()
        raise ConfigError(f"transport {transport!r} can't be offered; shm, tcp, nixl, cuda_ipc and nccl exist")

    def endpoints(self) -> list[worker_pb2.Endpoint]:
        """Returns: how prefill ranks reach this rank, in the order of `transports`"""
        return list(self._endpoints)

    def grant(self, transfer_id: int, blocks: Sequence[worker_pb2.BlockList], num_tokens: int, key_id: int = 0) -> None:
        """Lets a transfer write the prompt's hand-over into these blocks.

        Units: num_tokens: of the prompt; blocks may go on past it; key_id: of the key that digests are made with, 0 = the only one
        Raises: KVTransferError if blocks are missing, repeated or not in the pool, or the id has a grant already
        """
        self._grants.add(transfer_id, blocks, num_tokens, key_id)
        g = self._view.geometry
        shape = {"row_bytes": g.head_dim * DTYPE_BYTES[g.dtype], "num_layers": g.num_layers, "num_kv_heads": g.num_kv_heads}
        key = DigestKey.derive(digest_secret(self._key, key_id), transfer_id, num_tokens=num_tokens, **shape)  # before the commit needs it
        if self._checker is None:
            self._keys[transfer_id] = key
        else:
            self._checker.prepare(transfer_id, self._grants.get(transfer_id), key)

    def verify(self, transfer_id: int) -> VerifyResult:
        """As `check`, and waits for it. For callers without work of their own on the device."""
        while (result := self.check(transfer_id)) is None:
            time.sleep(_POLL_S)
        return result

    def check(self, transfer_id: int) -> VerifyResult | None:
        """What this rank holds for a transfer. On a CPU it takes about as long as reading the bytes twice; a device begins to read at the
        first call, beside its other work.

        Returns: None while the device reads; ask again
        Raises: KVTransferError if there is no grant
        """
        grant = self._grants.get(transfer_id)
        g = self._view.geometry
        if self._checker is None:
            digest = self._digest(grant, self._keys[transfer_id])
        else:
            found = self._checker.digest(transfer_id)
            if found is None:
                return None
            digest = found
        row_bytes = g.head_dim * DTYPE_BYTES[g.dtype]
        expected = sum(2 * row_bytes * (end - start) for start, end in (self._tokens(grant, slides) for slides in g.sliding))
        return VerifyResult(sum(received or expected for received in grant.head_bytes), digest & MASK)

    def _tokens(self, grant: Grant, slides: bool) -> tuple[int, int]:
        g = self._view.geometry
        return g.handover_blocks(grant.num_tokens, sliding=slides)[0] * g.block_size_tokens, grant.num_tokens

    def _digest(self, grant: Grant, key: DigestKey) -> int:
        g, digest = self._view.geometry, 0
        for layer, slides in enumerate(g.sliding):
            first, count = g.handover_blocks(grant.num_tokens, sliding=slides)
            ids = torch.from_numpy(grant.maps[slides].part(first, count)[0])
            kv, tokens = self._view.layer(layer), self._tokens(grant, slides)
            digest += kv_digest(kv, ids, first_logical=first, tokens=tokens, layer=layer, first_head=self._view.heads.start, key=key)
        return digest

    def revoke(self, transfer_id: int) -> None:
        """Takes the grant back; idempotent.

        Effects: no write through a transport that the receiver checks lands after the return; waits at most for one copy of 2 MiB
        """
        self._grants.revoke(transfer_id)
        self._keys.pop(transfer_id, None)
        if self._checker is not None:
            self._checker.forget(transfer_id)

    def is_fenced(self, transfer_id: int) -> bool:
        """True if a revoke alone proves that nothing more of this transfer can land, whatever its writer does.

        So far the answer is the same for all transfers of a rank: it offers checked transports only.
        """
        return all(endpoint.transport in CHECKED_TRANSPORTS for endpoint in self._endpoints)

    def counts(self) -> dict[str, int]:
        """Returns: messages by outcome since the start, for metrics; empty without tcp"""
        return self._server.counts if self._server else {}

    def close(self) -> None:
        """Effects: stops listening and hangs up; grants are void"""
        if self._server:
            self._server.close()
        if self._nixl:
            self._nixl.close()
            self._nixl = None
        if self._nccl:
            self._nccl.close()
        if self._handles:
            self._handles.close()


@dataclass
class _Reading:
    """The digest of one transfer's blocks by the device. `moment`: when it has read them, if it has begun."""

    segments: list[Segment]
    key: DigestKey
    tally: Tally
    moment: Moment | None = None
    before: int = 0


class _DeviceChecker:
    """Digests what lies in pools on a device, all layers in one go, in a lane of its own beside whatever else the device does."""

    def __init__(self, view: PoolView, device: Device):
        g = view.geometry
        self._view = view
        self._device = device
        self._readings: dict[int, _Reading] = {}
        self._forgotten: list[_Reading] = []  # under way: the device may still use them
        self._tallies: list[Tally] = []  # that no reading uses: pinned memory is dear to get
        self._pools = [view.layer(layer).data_ptr() for layer in range(view.geometry.num_layers)]
        heads = view.heads.count
        self._shape = TileShape(g.block_size_tokens, g.head_dim * DTYPE_BYTES[g.dtype], heads, heads, heads, g.num_kv_heads)

    @cached_property
    def _lane(self) -> Lane:
        return self._device.lane()  # by the thread that uses it

    def prepare(self, transfer_id: int, grant: Grant, key: DigestKey) -> None:
        """Takes all that a digest needs to the device, in one copy that is enqueued: before the commit waits for it."""
        g, lane = self._view.geometry, self._lane
        spans = [g.handover_blocks(grant.num_tokens, sliding=slides) for slides in (False, True)]
        ids = [grant.maps[slides].part(*spans[slides])[0].astype(np.int32) for slides in (False, True)]
        *tables, words, positions, heads = upload_together(lane, [*ids, key.words.numpy(), key.positions.numpy(), key.heads.numpy()])
        segments = []
        for layer, slides in enumerate(g.sliding):
            first = spans[slides][0]
            tokens = (first * g.block_size_tokens, grant.num_tokens)
            segments.append(Segment(self._pools[layer], 0, 0, 0, tables[slides], None, tokens, first, layer, self._view.heads.start))
        tally = self._tallies.pop() if self._tallies else lane.tally()
        self._readings[transfer_id] = _Reading(segments, DigestKey(words, positions, heads), tally)

    def digest(self, transfer_id: int) -> int | None:
        """Returns: None until the device has read what lay in the pools at the first call; the next call reads again"""
        reading = self._readings[transfer_id]
        if reading.moment is None:
            reading.before = reading.tally.value()
            self._lane.copy(reading.segments, self._shape, reading.key, reading.tally)
            reading.moment = self._lane.mark()
        if not reading.moment.is_past():
            return None
        reading.moment = None
        return reading.tally.value() - reading.before

    def forget(self, transfer_id: int) -> None:
        reading = self._readings.pop(transfer_id, None)
        under_way = []
        for one in [*self._forgotten, *([] if reading is None else [reading])]:
            if one.moment is None or one.moment.is_past():
                self._tallies.append(one.tally)
            else:
                under_way.append(one)
        self._forgotten = under_way
