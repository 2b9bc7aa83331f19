"""Ticks that go flow by flow, a transaction each, because the flow's row has to be locked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import UUID

from ffd.core.errors import Contention
from ffd.db.statement import Statement
from ffd.ops.flow_lock import FlowKey, LockFlow, lock_free_flow
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only


async def each_flow(
    runtime: Runtime,
    candidates: Statement,
    partition_key: int,
    limit: int,
    only: Only,
    work: Callable[[Runtime, FlowKey, LockFlow], Awaitable[int]],
) -> int:
    """Do `work` for each due flow; how much was done. A flow that somebody holds has its turn another time."""
    if only is None:
        rows = await runtime.db.fetch(candidates, [partition_key], limit)
        flows: list[UUID] = list(dict.fromkeys(row["entity_id"] for row in rows))
    else:
        flows = list(only)
    done = 0
    for flow_id in flows:
        with suppress(Contention):
            done += await work(runtime, FlowKey(partition_key, flow_id), lock_free_flow)
    return done
