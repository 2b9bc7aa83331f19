"""Suspensions that are refused before anything is written: conditions, keys, times, bounds."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
import pytest

from ffd import (
    AllOf,
    ByName,
    Conflict,
    Count,
    CountKind,
    Engine,
    Fresh,
    LeaseFence,
    OperatorOnly,
    Single,
    Suspend,
    TimeoutOnly,
    UsePending,
    Validation,
    ValidationKind,
    Wildcard,
)
from ffd.core.ids import parse_execution_id
from tests.signalling import Call, calls, send, signal
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio

SECRET = "9c" * 32
ONE = Suspend([Fresh("a")], Single("a", ByName("go")))


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


# Validation

SOME = [Fresh("a"), Fresh("b")]
BAD: dict[str, tuple[Any, str, ValidationKind]] = {
    "empty AllOf": (Suspend(SOME, AllOf(())), "condition.members", ValidationKind.INVALID_INPUT),
    "n = 0": (Suspend(SOME, Count(0, CountKind.DISTINCT_SIGNALS, ("a",))), "condition.n", ValidationKind.INVALID_INPUT),
    "n beyond the set": (
        Suspend(SOME, Count(3, CountKind.DISTINCT_WAITPOINTS, ("a", "b"))),
        "condition.n",
        ValidationKind.INVALID_INPUT,
    ),
    "no waitpoints to count": (
        Suspend(SOME, Count(1, CountKind.DISTINCT_SIGNALS, ())),
        "condition.waitpoints",
        ValidationKind.INVALID_INPUT,
    ),
    "unknown key": (Suspend(SOME, Single("z")), "condition.key", ValidationKind.INVALID_INPUT),
    "duplicate key": (
        Suspend([Fresh("a"), Fresh("a")], Single("a")),
        "waitpoints",
        ValidationKind.INVALID_WAITPOINT_KEY,
    ),
    "depth 5": (
        Suspend(SOME, AllOf((AllOf((AllOf((AllOf((Single("a"),)),)),)),))),
        "condition.members[0].members[0].members[0].members[0]",
        ValidationKind.INVALID_INPUT,
    ),
    "TimeoutOnly without a timeout": (Suspend(SOME, TimeoutOnly()), "timeout_at_ms", ValidationKind.INVALID_INPUT),
    "a timeout in the past": (
        Suspend(SOME, Single("a"), timeout_at_ms=1),
        "timeout_at_ms",
        ValidationKind.INVALID_INPUT,
    ),
    "a timeout that is none": (
        Suspend(SOME, Single("a"), timeout_at_ms="soon"),  # type: ignore[arg-type]
        "timeout_at_ms",
        ValidationKind.INVALID_INPUT,
    ),
    "no suspend": ("suspend", "suspend", ValidationKind.INVALID_INPUT),
    "no condition": (Suspend(SOME, None), "condition", ValidationKind.INVALID_INPUT),  # type: ignore[arg-type]
    "reason": (Suspend(SOME, Single("a"), reason="bored"), "reason", ValidationKind.INVALID_INPUT),
    "unhashable reason": (
        Suspend(SOME, Single("a"), reason=["x"]),  # type: ignore[arg-type]
        "reason",
        ValidationKind.INVALID_INPUT,
    ),
    "on_timeout": (Suspend(SOME, Single("a"), on_timeout="explode"), "on_timeout", ValidationKind.INVALID_INPUT),
    "unhashable on_timeout": (
        Suspend(SOME, Single("a"), on_timeout=["x"]),  # type: ignore[arg-type]
        "on_timeout",
        ValidationKind.INVALID_INPUT,
    ),
    "resume_delay_ms": (
        Suspend(SOME, Single("a"), resume_delay_ms=-1),
        "resume_delay_ms",
        ValidationKind.INVALID_INPUT,
    ),
    "suspension_id": (Suspend(SOME, Single("a"), suspension_id="x"), "suspension_id", ValidationKind.INVALID_INPUT),
    "waitpoints": (Suspend(None, Single("a")), "waitpoints", ValidationKind.INVALID_INPUT),  # type: ignore[arg-type]
    "waitpoints as text": (
        Suspend("ab", Single("a")),  # type: ignore[arg-type]
        "waitpoints",
        ValidationKind.INVALID_INPUT,
    ),
    "too many waitpoints": (
        Suspend([Fresh(str(at)) for at in range(257)], Single("1")),
        "waitpoints",
        ValidationKind.INVALID_INPUT,
    ),
    "a waitpoint that is none": (
        Suspend([Fresh("a"), "b"], Single("a")),  # type: ignore[list-item]
        "waitpoints[1]",
        ValidationKind.INVALID_INPUT,
    ),
    "a bad waitpoint id": (
        Suspend([Fresh("a", "x")], Single("a")),
        "waitpoints[0].waitpoint_id",
        ValidationKind.INVALID_INPUT,
    ),
    "a bad pending id": (
        Suspend([UsePending("x")], Single("a")),
        "waitpoints[0].waitpoint_id",
        ValidationKind.INVALID_INPUT,
    ),
    "an id twice": (
        Suspend(
            [Fresh("a", "22222222-2222-4222-8222-222222222222"), UsePending("2" * 8 + "-2222-4222-8222-" + "2" * 12)],
            Single("a"),
        ),
        "waitpoints",
        ValidationKind.INVALID_INPUT,
    ),
    "an empty key": (Suspend([Fresh("")], Single("")), "waitpoints[0].key", ValidationKind.INVALID_WAITPOINT_KEY),
    "a reserved key": (
        Suspend([Fresh("a"), Fresh("__timeout__")], Single("a")),
        "waitpoints[1].key",
        ValidationKind.INVALID_WAITPOINT_KEY,
    ),
    "a key too long": (
        Suspend([Fresh("k" * 257)], Single("a")),
        "waitpoints[0].key",
        ValidationKind.INVALID_WAITPOINT_KEY,
    ),
    "a key with NUL": (Suspend([Fresh("a\0")], Single("a")), "waitpoints[0].key", ValidationKind.INVALID_WAITPOINT_KEY),
}


@calls
async def test_bad_input_is_named_and_changes_nothing(rig: Rig, call: Call) -> None:
    """V-024…V-026, V-032, V-033; the lease lives on."""
    claim = await rig.running()
    for name, (request, field, kind) in BAD.items():
        error = await rig.refused(call(rig.engine, claim.handle, request, "k"))
        assert isinstance(error, Validation), name
        assert (error.field, error.kind) == (field, kind), name
    for key in ("", "k" * 257, "a\0", 5):
        error = await rig.refused(call(rig.engine, claim.handle, ONE, key))  # type: ignore[arg-type]
        assert getattr(error, "field", None) == "idempotency_key"
    await rig.engine.renew(claim.handle)


async def test_a_timeout_must_lie_in_the_future_of_the_database_clock(rig: Rig, clock: Clock) -> None:
    """V-026, I7."""
    claim = await rig.running()
    await clock.advance(10**9)
    claim = await rig.running(lane="later")
    now = await clock.now_ms()
    for timeout in (now, now - 1):
        error = await rig.refused(
            rig.engine.suspend(claim.handle, Suspend([Fresh("a")], Single("a"), timeout_at_ms=timeout))
        )
        assert getattr(error, "field", None) == "timeout_at_ms"
    await rig.engine.suspend(claim.handle, Suspend([Fresh("a")], Single("a"), timeout_at_ms=now + 1))


async def test_a_bad_triple_is_named(rig: Rig) -> None:
    somewhere = f"{{fp:1}}:{uuid4()}"
    bad: list[tuple[str, Any, str]] = [
        ("x", LeaseFence("l", 1, "a"), "execution_id"),
        (somewhere, None, "fence"),
        (somewhere, LeaseFence("l", -1, "a"), "fence.lease_epoch"),
        (somewhere, LeaseFence("l", "1", "a"), "fence.lease_epoch"),  # type: ignore[arg-type]
        (somewhere, LeaseFence("l", 2**63, "a"), "fence.lease_epoch"),
    ]
    for execution_id, fence, field in bad:
        error = await rig.refused(rig.engine.suspend_by_triple(execution_id, fence, ONE))
        assert getattr(error, "field", None) == field


async def test_a_bad_handle_is_corruption(rig: Rig) -> None:
    error = await rig.refused(rig.engine.suspend("handle", ONE))  # type: ignore[arg-type]
    assert error.code == "validation.corruption"


async def test_the_condition_is_stored_as_the_references_document(rig: Rig) -> None:
    claim = await rig.running()
    condition = AllOf((Single("a", Wildcard()), Count(1, CountKind.DISTINCT_SOURCES, ("b",), ByName("x"))))
    await rig.engine.suspend(claim.handle, Suspend(SOME, condition))
    assert msgspec.json.decode(await rig.sql.fetchval("select condition from ff_suspension_current")) == {
        "Composite": {
            "kind": "AllOf",
            "members": [
                {"Single": {"waitpoint_key": "a", "matcher": "Wildcard"}},
                {
                    "Composite": {
                        "kind": "Count",
                        "n": 1,
                        "count_kind": "DistinctSources",
                        "matcher": {"ByName": "x"},
                        "waitpoints": ["b"],
                    }
                },
            ],
        }
    }


async def test_a_suspension_written_by_flowfabric_is_resumed_by_its_condition(rig: Rig) -> None:
    """Design §3.2: a row with the reference's columns only."""
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, Suspend([Fresh("wpk:x")], OperatorOnly()))
    await rig.sql.execute("delete from ff_suspension_current")
    await rig.sql.execute(
        "insert into ff_suspension_current (partition_key, execution_id, suspension_id, suspended_at_ms, condition)"
        " values ($1, $2, gen_random_uuid(), 1, $3::text::jsonb)",
        *parse_execution_id(claim.execution_id),
        '{"Single": {"waitpoint_key": "wpk:x", "matcher": {"ByName": "go"}}}',
    )
    assert await send(rig, signal(claim, outcome.waitpoints[0])) == "resume_condition_satisfied"


async def test_conflicts_name_the_waitpoint(rig: Rig) -> None:
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    error = await rig.refused(
        rig.engine.suspend(claim.handle, Suspend([Fresh("a", pending.waitpoint_id)], Single("a")))
    )
    assert isinstance(error, Conflict)
    assert error.context["waitpoint_id"] == pending.waitpoint_id
