"""Tying the caller's own transaction to its lease.

Two statements on purpose: the first locks the execution and may wait; only a second one, with a snapshot of its
own, is sure to see the fence as it is. The share lock lets renewals go on and makes whoever would take the lease
away wait for the caller's commit.
"""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from ffd.core.errors import Validation, ValidationKind
from ffd.core.handles import Handle, read_lease
from ffd.db.errors import to_engine_error
from ffd.db.pool import check_connection
from ffd.db.statement import Statement
from ffd.ops.fence import CLASSIFY, inconclusive, refusal

# $1 partition_key, $2 execution_id, $3 attempt_index
HOLD_EXECUTION: Final = Statement(
    "hold_execution",
    """
    select 1 from ff_exec_core
    where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active'
    for share
    """,
)


async def assert_lease(handle: Handle, connection: asyncpg.Connection[Any]) -> None:
    """Raise unless the lease lives; hold it until the caller's transaction ends."""
    lease = read_lease(handle)
    check_connection(connection)
    if not connection.is_in_transaction():
        raise Validation(ValidationKind.INVALID_INPUT, "expected a connection inside a transaction", "connection")
    key = (lease.partition_key, lease.execution_id, lease.attempt_index)
    try:
        held = await connection.fetchrow(HOLD_EXECUTION.sql, *key)
        row = await connection.fetchrow(CLASSIFY.sql, *key)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise to_engine_error(error, "assert_lease") or error from error
    refused = refusal(row, lease)
    if refused is not None:
        raise refused
    if held is None:
        raise inconclusive("assert_lease", lease)
