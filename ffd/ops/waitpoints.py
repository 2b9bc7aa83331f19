"""Waitpoints ahead of a suspension, and what operators may see of them: everything but the token, unless they ask."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from ffd.core.checks import check_int, check_lane
from ffd.core.errors import Conflict, ConflictKind, NotFound, Validation, ValidationKind
from ffd.core.handles import Handle, read_lease
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id, parse_uuid
from ffd.core.limits import PAGE_MAX, WAITPOINT_TTL_MS_MAX, WAITPOINTS_MAX
from ffd.core.records import Page
from ffd.core.suspension import PendingWaitpoint, SuspendedExecution, WaitpointInfo
from ffd.core.tokens import fingerprint, mint_token
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.describe import EXISTS
from ffd.ops.fence import refusal
from ffd.ops.runtime import Runtime
from ffd.ops.suspend import LOCK_EXECUTION, check_key

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 waitpoint key. Runs while the execution is locked.
READ_FOR_WAITPOINT: Final = Statement(
    "read_for_waitpoint",
    """
    select ff_now_ms() as now, t.lease_epoch, t.lease_expires_at_ms, t.outcome, k.kid, k.secret,
           (select count(*) from ff_waitpoint_pending w where w.partition_key = $1 and w.execution_id = $2) as open
    from (select 1) one
    left join lateral (
      select lease_epoch, lease_expires_at_ms, outcome from ff_attempt
      where partition_key = $1 and execution_id = $2 and attempt_index = $3) t on true
    left join lateral (
      select kid, secret from ff_waitpoint_hmac where active order by rotated_at_ms desc limit 1) k on true
    """,
)

CREATE_WAITPOINT: Final = Statement(
    "create_waitpoint",
    """
    insert into ff_waitpoint_pending (partition_key, waitpoint_id, execution_id, token_kid, token, created_at_ms,
                                      expires_at_ms, waitpoint_key, state)
    values ($1, $2, $3, $4, $5, ff_now_ms(), ff_now_ms() + $6, $7, 'pending')
    """,
)

READ_TOKEN: Final = Statement(
    "read_token",
    """
    select token from ff_waitpoint_pending where partition_key = $1 and waitpoint_id = $2 and execution_id = $3
    """,
)

# $1 partition_key, $2 execution_id, $3 after, $4 limit
LIST_WAITPOINTS: Final = Statement(
    "list_waitpoints",
    """
    select waitpoint_id, waitpoint_key, state, required_signal_names, created_at_ms, activated_at_ms, expires_at_ms,
           token_kid, token
    from ff_waitpoint_pending
    where partition_key = $1 and execution_id = $2 and ($3::uuid is null or waitpoint_id > $3)
    order by waitpoint_id limit $4
    """,
    Planning.READ,
)

# $1 lane, $2 and $3 cursor, $4 limit. Newest ids first, like every list of executions.
LIST_SUSPENDED: Final = Statement(
    "list_suspended",
    """
    select e.partition_key, e.execution_id, e.lane_id, s.suspension_id, s.suspended_at_ms, s.timeout_at_ms,
           s.reason_code
    from ff_exec_core e
    cross join lateral (
      select suspension_id, suspended_at_ms, timeout_at_ms, reason_code from ff_suspension_current
      where partition_key = e.partition_key and execution_id = e.execution_id) s
    where e.public_state = 'suspended' and e.lifecycle_phase = 'suspended' and ($1::text is null or e.lane_id = $1)
      and ($2::uuid is null or (e.execution_id, e.partition_key) < ($2, $3::smallint))
    order by e.execution_id desc, e.partition_key desc limit $4
    """,
    Planning.READ,
)


async def create_waitpoint(runtime: Runtime, handle: Handle, key: str, *, expires_in_ms: int) -> PendingWaitpoint:
    """Make a waitpoint before suspending; signals for it are buffered until then or until it expires."""
    lease = read_lease(handle)
    key = check_key(key, "key")
    check_int(expires_in_ms, "expires_in_ms", 1, WAITPOINT_TTL_MS_MAX)
    waitpoint_id = new_uuid()

    async def body(connection: Connection) -> str:
        core: Row | None = await connection.fetchrow(LOCK_EXECUTION.sql, *lease.key)
        if core is None:
            raise NotFound("execution", str(lease.key))
        row = await connection.fetchrow(READ_FOR_WAITPOINT.sql, *lease.fence[:3])
        assert row is not None  # noqa: S101  (the statement selects from one constant row)
        refused = refusal({**core, **row}, lease)
        if refused is not None:
            raise refused
        if row["open"] >= WAITPOINTS_MAX:
            raise Conflict(
                ConflictKind.WAITPOINT_ALREADY_EXISTS,
                f"{lease.key} has {row['open']} open waitpoints, the most there are",
            )
        if row["kid"] is None:
            raise Validation(
                ValidationKind.INVALID_INPUT, "no signing key is active; seed one with `ffd keys seed`", "key"
            )
        token = mint_token(row["kid"], row["secret"], str(lease.key), str(waitpoint_id))
        await connection.execute(
            CREATE_WAITPOINT.sql,
            lease.partition_key,
            waitpoint_id,
            lease.execution_id,
            row["kid"],
            token,
            expires_in_ms,
            key,
        )
        return token

    token = await runtime.db.transact("create_waitpoint", body)
    return PendingWaitpoint(str(waitpoint_id), key, token)


async def read_waitpoint_token(runtime: Runtime, execution_id: str, waitpoint_id: str) -> str | None:
    """The token of an open waitpoint, for an operator who must hand it out again."""
    key = parse_execution_id(execution_id)
    uuid = parse_uuid(waitpoint_id, "waitpoint_id")
    row = await runtime.db.fetchrow(READ_TOKEN, key.partition_key, uuid, key.execution_id)
    return None if row is None else str(row["token"])


async def list_pending_waitpoints(
    runtime: Runtime, execution_id: str, *, after: str | None, limit: int
) -> Page[WaitpointInfo]:
    """The open waitpoints of an execution, without their tokens."""
    key = parse_execution_id(execution_id)
    cursor: UUID | None = None if after is None else parse_uuid(after, "after")
    check_int(limit, "limit", 0, PAGE_MAX)
    rows = await runtime.db.fetch(LIST_WAITPOINTS, *key, cursor, limit + 1)
    if not rows and await runtime.db.fetchrow(EXISTS, *key) is None:
        raise NotFound("execution", str(key))
    items = [
        WaitpointInfo(
            str(row["waitpoint_id"]),
            row["waitpoint_key"],
            row["state"],
            row["required_signal_names"],
            row["created_at_ms"],
            row["activated_at_ms"],
            row["expires_at_ms"],
            str(key),
            row["token_kid"],
            fingerprint(row["token"]),
        )
        for row in rows[:limit]
    ]
    return Page(items, items[-1].waitpoint_id if len(rows) > limit and items else None)


async def list_suspended(
    runtime: Runtime, *, lane: str | None, after: str | None, limit: int
) -> Page[SuspendedExecution]:
    """A page of suspended executions, newest ids first."""
    if lane is not None:
        lane = check_lane(lane)
    cursor = (None, None) if after is None else parse_execution_id(after, "after")[::-1]
    check_int(limit, "limit", 0, PAGE_MAX)
    rows = await runtime.db.fetch(LIST_SUSPENDED, lane, *cursor, limit + 1)
    items = [
        SuspendedExecution(
            str(ExecutionKey(row["partition_key"], row["execution_id"])),
            row["lane_id"],
            str(row["suspension_id"]),
            row["suspended_at_ms"],
            row["timeout_at_ms"],
            row["reason_code"],
        )
        for row in rows[:limit]
    ]
    return Page(items, items[-1].execution_id if len(rows) > limit and items else None)
