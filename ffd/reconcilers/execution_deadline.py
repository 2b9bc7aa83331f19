"""Executions whose deadline has passed: they expire from any state, and everything that hangs on them closes."""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report

# FlowFabric keeps a delay in the deadline column: such a row belongs to the promoter.
PROBE, CANDIDATES = due_statements(
    "execution_deadline",
    """
    select q.execution_id as entity_id, q.deadline_at_ms as due_at_ms from ff_exec_core q
    where q.partition_key = p.partition_key and q.deadline_at_ms is not null and q.terminal_at_ms is null
      and q.lifecycle_phase not in ('terminal', 'cancelled')
      and not (q.eligibility_state = 'not_eligible_until_time' and q.delay_until_ms is null)
      and [[not quarantined execution_deadline q.execution_id]]
    order by q.deadline_at_ms
    """,
)

# $1 partition_key, $2 limit, $3 only these. The attempt, the suspension and the waitpoints are as old as the snapshot,
# so a row that has changed owner or phase since then is left for the next tick.
EXPIRE_EXECUTIONS: Final = Statement(
    "expire_executions",
    """
    with d as materialized (
      select q.partition_key, q.execution_id, q.attempt_index, q.lifecycle_phase, (select ff_now_ms()) as now,
             t.lease_epoch as lost_epoch, t.worker_id, t.worker_instance_id
      from (select z.partition_key, z.execution_id, z.attempt_index, z.lifecycle_phase, z.lease_epoch
            from ff_exec_core z
            where z.partition_key = $1 and z.deadline_at_ms <= (select ff_now_ms()) and z.deadline_at_ms is not null
              and z.terminal_at_ms is null and [[wanted execution_deadline z.execution_id]]
            order by z.deadline_at_ms) q
      cross join lateral (
        select 1 from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id
          and attempt_index = q.attempt_index and lifecycle_phase = q.lifecycle_phase and lease_epoch = q.lease_epoch
          and lifecycle_phase not in ('terminal', 'cancelled')
          and not (eligibility_state = 'not_eligible_until_time' and delay_until_ms is null)
        for no key update skip locked) e
      left join lateral (
        select lease_epoch, worker_id, worker_instance_id from ff_attempt
        where partition_key = q.partition_key and execution_id = q.execution_id
          and attempt_index = q.attempt_index) t on true
      limit $2),
    a as (
      update ff_attempt t
      set lease_expires_at_ms = null, timeout_at_ms = null, outcome = 'expired', terminal_at_ms = d.now,
          failure_message = 'execution_deadline',
          lease_epoch = t.lease_epoch + case d.lifecycle_phase when 'active' then 1 else 0 end
      from d where t.partition_key = d.partition_key and t.execution_id = d.execution_id
        and t.attempt_index = d.attempt_index
      returning t.execution_id, t.lease_epoch),
    x as (
      update ff_exec_core e
      set [[expired]], terminal_at_ms = d.now, state_since_ms = d.now, failure_message = 'execution_deadline',
          delay_until_ms = null, interruption = null, lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from d left join a on a.execution_id = d.execution_id
      where e.partition_key = d.partition_key and e.execution_id = d.execution_id
      returning e.partition_key, e.execution_id, e.flow_id, e.attempt_index, e.raw_fields, d.now, d.lifecycle_phase,
                d.lost_epoch, d.worker_id, d.worker_instance_id),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'expired', 'execution_deadline', x.now, x.attempt_index,
             x.lost_epoch, x.worker_id, x.worker_instance_id, [[origin x]]
      from x where x.lifecycle_phase = 'active'),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'expired', x.now, x.now, [[origin x]] from x),
    o as ([[into cascade_owed]]
      select x.partition_key, x.flow_id, x.execution_id, 'resolve', '', x.now from x where x.flow_id is not null
      on conflict (partition_key, flow_id, execution_id, work) do nothing),
    s as (
      update ff_suspension_current t set timeout_at_ms = null, closed_at_ms = x.now, close_reason = 'deadline'
      from x where t.partition_key = x.partition_key and t.execution_id = x.execution_id and t.closed_at_ms is null),
    w as (
      delete from ff_waitpoint_pending t using x
      where t.partition_key = x.partition_key and t.execution_id = x.execution_id),
    g as (
      delete from ff_claim_grant t using x
      where t.partition_key = x.partition_key and t.execution_id = x.execution_id)
    select 'expired' as outcome, null::text as lane_id, flow_id is not null as owes from x
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Expire what has run out of time."""
    return Report().add(await runtime.db.fetch(EXPIRE_EXECUTIONS, partition_key, limit, only)).announce(runtime)
