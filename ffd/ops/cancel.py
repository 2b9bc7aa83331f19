"""Cancelling one execution: its owner is fenced, everything it waited for closes, its flow moves on."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ffd.core.checks import check_int, check_text
from ffd.core.control import OPERATOR_OVERRIDE, Cancelled
from ffd.core.errors import State, StateKind, Validation, ValidationKind
from ffd.core.events import ENDED_RINGS, Channel
from ffd.core.ids import ExecutionKey, lease_id_text, parse_execution_id
from ffd.core.limits import ID_BYTES_MAX, REASON_BYTES_MAX
from ffd.core.state import PublicState, read_public_state
from ffd.db.database import Row
from ffd.db.statement import Statement
from ffd.ops.cancel_set import cancel_locked
from ffd.ops.cascade import cascade
from ffd.ops.flow_lock import is_sealed
from ffd.ops.member import Held, with_member
from ffd.ops.runtime import Runtime

# $1 partition_key, $2 execution_id, $3 type, $4 details, $5 time, $6 actor, $7 reason
OPERATOR_EVENT: Final = Statement(
    "operator_event",
    """
    [[into operator_event]]
    select e.partition_key, e.execution_id::text, $3, $4::text::jsonb, $5, $6, $7, [[origin e]]
    from ff_exec_core e where e.partition_key = $1 and e.execution_id = $2
    """,
)

# The outcome and the epoch of the current attempt, while the execution is locked.
CURRENT_ATTEMPT: Final = Statement(
    "current_attempt",
    """
    select outcome, lease_epoch, worker_id, worker_instance_id, started_at_ms, terminal_at_ms, failure_message
    from ff_attempt where partition_key = $1 and execution_id = $2 and attempt_index = $3
    """,
)


def check_operator(reason: object, actor: object) -> tuple[str, str]:
    """The reason and the actor of an operator's call."""
    return (
        check_text(reason, "reason", REASON_BYTES_MAX, may_be_empty=True),
        check_text(actor, "actor", ID_BYTES_MAX, may_be_empty=True),
    )


async def record(
    held: Held, key: ExecutionKey, event: str, details: dict[str, Any], now: int, actor: str, reason: str
) -> None:
    """Keep who did what, when and why."""
    document = msgspec.json.encode(details).decode()
    await held.connection.execute(OPERATOR_EVENT.sql, *key, event, document, now, actor, reason)


async def cancel_execution(
    runtime: Runtime, execution_id: str, *, reason: str, actor: str, source: str, lease_epoch: int | None
) -> Cancelled:
    """End an execution from any state but an ended one."""
    key = parse_execution_id(execution_id)
    reason, actor = check_operator(reason, actor)
    source = check_text(source, "source", ID_BYTES_MAX)
    if lease_epoch is not None:
        check_int(lease_epoch, "lease_epoch", 0, 2**63 - 1)
    elif source != OPERATOR_OVERRIDE:
        raise Validation(
            ValidationKind.INVALID_INPUT, f"a cancel by {source} must present the epoch it knows", "lease_epoch"
        )

    async def work(held: Held) -> bool:
        core = held.core
        attempt: Row | None = await held.connection.fetchrow(CURRENT_ATTEMPT.sql, *key, core["attempt_index"])
        if core["lifecycle_phase"] in ("terminal", "cancelled"):
            _check_cancelled(key, core, attempt)
            return False
        epoch = max(core["lease_epoch"], 0 if attempt is None else attempt["lease_epoch"])
        if source != OPERATOR_OVERRIDE and lease_epoch != epoch:
            raise State(
                StateKind.STALE_LEASE,
                f"{key}: the epoch is {epoch}, not {lease_epoch}",
                execution_id=str(key),
                lease_epoch=epoch,
            )
        (was,) = await cancel_locked(held.connection, key.partition_key, [key.execution_id], [reason], source)
        await record(held, key, "cancelled", _before(key, was, source), was["now"], actor, reason)
        if held.flow is not None:
            await cascade(held.connection, held.flow, [key.execution_id], held.moved, sealed=is_sealed(held.flow_row))
        return True

    if await with_member(runtime, "cancel_execution", key, work):
        runtime.ring((*ENDED_RINGS, (Channel.OPERATOR.value, "")))
    return Cancelled(str(key), PublicState.CANCELLED)


def _check_cancelled(key: ExecutionKey, core: Row, attempt: Row | None) -> None:
    """What is cancelled already stays so; what ended otherwise cannot be cancelled."""
    outcome = None if attempt is None else attempt["outcome"]
    state = read_public_state(core["lifecycle_phase"], core["eligibility_state"], core["public_state"], outcome)
    if state != PublicState.CANCELLED:
        raise Validation(ValidationKind.INVALID_INPUT, f"{key} has ended already: {state}", "execution_id")


def _before(key: ExecutionKey, was: Row, source: str) -> dict[str, Any]:
    """What the operator took away."""
    state = read_public_state(was["lifecycle_phase"], was["eligibility_state"], was["public_state"], None)
    details: dict[str, Any] = {
        "previous_state": str(state),
        "source": source,
        "attempt_index": was["attempt_index"],
        "lease_epoch": was["new_epoch"],
    }
    if was["lifecycle_phase"] == "active":
        details["lease_id"] = lease_id_text(key.execution_id, was["attempt_index"], was["lease_epoch"] or 0)
        details["worker_id"] = was["worker_id"]
        details["worker_instance_id"] = was["worker_instance_id"]
    return details
