"""Failing: retries by the stored policy, the end without one, the same answer twice."""

from __future__ import annotations

from typing import Any

import pytest

from ffd import (
    ExecutionPolicy,
    Exponential,
    FailureClass,
    Fixed,
    HandleKind,
    RetryPolicy,
    RetryScheduled,
    TerminalFailed,
    Validation,
)
from tests.support import OTHER, WORKER, Clock, Rig

pytestmark = pytest.mark.anyio


def retry(max_retries: int, backoff: Any, *categories: FailureClass) -> ExecutionPolicy:
    return ExecutionPolicy(retry=RetryPolicy(max_retries=max_retries, backoff=backoff, retryable_categories=categories))


async def promote(rig: Rig) -> None:
    """What the delayed_promoter will do."""
    await rig.sql.execute(
        "update ff_exec_core set eligibility_state = 'eligible_now', public_state = 'waiting', delay_until_ms = null"
        " where delay_until_ms <= ff_now_ms()"
    )


async def test_a_retry_is_scheduled_as_the_policy_says(rig: Rig, clock: Clock) -> None:
    """C-157, X-006."""
    claim = await rig.running(policy=retry(3, Fixed(500)))
    answer = await rig.engine.fail(claim.handle, "boom", FailureClass.TRANSIENT)
    assert answer == RetryScheduled(await clock.now_ms() + 500, 1)
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert (snapshot.attempt_index, snapshot.retry_count, snapshot.failure_message) == (1, 1, "boom")
    assert snapshot.delay_until_ms == await clock.now_ms() + 500
    assert await rig.state(claim.execution_id) == (
        "delayed",
        "runnable",
        "unowned",
        "not_eligible_until_time",
        "pending_retry_attempt",
    )
    assert await rig.completions(claim.execution_id) == []
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "retried")]
    attempt = await rig.attempt(claim.execution_id)
    assert (attempt["outcome"], attempt["failure_category"], attempt["failure_message"]) == (
        "retry",
        "transient",
        "boom",
    )


async def test_without_a_delay_the_retry_is_claimable_at_once(rig: Rig) -> None:
    """C-019."""
    claim = await rig.running(policy=retry(1, Fixed(0)))
    await rig.engine.fail(claim.handle, "boom", FailureClass.INFRA_CRASH)
    again = await rig.claim()
    assert (again.attempt_index, again.lease_epoch, again.handle.kind) == (1, 2, HandleKind.FRESH)
    assert again.attempt_id != claim.attempt_id
    assert [attempt.outcome for attempt in await rig.engine.list_attempts(claim.execution_id)] == ["retry", None]


async def test_retries_end(rig: Rig) -> None:
    """X-006, V-055."""
    await rig.create(policy=retry(2, Fixed(0)))
    answers = []
    for _ in range(3):
        claim = await rig.claim()
        answers.append(await rig.engine.fail(claim.handle, "boom", FailureClass.TRANSIENT))
    assert [type(answer) for answer in answers] == [RetryScheduled, RetryScheduled, TerminalFailed]
    assert await rig.engine.claim("default", **WORKER) is None
    assert len(await rig.engine.list_attempts(claim.execution_id)) == 3
    assert await rig.completions(claim.execution_id) == ["failed"]


async def test_a_permanent_failure_is_the_end(rig: Rig) -> None:
    """C-020, C-156, X-004."""
    claim = await rig.running()
    assert await rig.engine.fail(claim.handle, "bad data", FailureClass.PERMANENT) == TerminalFailed()
    assert await rig.state(claim.execution_id) == (
        "failed",
        "terminal",
        "unowned",
        "not_applicable",
        "attempt_terminal",
    )
    assert await rig.completions(claim.execution_id) == ["failed"]
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "failed")]
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert snapshot.failure_message == "bad data"
    assert await rig.engine.get_execution_result(claim.execution_id) is None


@pytest.mark.parametrize("classification", [FailureClass.PERMANENT, FailureClass.TIMEOUT, FailureClass.CANCELLED])
async def test_other_classes_are_not_retried_by_default(rig: Rig, classification: FailureClass) -> None:
    claim = await rig.running()
    assert await rig.engine.fail(claim.handle, "", classification) == TerminalFailed()


async def test_categories_in_the_policy_decide(rig: Rig) -> None:
    policy = retry(5, Fixed(0), FailureClass.TIMEOUT)
    claim = await rig.running(policy=policy)
    assert isinstance(await rig.engine.fail(claim.handle, "", FailureClass.TIMEOUT), RetryScheduled)
    assert await rig.engine.fail((await rig.claim()).handle, "", FailureClass.TRANSIENT) == TerminalFailed()


async def test_retries_can_be_turned_off(rig: Rig) -> None:
    claim = await rig.running(policy=retry(0, Fixed(0)))
    assert await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT) == TerminalFailed()


async def test_without_a_policy_three_retries_with_full_jitter(rig: Rig, clock: Clock) -> None:
    now = await clock.now_ms()
    delays = []
    for each in range(40):
        # A lane each: one in a thousand is retried at once, and would be claimed in the place of the next.
        claim = await rig.running(lane=f"lane-{each}")
        answer = await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT)
        assert isinstance(answer, RetryScheduled)
        delays.append(answer.delay_until_ms - now)
    assert all(0 <= delay < 1000 for delay in delays)
    assert len(set(delays)) > 20


async def test_backoff_grows_to_its_cap(rig: Rig, clock: Clock) -> None:
    """C-279."""
    await rig.create(policy=retry(5, Exponential(initial_ms=100, max_ms=500, multiplier=2.0, jitter=False)))
    delays = []
    for _ in range(5):
        claim = await rig.claim()
        answer = await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT)
        assert isinstance(answer, RetryScheduled)
        delay = answer.delay_until_ms - await clock.now_ms()
        delays.append(delay)
        await clock.advance(delay - 1)
        await promote(rig)
        assert await rig.engine.claim("default", **WORKER) is None, "before the backoff floor"
        await clock.advance(1)
        await promote(rig)
    assert delays == [100, 200, 400, 500, 500]


async def test_a_repeat_gets_the_first_answer(rig: Rig) -> None:
    """I2, V-048."""
    claim = await rig.running(policy=retry(1, Fixed(0)))
    first = await rig.engine.fail(claim.handle, "one", FailureClass.TRANSIENT)
    before = await rig.fingerprint()
    assert await rig.engine.fail(claim.handle, "two", FailureClass.PERMANENT) == first
    assert await rig.fingerprint() == before
    running = await rig.claim(**OTHER)
    assert await rig.engine.fail(claim.handle, "three", FailureClass.TRANSIENT) == first, "even with the next running"
    last = await rig.engine.fail(running.handle, "end", FailureClass.TRANSIENT)
    assert last == TerminalFailed()
    assert await rig.engine.fail(running.handle, "end", FailureClass.TRANSIENT) == last
    assert await rig.completions(claim.execution_id) == ["failed"]


@pytest.mark.parametrize(
    ("reason", "classification", "field"),
    [
        ("x" * 1025, FailureClass.TRANSIENT, "reason"),
        (None, FailureClass.TRANSIENT, "reason"),
        ("a\0", FailureClass.TRANSIENT, "reason"),
        ("r", "nonsense", "classification"),
        ("r", None, "classification"),
    ],
)
async def test_bad_input_is_named_and_fails_nothing(rig: Rig, reason: Any, classification: Any, field: str) -> None:
    claim = await rig.running()
    before = await rig.fingerprint()
    with pytest.raises(Validation) as refused:
        await rig.engine.fail(claim.handle, reason, classification)
    assert refused.value.field == field
    assert await rig.fingerprint() == before


async def test_a_flow_member_fails_too(rig: Rig) -> None:
    claim = await rig.running(policy=retry(1, Fixed(0)))
    await rig.sql.execute("update ff_exec_core set flow_id = gen_random_uuid()")
    assert isinstance(await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT), RetryScheduled)
    again = await rig.claim()
    assert await rig.engine.fail(again.handle, "", FailureClass.TRANSIENT) == TerminalFailed()
    assert await rig.completions(claim.execution_id) == ["failed"]


@pytest.mark.parametrize(
    "policy",
    [
        '{"retry_policy": "nonsense"}',
        '{"retry_policy": {"max_retries": "5", "backoff": 7}}',
        '{"retry_policy": {"max_retries": -1, "retryable_categories": {"a": 1}}}',
        '{"retry_policy": {"max_retries": 1e300, "backoff": {"type": "exponential", "multiplier": 1e300}}}',
        '{"timeout_policy": {"attempt_timeout_ms": "x"}, "max_reclaim_count": null}',
        "[1, 2]",
        '"text"',
        "null",
    ],
)
async def test_a_policy_that_others_wrote_badly_reads_as_the_defaults(rig: Rig, policy: str) -> None:
    """V-067: one bad document must not stop a lane."""
    await rig.create()
    await rig.sql.execute("update ff_exec_core set policy = $1::text::jsonb", policy)
    claim = await rig.claim()
    assert isinstance(await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT), RetryScheduled)
