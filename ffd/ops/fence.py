"""Why an owner's write was refused.

The write itself carries the fence (I1); a statement that had to wait for a row knows only stale reasons, so the
reason is read afterwards, in a statement of its own. The order of the answers is part of the contract: unknown,
moved, not active, expired.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from ffd.core.errors import Contention, ContentionKind, EngineError, NotFound, State, StateKind
from ffd.core.handles import Lease
from ffd.core.ids import attempt_id_text
from ffd.core.state import read_public_state
from ffd.db.database import Row
from ffd.db.statement import Planning, Statement

CLASSIFY: Final = Statement(
    "classify",
    """
    select e.flow_id, e.lifecycle_phase, e.eligibility_state, e.public_state, e.attempt_index,
           t.lease_epoch, t.lease_expires_at_ms, t.outcome, t.retry_at_ms, ff_now_ms() as now
    from (select flow_id, lifecycle_phase, eligibility_state, public_state, attempt_index
          from ff_exec_core where partition_key = $1 and execution_id = $2) e
    left join lateral (select lease_epoch, lease_expires_at_ms, outcome, retry_at_ms
          from ff_attempt where partition_key = $1 and execution_id = $2 and attempt_index = $3) t on true
    """,
)

CLASSIFY_MANY: Final = Statement(
    "classify_many",
    """
    select k.i, e.flow_id, e.lifecycle_phase, e.eligibility_state, e.public_state, e.attempt_index,
           t.lease_epoch, t.lease_expires_at_ms, t.outcome, t.retry_at_ms, ff_now_ms() as now
    from unnest($1::smallint[], $2::uuid[], $3::int[]) with ordinality k(p, e, a, i)
    cross join lateral (select flow_id, lifecycle_phase, eligibility_state, public_state, attempt_index
          from ff_exec_core where partition_key = k.p and execution_id = k.e) e
    left join lateral (select lease_epoch, lease_expires_at_ms, outcome, retry_at_ms
          from ff_attempt where partition_key = k.p and execution_id = k.e and attempt_index = k.a) t on true
    """,
    Planning.CUSTOM,
)


class Named(Protocol):
    """A row, or a dictionary that stands for one."""

    def __getitem__(self, name: str, /) -> Any:
        """One column."""


def is_own_ending(row: Row | None, lease: Lease, *outcomes: str) -> bool:
    """Whether the attempt ended by this very owner's earlier call (I2)."""
    return row is not None and row["lease_epoch"] == lease.lease_epoch and row["outcome"] in outcomes


def refusal(row: Named | None, lease: Lease) -> EngineError | None:
    """The error for a refused write, or None when nothing stands against it (any more)."""
    key = lease.key
    if row is None:
        return NotFound("execution", str(key))
    if row["attempt_index"] == lease.attempt_index and row["lease_epoch"] is None:
        return NotFound("attempt", f"{key} attempt {lease.attempt_index}")
    if row["attempt_index"] != lease.attempt_index or row["lease_epoch"] != lease.lease_epoch:
        return Contention(
            ContentionKind.LEASE_CONFLICT,
            f"{key}: the lease of attempt {lease.attempt_index}, epoch {lease.lease_epoch} has moved on;"
            " stop working on it",
            execution_id=str(key),
            attempt_index=row["attempt_index"],
            lease_epoch=row["lease_epoch"],
        )
    if row["lifecycle_phase"] != "active":
        return not_active(row, lease)
    if (row["lease_expires_at_ms"] or 0) <= row["now"]:
        return State(
            StateKind.LEASE_EXPIRED,
            f"{key}: the lease ran out at {row['lease_expires_at_ms']}; stop working on it",
            execution_id=str(key),
            lease_expires_at_ms=row["lease_expires_at_ms"],
        )
    return None


def not_active(row: Named, lease: Lease) -> Contention:
    """The refusal that lets a client recognise its own earlier success: outcome, epoch, phase, attempt."""
    state = read_public_state(row["lifecycle_phase"], row["eligibility_state"], row["public_state"], row["outcome"])
    return Contention(
        ContentionKind.EXECUTION_NOT_ACTIVE,
        f"{lease.key}: not running but {state}",
        execution_id=str(lease.key),
        public_state=str(state),
        terminal_outcome=row["outcome"] if state.is_terminal else None,
        lifecycle_phase=row["lifecycle_phase"],
        lease_epoch=row["lease_epoch"],
        attempt_id=attempt_id_text(lease.execution_id, lease.attempt_index),
    )


def inconclusive(op: str, lease: Lease) -> Contention:
    """The write was refused but the reason is gone by now: trying again will tell."""
    return Contention(ContentionKind.RETRY_EXHAUSTED, f"{op}: {lease.key} changed meanwhile; try again")
