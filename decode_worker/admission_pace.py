"""How many admissions one turn of the decode loop takes while sequences run, so that together they hold the next step up by no more than a
bound, whatever one of them costs on this machine.

Pure: told by the engine what admissions took. Each counts twice: as the reservation, and as the look at what has arrived.
"""

from __future__ import annotations

BUDGET_S = 1e-3
_FIRST_GUESS_S = 1e-3
_WEIGHT = 0.25  # of a turn in the estimate, unless it was slower than that: then it is believed at once
_SHARE_OF_WAIT = 0.5  # leaves room for admissions that cost more than was thought
_SHARE_OF_STEP = 0.05


class AdmissionPace:
    """Units: budget_s: of one turn's admissions until all ranks are done with them

    Where the host waits for a device that is busy with the step before, admissions may take half of that wait instead, if it is more:
    nobody is held up by them. Where steps are slow, they may take a twentieth of one: a pool that takes one admission a step of 0.3 s runs
    all but empty.
    """

    def __init__(self, budget_s: float = BUDGET_S):
        self._budget_s = budget_s
        self._each_s = _FIRST_GUESS_S
        self._waited_s = self._step_s = 0.0

    def allowance(self) -> int:
        """How many the next turn may take: at least one, or nobody would ever come in."""
        budget_s = max(self._budget_s, _SHARE_OF_WAIT * self._waited_s, _SHARE_OF_STEP * self._step_s)
        return max(1, int(budget_s / self._each_s))

    def took(self, count: int, seconds: float) -> None:
        """So many admissions of one turn have taken so long."""
        each_s = seconds / count
        self._each_s = max(each_s, self._each_s + _WEIGHT * (each_s - self._each_s))

    def waited(self, seconds: float) -> None:
        """The host has waited so long for the oldest step."""
        self._waited_s = seconds

    def stepped(self, seconds: float) -> None:
        """From one step's end to the next one's."""
        self._step_s = seconds
