"""The timing of commits, on a CPU: every commit leads to one step and one token, and what is reported is in order."""

from benchmarks.transfer_gpu_commit import time_commits
from tests.support.kv_groups import geometry


def test_a_commit_is_timed_to_its_first_step_and_its_token():
    times = time_commits(geometry(2), 40, 3, "cpu")
    assert 0 < times["to_step_ms"] <= times["to_step_worst_ms"]
    assert times["to_step_ms"] < times["to_token_ms"]
