"""The epoch over a whole life: it only grows, and who holds an older one can do nothing (I1)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from ffd import (
    Claim,
    Contention,
    Engine,
    EngineError,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    Handle,
    ResumeToken,
    RetryPolicy,
    State,
)
from ffd.core.ids import parse_execution_id
from tests.concurrency.sessions import TTL_MS, assert_invariants
from tests.support import WORKER, Clock, Rig, stale

pytestmark = pytest.mark.anyio

POLICY = ExecutionPolicy(
    retry=RetryPolicy(max_retries=1_000, backoff=Fixed(0)), max_reclaim_count=1_000, attempt_timeout_ms=None
)

OWNERS_CALLS: dict[str, Callable[[Engine, Handle], Awaitable[object]]] = {
    "renew": lambda engine, handle: engine.renew(handle),
    "progress": lambda engine, handle: engine.progress(handle, percent=1),
    "complete": lambda engine, handle: engine.complete(handle, b"stale"),
    "fail": lambda engine, handle: engine.fail(handle, "stale", FailureClass.TRANSIENT),
    "delay": lambda engine, handle: engine.delay(handle, 10**15),
    "release": lambda engine, handle: engine.release(handle),
}


async def lose_to_the_sweep(rig: Rig, clock: Clock, claim: Claim) -> None:
    await clock.advance(TTL_MS + 1)
    assert await rig.expire() == 1


async def give_up(rig: Rig, clock: Clock, claim: Claim) -> None:
    await rig.engine.release(claim.handle)


async def retry(rig: Rig, clock: Clock, claim: Claim) -> None:
    await rig.engine.fail(claim.handle, "again", FailureClass.TRANSIENT)


async def delay_into_the_past(rig: Rig, clock: Clock, claim: Claim) -> None:
    await rig.engine.delay(claim.handle, await clock.now_ms() - 1)


async def delay_and_promote(rig: Rig, clock: Clock, claim: Claim) -> None:
    """What the delayed_promoter will do, in plain SQL."""
    await rig.engine.delay(claim.handle, await clock.now_ms() + 1_000)
    await clock.advance(1_001)
    await rig.sql.execute(
        "update ff_exec_core set eligibility_state = 'eligible_now', public_state = 'waiting', delay_until_ms = null"
        " where partition_key = $1 and execution_id = $2 and eligibility_state = 'not_eligible_until_time'",
        *parse_execution_id(claim.execution_id),
    )


async def let_run_out(rig: Rig, clock: Clock, claim: Claim) -> None:
    """Run out, but not swept: only a take-over can have it."""
    await clock.advance(TTL_MS + 1)


STEPS = (lose_to_the_sweep, give_up, retry, delay_into_the_past, delay_and_promote, let_run_out)


async def assert_fenced(rig: Rig, handles: list[Handle]) -> None:
    """None of these handles can do anything, one at a time or in batches."""
    before = await rig.fingerprint()
    for handle in handles:
        for name, call in OWNERS_CALLS.items():
            with pytest.raises((Contention, State)):
                await call(rig.engine, handle)
            assert await rig.fingerprint() == before, name
    answers = [
        *await rig.engine.renew_many(handles),
        *await rig.engine.complete_many([(handle, b"stale") for handle in handles]),
    ]
    assert all(isinstance(answer, EngineError) for answer in answers)
    assert await rig.fingerprint() == before


async def test_epochs_strictly_increase_over_a_life_and_fence_out_every_former_owner(
    rig: Rig, clock: Clock, rng: random.Random
) -> None:
    """Show I1: claim, expiry, reclaim, retry, delay, release: each owner's epoch is larger, no older handle works."""
    execution_id = await rig.create(policy=POLICY)
    claim = await rig.claim()
    assert (claim.execution_id, claim.lease_epoch) == (execution_id, 1)
    former: list[Handle] = []
    steps = [*STEPS, *rng.sample(STEPS, len(STEPS))]
    for step in steps:
        await step(rig, clock, claim)
        # A repeat of the fail that ended its own attempt is answered, not refused (I2); it still changes nothing.
        if step is not retry:
            await assert_fenced(rig, [claim.handle])
        token = ResumeToken(execution_id, "other", "other-1")
        if step is let_run_out or rng.random() < 0.3:
            taken = await rig.engine.claim_from_resume_grant(token)
        else:
            taken = await rig.engine.claim("default", **WORKER)
        assert taken is not None, step.__name__
        assert taken.execution_id == execution_id
        assert taken.lease_epoch > claim.lease_epoch
        assert taken.attempt_index == claim.attempt_index + (step is retry)
        if step is not retry:
            former.append(claim.handle)
        claim = taken
        await assert_fenced(rig, [stale(claim, epoch=1), *rng.sample(former, min(3, len(former)))])
    await assert_fenced(rig, former)
    await rig.engine.renew(claim.handle)
    await rig.engine.complete(claim.handle, b"done")
    await assert_fenced(rig, former)
    assert await rig.completions(execution_id) == ["success"]
    assert await rig.engine.get_execution_result(execution_id) == b"done"
    await assert_invariants(rig.sql)


async def test_a_repeated_fail_after_the_next_attempt_runs_gets_its_first_answer_and_changes_nothing(
    rig: Rig, clock: Clock
) -> None:
    """Show I2: the owner of a failed attempt may ask again; any other write of it is refused."""
    await rig.create(policy=POLICY)
    first = await rig.claim()
    answer = await rig.engine.fail(first.handle, "again", FailureClass.TRANSIENT)
    second = await rig.claim()
    assert (second.attempt_index, second.lease_epoch) == (1, 2)
    before = await rig.fingerprint()
    assert await rig.engine.fail(first.handle, "other words", FailureClass.PERMANENT) == answer
    for name, call in OWNERS_CALLS.items():
        if name != "fail":
            with pytest.raises(Contention):
                await call(rig.engine, first.handle)
    assert await rig.fingerprint() == before


async def test_a_handle_of_the_future_can_do_nothing(rig: Rig) -> None:
    """Show I1: the fence is equality: a larger epoch or attempt than the stored one is refused like a smaller one."""
    claim = await rig.running()
    await assert_fenced(rig, [stale(claim, epoch=1), stale(claim, attempt=1), stale(claim, epoch=-1)])
    await rig.engine.complete(claim.handle)
