"""An owner gives its lease back without ending anything: release, delay, wait for children.

The attempt stays open and is continued by whoever claims next. The epoch does not rise here: the empty expiry
fences the old owner, and the next claim raises it (I1).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from ffd.core.checks import check_time_ms
from ffd.core.errors import EngineError, State, StateKind
from ffd.core.events import LEASE_RINGS, work_ring
from ffd.core.handles import Handle, Lease, read_lease
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Statement
from ffd.ops.fence import CLASSIFY, inconclusive, refusal
from ffd.ops.flow_lock import lock_flow
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    "lock": """
      k as materialized (
        select 1 from ff_exec_core
        where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active'
        for no key update),
      l as materialized (select ff_now_ms() as now from k)""",
    "still owned": """
      t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
        and coalesce(t.lease_expires_at_ms, 0) > l.now""",
    "given back": """
      returning l.now, t.lease_epoch, t.worker_id, t.worker_instance_id""",
    "event columns": """
      e.partition_key, e.execution_id, e.lane_id, e.raw_fields, a.now, a.lease_epoch, a.worker_id,
      a.worker_instance_id""",
}

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 lease_epoch
RELEASE: Final = Statement(
    "release",
    """
    with [[lock]],
    a as (
      update ff_attempt t set outcome = 'interrupted', lease_expires_at_ms = null, timeout_at_ms = null
      from l where [[still owned]] [[given back]]),
    x as (
      update ff_exec_core e
      set [[waiting_interrupted]], interruption = 'released', state_since_ms = a.now,
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = $1 and e.execution_id = $2
      returning [[event columns]]),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'revoked', 'released', x.now, $3, x.lease_epoch, x.worker_id,
             x.worker_instance_id, [[origin x]] from x)
    select 'waiting_interrupted' as next_row, lane_id from x
    """,
    phrases=_PHRASES,
)

# $5 until_ms. A time that has come already makes the execution claimable at once, without the promoter.
DELAY: Final = Statement(
    "delay",
    """
    with [[lock]],
    a as (
      update ff_attempt t set outcome = 'interrupted', lease_expires_at_ms = null, timeout_at_ms = null
      from l where [[still owned]]
      returning l.now, t.lease_epoch, t.worker_id, t.worker_instance_id,
                case when $5::bigint > l.now then 'delayed_interrupted' else 'waiting_interrupted' end as next_row),
    x as (
      update ff_exec_core e
      set [[by a.next_row: delayed_interrupted, waiting_interrupted]], interruption = 'delayed',
          delay_until_ms = case a.next_row when 'delayed_interrupted' then $5::bigint end, state_since_ms = a.now,
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = $1 and e.execution_id = $2
      returning [[event columns]], a.next_row),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'revoked', 'delayed', x.now, $3, x.lease_epoch, x.worker_id,
             x.worker_instance_id, [[origin x]] from x)
    select next_row, lane_id from x
    """,
    phrases=_PHRASES,
)

# $5 whether edges into this member are still open; the transaction holds the flow row, so none can change.
WAIT_CHILDREN: Final = Statement(
    "wait_children",
    """
    with [[lock]],
    a as (
      update ff_attempt t set outcome = 'waiting_children', lease_expires_at_ms = null, timeout_at_ms = null
      from l where [[still owned]]
      returning l.now, t.lease_epoch, t.worker_id, t.worker_instance_id,
                case when $5::boolean then 'blocked_interrupted' else 'waiting_interrupted' end as next_row),
    x as (
      update ff_exec_core e
      set [[by a.next_row: blocked_interrupted, waiting_interrupted]], interruption = 'waiting_children',
          state_since_ms = a.now, lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = $1 and e.execution_id = $2
      returning [[event columns]], a.next_row),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'revoked', 'waiting_children', x.now, $3, x.lease_epoch,
             x.worker_id, x.worker_instance_id, [[origin x]] from x)
    select next_row, lane_id from x
    """,
    phrases=_PHRASES,
)

HAS_OPEN_EDGES: Final = Statement(
    "has_open_edges",
    """
    select exists (
      select 1 from ff_edge
      where (partition_key = $1 and flow_id = $2) is true and downstream_eid = $3 and resolution is null)
    """,
)


async def _classify(runtime: Runtime, lease: Lease) -> Row | None:
    return await runtime.db.fetchrow(CLASSIFY, *lease.fence[:3])


async def _refused(runtime: Runtime, op: str, lease: Lease) -> EngineError:
    return refusal(await _classify(runtime, lease), lease) or inconclusive(op, lease)


def _ring(runtime: Runtime, row: Row) -> None:
    runtime.ring(LEASE_RINGS)
    if row["next_row"] == "waiting_interrupted":
        runtime.ring((work_ring(row["lane_id"]),))


async def release(runtime: Runtime, handle: Handle) -> None:
    """Give the work back at once; it does not count as a reclaim."""
    lease = read_lease(handle)
    row = await runtime.db.fetchrow(RELEASE, *lease.fence)
    if row is None:
        raise await _refused(runtime, "release", lease)
    _ring(runtime, row)


async def delay(runtime: Runtime, handle: Handle, until_ms: int) -> None:
    """Give the work back until a time on the database clock."""
    lease = read_lease(handle)
    check_time_ms(until_ms, "until_ms")
    row = await runtime.db.fetchrow(DELAY, *lease.fence, until_ms)
    if row is None:
        raise await _refused(runtime, "delay", lease)
    _ring(runtime, row)


async def wait_children(runtime: Runtime, handle: Handle) -> None:
    """Give the work back until every edge into this flow member is resolved; at once when none is open."""
    lease = read_lease(handle)
    seen = await _classify(runtime, lease)
    error = refusal(seen, lease)
    if error is not None:
        raise error
    if seen is None or seen["flow_id"] is None:
        raise State(
            StateKind.EXECUTION_NOT_IN_FLOW,
            f"{lease.key}: only a member of a flow can wait for children",
            execution_id=str(lease.key),
        )
    flow_id: UUID = seen["flow_id"]

    async def body(connection: Connection) -> Row | None:
        await lock_flow(connection, (lease.partition_key, flow_id))
        is_blocked = await connection.fetchval(HAS_OPEN_EDGES.sql, lease.partition_key, flow_id, lease.execution_id)
        row: Row | None = await connection.fetchrow(WAIT_CHILDREN.sql, *lease.fence, is_blocked)
        return row

    row = await runtime.db.transact("wait_children", body)
    if row is None:
        raise await _refused(runtime, "wait_children", lease)
    _ring(runtime, row)
