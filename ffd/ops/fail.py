"""The bad ending of an attempt: a retry by the stored policy, or the end of the execution.

The policy and the count of retries are read from the locked row and decided on by the database: no caller can
widen them. What was decided stays on the attempt, so that a repeat gets the first answer (I2).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from ffd.core.checks import check_text
from ffd.core.errors import Validation, ValidationKind
from ffd.core.events import ENDED_RINGS, LEASE_RINGS, work_ring
from ffd.core.handles import Handle, Lease, read_lease
from ffd.core.limits import REASON_BYTES_MAX
from ffd.core.policy import FailureClass
from ffd.core.records import RetryScheduled, TerminalFailed
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cascade import Moved, cascade
from ffd.ops.fence import CLASSIFY, inconclusive, is_own_ending, refusal
from ffd.ops.flow_lock import FlowKey, is_sealed, lock_flow
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    # One decision, made once, after the lock was granted: the delay may hold a random number.
    "decide": """
      d as materialized (
        select ff_now_ms() as now, ff_retry_delay_ms(l.policy, l.retry_count, $5) as delay_ms from l),
      a as (
        update ff_attempt t
        set outcome = case when d.delay_ms is null then 'failed' else 'retry' end, terminal_at_ms = d.now,
            retry_at_ms = d.now + d.delay_ms, failure_category = $5, failure_message = $6,
            lease_expires_at_ms = null, timeout_at_ms = null
        from d
        where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
          and coalesce(t.lease_expires_at_ms, 0) > d.now
        returning d.now, t.retry_at_ms, t.lease_epoch, t.worker_id, t.worker_instance_id,
                  case when d.delay_ms is null then 'failed' when d.delay_ms = 0 then 'waiting_retry'
                       else 'delayed_retry' end as next_row)""",
    "move": """
      x as (
        update ff_exec_core e
        set [[by a.next_row: failed, waiting_retry, delayed_retry]],
            attempt_index = e.attempt_index + case a.next_row when 'failed' then 0 else 1 end,
            retry_count = e.retry_count + case a.next_row when 'failed' then 0 else 1 end,
            delay_until_ms = case a.next_row when 'delayed_retry' then a.retry_at_ms end,
            terminal_at_ms = case a.next_row when 'failed' then a.now end,
            failure_message = $6, state_since_ms = a.now, interruption = null,
            lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
        from a where e.partition_key = $1 and e.execution_id = $2
        returning e.partition_key, e.execution_id, e.lane_id, e.flow_id, e.raw_fields, a.now, a.retry_at_ms, a.next_row,
                  a.lease_epoch, a.worker_id, a.worker_instance_id),
      c as ([[into completion_event]]
        select x.partition_key, x.execution_id, x.flow_id, 'failed', x.now, x.now, [[origin x]]
        from x where x.next_row = 'failed'),
      v as ([[into lease_event]]
        select x.partition_key, x.execution_id::text, 'revoked',
               case x.next_row when 'failed' then 'failed' else 'retried' end, x.now, $3, x.lease_epoch,
               x.worker_id, x.worker_instance_id, [[origin x]]
        from x)""",
}

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 lease_epoch, $5 classification, $6 reason
FAIL: Final = Statement(
    "fail",
    """
    with l as materialized (
      select policy, retry_count from ff_exec_core
      where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active'
        and flow_id is null
      for no key update),
    [[decide]], [[move]]
    select retry_at_ms, next_row, lane_id from x
    """,
    phrases=_PHRASES,
)

FAIL_MEMBER: Final = Statement(
    "fail_member",
    """
    with l as materialized (
      select policy, retry_count from ff_exec_core
      where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active'
        and flow_id = $7
      for no key update),
    [[decide]], [[move]]
    select retry_at_ms, next_row, lane_id from x
    """,
    phrases=_PHRASES,
)


async def fail(
    runtime: Runtime, handle: Handle, reason: str, classification: FailureClass
) -> RetryScheduled | TerminalFailed:
    """End the attempt with a failure. A repeat by the same owner gets the first answer."""
    lease = read_lease(handle)
    check_text(reason, "reason", REASON_BYTES_MAX, may_be_empty=True)
    try:
        category = FailureClass(classification)
    except ValueError:
        known = ", ".join(FailureClass)
        raise Validation(
            ValidationKind.INVALID_INPUT, f"expected one of FailureClass: {known}", "classification"
        ) from None
    args = (lease.partition_key, lease.execution_id, lease.attempt_index, lease.lease_epoch, category, reason)
    row = await runtime.db.fetchrow(FAIL, *args)
    if row is None:
        seen = await runtime.db.fetchrow(CLASSIFY, *args[:3])
        if is_own_ending(seen, lease, "retry", "failed"):
            return _first_answer(seen, lease)
        error = refusal(seen, lease)
        if error is not None:
            raise error
        if seen is None or seen["flow_id"] is None:
            raise inconclusive("fail", lease)
        row = await _fail_member(runtime, lease, args, FlowKey(lease.partition_key, seen["flow_id"]))
        if row is None:
            seen = await runtime.db.fetchrow(CLASSIFY, *args[:3])
            if is_own_ending(seen, lease, "retry", "failed"):
                return _first_answer(seen, lease)
            raise refusal(seen, lease) or inconclusive("fail", lease)
    if row["next_row"] == "failed":
        runtime.ring(ENDED_RINGS)
        return TerminalFailed()
    runtime.ring(LEASE_RINGS)
    if row["next_row"] == "waiting_retry":
        runtime.ring((work_ring(row["lane_id"]),))
    return RetryScheduled(row["retry_at_ms"], lease.attempt_index + 1)


def _first_answer(seen: Row | None, lease: Lease) -> RetryScheduled | TerminalFailed:
    """What the first `fail` of this owner was told."""
    if seen is None or seen["outcome"] == "failed" or seen["retry_at_ms"] is None:
        return TerminalFailed()
    return RetryScheduled(seen["retry_at_ms"], lease.attempt_index + 1)


async def _fail_member(
    runtime: Runtime, lease: Lease, args: tuple[int, UUID, int, int, FailureClass, str], flow: FlowKey
) -> Row | None:
    async def body(connection: Connection) -> tuple[Row | None, Moved]:
        moved = Moved()
        held = await lock_flow(connection, flow)
        row: Row | None = await connection.fetchrow(FAIL_MEMBER.sql, *args, flow.flow_id)
        if row is not None and row["next_row"] == "failed":
            await cascade(connection, flow, [lease.execution_id], moved, sealed=is_sealed(held))
        return row, moved

    row, moved = await runtime.db.transact("fail", body, Planning.CUSTOM)
    moved.announce(runtime)
    return row
