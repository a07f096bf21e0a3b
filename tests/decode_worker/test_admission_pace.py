"""How many admissions a turn takes, from what admissions took before."""

import pytest

from decode_worker.admission_pace import AdmissionPace


def settled(each_s: float, waited_s: float = 0.0, budget_s: float = 1e-3) -> AdmissionPace:
    pace = AdmissionPace(budget_s)
    pace.waited(waited_s)
    for _ in range(40):
        pace.took(pace.allowance(), each_s * pace.allowance())
    return pace


@pytest.mark.parametrize(("each_s", "allowed"), [(0.9e-3, 1), (0.49e-3, 2), (0.09e-3, 11), (5e-3, 1)])
def test_as_many_as_fit_into_the_budget_and_one_at_least(each_s, allowed):
    assert settled(each_s).allowance() == allowed


def test_half_of_the_wait_for_a_device_is_free():
    assert settled(0.29e-3, waited_s=12e-3).allowance() == 20
    assert settled(0.29e-3, waited_s=1e-3).allowance() == 3


def test_slow_steps_leave_room_for_more_so_that_the_pool_fills():
    """64 sequences of 40 tokens at steps of 0.3 s: 3.2 admissions a step keep the pool full; one a step would leave 51 of 64 rows empty."""
    pace = settled(0.7e-3)
    assert pace.allowance() == 1
    pace.stepped(0.3)
    assert pace.allowance() >= 2 * 64 / 40
    pace.stepped(0.01)
    assert pace.allowance() == 1


def test_one_slow_turn_is_forgotten():
    pace = settled(0.1e-3)
    pace.took(1, 0.05)
    assert pace.allowance() == 1
    for _ in range(30):
        pace.took(1, 0.1e-3)
    assert pace.allowance() >= 9
