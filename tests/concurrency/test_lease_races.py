"""Keeping a lease while it is taken away: either the renewal or the expiry counts (I1)."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from ffd import EngineError, LeaseRenewal
from tests.concurrency.sessions import TTL_MS, assert_invariants, both_ways, is_fenced, lose_lease, race, reclaim
from tests.support import Clock, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_renew_against_lease_expiry_keeps_the_lease_or_loses_it(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: renew against expiry: renewed and alive, or refused and claimable; never both."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        claim = await rig.running()
        await clock.advance(TTL_MS // 2)

        async def half_a_lease_later() -> int:
            await clock.advance(TTL_MS // 2 + 1)
            return await rig.expire()

        answer, swept = await race(rng, partial(rig.engine.renew, claim.handle), half_a_lease_later)
        swept += await rig.expire()
        if isinstance(answer, LeaseRenewal):
            endings["renewed"] += 1
            assert swept == 0
            assert answer.lease_epoch == claim.lease_epoch
            assert (await rig.attempt(claim.execution_id))["lease_expires_at_ms"] == answer.expires_at_ms
            assert answer.expires_at_ms > await clock.now_ms()
            await rig.engine.complete(claim.handle)
        else:
            endings["expired"] += 1
            assert is_fenced(answer), answer
            assert swept == 1
            assert "renewed" not in [event for event, _ in await rig.lease_events(claim.execution_id)]
            await rig.engine.complete((await reclaim(rig, claim)).handle)
    await assert_invariants(rig.sql)


async def test_renew_many_against_the_sweep_answers_each_lease_by_what_became_of_it(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: renew_many against the sweep: each lease is renewed or swept, and its answer says which."""
    for _ in range(rounds // 2):
        claims = [await rig.running() for _ in range(10)]
        rng.shuffle(claims)
        answers, _ = await race(
            rng,
            partial(rig.engine.renew_many, [claim.handle for claim in claims]),
            lambda: lose_lease(rig, clock),
        )
        await rig.expire()
        for claim, answer in zip(claims, answers, strict=True):
            events = [event for event, _ in await rig.lease_events(claim.execution_id)]
            if isinstance(answer, EngineError):
                assert is_fenced(answer), answer
                assert events == ["acquired", "expired"]
            else:
                # It was renewed before time went on; the renewed lease has run out like any other.
                assert events in (["acquired", "renewed"], ["acquired", "renewed", "expired"])
        for claim in await rig.engine.claim_many("default", 10, worker_id="w", worker_instance_id="w-2"):
            await rig.engine.complete(claim.handle)
        # A lease that was renewed on the new clock lives on.
        await rig.engine.complete_many([(claim.handle, None) for claim in claims])
        left = await rig.sql.fetchval("select count(*) from ff_exec_core where public_state <> 'completed'")
        assert left == 0
    await assert_invariants(rig.sql)


async def test_renewals_and_a_complete_of_one_owner_do_not_disturb_each_other(
    rig: Rig, rng: random.Random, rounds: int
) -> None:
    """Show: renew against complete: the completion stands, no lease is left behind, no renewal comes after it."""
    for _ in range(rounds):
        claim = await rig.running()
        *renewals, completed = await race(
            rng,
            *[partial(rig.engine.renew, claim.handle)] * 3,
            partial(rig.engine.complete, claim.handle),
        )
        assert completed is None
        for answer in renewals:
            assert isinstance(answer, LeaseRenewal | EngineError)
        events = [event for event, _ in await rig.lease_events(claim.execution_id)]
        assert events[-1] == "revoked"
        assert events.count("renewed") == sum(isinstance(answer, LeaseRenewal) for answer in renewals)
        assert (await rig.attempt(claim.execution_id))["lease_expires_at_ms"] is None
    await assert_invariants(rig.sql)
