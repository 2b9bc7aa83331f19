"""The lock order of flow members: the flow row first, then the execution (design, one lock order).

Ending a member changes what its flow's other members may do, so such calls take the flow row exclusively and
queue behind each other. Which flow an execution belongs to is known only from its own row, hence the second
transaction after a first statement that found a member.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Statement

LOCK_FLOW: Final = Statement(
    "lock_flow",
    """
    select public_flow_state, terminal_at_ms from ff_flow_core
    where partition_key = $1 and flow_id = $2 for no key update
    """,
)


async def lock_flow(connection: Connection, partition_key: int, flow_id: UUID) -> Row | None:
    """Take the flow row for the rest of the transaction. None when there is no such flow."""
    row: Row | None = await connection.fetchrow(LOCK_FLOW.sql, partition_key, flow_id)
    return row
