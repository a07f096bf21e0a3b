"""The links between the ranks of a group: handshake, messages, collectives, and what each side sees when the other one is gone."""

import socket
import threading
import time
from contextlib import closing

import pytest
import torch

from common.errors import ConfigError, WorkerLost
from model.control import FollowerChannel, LeaderChannel
from model.star import Link, StarListener, join_star, split_address
from model.star_group import StarGroup

KEY = b"0123456789abcdef0123456789abcdef"


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def run_star(size: int, work) -> list:
    """Runs work(rank, links) on every rank, each in a thread. Returns: the results in rank order"""
    address, results = free_address(), [None] * size

    def follower(rank: int) -> None:
        with closing(join_star(address, KEY, rank, "test", 5)) as link:
            results[rank] = work(rank, [link])

    threads = [threading.Thread(target=follower, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    listener = StarListener(address, KEY)
    links = listener.accept(size, ("test",), 5)["test"]
    listener.close()
    results[0] = work(0, links)
    for thread in threads:
        thread.join(10)
    for link in links:
        link.close()
    return results


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_and_all_gather_equal_one_process(size, dtype):
    shapes = [(1,), (3, 5), (0, 4), (200, 257)]
    inputs = [[torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)] for shape in shapes]

    def work(rank: int, links: list[Link]):
        group = StarGroup(rank, size, links)
        return [(group.all_reduce(parts[rank].clone()), group.all_gather(parts[rank], -1)) for parts in inputs]

    for result in run_star(size, work):
        for parts, (total, joined) in zip(inputs, result, strict=True):
            want = parts[0].float()
            for part in parts[1:]:
                want = want + part
            assert torch.equal(total, want.to(dtype))
            assert torch.equal(joined, torch.cat(parts, -1))


def test_all_reduce_works_in_place_on_a_tensor_that_is_not_contiguous():
    def work(rank: int, links: list[Link]):
        t = torch.arange(6.0).view(2, 3).t()
        assert StarGroup(rank, 3, links).all_reduce(t) is t
        return t

    for t in run_star(3, work):
        assert torch.equal(t, 3 * torch.arange(6.0).view(2, 3).t())


def test_plans_of_any_size_arrive_in_order_and_replies_come_by_rank():
    plans = [b"", b"x", b"y" * 5000, b"z" * 3_000_000]

    def work(rank: int, links: list[Link]):
        if rank == 0:
            leader = LeaderChannel(links)
            for plan in plans:
                leader.send(plan)
            return leader.collect()
        follower = FollowerChannel(links[0])
        got = [follower.receive() for _ in plans]
        follower.reply(bytes([rank]))
        return got

    results = run_star(4, work)
    assert results[0] == [b"\x01", b"\x02", b"\x03"]
    assert results[1] == results[2] == results[3] == plans


@pytest.mark.parametrize("dies", [0, 1])
def test_end_that_goes_away_is_seen_at_once_by_the_other(dies):
    def work(rank: int, links: list[Link]):
        if rank == dies:
            time.sleep(0.1)
            links[0].close()
            return None
        started = time.monotonic()
        with pytest.raises(WorkerLost) as lost:
            links[0].receive()
        assert lost.value.rank == 1 - rank
        return time.monotonic() - started

    results = run_star(2, work)
    assert results[1 - dies] < 1.0


def test_ranks_that_disagree_about_a_size_are_told_apart_from_garbage():
    def work(rank: int, links: list[Link]):
        if rank == 1:
            links[0].send(b"12345678")
            return None
        with pytest.raises(WorkerLost, match="8 bytes came where 4 were expected"):
            links[0].receive_into(memoryview(bytearray(4)))

    run_star(2, work)


def test_silent_end_times_out_only_when_asked_to():
    def work(rank: int, links: list[Link]):
        if rank == 1:
            time.sleep(0.4)
            links[0].send(b"late")
            return None
        with pytest.raises(WorkerLost, match="in time"):
            links[0].receive(timeout_s=0.1)

    run_star(2, work)


def test_stranger_without_the_key_is_refused_and_does_not_disturb():
    address = free_address()
    listener = StarListener(address, KEY)
    joined = {}
    thread = threading.Thread(target=lambda: joined.update(listener.accept(2, ("test",), 5)))
    thread.start()
    with pytest.raises(WorkerLost, match="key"):
        join_star(address, b"another key", 1, "test", 1)
    with socket.create_connection(split_address(address)) as rude:
        rude.sendall(b"\xff" * 84)
        rude.recv(16)
    with closing(join_star(address, KEY, 1, "test", 5)) as link:
        thread.join(5)
        listener.close()
        link.send(b"hello")
        with closing(joined["test"][0]) as other:
            assert other.receive() == b"hello"


def test_rank_that_does_not_come_is_named():
    with closing(StarListener(free_address(), KEY)) as listener, pytest.raises(WorkerLost, match=r"ranks \[1, 2\]"):
        listener.accept(3, ("test",), 0.2)
    with pytest.raises(WorkerLost, match="no rank 0"):
        join_star(free_address(), KEY, 1, "test", 0.1)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:x", ":"])
def test_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError):
        split_address(address)
