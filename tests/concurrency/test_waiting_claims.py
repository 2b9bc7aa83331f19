"""Waiting for work: woken by what makes it, without polling the database (design §3.6)."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from ffd import Claim, Engine, ExecutionPolicy, FailureClass, Fixed, NewExecution, RetryPolicy
from ffd.config import OutboxSettings
from ffd.db.pool import Connection
from tests.concurrency.sessions import held, until, until_blocked
from tests.support import OTHER, WORKER

pytestmark = pytest.mark.anyio

# Long enough that only a ring can explain a waiter that wakes.
NO_POLL = OutboxSettings(poll_interval_ms=60_000)
PROMPTLY_S = 10.0
WAIT_MS = 60_000

CREATE_FROM_ANOTHER_PROCESS = """
import anyio, sys
from ffd import Engine
async def main():
    async with Engine.connect(sys.argv[1]) as engine:
        await engine.create_execution(lane="idle")
anyio.run(main)
"""


async def until_waiting(engine: Engine, count: int = 1, lane: str = "idle") -> None:
    """Wait until `count` claims of the lane have looked in vain and wait for a ring."""

    async def is_waiting() -> bool:
        keys = engine._runtime.wakeups._lanes.get(lane, {})
        return sum(ticket._waiter is not None for tickets in keys.values() for ticket in tickets) == count

    await until(is_waiting, f"{count} claims wait")


def wait_for_work(engine: Engine, wait_ms: int = WAIT_MS, **kwargs: Any) -> asyncio.Future[Claim | None]:
    return asyncio.ensure_future(engine.claim("idle", wait_ms=wait_ms, **{**WORKER, **kwargs}))


async def test_a_waiting_claim_is_woken_by_a_create_of_another_engine(open_engine: Callable[..., Any]) -> None:
    """Show: claim(wait_ms) is woken promptly by a create elsewhere while the poll is a minute long."""
    async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
        waiting = wait_for_work(engine)
        await until_waiting(engine)
        created = await other.create_execution(lane="idle")
        with anyio.fail_after(PROMPTLY_S):
            claim = await waiting
        assert claim is not None
        assert claim.execution_id == created.execution_id


async def test_a_waiting_claim_is_woken_by_a_create_of_another_process(
    dsn: str, open_engine: Callable[..., Any]
) -> None:
    """Show: claim(wait_ms) is woken promptly by a create from another process."""
    async with open_engine(outbox=NO_POLL) as engine:
        waiting = wait_for_work(engine)
        await until_waiting(engine)
        await anyio.run_process(
            [sys.executable, "-c", CREATE_FROM_ANOTHER_PROCESS, dsn], stdout=subprocess.DEVNULL, stderr=None
        )
        with anyio.fail_after(PROMPTLY_S):
            assert await waiting is not None


BACK_TO_THE_QUEUE: dict[str, Callable[[Engine, Claim], Awaitable[object]]] = {
    "release": lambda engine, claim: engine.release(claim.handle),
    "delay until now": lambda engine, claim: engine.delay(claim.handle, 1),
    "fail with a retry at once": lambda engine, claim: engine.fail(claim.handle, "x", FailureClass.TRANSIENT),
}


@pytest.mark.parametrize("how", BACK_TO_THE_QUEUE)
async def test_a_waiting_claim_is_woken_by_work_that_comes_back(open_engine: Callable[..., Any], how: str) -> None:
    """Show: what gives work back at once wakes a waiting claim as a create does."""
    async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
        policy = ExecutionPolicy(retry=RetryPolicy(max_retries=1, backoff=Fixed(0)))
        await other.create_execution(lane="idle", policy=policy)
        claim = await other.claim("idle", **OTHER)
        waiting = wait_for_work(engine)
        await until_waiting(engine)
        await BACK_TO_THE_QUEUE[how](other, claim)
        with anyio.fail_after(PROMPTLY_S):
            again = await waiting
        assert again is not None
        assert again.lease_epoch == 2


@pytest.mark.parametrize("is_bulk", [False, True], ids=["single", "bulk"])
async def test_50_waiters_and_50_creates_give_each_waiter_exactly_one(
    open_engine: Callable[..., Any], sql: Connection, is_bulk: bool
) -> None:
    """Show: 50 waiters on one lane and 50 creates: each gets exactly one, nobody needs the poll."""
    async with open_engine(outbox=NO_POLL, pool_max=8) as engine, open_engine(outbox=NO_POLL) as other:
        waiting = [wait_for_work(engine) for _ in range(50)]
        await until_waiting(engine, 50)
        if is_bulk:
            created = await other.create_executions([NewExecution(lane="idle")] * 50)
        else:
            created = [await other.create_execution(lane="idle") for _ in range(50)]
        with anyio.fail_after(PROMPTLY_S):
            claims = await asyncio.gather(*waiting)
        assert Counter(claim.execution_id for claim in claims if claim) == Counter(one.execution_id for one in created)


async def test_waiters_with_different_capabilities_each_get_what_they_can_run(
    open_engine: Callable[..., Any],
) -> None:
    """Show: a ring wakes every kind of waiter: one that cannot run the work does not swallow the ring."""
    async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
        plain = [wait_for_work(engine) for _ in range(3)]
        able = wait_for_work(engine, capabilities=("gpu",))
        await until_waiting(engine, 4)
        created = await other.create_execution(lane="idle", required_capabilities=("gpu",))
        with anyio.fail_after(PROMPTLY_S):
            claim = await able
        assert claim is not None
        assert claim.execution_id == created.execution_id
        await other.create_executions([NewExecution(lane="idle")] * 3)
        with anyio.fail_after(PROMPTLY_S):
            assert all(await asyncio.gather(*plain))


async def test_no_ring_is_lost_between_the_look_and_the_wait(
    open_engine: Callable[..., Any], rng: random.Random, rounds: int
) -> None:
    """Show: a create at any moment around the start of a waiting claim wakes it: nobody needs the poll."""
    async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
        assert await engine.claim("idle", wait_ms=1, **WORKER) is None  # the listener is up
        for _ in range(rounds * 5):
            waiting = wait_for_work(engine)
            await anyio.sleep(rng.uniform(0, 0.005))
            await other.create_execution(lane="idle")
            with anyio.fail_after(PROMPTLY_S):
                assert await waiting is not None


async def test_the_ring_of_a_waiter_cancelled_during_its_look_goes_to_the_next(
    dsn: str, sql: Connection, open_engine: Callable[..., Any]
) -> None:
    """Show: a woken waiter that is cancelled before it has its answer does not take the ring with it."""
    async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
        first = wait_for_work(engine)
        await until_waiting(engine)
        second = wait_for_work(engine)
        await until_waiting(engine, 2)
        async with held(dsn, "lock table ff_attempt in access exclusive mode") as holder:
            await other.create_execution(lane="idle")
            await until_blocked(sql, "claim")
            blocked = await sql.fetchval(
                "select pid from pg_stat_activity where datname = current_database() and query like '/* ffd:claim */%'"
                " and wait_event_type = 'Lock'"
            )
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first

            async def is_gone() -> bool:
                found = await sql.fetchval("select count(*) from pg_stat_activity where pid = $1", blocked)
                return bool(found == 0)

            # Its statement must not get the work after all, in the moment before the server hears of the end.
            await until(is_gone, "the session of the cancelled claim has ended")
            await holder.execute("rollback")
        with anyio.fail_after(PROMPTLY_S):
            assert await second is not None


async def test_polling_delivers_when_notifications_are_off(open_engine: Callable[..., Any]) -> None:
    """Show: with notify="off" polling still delivers."""
    outbox = OutboxSettings(notify="off", poll_interval_ms=50)
    async with open_engine(outbox=outbox) as engine, open_engine(outbox=outbox) as other:
        waiting = wait_for_work(engine)
        await until_waiting(engine)
        await other.create_execution(lane="idle")
        with anyio.fail_after(PROMPTLY_S):
            assert await waiting is not None


async def test_an_idle_waiting_claim_does_not_poll_the_database(
    open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show: waiting does not busy-poll: ten idle claims for 2 s issue a handful of statements."""
    async with open_engine() as engine:
        fetch, seen = engine._runtime.db.fetch, list[str]()

        async def counting(statement: Any, *args: Any) -> Any:
            seen.append(statement.name)
            return await fetch(statement, *args)

        monkeypatch.setattr(engine._runtime.db, "fetch", counting)
        started = time.monotonic()
        assert await asyncio.gather(*(wait_for_work(engine, 2_000) for _ in range(10))) == [None] * 10
        assert time.monotonic() - started >= 2
    # Two looks each to begin with; then one look per poll and per connect of the listener, for all ten together.
    assert len(seen) <= 10 * 2 + 5, Counter(seen)


async def test_a_create_in_a_callers_transaction_wakes_the_waiter_with_its_commit(
    dsn: str, open_engine: Callable[..., Any], sql: Connection
) -> None:
    """Show: create(connection=) wakes the waiter only after the caller's commit."""
    mine = await asyncpg.connect(dsn)
    try:
        async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
            waiting = wait_for_work(engine)
            await until_waiting(engine)
            async with mine.transaction():
                created = await other.create_execution(lane="idle", connection=mine)
                # A committed ring wakes the waiter, which looks and does not find the uncommitted work.
                other._runtime.ring((("ff_work", "idle"),))
                await until_rung_and_waiting(engine, other)
                assert not waiting.done()
                assert await sql.fetchval("select count(*) from ff_exec_core") == 0
            with anyio.fail_after(PROMPTLY_S):
                claim = await waiting
            assert claim is not None
            assert claim.execution_id == created.execution_id
    finally:
        await mine.close()


async def until_rung_and_waiting(engine: Engine, other: Engine) -> None:
    """Wait until a ring sent now has come round: notifications arrive in the order they were sent."""
    arrived = asyncio.Event()
    callbacks = engine._runtime.listener._callbacks["ff_work"]

    def on_ring(payload: str | None) -> None:
        if payload == "marker":
            arrived.set()

    callbacks.append(on_ring)
    other._runtime.ring((("ff_work", "marker"),))
    with anyio.fail_after(PROMPTLY_S):
        await arrived.wait()
    callbacks.remove(on_ring)
    await until_waiting(engine)


async def test_a_create_that_is_rolled_back_leaves_nothing(
    dsn: str, open_engine: Callable[..., Any], sql: Connection
) -> None:
    """Show: a create in a transaction that is rolled back leaves no execution, no key and no ring."""
    mine = await asyncpg.connect(dsn)
    try:
        async with open_engine(outbox=NO_POLL) as engine, open_engine(outbox=NO_POLL) as other:
            waiting = wait_for_work(engine)
            await until_waiting(engine)
            transaction = mine.transaction()
            await transaction.start()
            await other.create_execution(lane="idle", idempotency_key="k", connection=mine)
            await other.create_executions([NewExecution(lane="idle", idempotency_key="l")], connection=mine)
            await transaction.rollback()
            await until_rung_and_waiting(engine, other)
            assert not waiting.done()
            for table in ("ff_exec_core", "ff_exec_dedup", "ff_attempt"):
                assert await sql.fetchval(f"select count(*) from {table}") == 0
            again = await other.create_execution(lane="idle", idempotency_key="k")
            assert not again.is_duplicate
            with anyio.fail_after(PROMPTLY_S):
                assert await waiting is not None
    finally:
        await mine.close()


async def test_a_waiting_claim_ends_in_time_without_work(open_engine: Callable[..., Any]) -> None:
    """Show: claim(wait_ms) without work returns None when its time is up, neither earlier nor much later."""
    async with open_engine(outbox=NO_POLL) as engine:
        started = time.monotonic()
        with anyio.fail_after(PROMPTLY_S):
            assert await wait_for_work(engine, 300) is None
        assert time.monotonic() - started >= 0.3
        assert engine._runtime.wakeups._lanes == {}
