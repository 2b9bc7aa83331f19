"""Waitpoints made before a suspension that never came: they go when their time is up.

A waitpoint of a live suspension ends with that suspension, never here.
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report

# What the sweep below moves: a waitpoint of a live suspension is not due here, however long it has been past its time.
PROBE, CANDIDATES = due_statements(
    "waitpoint_expiry",
    """
    select q.waitpoint_id as entity_id, q.expires_at_ms as due_at_ms from ff_waitpoint_pending q
    where q.partition_key = p.partition_key and q.expires_at_ms is not null
      and (q.state = 'pending' or not exists (
        select 1 from ff_exec_core e
        where e.partition_key = q.partition_key and e.execution_id = q.execution_id
          and e.lifecycle_phase = 'suspended' offset 0))
      and [[not quarantined waitpoint_expiry q.waitpoint_id]]
    order by q.expires_at_ms
    """,
)

# $1 partition_key, $2 limit, $3 only these. A suspension takes a pending waitpoint over under the execution's lock,
# which is skipped here when somebody holds it; one whose execution is gone or has ended belongs to nobody.
EXPIRE_WAITPOINTS: Final = Statement(
    "expire_waitpoints",
    """
    with d as materialized (
      select q.partition_key, q.waitpoint_id
      from (select z.partition_key, z.waitpoint_id, z.execution_id, z.state from ff_waitpoint_pending z
            where z.partition_key = $1 and z.expires_at_ms <= ff_now_ms() and [[wanted waitpoint_expiry z.waitpoint_id]]
            order by z.expires_at_ms) q
      left join lateral (
        select lifecycle_phase from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id) e on true
      where q.state = 'pending' or coalesce(e.lifecycle_phase, 'terminal') <> 'suspended'
      limit $2),
    l as materialized (
      select d.partition_key, d.waitpoint_id from d cross join lateral (
        select 1 from ff_waitpoint_pending w
        where w.partition_key = d.partition_key and w.waitpoint_id = d.waitpoint_id
          and coalesce(w.expires_at_ms, 9e18::bigint) <= ff_now_ms()
        for update skip locked) w)
    delete from ff_waitpoint_pending t using l
    where t.partition_key = l.partition_key and t.waitpoint_id = l.waitpoint_id
    returning 'cleared', null::text, false
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Remove waitpoints that nobody suspended on in time."""
    return Report().add(await runtime.db.fetch(EXPIRE_WAITPOINTS, partition_key, limit, only)).announce(runtime)
