"""revoke_lease and change_priority: the work is claimable at once, the old owner fenced, the queue reordered."""

from __future__ import annotations

import pytest

from ffd import (
    AlreadySatisfied,
    Contention,
    ContentionKind,
    Engine,
    HandleKind,
    NotFound,
    PriorityChanged,
    Revoked,
    SatisfiedReason,
    Validation,
)
from ffd.core.ids import new_execution_key
from tests.support import OTHER, Rig

pytestmark = pytest.mark.anyio


async def test_the_lease_is_taken_and_the_work_offered_again(rig: Rig) -> None:
    """C-077, C-078: lease cleared, epoch + 1 returned, one event; claimable at once, continued as RECLAIMED."""
    claim = await rig.running()
    answer = await rig.engine.revoke_lease(claim.execution_id, reason="stuck", actor="ann")
    assert answer == Revoked(claim.lease_id, claim.lease_epoch + 1)
    assert await rig.state(claim.execution_id) == (
        "waiting",
        "runnable",
        "unowned",
        "eligible_now",
        "attempt_interrupted",
    )
    attempt = await rig.attempt(claim.execution_id)
    assert (attempt["lease_expires_at_ms"], attempt["worker_instance_id"]) == (None, None)
    assert (await rig.core(claim.execution_id))["lease_reclaim_count"] == 0
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "operator")]
    (event,) = await rig.operator_events(claim.execution_id)
    assert (event["event_type"], event["actor"], event["reason"]) == ("lease_revoked", "ann", "stuck")
    assert event["details"]["worker_instance_id"] == "w-1"
    assert event["details"]["lease_id"] == claim.lease_id
    with pytest.raises(Contention) as refused:
        await rig.engine.complete(claim.handle)
    assert refused.value.kind == ContentionKind.LEASE_CONFLICT
    again = await rig.claim(**OTHER)
    assert again.handle.kind == HandleKind.RECLAIMED
    assert (again.attempt_index, again.lease_epoch) == (0, claim.lease_epoch + 2)
    assert (await rig.lease_events(claim.execution_id))[-1] == ("reclaimed", None)


async def test_another_worker_s_lease_is_left_alone(rig: Rig) -> None:
    """C-079, and the same for another lease id."""
    claim = await rig.running()
    before = await rig.fingerprint()
    other = await rig.engine.revoke_lease(claim.execution_id, reason="x", worker_instance_id="other-1")
    assert other == AlreadySatisfied(SatisfiedReason.DIFFERENT_WORKER_INSTANCE_ID)
    wrong = await rig.engine.revoke_lease(claim.execution_id, reason="x", expected_lease_id=claim.lease_id + "9")
    assert wrong == AlreadySatisfied(SatisfiedReason.LEASE_ID_MISMATCH)
    assert await rig.fingerprint() == before
    right = await rig.engine.revoke_lease(
        claim.execution_id, reason="x", worker_instance_id="w-1", expected_lease_id=claim.lease_id
    )
    assert isinstance(right, Revoked)


async def test_without_a_lease_there_is_nothing_to_revoke(rig: Rig) -> None:
    """C-080."""
    execution = await rig.create()
    answer = await rig.engine.revoke_lease(execution, reason="x")
    assert answer == AlreadySatisfied(SatisfiedReason.NO_ACTIVE_LEASE)
    assert await rig.operator_events(execution) == []


async def test_twice_is_once(rig: Rig) -> None:
    """C-081."""
    claim = await rig.running()
    await rig.engine.revoke_lease(claim.execution_id, reason="x")
    before = await rig.fingerprint()
    again = await rig.engine.revoke_lease(claim.execution_id, reason="x")
    assert again == AlreadySatisfied(SatisfiedReason.NO_ACTIVE_LEASE)
    assert await rig.fingerprint() == before


async def test_an_unknown_execution_is_not_found(engine: Engine) -> None:
    with pytest.raises(NotFound):
        await engine.revoke_lease(str(new_execution_key()), reason="x")
    with pytest.raises(NotFound):
        await engine.change_priority(str(new_execution_key()), 1)


async def test_a_higher_priority_goes_first(rig: Rig) -> None:
    """C-083: stored, clamped, one event with both priorities."""
    first, second = await rig.create(), await rig.create()
    answer = await rig.engine.change_priority(second, 99_999, reason="urgent", actor="ann")
    assert answer == PriorityChanged(0, 9000)
    (event,) = await rig.operator_events(second)
    assert (event["event_type"], event["actor"], event["reason"]) == ("priority_changed", "ann", "urgent")
    assert event["details"] == {"old_priority": 0, "new_priority": 9000}
    assert [(await rig.claim()).execution_id for _ in range(2)] == [second, first]


async def test_only_claimable_work_has_a_priority_to_change(rig: Rig) -> None:
    """C-084, C-085."""
    ended = await rig.running()
    await rig.engine.complete(ended.handle)
    running = await rig.running()
    delayed = await rig.create(delay_until_ms=2**52)
    before = await rig.fingerprint()
    for execution in (ended.execution_id, running.execution_id, delayed):
        with pytest.raises(Contention) as refused:
            await rig.engine.change_priority(execution, 5)
        assert refused.value.kind == ContentionKind.EXECUTION_NOT_ELIGIBLE
    with pytest.raises(Validation) as bad:
        await rig.engine.change_priority(delayed, "high")  # type: ignore[arg-type]
    assert bad.value.field == "new_priority"
    assert await rig.fingerprint() == before
