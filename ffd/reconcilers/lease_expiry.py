"""Leases that ran out: the worker vanished, its work is offered again; too often, and the execution fails.

Also clears leases that no execution stands behind (it is gone, has ended or is at another attempt: FlowFabric's cancels
leave these), which would be due for ever, and returns work that a FlowFabric scheduler granted to a worker that never
came.
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report, may_clear

PROBE, CANDIDATES = due_statements(
    "lease_expiry",
    """
    select q.execution_id as entity_id, q.lease_expires_at_ms as due_at_ms from ff_attempt q
    where q.partition_key = p.partition_key and q.lease_expires_at_ms is not null
      and [[not quarantined lease_expiry q.execution_id]]
    order by q.lease_expires_at_ms
    """,
    # Granted work has no timer of its own: the probe looks whether any of it has lost its grant, and since when.
    """
    select q.execution_id as entity_id,
           coalesce((select max(g.expires_at_ms) from ff_claim_grant g
                     where g.partition_key = q.partition_key and g.execution_id = q.execution_id),
                    q.state_since_ms, q.created_at_ms) as due_at_ms
    from ff_exec_core q
    where q.partition_key = p.partition_key and q.eligibility_state = 'pending_claim'
      and q.lifecycle_phase in ('runnable', 'submitted') and not exists (
        select 1 from ff_claim_grant g
        where g.partition_key = q.partition_key and g.execution_id = q.execution_id and g.expires_at_ms > ff_now_ms())
      and [[not quarantined lease_expiry q.execution_id]]
    """,
)

# $1 partition_key, $2 limit, $3 only these. Never waits; every row is judged on its newest version, the
# execution before the attempt.
EXPIRE_LEASES: Final = Statement(
    "expire_leases",
    """
    with d as materialized (
      select e.partition_key, e.execution_id, e.attempt_index, (select ff_now_ms()) as now, a.lease_epoch as lost_epoch,
             a.worker_id, a.worker_instance_id,
             case when e.lease_reclaim_count + 1 > ff_policy_number(e.policy, '{max_reclaim_count}', 100)
               then 'failed' else 'waiting_interrupted' end as next_row
      from (select z.partition_key, z.execution_id, z.attempt_index from ff_attempt z
            where z.partition_key = $1 and z.lease_expires_at_ms <= (select ff_now_ms())
              and [[wanted lease_expiry z.execution_id]]
            order by z.lease_expires_at_ms) q
      cross join lateral (
        select partition_key, execution_id, attempt_index, lease_reclaim_count, policy from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id
          and attempt_index = q.attempt_index and lifecycle_phase = 'active'
        for no key update skip locked) e
      cross join lateral (
        select lease_epoch, worker_id, worker_instance_id from ff_attempt
        where partition_key = q.partition_key and execution_id = q.execution_id and attempt_index = q.attempt_index
          and coalesce(lease_expires_at_ms, 9e18::bigint) <= (select ff_now_ms())
        for no key update skip locked) a
      limit $2),
    a as (
      update ff_attempt t
      set lease_expires_at_ms = null, timeout_at_ms = null, lease_epoch = t.lease_epoch + 1,
          outcome = case d.next_row when 'failed' then 'failed' else 'lease_expired_reclaimable' end,
          terminal_at_ms = case d.next_row when 'failed' then d.now end,
          failure_message = case d.next_row when 'failed' then 'max_reclaims_exceeded' else t.failure_message end
      from d where t.partition_key = d.partition_key and t.execution_id = d.execution_id
        and t.attempt_index = d.attempt_index
      returning t.partition_key, t.execution_id, t.lease_epoch, d.now, d.lost_epoch, d.worker_id,
                d.worker_instance_id, d.next_row),
    x as (
      update ff_exec_core e
      set [[by a.next_row: waiting_interrupted, failed]], state_since_ms = a.now,
          interruption = case a.next_row when 'failed' then null else 'lease_expiry' end,
          terminal_at_ms = case a.next_row when 'failed' then a.now end,
          failure_message = case a.next_row when 'failed' then 'max_reclaims_exceeded' else e.failure_message end,
          lease_reclaim_count = e.lease_reclaim_count + 1, lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = a.partition_key and e.execution_id = a.execution_id
      returning e.partition_key, e.execution_id, e.flow_id, e.lane_id, e.attempt_index, e.raw_fields, a.now,
                a.lost_epoch, a.worker_id, a.worker_instance_id, a.next_row),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'expired', 'lease_expiry', x.now, x.attempt_index, x.lost_epoch,
             x.worker_id, x.worker_instance_id, [[origin x]] from x),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'failed', x.now, x.now, [[origin x]]
      from x where x.next_row = 'failed'),
    o as ([[into cascade_owed]]
      select x.partition_key, x.flow_id, x.execution_id, 'resolve', '', x.now
      from x where x.next_row = 'failed' and x.flow_id is not null
      on conflict (partition_key, flow_id, execution_id, work) do nothing)
    select case next_row when 'failed' then 'failed' else 'reclaimed' end as outcome,
           case next_row when 'failed' then null else lane_id end as lane_id,
           next_row = 'failed' and flow_id is not null as owes
    from x
    """,
    Planning.CUSTOM,
)

# A claim commits its lease and its execution together, so one snapshot tells whether anything stands behind a lease;
# the lease itself is judged again on its newest version.
CLEAR_LEASES: Final = Statement(
    "clear_leases",
    """
    with d as materialized (
      select q.partition_key, q.execution_id, q.attempt_index from (
        select z.partition_key, z.execution_id, z.attempt_index from ff_attempt z
        where z.partition_key = $1 and z.lease_expires_at_ms <= (select ff_now_ms())
          and [[wanted lease_expiry z.execution_id]]
        order by z.lease_expires_at_ms) q
      where not exists (
        select 1 from ff_exec_core e
        where e.partition_key = q.partition_key and e.execution_id = q.execution_id
          and e.attempt_index = q.attempt_index and e.lifecycle_phase = 'active')
      limit $2),
    l as materialized (
      select d.partition_key, d.execution_id, d.attempt_index from d cross join lateral (
        select 1 from ff_attempt
        where partition_key = d.partition_key and execution_id = d.execution_id and attempt_index = d.attempt_index
          and coalesce(lease_expires_at_ms, 9e18::bigint) <= (select ff_now_ms())
        for no key update skip locked) a)
    update ff_attempt t set lease_expires_at_ms = null, timeout_at_ms = null
    from l where t.partition_key = l.partition_key and t.execution_id = l.execution_id
      and t.attempt_index = l.attempt_index
    returning 'cleared', null::text, false
    """,
    Planning.CUSTOM,
)

RETURN_GRANTED: Final = Statement(
    "return_granted",
    """
    with d as materialized (
      select e.partition_key, e.execution_id, e.attempt_state, (select ff_now_ms()) as now from (
        select z.partition_key, z.execution_id from ff_exec_core z
        where z.partition_key = $1 and z.eligibility_state = 'pending_claim'
          and [[wanted lease_expiry z.execution_id]]) q
      cross join lateral (
        select partition_key, execution_id, attempt_state from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id
          and eligibility_state = 'pending_claim' and lifecycle_phase in ('runnable', 'submitted')
        for no key update skip locked) e
      where not exists (
        select 1 from ff_claim_grant g
        where g.partition_key = q.partition_key and g.execution_id = q.execution_id
          and g.expires_at_ms > (select ff_now_ms()))
      limit $2),
    r as (
      select d.*, case attempt_state when 'attempt_interrupted' then 'waiting_interrupted'
                                     when 'pending_retry_attempt' then 'waiting_retry'
                                     when 'pending_replay_attempt' then 'waiting_replay'
                                     else 'waiting_first' end as next_row
      from d)
    update ff_exec_core e
    set [[by r.next_row: waiting_interrupted, waiting_retry, waiting_replay, waiting_first]], state_since_ms = r.now
    from r where e.partition_key = r.partition_key and e.execution_id = r.execution_id
    returning 'returned', e.lane_id, false
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Offer work of vanished workers again, and clear what is due for nobody."""
    report = Report().add(await runtime.db.fetch(EXPIRE_LEASES, partition_key, limit, only))
    if may_clear(report):
        for statement in (CLEAR_LEASES, RETURN_GRANTED):
            report.add(await runtime.db.fetch(statement, partition_key, limit, only))
    return report.announce(runtime)
