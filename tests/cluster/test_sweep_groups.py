"""What a group that ended has left in its ranks' logs, and who takes its place."""

from __future__ import annotations

from cluster.sweep_groups import LAST_LINES, RunningGroups, last_words, rank_logs, replaced
from common.errors import WorkerLost
from common.proto import types_pb2


def group(name, incarnation, *, role=types_pb2.ROLE_PREFILL, tp=1, pids=(4711,)):
    ranks = [types_pb2.ProcessIdentity(host="h", pid=pid, start_ticks=1) for pid in pids]
    layout = types_pb2.Layout(tp=tp, ep=1, dp=1)
    return types_pb2.GroupDescription(group=name, role=role, layout=layout, weights="fp8", incarnation=incarnation, ranks=ranks)


def ray_folder(tmp_path, pid=4711):
    logs = tmp_path / "ray" / "session_1" / "logs"
    logs.mkdir(parents=True)
    text = "".join(f"line {i}\n" for i in range(100)) + "an illegal memory access was encountered\n\n"
    (logs / f"worker-ab-01-{pid}.err").write_text(text)
    (logs / f"worker-ab-01-{pid}.out").write_text("")
    (logs / "worker-ab-01-4712.err").write_text("of another process\n")
    (tmp_path / "ray" / "session_latest").symlink_to(tmp_path / "ray" / "session_1")
    return tmp_path / "ray"


def test_the_last_lines_are_told_and_the_whole_log_is_kept(tmp_path):
    folder = ray_folder(tmp_path)
    first, *lines, last = last_words(group("p-1", 1), folder, tmp_path / "p.json")
    assert "p-1 ended; rank 0, pid 4711" in first
    assert len(lines) == LAST_LINES
    assert lines[-1].strip() == "an illegal memory access was encountered"
    kept = tmp_path / "p.json.p-1-r0.err"
    assert str(kept) in last
    assert kept.read_text() == rank_logs(folder, 4711)[0].read_text()


def test_where_no_log_can_be_read_it_is_said_where_they_are(tmp_path):
    assert "pids 4711, 4712" in last_words(group("p-1", 1, pids=(4711, 4712)), None, tmp_path / "p.json")[0]
    assert "no log was found" in last_words(group("p-1", 1, pids=(99,)), ray_folder(tmp_path), tmp_path / "p.json")[0]


def test_a_place_is_taken_by_a_group_of_the_same_role_and_layout():
    lost, other = group("p-1", 1), group("d-1", 2, role=types_pb2.ROLE_DECODE)
    assert replaced([lost, other], [lost]) == ([other], True)
    assert replaced([other, group("p-2", 3, tp=2)], [lost])[1]
    assert replaced([other, group("p-2", 3)], [lost]) == ([other, group("p-2", 3)], False)


async def test_it_waits_for_another_group_while_the_router_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.sweep_groups.POLL_S", 0.0)
    lost, new, told = group("p-1", 1), group("p-2", 2), []
    answers = iter([WorkerLost("away"), [lost], [new]])

    def ask():
        answer = next(answers)
        if isinstance(answer, WorkerLost):
            raise answer
        return answer

    around = RunningGroups(ask, None, tmp_path / "p.json", 30.0, lambda text: None, told.append)
    assert await around.after_loss([lost]) == [new]
    assert len(told) == 1


async def test_it_gives_up_waiting_and_says_so(tmp_path):
    told = []
    around = RunningGroups(list, None, tmp_path / "p.json", 0.0, lambda text: None, told.append)
    assert await around.after_loss([group("p-1", 1)]) == []
    assert "no other group came" in told[-1]
