"""Cascades that an ending left undone: by a sweep, past the bound of one call, or lost with another writer's crash."""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.cascade import settle_owed
from ffd.ops.flow_lock import FlowKey
from ffd.ops.runtime import Runtime
from ffd.reconcilers.report import Report

# $1 partition_key, $2 limit. The flow that waits longest first.
OWED_FLOWS: Final = Statement(
    "owed_flows",
    """
    select flow_id from ff_cascade_owed where partition_key = $1
    group by flow_id order by min(enqueued_at_ms) limit $2
    """,
    Planning.CUSTOM,
)

# Open edges whose upstream has ended and of which nothing is recorded: what a writer that knows no cascade left behind.
FIND_MISSED: Final = Statement(
    "find_missed",
    """
    [[into cascade_owed]]
    select distinct g.partition_key, g.flow_id, g.upstream_eid, 'resolve', '', ff_now_ms()
    from ff_edge g cross join lateral (
      select 1 from ff_exec_core e
      where e.partition_key = g.partition_key and e.execution_id = g.upstream_eid
        and e.lifecycle_phase in ('terminal', 'cancelled') and e.replay_count >= g.upstream_replay
      offset 0) e
    where g.partition_key = $1 and g.resolution is null
    limit $2
    on conflict (partition_key, flow_id, execution_id, work) do nothing
    returning 'found', null::text, true
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int) -> Report:
    """Carry owed endings through their flows, one transaction per flow."""
    report = Report()
    for row in await runtime.db.fetch(OWED_FLOWS, partition_key, limit):
        report.outcomes["settled"] += await settle_owed(runtime, FlowKey(partition_key, row["flow_id"]))
    return report


async def find_missed(runtime: Runtime, partition_key: int, limit: int) -> Report:
    """Record endings that nobody carried through; the next tick settles them. It reads every open edge: seldom."""
    return Report().add(await runtime.db.fetch(FIND_MISSED, partition_key, limit))
