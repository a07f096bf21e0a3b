"""Transfer ids differ, fit where they are sent, and tell their age."""

from __future__ import annotations

import pytest

from kv_transfer.transfer_id import TICK_S, Horizon, TransferIds, issued_s
from kv_transfer.transports.tcp_wire import PROBE_ID

FOUR_YEARS_S = 4 * 365 * 86400.0
LEASE_S = 10.0


def test_ids_differ_within_a_tick_and_over_years() -> None:
    ids = TransferIds(100.0)
    made = [ids.make(100.0 + after_s) for after_s in (0.0, 0.0, 0.01, TICK_S, 3600.0, FOUR_YEARS_S) for _ in range(500)]
    assert len(set(made)) == len(made)
    assert all(0 < transfer_id < 2**63 <= PROBE_ID for transfer_id in made)


@pytest.mark.parametrize("after_s", [0.0, 0.1, TICK_S, 17.3, 86400.0, FOUR_YEARS_S])
def test_an_id_tells_when_it_was_issued_to_an_eighth_of_a_second(after_s: float) -> None:
    assert 0 <= after_s - issued_s(TransferIds(50.0).make(50.0 + after_s)) < TICK_S + 1e-6


def test_ids_of_two_groups_do_not_meet() -> None:
    one, other = ({ids.make(0.0) for _ in range(1000)} for ids in (TransferIds(0.0), TransferIds(0.0)))
    assert not one & other


def test_the_horizon_follows_the_newest_reservation_and_a_lease_of_silence() -> None:
    ids, horizon = TransferIds(0.0), Horizon(LEASE_S)
    old, new = ids.make(20.0), ids.make(27.0)
    assert not horizon.is_past(old, 500.0)  # nothing of this group was seen
    horizon.saw(new, 507.0)
    assert not horizon.is_past(old, 509.9)
    assert horizon.is_past(old, 510.2)  # on the group's clock it is 30.2 at least
    assert not horizon.is_past(new, 516.9)
    assert horizon.is_past(new, 517.2)
    assert not horizon.is_past(ids.make(27.2), 1e9)  # may have been issued at any time since


def test_the_horizon_never_goes_back() -> None:
    ids, horizon = TransferIds(0.0), Horizon(LEASE_S)
    first = ids.make(20.0)
    horizon.saw(first, 500.0)
    assert horizon.is_past(first, 511.0)
    horizon.saw(ids.make(20.5), 511.0)  # it was long under way
    assert horizon.is_past(first, 511.0)
