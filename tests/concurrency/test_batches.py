"""Batches over the same rows, in any order, from many connections: nobody deadlocks, nothing is counted twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from ffd import (
    Contention,
    ContentionKind,
    EngineError,
    FailureClass,
    Handle,
    LeaseRenewal,
    NewExecution,
    State,
    StateKind,
)
from ffd.db.pool import Connection
from tests.concurrency.conftest import ServerLog
from tests.concurrency.sessions import assert_invariants, until
from tests.support import EXPIRE, WORKER

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

EXECUTIONS = 60
# Some leases run out under their owners' hands, some do not.
TTLS_MS = (50, 200, 1_000, 3_000)

# What an owner may be told when somebody else was faster.
LOST = {
    ContentionKind.LEASE_CONFLICT,
    ContentionKind.EXECUTION_NOT_ACTIVE,
    StateKind.LEASE_EXPIRED,
    # Refused, and by the time of the second look nothing stood against it any more.
    ContentionKind.RETRY_EXHAUSTED,
}


async def test_the_log_shows_deadlocks_by_their_sqlstate(dsn: str, server_log: ServerLog) -> None:
    """The check after every race can fail: a real deadlock is found in the server's log."""
    connections = [await asyncpg.connect(dsn) for _ in range(2)]
    await connections[0].execute("create table spots (id int primary key); insert into spots values (0), (1)")
    for at, connection in enumerate(connections):
        await connection.execute("begin")
        await connection.execute(f"update spots set id = id where id = {at}")

    async def cross(at: int) -> str | None:
        try:
            await connections[at].execute(f"update spots set id = id where id = {1 - at}")
            await connections[at].execute("commit")
        except asyncpg.PostgresError as error:
            return str(error.sqlstate)
        return None

    answers: list[str | None] = []

    async def run(at: int) -> None:
        answers.append(await cross(at))

    async with anyio.create_task_group() as group:
        group.start_soon(run, 0)
        group.start_soon(run, 1)
    assert sorted(answers, key=str) == ["40P01", None]
    for connection in connections:
        await connection.close()
    assert len([line for line in server_log.deadlocks() if "40P01" in line]) >= 1
    server_log.forget()


async def test_batches_on_overlapping_handles_in_any_order_do_not_deadlock(
    open_engine: Callable[..., Any], dsn: str, sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: claim_many, renew_many and complete_many from many connections with sweeps: no 40P01 in the log."""
    started = time.monotonic()
    handles: list[Handle] = []
    done: dict[str, int] = {"claimed": 0, "renewed": 0, "completed": 0, "swept": 0, "ended singly": 0}

    def goes_on() -> bool:
        """For rounds / 5 seconds; on a slow machine until everybody has achieved something."""
        seconds = time.monotonic() - started
        return seconds < min(rounds / 5, 60) or (not all(done.values()) and seconds < 120)

    async with open_engine(pool_max=16) as engine:
        await engine.create_executions([NewExecution(lane="batch")] * EXECUTIONS)

        def some(most: int) -> list[Handle]:
            """Recent handles, some of them lost already, some twice, in random order."""
            recent = handles[-3 * EXECUTIONS :]
            chosen = rng.sample(recent, min(most, len(recent)))
            return chosen + chosen[:2]

        async def claimer() -> None:
            while goes_on():
                claims = await engine.claim_many(
                    "batch", rng.randint(1, 20), lease_ttl_ms=rng.choice(TTLS_MS), **WORKER
                )
                handles.extend(claim.handle for claim in claims)
                done["claimed"] += len(claims)
                missing = EXECUTIONS - await sql_count()
                for _ in range(max(0, missing)):
                    await engine.create_execution(lane="batch", priority=rng.randint(0, 3))

        async def renewer() -> None:
            while goes_on():
                answers = await engine.renew_many(some(20))
                for answer in answers:
                    assert isinstance(answer, LeaseRenewal) or answer.kind in LOST, answer
                done["renewed"] += sum(isinstance(answer, LeaseRenewal) for answer in answers)
                await anyio.lowlevel.checkpoint()

        async def completer() -> None:
            while goes_on():
                for answer in await engine.complete_many([(handle, b"x") for handle in some(4)]):
                    assert answer is None or answer.kind in LOST, answer
                    done["completed"] += answer is None
                await anyio.sleep(rng.uniform(0, 0.02))

        async def single() -> None:
            while goes_on():
                for handle in some(1)[:1]:
                    end = rng.choice((engine.complete, engine.release, engine.renew, fail))
                    try:
                        await end(handle)
                    except EngineError as error:
                        assert error.kind in LOST, error
                    else:
                        done["ended singly"] += 1
                await anyio.sleep(rng.uniform(0, 0.02))

        async def fail(handle: Handle) -> None:
            await engine.fail(handle, "oops", FailureClass.PERMANENT)

        async def sweeper() -> None:
            connection = await asyncpg.connect(dsn)
            try:
                while goes_on():
                    done["swept"] += await connection.fetchval(EXPIRE)
                    await anyio.sleep(0.01)
            finally:
                await connection.close()

        counting = anyio.Lock()

        async def sql_count() -> int:
            async with counting:
                return int(await sql.fetchval("select count(*) from ff_exec_core where lifecycle_phase <> 'terminal'"))

        async with anyio.create_task_group() as group:
            for task, count in ((claimer, 3), (renewer, 5), (completer, 3), (single, 2), (sweeper, 3)):
                for _ in range(count):
                    group.start_soon(task)

    assert all(done.values()), f"one side did nothing: {done}"
    await assert_invariants(sql)


async def test_the_same_batch_completed_by_many_at_once_ends_each_execution_once(
    open_engine: Callable[..., Any], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: complete_many of one owner's handles from eight connections: all succeed, one event each."""
    async with open_engine(pool_max=8) as engine:
        for _ in range(rounds):
            for _ in range(20):
                await engine.create_execution(lane="batch")
            claims = await engine.claim_many("batch", 20, **WORKER)
            answers: list[EngineError | None] = []

            async def complete(order: list[Handle], answers: list[EngineError | None] = answers) -> None:
                answers.extend(await engine.complete_many([(handle, None) for handle in order]))

            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(complete, rng.sample([claim.handle for claim in claims], 20))
            assert answers == [None] * 160
    assert await sql.fetchval("select count(*) from ff_completion_event") == 20 * rounds
    await assert_invariants(sql)


async def test_a_lost_lease_in_a_batch_is_refused_alone(sql: Connection, open_engine: Callable[..., Any]) -> None:
    """Show: one stale handle in complete_many and renew_many is answered by its error, the others are served."""
    async with open_engine() as engine:
        for _ in range(3):
            await engine.create_execution(lane="batch")
        claims = await engine.claim_many("batch", 3, lease_ttl_ms=1, **WORKER)

        async def has_expired() -> bool:
            found = await sql.fetchval("select bool_and(lease_expires_at_ms <= ff_now_ms()) from ff_attempt")
            return bool(found)

        await until(has_expired, "the leases have run out")
        for answer in await engine.renew_many([claim.handle for claim in claims]):
            assert isinstance(answer, State)
            assert answer.kind == StateKind.LEASE_EXPIRED
        assert await sql.fetchval(EXPIRE) == 3
        again = await engine.claim_many("batch", 2, **WORKER)
        mixed = [claims[0].handle, again[0].handle, claims[1].handle, again[1].handle, claims[2].handle]
        answers = await engine.complete_many([(handle, None) for handle in mixed])
    assert [answer is None for answer in answers] == [False, True, False, True, False]
    for answer in answers:
        assert answer is None or (isinstance(answer, Contention) and answer.kind == ContentionKind.LEASE_CONFLICT)
