"""Policies: stored as the reference stores them, checked field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ffd import ExecutionPolicy, Exponential, FailureClass, Fixed, RetryPolicy, Validation, ValidationKind
from ffd.core.policy import encode_policy


def test_no_policy_is_stored_as_none() -> None:
    assert encode_policy(None) is None


def test_a_policy_is_stored_in_the_references_shape() -> None:
    policy = ExecutionPolicy(
        retry=RetryPolicy(
            max_retries=5,
            backoff=Exponential(initial_ms=10, max_ms=100, multiplier=3, jitter=False),
            retryable_categories=(FailureClass.TIMEOUT, FailureClass.TRANSIENT),
        ),
        attempt_timeout_ms=500,
        retention_ms=1000,
    )
    stored = encode_policy(policy)
    assert stored is not None
    assert json.loads(stored) == {
        "retry_policy": {
            "max_retries": 5,
            "backoff": {
                "type": "exponential",
                "initial_delay_ms": 10,
                "max_delay_ms": 100,
                "multiplier": 3.0,
                "jitter": False,
            },
            "retryable_categories": ["timeout", "transient"],
        },
        "timeout_policy": {"attempt_timeout_ms": 500},
        "max_reclaim_count": 100,
        "max_replay_count": 10,
        "max_signals_per_execution": 1000,
        "retention_ms": 1000,
    }


BAD: list[tuple[Any, str]] = [
    ({"retry_policy": {}}, "policy"),
    (ExecutionPolicy(retry=None), "policy.retry"),  # type: ignore[arg-type]
    (ExecutionPolicy(retry=RetryPolicy(max_retries=-1)), "policy.retry.max_retries"),
    (ExecutionPolicy(retry=RetryPolicy(max_retries=True)), "policy.retry.max_retries"),
    (ExecutionPolicy(retry=RetryPolicy(backoff=Fixed(-1))), "policy.retry.backoff.delay_ms"),
    (ExecutionPolicy(retry=RetryPolicy(backoff=5)), "policy.retry.backoff"),  # type: ignore[arg-type]
    (ExecutionPolicy(retry=RetryPolicy(backoff=Exponential(multiplier=0.5))), "policy.retry.backoff.multiplier"),
    (
        ExecutionPolicy(retry=RetryPolicy(backoff=Exponential(multiplier=float("nan")))),
        "policy.retry.backoff.multiplier",
    ),
    (ExecutionPolicy(retry=RetryPolicy(backoff=Exponential(initial_ms=2**60))), "policy.retry.backoff.initial_ms"),
    (ExecutionPolicy(retry=RetryPolicy(retryable_categories=("nonsense",))), "policy.retry.retryable_categories"),  # type: ignore[arg-type]
    (ExecutionPolicy(retry=RetryPolicy(retryable_categories="transient")), "policy.retry.retryable_categories"),  # type: ignore[arg-type]
    (ExecutionPolicy(attempt_timeout_ms=0), "policy.attempt_timeout_ms"),
    (ExecutionPolicy(max_reclaim_count=-1), "policy.max_reclaim_count"),
    (ExecutionPolicy(max_signals=0), "policy.max_signals"),
    (ExecutionPolicy(retention_ms=-5), "policy.retention_ms"),
]


@pytest.mark.parametrize(("policy", "field"), BAD)
def test_a_bad_policy_is_refused_naming_the_field(policy: object, field: str) -> None:
    """V-067: malformed policies fail closed."""
    with pytest.raises(Validation) as refused:
        encode_policy(policy)
    assert refused.value.kind == ValidationKind.INVALID_POLICY_JSON
    assert refused.value.field == field
