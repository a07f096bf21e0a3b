"""One rank process under Ray: a thin shell around `PrefillRank` or `DecodeRank`, so that those need no Ray.

Started and watched by `cluster/group.py`. Carries no request and no token. Detached: it outlives the controller, and a later one asks it
what it is (`about`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass
from typing import Protocol

import ray

from common.errors import ConfigError
from common.heap import return_freed_memory
from common.process import identity
from common.proto import types_pb2
from common.rank_spec import RankSpec

TERMINATED = "SIGTERM"


class Rank(Protocol):
    """What a rank is to its process."""

    def start(self) -> types_pb2.GroupDescription | None: ...
    def doing(self) -> str: ...
    def wait_ended(self, timeout_s: float | None = None) -> str: ...
    def alive(self) -> bool: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Found:
    """What a rank says of itself. `description`: serialized GroupDescription of rank 0, empty on the others. `fingerprint`: of the
    configuration that its group was started with."""

    spec: RankSpec
    description: bytes
    fingerprint: str


class RankActor:
    """Lives as long as its process. `max_concurrency` must leave room for `watch` beside the others. SIGTERM is no end: whoever watches
    hears of it and drains the group."""

    def __init__(self):
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        return_freed_memory()
        self._rank: Rank | None = None
        self._found: Found | None = None
        self._terminated = threading.Event()
        self._news = threading.Event()
        _on_sigterm(self._on_sigterm)

    def make_rank(self, spec: RankSpec) -> Rank:
        """The rank for a spec. Tests make others."""
        if spec.role == "prefill":
            from prefill_worker.rank import PrefillRank

            return PrefillRank(spec)
        from decode_worker.rank import DecodeRank

        return DecodeRank(spec)

    def reserve_rendezvous(self) -> str:
        """host:port on this node for the group's store; asked of rank 0. The group listens on that host: the node's address in the Ray
        cluster, unless the node's environment names another (`TANDEM_NODE_ADDRESS`).
        """
        from cluster.local_ray import free_port

        host = os.environ.get("TANDEM_NODE_ADDRESS") or ray.util.get_node_ip_address()
        return f"{host}:{free_port(host)}"

    def process(self) -> bytes:
        """Returns: this process as serialized common.v1.ProcessIdentity"""
        return identity(os.getpid()).SerializeToString()

    def start(self, spec: RankSpec) -> bytes:
        """Loads and starts serving. Returns: serialized GroupDescription from rank 0, empty from the others.

        Raises: ServingError as the rank raises it
        """
        if self._rank is not None:
            raise ConfigError(f"rank {spec.rank} of {spec.group} runs already")
        self._rank = self.make_rank(spec)
        description = self._rank.start()
        return description.SerializeToString() if description is not None else b""

    def doing(self) -> str:
        """What a rank that starts is at, for people; "" before and after."""
        return self._rank.doing() if self._rank is not None else ""

    def serve(self, found: Found) -> None:
        """The group is complete: from now on this is what the rank says of itself."""
        self._found = found

    def about(self) -> Found | None:
        """None: the group has never been complete."""
        return self._found

    def watch(self, timeout_s: float) -> tuple[str, str]:
        """Blocks for so long, or until there is something to tell.

        Returns: ("ended", why), (TERMINATED, "") once at the first SIGTERM and then again after each `timeout_s`, or ("", "")
        """
        rank = self._rank
        if rank is None:
            return "ended", "it was never started"
        step_s = 0.25
        waited_s = 0.0
        while waited_s < timeout_s:
            reason = rank.wait_ended(step_s)
            if not rank.alive():
                return "ended", reason
            if self._news.is_set():
                self._news.clear()
                break
            waited_s += step_s
        return (TERMINATED, "") if self._terminated.is_set() else ("", "")

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()

    def _on_sigterm(self) -> None:
        self._terminated.set()
        self._news.set()


def _on_sigterm(call) -> None:
    """Calls back in a thread of its own for each SIGTERM. Python's own handlers run in the main thread only, which Ray keeps busy; the byte
    that the interpreter writes for each signal does not wait for it. Must be called from the main thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def read() -> None:
        while data := reader.recv(64):
            if signal.SIGTERM in data:
                call()
        writer.close()

    threading.Thread(target=read, name="sigterm", daemon=True).start()
