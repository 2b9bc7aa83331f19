"""The edges of a flow: staged under a graph revision, then applied to their children.

An edge is resolved by the end of its upstream, applied or not; staged after that end, at once. Applying makes it count
in its child's group, and blocks a child that no worker has claimed yet.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from ffd.core.checks import check_int
from ffd.core.errors import (
    Conflict,
    ConflictKind,
    Contention,
    ContentionKind,
    NotFound,
    State,
    StateKind,
    Validation,
    ValidationKind,
)
from ffd.core.flows import EdgeApplied, EdgePolicy, EdgeStaged, policy_document
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id, parse_uuid
from ffd.db.database import Row, fetch_one
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cascade import Moved, decide_one
from ffd.ops.flow_lock import FlowKey, is_sealed, lock_open_flow, parse_flow_id
from ffd.ops.runtime import Runtime

MEMBERS: Final = Statement(
    "members",
    """
    with k as materialized (select $1::smallint as p, $2::uuid as f, k.id from unnest($3::uuid[]) k(id))
    select e.execution_id from k cross join lateral (
      select execution_id from ff_exec_core
      where partition_key = k.p and execution_id = k.id and flow_id = k.f) e
    """,
    Planning.CUSTOM,
)

READ_GROUP: Final = Statement(
    "read_group",
    """
    select (select policy from ff_edge_group
            where partition_key = $1 and flow_id = $2 and downstream_eid = $3) as policy,
           exists (select 1 from ff_edge
                   where (partition_key = $1 and flow_id = $2) is true and downstream_eid = $3) as has_edges
    """,
)

# $4 policy, $5 k
SET_GROUP: Final = Statement(
    "set_group",
    """
    insert into ff_edge_group (partition_key, flow_id, downstream_eid, policy, k_target)
    values ($1, $2, $3, $4::text::jsonb, $5)
    on conflict (partition_key, flow_id, downstream_eid) do update
      set policy = excluded.policy, k_target = excluded.k_target
    """,
)

# $3 edge_id, $4 upstream, $5 downstream. `leads_back`: the upstream can be reached from the downstream already.
CHECK_EDGE: Final = Statement(
    "check_edge",
    """
    with recursive reached(id) as (
      select $5::uuid
      union
      select g.downstream_eid from reached r cross join lateral (
        select downstream_eid from ff_edge
        where (partition_key = $1 and flow_id = $2) is true and upstream_eid = r.id) g)
    select exists (select 1 from reached where id = $4) as leads_back,
           (select edge_id from ff_edge where partition_key = $1 and flow_id = $2 and edge_id = $3) as same_id,
           (select edge_id from ff_edge
            where (partition_key = $1 and flow_id = $2) is true and downstream_eid = $5 and upstream_eid = $4
            limit 1) as same_pair
    """,
    Planning.CUSTOM,
)

# An upstream that has ended resolves the edge here: it will not end again.
STAGE_EDGE: Final = Statement(
    "stage_edge",
    """
    with f as (
      update ff_flow_core t
      set graph_revision = t.graph_revision + 1,
          raw_fields = jsonb_set(t.raw_fields, '{edge_count}',
            to_jsonb(ff_policy_number(t.raw_fields, '{edge_count}', 0)::bigint + 1))
      where t.partition_key = $1 and t.flow_id = $2
      returning t.graph_revision),
    e as (
      insert into ff_edge (partition_key, flow_id, edge_id, upstream_eid, downstream_eid, policy, resolution)
      select $1, $2, $3, $4, $5,
             jsonb_build_object('dependency_kind', 'success_only', 'satisfaction_condition', 'all_required',
                                'data_passing_ref', '', 'edge_state', 'pending', 'created_at_ms', n.now,
                                'created_by', 'engine', 'staged_at_ms', n.now, 'applied_at_ms', null),
             case when u.state = 'completed' then 'satisfied'
                  when u.state in ('failed', 'cancelled', 'expired', 'skipped') then 'impossible' end
      from (select ff_now_ms() as now) n cross join lateral (
        select ff_public_state(x.lifecycle_phase, x.eligibility_state, x.public_state, (
                 select t.outcome from ff_attempt t where t.partition_key = x.partition_key
                 and t.execution_id = x.execution_id and t.attempt_index = x.attempt_index)) as state
        from ff_exec_core x where x.partition_key = $1 and x.execution_id = $4) u)
    select graph_revision from f
    """,
)

READ_EDGE: Final = Statement(
    "read_edge",
    """
    select downstream_eid, resolution, policy ->> 'edge_state' = 'applied' as is_applied, upstream_eid
    from ff_edge where partition_key = $1 and flow_id = $2 and edge_id = $3
    """,
)

# $3 edge_id, $4 downstream. The edge counts in its group as it stands: satisfied, impossible or open.
APPLY_EDGE: Final = Statement(
    "apply_edge",
    """
    with e as (
      update ff_edge set policy = policy || jsonb_build_object('edge_state', 'applied', 'applied_at_ms', ff_now_ms())
      where partition_key = $1 and flow_id = $2 and edge_id = $3
      returning resolution, upstream_eid),
    n as (
      select case when e.resolution = 'satisfied' then 1 else 0 end as satisfied,
             case when e.resolution = 'impossible' and u.public_state = 'skipped' then 1 else 0 end as skipped,
             case when e.resolution = 'impossible' and u.public_state <> 'skipped' then 1 else 0 end as failed,
             case when e.resolution is null then 1 else 0 end as open
      from e cross join lateral (
        select public_state from ff_exec_core where partition_key = $1 and execution_id = e.upstream_eid) u)
    insert into ff_edge_group as g (partition_key, flow_id, downstream_eid, policy, success_count, skip_count,
                                    fail_count, running_count)
    select $1, $2, $4, '{"kind": "all_of"}', n.satisfied, n.skipped, n.failed, n.open from n
    on conflict (partition_key, flow_id, downstream_eid) do update set
      success_count = g.success_count + excluded.success_count, skip_count = g.skip_count + excluded.skip_count,
      fail_count = g.fail_count + excluded.fail_count, running_count = g.running_count + excluded.running_count
    """,
)

# A child that no worker has claimed waits for its edges; what it waited for before (a delay) it waits for after them.
BLOCK_CHILD: Final = Statement(
    "block_child",
    """
    with k as materialized (
      select lifecycle_phase, eligibility_state, attempt_state, started_at_ms from ff_exec_core
      where partition_key = $1 and execution_id = $2 for no key update),
    r as materialized (
      select ff_now_ms() as now,
             case attempt_state when 'pending_replay_attempt' then 'blocked_replay' else 'blocked_first' end as next_row
      from k
      where lifecycle_phase in ('runnable', 'submitted')
        and eligibility_state in ('eligible_now', 'not_eligible_until_time') and started_at_ms is null
        and attempt_state in ('pending_first_attempt', 'pending', 'pending_replay_attempt'))
    update ff_exec_core e set [[by r.next_row: blocked_first, blocked_replay]], state_since_ms = r.now
    from r where e.partition_key = $1 and e.execution_id = $2
    """,
)

OPEN_EDGES: Final = Statement(
    "open_edges",
    """
    select count(*) from ff_edge
    where (partition_key = $1 and flow_id = $2) is true and downstream_eid = $3 and resolution is null
      and policy ->> 'edge_state' = 'applied'
    """,
)


def _member(text: object, flow: FlowKey, field: str) -> ExecutionKey:
    key = parse_execution_id(text, field)
    if key.partition_key != flow.partition_key:
        raise _no_member(key, flow)
    return key


def _no_member(key: ExecutionKey, flow: FlowKey) -> State:
    return State(
        StateKind.EXECUTION_NOT_IN_FLOW,
        f"{key} is no member of flow {flow.flow_id}",
        execution_id=str(key),
        flow_id=str(flow.flow_id),
    )


async def _check_members(connection: Connection, flow: FlowKey, *keys: ExecutionKey) -> None:
    rows = await connection.fetch(MEMBERS.sql, *flow, [key.execution_id for key in keys])
    found = {row["execution_id"] for row in rows}
    for key in keys:
        if key.execution_id not in found:
            raise _no_member(key, flow)


async def set_edge_group_policy(runtime: Runtime, flow_id: str, downstream: str, policy: EdgePolicy) -> None:
    """Say how the group of a child's edges decides."""
    flow = parse_flow_id(flow_id)
    child = _member(downstream, flow, "downstream")
    document = policy_document(policy, "policy")

    async def body(connection: Connection) -> None:
        await lock_open_flow(connection, flow)
        await _check_members(connection, flow, child)
        group = await fetch_one(connection, READ_GROUP, *flow, child.execution_id)
        if group["policy"] is not None and msgspec.json.decode(group["policy"]) == document:
            return
        if group["has_edges"]:
            raise Validation(
                ValidationKind.INVALID_INPUT,
                f"{child} has edges already; set the policy before the first one is staged",
                "policy",
            )
        text = msgspec.json.encode(document).decode()
        await connection.execute(SET_GROUP.sql, *flow, child.execution_id, text, target(document))

    await runtime.db.transact("set_edge_group_policy", body, Planning.CUSTOM)


def target(document: dict[str, Any]) -> int:
    """FlowFabric's `k_target`: how many successes a group asks for; 0 stands for all."""
    if document["kind"] == "quorum":
        return int(document["k"])
    return 1 if document["kind"] == "any_of" else 0


async def stage_dependency_edge(
    runtime: Runtime,
    flow_id: str,
    upstream: str,
    downstream: str,
    *,
    edge_id: str | None,
    expected_graph_revision: int | None,
) -> EdgeStaged:
    """Put an edge into the graph."""
    flow = parse_flow_id(flow_id)
    ends = (_member(upstream, flow, "upstream"), _member(downstream, flow, "downstream"))
    uuid = new_uuid() if edge_id is None else parse_uuid(edge_id, "edge_id")
    if expected_graph_revision is not None:
        check_int(expected_graph_revision, "expected_graph_revision", 0, 2**63 - 1)
    if ends[0] == ends[1]:
        raise Conflict(
            ConflictKind.SELF_REFERENCING_EDGE, f"{ends[0]} would wait for itself", execution_id=str(ends[0])
        )
    args = (*flow, uuid, ends[0].execution_id, ends[1].execution_id)

    async def body(connection: Connection) -> int:
        held = await lock_open_flow(connection, flow)
        if expected_graph_revision not in (None, held["graph_revision"]):
            raise Contention(
                ContentionKind.STALE_GRAPH_REVISION,
                f"flow {flow.flow_id} is at revision {held['graph_revision']}, not {expected_graph_revision}",
                flow_id=str(flow.flow_id),
                graph_revision=held["graph_revision"],
            )
        await _check_members(connection, flow, *ends)
        _check_new(await fetch_one(connection, CHECK_EDGE, *args), *ends)
        revision: int = await connection.fetchval(STAGE_EDGE.sql, *args)
        return revision

    revision = await runtime.db.transact("stage_dependency_edge", body, Planning.CUSTOM)
    return EdgeStaged(str(uuid), revision)


def _check_new(found: Row, upstream: ExecutionKey, downstream: ExecutionKey) -> None:
    existing = found["same_id"] or found["same_pair"]
    if existing is not None:
        raise Conflict(ConflictKind.DEPENDENCY_ALREADY_EXISTS, f"edge {existing} exists already", edge_id=str(existing))
    if found["leads_back"]:
        raise Conflict(
            ConflictKind.CYCLE_DETECTED,
            f"{upstream} depends on {downstream} already",
            upstream=str(upstream),
            downstream=str(downstream),
        )


async def apply_dependency_to_child(runtime: Runtime, flow_id: str, edge_id: str) -> EdgeApplied:
    """Make a staged edge count."""
    flow = parse_flow_id(flow_id)
    uuid = parse_uuid(edge_id, "edge_id")

    async def body(connection: Connection) -> tuple[int, Moved]:
        moved = Moved()
        held = await lock_open_flow(connection, flow)
        edge = await connection.fetchrow(READ_EDGE.sql, *flow, uuid)
        if edge is None:
            raise NotFound("edge", str(uuid))
        child: UUID = edge["downstream_eid"]
        if not edge["is_applied"]:
            await connection.execute(APPLY_EDGE.sql, *flow, uuid, child)
            await connection.execute(BLOCK_CHILD.sql, flow.partition_key, child)
            # The new edge may be the one that decides: its upstream may have ended before.
            await decide_one(connection, flow, child, moved, sealed=is_sealed(held))
        unsatisfied: int = await connection.fetchval(OPEN_EDGES.sql, *flow, child)
        return unsatisfied, moved

    unsatisfied, moved = await runtime.db.transact("apply_dependency_to_child", body, Planning.CUSTOM)
    moved.announce(runtime)
    return EdgeApplied(str(uuid), unsatisfied)
