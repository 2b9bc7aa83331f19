"""A whole graph in one transaction: the flow, its executions, its edges and their groups, one statement each.

With an idempotency key the flow's id follows from the key, so the flow's own row remembers the call, for as long as
the flow is kept. Node names are stored with their executions.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final
from uuid import UUID

import msgspec

from ffd.core.checks import check_text
from ffd.core.errors import Validation, ValidationKind
from ffd.core.events import work_ring
from ffd.core.flows import FlowSpec, FlowSubmitted, Graph, check_graph
from ffd.core.ids import ExecutionKey, new_uuid, partition_of
from ffd.core.limits import BULK_BYTES_MAX, KEY_BYTES_MAX
from ffd.db.database import fetch_one
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.create import Draft, draft, past_deadline
from ffd.ops.edges import target
from ffd.ops.flow_lock import FlowKey
from ffd.ops.flows import CREATE_FLOW, flow_document
from ffd.ops.runtime import Runtime

# $1 partition_key, $2 flow_id, then one array per column. `late`: the first whose deadline has passed.
CREATE_NODES: Final = Statement(
    "create_nodes",
    """
    with n as materialized (select ff_now_ms() as now),
    k as materialized (
      select k.*, n.now, case when k.is_blocked then 'blocked_first'
                              when k.delay_until_ms > n.now then 'delayed_first' else 'waiting_first' end as first_row
      from n, unnest($3::uuid[], $4::text[], $5::text[], $6::int[], $7::bigint[], $8::bigint[], $9::bytea[],
                     $10::text[], $11::text[], $12::boolean[])
        k(e, lane, capabilities, priority, delay_until_ms, deadline_at_ms, payload, policy, raw_fields, is_blocked)),
    x as (
      insert into ff_exec_core (
        partition_key, execution_id, flow_id, lane_id, required_capabilities, priority, delay_until_ms,
        deadline_at_ms, payload, policy, raw_fields, created_at_ms, state_since_ms, [[columns]])
      select $1, k.e, $2, k.lane, string_to_array(k.capabilities, ','), k.priority,
             case when k.delay_until_ms > k.now then k.delay_until_ms end, k.deadline_at_ms, k.payload,
             k.policy::jsonb, k.raw_fields::jsonb, k.now, k.now,
             [[values by k.first_row: waiting_first, delayed_first, blocked_first]]
      from k where coalesce(k.deadline_at_ms > k.now, true)
      returning lane_id, public_state)
    select n.now, (select count(*) from x) as written,
           array(select distinct lane_id from x where public_state = 'waiting') as lanes
    from n
    """,
    Planning.CUSTOM,
)

# $3 edge ids, $4 upstreams, $5 downstreams
CREATE_EDGES: Final = Statement(
    "create_edges",
    """
    insert into ff_edge (partition_key, flow_id, edge_id, upstream_eid, downstream_eid, policy)
    select $1, $2, k.id, k.up, k.down,
           jsonb_build_object('dependency_kind', 'success_only', 'satisfaction_condition', 'all_required',
                              'data_passing_ref', '', 'edge_state', 'applied', 'created_at_ms', n.now,
                              'created_by', 'engine', 'staged_at_ms', n.now, 'applied_at_ms', n.now)
    from (select ff_now_ms() as now) n, unnest($3::uuid[], $4::uuid[], $5::uuid[]) k(id, up, down)
    """,
    Planning.CUSTOM,
)

# $3 children, $4 policies, $5 targets, $6 how many edges lead to each
CREATE_GROUPS: Final = Statement(
    "create_groups",
    """
    insert into ff_edge_group (partition_key, flow_id, downstream_eid, policy, k_target, running_count)
    select $1, $2, k.id, k.policy::jsonb, k.target, k.edges
    from unnest($3::uuid[], $4::text[], $5::int[], $6::int[]) k(id, policy, target, edges)
    """,
    Planning.CUSTOM,
)

NODE_NAMES: Final = Statement(
    "node_names",
    """
    select execution_id, raw_fields ->> 'flow_node' as name from ff_exec_core
    where partition_key = $1 and flow_id = $2 and raw_fields ? 'flow_node'
    """,
    Planning.READ,
)


def _flow_of_key(namespace: str, idempotency_key: str) -> UUID:
    """The id that a key stands for: the digest of namespace and key, as a uuid of version 8."""
    digest = sha256(f"ffd flow\0{namespace}\0{idempotency_key}".encode()).digest()
    number = int.from_bytes(digest[:16]) & ~(0xF000 << 64) & ~(0xC000 << 48)
    return UUID(int=number | (0x8000 << 64) | (0x8000 << 48))


def _drafts(spec: FlowSpec, graph: Graph, flow: FlowKey, namespace: str) -> dict[str, Draft]:
    drafts = {}
    for name in graph.names:
        try:
            new = draft(msgspec.structs.replace(spec.nodes[name], flow_id=str(flow.flow_id)), namespace)
        except Validation as error:
            raise Validation(error.kind, error.detail, f"nodes[{name}].{error.field}") from None
        document = msgspec.json.decode(new.raw_fields)
        drafts[name] = new._replace(raw_fields=msgspec.json.encode({**document, "flow_node": name}).decode())
    size = sum(len(new.payload or b"") for new in drafts.values())
    if size > BULK_BYTES_MAX:
        raise Validation(
            ValidationKind.PAYLOAD_TOO_LARGE,
            f"{size} bytes of payload in one flow, at most {BULK_BYTES_MAX} are allowed",
            "nodes",
        )
    return drafts


async def submit_flow(runtime: Runtime, spec: FlowSpec, idempotency_key: str | None) -> FlowSubmitted:
    """Create a sealed flow with all its members and edges, or find the one of that key."""
    graph = check_graph(spec)
    if idempotency_key is None:
        uuid = new_uuid()
    else:
        uuid = _flow_of_key(runtime.namespace, check_text(idempotency_key, "idempotency_key", KEY_BYTES_MAX))
    flow = FlowKey(partition_of(uuid), uuid)
    drafts = _drafts(spec, graph, flow, runtime.namespace)
    document = flow_document(
        runtime.namespace, spec.kind, spec.tags, node_count=len(graph.names), edge_count=len(graph.edges)
    )
    revision = len(graph.names) + len(graph.edges)

    async def body(connection: Connection) -> tuple[dict[str, str], list[str] | None]:
        created = await connection.fetchrow(CREATE_FLOW.sql, *flow, document, True, revision)
        if created is None:
            rows = await connection.fetch(NODE_NAMES.sql, *flow)
            return {row["name"]: str(ExecutionKey(flow.partition_key, row["execution_id"])) for row in rows}, None
        lanes = await _write_nodes(connection, flow, graph, drafts)
        await _write_edges(connection, flow, graph, drafts)
        return {name: str(new.key) for name, new in drafts.items()}, lanes

    ids, lanes = await runtime.db.transact("submit_flow", body, Planning.CUSTOM)
    if lanes is None:
        return FlowSubmitted(str(flow.flow_id), ids, is_duplicate=True)
    runtime.ring(tuple(work_ring(lane) for lane in lanes))
    runtime.register_lanes({new.lane for new in drafts.values()})
    return FlowSubmitted(str(flow.flow_id), ids)


async def _write_nodes(connection: Connection, flow: FlowKey, graph: Graph, drafts: dict[str, Draft]) -> list[str]:
    """Insert the executions; the lanes of those that are claimable at once."""
    rows = list(drafts.values())
    columns: list[list[Any]] = [
        [new.execution_id for new in rows],
        [new.lane for new in rows],
        [",".join(new.capabilities) for new in rows],
        [new.priority for new in rows],
        [new.delay_until_ms for new in rows],
        [new.deadline_at_ms for new in rows],
        [new.payload for new in rows],
        [new.policy for new in rows],
        [new.raw_fields for new in rows],
        [graph.incoming[name] > 0 for name in drafts],
    ]
    row = await fetch_one(connection, CREATE_NODES, *flow, *columns)
    if row["written"] < len(rows):
        name, late = next(
            (name, new)
            for name, new in drafts.items()
            if new.deadline_at_ms is not None and new.deadline_at_ms <= row["now"]
        )
        raise past_deadline(f"nodes[{name}].deadline_at_ms", late.deadline_at_ms, row["now"])
    lanes: list[str] = row["lanes"]
    return lanes


async def _write_edges(connection: Connection, flow: FlowKey, graph: Graph, drafts: dict[str, Draft]) -> None:
    if not graph.edges:
        return
    uuid_of = {name: new.execution_id for name, new in drafts.items()}
    await connection.execute(
        CREATE_EDGES.sql,
        *flow,
        [new_uuid() for _ in graph.edges],
        [uuid_of[upstream] for upstream, _ in graph.edges],
        [uuid_of[downstream] for _, downstream in graph.edges],
    )
    children = sorted(graph.incoming)
    policies = [graph.policies.get(name, {"kind": "all_of"}) for name in children]
    await connection.execute(
        CREATE_GROUPS.sql,
        *flow,
        [uuid_of[name] for name in children],
        [msgspec.json.encode(policy).decode() for policy in policies],
        [target(policy) for policy in policies],
        [graph.incoming[name] for name in children],
    )
