"""Taking over one execution, and the whole life of its epoch."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from ffd import (
    Contention,
    ContentionKind,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    HandleKind,
    NotFound,
    ResumeToken,
    RetryPolicy,
    Validation,
)
from tests.support import OTHER, WORKER, Clock, Rig

pytestmark = pytest.mark.anyio

SOME = "{fp:1}:00000000-0000-4000-8000-000000000001"


def token(execution_id: str, ttl_ms: int = 30_000) -> ResumeToken:
    return ResumeToken(execution_id, "other", "other-1", ttl_ms)


async def test_an_expired_lease_is_taken_over_in_one_step(rig: Rig, clock: Clock) -> None:
    """C-021, C-250."""
    claim = await rig.running()
    await clock.advance(30_000)
    taken = await rig.engine.claim_from_resume_grant(token(claim.execution_id))
    assert taken is not None
    assert (taken.handle.kind, taken.attempt_index, taken.payload) == (HandleKind.RECLAIMED, 0, b"")
    assert taken.lease_epoch > claim.lease_epoch
    assert await rig.lease_events(claim.execution_id) == [
        ("acquired", None),
        ("expired", "lease_expiry"),
        ("reclaimed", None),
    ]
    assert (await rig.core(claim.execution_id))["lease_reclaim_count"] == 1
    await rig.engine.renew(taken.handle)
    with pytest.raises(Contention):
        await rig.engine.complete(claim.handle)
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert snapshot.worker_instance_id == "other-1"


async def test_a_live_lease_cannot_be_stolen(rig: Rig) -> None:
    """C-022."""
    claim = await rig.running()
    before = await rig.fingerprint()
    assert await rig.engine.claim_from_resume_grant(token(claim.execution_id)) is None
    assert await rig.fingerprint() == before


async def test_interrupted_work_is_taken_like_a_claim(rig: Rig) -> None:
    claim = await rig.running()
    await rig.engine.release(claim.handle)
    taken = await rig.engine.claim_from_resume_grant(token(claim.execution_id))
    assert taken is not None
    assert (taken.handle.kind, taken.lease_epoch) == (HandleKind.RESUMED, 2)
    assert await rig.lease_events(claim.execution_id) == [
        ("acquired", None),
        ("revoked", "released"),
        ("acquired", None),
    ]


async def test_a_swept_lease_is_reclaimed_by_anybody(rig: Rig, clock: Clock) -> None:
    claim = await rig.running()
    await clock.advance(30_000)
    assert await rig.expire() == 1
    taken = await rig.claim(**OTHER)
    assert (taken.handle.kind, taken.attempt_index, taken.lease_epoch) == (HandleKind.RECLAIMED, 0, 3)
    assert (await rig.lease_events(claim.execution_id))[-1] == ("reclaimed", None)


async def test_more_reclaims_than_the_policy_allows_end_it(rig: Rig, clock: Clock) -> None:
    """C-034, C-035, C-039, V-054."""
    claim = await rig.running(policy=ExecutionPolicy(max_reclaim_count=1))
    await clock.advance(30_000)
    assert await rig.engine.claim_from_resume_grant(token(claim.execution_id)) is not None
    await clock.advance(30_000)
    with pytest.raises(Contention) as refused:
        await rig.engine.claim_from_resume_grant(token(claim.execution_id))
    assert refused.value.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert await rig.state(claim.execution_id) == (
        "failed",
        "terminal",
        "unowned",
        "not_applicable",
        "attempt_terminal",
    )
    assert await rig.completions(claim.execution_id) == ["failed"]
    assert (await rig.lease_events(claim.execution_id))[-1] == ("expired", "lease_expiry")
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert snapshot.failure_message == "max_reclaims_exceeded"
    assert (await rig.attempt(claim.execution_id))["outcome"] == "failed"


async def test_never_claimed_and_unknown_are_not_found(rig: Rig) -> None:
    waiting = await rig.create()
    delayed = await rig.create(delay_until_ms=2**50)
    for execution_id, entity in ((waiting, "attempt"), (delayed, "attempt"), (f"{{fp:1}}:{uuid4()}", "execution")):
        with pytest.raises(NotFound) as refused:
            await rig.engine.claim_from_resume_grant(token(execution_id))
        assert refused.value.entity == entity


async def test_ended_and_paused_work_cannot_be_taken(rig: Rig) -> None:
    """V-050: no resurrection."""
    ended = await rig.running()
    await rig.engine.complete(ended.handle)
    delayed = await rig.running()
    await rig.engine.delay(delayed.handle, 2**50)
    retrying = await rig.running()
    await rig.engine.fail(retrying.handle, "", FailureClass.TRANSIENT)
    before = await rig.fingerprint()
    for claim in (ended, delayed, retrying):
        with pytest.raises(Contention) as refused:
            await rig.engine.claim_from_resume_grant(token(claim.execution_id))
        assert refused.value.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert await rig.fingerprint() == before


async def test_only_resumable_work_is_resumed(rig: Rig) -> None:
    """C-122, V-041, V-045."""
    claim = await rig.running()
    with pytest.raises(Contention) as refused:
        await rig.engine.claim_resumed_execution(claim.execution_id, **WORKER)
    assert refused.value.kind == ContentionKind.NOT_A_RESUMED_EXECUTION
    with pytest.raises(NotFound):
        await rig.engine.claim_resumed_execution(f"{{fp:1}}:{uuid4()}", **WORKER)
    # A met condition, as the signals will leave it.
    await rig.engine.release(claim.handle)
    await rig.sql.execute("update ff_exec_core set public_state = 'resumable', interruption = 'suspended'")
    resumed = await rig.engine.claim_resumed_execution(claim.execution_id, **WORKER)
    assert (resumed.handle.kind, resumed.lease_epoch, resumed.attempt_id) == (HandleKind.RESUMED, 2, claim.attempt_id)
    assert (await rig.lease_events(claim.execution_id))[-1] == ("acquired", None)
    with pytest.raises(Contention):
        await rig.engine.claim_resumed_execution(claim.execution_id, **WORKER)


async def test_plain_claim_serves_resumable_work(rig: Rig) -> None:
    """C-272."""
    claim = await rig.running()
    await rig.engine.release(claim.handle)
    await rig.sql.execute("update ff_exec_core set public_state = 'resumable', interruption = null")
    again = await rig.claim()
    assert again.handle.kind == HandleKind.RESUMED


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (None, "token"),
        (ResumeToken("nope", "w", "i", 1), "execution_id"),
        (ResumeToken(SOME, "", "i", 1), "worker_id"),
        (ResumeToken(SOME, "w", "i", 0), "lease_ttl_ms"),
    ],
)
async def test_a_bad_token_is_named(rig: Rig, bad: Any, field: str) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.claim_from_resume_grant(bad)
    assert refused.value.field == field


async def test_the_epoch_rises_with_every_owner_over_a_whole_life(rig: Rig, clock: Clock) -> None:
    """I1, C-040."""
    await rig.create(policy=ExecutionPolicy(retry=RetryPolicy(backoff=Fixed(0)), max_reclaim_count=9))
    epochs = []
    handles = []

    async def take() -> Any:
        claim = await rig.claim()
        epochs.append(claim.lease_epoch)
        handles.append(claim.handle)
        return claim

    claim = await take()
    await clock.advance(30_000)
    await rig.expire()
    claim = await take()
    await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT)
    claim = await take()
    await rig.engine.delay(claim.handle, await clock.now_ms())
    claim = await take()
    await rig.engine.release(claim.handle)
    claim = await take()
    await clock.advance(30_000)
    taken = await rig.engine.claim_from_resume_grant(token(claim.execution_id))
    assert taken is not None
    epochs.append(taken.lease_epoch)
    assert epochs == sorted(set(epochs))
    assert epochs[0] == 1
    core = await rig.core(claim.execution_id)
    assert core["lease_epoch"] == taken.lease_epoch
    for handle in handles:
        with pytest.raises(Contention):
            await rig.engine.renew(handle)
    await rig.engine.complete(taken.handle)
