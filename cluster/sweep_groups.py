"""The cluster around a sweep: which groups run now, and what a group that ended has left in its ranks' logs.

Ranks write to files of Ray's; those of this machine's own Ray are read here and kept beside the profile, since `tandem down` removes them.
Called by the CLI.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.sweep_bench import layout_of
from common.errors import ServingError
from common.proto import types_pb2

LAST_LINES = 20
TAIL_BYTES = 64 << 10
POLL_S = 1.0
Groups = Sequence[types_pb2.GroupDescription]


class RunningGroups:
    """`Surroundings` of a sweep on a terminal.

    Units: ask: the healthy groups that the router knows, blocking; ray_folder: of this machine's own Ray, None for one elsewhere; keep: the
        profile's path, beside which logs are kept; wait_s: for groups in the place of lost ones; show: progress; say: a line of its own
    """

    def __init__(
        self,
        ask: Callable[[], list[types_pb2.GroupDescription]],
        ray_folder: Path | None,
        keep: Path,
        wait_s: float,
        show: Callable[[str], None],
        say: Callable[[str], None],
    ):
        self._ask, self._ray_folder, self._keep, self._wait_s = ask, ray_folder, keep, wait_s
        self.doing, self.tell = show, say

    async def after_loss(self, lost: Groups) -> list[types_pb2.GroupDescription]:
        for group in lost:
            for line in last_words(group, self._ray_folder, self._keep):
                self.tell(line)
        self.doing("waiting for other groups")
        give_up_s = time.monotonic() + self._wait_s
        while True:
            try:
                groups = await asyncio.to_thread(self._ask)
            except ServingError:  # a router that is away for a moment
                groups = []
            groups, missing = replaced(groups, lost)
            if not missing:
                return groups
            if time.monotonic() > give_up_s:
                self.tell(f"no other group came within {self._wait_s:.0f} s; cells that need one are left out")
                return groups
            await asyncio.sleep(POLL_S)


def replaced(groups: Groups, lost: Groups) -> tuple[list[types_pb2.GroupDescription], bool]:
    """Returns: those that are not lost; whether one of a lost group's role and layout is still missing"""
    gone = {group.incarnation for group in lost}
    left = [group for group in groups if group.incarnation not in gone]
    kinds = {(group.role, layout_of(group)) for group in left}
    return left, any((group.role, layout_of(group)) not in kinds for group in lost)


def last_words(group: types_pb2.GroupDescription, ray_folder: Path | None, keep: Path) -> list[str]:
    """The end of each rank's log, for people. Effects: copies the whole log beside `keep`"""
    if ray_folder is None:
        return [
            f"group {group.group} ended; its ranks' logs are in Ray's folder session_latest/logs on its node, by the pids {_pids(group)}"
        ]
    lines = []
    for rank, process in enumerate(group.ranks):
        files = rank_logs(ray_folder, process.pid)
        lines.append(f"group {group.group} ended; rank {rank}, pid {process.pid}: " + ("its last lines" if files else "no log was found"))
        for file in files:
            kept = keep.with_name(f"{keep.name}.{group.group}-r{rank}{file.suffix}")
            shutil.copyfile(file, kept)
            lines += [f"  {line}" for line in tail_of(file)] + [f"  the whole log: {kept}"]
    return lines


def rank_logs(ray_folder: Path, pid: int) -> list[Path]:
    """What a process of this Ray has written, if anything: its stderr, where ranks log, and its stdout."""
    found = [*ray_folder.glob(f"session_*/logs/worker-*-{pid}.err"), *ray_folder.glob(f"session_*/logs/worker-*-{pid}.out")]
    return [file for file in found if not file.parent.parent.is_symlink() and file.stat().st_size]


def tail_of(file: Path) -> list[str]:
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(":")][-LAST_LINES:]


def _pids(group: types_pb2.GroupDescription) -> str:
    return ", ".join(str(process.pid) for process in group.ranks)
