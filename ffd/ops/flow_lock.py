"""The lock order of flow members: the flow row first, then the executions (design, one lock order).

Ending a member changes what its flow's other members may do, so such calls take the flow row exclusively and
queue behind each other. Which flow an execution belongs to is known only from its own row, hence the second
transaction after a first statement that found a member. Edges and groups are written by holders of the flow row
alone: whoever holds it may lock executions and read the graph in one statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple
from uuid import UUID

from ffd.core.errors import Contention, ContentionKind, NotFound, State, StateKind, Validation, ValidationKind
from ffd.core.flows import ENDED_FLOW_STATES
from ffd.core.ids import parse_uuid, partition_of
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Statement

LOCK_FLOW: Final = Statement(
    "lock_flow",
    """
    select public_flow_state, terminal_at_ms, sealed_at_ms, graph_revision, raw_fields from ff_flow_core
    where partition_key = $1 and flow_id = $2 for no key update
    """,
)


# For reconcilers, which have others to serve. What is missing in the answer is held, or is not there.
LOCK_FREE_FLOW: Final = Statement(
    "lock_free_flow",
    """
    select public_flow_state, terminal_at_ms, sealed_at_ms, graph_revision, raw_fields from ff_flow_core
    where partition_key = $1 and flow_id = $2 for no key update skip locked
    """,
)
FLOW_IS_THERE: Final = Statement(
    "flow_is_there", "select exists (select from ff_flow_core where partition_key = $1 and flow_id = $2)"
)


class FlowKey(NamedTuple):
    """Where a flow lives. Sorts in lock order."""

    partition_key: int
    flow_id: UUID


def parse_flow_id(text: object, field: str = "flow_id") -> FlowKey:
    """Read a flow id; its partition follows from it."""
    uuid = parse_uuid(text, field)
    return FlowKey(partition_of(uuid), uuid)


def has_ended(flow: Row) -> bool:
    """Whether a flow, whoever wrote its row, is over."""
    return flow["terminal_at_ms"] is not None or flow["public_flow_state"] in ENDED_FLOW_STATES


def is_sealed(flow: Row | None) -> bool:
    """Whether the flow takes no new members, so that it can end."""
    return flow is not None and flow["sealed_at_ms"] is not None


LockFlow = Callable[[Connection, "FlowKey"], Awaitable[Row | None]]


async def lock_flow(connection: Connection, key: tuple[int, UUID]) -> Row | None:
    """Take the flow row for the rest of the transaction. None when there is no such flow."""
    row: Row | None = await connection.fetchrow(LOCK_FLOW.sql, *key)
    return row


async def lock_free_flow(connection: Connection, key: FlowKey) -> Row | None:
    """The same without waiting: `Contention` when somebody holds the row."""
    row: Row | None = await connection.fetchrow(LOCK_FREE_FLOW.sql, *key)
    if row is None and await connection.fetchval(FLOW_IS_THERE.sql, *key):
        raise Contention(ContentionKind.RETRY_EXHAUSTED, f"flow {key.flow_id} is held by others; try again")
    return row


def check_open(flow: Row | None, flow_id: UUID) -> Row:
    """Refuse a flow that does not exist or has ended."""
    if flow is None:
        raise NotFound("flow", str(flow_id))
    if has_ended(flow):
        raise State(
            StateKind.FLOW_ALREADY_TERMINAL, f"flow {flow_id} is {flow['public_flow_state']}", flow_id=str(flow_id)
        )
    return flow


def check_unsealed(flow: Row, flow_id: UUID) -> None:
    """Refuse a flow that takes no new members."""
    if is_sealed(flow):
        raise Validation(ValidationKind.INVALID_INPUT, f"flow {flow_id} is sealed: it takes no new members", "flow_id")


async def lock_open_flow(connection: Connection, key: FlowKey) -> Row:
    """Take the row of a flow that has not ended."""
    return check_open(await lock_flow(connection, key), key.flow_id)
