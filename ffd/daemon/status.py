"""What an operator asks first: who is alive, who sweeps what, what waits in the lanes and what is overdue.

Read only, from the tables and by the reconcilers' own probes, so that it needs no daemon and tells when there is none.
Every time is the database's. Each statement sees its own moment: numbers that belong together may differ by a few.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ffd.core.errors import Unavailable
from ffd.core.limits import PARTITIONS
from ffd.db.errors import sqlstate
from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.registry import Reconciler

# A daemon that crashes again and again leaves a row each time, for an hour.
NODES_MAX: Final = 50
ALL_PARTITIONS: Final = tuple(range(PARTITIONS))
_QUERY_CANCELED: Final = "57014"

# $1 how many. The living first, then those that died last.
READ_NODES: Final = Statement(
    "read_nodes",
    """
    select n.node_id, n.name, n.version, n.started_at_ms, n.heartbeat_at_ms, n.expires_at_ms,
           n.expires_at_ms > ff_now_ms() as is_alive,
           (select count(*) from ff_partition p where p.node_id = n.node_id) as partitions, count(*) over () as nodes
    from ff_node n
    order by n.expires_at_ms > ff_now_ms() desc,
             case when n.expires_at_ms > ff_now_ms() then 0 else -n.expires_at_ms end, n.name, n.node_id
    limit $1
    """,
    Planning.READ,
)
# The owner of a partition counts while it is alive.
COUNT_PARTITIONS: Final = Statement(
    "count_partitions",
    """
    select ff_now_ms() as now_ms, count(*) as partitions,
           count(*) filter (where exists (
             select 1 from ff_node n where n.node_id = p.node_id and n.expires_at_ms > ff_now_ms())) as owned
    from ff_partition p
    """,
    Planning.READ,
)
# $1 how many lanes, the largest first. Grouped by what is stored, because a FlowFabric worker leaves other words in
# public_state, and put into words per group, because a function per row takes longer than all the rest.
COUNT_LANES: Final = Statement(
    "count_lanes",
    """
    with n as materialized (
      select lane_id, lifecycle_phase, eligibility_state, public_state, count(*) as executions,
             min(coalesce(state_since_ms, created_at_ms)) as since_ms
      from ff_exec_core
      where public_state in ('waiting', 'resumable', 'delayed', 'waiting_children', 'running', 'active', 'suspended')
        and lifecycle_phase not in ('terminal', 'cancelled')
      group by 1, 2, 3, 4),
    s as (
      select lane_id, ff_public_state(lifecycle_phase, eligibility_state, public_state, null) as state, executions,
             case when [[claimable]] then since_ms end as claimable_since_ms
      from n),
    l as (
      select lane_id, sum(executions) as executions, ff_now_ms() - min(claimable_since_ms) as oldest_ms,
             coalesce(sum(executions) filter (where state in ('waiting', 'resumable')), 0)::bigint as waiting,
             coalesce(sum(executions) filter (where state = 'running'), 0)::bigint as running,
             coalesce(sum(executions) filter (where state = 'delayed'), 0)::bigint as delayed,
             coalesce(sum(executions) filter (where state = 'suspended'), 0)::bigint as suspended,
             coalesce(sum(executions) filter (where state = 'waiting_children'), 0)::bigint as waiting_children
      from s group by lane_id)
    select lane_id, waiting, oldest_ms, running, delayed, suspended, waiting_children, count(*) over () as lanes
    from l order by executions desc, lane_id limit $1
    """,
    Planning.READ,
)
READ_QUARANTINE: Final = Statement(
    "read_quarantine",
    "select reconciler, count(*) as rows from ff_quarantine where retry_at_ms > ff_now_ms() group by 1 order by 1",
    Planning.READ,
)


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon. One that is dead is so since `expires_at_ms`; its `partitions` wait for another owner."""

    node_id: str
    name: str
    version: str
    is_alive: bool
    started_at_ms: int
    heartbeat_at_ms: int
    expires_at_ms: int
    partitions: int


class PartitionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How many partitions have an owner that is alive."""

    total: int
    owned: int
    unowned: int


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Executions of a lane that have not ended. `oldest_ms`: how long the oldest claimable one has been waiting."""

    lane: str
    waiting: int
    oldest_ms: int | None
    running: int
    delayed: int
    suspended: int
    waiting_children: int


class ReconcilerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one reconciler has to do. `lag_ms`: how long the oldest due row has been due."""

    reconciler: str
    due_partitions: int
    lag_ms: int
    quarantined: int


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `lanes` is None when counting took longer than a statement may."""

    now_ms: int
    nodes: list[NodeStatus]
    nodes_left_out: int
    partitions: PartitionStatus
    lanes: list[LaneStatus] | None
    lanes_left_out: int
    reconcilers: list[ReconcilerStatus]
    quarantined: int

    @property
    def is_swept(self) -> bool:
        """Whether any daemon is alive."""
        return any(node.is_alive for node in self.nodes)


async def read_status(runtime: Runtime, reconcilers: dict[str, Reconciler], lanes_max: int) -> Status:
    """Look once. What is due by retention follows from `runtime.retention`."""
    (partitions,) = await runtime.db.fetch(COUNT_PARTITIONS)
    nodes = await runtime.db.fetch(READ_NODES, NODES_MAX)
    quarantined = {row["reconciler"]: row["rows"] for row in await runtime.db.fetch(READ_QUARANTINE)}
    due = [await _look(runtime, each, quarantined.get(each.name, 0)) for each in reconcilers.values()]
    lanes, lanes_left_out = await _count_lanes(runtime, lanes_max)
    return Status(
        now_ms=partitions["now_ms"],
        nodes=[NodeStatus(**{name: value for name, value in row.items() if name != "nodes"}) for row in nodes],
        nodes_left_out=nodes[0]["nodes"] - len(nodes) if nodes else 0,
        partitions=PartitionStatus(
            total=partitions["partitions"],
            owned=partitions["owned"],
            unowned=partitions["partitions"] - partitions["owned"],
        ),
        lanes=lanes,
        lanes_left_out=lanes_left_out,
        reconcilers=due,
        quarantined=sum(quarantined.values()),
    )


async def _look(runtime: Runtime, reconciler: Reconciler, quarantined: int) -> ReconcilerStatus:
    seen = await reconciler.look(runtime, ALL_PARTITIONS)
    return ReconcilerStatus(
        reconciler=reconciler.name,
        due_partitions=len(seen.due),
        lag_ms=seen.lag_ms,
        quarantined=quarantined,
    )


async def _count_lanes(runtime: Runtime, lanes_max: int) -> tuple[list[LaneStatus] | None, int]:
    """The largest lanes, and how many others there are."""
    try:
        rows = await runtime.db.fetch(COUNT_LANES, lanes_max)
    except Unavailable as error:
        # A backlog too large to count is when the rest is needed most.
        if error.__cause__ is None or sqlstate(error.__cause__) != _QUERY_CANCELED:
            raise
        return None, 0
    lanes = [
        LaneStatus(
            lane=row["lane_id"],
            waiting=row["waiting"],
            oldest_ms=row["oldest_ms"],
            running=row["running"],
            delayed=row["delayed"],
            suspended=row["suspended"],
            waiting_children=row["waiting_children"],
        )
        for row in rows
    ]
    return lanes, rows[0]["lanes"] - len(rows) if rows else 0
