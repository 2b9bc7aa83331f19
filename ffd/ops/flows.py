"""Making flows by hand: open, take members, seal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ffd.core.checks import check_tags, check_text
from ffd.core.errors import Conflict, ConflictKind, NotFound, Validation, ValidationKind
from ffd.core.flows import FlowCreated
from ffd.core.ids import new_uuid, parse_execution_id, partition_of
from ffd.core.limits import KIND_BYTES_MAX
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cascade import Moved, end_flow
from ffd.ops.create import COUNT_MEMBERS
from ffd.ops.flow_lock import FlowKey, check_unsealed, is_sealed, lock_open_flow, parse_flow_id
from ffd.ops.member import LOCK_MEMBER
from ffd.ops.runtime import Runtime

# $3 raw_fields, $4 whether it is sealed
CREATE_FLOW: Final = Statement(
    "create_flow",
    """
    insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms, sealed_at_ms, graph_revision,
                              raw_fields)
    select $1, $2, 'open', n.now, case when $4::boolean then n.now end, $5, $3::text::jsonb
    from (select ff_now_ms() as now) n
    on conflict (partition_key, flow_id) do nothing
    returning 1
    """,
)

JOIN_FLOW: Final = Statement(
    "join_flow",
    "update ff_exec_core set flow_id = $3 where partition_key = $1 and execution_id = $2",
)

SEAL_FLOW: Final = Statement(
    "seal_flow",
    "update ff_flow_core set sealed_at_ms = ff_now_ms() where partition_key = $1 and flow_id = $2",
)

# A quorum that its edges can never reach would block its child for ever.
SHORT_QUORUM: Final = Statement(
    "short_quorum",
    """
    select g.downstream_eid, q.k, n.edges from ff_edge_group g
    cross join lateral (select ff_policy_number(g.policy, '{k}', 1)::int as k) q
    cross join lateral (
      select count(*) as edges from ff_edge e
      where (e.partition_key = $1 and e.flow_id = $2) is true and e.downstream_eid = g.downstream_eid) n
    where g.partition_key = $1 and g.flow_id = $2 and g.policy ->> 'kind' = 'quorum' and n.edges < q.k
    limit 1
    """,
)


def flow_document(namespace: str, kind: str, tags: Mapping[str, str] | None, **fields: Any) -> str:
    """The overflow document of a flow; tags stand beside its other fields."""
    document = {
        "namespace": namespace,
        "flow_kind": check_text(kind, "kind", KIND_BYTES_MAX, may_be_empty=True),
        "node_count": 0,
        "edge_count": 0,
        **fields,
        **check_tags(tags),
    }
    return msgspec.json.encode(document).decode()


async def create_flow(
    runtime: Runtime, *, flow_id: str | None, kind: str, tags: Mapping[str, str] | None
) -> FlowCreated:
    """Open a flow, or find the one of that id."""
    if flow_id is None:
        uuid = new_uuid()
        key = FlowKey(partition_of(uuid), uuid)
    else:
        key = parse_flow_id(flow_id)
    document = flow_document(runtime.namespace, kind, tags)
    row = await runtime.db.fetchrow(CREATE_FLOW, *key, document, False, 0)
    return FlowCreated(str(key.flow_id), row is None)


async def add_execution_to_flow(runtime: Runtime, flow_id: str, execution_id: str) -> None:
    """Make an execution a member."""
    flow = parse_flow_id(flow_id)
    key = parse_execution_id(execution_id)
    if key.partition_key != flow.partition_key:
        raise Validation(
            ValidationKind.INVALID_INPUT,
            f"{key} lies in another partition than flow {flow.flow_id}, whose members lie in {flow.partition_key};"
            " create it with flow_id",
            "execution_id",
        )

    async def body(connection: Connection) -> None:
        held = await lock_open_flow(connection, flow)
        core = await connection.fetchrow(LOCK_MEMBER.sql, *key)
        if core is None:
            raise NotFound("execution", str(key))
        if core["flow_id"] == flow.flow_id:
            return
        if core["flow_id"] is not None:
            raise Conflict(
                ConflictKind.EXECUTION_ALREADY_IN_FLOW,
                f"{key} is a member of flow {core['flow_id']}",
                execution_id=str(key),
                flow_id=str(core["flow_id"]),
            )
        check_unsealed(held, flow.flow_id)
        await connection.execute(JOIN_FLOW.sql, *key, flow.flow_id)
        await connection.execute(COUNT_MEMBERS.sql, *flow, 1)

    await runtime.db.transact("add_execution_to_flow", body)


async def seal_flow(runtime: Runtime, flow_id: str) -> None:
    """Take no new members; end the flow if all it has have ended."""
    flow = parse_flow_id(flow_id)

    async def body(connection: Connection) -> Moved:
        moved = Moved()
        held = await lock_open_flow(connection, flow)
        if is_sealed(held):
            return moved
        short = await connection.fetchrow(SHORT_QUORUM.sql, *flow)
        if short is not None:
            raise Validation(
                ValidationKind.INVALID_DEPENDENCY,
                f"{short['downstream_eid']} asks for a quorum of {short['k']} over {short['edges']} edges",
                "flow_id",
            )
        await connection.execute(SEAL_FLOW.sql, *flow)
        await end_flow(connection, flow, moved)
        return moved

    moved = await runtime.db.transact("seal_flow", body, Planning.CUSTOM)
    moved.announce(runtime)
