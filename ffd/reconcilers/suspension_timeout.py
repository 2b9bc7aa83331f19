"""Suspensions whose time is up, by what their worker asked for: end, hand over to an operator, or resume.

Signals change a suspension under the execution's lock, so the execution is locked first and the suspension judged on
its newest version: a signal that came before the timeout has resumed it, one that comes after finds it closed (I5).
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report, may_clear

PROBE, CANDIDATES = due_statements(
    "suspension_timeout",
    """
    select q.execution_id as entity_id, q.timeout_at_ms as due_at_ms from ff_suspension_current q
    where q.partition_key = p.partition_key and q.timeout_at_ms is not null
      and [[not quarantined suspension_timeout q.execution_id]]
    order by q.timeout_at_ms
    """,
)

# $1 partition_key, $2 limit, $3 only these. An unknown or missing behaviour fails, as FlowFabric's does.
TIME_OUT_SUSPENSIONS: Final = Statement(
    "time_out_suspensions",
    """
    with d as materialized (
      select q.partition_key, q.execution_id, (select ff_now_ms()) as now, s.behavior,
      s.resume_delay_ms, e.signal_count,
             case s.behavior
               when 'cancel' then 'cancelled' when 'expire' then 'expired' when 'escalate' then 'escalated'
               when 'auto_resume_with_timeout_signal' then
                 case when s.resume_delay_ms > 0 then 'delayed_resume' else 'resumable' end
               else 'failed' end as next_row
      from (select z.partition_key, z.execution_id from ff_suspension_current z
            where z.partition_key = $1 and z.timeout_at_ms <= (select ff_now_ms())
              and [[wanted suspension_timeout z.execution_id]]
            order by z.timeout_at_ms) q
      cross join lateral (
        select signal_count from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id and lifecycle_phase = 'suspended'
        for no key update skip locked) e
      cross join lateral (
        select coalesce(timeout_behavior, 'fail') as behavior, resume_delay_ms from ff_suspension_current
        where partition_key = q.partition_key and execution_id = q.execution_id and closed_at_ms is null
          and coalesce(timeout_at_ms, 9e18::bigint) <= (select ff_now_ms())
        for no key update skip locked) s
      limit $2),
    x as (
      update ff_exec_core e
      set [[by d.next_row: failed, cancelled, expired, escalated, resumable, delayed_resume]],
          state_since_ms = d.now, interruption = case when d.next_row in ('failed', 'cancelled', 'expired') then null
                                                      else 'suspended' end,
          signal_count = e.signal_count + case when d.next_row in ('resumable', 'delayed_resume') then 1 else 0 end,
          terminal_at_ms = case when d.next_row in ('failed', 'cancelled', 'expired') then d.now end,
          delay_until_ms = case d.next_row when 'delayed_resume' then d.now + d.resume_delay_ms end,
          failure_message = case when d.next_row in ('failed', 'expired') then 'suspension_timeout'
                                 else e.failure_message end,
          cancellation_reason = case when d.next_row in ('failed', 'cancelled', 'expired')
                                     then 'suspension_timeout_' || d.behavior else e.cancellation_reason end,
          cancelled_by = case d.next_row when 'cancelled' then 'system_timeout' else e.cancelled_by end
      from d where e.partition_key = d.partition_key and e.execution_id = d.execution_id
      returning e.partition_key, e.execution_id, e.flow_id, e.lane_id, e.attempt_index, e.raw_fields, e.signal_count,
                d.now, d.next_row, d.behavior),
    a as (
      update ff_attempt t
      set outcome = case x.next_row when 'cancelled' then 'cancelled' when 'expired' then 'expired' else 'failed' end,
          terminal_at_ms = x.now, failure_message = 'suspension_timeout'
      from x where x.next_row in ('failed', 'cancelled', 'expired') and t.partition_key = x.partition_key
        and t.execution_id = x.execution_id and t.attempt_index = x.attempt_index),
    s as (
      update ff_suspension_current t
      set timeout_at_ms = null,
          closed_at_ms = case x.next_row when 'escalated' then null else x.now end,
          close_reason = case x.next_row when 'escalated' then null else 'timeout' end,
          member_map = case when x.next_row in ('resumable', 'delayed_resume') then
              jsonb_set(t.member_map, '{__timeout__}',
                case jsonb_typeof(t.member_map -> '__timeout__') when 'array' then t.member_map -> '__timeout__'
                     else '[]' end
                || jsonb_build_array(jsonb_build_object(
                     'signal_id', gen_random_uuid(), 'signal_name', 'timeout', 'signal_category', 'system',
                     'source_type', 'system', 'source_identity', 'suspension_timeout', 'correlation_id', '',
                     'accepted_at', x.now, 'payload_hex', null, 'seq', x.signal_count)))
            else t.member_map end
      from x where t.partition_key = x.partition_key and t.execution_id = x.execution_id),
    w as (
      delete from ff_waitpoint_pending t using x
      where x.next_row <> 'escalated' and t.partition_key = x.partition_key and t.execution_id = x.execution_id),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id,
             case when x.next_row in ('resumable', 'delayed_resume') then 'resumable' else x.next_row end, x.now, x.now,
             [[origin x]]
      from x where x.next_row <> 'escalated'),
    p as ([[into operator_event]]
      select x.partition_key, x.execution_id::text, 'escalated',
             jsonb_build_object('previous_state', 'suspended', 'cause', 'suspension_timeout'), x.now, '',
             'suspension_timeout', [[origin x]]
      from x where x.next_row = 'escalated'),
    o as ([[into cascade_owed]]
      select x.partition_key, x.flow_id, x.execution_id, 'resolve', '', x.now
      from x where x.next_row in ('failed', 'cancelled', 'expired') and x.flow_id is not null
      on conflict (partition_key, flow_id, execution_id, work) do nothing)
    select case next_row when 'resumable' then 'resumed'
                         when 'delayed_resume' then 'resumed' else next_row end as outcome,
           case next_row when 'resumable' then lane_id end as lane_id,
           next_row in ('failed', 'cancelled', 'expired') and flow_id is not null as owes
    from x
    """,
    Planning.CUSTOM,
)

# A timer that nothing stands behind: the execution is gone or not suspended any more.
CLEAR_SUSPENSION_TIMEOUTS: Final = Statement(
    "clear_suspension_timeouts",
    """
    with d as materialized (
      select q.partition_key, q.execution_id from (
        select z.partition_key, z.execution_id, z.closed_at_ms from ff_suspension_current z
        where z.partition_key = $1 and z.timeout_at_ms <= (select ff_now_ms())
          and [[wanted suspension_timeout z.execution_id]]
        order by z.timeout_at_ms) q
      left join lateral (
        select true as is_asleep from ff_exec_core e
        where e.partition_key = q.partition_key and e.execution_id = q.execution_id
          and e.lifecycle_phase = 'suspended' offset 0) e on true
      where q.closed_at_ms is not null or e.is_asleep is null
      limit $2),
    l as materialized (
      select d.partition_key, d.execution_id from d cross join lateral (
        select 1 from ff_suspension_current
        where partition_key = d.partition_key and execution_id = d.execution_id
          and coalesce(timeout_at_ms, 9e18::bigint) <= (select ff_now_ms())
        for no key update skip locked) a)
    update ff_suspension_current t set timeout_at_ms = null
    from l where t.partition_key = l.partition_key and t.execution_id = l.execution_id
    returning 'cleared', null::text, false
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Act on suspensions whose time is up."""
    report = Report().add(await runtime.db.fetch(TIME_OUT_SUSPENSIONS, partition_key, limit, only))
    if may_clear(report):
        report.add(await runtime.db.fetch(CLEAR_SUSPENSION_TIMEOUTS, partition_key, limit, only))
    return report.announce(runtime)
