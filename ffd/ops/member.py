"""Operator calls on one execution that may be a member of a flow: take its flow, then itself, in that order.

Which flow it belongs to is read first, without a lock. If it joined one in between, the transaction starts over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from ffd.core.errors import Contention, ContentionKind, NotFound
from ffd.core.ids import ExecutionKey
from ffd.core.limits import CONTENTION_TRIES
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cascade import Moved
from ffd.ops.flow_lock import FlowKey, lock_flow
from ffd.ops.runtime import Runtime

T = TypeVar("T")

FLOW_OF: Final = Statement(
    "flow_of",
    "select flow_id from ff_exec_core where partition_key = $1 and execution_id = $2",
)

LOCK_MEMBER: Final = Statement(
    "lock_member",
    """
    select flow_id, lifecycle_phase, eligibility_state, public_state, attempt_index, lease_epoch, policy, replay_count,
           lane_id, started_at_ms
    from ff_exec_core where partition_key = $1 and execution_id = $2
    for no key update
    """,
)


class Held(NamedTuple):
    """A locked execution, its locked flow if it has one, and what to announce after the commit."""

    connection: Connection
    core: Row
    flow: FlowKey | None
    flow_row: Row | None
    moved: Moved


async def with_member(runtime: Runtime, op: str, key: ExecutionKey, work: Callable[[Held], Awaitable[T]]) -> T:
    """Run `work` in a transaction that holds the execution and its flow; `NotFound` when there is none."""

    async def body(connection: Connection) -> tuple[T, Moved] | None:
        seen = await connection.fetchrow(FLOW_OF.sql, *key)
        if seen is None:
            raise NotFound("execution", str(key))
        flow = None if seen["flow_id"] is None else FlowKey(key.partition_key, seen["flow_id"])
        flow_row = None if flow is None else await lock_flow(connection, flow)
        core = await connection.fetchrow(LOCK_MEMBER.sql, *key)
        if core is None:
            raise NotFound("execution", str(key))
        if core["flow_id"] != seen["flow_id"]:
            return None
        held = Held(connection, core, flow, flow_row, Moved())
        return await work(held), held.moved

    for _ in range(CONTENTION_TRIES):
        done = await runtime.db.transact(op, body, Planning.CUSTOM)
        if done is not None:
            result, moved = done
            moved.announce(runtime)
            return result
    raise Contention(ContentionKind.RETRY_EXHAUSTED, f"{op}: {key} changed meanwhile; try again")
