"""Looking at flows: one, pages of many, their edges, and what a member's upstreams brought."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ffd.core.checks import check_int, check_text
from ffd.core.errors import NotFound, Validation, ValidationKind
from ffd.core.flows import ENDED_FLOW_STATES, EdgeSnapshot, FlowSnapshot, FlowState
from ffd.core.ids import ExecutionKey, parse_execution_id, parse_uuid
from ffd.core.limits import PAGE_MAX
from ffd.core.records import Page
from ffd.core.state import TERMINAL_STATES, PublicState
from ffd.db.database import Row
from ffd.db.statement import Planning, Statement
from ffd.ops.describe import EXISTS, check_tag
from ffd.ops.flow_lock import FlowKey, parse_flow_id
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    "flow columns": """
      f.partition_key, f.flow_id, f.graph_revision, f.public_flow_state, f.created_at_ms, f.terminal_at_ms,
      f.sealed_at_ms, f.raw_fields, (
        select jsonb_object_agg(c.state, c.members) from (
          select ff_public_state(e.lifecycle_phase, e.eligibility_state, e.public_state,
                   case when e.lifecycle_phase = 'terminal' then (
                     select t.outcome from ff_attempt t where t.partition_key = e.partition_key
                     and t.execution_id = e.execution_id and t.attempt_index = e.attempt_index) end) as state,
                 count(*) as members
          from ff_exec_core e where e.partition_key = f.partition_key and e.flow_id = f.flow_id
          group by 1) c) as members""",
}

DESCRIBE_FLOW: Final = Statement(
    "describe_flow",
    "select [[flow columns]] from ff_flow_core f where f.partition_key = $1 and f.flow_id = $2",
    Planning.READ,
    phrases=_PHRASES,
)

# $1 and $2 cursor, $3 limit, $4 namespace, $5 tag key, $6 tag value, $7 states that may be stored
LIST_FLOWS: Final = Statement(
    "list_flows",
    """
    with p as materialized (
      select f.partition_key, f.flow_id from ff_flow_core f
      where ($1::uuid is null or (f.flow_id, f.partition_key) < ($1, $2::smallint))
        and ($4::text is null or f.raw_fields ->> 'namespace' = $4)
        and ($5::text is null or f.raw_fields ->> $5 = $6)
        and f.public_flow_state = any($7::text[])
      order by f.flow_id desc, f.partition_key desc limit $3)
    select [[flow columns]]
    from p join ff_flow_core f on f.partition_key = p.partition_key and f.flow_id = p.flow_id
    order by f.flow_id desc, f.partition_key desc
    """,
    Planning.READ,
    phrases=_PHRASES,
)

# $1 partition_key, $2 flow_id, $3 cursor, $4 limit, $5 upstream, $6 downstream
LIST_EDGES: Final = Statement(
    "list_edges",
    """
    select edge_id, upstream_eid, downstream_eid, resolution, policy ->> 'edge_state' = 'applied' as is_applied,
           ff_policy_number(policy, '{created_at_ms}', null)::bigint as created_at_ms
    from ff_edge
    where partition_key = $1 and flow_id = $2 and ($3::uuid is null or edge_id > $3)
      and ($5::uuid is null or upstream_eid = $5) and ($6::uuid is null or downstream_eid = $6)
    order by edge_id limit $4
    """,
    Planning.READ,
)

FLOW_EXISTS: Final = Statement("flow_exists", "select 1 from ff_flow_core where partition_key = $1 and flow_id = $2")

UPSTREAM_RESULTS: Final = Statement(
    "upstream_results",
    """
    select g.upstream_eid, u.result
    from (select partition_key, execution_id, flow_id from ff_exec_core
          where partition_key = $1 and execution_id = $2) e
    cross join lateral (
      select upstream_eid from ff_edge
      where (partition_key = e.partition_key and flow_id = e.flow_id) is true and downstream_eid = e.execution_id) g
    left join lateral (
      select result from ff_exec_core
      where partition_key = e.partition_key and execution_id = g.upstream_eid
        and lifecycle_phase = 'terminal') u on true
    """,
    Planning.READ,
)

_TERMINAL: Final = {state.value for state in TERMINAL_STATES}
_BLOCKED: Final = {PublicState.SUSPENDED.value, PublicState.DELAYED.value, PublicState.WAITING_CHILDREN.value}


def _state(row: Row, members: dict[str, int]) -> FlowState:
    """A stored end stands; until it is sealed a flow is open; then its members tell."""
    if row["public_flow_state"] in ENDED_FLOW_STATES:
        return FlowState(row["public_flow_state"])
    if row["sealed_at_ms"] is None:
        return FlowState.OPEN
    present = members.keys() - _TERMINAL
    if PublicState.RUNNING in present:
        return FlowState.RUNNING
    if present and present <= _BLOCKED:
        return FlowState.BLOCKED
    return FlowState.OPEN


def _read_flow(row: Row) -> FlowSnapshot:
    fields: dict[str, Any] = msgspec.json.decode(row["raw_fields"])
    members: dict[str, int] = msgspec.json.decode(row["members"]) if row["members"] else {}
    return FlowSnapshot(
        flow_id=str(row["flow_id"]),
        kind=str(fields.get("flow_kind", "")),
        namespace=str(fields.get("namespace", "")),
        state=_state(row, members),
        is_sealed=row["sealed_at_ms"] is not None,
        tags={key: str(value) for key, value in fields.items() if "." in key},
        graph_revision=row["graph_revision"],
        node_count=sum(members.values()),
        edge_count=int(fields.get("edge_count", 0)),
        members=members,
        created_at_ms=row["created_at_ms"],
        terminal_at_ms=row["terminal_at_ms"],
        cancellation_policy=fields.get("cancellation_policy"),
        cancel_reason=fields.get("cancel_reason"),
    )


async def describe_flow(runtime: Runtime, flow_id: str) -> FlowSnapshot | None:
    """The flow as it is now."""
    row = await runtime.db.fetchrow(DESCRIBE_FLOW, *parse_flow_id(flow_id))
    return None if row is None else _read_flow(row)


async def list_flows(
    runtime: Runtime,
    *,
    state: FlowState | str | None,
    namespace: str | None,
    tag: str | tuple[str, str] | None,
    after: str | None,
    limit: int,
) -> Page[FlowSnapshot]:
    """A page of flows, newest ids first. A page filtered by a state that members tell may be short."""
    check_int(limit, "limit", 0, PAGE_MAX)
    wanted = None if state is None else _check_state(state)
    if namespace is not None:
        check_text(namespace, "namespace")
    key = None if after is None else parse_flow_id(after, "after")
    cursor = (None, None) if key is None else (key.flow_id, key.partition_key)
    filters = (namespace, *check_tag(tag))
    if limit == 0:
        return Page([], None)
    is_stored = wanted is not None and wanted.is_terminal
    stored = [wanted.value] if wanted is not None and is_stored else [each.value for each in FlowState]
    if wanted is not None and not is_stored:
        stored = [each.value for each in FlowState if not each.is_terminal]
    items: list[FlowSnapshot] = []
    while True:
        rows = await runtime.db.fetch(LIST_FLOWS, *cursor, limit + 1, *filters, stored)
        for at, row in enumerate(rows):
            if len(items) == limit:
                return Page(items, str(rows[at - 1]["flow_id"]) if at else items[-1].flow_id)
            snapshot = _read_flow(row)
            if wanted in (None, snapshot.state):
                items.append(snapshot)
        if len(rows) <= limit:
            return Page(items, None)
        cursor = (rows[-1]["flow_id"], rows[-1]["partition_key"])


def _check_state(state: FlowState | str) -> FlowState:
    try:
        return FlowState(state)
    except ValueError:
        raise Validation(ValidationKind.INVALID_INPUT, f"expected one of {', '.join(FlowState)}", "state") from None


async def list_edges(
    runtime: Runtime, flow_id: str, *, upstream: str | None, downstream: str | None, after: str | None, limit: int
) -> Page[EdgeSnapshot]:
    """A page of a flow's edges."""
    flow = parse_flow_id(flow_id)
    check_int(limit, "limit", 0, PAGE_MAX)
    cursor = None if after is None else parse_uuid(after, "after")
    ends = [
        None if text is None else parse_execution_id(text, field).execution_id
        for text, field in ((upstream, "upstream"), (downstream, "downstream"))
    ]
    if await runtime.db.fetchrow(FLOW_EXISTS, *flow) is None:
        raise NotFound("flow", str(flow.flow_id))
    rows = await runtime.db.fetch(LIST_EDGES, *flow, cursor, limit + 1, *ends) if limit else []
    items = [_read_edge(flow, row) for row in rows[:limit]]
    return Page(items, items[-1].edge_id if len(rows) > limit else None)


def _read_edge(flow: FlowKey, row: Row) -> EdgeSnapshot:
    return EdgeSnapshot(
        edge_id=str(row["edge_id"]),
        upstream=str(ExecutionKey(flow.partition_key, row["upstream_eid"])),
        downstream=str(ExecutionKey(flow.partition_key, row["downstream_eid"])),
        is_applied=bool(row["is_applied"]),
        resolution=row["resolution"],
        created_at_ms=row["created_at_ms"],
    )


async def get_upstream_results(runtime: Runtime, execution_id: str) -> dict[str, bytes | None]:
    """The results of the executions with an edge into this one."""
    key = parse_execution_id(execution_id)
    rows = await runtime.db.fetch(UPSTREAM_RESULTS, *key)
    if not rows and await runtime.db.fetchrow(EXISTS, *key) is None:
        raise NotFound("execution", str(key))
    return {str(ExecutionKey(key.partition_key, row["upstream_eid"])): row["result"] for row in rows}
