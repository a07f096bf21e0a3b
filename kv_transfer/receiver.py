"""A decode rank's end of transfers: offers its pools over the transports, keeps the grants, and computes what arrived.

Knows nothing of requests, leases or ranks other than its own; the decode leader's ledger decides, this carries out. Called from the rank's
step loop: `grant`, `verify` and `revoke` are operations of the ordered plan, and a revoke comes before any later grant of the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from common.keyring import Key, digest_secret
from common.kv_layout import DTYPE_BYTES
from common.proto import worker_pb2
from kernels.digest import MASK, DigestKey, kv_digest
from kv_transfer.grants import GrantTable
from kv_transfer.memory import SharedBuffer
from kv_transfer.pool_view import PoolView
from kv_transfer.transports import shm, tcp
from kv_transfer.transports.nixl import NixlTarget
from kv_transfer.transports.tcp_server import TcpServer, check_host

CHECKED_TRANSPORTS = frozenset({"tcp"})  # the receiver sees every write and refuses what was revoked


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
        buffer: SharedBuffer | None,
    ):
        self._view = view
        self._key = key
        self._buffer = buffer  # peers can attach as long as it is held
        self._grants = GrantTable(view, incarnation)
        self._server: TcpServer | None = None
        self._nixl: NixlTarget | None = None
        self._endpoints: list[worker_pb2.Endpoint] = []
        for transport in transports:
            self._endpoints.append(
                worker_pb2.Endpoint(transport=transport, detail=self._offer(transport, incarnation, listen_host, buffer))
            )

    def _offer(self, transport: str, incarnation: int, listen_host: str, buffer: SharedBuffer | None) -> bytes:
        if transport == "shm":
            if buffer is None:
                raise ConfigError("transport shm needs KV pools in a SharedBuffer")
            return shm.describe(self._view, buffer)
        if transport == "tcp":
            check_host(listen_host)
            block_bytes = 2 * self._view.heads.count * self._view.geometry.head_block_bytes
            self._server = TcpServer(self._grants, key=self._key, incarnation=incarnation, host=listen_host, max_block_bytes=block_bytes)
            return tcp.describe(listen_host, self._server.port)
        if transport == "nixl":
            self._nixl = NixlTarget(self._view)
            return self._nixl.describe()
        raise ConfigError(f"transport {transport!r} can't be offered; shm, tcp and nixl exist")

    def endpoints(self) -> list[worker_pb2.Endpoint]:
        """Returns: how prefill ranks reach this rank, in the order of `transports`"""
        return list(self._endpoints)

    def grant(self, transfer_id: int, blocks: Sequence[worker_pb2.BlockList], num_tokens: int, key_id: int = 0) -> None:
        """Lets a transfer write the prompt's hand-over into these blocks.

        Units: num_tokens: of the prompt; blocks may go on past it; key_id: of the key that digests are made with, 0 = the only one
        Raises: KVTransferError if blocks are missing, repeated or not in the pool, or the id has a grant already
        """
        self._grants.add(transfer_id, blocks, num_tokens, key_id)

    def verify(self, transfer_id: int) -> VerifyResult:
        """What this rank holds for a transfer now. Takes about as long as reading the bytes twice.

        Raises: KVTransferError if there is no grant
        """
        grant = self._grants.get(transfer_id)
        g, heads = self._view.geometry, self._view.heads
        row_bytes = g.head_dim * DTYPE_BYTES[g.dtype]
        shape = {"row_bytes": row_bytes, "num_layers": g.num_layers, "num_kv_heads": g.num_kv_heads}
        key = DigestKey.derive(digest_secret(self._key, grant.key_id), transfer_id, num_tokens=grant.num_tokens, **shape)
        digest = expected = 0
        for layer, slides in enumerate(g.sliding):
            first, count = g.handover_blocks(grant.num_tokens, sliding=slides)
            ids = torch.from_numpy(grant.maps[slides].part(first, count)[0])
            tokens = (first * g.block_size_tokens, grant.num_tokens)
            kv = self._view.layer(layer)
            digest += kv_digest(kv, ids, first_logical=first, tokens=tokens, layer=layer, first_head=heads.start, key=key)
            expected += 2 * row_bytes * (tokens[1] - tokens[0])
        return VerifyResult(sum(received or expected for received in grant.head_bytes), digest & MASK)

    def revoke(self, transfer_id: int) -> None:
        """Takes the grant back; idempotent.

        Effects: no write through a transport that the receiver checks lands after the return; waits at most for one copy of 2 MiB
        """
        self._grants.revoke(transfer_id)

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
