"""What races need: to see who waits for whom, to let calls collide, and to check what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import asyncpg

from ffd import Claim, Contention, ContentionKind, Engine, EngineError, State, StateKind
from ffd.core.ids import parse_execution_id
from ffd.db.pool import Connection
from ffd.db.statement import Planning
from tests.support import OTHER, Clock, Rig

Call = Callable[[], Awaitable[Any]]

POLL_S = 0.01
DEADLINE_S = 20.0
JITTER_S = 0.003

# The lease of Rig.claim.
TTL_MS = 30_000


async def until(condition: Callable[[], Awaitable[object]], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; fail when it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await anyio.sleep(POLL_S)


async def until_blocked(sql: Connection, *statements: str, count: int = 1) -> None:
    """Wait until `count` sessions of this database wait for a lock inside one of these statements."""
    assert not sql.is_in_transaction(), "the server shows a transaction the same activity all the time"

    async def is_blocked() -> bool:
        found = await sql.fetchval(
            """
            select count(*) from pg_stat_activity
            where datname = current_database() and wait_event_type = 'Lock' and state = 'active'
              and substring(query from '^/\\* ffd:(\\w+) \\*/') = any($1::text[])
            """,
            statements,
        )
        return bool(found >= count)

    await until(is_blocked, f"{count} x {statements} waiting for a lock")


async def unquiet_sessions(sql: Connection) -> list[asyncpg.Record]:
    """The engine's pooled sessions that do anything, or hold anything, at this moment."""
    return await sql.fetch(
        """
        select a.pid, a.state, a.wait_event_type, left(a.query, 60) as query,
               (select count(*) from pg_locks l where l.pid = a.pid) as locks
        from pg_stat_activity a
        where a.datname = current_database() and a.application_name = 'ffd'
          and (a.state <> 'idle' or exists (select 1 from pg_locks l where l.pid = a.pid))
        """
    )


async def until_quiet(sql: Connection, timeout_s: float = DEADLINE_S) -> None:
    """Wait until no session of the engine is active, in a transaction, or holds a lock."""

    async def is_quiet() -> bool:
        return not await unquiet_sessions(sql)

    await until(is_quiet, "every session of the engine at rest", timeout_s)


async def until_idle(engine: Engine) -> None:
    """Wait until the engine uses none of its pooled connections, also not for its own purposes."""

    async def is_idle() -> bool:
        return all(engine._runtime.db.pool(planning).busy == 0 for planning in Planning)

    await until(is_idle, "every connection given back")


@asynccontextmanager
async def held(dsn: str, *commands: str) -> AsyncIterator[Connection]:
    """A session whose open transaction has run `commands`; it is rolled back unless the test ends it."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("begin")
        for command in commands:
            await connection.execute(command)
        yield connection
    finally:
        await connection.close()


def exec_row(execution_id: str) -> str:
    """SQL that locks an execution's row."""
    key = parse_execution_id(execution_id)
    return (
        f"select 1 from ff_exec_core where partition_key = {key.partition_key}"
        f" and execution_id = '{key.execution_id}' for update"
    )


def attempt_row(execution_id: str) -> str:
    """SQL that locks an execution's attempts."""
    key = parse_execution_id(execution_id)
    return (
        f"select 1 from ff_attempt where partition_key = {key.partition_key}"
        f" and execution_id = '{key.execution_id}' for update"
    )


async def race(rng: random.Random, *calls: Call) -> list[Any]:
    """Let calls collide: started in random order with random little delays. Each one's result or EngineError."""
    order = list(range(len(calls)))
    rng.shuffle(order)

    async def run(at: int, delay_s: float) -> Any:
        await anyio.sleep(delay_s)
        return await calls[at]()

    # Half of the time all at once, so that neither side is always the first.
    delays = [rng.choice((0.0, rng.uniform(0, JITTER_S))) for _ in calls]
    found = await asyncio.gather(*(run(at, delays[at]) for at in order), return_exceptions=True)
    results: list[Any] = [None] * len(calls)
    for at, result in zip(order, found, strict=True):
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
        results[at] = result
    return results


def both_ways(endings: Counter[Any], rounds: int, ways: int = 2) -> bool:
    """Whether to run a race again: `rounds` times, and until each of its endings was seen at least once."""
    done = endings.total()
    assert done < 100 * rounds, f"a race that always ends the same way is none: {endings}"
    return done < rounds or len(endings) < ways


def is_fenced(answer: object) -> bool:
    """Whether an answer is one of the refusals that a lost lease may get."""
    return (isinstance(answer, Contention) and answer.kind == ContentionKind.LEASE_CONFLICT) or (
        isinstance(answer, State) and answer.kind == StateKind.LEASE_EXPIRED
    )


async def lose_lease(rig: Rig, clock: Clock) -> int:
    """Time passes the lease's end, and the sweep comes by; how many leases it took."""
    await clock.advance(TTL_MS + 1)
    return await rig.expire()


async def reclaim(rig: Rig, lost: Claim) -> Claim:
    """The execution must be claimable again, by a larger epoch."""
    again = await rig.claim(**OTHER)
    assert again.execution_id == lost.execution_id
    assert again.attempt_index == lost.attempt_index
    assert again.lease_epoch > lost.lease_epoch
    return again


# Each query finds executions for which an invariant does not hold.
INVARIANTS = {
    "I2: one completion event for an ended execution, none for another": """
        select e.execution_id from ff_exec_core e
        left join (select execution_id, count(*) as n from ff_completion_event
                   where outcome <> 'resumable' group by execution_id) c on c.execution_id = e.execution_id
        where coalesce(c.n, 0) <> case when e.lifecycle_phase in ('terminal', 'cancelled') then 1 else 0 end
        """,
    "I1: a running execution has one live attempt, its current one; no other has any": """
        select e.execution_id from ff_exec_core e
        left join ff_attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
          and a.lease_expires_at_ms is not null
        group by e.partition_key, e.execution_id
        having count(a.attempt_index) filter (where a.attempt_index = e.attempt_index)
                 <> case when e.lifecycle_phase = 'active' then 1 else 0 end
            or count(a.attempt_index) filter (where a.attempt_index <> e.attempt_index) > 0
        """,
    "I1: the counter on the execution is not behind the fence of any attempt": """
        select e.execution_id from ff_exec_core e
        join ff_attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
        where a.lease_epoch > e.lease_epoch
        """,
    "I1: every owner has a larger epoch than the one before, the first has 1": """
        select execution_id from (
          select execution_id, lease_epoch, lag(lease_epoch) over w as before from ff_lease_event
          where event_type in ('acquired', 'reclaimed')
          window w as (partition by execution_id order by event_id)) o
        where lease_epoch <= before or (before is null and lease_epoch <> 1)
        """,
    "I3: each lease taken has its event, and each lease that ended has one": """
        select e.execution_id from ff_exec_core e
        left join ff_lease_event v on v.execution_id = e.execution_id::text
        group by e.partition_key, e.execution_id
        having count(*) filter (where v.event_type in ('acquired', 'reclaimed'))
             - count(*) filter (where v.event_type in ('revoked', 'expired'))
            <> case when e.lifecycle_phase = 'active' then 1 else 0 end
        """,
    "I2: the outcome of the last attempt is the ending of the execution": """
        select e.execution_id from ff_exec_core e
        join ff_attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
          and a.attempt_index = e.attempt_index
        where (e.public_state = 'completed') <> (coalesce(a.outcome, '') = 'success')
           or (e.public_state = 'failed') <> (coalesce(a.outcome, '') = 'failed')
        """,
}


async def assert_invariants(sql: Connection) -> None:
    """Check, over everything stored, what must hold under any interleaving."""
    for invariant, violations in INVARIANTS.items():
        rows = await sql.fetch(violations)
        assert not rows, f"{invariant}: {[str(row['execution_id']) for row in rows[:5]]}"
