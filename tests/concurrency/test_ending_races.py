"""One ending: whatever collides with a `complete` or a `fail`, exactly one of them counts (I1, I2, I3)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from ffd import (
    Contention,
    ContentionKind,
    EngineError,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    PublicState,
    RetryPolicy,
    RetryScheduled,
    TerminalFailed,
)
from tests.concurrency.sessions import assert_invariants, both_ways, is_fenced, lose_lease, race, reclaim
from tests.support import OTHER, Clock, Rig, stale

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

RETRY_AT_ONCE = ExecutionPolicy(retry=RetryPolicy(max_retries=5, backoff=Fixed(0)))
NO_RETRY = ExecutionPolicy(retry=RetryPolicy(max_retries=0))


async def test_complete_against_lease_expiry_has_exactly_one_outcome(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show X-022: completed with one event, or expired and claimable without one; never both; epochs grow."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running()
        answer, swept = await race(
            rng, partial(rig.engine.complete, claim.handle, b"done"), lambda: lose_lease(rig, clock)
        )
        # A sweep that skipped a locked row finds it next time, if it is still there.
        swept += await rig.expire()
        assert (answer is None) != (swept == 1), (answer, swept)
        if answer is None:
            endings["completed"] += 1
            assert await rig.completions(claim.execution_id) == ["success"]
            assert await rig.engine.get_execution_result(claim.execution_id) == b"done"
            assert "expired" not in [event for event, _ in await rig.lease_events(claim.execution_id)]
        else:
            endings["expired"] += 1
            assert is_fenced(answer), answer
            assert await rig.completions(claim.execution_id) == []
            again = await reclaim(rig, claim)
            with pytest.raises(Contention):
                await rig.engine.complete(claim.handle)
            await rig.engine.complete(again.handle)
            assert await rig.completions(claim.execution_id) == ["success"]
    await assert_invariants(rig.sql)


@pytest.mark.parametrize("policy", [RETRY_AT_ONCE, NO_RETRY], ids=["retry", "no_retry"])
async def test_fail_against_lease_expiry_has_exactly_one_outcome(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int, policy: ExecutionPolicy
) -> None:
    """Show: fail against lease expiry: one of them moves the execution, the other finds it moved."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running(policy=policy)
        answer, swept = await race(
            rng,
            partial(rig.engine.fail, claim.handle, "oops", FailureClass.TRANSIENT),
            lambda: lose_lease(rig, clock),
        )
        swept += await rig.expire()
        row = await rig.core(claim.execution_id)
        if isinstance(answer, EngineError):
            endings["expired"] += 1
            assert is_fenced(answer), answer
            assert swept == 1
            assert (row["retry_count"], row["lease_reclaim_count"]) == (0, 1)
            await rig.engine.complete((await reclaim(rig, claim)).handle)
        elif policy is RETRY_AT_ONCE:
            endings["retried"] += 1
            assert isinstance(answer, RetryScheduled)
            assert swept == 0
            assert (row["retry_count"], row["lease_reclaim_count"]) == (1, 0)
            again = await rig.claim(**OTHER)
            assert (again.attempt_index, again.lease_epoch) == (1, claim.lease_epoch + 1)
            await rig.engine.complete(again.handle)
        else:
            endings["failed"] += 1
            assert answer == TerminalFailed()
            assert swept == 0
            assert await rig.completions(claim.execution_id) == ["failed"]
    await assert_invariants(rig.sql)


async def test_two_completes_of_one_owner_both_return_and_write_one_event(
    rig: Rig, rng: random.Random, rounds: int
) -> None:
    """Show: double complete with the same handle: one completion event, both return, the first result stays."""
    for _ in range(rounds):
        claim = await rig.running()
        answers = await race(
            rng,
            partial(rig.engine.complete, claim.handle, b"one"),
            partial(rig.engine.complete, claim.handle, b"two"),
        )
        assert answers == [None, None]
        assert await rig.completions(claim.execution_id) == ["success"]
        result = await rig.engine.get_execution_result(claim.execution_id)
        assert result in (b"one", b"two")
        await rig.engine.complete(claim.handle, b"three")
        assert await rig.engine.get_execution_result(claim.execution_id) == result
    await assert_invariants(rig.sql)


async def test_completes_of_two_owners_end_the_execution_once_and_refuse_the_former(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: double complete by two owners: one completion event, the one that lost its lease is refused."""
    for _ in range(rounds):
        former = await rig.running()
        assert await lose_lease(rig, clock) == 1
        owner = await reclaim(rig, former)
        refused, answer, forged = await race(
            rng,
            partial(rig.engine.complete, former.handle, b"former"),
            partial(rig.engine.complete, owner.handle, b"owner"),
            partial(rig.engine.complete, stale(owner, epoch=1), b"forged"),
        )
        assert answer is None
        for error in (refused, forged):
            assert isinstance(error, Contention)
            assert error.kind == ContentionKind.LEASE_CONFLICT
        assert await rig.completions(owner.execution_id) == ["success"]
        assert await rig.engine.get_execution_result(owner.execution_id) == b"owner"
    await assert_invariants(rig.sql)


@pytest.mark.parametrize("policy", [RETRY_AT_ONCE, NO_RETRY], ids=["retry", "no_retry"])
async def test_complete_against_fail_by_one_owner_has_exactly_one_ending(
    rig: Rig, rng: random.Random, rounds: int, policy: ExecutionPolicy
) -> None:
    """Show: complete against fail by the same owner: exactly one ending, the other call is refused."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running(policy=policy)
        completed, failed = await race(
            rng,
            partial(rig.engine.complete, claim.handle),
            partial(rig.engine.fail, claim.handle, "oops", FailureClass.TRANSIENT),
        )
        assert isinstance(completed, EngineError) != isinstance(failed, EngineError), (completed, failed)
        snapshot = await rig.engine.describe_execution(claim.execution_id)
        assert snapshot is not None
        if completed is None:
            endings["completed"] += 1
            assert isinstance(failed, Contention)
            assert failed.kind == ContentionKind.EXECUTION_NOT_ACTIVE
            assert await rig.completions(claim.execution_id) == ["success"]
            assert snapshot.public_state == PublicState.COMPLETED
        elif policy is NO_RETRY:
            endings["failed"] += 1
            assert isinstance(completed, Contention)
            assert completed.kind == ContentionKind.EXECUTION_NOT_ACTIVE
            assert await rig.completions(claim.execution_id) == ["failed"]
        else:
            endings["retried"] += 1
            assert isinstance(completed, Contention)
            assert completed.kind == ContentionKind.LEASE_CONFLICT
            assert await rig.completions(claim.execution_id) == []
            again = await rig.claim()
            assert (again.attempt_index, again.lease_epoch) == (1, claim.lease_epoch + 1)
            await rig.engine.complete(again.handle)
    await assert_invariants(rig.sql)


@pytest.mark.parametrize("policy", [RETRY_AT_ONCE, NO_RETRY], ids=["retry", "no_retry"])
async def test_two_fails_of_one_owner_get_one_answer_and_count_once(
    rig: Rig, rng: random.Random, rounds: int, policy: ExecutionPolicy
) -> None:
    """Show: double fail with the same handle: both get the first answer, one retry or one event (I2)."""
    for _ in range(rounds):
        claim = await rig.running(policy=policy)
        one, two = await race(rng, *[partial(rig.engine.fail, claim.handle, "oops", FailureClass.TRANSIENT)] * 2)
        assert one == two
        row = await rig.core(claim.execution_id)
        if policy is NO_RETRY:
            assert one == TerminalFailed()
            assert await rig.completions(claim.execution_id) == ["failed"]
        else:
            assert isinstance(one, RetryScheduled)
            assert (row["retry_count"], row["attempt_index"]) == (1, 1)
            await rig.engine.complete((await rig.claim()).handle)
    await assert_invariants(rig.sql)


async def test_release_against_lease_expiry_gives_the_work_back_once(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: release against lease expiry: given back or lost, never both; a release counts no reclaim."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running()
        answer, swept = await race(rng, partial(rig.engine.release, claim.handle), lambda: lose_lease(rig, clock))
        swept += await rig.expire()
        assert (answer is None) != (swept == 1)
        endings["released" if answer is None else "expired"] += 1
        assert (await rig.core(claim.execution_id))["lease_reclaim_count"] == swept
        await rig.engine.complete((await reclaim(rig, claim)).handle)
    await assert_invariants(rig.sql)
