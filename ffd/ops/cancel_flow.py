"""Cancelling a flow: the flow at once, its members by the policy.

The flow row is locked first, so two cancels of one flow queue. Members are cancelled set by set, up to a bound in the
transaction that cancels the flow; the rest, and members whose rows somebody holds, are written to the cancel backlog
in the same transaction. Whoever drains the backlog (a reconciler, or the caller while it waits) cancels and
acknowledges in one transaction, so that a crash loses neither.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple
from uuid import UUID

import anyio
import msgspec

from ffd.core.checks import check_int
from ffd.core.errors import NotFound
from ffd.core.events import ENDED_RINGS, Channel
from ffd.core.flows import (
    CancelPolicy,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowCancelled,
    FlowState,
    check_cancel_policy,
)
from ffd.core.ids import ExecutionKey, parse_execution_id
from ffd.core.limits import CASCADE_MAX, WAIT_MS_MAX
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cancel import check_operator
from ffd.ops.cancel_set import cancel_free
from ffd.ops.cascade import Moved, cascade
from ffd.ops.flow_lock import FlowKey, LockFlow, check_open, has_ended, lock_flow, parse_flow_id
from ffd.ops.runtime import Runtime

WAIT_STEP_S: Final = 0.05
MEMBERS_TOLD_MAX: Final = 1000

# $3 policy, $4 reason, $5 actor, $6 how many members it hits. Both events come from one insert, in their order.
END_BY_CANCEL: Final = Statement(
    "end_by_cancel",
    """
    with f as (
      update ff_flow_core t
      set public_flow_state = 'cancelled', terminal_at_ms = ff_now_ms(),
          raw_fields = t.raw_fields || jsonb_build_object('cancellation_policy', $3::text, 'cancel_reason', $4::text)
      where t.partition_key = $1 and t.flow_id = $2
      returning t.partition_key, t.flow_id, t.raw_fields, t.terminal_at_ms as now)
    [[into operator_event]]
    select f.partition_key, f.flow_id::text, w.event_type, w.details, f.now, $5, $4, [[flow origin f]]
    from f cross join lateral (values
      (1, 'flow_cancel_requested', jsonb_build_object(
            'flow_id', f.flow_id, 'cancellation_policy', $3::text, 'reason', $4::text, 'member_count', $6::int)),
      (2, 'flow_ended', jsonb_build_object('flow_id', f.flow_id, 'state', 'cancelled'))
    ) w(position, event_type, details)
    order by w.position
    """,
)

# $3 whether members that run or are suspended are spared
OPEN_MEMBERS: Final = Statement(
    "open_members",
    """
    select execution_id from ff_exec_core
    where partition_key = $1 and flow_id = $2 and flow_id is not null
      and lifecycle_phase not in ('terminal', 'cancelled')
      and (not $3::boolean or lifecycle_phase in ('runnable', 'submitted'))
    order by execution_id
    """,
    Planning.CUSTOM,
)

# $3 policy, $4 reason, $5 requester, $6 members in wire form
OPEN_BACKLOG: Final = Statement(
    "open_backlog",
    """
    with b as (
      insert into ff_cancel_backlog (partition_key, flow_id, requested_at_ms, requester, reason, cancellation_policy)
      values ($1, $2, ff_now_ms(), $5, $4, $3)
      on conflict (partition_key, flow_id) do nothing)
    insert into ff_cancel_backlog_member (partition_key, flow_id, execution_id)
    select $1, $2, k.id from unnest($6::text[]) k(id)
    on conflict (partition_key, flow_id, execution_id) do nothing
    """,
    Planning.CUSTOM,
)

# $3 limit
READ_BACKLOG: Final = Statement(
    "read_backlog",
    """
    select m.execution_id, b.reason, b.cancellation_policy from ff_cancel_backlog b
    cross join lateral (
      select execution_id from ff_cancel_backlog_member
      where partition_key = b.partition_key and flow_id = b.flow_id order by execution_id limit $3) m
    where b.partition_key = $1 and b.flow_id = $2
    """,
    Planning.CUSTOM,
)

# $3 members in wire form. The header goes in a statement of its own, which sees that they are gone.
ACK_MEMBERS: Final = Statement(
    "ack_members",
    """
    delete from ff_cancel_backlog_member t using unnest($3::text[]) k(id)
    where t.partition_key = $1 and t.flow_id = $2 and t.execution_id = k.id
    """,
    Planning.CUSTOM,
)

CLOSE_BACKLOG: Final = Statement(
    "close_backlog",
    """
    delete from ff_cancel_backlog b
    where b.partition_key = $1 and b.flow_id = $2 and not exists (
      select 1 from ff_cancel_backlog_member m where m.partition_key = $1 and m.flow_id = $2)
    """,
)

LOCK_BACKLOG: Final = Statement(
    "lock_backlog",
    "select 1 from ff_cancel_backlog where partition_key = $1 and flow_id = $2 for no key update",
)

# What an ended flow's caller is told: the backlog, or else its members.
TOLD_MEMBERS: Final = Statement(
    "told_members",
    """
    select execution_id from ff_cancel_backlog_member where partition_key = $1 and flow_id = $2
    order by execution_id limit $3
    """,
)
ALL_MEMBERS: Final = Statement(
    "all_members",
    "select execution_id from ff_exec_core where partition_key = $1 and flow_id = $2 order by execution_id limit $3",
    Planning.CUSTOM,
)


class _Done(NamedTuple):
    """One cancel's effect: who was hit and who is left to the backlog."""

    members: list[UUID]
    left: list[UUID]
    moved: Moved


def _wire(flow: FlowKey, ids: list[UUID]) -> list[str]:
    return [str(ExecutionKey(flow.partition_key, one)) for one in ids]


async def _cancel(
    connection: Connection, flow: FlowKey, policy: CancelPolicy, reason: str, actor: str, cancelled_by: str
) -> _Done:
    """Cancel an open flow whose row the transaction holds, and its members up to the bound."""
    moved = Moved()
    members: list[UUID] = []
    if policy != CancelPolicy.CANCEL_FLOW_ONLY:
        rows = await connection.fetch(OPEN_MEMBERS.sql, *flow, policy == CancelPolicy.CANCEL_PENDING)
        members = [row["execution_id"] for row in rows]
    await connection.execute(END_BY_CANCEL.sql, *flow, policy.value, reason, actor, len(members))
    left = members[CASCADE_MAX:]
    left += await _cancel_members(connection, flow, members[:CASCADE_MAX], reason, cancelled_by, moved)
    return _Done(members, sorted(left), moved)


async def _cancel_members(
    connection: Connection, flow: FlowKey, ids: list[UUID], reason: str, cancelled_by: str, moved: Moved
) -> list[UUID]:
    """Cancel members and resolve the edges out of them; who is held by somebody is returned."""
    done, held = await cancel_free(connection, flow.partition_key, dict.fromkeys(ids, reason), cancelled_by)
    moved.counts["cancelled"] += len(done)
    await cascade(connection, flow, done, moved, sealed=False)
    return held


async def cancel_flow(
    runtime: Runtime, flow_id: str, *, policy: CancelPolicy | str, reason: str, actor: str, wait_ms: int | None
) -> FlowCancelled:
    """Cancel a flow and its members by the policy; who could not be cancelled in time is named."""
    flow = parse_flow_id(flow_id)
    chosen = check_cancel_policy(policy, "policy")
    reason, actor = check_operator(reason, actor)
    if wait_ms is not None:
        check_int(wait_ms, "wait_ms", 0, WAIT_MS_MAX)

    async def body(connection: Connection) -> _Done | Row:
        row = await lock_flow(connection, flow)
        if row is not None and row["public_flow_state"] == FlowState.CANCELLED:
            return row
        check_open(row, flow.flow_id)
        done = await _cancel(connection, flow, chosen, reason, actor, "cancel_flow")
        if done.left:
            await connection.execute(OPEN_BACKLOG.sql, *flow, chosen.value, reason, actor, _wire(flow, done.left))
        return done

    done = await runtime.db.transact("cancel_flow", body, Planning.CUSTOM)
    if isinstance(done, _Done):
        _announce(runtime, done.moved)
        members = _wire(flow, done.members)
        left = _wire(flow, done.left)
    else:
        stored = msgspec.json.decode(done["raw_fields"]).get("cancellation_policy")
        chosen = CancelPolicy(stored) if stored in set(CancelPolicy) else chosen
        members, left = await _told(runtime, flow), await _backlog(runtime, flow)
    if left and wait_ms:
        left = await _drain_until(runtime, flow, wait_ms)
    return FlowCancelled(str(flow.flow_id), chosen, members, left)


def _announce(runtime: Runtime, moved: Moved) -> None:
    moved.announce(runtime)
    runtime.ring((*ENDED_RINGS, (Channel.OPERATOR.value, "")))


async def _backlog(runtime: Runtime, flow: FlowKey) -> list[str]:
    rows = await runtime.db.fetch(TOLD_MEMBERS, *flow, MEMBERS_TOLD_MAX)
    return [row["execution_id"] for row in rows]


async def _told(runtime: Runtime, flow: FlowKey) -> list[str]:
    """The members that an ended flow's caller is told about: those in the backlog, else all, up to a bound."""
    rows = await runtime.db.fetch(ALL_MEMBERS, *flow, MEMBERS_TOLD_MAX)
    return await _backlog(runtime, flow) or _wire(flow, [row["execution_id"] for row in rows])


async def _drain_until(runtime: Runtime, flow: FlowKey, wait_ms: int) -> list[str]:
    """Work the backlog off until it is empty or the time is up; who is left."""
    until = time.monotonic() + wait_ms / 1000
    while True:
        await drain_backlog(runtime, flow)
        left = await _backlog(runtime, flow)
        if not left or time.monotonic() >= until:
            return left
        await anyio.sleep(min(WAIT_STEP_S, max(until - time.monotonic(), 0)))


async def drain_backlog(runtime: Runtime, flow: FlowKey, lock: LockFlow = lock_flow) -> int:
    """Cancel and acknowledge up to a bound of a cancelled flow's backlog; how many were acknowledged."""

    async def body(connection: Connection) -> tuple[int, Moved]:
        moved = Moved()
        await lock(connection, flow)
        await connection.execute(LOCK_BACKLOG.sql, *flow)
        rows = await connection.fetch(READ_BACKLOG.sql, *flow, CASCADE_MAX)
        if not rows:
            await connection.execute(CLOSE_BACKLOG.sql, *flow)
            return 0, moved
        ids = {parse_execution_id(row["execution_id"]).execution_id: row["execution_id"] for row in rows}
        wanted = set(ids)
        if rows[0]["cancellation_policy"] == CancelPolicy.CANCEL_PENDING:
            # Whoever has started meanwhile is spared.
            wanted &= {row["execution_id"] for row in await connection.fetch(OPEN_MEMBERS.sql, *flow, True)}
        held = await _cancel_members(connection, flow, sorted(wanted), rows[0]["reason"], "cancel_flow", moved)
        done = [text for uuid, text in ids.items() if uuid not in set(held)]
        await connection.execute(ACK_MEMBERS.sql, *flow, done)
        await connection.execute(CLOSE_BACKLOG.sql, *flow)
        return len(done), moved

    count, moved = await runtime.db.transact("drain_backlog", body, Planning.CUSTOM)
    if moved.counts["cancelled"]:
        _announce(runtime, moved)
    return count


async def cancel_flow_header(
    runtime: Runtime, flow_id: str, *, reason: str, cancellation_policy: CancelPolicy | str
) -> FlowCancelHeader | FlowAlreadyTerminal:
    """Cancel a flow; every member of a `cancel_all` stands in the backlog until it is acknowledged."""
    flow = parse_flow_id(flow_id)
    policy = check_cancel_policy(cancellation_policy, "cancellation_policy")
    reason, _ = check_operator(reason, "")

    async def body(connection: Connection) -> _Done | Row:
        row = await lock_flow(connection, flow)
        if row is None:
            raise NotFound("flow", str(flow.flow_id))
        if has_ended(row):
            return row
        done = await _cancel(connection, flow, policy, reason, "", "cancel_flow_header")
        listed = done.members if policy == CancelPolicy.CANCEL_ALL else done.left
        if listed:
            await connection.execute(OPEN_BACKLOG.sql, *flow, policy.value, reason, "", _wire(flow, listed))
        return done

    done = await runtime.db.transact("cancel_flow_header", body, Planning.CUSTOM)
    if isinstance(done, _Done):
        _announce(runtime, done.moved)
        return FlowCancelHeader(policy, _wire(flow, done.members))
    fields = msgspec.json.decode(done["raw_fields"])
    return FlowAlreadyTerminal(
        fields.get("cancellation_policy"), fields.get("cancel_reason"), await _told(runtime, flow)
    )


async def ack_cancel_member(runtime: Runtime, flow_id: str, execution_id: str) -> None:
    """Strike a member off the backlog. Two acks queue at the header, so the last one sees that it is the last."""
    flow = parse_flow_id(flow_id)
    member = str(parse_execution_id(execution_id))

    async def body(connection: Connection) -> None:
        await connection.execute(LOCK_BACKLOG.sql, *flow)
        await connection.execute(ACK_MEMBERS.sql, *flow, [member])
        await connection.execute(CLOSE_BACKLOG.sql, *flow)

    await runtime.db.transact("ack_cancel_member", body)
