"""Attempts that took too long: the worker may be alive, but its time is up; a retry by the policy, or the end.

A worker that comes late is fenced: the epoch rises with the timeout.
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report, may_clear

PROBE, CANDIDATES = due_statements(
    "attempt_timeout",
    """
    select q.execution_id as entity_id, q.timeout_at_ms as due_at_ms from ff_attempt q
    where q.partition_key = p.partition_key and q.timeout_at_ms is not null
      and [[not quarantined attempt_timeout q.execution_id]]
    order by q.timeout_at_ms
    """,
)

# $1 partition_key, $2 limit, $3 only these. `delay_ms` is decided once per row: it may hold a random number.
TIME_OUT_ATTEMPTS: Final = Statement(
    "time_out_attempts",
    """
    with d as materialized (
      select e.partition_key, e.execution_id, e.attempt_index, (select ff_now_ms()) as now, a.lease_epoch as lost_epoch,
             a.worker_id, a.worker_instance_id, ff_retry_delay_ms(e.policy, e.retry_count, null) as delay_ms
      from (select z.partition_key, z.execution_id, z.attempt_index from ff_attempt z
            where z.partition_key = $1 and z.timeout_at_ms <= (select ff_now_ms())
              and [[wanted attempt_timeout z.execution_id]]
            order by z.timeout_at_ms) q
      cross join lateral (
        select partition_key, execution_id, attempt_index, policy, retry_count from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id
          and attempt_index = q.attempt_index and lifecycle_phase = 'active'
        for no key update skip locked) e
      cross join lateral (
        select lease_epoch, worker_id, worker_instance_id from ff_attempt
        where partition_key = q.partition_key and execution_id = q.execution_id and attempt_index = q.attempt_index
          and coalesce(timeout_at_ms, 9e18::bigint) <= (select ff_now_ms())
        for no key update skip locked) a
      limit $2),
    a as (
      update ff_attempt t
      set lease_expires_at_ms = null, timeout_at_ms = null, lease_epoch = t.lease_epoch + 1, outcome = 'interrupted',
          terminal_at_ms = d.now, failure_category = 'timeout', failure_message = 'attempt_timeout',
          retry_at_ms = d.now + d.delay_ms
      from d where t.partition_key = d.partition_key and t.execution_id = d.execution_id
        and t.attempt_index = d.attempt_index
      returning t.partition_key, t.execution_id, t.attempt_index, t.lease_epoch, t.retry_at_ms, d.now, d.lost_epoch,
                d.worker_id, d.worker_instance_id,
                case when d.delay_ms is null then 'expired' when d.delay_ms = 0 then 'waiting_retry'
                     else 'delayed_retry' end as next_row),
    x as (
      update ff_exec_core e
      set [[by a.next_row: expired, waiting_retry, delayed_retry]], state_since_ms = a.now, interruption = null,
          attempt_index = e.attempt_index + case a.next_row when 'expired' then 0 else 1 end,
          retry_count = e.retry_count + case a.next_row when 'expired' then 0 else 1 end,
          delay_until_ms = case a.next_row when 'delayed_retry' then a.retry_at_ms end,
          terminal_at_ms = case a.next_row when 'expired' then a.now end, failure_message = 'attempt_timeout',
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = a.partition_key and e.execution_id = a.execution_id
      returning e.partition_key, e.execution_id, e.flow_id, e.lane_id, e.raw_fields, a.attempt_index, a.now,
                a.lost_epoch, a.worker_id, a.worker_instance_id, a.next_row),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'expired', 'attempt_timeout', x.now, x.attempt_index, x.lost_epoch,
             x.worker_id, x.worker_instance_id, [[origin x]] from x),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'expired', x.now, x.now, [[origin x]]
      from x where x.next_row = 'expired'),
    o as ([[into cascade_owed]]
      select x.partition_key, x.flow_id, x.execution_id, 'resolve', '', x.now
      from x where x.next_row = 'expired' and x.flow_id is not null
      on conflict (partition_key, flow_id, execution_id, work) do nothing)
    select case next_row when 'expired' then 'expired' else 'retried' end as outcome,
           case next_row when 'waiting_retry' then lane_id end as lane_id,
           next_row = 'expired' and flow_id is not null as owes
    from x
    """,
    Planning.CUSTOM,
)

# A timer of an attempt that is not running any more.
CLEAR_TIMEOUTS: Final = Statement(
    "clear_timeouts",
    """
    with d as materialized (
      select q.partition_key, q.execution_id, q.attempt_index from (
        select z.partition_key, z.execution_id, z.attempt_index from ff_attempt z
        where z.partition_key = $1 and z.timeout_at_ms <= (select ff_now_ms())
          and [[wanted attempt_timeout z.execution_id]]
        order by z.timeout_at_ms) q
      where not exists (
        select 1 from ff_exec_core e
        where e.partition_key = q.partition_key and e.execution_id = q.execution_id
          and e.attempt_index = q.attempt_index and e.lifecycle_phase = 'active')
      limit $2),
    l as materialized (
      select d.partition_key, d.execution_id, d.attempt_index from d cross join lateral (
        select 1 from ff_attempt
        where partition_key = d.partition_key and execution_id = d.execution_id and attempt_index = d.attempt_index
          and coalesce(timeout_at_ms, 9e18::bigint) <= (select ff_now_ms())
        for no key update skip locked) a)
    update ff_attempt t set timeout_at_ms = null
    from l where t.partition_key = l.partition_key and t.execution_id = l.execution_id
      and t.attempt_index = l.attempt_index
    returning 'cleared', null::text, false
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """End attempts whose time is up."""
    report = Report().add(await runtime.db.fetch(TIME_OUT_ATTEMPTS, partition_key, limit, only))
    if may_clear(report):
        report.add(await runtime.db.fetch(CLEAR_TIMEOUTS, partition_key, limit, only))
    return report.announce(runtime)
