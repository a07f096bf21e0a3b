"""NIXL's ends by themselves. Transfers over it are in test_every_pair.py and test_faults.py."""

from __future__ import annotations

import json
import time

import pytest

from common.errors import KVTransferError, PeerLost
from kv_transfer.transports import nixl
from kv_transfer.transports.base import Target
from tests.support.kv_groups import geometry, poisoned_view

pytestmark = pytest.mark.skipif(not nixl.is_installed(), reason="the extra nixl is not installed")


def test_an_idle_receiver_leaves_the_cores_to_others() -> None:
    """NIXL's own progress thread would take a whole one per rank."""
    target = nixl.NixlTarget(poisoned_view(geometry(2), 1, 0, (8, 8), shared=False)[0])
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(0.5)
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    target.close()
    assert share < 0.5


def test_an_endpoint_that_makes_no_sense_is_refused() -> None:
    source = nixl.NixlSource(poisoned_view(geometry(2), 1, 0, (8, 8), shared=False)[0])
    where = Target(1, 0, 1, geometry(2))
    for detail in (b"", b"{}", b'{"metadata": "!", "owner": {}}', b"\xff"):
        with pytest.raises(KVTransferError, match="makes no sense"):
            nixl.NixlLink(detail, where, source, io_timeout_s=1.0)
    pool = {"address": 0, "num_blocks": 0}
    facts = {"metadata": "AAAA", "owner": {}, "full": pool, "sliding": pool, "scratch": 0, "device": -1}
    garbage = json.dumps(facts).encode()
    with pytest.raises((KVTransferError, PeerLost), match="can't reach decode rank 0"):
        nixl.NixlLink(garbage, where, source, io_timeout_s=1.0)
