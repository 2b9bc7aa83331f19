"""Delays that are over: the work is claimable, as what it was delayed for says.

FlowFabric keeps a delay in the deadline column: such a row is due at its deadline, and has none afterwards.
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report

PROBE, CANDIDATES = due_statements(
    "delayed_promoter",
    """
    select q.execution_id as entity_id,
           greatest(coalesce(q.delay_until_ms, q.deadline_at_ms, 0), q.created_at_ms) as due_at_ms
    from ff_exec_core q
    where q.partition_key = p.partition_key and q.eligibility_state = 'not_eligible_until_time'
      and [[not quarantined delayed_promoter q.execution_id]]
    order by coalesce(q.delay_until_ms, q.deadline_at_ms, 0)
    """,
)

# $1 partition_key, $2 limit, $3 only these
PROMOTE: Final = Statement(
    "promote",
    """
    with d as materialized (
      select e.partition_key, e.execution_id, (select ff_now_ms()) as now,
             case attempt_state
               when 'pending_retry_attempt' then 'waiting_retry'
               when 'pending_replay_attempt' then 'waiting_replay'
               when 'attempt_interrupted' then
                 case e.blocking_reason when 'waiting_for_resume_delay' then 'resumable' else 'waiting_interrupted' end
               else 'waiting_first' end as next_row
      from (select z.partition_key, z.execution_id from ff_exec_core z
            where z.partition_key = $1 and z.eligibility_state = 'not_eligible_until_time'
              and coalesce(z.delay_until_ms, z.deadline_at_ms, 0) <= (select ff_now_ms())
              and [[wanted delayed_promoter z.execution_id]]
            order by coalesce(z.delay_until_ms, z.deadline_at_ms, 0)) q
      cross join lateral (
        select partition_key, execution_id, attempt_state, blocking_reason from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id
          and eligibility_state = 'not_eligible_until_time' and lifecycle_phase = 'runnable'
          and coalesce(delay_until_ms, deadline_at_ms, 0) <= (select ff_now_ms())
        for no key update skip locked) e
      limit $2)
    update ff_exec_core e
    set [[by d.next_row: waiting_first, waiting_retry, waiting_replay, waiting_interrupted, resumable]],
        deadline_at_ms = case when e.delay_until_ms is null then null else e.deadline_at_ms end,
        delay_until_ms = null, state_since_ms = d.now
    from d where e.partition_key = d.partition_key and e.execution_id = d.execution_id
    returning 'promoted', e.lane_id, false
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Make due work claimable."""
    return Report().add(await runtime.db.fetch(PROMOTE, partition_key, limit, only)).announce(runtime)
