"""NIXL over UCX: one-sided writes into pools that the decode rank registered. Needs the optional extra `nixl`. On a CPU or a GPU.

One-sided like shared memory: the receiver can't refuse a write. NIXL reports a write as done after flushing the endpoint, so done means
that the bytes are in the target's memory; that is the acknowledgement. UCX does not authenticate: only for networks whose members trust
each other.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.util
import json
import logging
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import process
from common.errors import KVTransferError, NotSupportedError, PeerLost, TransferTimeout
from common.kv_layout import DTYPE_BYTES, head_range
from common.proto import types_pb2
from kv_transfer.deadline import Deadline
from kv_transfer.pool_view import PoolView
from kv_transfer.push import Push, Span
from kv_transfer.transports.base import Target

_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_WINDOW_WRITES = 16
_BOUNCE_BYTES = 4 << 20
_POLL_S = 50e-6
_PROGRESS_S = 1e-3
SCRATCH_BYTES = 4 << 20
_PROBE_ROW_BYTES = 64 << 10


def _device_number(tensor: Tensor) -> int:
    return (tensor.device.index or 0) if tensor.is_cuda else -1


def is_installed() -> bool:
    return any(importlib.util.find_spec(name) for name in _MODULES)


class Agent:
    """A NIXL agent with UCX. Thread-safe.

    Effects: takes about half a second
    Raises: NotSupportedError if NIXL is not installed or has no UCX
    """

    def __init__(self, role: str):
        name = next((name for name in _MODULES if importlib.util.find_spec(name)), None)
        if name is None:
            raise NotSupportedError("transport nixl needs the extra: pip install 'tandem[nixl]'; shm and tcp work without")
        api: ModuleType = importlib.import_module(f"{name}._api")
        bindings = importlib.import_module(f"{name}._bindings")
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints to stdout, and INFO is chatty
        self.errors: tuple[type[Exception], ...] = tuple(
            error for key, error in vars(bindings).items() if key.startswith("nixl") and key.endswith("Error")
        )
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=strict)  # that thread spins on a core
        self.raw: Any = api.nixl_agent(f"{role}-{secrets.token_hex(8)}", config)
        if "UCX" not in self.raw.backends:
            raise NotSupportedError("transport nixl: this build of NIXL has no UCX")

    def register(self, tensors: list[Tensor]) -> list[Any]:
        return [self.raw.register_memory(tensor.view(-1)) for tensor in tensors if tensor.numel()]

    def descriptors(self, addresses: np.ndarray, row_bytes: int, device: int) -> Any:
        """addresses uint64 [n] -> NIXL descriptors of rows of memory of that GPU, or of the CPU if it is negative"""
        table = np.zeros((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, row_bytes, max(device, 0)
        return self.raw.get_xfer_descs(table, "DRAM" if device < 0 else "VRAM")


class NixlTarget:
    """The receiving end: registers one rank's pools, and lets UCX work a thousand times per second until `close`.

    UCX needs that for connections, and for every write where the network has no writes of its own (plain tcp).
    """

    def __init__(self, view: PoolView):
        self._agent = Agent("decode")
        self._scratch = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=view.full.device)  # for probes
        self._agent.register([view.full, view.sliding, self._scratch])
        self._view = view
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._progress, name="kv-nixl-progress", daemon=True)
        self._thread.start()

    def describe(self) -> bytes:
        """Returns: the endpoint's detail, for `NixlLink`"""
        own = process.identity()
        facts: dict[str, object] = {"metadata": base64.b64encode(self._agent.raw.get_agent_metadata()).decode()}
        facts["owner"] = {"host": own.host, "pid": own.pid, "start_ticks": own.start_ticks}
        for name, pool in (("full", self._view.full), ("sliding", self._view.sliding)):
            facts[name] = {"address": pool.data_ptr() if pool.numel() else 0, "num_blocks": pool.shape[1]}
        facts["scratch"] = self._scratch.data_ptr()
        facts["device"] = _device_number(self._scratch)
        return json.dumps(facts).encode()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _progress(self) -> None:
        while not self._is_closed.wait(_PROGRESS_S):
            self._agent.raw.update_notifs()


class NixlSource:
    """The writing end of one prefill rank: registers its pools, so that full layers are written without a copy. Shared by its links."""

    def __init__(self, view: PoolView):
        self.agent = Agent("prefill")
        self._pools = [view.full, view.sliding]
        self.device = view.full.device
        self.stream = torch.cuda.Stream(self.device) if view.full.is_cuda else None
        self.agent.register(self._pools)

    def in_order(self) -> contextlib.AbstractContextManager[object]:
        """For all that is done with the links' own memory, its allocation included: in no order with the model's work."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def has(self, source: Tensor) -> bool:
        """True if the tensor lies in registered memory."""
        start = source.data_ptr()
        return any(pool.data_ptr() <= start < pool.data_ptr() + pool.numel() * pool.element_size() for pool in self._pools)


@dataclass(frozen=True)
class _RemotePool:
    address: int
    num_blocks: int


class NixlLink:
    """Writes into one decode rank's registered pools.

    Units: io_timeout_s: longest wait for one write
    Raises: KVTransferError if the endpoint makes no sense
    """

    transport = "nixl"

    def __init__(self, detail: bytes, target: Target, source: NixlSource, *, io_timeout_s: float):
        try:
            facts = json.loads(detail)
            metadata = base64.b64decode(facts["metadata"], validate=True)
            self._owner = types_pb2.ProcessIdentity(**facts["owner"])
            names = {False: "full", True: "sliding"}
            self._scratch, self._remote_device = int(facts["scratch"]), int(facts["device"])
            self._pools = {slides: _RemotePool(int(facts[n]["address"]), int(facts[n]["num_blocks"])) for slides, n in names.items()}
        except (ValueError, KeyError, TypeError) as exc:
            raise KVTransferError(f"nixl endpoint of decode rank {target.rank} makes no sense: {exc}") from exc
        self._name = f"decode rank {target.rank}"
        self._target = target
        self._io_timeout_s = io_timeout_s
        self._source = source
        self._agent = source.agent
        self._bounce = torch.zeros(0, dtype=torch.uint8, device=source.device)
        self._bounce_registration: list[Any] = []
        self._pending: deque[Any] = deque()
        with self._wrapped("reach"):
            self._remote = self._agent.raw.add_remote_agent(metadata)

    def write(self, push: Push, deadline: Deadline) -> None:
        source = push.source if self._source.has(push.source) else self._through_bounce(push.source, deadline)
        for span in push.spans:
            self._await_pending(_WINDOW_WRITES - 1, deadline)
            self._post(push, span, source)

    def flush(self, deadline: Deadline) -> None:
        self._await_pending(0, deadline)

    def is_lost(self) -> bool:
        return process.is_known_dead(self._owner)

    def settle(self) -> bool:
        """A write that timed out may still land when the peer goes on, and reads this rank's memory until then."""
        if self.is_lost():
            return True
        with contextlib.suppress(KVTransferError):
            while self._pending:
                if self._state(self._pending[0]) == "PROC":
                    return False
                self._pending.popleft()
        return True

    def close(self) -> None:
        self._pending.clear()
        with contextlib.suppress(*self._agent.errors):
            self._agent.raw.remove_remote_agent(self._remote)
            self._drop_bounce()

    def probe(self, deadline: Deadline) -> int:
        with self._source.in_order():
            ones = torch.ones(SCRATCH_BYTES, dtype=torch.uint8, device=self._source.device)
        self._through_bounce(ones, deadline)
        offsets = np.arange(0, SCRATCH_BYTES, _PROBE_ROW_BYTES).astype(np.uint64)
        self._start(self._bounce.data_ptr() + offsets, self._scratch + offsets, _PROBE_ROW_BYTES)
        self._await_pending(0, deadline)
        return SCRATCH_BYTES

    def _post(self, push: Push, span: Span, source: Tensor) -> None:
        part = slice(span.first_logical - push.first_logical, span.first_logical - push.first_logical + span.count)
        g, target = self._target.geometry, self._target
        pool = self._pools[g.sliding[push.layer]]
        if int(push.target_ids.max()) >= pool.num_blocks:
            raise KVTransferError(f"reserved block {int(push.target_ids.max())} is not in a pool of {pool.num_blocks} blocks")
        heads = head_range(g.num_kv_heads, target.tp_size, target.rank).count
        layers = g.sliding_layers if g.sliding[push.layer] else g.full_layers
        base = pool.address + layers.index(push.layer) * pool.num_blocks * 2 * heads * g.head_block_bytes
        token_bytes = g.head_dim * DTYPE_BYTES[g.dtype]
        shape = (push.num_heads, span, g.block_size_tokens, token_bytes)
        remote, row_bytes = _addresses(base, push.target_ids[part], heads, push.target_head, *shape)
        local, _ = _addresses(source.data_ptr(), push.source_ids[part], source.shape[2], push.source_head, *shape)
        self._start(local, remote, row_bytes)

    def _start(self, local: np.ndarray, remote: np.ndarray, row_bytes: int) -> None:
        with self._wrapped("write to"):
            handle = self._agent.raw.initialize_xfer(
                "WRITE",
                self._agent.descriptors(local, row_bytes, _device_number(self._bounce)),
                self._agent.descriptors(remote, row_bytes, self._remote_device),
                self._remote,
            )
            self._pending.append(handle)
            self._agent.raw.transfer(handle)

    def _through_bounce(self, source: Tensor, deadline: Deadline) -> Tensor:
        """Copies a source that lies outside of the registered pools into registered memory, once earlier writes have left it."""
        self._await_pending(0, deadline)
        nbytes = source.numel() * source.element_size()
        if nbytes > len(self._bounce):
            self._drop_bounce()
            with self._source.in_order():
                self._bounce = torch.empty(max(nbytes, _BOUNCE_BYTES), dtype=torch.uint8, device=self._source.device)
            self._bounce_registration = self._agent.register([self._bounce])
        copy = self._bounce[:nbytes].view(source.dtype).view(source.shape)
        with self._source.in_order():
            copy.copy_(source)
        if self._source.stream is not None:
            self._source.stream.synchronize()  # the source was there before: this waits for the copy alone
        return copy

    def _drop_bounce(self) -> None:
        for registration in self._bounce_registration:
            self._agent.raw.deregister_memory(registration)
        self._bounce_registration = []

    def _await_pending(self, leave: int, deadline: Deadline) -> None:
        stalled_at = time.monotonic() + self._io_timeout_s
        while len(self._pending) > leave:
            state = self._state(self._pending[0])
            if state == "DONE":
                self._pending.popleft()
                stalled_at = time.monotonic() + self._io_timeout_s
                continue
            if state == "ERR" or self.is_lost():
                raise PeerLost(f"nixl: a write to {self._name} failed")
            deadline.check(f"writing to {self._name} over nixl")
            if time.monotonic() > stalled_at:
                raise TransferTimeout(f"nixl: {self._name} has taken nothing for {self._io_timeout_s} s")
            time.sleep(_POLL_S)

    def _state(self, handle: Any) -> str:
        with self._wrapped("write to"):
            return self._agent.raw.check_xfer_state(handle)

    @contextlib.contextmanager
    def _wrapped(self, what: str):
        try:
            yield
        except self._agent.errors as exc:
            error = PeerLost if type(exc).__name__ == "nixlRemoteDisconnectError" or self.is_lost() else KVTransferError
            raise error(f"nixl: can't {what} {self._name}: {type(exc).__name__} {exc}") from exc


def _addresses(
    base: int, ids: np.ndarray, num_heads_local: int, head: int, num_heads: int, span: Span, block_size: int, token_bytes: int
) -> tuple[np.ndarray, int]:
    """Where the rows of a span start in a layer's pool at `base`.

    Returns: (uint64 [rows], bytes of a row); whole blocks give one row for adjacent heads, parts of blocks one per head
    """
    head_bytes = block_size * token_bytes
    is_whole = (span.begin, span.end) == (0, block_size)
    heads = head + np.arange(1 if is_whole else num_heads)
    index = (ids[:, None, None] * 2 + np.arange(2)[:, None]) * num_heads_local + heads
    addresses = base + index.reshape(-1) * head_bytes + span.begin * token_bytes
    return addresses.astype(np.uint64), num_heads * head_bytes if is_whole else (span.end - span.begin) * token_bytes
