"""Who gets the handle of a decode rank's memory: processes of this user that know the key and mean this incarnation, nobody else."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from common.errors import KVTransferError, PeerLost, TransferTimeout
from kv_transfer import handle_exchange
from kv_transfer.handle_exchange import HandleServer, ask_for_handle

KEY = b"the key of a cluster under test."
HANDLE = bytes(range(64))


@pytest.fixture
def server():
    server = HandleServer(HANDLE, key=KEY, incarnation=7)
    yield server
    server.close()


def ask(server: HandleServer, **changes) -> bytes:
    options = {"owner_pid": os.getpid(), "key": KEY, "incarnation": 7} | changes
    return ask_for_handle(server.name, **options)


def test_a_process_of_this_user_with_the_key_gets_the_handle(server: HandleServer) -> None:
    assert [ask(server) for _ in range(3)] == [HANDLE] * 3


def test_another_key_and_another_incarnation_get_none(server: HandleServer) -> None:
    with pytest.raises(KVTransferError, match="another cluster key"):
        ask(server, key=b"x")
    with pytest.raises(PeerLost, match="replaced"):
        ask(server, incarnation=8)
    assert ask(server) == HANDLE


def test_an_owner_that_is_another_process_is_not_believed(server: HandleServer) -> None:
    with pytest.raises(KVTransferError, match=f"should be process {os.getpid() + 1}"):
        ask(server, owner_pid=os.getpid() + 1)


def test_processes_of_other_users_are_hung_up_on(server: HandleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = handle_exchange.peer_of
    monkeypatch.setattr(handle_exchange, "peer_of", lambda connection: (real(connection)[0], os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30.0)
        stranger.connect("\0" + server.name)
        assert stranger.recv(16) == b""
    monkeypatch.setattr(handle_exchange, "peer_of", real)
    assert ask(server) == HANDLE


def test_strangers_that_say_nothing_hold_up_nobody(server: HandleServer) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for stranger in silent:
        stranger.connect("\0" + server.name)
    assert ask(server) == HANDLE
    for stranger in silent:
        stranger.close()


def test_an_owner_that_stalls_or_is_gone_is_told_apart(server: HandleServer) -> None:
    with socket.socket(socket.AF_UNIX) as stalled:
        stalled.bind("\0tandem-kv-stalled-" + str(os.getpid()))
        stalled.listen(1)
        began = time.monotonic()
        with pytest.raises(TransferTimeout, match="did not tell"):
            ask_for_handle("tandem-kv-stalled-" + str(os.getpid()), owner_pid=os.getpid(), key=KEY, incarnation=7, timeout_s=0.1)
        assert time.monotonic() - began < 30.0
    server.close()
    give_up = time.monotonic() + 30.0
    while f"@{server.name}" in Path("/proc/net/unix").read_text() and time.monotonic() < give_up:
        time.sleep(0.02)
    with pytest.raises(PeerLost, match="is gone"):
        ask(server)
