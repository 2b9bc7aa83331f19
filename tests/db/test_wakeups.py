"""Who is woken by a ring, and that no ring is lost."""

from __future__ import annotations

import asyncio

import pytest

from ffd.db.wakeups import WaitKey, Wakeups

pytestmark = pytest.mark.anyio

A = WaitKey("a", ())
A_GPU = WaitKey("a", ("gpu",))
B = WaitKey("b", ())


async def test_a_ring_before_the_wait_is_not_lost() -> None:
    wakeups = Wakeups()
    with wakeups.ticket(A) as ticket:
        wakeups.on_ring("a")
        assert await ticket.wait(0)
        assert not await ticket.wait(0), "a ring is taken once"


async def test_a_ring_wakes_one_waiter_per_key_of_its_lane() -> None:
    wakeups = Wakeups()
    with wakeups.ticket(A) as first, wakeups.ticket(A) as second, wakeups.ticket(A_GPU) as gpu, wakeups.ticket(B) as b:
        wakeups.on_ring("a")
        assert [ticket.is_rung for ticket in (first, second, gpu, b)] == [True, False, True, False]
        wakeups.pass_on(A)
        assert second.is_rung
        wakeups.on_ring(None)
        assert b.is_rung


async def test_an_unused_ring_goes_to_the_next_in_line() -> None:
    wakeups = Wakeups()
    with wakeups.ticket(A) as second:
        with wakeups.ticket(A) as leaving:
            second.ring()
            assert await second.wait(0)
            wakeups.pass_on(A)
            wakeups.pass_on(A)
            assert leaving.is_rung
            assert await second.wait(0)
        assert second.is_rung, "the one that left had not looked"


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    wakeups = Wakeups()

    async def wait() -> None:
        with wakeups.ticket(A) as ticket:
            await ticket.wait(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert wakeups._lanes == {}
    wakeups.on_ring("a")
    wakeups.on_ring(None)
