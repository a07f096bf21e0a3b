"""Whatever is lost, doubled, overtaken, cut or flipped on the way into a decode rank's pools, the digest of what was promised tells."""

from __future__ import annotations

import pytest

from kernels.digest import MASK
from tests.support.faults.links import FaultyOpener
from tests.support.faults.plan import KINDS, FaultPlan, FaultSettings, counts_of
from tests.support.kv_groups import DecodeGroup, PrefillGroup, assert_handed_over, geometry, joined

TOKENS = 150
HARMLESS = {"delay", "duplicate", "reorder"}


class OneFault(FaultPlan):
    """The same kind for the n-th push and no other."""

    def __init__(self, settings: FaultSettings, kind: str, at: int):
        super().__init__(settings, kind)
        self._kind = kind
        self._left = at

    def draw(self, where: str) -> str | None:
        self._left -= 1
        return self._kind if self._left == 0 else None


@pytest.mark.parametrize("at", [1, 6, 23])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_spoilt_push_is_found_and_every_harmless_one_passes(tmp_path, transport: str, kind: str, at: int) -> None:
    g = geometry(4)
    prefill, decode = PrefillGroup(g, 1, TOKENS, transport, seed=at), DecodeGroup(g, 2, (transport,))
    plan = OneFault(FaultSettings(str(tmp_path), delay_s=0.02), kind, at)
    for sender in prefill.senders:
        sender._opener = FaultyOpener(sender._opener, plan)
    with joined(prefill, decode):
        prefill.begin(decode.reserve(7, TOKENS))
        for start in range(0, TOKENS, 32):
            prefill.push_chunk(7, start, min(start + 32, TOKENS))
        results = prefill.finish(7)
        assert [result.error for result in results] == [None]
        promised = [sum(result.digest_per_rank[rank] for result in results) & MASK for rank in range(decode.tp)]
        found = [receiver.verify(7).digest for receiver in decode.receivers]
        if kind in HARMLESS:
            assert found == promised
            assert_handed_over(prefill, decode, 7)
        else:
            assert sum(a != b for a, b in zip(found, promised, strict=True)) == 1


def test_faults_are_one_in_so_many_of_every_kind_and_counted(tmp_path) -> None:
    plan = FaultPlan(FaultSettings(str(tmp_path), one_in=16), "rank")
    drawn = [plan.draw("data") for _ in range(4000)]
    kinds = {kind: drawn.count(kind) for kind in KINDS}
    assert all(20 <= count <= 70 for count in kinds.values()), kinds
    assert counts_of(tmp_path) == {f"data {kind}": count for kind, count in kinds.items()}
    quiet = FaultPlan(FaultSettings(str(tmp_path)), "rank")
    assert {quiet.draw("data") for _ in range(500)} == {None}
