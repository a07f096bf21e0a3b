"""Work for a client: in the caller's own task, ended when the client leaves or stalls, and nobody else's cancellation is taken for that."""

from __future__ import annotations

import asyncio

import pytest

from frontend.http.disconnect import ClientGone, run_until_disconnect


class Client:
    """Its `receive` waits until it leaves."""

    def __init__(self) -> None:
        self._has_left = asyncio.Event()

    def leave(self) -> None:
        self._has_left.set()

    async def receive(self):
        await self._has_left.wait()
        return {"type": "http.disconnect"}


class Work:
    """Runs until it is cancelled; its cleanup takes a turn of the loop."""

    def __init__(self) -> None:
        self.is_cleaned_up = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.is_cleaned_up = True


async def test_work_that_waits_for_nothing_takes_no_turn_of_the_loop():
    async def work() -> int:
        return 7

    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    assert await run_until_disconnect(Client().receive, work()) == 7
    assert not turns


async def test_a_client_that_leaves_ends_the_work_and_not_the_caller():
    client, work = Client(), Work()
    asyncio.get_running_loop().call_later(0.01, client.leave)
    with pytest.raises(ClientGone):
        await run_until_disconnect(client.receive, work.run())
    assert work.is_cleaned_up
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_what_the_works_cleanup_raises_is_nobodys_once_the_client_has_left():
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise RuntimeError("the connection is closed")

    client = Client()
    client.leave()
    with pytest.raises(ClientGone):
        await run_until_disconnect(client.receive, work())


async def test_a_client_that_leaves_after_the_work_changes_nothing():
    client = Client()
    done = asyncio.get_running_loop().create_future()

    async def work() -> int:
        return await done

    def end_both() -> None:
        done.set_result(7)
        client.leave()

    asyncio.get_running_loop().call_later(0.01, end_both)
    assert await run_until_disconnect(client.receive, work()) == 7
    await asyncio.sleep(0.01)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_a_cancelled_caller_is_cancelled(leaves: bool):
    client, work = Client(), Work()
    caller = asyncio.create_task(run_until_disconnect(client.receive, work.run()))
    await asyncio.sleep(0.01)
    if leaves:
        client.leave()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert work.is_cleaned_up


async def test_a_client_that_stalls_counts_as_gone():
    asked: list[bool] = []

    def has_stalled() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    work = Work()
    with pytest.raises(ClientGone):
        await run_until_disconnect(Client().receive, work.run(), has_stalled=has_stalled, poll_s=0.01)
    assert asked == [False, False, True]
    assert work.is_cleaned_up
