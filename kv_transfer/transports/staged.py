"""Pools on a GPU over transports that keep no order with its work: what they need is waited for on the host, and digested beside.

`StagedLink` copies each push to the host first: the way that works where no other does. `DigestedLink` leaves it where it is.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from common.kv_layout import DTYPE_BYTES
from kernels.digest import MASK, DigestKey, kv_digest
from kernels.kv_copy import Segment, TileShape
from kv_transfer.deadline import Deadline
from kv_transfer.device import Device, Moment
from kv_transfer.push import Push
from kv_transfer.transports.base import Link, Target

_POLL_S = 50e-6


def wait_for(moment: Moment, deadline: Deadline, what: str) -> None:
    """Raises: TransferTimeout"""
    while not moment.is_past():
        deadline.check(what)
        time.sleep(_POLL_S)


class _Wrapped:
    """What both have in common: everything that concerns no bytes is the inner link's."""

    def __init__(self, link: Link, device: Device):
        self.transport = link.transport
        self._link = link
        self._lane = device.lane()

    def submit(self) -> None:
        """Nothing is ever held back."""

    def is_lost(self) -> bool:
        return self._link.is_lost()

    def settle(self) -> bool:
        return self._link.settle()

    def close(self) -> None:
        self._link.close()

    def probe(self, deadline: Deadline) -> int:
        return self._link.probe(deadline)


class StagedLink(_Wrapped):
    """`link` takes pushes of CPU memory; this one those of memory on `device`."""

    def __init__(self, link: Link, device: Device):
        super().__init__(link, device)
        self._digest = 0
        self._key: tuple[DigestKey, DigestKey] | None = None  # (on the device, its copy on the host)

    def write(self, push: Push, deadline: Deadline) -> None:
        assert push.device is not None  # all pushes of a link come from the same pools
        heads = push.source[:, :, push.source_head : push.source_head + push.num_heads]
        count = len(push.source_ids)
        self._lane.after(push.device.ready)
        kv = self._lane.gather(heads, push.device.source_ids) if push.device.source_ids is not None else self._lane.fetch(heads[:count])
        wait_for(self._lane.mark(), deadline, "copying KV from the GPU")
        if self._key is None or self._key[0] is not push.device.key:
            key = push.device.key
            self._key = (key, DigestKey(key.words.cpu(), key.positions.cpu(), key.heads.cpu()))
        ids, first = np.arange(count), push.first_logical
        self._digest += kv_digest(
            kv,
            torch.from_numpy(ids),
            first_logical=first,
            tokens=push.tokens,
            layer=push.layer,
            first_head=push.first_head,
            key=self._key[1],
        )
        self._link.write(replace(push, source=kv, source_ids=ids, source_head=0, device=None), deadline)

    def flush(self, deadline: Deadline) -> None:
        self._link.flush(deadline)

    def take_digest(self) -> int:
        digest, self._digest = self._digest & MASK, 0
        return digest


class DigestedLink(_Wrapped):
    """`link` reads the device's memory by itself, at any time after `write`; digests are the device's work."""

    def __init__(self, link: Link, device: Device, target: Target):
        super().__init__(link, device)
        self._geometry = target.geometry
        self._tally = self._lane.tally()  # of everything ever written
        self._taken = self._read = 0
        self._sources: list[Push] = []  # that the lane may still read

    def write(self, push: Push, deadline: Deadline) -> None:
        part = push.device
        assert part is not None  # all pushes of a link come from the same pools
        wait_for(part.ready, deadline, "waiting for a layer to be computed")
        g, heads = self._geometry, push.source.shape[2]
        shape = TileShape(g.block_size_tokens, g.head_dim * DTYPE_BYTES[g.dtype], heads, heads, push.num_heads, g.num_kv_heads)
        address, first = push.source.data_ptr(), push.first_logical
        segment = Segment(address, 0, push.source_head, 0, part.source_ids, None, push.tokens, first, push.layer, push.first_head)
        self._lane.copy([segment], shape, part.key, self._tally)
        self._link.write(push, deadline)
        self._sources.append(push)

    def flush(self, deadline: Deadline) -> None:
        self._link.flush(deadline)
        wait_for(self._lane.mark(), deadline, "waiting for the digest")
        self._read = self._tally.value()
        self._sources.clear()

    def take_digest(self) -> int:
        part, self._taken = (self._read - self._taken) & MASK, self._read
        return part
