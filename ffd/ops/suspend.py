"""Suspending: the worker lets go, the execution waits for signals that prove themselves.

One transaction, in the lock order: the execution; then, with a snapshot of its own, everything to decide on; then
all writes in one statement. Whoever takes the lease away raises the epoch, so the old handle is fenced (I1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from ffd.core.checks import check_int, check_text, check_time_ms
from ffd.core.conditions import Condition, check_condition, condition_document, evaluate, required_signal_names
from ffd.core.errors import (
    Conflict,
    ConflictKind,
    Contention,
    ContentionKind,
    EngineError,
    NotFound,
    State,
    StateKind,
    Validation,
    ValidationKind,
)
from ffd.core.events import LEASE_RINGS
from ffd.core.handles import Handle, HandleKind, Lease, read_lease
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id, parse_uuid
from ffd.core.limits import KEY_BYTES_MAX, RESUME_DELAY_MS_MAX, WAITPOINTS_MAX
from ffd.core.suspension import (
    REASONS,
    Fresh,
    LeaseFence,
    OnTimeout,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    UsePending,
    WaitpointToken,
)
from ffd.core.tokens import mint_token
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Statement
from ffd.ops.fence import refusal
from ffd.ops.runtime import Runtime
from ffd.ops.stored_signals import MemberMap, encode, read_buffered, seen

LOCK_EXECUTION: Final = Statement(
    "lock_execution",
    """
    select flow_id, lifecycle_phase, eligibility_state, public_state, attempt_index, lane_id, policy, signal_count,
           raw_fields
    from ff_exec_core where partition_key = $1 and execution_id = $2
    for no key update
    """,
)

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 dedup key, $5 ids of pending or fresh waitpoints. Runs while
# the execution is locked: nothing of it can change any more but the expiry.
READ_FOR_SUSPEND: Final = Statement(
    "read_for_suspend",
    """
    select ff_now_ms() as now, t.lease_epoch, t.lease_expires_at_ms, t.outcome, k.kid, k.secret, d.outcome_json,
           (select coalesce(jsonb_agg(jsonb_build_object(
                     'waitpoint_id', w.waitpoint_id, 'execution_id', w.execution_id, 'key', w.waitpoint_key,
                     'state', w.state, 'expires_at_ms', w.expires_at_ms, 'kid', w.token_kid, 'token', w.token,
                     'buffered', w.buffered)), '[]')
            from unnest($5::uuid[]) i(id) cross join lateral (
              select waitpoint_id, execution_id, waitpoint_key, state, expires_at_ms, token_kid, token, buffered
              from ff_waitpoint_pending where partition_key = $1 and waitpoint_id = i.id) w) as waitpoints
    from (select 1) one
    left join lateral (
      select lease_epoch, lease_expires_at_ms, outcome from ff_attempt
      where partition_key = $1 and execution_id = $2 and attempt_index = $3) t on true
    left join lateral (
      select kid, secret from ff_waitpoint_hmac where active order by rotated_at_ms desc limit 1) k on true
    left join lateral (
      select outcome_json from ff_suspend_dedup where partition_key = $1 and idempotency_key = $4) d on true
    """,
)

_PHRASES: Final = {
    # The row is replaced by the next suspension and kept after this one, for observe_signals; closed, it has no timer.
    "suspension": """
      insert into ff_suspension_current as s (
        partition_key, execution_id, suspension_id, suspended_at_ms, timeout_at_ms, reason_code, condition, member_map,
        timeout_behavior, resume_delay_ms, closed_at_ms, close_reason)
      select $1, $2, $5, x.now, case when x.closed_at_ms is null then $7::bigint end, $6, $8::text::jsonb,
             $9::text::jsonb, $10, $11, x.closed_at_ms, x.close_reason
      from x
      on conflict (partition_key, execution_id) do update set
        suspension_id = excluded.suspension_id, suspended_at_ms = excluded.suspended_at_ms,
        timeout_at_ms = excluded.timeout_at_ms, reason_code = excluded.reason_code, condition = excluded.condition,
        satisfied_set = '[]', member_map = excluded.member_map, timeout_behavior = excluded.timeout_behavior,
        resume_delay_ms = excluded.resume_delay_ms, closed_at_ms = excluded.closed_at_ms,
        close_reason = excluded.close_reason""",
    "dedup": """
      insert into ff_suspend_dedup (partition_key, idempotency_key, execution_id, outcome_json, created_at_ms)
      select $1, $12, $2, $13::text::jsonb, x.now from x where $12::text is not null""",
}

# $4 lease_epoch, $5 suspension_id, $6 reason, $7 timeout_at_ms, $8 condition, $9 member_map, $10 on_timeout,
# $11 resume_delay_ms, $12 dedup key, $13 dedup outcome, $14 blocking reason, $15.. the waitpoints by column.
SUSPEND: Final = Statement(
    "suspend",
    """
    with a as (
      update ff_attempt t
      set lease_epoch = t.lease_epoch + 1, lease_expires_at_ms = null, timeout_at_ms = null,
          outcome = 'attempt_interrupted'
      where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
        and coalesce(t.lease_expires_at_ms, 0) > ff_now_ms()
      returning t.lease_epoch, t.worker_id, t.worker_instance_id, ff_now_ms() as now),
    x as (
      update ff_exec_core e
      set [[suspended because $14]], interruption = 'suspended', state_since_ms = a.now, delay_until_ms = null,
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = $1 and e.execution_id = $2
      returning e.partition_key, e.execution_id, e.raw_fields, a.now, a.lease_epoch, a.worker_id,
                a.worker_instance_id, null::bigint as closed_at_ms, null::text as close_reason),
    s as ([[suspension]]),
    w as (
      insert into ff_waitpoint_pending as w (
        partition_key, waitpoint_id, execution_id, token_kid, token, created_at_ms, expires_at_ms, waitpoint_key, state,
        required_signal_names, activated_at_ms)
      select $1, k.id, $2, k.kid, k.token, x.now, $7, k.key, 'active',
             array(select jsonb_array_elements_text(k.names::jsonb)), x.now
      from x, unnest($15::uuid[], $16::text[], $17::text[], $18::text[], $19::text[]) k(id, key, kid, token, names)
      order by k.id
      on conflict (partition_key, waitpoint_id) do update set
        state = 'active', activated_at_ms = excluded.activated_at_ms, expires_at_ms = excluded.expires_at_ms,
        required_signal_names = excluded.required_signal_names, buffered = '[]'
        where w.execution_id = excluded.execution_id
      returning 1),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'revoked', 'suspended', x.now, $3, $4, x.worker_id,
             x.worker_instance_id, [[origin x]] from x),
    d as ([[dedup]])
    select (select count(*) from w) as waitpoints from x
    """,
    phrases=_PHRASES,
)

# The condition held already: the suspension is written closed, its waitpoints go, and the lease stays as it is.
SUSPEND_SATISFIED: Final = Statement(
    "suspend_satisfied",
    """
    with x as (
      select ff_now_ms() as now, ff_now_ms() as closed_at_ms, 'already_satisfied'::text as close_reason
      from (select 1) one where $3::int is not null and $4::bigint is not null),
    s as ([[suspension]]),
    w as (delete from ff_waitpoint_pending where partition_key = $1 and waitpoint_id = any($14::uuid[])),
    d as ([[dedup]])
    select 1 as ok from x
    """,
    phrases=_PHRASES,
)


class Asked(NamedTuple):
    """A checked request; its waitpoints are resolved later, under the lock."""

    suspend: Suspend
    suspension_id: UUID
    on_timeout: OnTimeout
    fresh: dict[UUID, str]
    # Of all waitpoints, in the order in which they were asked for.
    waitpoint_ids: list[UUID]
    dedup_key: str | None


def _ask(key: ExecutionKey, suspend: Suspend, idempotency_key: str | None) -> Asked:
    if not isinstance(suspend, Suspend):
        raise Validation(ValidationKind.INVALID_INPUT, "expected a Suspend", "suspend")
    if suspend.reason not in tuple(REASONS):
        raise Validation(ValidationKind.INVALID_INPUT, f"expected one of {', '.join(REASONS)}", "reason")
    try:
        on_timeout = OnTimeout(suspend.on_timeout)
    except ValueError:
        raise Validation(
            ValidationKind.INVALID_INPUT, f"expected one of {', '.join(OnTimeout)}", "on_timeout"
        ) from None
    if suspend.timeout_at_ms is not None:
        check_time_ms(suspend.timeout_at_ms, "timeout_at_ms")
    check_int(suspend.resume_delay_ms, "resume_delay_ms", 0, RESUME_DELAY_MS_MAX)
    given_id = suspend.suspension_id
    suspension_id = new_uuid() if given_id is None else parse_uuid(given_id, "suspension_id")
    fresh, waitpoint_ids = _waitpoints(suspend.waitpoints)
    if len(fresh) == len(waitpoint_ids):
        check_condition(suspend.condition, [*fresh.values()], has_timeout=suspend.timeout_at_ms is not None)
    dedup_key = None
    if idempotency_key is not None:
        dedup_key = f"{key.execution_id}:{check_text(idempotency_key, 'idempotency_key', KEY_BYTES_MAX)}"
    return Asked(suspend, suspension_id, on_timeout, fresh, waitpoint_ids, dedup_key)


def _waitpoints(waitpoints: object) -> tuple[dict[UUID, str], list[UUID]]:
    if not isinstance(waitpoints, Sequence) or isinstance(waitpoints, str) or len(waitpoints) > WAITPOINTS_MAX:
        raise Validation(
            ValidationKind.INVALID_INPUT, f"expected at most {WAITPOINTS_MAX} of Fresh and UsePending", "waitpoints"
        )
    fresh: dict[UUID, str] = {}
    ids: list[UUID] = []
    for at, waitpoint in enumerate(waitpoints):
        match waitpoint:
            case Fresh(key, waitpoint_id):
                uuid = (
                    new_uuid() if waitpoint_id is None else parse_uuid(waitpoint_id, f"waitpoints[{at}].waitpoint_id")
                )
                fresh[uuid] = check_key(key, f"waitpoints[{at}].key")
            case UsePending(waitpoint_id):
                uuid = parse_uuid(waitpoint_id, f"waitpoints[{at}].waitpoint_id")
            case _:
                raise Validation(ValidationKind.INVALID_INPUT, "expected Fresh or UsePending", f"waitpoints[{at}]")
        ids.append(uuid)
    if len(set(ids)) != len(ids):
        raise Validation(ValidationKind.INVALID_INPUT, "a waitpoint id stands twice", "waitpoints")
    _check_distinct([*fresh.values()])
    return fresh, ids


def check_key(key: object, field: str) -> str:
    """A waitpoint key: 1..256 bytes; names that start with two underscores belong to the engine."""
    try:
        text = check_text(key, field, KEY_BYTES_MAX)
    except Validation as error:
        raise Validation(ValidationKind.INVALID_WAITPOINT_KEY, error.detail, field) from None
    if text.startswith("__"):
        raise Validation(ValidationKind.INVALID_WAITPOINT_KEY, "keys that start with __ are reserved", field)
    return text


def _check_distinct(keys: list[str]) -> None:
    if len(set(keys)) != len(keys):
        raise Validation(ValidationKind.INVALID_WAITPOINT_KEY, "a waitpoint key stands twice", "waitpoints")


class Bound(NamedTuple):
    """A waitpoint of the suspension to be, with its token and the signals that wait for it."""

    waitpoint_id: UUID
    key: str
    kid: str
    token: str
    buffered: list[dict[str, Any]]


def _bind(key: ExecutionKey, asked: Asked, row: Row) -> list[Bound]:
    """Resolve the waitpoints against what is stored, and mint the tokens of the fresh ones."""
    stored = {UUID(one["waitpoint_id"]): one for one in msgspec.json.decode(row["waitpoints"])}
    if row["kid"] is None:
        raise Validation(
            ValidationKind.INVALID_INPUT, "no signing key is active; seed one with `ffd keys seed`", "waitpoints"
        )
    bound = []
    for uuid in asked.waitpoint_ids:
        if uuid not in asked.fresh:
            bound.append(_bind_pending(key, uuid, stored.get(uuid), row["now"]))
            continue
        if uuid in stored:
            raise _exists(uuid)
        token = mint_token(row["kid"], row["secret"], str(key), str(uuid))
        bound.append(Bound(uuid, asked.fresh[uuid], row["kid"], token, []))
    _check_distinct([one.key for one in bound])
    keys = [one.key for one in bound]
    check_condition(asked.suspend.condition, keys, has_timeout=asked.suspend.timeout_at_ms is not None)
    return bound


def _exists(uuid: UUID) -> Conflict:
    return Conflict(ConflictKind.WAITPOINT_ALREADY_EXISTS, f"waitpoint {uuid} exists", waitpoint_id=str(uuid))


def _bind_pending(key: ExecutionKey, uuid: UUID, one: dict[str, Any] | None, now: int) -> Bound:
    if one is None:
        raise Contention(
            ContentionKind.WAITPOINT_NOT_FOUND, f"waitpoint {uuid} is not there (yet)", waitpoint_id=str(uuid)
        )
    if UUID(one["execution_id"]) != key.execution_id:
        raise Validation(
            ValidationKind.INVALID_WAITPOINT_FOR_EXECUTION, f"{uuid} belongs to another execution", "waitpoints"
        )
    if one["state"] != "pending":
        raise State(StateKind.WAITPOINT_NOT_PENDING, f"waitpoint {uuid} is {one['state']}", waitpoint_id=str(uuid))
    if one["expires_at_ms"] is not None and one["expires_at_ms"] <= now:
        raise State(StateKind.PENDING_WAITPOINT_EXPIRED, f"waitpoint {uuid} has expired", waitpoint_id=str(uuid))
    return Bound(uuid, one["key"], one["kid"], one["token"], read_buffered(encode(one["buffered"])))


def _outcome(variant: str, suspension_id: UUID, bound: list[Bound], handle: Handle) -> str:
    """What a repeat is answered, in FlowFabric's shape."""
    points = [{"waitpoint_id": str(one.waitpoint_id), "waitpoint_key": one.key, "token": one.token} for one in bound]
    first = points[0] if points else {"waitpoint_id": "", "waitpoint_key": "", "token": ""}
    details = {"suspension_id": str(suspension_id), **first, "extras": points[1:]}
    return encode(
        {"variant": variant, "details": details, "handle_opaque_hex": handle.opaque.hex(), "kind": handle.kind}
    )


def _repeat(text: str, handle: Handle | None) -> Suspended | SuspensionAlreadySatisfied:
    """The first outcome, again."""
    outcome = msgspec.json.decode(text)
    details = outcome["details"]
    points = [details, *details["extras"]] if details["waitpoint_id"] else []
    tokens = [WaitpointToken(one["waitpoint_id"], one["waitpoint_key"], one["token"]) for one in points]
    stored = bytes.fromhex(outcome["handle_opaque_hex"])
    if outcome["variant"] == "Suspended":
        again = Handle.decode(b"\x04" + stored)
        return Suspended(details["suspension_id"], tokens, again)
    kind = HandleKind(outcome.get("kind", "fresh"))
    return SuspensionAlreadySatisfied(
        details["suspension_id"], tokens, handle or Handle.of_lease(kind, Handle.decode(b"\x01" + stored).lease)
    )


async def suspend(
    runtime: Runtime, handle: Handle, request: Suspend, idempotency_key: str | None
) -> Suspended | SuspensionAlreadySatisfied:
    """Suspend the execution that `handle` owns."""
    lease = read_lease(handle)
    if handle.kind == HandleKind.SUSPENDED:
        raise State(
            StateKind.ALREADY_SUSPENDED, f"{lease.key}: this handle has suspended it", execution_id=str(lease.key)
        )
    asked = _ask(lease.key, request, idempotency_key)
    return await _run(runtime, lease.key, asked, lease, handle)


async def suspend_by_triple(
    runtime: Runtime, execution_id: str, fence: LeaseFence, request: Suspend, idempotency_key: str | None
) -> Suspended | SuspensionAlreadySatisfied:
    """Suspend by the parts of a lease; the epoch alone is compared."""
    key = parse_execution_id(execution_id)
    if not isinstance(fence, LeaseFence):
        raise Validation(ValidationKind.INVALID_INPUT, "expected a LeaseFence", "fence")
    check_int(fence.lease_epoch, "fence.lease_epoch", 0, 2**63 - 1)
    asked = _ask(key, request, idempotency_key)
    lease = Lease(*key, -1, fence.lease_epoch, 30_000, "default", "operator")
    return await _run(runtime, key, asked, lease, None)


async def _run(
    runtime: Runtime, key: ExecutionKey, asked: Asked, lease: Lease, handle: Handle | None
) -> Suspended | SuspensionAlreadySatisfied:
    async def body(connection: Connection) -> tuple[Suspended | SuspensionAlreadySatisfied, bool]:
        core: Row | None = await connection.fetchrow(LOCK_EXECUTION.sql, *key)
        if core is None:
            raise NotFound("execution", str(key))
        held = (
            lease if handle is not None else lease._replace(attempt_index=core["attempt_index"], lane=core["lane_id"])
        )
        row = await connection.fetchrow(
            READ_FOR_SUSPEND.sql, *key, held.attempt_index, asked.dedup_key, asked.waitpoint_ids
        )
        assert row is not None  # noqa: S101  (the statement selects from one constant row)
        if row["outcome_json"] is not None:
            return _repeat(row["outcome_json"], handle), False
        refused = _refused(core, row, held)
        if refused is not None:
            raise refused
        timeout = asked.suspend.timeout_at_ms
        if timeout is not None and timeout <= row["now"]:
            raise Validation(
                ValidationKind.INVALID_INPUT,
                f"{timeout} has passed; expected a time after {row['now']} on the database clock",
                "timeout_at_ms",
            )
        bound = _bind(key, asked, row)
        return await _write(connection, asked, held, handle, bound)

    result, is_new = await runtime.db.transact("suspend", body)
    if is_new:
        runtime.ring(LEASE_RINGS)
    return result


def _refused(core: Row, row: Row, lease: Lease) -> EngineError | None:
    state = {**core, **{name: row[name] for name in ("lease_epoch", "lease_expires_at_ms", "outcome", "now")}}
    return refusal(state, lease)


async def _write(
    connection: Connection, asked: Asked, lease: Lease, handle: Handle | None, bound: list[Bound]
) -> tuple[Suspended | SuspensionAlreadySatisfied, bool]:
    condition: Condition = asked.suspend.condition
    member_map: MemberMap = {one.key: one.buffered for one in bound if one.buffered}
    tokens = [WaitpointToken(str(one.waitpoint_id), one.key, one.token) for one in bound]
    is_satisfied = evaluate(condition, seen(member_map))
    kept = handle or Handle.of_lease(HandleKind.FRESH, lease)
    after = Handle.of_lease(HandleKind.SUSPENDED, lease._replace(lease_epoch=lease.lease_epoch + 1, given_ids=None))
    variant = ("AlreadySatisfied", kept) if is_satisfied else ("Suspended", after)
    common = (
        *lease.fence,
        asked.suspension_id,
        asked.suspend.reason,
        asked.suspend.timeout_at_ms,
        encode(condition_document(condition)),
        encode(member_map),
        asked.on_timeout,
        asked.suspend.resume_delay_ms,
        asked.dedup_key,
        _outcome(variant[0], asked.suspension_id, bound, variant[1]),
    )
    if is_satisfied:
        await connection.fetchrow(SUSPEND_SATISFIED.sql, *common, [one.waitpoint_id for one in bound])
        return SuspensionAlreadySatisfied(str(asked.suspension_id), tokens, kept), False
    row = await connection.fetchrow(
        SUSPEND.sql,
        *common,
        REASONS[asked.suspend.reason],
        [one.waitpoint_id for one in bound],
        [one.key for one in bound],
        [one.kid for one in bound],
        [one.token for one in bound],
        [encode(required_signal_names(condition, one.key)) for one in bound],
    )
    if row is None:
        # Only the expiry can have moved since it was read: the lease ran out in between.
        raise State(StateKind.LEASE_EXPIRED, f"{lease.key}: the lease ran out", execution_id=str(lease.key))
    if row["waitpoints"] != len(bound):
        # Another execution, which no lock of ours holds up, has made a waitpoint of the same id since.
        raise Conflict(ConflictKind.WAITPOINT_ALREADY_EXISTS, f"{lease.key}: a waitpoint id is another execution's")
    return Suspended(str(asked.suspension_id), tokens, after), True
