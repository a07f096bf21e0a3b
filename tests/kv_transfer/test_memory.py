"""Shared buffers: the same bytes on both sides, only for processes that may, and nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest

from common import process
from common.errors import KVTransferError, PeerLost
from kv_transfer.memory import SharedBuffer


def test_what_one_side_writes_the_other_reads() -> None:
    buffer = SharedBuffer.create(3 * 4096 + 5)
    other = SharedBuffer.attach(buffer.describe())
    assert not other.tensor().any()
    buffer.tensor()[-1] = 7
    other.tensor()[0] = 9
    assert (other.tensor()[-1], buffer.tensor()[0]) == (7, 9)


def test_tensors_stay_valid_after_the_buffer_object_is_gone() -> None:
    buffer = SharedBuffer.create(4096)
    other = SharedBuffer.attach(buffer.describe()).tensor()
    del buffer
    other.fill_(3)
    assert int(other.sum()) == 3 * 4096


def test_a_buffer_can_not_shrink_under_its_peers() -> None:
    buffer = SharedBuffer.create(8192)
    fd = os.open(f"/proc/self/fd/{json.loads(buffer.describe())['fd']}", os.O_RDWR)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)
    os.close(fd)


def _own_buffer(pipe) -> None:
    buffer = SharedBuffer.create(1 << 20)
    pipe.send(buffer.describe())
    pipe.recv()


def _try_attach_as_nobody(pipe, description: bytes) -> None:
    os.setgid(65534)
    os.setuid(65534)
    try:
        SharedBuffer.attach(description)
        pipe.send("attached")
    except KVTransferError as exc:
        pipe.send(exc.message)


@pytest.fixture
def owner():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kv_transfer.memory"])
    mine, theirs = context.Pipe()
    child = context.Process(target=_own_buffer, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    child.description = mine.recv()
    yield child
    child.kill()
    child.join()
    child.close()
    mine.close()


def test_a_killed_owner_leaves_nothing_behind_and_its_peers_keep_their_mapping(owner) -> None:
    attached = SharedBuffer.attach(owner.description)
    before = set(os.listdir("/dev/shm"))
    owner.kill()
    owner.join()
    attached.tensor().fill_(1)  # no SIGBUS
    with pytest.raises(PeerLost, match="gone"):
        SharedBuffer.attach(owner.description)
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused(owner) -> None:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    child = context.Process(target=_try_attach_as_nobody, args=(theirs, owner.description), daemon=True)
    child.start()
    theirs.close()
    assert "Permission denied" in mine.recv()
    child.join()
    child.close()
    mine.close()


def test_a_reused_descriptor_number_is_not_taken_for_the_buffer() -> None:
    first, second = SharedBuffer.create(4096), SharedBuffer.create(4096)
    facts = json.loads(first.describe()) | {"fd": json.loads(second.describe())["fd"]}
    with pytest.raises(KVTransferError, match="not the shared buffer"):
        SharedBuffer.attach(json.dumps(facts).encode())


def test_other_hosts_and_nonsense_are_refused() -> None:
    facts = json.loads(SharedBuffer.create(4096).describe())
    with pytest.raises(KVTransferError, match="another host"):
        SharedBuffer.attach(json.dumps(facts | {"host": "elsewhere"}).encode())
    with pytest.raises(PeerLost):
        SharedBuffer.attach(json.dumps(facts | {"start_ticks": 1}).encode())
    for nonsense in (b"", b"{}", b"[1]", b"null", b"\xff", json.dumps(facts | {"pid": "x"}).encode()):
        with pytest.raises(KVTransferError, match="not the description"):
            SharedBuffer.attach(nonsense)


def test_the_owner_is_this_process() -> None:
    assert SharedBuffer.create(1).owner == process.identity()
