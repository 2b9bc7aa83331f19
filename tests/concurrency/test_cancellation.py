"""A cancelled call leaves nothing behind: no lock, no transaction, no half-used connection.

Both kinds of cancellation: asyncio's, which arrives once, and anyio's, which arrives again at every await until
its scope is left, so that an ordinary ROLLBACK would be skipped (design §6).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import anyio
import pytest

from ffd import Claim, Engine, EngineError, FailureClass, NewExecution, ResumeToken
from ffd.core.ids import new_execution_key, new_uuid, parse_execution_id, partition_of
from ffd.db.pool import Connection
from ffd.db.statement import Planning
from tests.concurrency.sessions import (
    assert_invariants,
    attempt_row,
    exec_row,
    held,
    until_blocked,
    until_idle,
    until_quiet,
)
from tests.support import EXPIRE, WORKER, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

FAR_MS = 10**15
NEW_ID = str(new_execution_key())
TAKE_NEW_ID = (
    "insert into ff_exec_core (partition_key, execution_id, lane_id, lifecycle_phase, ownership_state,"
    " eligibility_state, public_state, attempt_state, created_at_ms)"
    f" values ({parse_execution_id(NEW_ID)[0]}, '{parse_execution_id(NEW_ID)[1]}', 'x', 'runnable', 'unowned',"
    " 'eligible_now', 'waiting', 'pending_first_attempt', 1)"
)
LOCK_ATTEMPTS = "lock table ff_attempt in access exclusive mode"
LOCK_KEYS = "lock table ff_exec_dedup in access exclusive mode"
LOCK_FLOWS = "select 1 from ff_flow_core for update"


class Blocked(NamedTuple):
    """An operation, the statement it stops in, and the SQL that stops it there."""

    statement: str
    blocker: Callable[[Claim], str]
    call: Callable[[Engine, Claim], Awaitable[object]]


def grant(claim: Claim) -> ResumeToken:
    return ResumeToken(claim.execution_id, "other", "other-1")


def member_of(claim: Claim) -> str:
    return claim.tags["test.flow"]


OPERATIONS = {
    "claim": Blocked("claim", lambda _: LOCK_ATTEMPTS, lambda e, _: e.claim("idle", **WORKER)),
    "claim_wait": Blocked("claim", lambda _: LOCK_ATTEMPTS, lambda e, _: e.claim("idle", wait_ms=60_000, **WORKER)),
    "claim_many": Blocked("claim_many", lambda _: LOCK_ATTEMPTS, lambda e, _: e.claim_many("idle", 5, **WORKER)),
    "claim_from_resume_grant": Blocked(
        "take_expired", lambda c: exec_row(c.execution_id), lambda e, c: e.claim_from_resume_grant(grant(c))
    ),
    "renew": Blocked("renew_with_event", lambda c: attempt_row(c.execution_id), lambda e, c: e.renew(c.handle)),
    "renew_many": Blocked("renew_many", lambda c: attempt_row(c.execution_id), lambda e, c: e.renew_many([c.handle])),
    "progress": Blocked(
        "progress", lambda c: attempt_row(c.execution_id), lambda e, c: e.progress(c.handle, percent=1)
    ),
    "complete": Blocked("complete", lambda c: exec_row(c.execution_id), lambda e, c: e.complete(c.handle, b"x")),
    "complete_many": Blocked(
        "complete_many", lambda c: exec_row(c.execution_id), lambda e, c: e.complete_many([(c.handle, b"x")])
    ),
    "fail": Blocked(
        "fail", lambda c: exec_row(c.execution_id), lambda e, c: e.fail(c.handle, "x", FailureClass.TRANSIENT)
    ),
    "release": Blocked("release", lambda c: exec_row(c.execution_id), lambda e, c: e.release(c.handle)),
    "delay": Blocked("delay", lambda c: exec_row(c.execution_id), lambda e, c: e.delay(c.handle, FAR_MS)),
    "create_execution": Blocked("create", lambda _: TAKE_NEW_ID, lambda e, _: e.create_execution(execution_id=NEW_ID)),
    "create_keyed": Blocked("create_keyed", lambda _: LOCK_KEYS, lambda e, _: e.create_execution(idempotency_key="k")),
    "create_executions": Blocked(
        "create_many", lambda _: TAKE_NEW_ID, lambda e, _: e.create_executions([NewExecution(execution_id=NEW_ID)])
    ),
    # These are in a transaction of several statements when they are stopped.
    "create_executions_keyed": Blocked(
        "take_keys",
        lambda _: LOCK_KEYS,
        lambda e, _: e.create_executions([NewExecution(idempotency_key="k"), NewExecution()]),
    ),
    "create_executions_keyed_second_statement": Blocked(
        "create_many",
        lambda _: TAKE_NEW_ID,
        lambda e, _: e.create_executions([NewExecution(idempotency_key="k", execution_id=NEW_ID)]),
    ),
    "complete_member": Blocked("lock_flow", lambda _: LOCK_FLOWS, lambda e, c: e.complete(c.handle)),
    "fail_member": Blocked(
        "lock_flow", lambda _: LOCK_FLOWS, lambda e, c: e.fail(c.handle, "x", FailureClass.TRANSIENT)
    ),
    "wait_children": Blocked("lock_flow", lambda _: LOCK_FLOWS, lambda e, c: e.wait_children(c.handle)),
    # The flow row is granted already, the execution is not.
    "wait_children_second_statement": Blocked(
        "wait_children", lambda c: exec_row(c.execution_id), lambda e, c: e.wait_children(c.handle)
    ),
    "create_member": Blocked("lock_flow", lambda _: LOCK_FLOWS, lambda e, c: e.create_execution(flow_id=member_of(c))),
}
MEMBERS = {name for name in OPERATIONS if "member" in name or "wait_children" in name}


async def prepare(engine: Engine, sql: Connection, *, is_member: bool) -> Claim:
    """A running execution, and a waiting one on the lane `idle`."""
    flow_id = None
    if is_member:
        flow = new_uuid()
        flow_id = str(flow)
        await sql.execute(
            "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
            " values ($1, $2, 'open', 1)",
            partition_of(flow),
            flow,
        )
    await engine.create_execution(flow_id=flow_id, tags={"test.flow": flow_id or ""})
    await engine.create_execution(lane="idle")
    claim = await engine.claim("default", **WORKER)
    assert claim is not None
    return claim


async def cancel_by_asyncio(call: Callable[[], Awaitable[object]], is_blocked: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.ensure_future(call())
    await is_blocked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancel_by_scope(call: Callable[[], Awaitable[object]], is_blocked: Callable[[], Awaitable[None]]) -> None:
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await call()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await is_blocked()
        scope.cancel()
    assert scope.cancelled_caught


Cancel = Callable[[Callable[[], Awaitable[object]], Callable[[], Awaitable[None]]], Awaitable[None]]


FAMILIES = {
    "claims": ("claim", "claim_wait", "claim_many", "claim_from_resume_grant"),
    "leases": ("renew", "renew_many", "progress"),
    "endings": ("complete", "complete_many", "fail", "release", "delay"),
    "creates": ("create_execution", "create_keyed", "create_executions", "create_executions_keyed"),
    "transactions": (
        "create_executions_keyed_second_statement",
        "create_member",
        "complete_member",
        "fail_member",
        "wait_children",
        "wait_children_second_statement",
    ),
}


def test_every_operation_is_in_a_family() -> None:
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(OPERATIONS)


@pytest.mark.parametrize("family", FAMILIES)
async def test_an_operation_cancelled_while_it_waits_for_a_lock_leaves_nothing_behind(
    dsn: str, open_engine: Callable[..., Any], sql: Connection, family: str
) -> None:
    """Show: cancel each operation in the middle, both ways: no session active, in transaction or holding locks."""
    async with open_engine(pool_max=1) as engine:
        for operation in FAMILIES[family]:
            try:
                await cancel_in_the_middle(dsn, Rig(engine, sql), operation)
            except BaseException as error:
                error.add_note(f"operation: {operation}")
                raise
            await sql.execute("truncate ff_exec_core, ff_attempt, ff_exec_dedup, ff_flow_core")
            await sql.execute("truncate ff_completion_event, ff_lease_event")


async def cancel_in_the_middle(dsn: str, rig: Rig, operation: str) -> None:
    engine, sql, blocked = rig.engine, rig.sql, OPERATIONS[operation]
    claim = await prepare(engine, sql, is_member=operation in MEMBERS)
    for cancel in (cancel_by_asyncio, cancel_by_scope):
        before = await rig.fingerprint()
        async with held(dsn, blocked.blocker(claim)) as holder:
            await cancel(lambda: blocked.call(engine, claim), lambda: until_blocked(sql, blocked.statement))
            # At once, on the only connection, while the row is still held.
            with anyio.fail_after(5):
                await engine.create_execution(lane="elsewhere")
                await engine.create_executions([NewExecution(lane="elsewhere")])
            await until_quiet(sql)
            await holder.execute("rollback")
        # Whatever waited for the row does not wake up and go on behind the caller's back.
        await sql.execute("delete from ff_exec_core where lane_id = 'elsewhere'")
        assert await rig.fingerprint() == before
        await until_quiet(sql)
    # The operation itself is as good as ever.
    with anyio.fail_after(10):
        await blocked.call(engine, claim)
    await until_quiet(sql)
    await assert_invariants(sql)


@pytest.mark.parametrize("cancel", [cancel_by_asyncio, cancel_by_scope], ids=["asyncio", "anyio"])
async def test_a_cancelled_wait_for_a_connection_keeps_the_pool_whole(
    dsn: str, open_engine: Callable[..., Any], sql: Connection, cancel: Cancel
) -> None:
    """Show: cancelled while all connections are busy: the next in line is served, the pool does not shrink."""
    async with open_engine(pool_max=1) as engine:
        rig = Rig(engine, sql)
        claim = await rig.running()
        async with held(dsn, exec_row(claim.execution_id)) as holder:
            first = asyncio.ensure_future(engine.complete(claim.handle))
            await until_blocked(sql, "complete")

            async def is_queued() -> None:
                for _ in range(10):
                    await asyncio.sleep(0)

            await cancel(lambda: engine.create_execution(lane="never"), is_queued)
            last = asyncio.ensure_future(engine.create_execution(lane="last"))
            await is_queued()
            await holder.execute("rollback")
            await first
            with anyio.fail_after(5):
                await last
        await until_idle(engine)
        assert engine._runtime.db.pool(Planning.GENERIC).idle == 1
        assert await sql.fetchval("select count(*) from ff_exec_core where lane_id = 'never'") == 0


async def test_a_waiter_cancelled_in_the_moment_a_connection_comes_free_is_cancelled_and_nothing_else(
    open_engine: Callable[..., Any],
) -> None:
    """Show: cancellation and release in one turn of the loop: CancelledError, and the connection is not lost."""
    async with open_engine(pool_max=1) as engine:
        pool = engine._runtime.db.pool(Planning.GENERIC)
        connection = await pool.acquire()
        waiter = asyncio.ensure_future(pool.acquire())
        for _ in range(3):
            await asyncio.sleep(0)
        waiter.cancel()
        pool.release(connection)
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert (pool.idle, pool.busy) == (1, 0)


async def test_a_waiter_cancelled_with_a_connection_in_hand_gives_it_to_the_next(
    open_engine: Callable[..., Any],
) -> None:
    """Show: release and then cancellation in one turn of the loop: the next in line gets the connection."""
    async with open_engine(pool_max=1) as engine:
        pool = engine._runtime.db.pool(Planning.GENERIC)
        connection = await pool.acquire()
        waiters = [asyncio.ensure_future(pool.acquire()) for _ in range(2)]
        for _ in range(3):
            await asyncio.sleep(0)
        pool.release(connection)
        waiters[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]
        with anyio.fail_after(5):
            assert await waiters[1] is connection
        pool.release(connection)
        assert (pool.idle, pool.busy) == (1, 0)


async def test_waiters_stay_served_when_callers_time_out_all_the_time(
    open_engine: Callable[..., Any], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: many callers with short timeouts on two connections: each gets its answer or its own timeout."""
    outcomes = {"done": 0, "timed out": 0}
    async with open_engine(pool_max=2) as engine:

        async def caller() -> None:
            for _ in range(rounds):
                with anyio.move_on_after(rng.choice((rng.uniform(0, 0.01), 5.0))) as scope:
                    await engine.create_execution(lane="busy")
                outcomes["timed out" if scope.cancelled_caught else "done"] += 1

        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(caller)
        await until_idle(engine)
        await until_quiet(sql)
        assert await sql.fetchval("select count(*) from ff_exec_core") >= outcomes["done"]
    assert all(outcomes.values()), outcomes


async def test_operations_cancelled_at_random_points_keep_every_invariant(
    open_engine: Callable[..., Any], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: cancel at random points in a loop: every call either happened or did not, nothing in between."""
    cancelled = 0
    async with open_engine(pool_max=4) as engine:

        async def life() -> None:
            nonlocal cancelled
            claims: list[Claim] = []
            for _ in range(rounds * 4):
                handle = claims[-1].handle if claims else None
                calls: list[Callable[[], Awaitable[object]]] = [
                    lambda: engine.create_execution(lane="random", idempotency_key=str(rng.random())),
                    lambda: engine.create_executions([NewExecution(lane="random", idempotency_key=str(rng.random()))]),
                    lambda: engine.claim("random", lease_ttl_ms=rng.choice((20, 30_000)), **WORKER),
                    lambda: engine.claim_many("random", 2, **WORKER),
                ]
                if handle is not None:
                    calls += [
                        partial(engine.renew, handle),
                        partial(engine.complete, handle),
                        partial(engine.complete_many, [(handle, None)]),
                        partial(engine.fail, handle, "x", FailureClass.TRANSIENT),
                        partial(engine.release, handle),
                    ]
                call = rng.choice(calls)
                patience_s = rng.choice((rng.uniform(0, 0.002), rng.uniform(0, 0.01), 10.0))
                with suppress(EngineError), anyio.move_on_after(patience_s) as scope:
                    answer = await call()
                    if isinstance(answer, Claim):
                        claims.append(answer)
                    elif isinstance(answer, list):
                        claims.extend(each for each in answer if isinstance(each, Claim))
                cancelled += scope.cancelled_caught

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(life)
        await until_idle(engine)
        await until_quiet(sql)
        await sql.fetchval(EXPIRE)
        await assert_invariants(sql)
        with anyio.fail_after(10):
            await engine.create_execution(lane="random")
            assert await engine.claim("random", **WORKER) is not None
    assert cancelled, "nothing was cancelled: the test proves nothing"
