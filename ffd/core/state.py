"""The state vector: the only rows ffd writes (I9), and how stored rows read.

Operations name a row and never spell its columns. In SQL a row is written ``[[completed]]`` and expands to the
assignments of its columns; ``[[by d.next_row: waiting_retry, delayed_retry, failed]]`` chooses by a text column
that holds the row's name; ``[[suspended because $9]]`` gives the blocking reason; ``[[columns]]`` and
``[[values by …]]`` do the same for an INSERT. The CHECK in the schema admits these rows and the reference's.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import msgspec


class PublicState(StrEnum):
    """What users see of an execution."""

    WAITING = "waiting"
    RESUMABLE = "resumable"
    DELAYED = "delayed"
    WAITING_CHILDREN = "waiting_children"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the execution has ended (a replay can still start it again)."""
        return self in TERMINAL_STATES


TERMINAL_STATES: Final = frozenset(
    {
        PublicState.COMPLETED,
        PublicState.FAILED,
        PublicState.EXPIRED,
        PublicState.SKIPPED,
        PublicState.CANCELLED,
    }
)


class StateRow(msgspec.Struct, frozen=True):
    """One admitted combination of the state columns."""

    public_state: PublicState
    lifecycle_phase: str
    ownership_state: str
    eligibility_state: str
    attempt_state: str
    blocking_reason: str | None = None


def _runnable(public: PublicState, eligibility: str, attempt: str, reason: str) -> StateRow:
    return StateRow(public, "runnable", "unowned", eligibility, attempt, reason)


def _terminal(public: PublicState) -> StateRow:
    return StateRow(public, "terminal", "unowned", "not_applicable", "attempt_terminal")


_WORKER = "waiting_for_worker"
_P = PublicState

ROWS: Final[dict[str, StateRow]] = {
    "waiting_first": _runnable(_P.WAITING, "eligible_now", "pending_first_attempt", _WORKER),
    "waiting_retry": _runnable(_P.WAITING, "eligible_now", "pending_retry_attempt", _WORKER),
    "waiting_replay": _runnable(_P.WAITING, "eligible_now", "pending_replay_attempt", _WORKER),
    "waiting_interrupted": _runnable(_P.WAITING, "eligible_now", "attempt_interrupted", _WORKER),
    "resumable": _runnable(_P.RESUMABLE, "eligible_now", "attempt_interrupted", _WORKER),
    "delayed_first": _runnable(_P.DELAYED, "not_eligible_until_time", "pending_first_attempt", "waiting_for_delay"),
    "delayed_retry": _runnable(
        _P.DELAYED, "not_eligible_until_time", "pending_retry_attempt", "waiting_for_retry_backoff"
    ),
    "delayed_interrupted": _runnable(_P.DELAYED, "not_eligible_until_time", "attempt_interrupted", "waiting_for_delay"),
    "delayed_resume": _runnable(
        _P.DELAYED, "not_eligible_until_time", "attempt_interrupted", "waiting_for_resume_delay"
    ),
    "blocked_first": _runnable(
        _P.WAITING_CHILDREN, "blocked_by_dependencies", "pending_first_attempt", "waiting_for_children"
    ),
    "blocked_replay": _runnable(
        _P.WAITING_CHILDREN, "blocked_by_dependencies", "pending_replay_attempt", "waiting_for_children"
    ),
    "blocked_interrupted": _runnable(
        _P.WAITING_CHILDREN, "blocked_by_dependencies", "attempt_interrupted", "waiting_for_children"
    ),
    "running": StateRow(_P.RUNNING, "active", "leased", "not_applicable", "running_attempt"),
    "suspended": StateRow(_P.SUSPENDED, "suspended", "released", "not_applicable", "attempt_interrupted"),
    "escalated": StateRow(
        _P.SUSPENDED, "suspended", "released", "not_applicable", "attempt_interrupted", "paused_by_operator"
    ),
    "completed": _terminal(_P.COMPLETED),
    "failed": _terminal(_P.FAILED),
    "expired": _terminal(_P.EXPIRED),
    "skipped": _terminal(_P.SKIPPED),
    "cancelled": StateRow(_P.CANCELLED, "cancelled", "unowned", "not_applicable", "cancelled"),
}

_COLUMNS: Final = (
    "lifecycle_phase",
    "ownership_state",
    "eligibility_state",
    "public_state",
    "attempt_state",
    "blocking_reason",
)
_ONE: Final = re.compile(r"\[\[(\w+)\]\]")
_BECAUSE: Final = re.compile(r"\[\[(\w+) because ([^\]]+)\]\]")
_BY: Final = re.compile(r"\[\[by ([\w.]+): ([\w, ]+)\]\]")
_VALUES: Final = re.compile(r"\[\[values by ([\w.]+): ([\w, ]+)\]\]")
_NAMES: Final = "[[columns]]"


def _literal(value: str | None) -> str:
    return "null" if value is None else f"'{value}'"


def _choose(column: str, selector: str, names: list[str]) -> str:
    """The SQL for one column of whichever row `selector` names."""
    values = {name: _literal(getattr(ROWS[name], column)) for name in names}
    if len(set(values.values())) == 1:
        return values[names[0]]
    cases = " ".join(f"when '{name}' then {value}" for name, value in values.items())
    return f"case {selector} {cases} end"


def _assign_one(match: re.Match[str]) -> str:
    return ", ".join(f"{column} = {_choose(column, '', [match[1]])}" for column in _COLUMNS)


def _assign_because(match: re.Match[str]) -> str:
    columns = [f"{column} = {_choose(column, '', [match[1]])}" for column in _COLUMNS if column != "blocking_reason"]
    return ", ".join([*columns, f"blocking_reason = {match[2]}"])


def _assign_by(match: re.Match[str]) -> str:
    names = match[2].replace(" ", "").split(",")
    return ", ".join(f"{column} = {_choose(column, match[1], names)}" for column in _COLUMNS)


def _values_by(match: re.Match[str]) -> str:
    names = match[2].replace(" ", "").split(",")
    return ", ".join(_choose(column, match[1], names) for column in _COLUMNS)


def expand_rows(sql: str) -> str:
    """Replace every row named in double brackets by its columns."""
    sql = sql.replace(_NAMES, ", ".join(_COLUMNS))
    sql = _VALUES.sub(_values_by, sql)
    sql = _BY.sub(_assign_by, sql)
    sql = _BECAUSE.sub(_assign_because, sql)
    return _ONE.sub(_assign_one, sql)


# What a reference worker's literals mean. Only `public_state` is needed here: the reference leaves it stale
# (`running`, after the end) in many of its paths, so the phase decides first.
_PHASE_SAYS: Final = {
    "cancelled": PublicState.CANCELLED,
    "suspended": PublicState.SUSPENDED,
    "active": PublicState.RUNNING,
}
_ELIGIBILITY_SAYS: Final = {
    "not_eligible_until_time": PublicState.DELAYED,
    "blocked_by_dependencies": PublicState.WAITING_CHILDREN,
}
_OUTCOME_SAYS: Final = {
    "success": PublicState.COMPLETED,
    "failed": PublicState.FAILED,
    "failure": PublicState.FAILED,
    "cancelled": PublicState.CANCELLED,
    "expired": PublicState.EXPIRED,
    "interrupted": PublicState.EXPIRED,
    "skipped": PublicState.SKIPPED,
}


def read_public_state(
    lifecycle_phase: str, eligibility_state: str, public_state: str, outcome: str | None
) -> PublicState:
    """The public state of a stored row, whoever wrote it."""
    if lifecycle_phase == "terminal":
        if public_state in TERMINAL_STATES:
            return PublicState(public_state)
        return _OUTCOME_SAYS.get(outcome or "", PublicState.FAILED)
    if lifecycle_phase in _PHASE_SAYS:
        return _PHASE_SAYS[lifecycle_phase]
    if eligibility_state in _ELIGIBILITY_SAYS:
        return _ELIGIBILITY_SAYS[eligibility_state]
    return PublicState.RESUMABLE if public_state == "resumable" else PublicState.WAITING
