"""Signals: proof first, then one at a time per execution, so that none is lost and a condition fires once (I5, I8).

The token is checked against the key store before any other row is looked at. Then one transaction: lock the
execution; read, with a snapshot of its own, what stands there; decide; write everything in one statement. Signals for
one execution queue behind each other at its row and are all answered.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from ffd.core.checks import check_bytes, check_int, check_text
from ffd.core.conditions import evaluate, read_condition
from ffd.core.errors import NotFound, State, StateKind, Validation, ValidationKind
from ffd.core.events import Channel, work_ring
from ffd.core.handles import Handle, read_lease
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id, parse_uuid
from ffd.core.limits import IDEMPOTENCY_TTL_MS_MAX, KEY_BYTES_MAX, SIGNAL_PAYLOAD_BYTES_MAX, SIGNALS_BYTES_MAX
from ffd.core.records import DAY_MS
from ffd.core.suspension import Accepted, Duplicate, ResumeSignal, Signal, SignalEffect
from ffd.core.tokens import invalid_token
from ffd.db.database import Row, fetch_one
from ffd.db.pool import Connection
from ffd.db.statement import Statement
from ffd.ops.keys import is_token_good
from ffd.ops.runtime import Runtime
from ffd.ops.stored_signals import (
    encode,
    has_signal,
    read_buffered,
    read_member_map,
    resume_signals,
    seen,
    signal_blob,
)
from ffd.ops.suspend import LOCK_EXECUTION
from ffd.ops.waitpoints import READ_TOKEN
from ffd.telemetry.metrics import TOKEN_REJECTIONS

# $1 partition_key, $2 execution_id, $3 waitpoint_id, $4 idempotency key, $5 signal_id. Runs while the execution is
# locked.
READ_FOR_SIGNAL: Final = Statement(
    "read_for_signal",
    """
    select ff_now_ms() as now, w.state, w.waitpoint_key, w.expires_at_ms, w.buffered,
           s.suspension_id, s.closed_at_ms, s.condition, s.member_map, s.resume_delay_ms,
           octet_length(s.member_map::text) as stored_bytes,
           -- One suspension may use all of them.
           case w.state when 'pending' then (
             select sum(octet_length(buffered::text)) from ff_waitpoint_pending
             where partition_key = $1 and execution_id = $2) end as buffered_bytes,
           d.signal_id as first_signal_id, p.max_signals,
           exists (
             select 1 from ff_waitpoint_pending b
             where b.partition_key = $1 and b.execution_id = $2
               and b.buffered @> jsonb_build_array(jsonb_build_object('signal_id', $5::text))) as is_buffered
    from (select 1) one
    left join lateral (
      select state, waitpoint_key, expires_at_ms, buffered from ff_waitpoint_pending
      where partition_key = $1 and waitpoint_id = $3 and execution_id = $2) w on true
    left join lateral (
      select suspension_id, closed_at_ms, condition, member_map, resume_delay_ms from ff_suspension_current
      where partition_key = $1 and execution_id = $2) s on true
    left join lateral (
      select signal_id from ff_signal_dedup
      where partition_key = $1 and waitpoint_id = $3 and idempotency_key = $4 and execution_id = $2
        and expires_at_ms > ff_now_ms()) d on true
    left join lateral (
      select ff_policy_number(policy, '{max_signals_per_execution}', 1000)::bigint as max_signals from ff_exec_core
      where partition_key = $1 and execution_id = $2) p on true
    """,
)

_PHRASES: Final = {
    "signal event": """
      insert into ff_signal_event (partition_key, execution_id, signal_id, waitpoint_id, source_identity,
                                   delivered_at_ms, signal_name, effect, namespace, instance_tag, tags)
      select $1, $2::uuid::text, $5, $3::uuid::text, $7, x.now, $6, $8, [[origin x]] from x""",
    "dedup": """
      insert into ff_signal_dedup (partition_key, waitpoint_id, idempotency_key, execution_id, signal_id, expires_at_ms)
      select $1, $3, $9, $2, $5, x.now + $10 from x where $9::text is not null
      on conflict (partition_key, waitpoint_id, idempotency_key) do update set
        execution_id = excluded.execution_id, signal_id = excluded.signal_id,
        expires_at_ms = excluded.expires_at_ms""",
}

# $4 now, $5 signal_id, $6 name, $7 source_identity, $8 effect, $9 idempotency key, $10 its ttl, $11 buffered
BUFFER_SIGNAL: Final = Statement(
    "buffer_signal",
    """
    with x as (
      update ff_exec_core set signal_count = signal_count + 1 where partition_key = $1 and execution_id = $2
      returning raw_fields, $4::bigint as now),
    w as (
      update ff_waitpoint_pending set buffered = $11::text::jsonb where partition_key = $1 and waitpoint_id = $3),
    v as ([[signal event]]),
    d as ([[dedup]])
    select 1 as ok from x
    """,
    phrases=_PHRASES,
)

# $11 member_map
APPEND_SIGNAL: Final = Statement(
    "append_signal",
    """
    with x as (
      update ff_exec_core set signal_count = signal_count + 1 where partition_key = $1 and execution_id = $2
      returning raw_fields, $4::bigint as now),
    s as (
      update ff_suspension_current set member_map = $11::text::jsonb where partition_key = $1 and execution_id = $2),
    v as ([[signal event]]),
    d as ([[dedup]])
    select 1 as ok from x
    """,
    phrases=_PHRASES,
)

# The condition is met: everything closes with it. $12 resume_delay_ms
RESUME_BY_SIGNAL: Final = Statement(
    "resume_by_signal",
    """
    with n as (
      select case when $12::bigint > 0 then 'delayed_resume' else 'resumable' end as next_row, $4::bigint as now),
    x as (
      update ff_exec_core e
      set [[by n.next_row: delayed_resume, resumable]], signal_count = e.signal_count + 1, state_since_ms = n.now,
          delay_until_ms = case n.next_row when 'delayed_resume' then n.now + $12 end
      from n where e.partition_key = $1 and e.execution_id = $2
      returning e.partition_key, e.execution_id, e.flow_id, e.raw_fields, n.now),
    s as (
      update ff_suspension_current
      set member_map = $11::text::jsonb, timeout_at_ms = null, closed_at_ms = $4, close_reason = 'resumed'
      where partition_key = $1 and execution_id = $2),
    w as (delete from ff_waitpoint_pending where partition_key = $1 and execution_id = $2),
    c as ([[into completion_event]]
      select x.partition_key, x.execution_id, x.flow_id, 'resumable', x.now, x.now, [[origin x]] from x),
    v as ([[signal event]]),
    d as ([[dedup]])
    select 1 as ok from x
    """,
    phrases=_PHRASES,
)

# $1 partition_key, $2 waitpoint_id, $3 execution_id, $4 idempotency key
FIRST_SIGNAL: Final = Statement(
    "first_signal",
    """
    select signal_id from ff_signal_dedup
    where partition_key = $1 and waitpoint_id = $2 and idempotency_key = $4 and execution_id = $3
      and expires_at_ms > ff_now_ms()
    """,
)

OBSERVE: Final = Statement(
    "observe",
    "select member_map from ff_suspension_current where partition_key = $1 and execution_id = $2",
)


class Checked(NamedTuple):
    """A signal whose fields are in order; its token is not yet looked at."""

    key: ExecutionKey
    waitpoint_id: UUID
    signal_id: str
    signal: Signal
    idempotency_key: str | None
    idempotency_ttl_ms: int


def _check(signal: Signal, idempotency_key: str | None, idempotency_ttl_ms: int) -> Checked:
    if not isinstance(signal, Signal):
        raise Validation(ValidationKind.INVALID_INPUT, "expected a Signal", "signal")
    key = parse_execution_id(signal.execution_id)
    waitpoint_id = parse_uuid(signal.waitpoint_id, "waitpoint_id")
    given = signal.signal_id
    signal_id = str(new_uuid() if given is None else parse_uuid(given, "signal_id"))
    clean = Signal(
        str(key),
        str(waitpoint_id),
        check_text(signal.name, "name"),
        signal.token,
        source_type=check_text(signal.source_type, "source_type"),
        source_identity=check_text(signal.source_identity, "source_identity", may_be_empty=True),
        category=check_text(signal.category, "category"),
        payload=None if signal.payload is None else check_bytes(signal.payload, "payload", SIGNAL_PAYLOAD_BYTES_MAX),
        correlation_id=None if signal.correlation_id is None else check_text(signal.correlation_id, "correlation_id"),
        signal_id=signal_id,
    )
    if idempotency_key is not None:
        idempotency_key = check_text(idempotency_key, "idempotency_key", KEY_BYTES_MAX)
    check_int(idempotency_ttl_ms, "idempotency_ttl_ms", 1, IDEMPOTENCY_TTL_MS_MAX)
    return Checked(key, waitpoint_id, signal_id, clean, idempotency_key, idempotency_ttl_ms)


async def deliver_signal(
    runtime: Runtime, signal: Signal, idempotency_key: str | None, idempotency_ttl_ms: int
) -> Accepted | Duplicate:
    """Store a signal, and resume its execution when that meets the condition."""
    checked = _check(signal, idempotency_key, idempotency_ttl_ms)
    if not await is_token_good(runtime, signal.token, str(checked.key), str(checked.waitpoint_id)):
        TOKEN_REJECTIONS.inc()
        raise invalid_token()

    async def body(connection: Connection) -> tuple[Accepted | Duplicate, str | None]:
        return await _deliver(connection, checked)

    answer, resumed_lane = await runtime.db.transact("deliver_signal", body)
    if isinstance(answer, Accepted):
        runtime.ring(((Channel.SIGNAL.value, ""),))
    if resumed_lane is not None:
        runtime.ring(((Channel.COMPLETION.value, ""), work_ring(resumed_lane)))
    return answer


async def _deliver(connection: Connection, checked: Checked) -> tuple[Accepted | Duplicate, str | None]:
    """The answer, and the lane to wake when the execution became claimable."""
    key = checked.key
    core: Row | None = await connection.fetchrow(LOCK_EXECUTION.sql, *key)
    if core is None:
        raise NotFound("execution", str(key))
    row = await fetch_one(
        connection, READ_FOR_SIGNAL, *key, checked.waitpoint_id, checked.idempotency_key, checked.signal_id
    )
    if row["first_signal_id"] is not None:
        return Duplicate(row["first_signal_id"]), None
    member_map = read_member_map(row["member_map"])
    buffered = read_buffered(row["buffered"])
    if has_signal(member_map, checked.signal_id) or row["is_buffered"]:
        return Duplicate(checked.signal_id), None
    if core["lifecycle_phase"] in ("terminal", "cancelled"):
        raise State(StateKind.TARGET_NOT_SIGNALABLE, f"{key} has ended: {core['public_state']}", execution_id=str(key))
    is_open = core["lifecycle_phase"] == "suspended" and row["closed_at_ms"] is None and row["suspension_id"]
    is_pending = row["state"] == "pending" and not (row["expires_at_ms"] and row["expires_at_ms"] <= row["now"])
    if not is_pending and not (row["state"] == "active" and is_open):
        raise State(
            StateKind.WAITPOINT_CLOSED,
            f"waitpoint {checked.waitpoint_id} takes no more signals",
            waitpoint_id=str(checked.waitpoint_id),
        )
    blob = signal_blob(checked.signal, checked.signal_id, row["now"], core["signal_count"])
    _check_limits(core, row, blob, is_pending=is_pending)
    if is_pending:
        await _write(
            connection, BUFFER_SIGNAL, checked, row, SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT, [*buffered, blob]
        )
        return Accepted(checked.signal_id, SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT), None
    member_map.setdefault(row["waitpoint_key"], []).append(blob)
    if not evaluate(read_condition(msgspec.json.decode(row["condition"])), seen(member_map)):
        await _write(connection, APPEND_SIGNAL, checked, row, SignalEffect.APPENDED_TO_WAITPOINT, member_map)
        return Accepted(checked.signal_id, SignalEffect.APPENDED_TO_WAITPOINT), None
    effect = SignalEffect.RESUME_CONDITION_SATISFIED
    await _write(connection, RESUME_BY_SIGNAL, checked, row, effect, member_map, row["resume_delay_ms"])
    return Accepted(checked.signal_id, effect), None if row["resume_delay_ms"] else core["lane_id"]


def _check_limits(core: Row, row: Row, blob: dict[str, Any], *, is_pending: bool) -> None:
    kind = ValidationKind.SIGNAL_LIMIT_EXCEEDED
    if core["signal_count"] >= row["max_signals"]:
        raise Validation(
            kind, f"the execution has taken {core['signal_count']} signals, the most its policy allows", "signal"
        )
    stored = (row["buffered_bytes"] if is_pending else row["stored_bytes"]) or 0
    if stored + len(encode(blob)) > SIGNALS_BYTES_MAX:
        raise Validation(kind, f"more than {SIGNALS_BYTES_MAX} bytes of signals in one suspension", "signal")


async def _write(
    connection: Connection,
    statement: Statement,
    checked: Checked,
    row: Row,
    effect: SignalEffect,
    stored: object,
    *rest: Any,
) -> None:
    await connection.execute(
        statement.sql,
        *checked.key,
        checked.waitpoint_id,
        row["now"],
        checked.signal_id,
        checked.signal.name,
        checked.signal.source_identity,
        effect,
        checked.idempotency_key,
        checked.idempotency_ttl_ms,
        encode(stored),
        *rest,
    )


async def deliver_approval_signal(
    runtime: Runtime, execution_id: str, waitpoint_id: str, name: str, *, actor: str, idempotency_suffix: str
) -> Accepted | Duplicate:
    """An operator's decision; the engine finds the token, nobody handles it."""
    key = parse_execution_id(execution_id)
    uuid = parse_uuid(waitpoint_id, "waitpoint_id")
    name = check_text(name, "name", 64)
    actor = check_text(actor, "actor", 128)
    suffix = check_text(idempotency_suffix, "idempotency_suffix", 48, may_be_empty=True)
    # Hashed: a colon in a name must not make two people's decisions one.
    once = f"approval:{sha256(encode([name, actor, suffix]).encode()).hexdigest()}"
    at = (key.partition_key, uuid, key.execution_id)
    row = await runtime.db.fetchrow(READ_TOKEN, *at)
    if row is None:
        # Gone, perhaps by this very decision: its repeat is answered like any other.
        first = await runtime.db.fetchrow(FIRST_SIGNAL, *at, once)
        if first is None:
            raise NotFound("waitpoint", str(uuid))
        return Duplicate(first["signal_id"])
    signal = Signal(
        str(key), str(uuid), name, row["token"], source_type="operator", source_identity=actor, category="approval"
    )
    return await deliver_signal(runtime, signal, once, DAY_MS)


async def observe_signals(runtime: Runtime, handle: Handle) -> list[ResumeSignal]:
    """Every signal of the latest suspension in the order of arrival; needs no live lease."""
    lease = read_lease(handle)
    row = await runtime.db.fetchrow(OBSERVE, *lease.key)
    return [] if row is None else resume_signals(read_member_map(row["member_map"]))
