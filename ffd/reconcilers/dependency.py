"""Cascades that an ending left undone: by a sweep, past the bound of one call, or lost with another writer's crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from ffd.core.limits import FLOW_EDGES_MAX
from ffd.db.statement import Planning, Statement
from ffd.ops.cascade import settle_owed
from ffd.ops.runtime import Runtime
from ffd.reconcilers.by_flow import each_flow
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report

PROBE, CANDIDATES = due_statements(
    "dependency",
    """
    select q.flow_id as entity_id, q.enqueued_at_ms as due_at_ms from ff_cascade_owed q
    where q.partition_key = p.partition_key and [[not quarantined dependency q.flow_id]]
    order by q.enqueued_at_ms
    """,
)

# More than one execution can have edges into it, so that every page gets past the execution it began with.
EDGES_PER_LOOK: Final = 2 * FLOW_EDGES_MAX
FIRST: Final = UUID(int=0)

# Open edges whose upstream has ended and of which nothing is recorded: what a writer that knows no cascade left behind.
# $1 partitions, $2 the execution to go on from, $3 how many edges to look at.
FIND_MISSED: Final = Statement(
    "find_missed",
    """
    with s as materialized (
      select partition_key, flow_id, upstream_eid, upstream_replay, downstream_eid from ff_edge
      where resolution is null and downstream_eid >= $2 order by downstream_eid limit $3),
    f as ([[into cascade_owed]]
      select distinct g.partition_key, g.flow_id, g.upstream_eid, 'resolve', '', ff_now_ms()
      from s g cross join lateral (
        select 1 from ff_exec_core e
        where e.partition_key = g.partition_key and e.execution_id = g.upstream_eid
          and e.lifecycle_phase in ('terminal', 'cancelled') and e.replay_count >= g.upstream_replay
        offset 0) e
      where g.partition_key = any ($1::smallint[])
      on conflict (partition_key, flow_id, execution_id, work) do nothing
      returning partition_key)
    select (select count(*) from s) as edges, (select max(downstream_eid::text)::uuid from s) as last,
           coalesce((select array_agg(distinct partition_key) from f), '{}') as found
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Carry owed endings through their flows, one transaction per flow."""
    report = Report()
    report.outcomes["settled"] += await each_flow(runtime, CANDIDATES, partition_key, limit, only, settle_owed)
    return report


async def find_missed(runtime: Runtime, partitions: Sequence[int], after: UUID = FIRST) -> tuple[list[int], UUID]:
    """Record endings that nobody carried through: the partitions that now owe something, and where to go on.

    It reads open edges page by page, from the first again after the last: seldom, because almost always in vain.
    """
    (row,) = await runtime.db.fetch(FIND_MISSED, partitions, after, EDGES_PER_LOOK)
    return row["found"], row["last"] if row["edges"] == EDGES_PER_LOOK else FIRST
