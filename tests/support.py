"""Shorthand for tests: a rig around an engine, and a clock that can be moved."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypedDict

import anyio
import asyncpg
import pytest

from ffd import Claim, Engine, EngineError, Handle, HandleKind
from ffd.core.handles import Lease, read_lease
from ffd.core.ids import parse_execution_id


class Who(TypedDict):
    """The worker's part of a claim."""

    worker_id: str
    worker_instance_id: str


WORKER: Who = {"worker_id": "w", "worker_instance_id": "w-1"}
OTHER: Who = {"worker_id": "other", "worker_instance_id": "other-1"}

# Time stands still in this database until a test moves it; every session sees a move at its next statement.
MOVABLE_CLOCK = """
create table ff_test_clock (now_ms bigint not null);
insert into ff_test_clock values (ff_now_ms());
create or replace function ff_now_ms() returns bigint language plpgsql stable parallel safe as $$
begin
  return (select now_ms from ff_test_clock);
end $$;
"""


async def install_clock(sql: asyncpg.Connection[Any]) -> None:
    """Give a test database the movable clock. Production has none: its function reads no setting."""
    await sql.execute(MOVABLE_CLOCK)


async def until(is_so: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Poll until something is so (a value or an awaitable of one); an assertion error when it never is."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = is_so()
        if await value if inspect.isawaitable(value) else value:
            return
        assert time.monotonic() < deadline, "it did not happen in time"
        await anyio.sleep(0.005)


class Clock:
    """The database clock of one test."""

    def __init__(self, sql: asyncpg.Connection[Any]) -> None:
        self._sql = sql

    async def now_ms(self) -> int:
        """The time on the database clock."""
        return int(await self._sql.fetchval("select ff_now_ms()"))

    async def advance(self, ms: int) -> None:
        """Move the clock."""
        await self._sql.execute("update ff_test_clock set now_ms = now_ms + $1", ms)


# What the lease_expiry reconciler will do, in plain SQL.
EXPIRE = """
with d as materialized (
  select e.partition_key, e.execution_id, e.attempt_index from ff_attempt q
  cross join lateral (
    select partition_key, execution_id, attempt_index from ff_exec_core e
    where e.partition_key = q.partition_key and e.execution_id = q.execution_id
      and e.attempt_index = q.attempt_index and e.lifecycle_phase = 'active' for no key update skip locked) e
  cross join lateral (
    select 1 from ff_attempt a where a.partition_key = q.partition_key and a.execution_id = q.execution_id
      and a.attempt_index = q.attempt_index and coalesce(a.lease_expires_at_ms, 9e18::bigint) <= ff_now_ms()
    for no key update skip locked) a
  where q.lease_expires_at_ms <= ff_now_ms()),
a as (
  update ff_attempt t set lease_expires_at_ms = null, lease_epoch = t.lease_epoch + 1,
         outcome = 'lease_expired_reclaimable'
  from d where t.partition_key = d.partition_key and t.execution_id = d.execution_id
    and t.attempt_index = d.attempt_index
  returning t.partition_key, t.execution_id, t.lease_epoch, t.attempt_index),
x as (
  update ff_exec_core e set lifecycle_phase = 'runnable', ownership_state = 'unowned',
         eligibility_state = 'eligible_now', public_state = 'waiting', attempt_state = 'attempt_interrupted',
         interruption = 'lease_expiry', lease_epoch = greatest(e.lease_epoch, a.lease_epoch),
         lease_reclaim_count = lease_reclaim_count + 1
  from a where e.partition_key = a.partition_key and e.execution_id = a.execution_id
  returning e.partition_key, e.execution_id, a.attempt_index, a.lease_epoch),
v as (
  insert into ff_lease_event
    (partition_key, execution_id, event_type, cause, occurred_at_ms, attempt_index, lease_epoch)
  select partition_key, execution_id::text, 'expired', 'lease_expiry', ff_now_ms(), attempt_index, lease_epoch from x)
select count(*) from x
"""


class Rig:
    """An engine and a look behind it."""

    def __init__(self, engine: Engine, sql: asyncpg.Connection[Any]) -> None:
        self.engine = engine
        self.sql = sql

    async def create(self, **kwargs: Any) -> str:
        """A new execution's id."""
        return (await self.engine.create_execution(**kwargs)).execution_id

    async def claim(self, lane: str = "default", **kwargs: Any) -> Claim:
        """A claim that must succeed."""
        claim = await self.engine.claim(lane, **{**WORKER, **kwargs})
        assert claim is not None
        return claim

    async def running(self, **kwargs: Any) -> Claim:
        """A new execution, claimed."""
        await self.create(**kwargs)
        return await self.claim(kwargs.get("lane", "default"))

    async def expire(self) -> int:
        """Sweep expired leases; how many there were."""
        return int(await self.sql.fetchval(EXPIRE))

    async def core(self, execution_id: str) -> asyncpg.Record:
        """The stored execution."""
        row: asyncpg.Record | None = await self.sql.fetchrow(
            "select * from ff_exec_core where partition_key = $1 and execution_id = $2",
            *parse_execution_id(execution_id),
        )
        assert row is not None
        return row

    async def state(self, execution_id: str) -> tuple[str, str, str, str, str]:
        """The five columns of the state vector."""
        row = await self.core(execution_id)
        return (
            row["public_state"],
            row["lifecycle_phase"],
            row["ownership_state"],
            row["eligibility_state"],
            row["attempt_state"],
        )

    async def attempt(self, execution_id: str, index: int = 0) -> asyncpg.Record:
        """A stored attempt."""
        row: asyncpg.Record | None = await self.sql.fetchrow(
            "select * from ff_attempt where partition_key = $1 and execution_id = $2 and attempt_index = $3",
            *parse_execution_id(execution_id),
            index,
        )
        assert row is not None
        return row

    async def lease_events(self, execution_id: str) -> list[tuple[str, str | None]]:
        """(type, cause) of every lease event, in order."""
        rows = await self.sql.fetch(
            "select event_type, cause from ff_lease_event where execution_id = $1 order by event_id",
            str(parse_execution_id(execution_id).execution_id),
        )
        return [(row["event_type"], row["cause"]) for row in rows]

    async def completions(self, execution_id: str) -> list[str]:
        """The outcomes of every completion event, in order."""
        rows = await self.sql.fetch(
            "select outcome from ff_completion_event where execution_id = $1 order by event_id",
            parse_execution_id(execution_id).execution_id,
        )
        return [row["outcome"] for row in rows]

    async def operator_events(self, entity_id: str) -> list[dict[str, Any]]:
        """Every operator event of an execution or a flow, in order, with its details decoded."""
        rows = await self.sql.fetch(
            "select * from ff_operator_event where execution_id = $1 order by event_id", entity_id.rpartition(":")[2]
        )
        return [{**row, "details": json.loads(row["details"])} for row in rows]

    async def public(self, execution_id: str) -> str:
        """The public state."""
        return str((await self.core(execution_id))["public_state"])

    async def claim_of(self, execution_id: str) -> Claim:
        """Claim one execution that has a lane of its own."""
        return await self.claim((await self.core(execution_id))["lane_id"])

    async def fingerprint(self) -> str:
        """A digest of everything stored: equal before and after a call that changed nothing.

        Without the lane registry, which is filled in the background.
        """
        tables = await self.sql.fetch(
            "select tablename from pg_tables where schemaname = 'public' and tablename <> 'ff_lane_registry' order by 1"
        )
        assert len(tables) > 15
        parts = [
            await self.sql.fetchval(f"select md5(string_agg(t::text, '|' order by t::text)) from {row['tablename']} t")
            for row in tables
        ]
        return "/".join(part or "" for part in parts)

    async def refused(self, call: Awaitable[Any]) -> EngineError:
        """The error of a call that must be refused and must change nothing."""
        before = await self.fingerprint()
        with pytest.raises(EngineError) as info:
            await call
        assert await self.fingerprint() == before, "a refused call changed something"
        return info.value


def stale(claim: Claim, *, epoch: int = 0, attempt: int = 0) -> Handle:
    """The claim's handle with another epoch or attempt."""
    lease = read_lease(claim.handle)
    return Handle.of_lease(
        HandleKind.FRESH,
        Lease(
            lease.partition_key,
            lease.execution_id,
            lease.attempt_index + attempt,
            lease.lease_epoch + epoch,
            lease.lease_ttl_ms,
            lease.lane,
            lease.worker_instance_id,
        ),
    )
