"""A process is told apart from others, and called dead only where its pid means something."""

import subprocess
import sys

import pytest

from common.process import host_id, identity, is_known_dead

IN_ANOTHER_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork")
SHOW = "from common.process import identity; p = identity(1); print(p.host, p.pid, p.start_ticks)"


def test_a_process_that_ended_is_known_dead_and_a_running_one_is_not():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = identity(child.pid)
    assert not is_known_dead(known)
    child.communicate(b"\n")
    assert is_known_dead(known)


def test_a_recycled_pid_is_another_process():
    known = identity()
    known.start_ticks += 1
    assert is_known_dead(known)


def test_a_process_of_another_container_of_this_machine_is_never_known_dead_here():
    if subprocess.run([*IN_ANOTHER_CONTAINER, "true"], capture_output=True).returncode != 0:
        pytest.skip("this kernel lets nobody make a pid namespace")
    command = [*IN_ANOTHER_CONTAINER, "--mount-proc", sys.executable, "-c", SHOW]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    theirs = identity()
    theirs.host, theirs.pid, theirs.start_ticks = shown[0], 2**22 + 1, int(shown[2])  # a pid that is free here
    assert theirs.host != host_id()
    assert not is_known_dead(theirs)
