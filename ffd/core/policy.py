"""What an execution may do when it fails, times out or is replayed, and the JSON it is stored as.

The stored form is the reference's policy document, so that a reference worker reads it too. Decisions are made
by the database (`ff_retry_delay_ms`), on the stored row: no caller can widen its own limits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from ffd.core.errors import Validation, ValidationKind
from ffd.core.limits import BACKOFF_MULTIPLIER_MAX, DURATION_MS_MAX, RETRIES_MAX, SIGNALS_MAX


class FailureClass(StrEnum):
    """Why an attempt failed; decides whether a retry can help."""

    TRANSIENT = "transient"
    INFRA_CRASH = "infra_crash"
    PERMANENT = "permanent"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class Fixed(msgspec.Struct, frozen=True):
    """Always wait the same time before a retry; 0 retries at once."""

    delay_ms: int


class Exponential(msgspec.Struct, frozen=True):
    """Wait `initial_ms * multiplier ** retries`, at most `max_ms`; with `jitter` anything between 0 and that."""

    initial_ms: int = 1000
    max_ms: int = 60_000
    multiplier: float = 2.0
    jitter: bool = True


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often and how soon a failed attempt is tried again.

    `retryable_categories` empty means TRANSIENT and INFRA_CRASH. `max_retries=0` turns retries off.
    """

    max_retries: int = 3
    backoff: Exponential | Fixed = Exponential()
    retryable_categories: tuple[FailureClass, ...] = ()


class ExecutionPolicy(msgspec.Struct, frozen=True):
    """The limits of one execution. An execution created without a policy has exactly these defaults."""

    retry: RetryPolicy = RetryPolicy()
    attempt_timeout_ms: int | None = None
    max_reclaim_count: int = 100
    max_replay_count: int = 10
    max_signals: int = 1000
    retention_ms: int | None = None


def _bad(field: str, detail: str) -> Validation:
    return Validation(ValidationKind.INVALID_POLICY_JSON, detail, f"policy.{field}")


def _check_int(value: object, field: str, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _bad(field, f"expected an integer in {low}..{high}")


def _backoff_document(backoff: object) -> dict[str, Any]:
    match backoff:
        case Fixed(delay_ms):
            _check_int(delay_ms, "retry.backoff.delay_ms", 0, DURATION_MS_MAX)
            return {"type": "fixed", "delay_ms": delay_ms}
        case Exponential(initial_ms, max_ms, multiplier, jitter):
            _check_int(initial_ms, "retry.backoff.initial_ms", 0, DURATION_MS_MAX)
            _check_int(max_ms, "retry.backoff.max_ms", 0, DURATION_MS_MAX)
            is_number = isinstance(multiplier, int | float) and not isinstance(multiplier, bool)
            if not is_number or not 1 <= multiplier <= BACKOFF_MULTIPLIER_MAX:  # NaN fails the comparison too
                raise _bad("retry.backoff.multiplier", f"expected a number in 1..{BACKOFF_MULTIPLIER_MAX:.0f}")
            if type(jitter) is not bool:
                raise _bad("retry.backoff.jitter", "expected true or false")
            return {
                "type": "exponential",
                "initial_delay_ms": initial_ms,
                "max_delay_ms": max_ms,
                "multiplier": float(multiplier),
                "jitter": jitter,
            }
        case _:
            raise _bad("retry.backoff", "expected Fixed or Exponential")


def _categories(categories: object) -> list[str]:
    if not isinstance(categories, tuple | list | set | frozenset):
        raise _bad("retry.retryable_categories", "expected a sequence of FailureClass")
    try:
        return sorted({FailureClass(category).value for category in categories})
    except ValueError:
        known = ", ".join(FailureClass)
        raise _bad("retry.retryable_categories", f"expected values of FailureClass: {known}") from None


def encode_policy(policy: object) -> str | None:
    """The JSON text to store for `policy`, every field checked; None stays None."""
    if policy is None:
        return None
    if not isinstance(policy, ExecutionPolicy):
        raise Validation(ValidationKind.INVALID_POLICY_JSON, "expected an ExecutionPolicy", "policy")
    retry = policy.retry
    if not isinstance(retry, RetryPolicy):
        raise _bad("retry", "expected a RetryPolicy")
    _check_int(retry.max_retries, "retry.max_retries", 0, RETRIES_MAX)
    _check_int(policy.max_reclaim_count, "max_reclaim_count", 0, RETRIES_MAX)
    _check_int(policy.max_replay_count, "max_replay_count", 0, RETRIES_MAX)
    _check_int(policy.max_signals, "max_signals", 1, SIGNALS_MAX)
    document: dict[str, Any] = {
        "retry_policy": {
            "max_retries": retry.max_retries,
            "backoff": _backoff_document(retry.backoff),
            "retryable_categories": _categories(retry.retryable_categories),
        },
        "max_reclaim_count": policy.max_reclaim_count,
        "max_replay_count": policy.max_replay_count,
        "max_signals_per_execution": policy.max_signals,
    }
    if policy.attempt_timeout_ms is not None:
        _check_int(policy.attempt_timeout_ms, "attempt_timeout_ms", 1, DURATION_MS_MAX)
        document["timeout_policy"] = {"attempt_timeout_ms": policy.attempt_timeout_ms}
    if policy.retention_ms is not None:
        _check_int(policy.retention_ms, "retention_ms", 0, DURATION_MS_MAX)
        document["retention_ms"] = policy.retention_ms
    return msgspec.json.encode(document).decode()
