"""Cancelling a set of executions of one partition, by an operator, a race or a flow.

Two statements, always: the first locks, the second reads and writes with a snapshot of its own. In one statement, an
attempt that was opened while it waited for the lock would not be seen, and its owner not fenced (I1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement

# Before each look at rows that somebody held a moment ago.
HELD_PAUSES_S: Final = (0.0, 0.005, 0.02, 0.05)

# $1 partition_key, $2 ids in lock order. Rows that somebody holds are left out, and so are those that have ended.
LOCK_FREE: Final = Statement(
    "lock_free",
    """
    select e.execution_id from unnest($2::uuid[]) k(id) cross join lateral (
      select execution_id from ff_exec_core
      where partition_key = $1 and execution_id = k.id and lifecycle_phase not in ('terminal', 'cancelled')
      for no key update skip locked) e
    """,
    Planning.CUSTOM,
)

STILL_OPEN: Final = Statement(
    "still_open",
    """
    with k as materialized (select $1::smallint as p, k.id from unnest($2::uuid[]) k(id))
    select e.execution_id from k cross join lateral (
      select execution_id from ff_exec_core
      where partition_key = k.p and execution_id = k.id and lifecycle_phase not in ('terminal', 'cancelled')) e
    """,
    Planning.CUSTOM,
)

# $1 partition_key, $2 ids, $3 their reasons, $4 who cancels. The rows are locked. Everything that hangs on an
# execution closes with it: lease, suspension, waitpoints, grants.
CANCEL_LOCKED: Final = Statement(
    "cancel_locked",
    """
    with k as materialized (
      select $1::smallint as p, k.id, k.reason, ff_now_ms() as now from unnest($2::uuid[], $3::text[]) k(id, reason)),
    b as materialized (
      select k.p, k.id, k.reason, k.now, e.attempt_index, e.lifecycle_phase, e.eligibility_state, e.public_state,
             t.worker_id, t.worker_instance_id, t.lease_epoch
      from k cross join lateral (
        select attempt_index, lifecycle_phase, eligibility_state, public_state from ff_exec_core
        where partition_key = k.p and execution_id = k.id and lifecycle_phase not in ('terminal', 'cancelled')
        offset 0) e
      left join lateral (
        select worker_id, worker_instance_id, lease_epoch from ff_attempt
        where partition_key = k.p and execution_id = k.id and attempt_index = e.attempt_index
        offset 0) t on true),
    a as (
      update ff_attempt t
      set outcome = 'cancelled', terminal_at_ms = b.now, worker_instance_id = null, lease_expires_at_ms = null,
          timeout_at_ms = null, lease_epoch = t.lease_epoch + case b.lifecycle_phase when 'active' then 1 else 0 end
      from b where t.partition_key = b.p and t.execution_id = b.id and t.attempt_index = b.attempt_index
      returning t.execution_id, t.lease_epoch),
    x as (
      update ff_exec_core e
      set [[cancelled]], terminal_at_ms = b.now, state_since_ms = b.now, cancellation_reason = b.reason,
          cancelled_by = $4, delay_until_ms = null, interruption = null,
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from b left join a on a.execution_id = b.id
      where e.partition_key = b.p and e.execution_id = b.id
      returning e.partition_key, e.execution_id, e.flow_id, e.attempt_index, e.raw_fields, e.lease_epoch as new_epoch,
                b.now, b.lifecycle_phase, b.eligibility_state, b.public_state, b.worker_id, b.worker_instance_id,
                b.lease_epoch),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'cancelled', x.now, x.now, [[origin x]] from x),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'revoked', 'cancelled', x.now, x.attempt_index, x.lease_epoch,
             x.worker_id, x.worker_instance_id, [[origin x]]
      from x where x.lifecycle_phase = 'active'),
    s as (
      update ff_suspension_current t set timeout_at_ms = null, closed_at_ms = x.now, close_reason = 'cancelled'
      from x where t.partition_key = x.partition_key and t.execution_id = x.execution_id and t.closed_at_ms is null),
    w as (
      delete from ff_waitpoint_pending t using x
      where t.partition_key = x.partition_key and t.execution_id = x.execution_id),
    g as (
      delete from ff_claim_grant t using x
      where t.partition_key = x.partition_key and t.execution_id = x.execution_id)
    select execution_id, lifecycle_phase, eligibility_state, public_state, attempt_index, lease_epoch, new_epoch,
           worker_id, worker_instance_id, raw_fields, now
    from x
    """,
    Planning.CUSTOM,
)


async def cancel_locked(
    connection: Connection, partition_key: int, ids: Sequence[UUID], reasons: Sequence[str], cancelled_by: str
) -> list[Row]:
    """Cancel executions whose rows this transaction holds; what each was before, for those that had not ended."""
    rows: list[Row] = await connection.fetch(CANCEL_LOCKED.sql, partition_key, ids, reasons, cancelled_by)
    return rows


async def cancel_free(
    connection: Connection, partition_key: int, reasons: dict[UUID, str], cancelled_by: str
) -> tuple[list[UUID], list[UUID]]:
    """Cancel those whose rows nobody holds. Who was cancelled, and who is held and has not ended.

    A call of the engine holds a row for a moment, so there are a few tries; a user's transaction may hold it for long.
    """
    done: list[UUID] = []
    left = sorted(reasons)
    for pause_s in HELD_PAUSES_S:
        if not left:
            break
        await asyncio.sleep(pause_s)
        rows = await connection.fetch(LOCK_FREE.sql, partition_key, left)
        ids = [row["execution_id"] for row in rows]
        if ids:
            await cancel_locked(connection, partition_key, ids, [reasons[one] for one in ids], cancelled_by)
        done += ids
        left = sorted(set(left) - set(ids))
        if left:
            left = [row["execution_id"] for row in await connection.fetch(STILL_OPEN.sql, partition_key, left)]
    return done, left
