"""An operator resumes a suspended execution, whatever its condition says."""

from __future__ import annotations

from typing import Final

from ffd.core.checks import check_int, check_text
from ffd.core.errors import NotFound, State, StateKind
from ffd.core.events import Channel, work_ring
from ffd.core.ids import parse_execution_id
from ffd.core.limits import ID_BYTES_MAX, REASON_BYTES_MAX, RESUME_DELAY_MS_MAX
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Statement
from ffd.ops.runtime import Runtime
from ffd.ops.suspend import LOCK_EXECUTION
from ffd.ops.take_over import STATE_OF

# $1 partition_key, $2 execution_id, $3 resume_delay_ms, $4 reason, $5 actor. The execution is locked by a statement
# before this one: a suspension that was written while it waited for the lock must be seen to be closed.
RESUME_EXECUTION: Final = Statement(
    "resume_execution",
    """
    with k as materialized (
      select 1 from ff_exec_core
      where partition_key = $1 and execution_id = $2 and lifecycle_phase = 'suspended'),
    n as materialized (
      select ff_now_ms() as now, case when $3::bigint > 0 then 'delayed_resume' else 'resumable' end as next_row
      from k),
    x as (
      update ff_exec_core e
      set [[by n.next_row: delayed_resume, resumable]], state_since_ms = n.now, interruption = 'suspended',
          delay_until_ms = case n.next_row when 'delayed_resume' then n.now + $3 end
      from n where e.partition_key = $1 and e.execution_id = $2
      returning e.partition_key, e.execution_id, e.flow_id, e.lane_id, e.raw_fields, n.now, n.next_row),
    s as (
      update ff_suspension_current t set timeout_at_ms = null, closed_at_ms = x.now, close_reason = 'operator'
      from x where t.partition_key = $1 and t.execution_id = $2),
    w as (delete from ff_waitpoint_pending t using x where t.partition_key = $1 and t.execution_id = $2),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'resumable', x.now, x.now, [[origin x]] from x),
    o as ([[into operator_event]]
      select x.partition_key, x.execution_id::text, 'resumed',
             jsonb_build_object('resume_delay_ms', $3::bigint, 'previous_state', 'suspended'), x.now, $5, $4,
             [[origin x]]
      from x)
    select lane_id, next_row from x
    """,
)


async def resume_execution(
    runtime: Runtime, execution_id: str, *, reason: str, actor: str, resume_delay_ms: int
) -> None:
    """Make a suspended execution claimable; who did it and why is kept."""
    key = parse_execution_id(execution_id)
    reason = check_text(reason, "reason", REASON_BYTES_MAX, may_be_empty=True)
    actor = check_text(actor, "actor", ID_BYTES_MAX, may_be_empty=True)
    check_int(resume_delay_ms, "resume_delay_ms", 0, RESUME_DELAY_MS_MAX)

    async def body(connection: Connection) -> Row | None:
        await connection.fetchrow(LOCK_EXECUTION.sql, *key)
        row: Row | None = await connection.fetchrow(RESUME_EXECUTION.sql, *key, resume_delay_ms, reason, actor)
        return row

    row = await runtime.db.transact("resume_execution", body)
    if row is None:
        state = await runtime.db.fetchrow(STATE_OF, *key)
        if state is None:
            raise NotFound("execution", str(key))
        raise State(
            StateKind.EXECUTION_NOT_SUSPENDED,
            f"{key}: not suspended but {state['public_state']}",
            execution_id=str(key),
            public_state=state["public_state"],
        )
    runtime.ring(((Channel.COMPLETION.value, ""), (Channel.OPERATOR.value, "")))
    if row["next_row"] == "resumable":
        runtime.ring((work_ring(row["lane_id"]),))
