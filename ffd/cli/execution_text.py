"""An execution and its attempts as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ffd.cli.tables import Column, facts, table
from ffd.cli.times import duration, iso, moment
from ffd.core.ids import lease_id_text, parse_execution_id
from ffd.core.records import AttemptSnapshot, ExecutionSnapshot
from ffd.core.state import PublicState

_ATTEMPT_COLUMNS: Final = (
    Column("ATTEMPT", is_whole=True),
    Column("EPOCH", is_whole=True, spare=2),
    Column("OUTCOME"),
    Column("WORKER", spare=1),
    Column("STARTED", is_whole=True),
    Column("LASTED", is_whole=True),
    Column("FAILURE"),
)


def at(ms: int | None, now_ms: int) -> str:
    """A moment, or nothing."""
    return "" if ms is None else moment(ms, now_ms)


def lease_of(snapshot: ExecutionSnapshot) -> str | None:
    """The id of the lease that stands now; None when nobody has one."""
    if snapshot.public_state != PublicState.RUNNING:
        return None
    uuid = parse_execution_id(snapshot.execution_id).execution_id
    return lease_id_text(uuid, snapshot.attempt_index, snapshot.lease_epoch)


def worker_of(worker_id: str | None, worker_instance_id: str | None) -> str:
    """A worker and its instance."""
    return " / ".join(part for part in (worker_id, worker_instance_id) if part)


def summary(snapshot: ExecutionSnapshot, now_ms: int) -> list[tuple[str, str]]:
    """What an operator must see of an execution before hitting it."""
    pairs = [
        ("execution", snapshot.execution_id),
        ("lane", snapshot.lane),
        ("kind", snapshot.kind),
        ("state", snapshot.public_state),
        ("worker", worker_of(snapshot.worker_id, snapshot.worker_instance_id)),
    ]
    if snapshot.public_state == PublicState.RUNNING:
        pairs.append(("lease until", at(snapshot.lease_expires_at_ms, now_ms)))
    return pairs


def execution_lines(snapshot: ExecutionSnapshot, now_ms: int) -> list[str]:
    """Every field of a snapshot."""
    progress = "" if snapshot.progress_percent is None else f"{snapshot.progress_percent} %"
    result = "" if snapshot.result_size is None else f"{snapshot.result_size} bytes; --result writes them"
    return facts(
        [
            ("execution", snapshot.execution_id),
            ("state", snapshot.public_state),
            ("lane", snapshot.lane),
            ("kind", snapshot.kind),
            ("namespace", snapshot.namespace),
            ("flow", snapshot.flow_id or ""),
            ("priority", str(snapshot.priority)),
            ("capabilities", ", ".join(snapshot.required_capabilities)),
            ("tags", ", ".join(f"{key}={value}" for key, value in sorted(snapshot.tags.items()))),
            ("created", at(snapshot.created_at_ms, now_ms)),
            ("started", at(snapshot.started_at_ms, now_ms)),
            ("ended", at(snapshot.terminal_at_ms, now_ms)),
            ("delayed until", at(snapshot.delay_until_ms, now_ms)),
            ("deadline", at(snapshot.deadline_at_ms, now_ms)),
            ("attempt", str(snapshot.attempt_index)),
            ("lease epoch", str(snapshot.lease_epoch)),
            ("worker", snapshot.worker_id or ""),
            ("worker instance", snapshot.worker_instance_id or ""),
            ("lease", lease_of(snapshot) or ""),
            ("lease until", at(snapshot.lease_expires_at_ms, now_ms)),
            ("retries", str(snapshot.retry_count)),
            ("reclaims", str(snapshot.reclaim_count)),
            ("replays", str(snapshot.replay_count)),
            ("progress", " ".join(part for part in (progress, snapshot.progress_message) if part)),
            ("failure", snapshot.failure_message or ""),
            ("cancellation", snapshot.cancellation_reason or ""),
            ("result", result),
        ]
    )


def _lasted(attempt: AttemptSnapshot) -> str:
    if attempt.started_at_ms is None or attempt.terminal_at_ms is None:
        return ""
    return duration(max(0, attempt.terminal_at_ms - attempt.started_at_ms))


def attempt_lines(attempts: Sequence[AttemptSnapshot], width: int | None) -> list[str]:
    """A table of attempts; a word when there is none."""
    if not attempts:
        return ["no attempts yet"]
    rows = [
        (
            str(attempt.attempt_index),
            str(attempt.lease_epoch),
            attempt.outcome or "",
            worker_of(attempt.worker_id, attempt.worker_instance_id),
            "" if attempt.started_at_ms is None else iso(attempt.started_at_ms),
            _lasted(attempt),
            ": ".join(part for part in (attempt.failure_category, attempt.failure_message) if part),
        )
        for attempt in attempts
    ]
    return table(_ATTEMPT_COLUMNS, rows, width)
