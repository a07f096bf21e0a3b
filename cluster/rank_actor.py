"""One rank process under Ray: a thin shell around `PrefillRank` or `DecodeRank`, so that those need no Ray.

Started and watched by `cluster/group.py`. Carries no request and no token.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import ray

from common.errors import ConfigError
from common.process import identity
from common.rank_spec import RankSpec


class RankActor:
    """Lives as long as its process. `max_concurrency` must leave room for `wait_ended` beside the others."""

    def __init__(self):
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._rank: Any = None

    def reserve_rendezvous(self) -> str:
        """host:port on this node for the group's store; asked of rank 0."""
        from cluster.local_ray import free_port

        host = ray.util.get_node_ip_address()
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
        if spec.role == "prefill":
            from prefill_worker.rank import PrefillRank

            self._rank = PrefillRank(spec)
        else:
            from decode_worker.rank import DecodeRank

            self._rank = DecodeRank(spec)
        description = self._rank.start()
        return description.SerializeToString() if description is not None else b""

    def wait_ended(self) -> str:
        """Blocks until the rank's loop ends. Returns: why"""
        return self._rank.wait_ended()

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()
