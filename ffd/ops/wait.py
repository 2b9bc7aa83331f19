"""Waiting for a result, in the database's own time and without polling it."""

from __future__ import annotations

from ffd.core.checks import check_int
from ffd.core.errors import NotFound
from ffd.core.ids import parse_execution_id
from ffd.core.limits import WAIT_MS_MAX
from ffd.core.records import ExecutionSnapshot
from ffd.ops.describe import DESCRIBE, read_snapshot
from ffd.ops.runtime import Runtime


async def wait_for_result(runtime: Runtime, execution_id: str, *, timeout_ms: int) -> ExecutionSnapshot:
    """The snapshot of the execution once it has ended; `TimeoutError` when it has not within `timeout_ms`."""
    key = parse_execution_id(execution_id)
    check_int(timeout_ms, "timeout_ms", 0, WAIT_MS_MAX)
    row = await runtime.db.fetchrow(DESCRIBE, *key)
    if row is not None and not read_snapshot(row).public_state.is_terminal:
        await runtime.listener.ready()
        await runtime.endings.wait(key, timeout_ms / 1000)
        row = await runtime.db.fetchrow(DESCRIBE, *key)
    if row is None:
        raise NotFound("execution", str(key))
    snapshot = read_snapshot(row)
    if not snapshot.public_state.is_terminal:
        raise TimeoutError(f"{key} is {snapshot.public_state} after {timeout_ms} ms")
    return snapshot
