"""Operators' approvals: the engine finds the token, the signal is like any other."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from ffd import (
    Accepted,
    ByName,
    Count,
    Duplicate,
    Engine,
    NotFound,
    Single,
)
from tests.signalling import (
    APPENDED,
    SATISFIED,
    SECRET,
    SOURCES,
    refused,
    waiting,
)
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


# Approval


async def test_an_operators_approval_resumes_without_anybody_handling_a_token(rig: Rig) -> None:
    """C-146; C-149 does not apply: the contract's call names no lane."""
    claim, outcome = await waiting(rig, Single("a", ByName("approved")), reason="waiting_for_approval")
    (point,) = outcome.waitpoints
    answer = await rig.engine.deliver_approval_signal(
        claim.execution_id, point.waitpoint_id, "approved", actor="alice@example.org"
    )
    assert isinstance(answer, Accepted)
    assert answer.effect == SATISFIED
    (seen,) = await rig.engine.observe_signals(outcome.handle)
    assert (seen.signal_name, seen.signal_category, seen.source_type, seen.source_identity, seen.payload) == (
        "approved",
        "approval",
        "operator",
        "alice@example.org",
        None,
    )


async def test_an_operators_rejection_is_stored_without_resuming(rig: Rig) -> None:
    """C-147."""
    claim, outcome = await waiting(rig, Single("a", ByName("approved")))
    answer = await rig.engine.deliver_approval_signal(
        claim.execution_id, outcome.waitpoints[0].waitpoint_id, "rejected", actor="bob"
    )
    assert isinstance(answer, Accepted)
    assert answer.effect == APPENDED
    assert (await rig.state(claim.execution_id))[0] == "suspended"


async def test_approval_of_what_is_not_there_is_not_found(rig: Rig) -> None:
    """C-148."""
    claim, outcome = await waiting(rig, Single("a"))
    point = outcome.waitpoints[0].waitpoint_id
    other, _ = await waiting(rig)
    for execution_id, waitpoint_id in (
        (claim.execution_id, str(uuid4())),
        (other.execution_id, point),
        (f"{{fp:1}}:{uuid4()}", point),
    ):
        error = await rig.refused(rig.engine.deliver_approval_signal(execution_id, waitpoint_id, "approved", actor="a"))
        assert isinstance(error, NotFound)
        assert error.entity == "waitpoint"


async def test_a_decision_of_one_person_counts_once_for_a_day(rig: Rig, clock: Clock) -> None:
    """V-021; another suffix is another decision."""
    claim, outcome = await waiting(rig)
    where = (claim.execution_id, outcome.waitpoints[0].waitpoint_id)
    first = await rig.engine.deliver_approval_signal(*where, "approved", actor="alice")
    assert isinstance(first, Accepted)
    await clock.advance(86_399_999)
    repeat = await rig.engine.deliver_approval_signal(*where, "approved", actor="alice")
    assert repeat == Duplicate(first.signal_id)
    for name, actor, suffix in (
        ("approved", "bob", ""),
        ("rejected", "alice", ""),
        ("approved", "alice", "2"),
        # Parts that read alike when they are joined by colons.
        ("approved", "alice:3", ""),
        ("approved", "alice", "3:"),
        ("approved:alice", "3", ""),
    ):
        one = await rig.engine.deliver_approval_signal(*where, name, actor=actor, idempotency_suffix=suffix)
        assert isinstance(one, Accepted), (name, actor, suffix)
    await clock.advance(1)
    assert isinstance(await rig.engine.deliver_approval_signal(*where, "approved", actor="alice"), Accepted)


async def test_the_decision_that_resumed_is_a_duplicate_when_repeated(rig: Rig) -> None:
    """V-021: its waitpoint is gone by its own doing; whoever lost the answer learns that it was taken."""
    claim, outcome = await waiting(rig, Single("a"))
    where = (claim.execution_id, outcome.waitpoints[0].waitpoint_id)
    first = await rig.engine.deliver_approval_signal(*where, "approved", actor="alice")
    assert isinstance(first, Accepted)
    before = await rig.fingerprint()
    assert await rig.engine.deliver_approval_signal(*where, "approved", actor="alice") == Duplicate(first.signal_id)
    late = await refused(rig.engine.deliver_approval_signal(*where, "approved", actor="bob"))
    assert isinstance(late, NotFound)
    assert await rig.fingerprint() == before


async def test_two_different_operators_must_approve(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Count(2, SOURCES, ("a",), ByName("approved")))
    where = (claim.execution_id, outcome.waitpoints[0].waitpoint_id)
    effects = []
    for actor, suffix in (("alice", ""), ("alice", "again"), ("bob", "")):
        answer = await rig.engine.deliver_approval_signal(*where, "approved", actor=actor, idempotency_suffix=suffix)
        assert isinstance(answer, Accepted)
        effects.append(answer.effect)
    assert effects == [APPENDED, APPENDED, SATISFIED]


async def test_approval_holds_under_a_key_past_its_grace_only_if_the_token_does(rig: Rig, clock: Clock) -> None:
    """The engine finds the token; it does not mint another."""
    claim, outcome = await waiting(rig)
    where = (claim.execution_id, outcome.waitpoints[0].waitpoint_id)
    await rig.engine.rotate_waitpoint_hmac_secret_all("k2", "22" * 32, 1000)
    assert isinstance(await rig.engine.deliver_approval_signal(*where, "approved", actor="a"), Accepted)
    await clock.advance(1000)
    error = await refused(rig.engine.deliver_approval_signal(*where, "approved", actor="b"))
    assert error.code == "validation.invalid_token"


async def test_a_bad_approval_is_named_and_changes_nothing(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    call: dict[str, Any] = {
        "execution_id": claim.execution_id,
        "waitpoint_id": outcome.waitpoints[0].waitpoint_id,
        "name": "n" * 64,
        "actor": "a" * 128,
        "idempotency_suffix": "s" * 48,
    }
    bad: list[tuple[str, Any]] = [
        ("execution_id", "x"),
        ("waitpoint_id", "x"),
        ("name", ""),
        ("name", "n" * 65),
        ("actor", ""),
        ("actor", "a" * 129),
        ("actor", None),
        ("idempotency_suffix", "s" * 49),
    ]
    for field, value in bad:
        error = await rig.refused(rig.engine.deliver_approval_signal(**{**call, field: value}))
        assert getattr(error, "field", None) == field
    assert isinstance(await rig.engine.deliver_approval_signal(**call), Accepted), "the bounds themselves are taken"
