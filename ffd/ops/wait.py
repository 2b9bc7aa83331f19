"""Waiting for a result, in the database's own time and without polling it."""

from __future__ import annotations

import time

from ffd.core.checks import check_int
from ffd.core.errors import NotFound, Unavailable
from ffd.core.ids import parse_execution_id
from ffd.core.limits import WAIT_MS_MAX
from ffd.core.records import ExecutionSnapshot
from ffd.ops.describe import DESCRIBE, read_snapshot
from ffd.ops.runtime import Runtime


async def wait_for_result(runtime: Runtime, execution_id: str, *, timeout_ms: int) -> ExecutionSnapshot:
    """The snapshot of the execution once it has ended; `TimeoutError` when it has not within `timeout_ms`."""
    key = parse_execution_id(execution_id)
    check_int(timeout_ms, "timeout_ms", 0, WAIT_MS_MAX)
    deadline = time.monotonic() + timeout_ms / 1000
    state: str = "unknown"
    while True:
        left_s = deadline - time.monotonic()
        try:
            row = await runtime.db.fetchrow(DESCRIBE, *key)
        except Unavailable:
            # An outage is waited out: the next poll or ring leads to another look.
            if runtime.is_closed or left_s <= 0:
                raise
        else:
            if row is None:
                raise NotFound("execution", str(key))
            snapshot = read_snapshot(row)
            if snapshot.public_state.is_terminal:
                return snapshot
            state = snapshot.public_state
        if left_s <= 0:
            raise TimeoutError(f"{key} is {state} after {timeout_ms} ms")
        await runtime.listener.ready(left_s)
        # Ended, replayed and running again before this look counts as not ended: look again.
        await runtime.endings.wait(key, max(0.0, deadline - time.monotonic()))
