"""Suspending: the worker lets go under its fence, once; the condition is checked before anything is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from ffd import (
    Accepted,
    ByName,
    Claim,
    Contention,
    ContentionKind,
    Engine,
    Fresh,
    Handle,
    HandleKind,
    LeaseFence,
    NotFound,
    OnTimeout,
    OperatorOnly,
    Signal,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    TimeoutOnly,
    UsePending,
)
from ffd.core.handles import read_lease
from ffd.core.ids import new_uuid, parse_execution_id
from ffd.core.tokens import mint_token
from tests.signalling import Call, calls
from tests.support import OTHER, Clock, Rig, stale

pytestmark = pytest.mark.anyio

SECRET = "9c" * 32
ONE = Suspend([Fresh("a")], Single("a", ByName("go")))


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


async def send(rig: Rig, claim: Claim, point: Any, name: str = "go") -> Accepted:
    answer = await rig.engine.deliver_signal(
        Signal(claim.execution_id, point.waitpoint_id, name, point.token, source_type="t", source_identity="i")
    )
    assert isinstance(answer, Accepted)
    return answer


# The happy way


@calls
async def test_suspending_lets_go_of_the_worker(rig: Rig, clock: Clock, call: Call) -> None:
    """C-125, C-002: state vector, epoch, events, rows and the outcome."""
    claim = await rig.running()
    await clock.advance(5)
    suspension_id, waitpoint_id = str(uuid4()), str(uuid4())
    now = await clock.now_ms()
    request = Suspend(
        [Fresh("wpk:triple", waitpoint_id)],
        Single("wpk:triple", ByName("ready")),
        timeout_at_ms=now + 1000,
        on_timeout=OnTimeout.EXPIRE,
        resume_delay_ms=7,
        reason="waiting_for_approval",
        suspension_id=suspension_id,
    )
    outcome = await call(rig.engine, claim.handle, request, None)
    assert isinstance(outcome, Suspended)
    assert outcome.suspension_id == suspension_id
    (point,) = outcome.waitpoints
    assert (point.waitpoint_id, point.key) == (waitpoint_id, "wpk:triple")
    assert point.token == mint_token("k1", bytes.fromhex(SECRET), claim.execution_id, waitpoint_id)
    assert outcome.handle.kind == HandleKind.SUSPENDED
    assert read_lease(outcome.handle).lease_epoch == claim.lease_epoch + 1
    assert await rig.state(claim.execution_id) == (
        "suspended",
        "suspended",
        "released",
        "not_applicable",
        "attempt_interrupted",
    )
    core, attempt = await rig.core(claim.execution_id), await rig.attempt(claim.execution_id)
    assert (core["blocking_reason"], core["lease_epoch"]) == ("waiting_for_approval", claim.lease_epoch + 1)
    assert (attempt["lease_epoch"], attempt["lease_expires_at_ms"], attempt["outcome"]) == (
        claim.lease_epoch + 1,
        None,
        "attempt_interrupted",
    )
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "suspended")]
    assert await rig.completions(claim.execution_id) == []
    row = await rig.sql.fetchrow("select * from ff_suspension_current")
    assert row is not None
    assert (str(row["suspension_id"]), row["suspended_at_ms"], row["timeout_at_ms"], row["timeout_behavior"]) == (
        suspension_id,
        now,
        now + 1000,
        "expire",
    )
    assert (row["reason_code"], row["resume_delay_ms"], row["closed_at_ms"]) == ("waiting_for_approval", 7, None)
    assert msgspec.json.decode(row["condition"]) == {
        "Single": {"waitpoint_key": "wpk:triple", "matcher": {"ByName": "ready"}}
    }
    assert msgspec.json.decode(row["member_map"]) == {}
    waiting = await rig.sql.fetchrow("select * from ff_waitpoint_pending")
    assert waiting is not None
    assert (waiting["state"], waiting["activated_at_ms"], waiting["created_at_ms"], waiting["expires_at_ms"]) == (
        "active",
        now,
        now,
        now + 1000,
    )
    assert (waiting["required_signal_names"], waiting["token"]) == (["ready"], point.token)


async def test_several_waitpoints_come_back_in_the_order_they_were_asked_for(rig: Rig) -> None:
    """The first is the primary one, fresh or not."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "p", expires_in_ms=60_000)
    request = Suspend([Fresh("z"), UsePending(pending.waitpoint_id), Fresh("a")], Single("p"))
    outcome = await rig.engine.suspend(claim.handle, request, idempotency_key="k")
    assert [point.key for point in outcome.waitpoints] == ["z", "p", "a"]
    assert outcome.waitpoints[1].token == pending.token
    assert await rig.engine.suspend(claim.handle, request, idempotency_key="k") == outcome
    stored = await rig.sql.fetchval("select outcome_json from ff_suspend_dedup")
    assert msgspec.json.decode(stored)["details"]["waitpoint_key"] == "z"


async def test_every_reason_of_the_reference_is_kept(rig: Rig) -> None:
    for reason, blocking in (
        ("waiting_for_signal", "waiting_for_signal"),
        ("waiting_for_approval", "waiting_for_approval"),
        ("waiting_for_callback", "waiting_for_callback"),
        ("waiting_for_tool_result", "waiting_for_tool_result"),
        ("waiting_for_operator_review", "paused_by_operator"),
        ("paused_by_policy", "paused_by_policy"),
        ("paused_by_budget", "waiting_for_budget"),
        ("step_boundary", "waiting_for_signal"),
        ("manual_pause", "paused_by_operator"),
    ):
        claim = await rig.running()
        outcome = await rig.engine.suspend(claim.handle, Suspend([Fresh("a")], Single("a"), reason=reason))
        assert (await rig.core(claim.execution_id))["blocking_reason"] == blocking
        (listed,) = (await rig.engine.list_suspended(limit=1)).items
        assert (listed.suspension_id, listed.reason) == (outcome.suspension_id, reason)


async def test_every_timeout_behaviour_is_kept(rig: Rig, clock: Clock) -> None:
    timeout = await clock.now_ms() + 1
    for on_timeout in (*OnTimeout, *map(str, OnTimeout)):
        claim = await rig.running()
        outcome = await rig.engine.suspend(
            claim.handle, Suspend([], TimeoutOnly(), timeout_at_ms=timeout, on_timeout=on_timeout)
        )
        row = await rig.sql.fetchrow(
            "select timeout_behavior, timeout_at_ms from ff_suspension_current where suspension_id = $1::text::uuid",
            outcome.suspension_id,
        )
        assert row is not None
        assert tuple(row.values()) == (str(on_timeout), timeout)


async def test_a_suspension_for_an_operator_needs_no_waitpoint(rig: Rig) -> None:
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, Suspend([], OperatorOnly()), idempotency_key="k")
    assert (type(outcome), outcome.waitpoints) == (Suspended, [])
    assert await rig.engine.suspend(claim.handle, Suspend([], OperatorOnly()), idempotency_key="k") == outcome


async def test_an_execution_can_be_suspended_again_and_again(rig: Rig) -> None:
    """I1: the epoch grows by two each time, the attempt stays."""
    claim = await rig.running()
    for turn in range(3):
        outcome = await rig.engine.suspend(claim.handle, ONE)
        await send(rig, claim, outcome.waitpoints[0])
        claim = await rig.claim(**OTHER)
        assert (claim.attempt_index, claim.lease_epoch, claim.handle.kind) == (0, 3 + 2 * turn, HandleKind.RESUMED)
    await rig.engine.complete(claim.handle)
    assert await rig.completions(claim.execution_id) == ["resumable"] * 3 + ["success"]
    assert await rig.sql.fetchval("select count(*) from ff_suspension_current") == 1


async def test_the_latest_suspension_replaces_all_of_the_one_before(rig: Rig, clock: Clock) -> None:
    claim = await rig.running()
    first = await rig.engine.suspend(
        claim.handle, Suspend([Fresh("a")], Single("a"), timeout_at_ms=await clock.now_ms() + 9, resume_delay_ms=0)
    )
    await send(rig, claim, first.waitpoints[0])
    second = await rig.engine.suspend((await rig.claim()).handle, Suspend([], OperatorOnly(), reason="manual_pause"))
    row = await rig.sql.fetchrow("select * from ff_suspension_current")
    assert row is not None
    assert str(row["suspension_id"]) == second.suspension_id
    assert (row["timeout_at_ms"], row["closed_at_ms"], row["close_reason"], row["member_map"], row["reason_code"]) == (
        None,
        None,
        None,
        "{}",
        "manual_pause",
    )


# Fence


@calls
async def test_a_stale_fence_is_refused(rig: Rig, call: Call) -> None:
    """C-125."""
    claim = await rig.running()
    for handle in (stale(claim, epoch=1), stale(claim, epoch=-1)):
        error = await rig.refused(call(rig.engine, handle, ONE, None))
        assert isinstance(error, Contention)
        assert error.kind == ContentionKind.LEASE_CONFLICT
        assert not error.is_retryable
    await rig.engine.renew(claim.handle)


async def test_the_handle_also_fences_the_attempt_and_the_triple_does_not(rig: Rig) -> None:
    claim = await rig.running()
    error = await rig.refused(rig.engine.suspend(stale(claim, attempt=1), ONE))
    assert error.code == "contention.lease_conflict"
    fence = LeaseFence("not compared", claim.lease_epoch, "not compared")
    assert isinstance(await rig.engine.suspend_by_triple(claim.execution_id, fence, ONE), Suspended)


@calls
async def test_a_fence_mismatch_is_final_and_not_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    """Hold: one transaction, two statements, one rollback; the reference tries three times and hides the reason."""
    claim = await rig.running()
    bodies = 0
    transact = rig.engine._runtime.db.transact

    async def spy(op: str, body: Callable[[Any], Awaitable[Any]], *rest: Any) -> Any:
        async def counted(connection: Any) -> Any:
            nonlocal bodies
            bodies += 1
            return await body(connection)

        return await transact(op, counted, *rest)

    monkeypatch.setattr(rig.engine._runtime.db, "transact", spy)
    error = await rig.refused(call(rig.engine, stale(claim, epoch=1), ONE, None))
    assert (error.code, bodies) == ("contention.lease_conflict", 1)


@calls
async def test_an_expired_lease_cannot_suspend(rig: Rig, clock: Clock, call: Call) -> None:
    claim = await rig.running()
    await clock.advance(30_000)
    error = await rig.refused(call(rig.engine, claim.handle, ONE, None))
    assert isinstance(error, State)
    assert error.kind == StateKind.LEASE_EXPIRED


@calls
async def test_what_is_not_running_cannot_be_suspended(rig: Rig, call: Call) -> None:
    claim = await rig.running()
    await rig.engine.complete(claim.handle)
    error = await rig.refused(call(rig.engine, claim.handle, ONE, None))
    assert error.code == "contention.execution_not_active"


@calls
async def test_what_is_not_there_is_not_found(rig: Rig, call: Call) -> None:
    claim = await rig.running()
    gone = Handle.of_lease(HandleKind.FRESH, read_lease(claim.handle)._replace(execution_id=uuid4()))
    error = await rig.refused(call(rig.engine, gone, ONE, None))
    assert isinstance(error, NotFound)
    assert error.entity == "execution"


@calls
async def test_a_second_suspend_without_a_key_meets_the_raised_epoch(rig: Rig, call: Call) -> None:
    """V-022 differs: by the contract's order of fence answers it is `LEASE_CONFLICT`, not `ALREADY_SUSPENDED`."""
    claim = await rig.running()
    await call(rig.engine, claim.handle, ONE, None)
    error = await rig.refused(call(rig.engine, claim.handle, ONE, None))
    assert error.code == "contention.lease_conflict"


async def test_the_suspended_handle_cannot_suspend_and_cannot_write(rig: Rig) -> None:
    """V-023."""
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, ONE)
    error = await rig.refused(rig.engine.suspend(outcome.handle, ONE))
    assert isinstance(error, State)
    assert error.kind == StateKind.ALREADY_SUSPENDED
    calls: list[Awaitable[Any]] = [
        rig.engine.renew(outcome.handle),
        rig.engine.complete(outcome.handle),
        rig.engine.create_waitpoint(outcome.handle, "x", expires_in_ms=5),
    ]
    for call in calls:
        assert (await rig.refused(call)).code == "contention.execution_not_active"
    assert Handle.decode(outcome.handle.encode()) == outcome.handle


# Repeats


@calls
async def test_a_repeat_with_the_same_key_returns_the_first_outcome(rig: Rig, clock: Clock, call: Call) -> None:
    """C-121: token included, whatever the repeat asks for, and also when the execution has gone on."""
    claim = await rig.running()
    first = await call(rig.engine, claim.handle, ONE, "replay-key-1")
    before = await rig.fingerprint()
    other = Suspend([Fresh("b"), Fresh("c")], Single("c"), timeout_at_ms=1)
    assert await call(rig.engine, claim.handle, ONE, "replay-key-1") == first
    assert await call(rig.engine, claim.handle, other, "replay-key-1") == first
    assert await rig.fingerprint() == before
    await send(rig, claim, first.waitpoints[0])
    await rig.engine.complete((await rig.claim()).handle)
    assert await call(rig.engine, claim.handle, ONE, "replay-key-1") == first
    assert (await rig.refused(call(rig.engine, claim.handle, ONE, "another"))).code == "contention.lease_conflict"


async def test_a_key_belongs_to_its_execution(rig: Rig) -> None:
    """Two executions of one partition with the same key: two outcomes, each with its own token."""
    outcomes = []
    for lane in ("one", "two"):
        await rig.create(execution_id=f"{{fp:7}}:{new_uuid()}", lane=lane)
        claim = await rig.claim(lane)
        outcomes.append(await rig.engine.suspend(claim.handle, ONE, idempotency_key="same"))
        assert await rig.engine.suspend(claim.handle, ONE, idempotency_key="same") == outcomes[-1]
        await send(rig, claim, outcomes[-1].waitpoints[0])
    one, two = outcomes
    assert one.suspension_id != two.suspension_id
    assert one.waitpoints[0].token != two.waitpoints[0].token
    rows = await rig.sql.fetch("select idempotency_key, execution_id from ff_suspend_dedup")
    assert {row["idempotency_key"] for row in rows} == {f"{row['execution_id']}:same" for row in rows}


async def test_a_key_cannot_be_made_to_name_another_execution(rig: Rig) -> None:
    """The execution's id stands in front of whatever the caller gives."""
    ids = [f"{{fp:7}}:{new_uuid()}" for _ in range(2)]
    for at, execution_id in enumerate(ids):
        await rig.create(execution_id=execution_id, lane=f"lane {at}")
    victim, thief = await rig.claim("lane 0"), await rig.claim("lane 1")
    owned = await rig.engine.suspend(victim.handle, ONE, idempotency_key="k")
    bare = parse_execution_id(victim.execution_id).execution_id
    for key in ("k", f"{bare}:k", f":{bare}:k"):
        claim = thief if (await rig.state(thief.execution_id))[0] == "running" else await rig.claim("lane 1")
        outcome = await rig.engine.suspend(claim.handle, ONE, idempotency_key=key)
        assert outcome.waitpoints[0].token != owned.waitpoints[0].token
        await send(rig, thief, outcome.waitpoints[0])


async def test_the_stored_outcome_is_the_references(rig: Rig) -> None:
    """Reference §2.11; `kind` beside it says which handle it was."""
    claim = await rig.running()
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([Fresh("a"), Fresh("b")], Single("a")), idempotency_key="k"
    )
    a, b = outcome.waitpoints
    stored = await rig.sql.fetchval("select outcome_json from ff_suspend_dedup")
    assert msgspec.json.decode(stored) == {
        "variant": "Suspended",
        "details": {
            "suspension_id": outcome.suspension_id,
            "waitpoint_id": a.waitpoint_id,
            "waitpoint_key": "a",
            "token": a.token,
            "extras": [{"waitpoint_id": b.waitpoint_id, "waitpoint_key": "b", "token": b.token}],
        },
        "handle_opaque_hex": outcome.handle.opaque.hex(),
        "kind": "suspended",
    }


# Already satisfied


@calls
async def test_a_condition_that_holds_already_keeps_the_lease(rig: Rig, clock: Clock, call: Call) -> None:
    """V-017: nothing is let go; the suspension is written closed, without a timer, and its waitpoint is gone."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    await send(rig, claim, pending)
    attempt = await rig.attempt(claim.execution_id)
    core = await rig.core(claim.execution_id)
    request = Suspend(
        [UsePending(pending.waitpoint_id), Fresh("b")],
        Single("a", ByName("go")),
        timeout_at_ms=await clock.now_ms() + 1000,
    )
    outcome = await call(rig.engine, claim.handle, request, "k")
    assert isinstance(outcome, SuspensionAlreadySatisfied)
    assert read_lease(outcome.handle).fence == read_lease(claim.handle).fence
    assert outcome.handle.kind == HandleKind.FRESH
    assert (await rig.attempt(claim.execution_id), await rig.core(claim.execution_id)) == (attempt, core)
    assert await rig.completions(claim.execution_id) == []
    row = await rig.sql.fetchrow("select closed_at_ms, close_reason, timeout_at_ms from ff_suspension_current")
    assert row is not None
    assert tuple(row.values()) == (await clock.now_ms(), "already_satisfied", None)
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    assert await call(rig.engine, claim.handle, request, "k") == outcome
    await rig.engine.complete(outcome.handle, b"r")
    assert await rig.completions(claim.execution_id) == ["success"]


async def test_a_resumed_worker_gets_its_own_handle_back(rig: Rig) -> None:
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, ONE)
    await send(rig, claim, outcome.waitpoints[0])
    resumed = await rig.claim()
    pending = await rig.engine.create_waitpoint(resumed.handle, "a", expires_in_ms=60_000)
    await send(rig, claim, pending)
    satisfied = await rig.engine.suspend(resumed.handle, Suspend([UsePending(pending.waitpoint_id)], Single("a")))
    assert satisfied.handle == resumed.handle
    await rig.engine.renew(satisfied.handle)


# Pending waitpoints


async def test_a_pending_waitpoint_keeps_its_token_and_becomes_active(rig: Rig, clock: Clock) -> None:
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    await rig.engine.rotate_waitpoint_hmac_secret_all("k2", "22" * 32, 10**9)
    outcome = await rig.engine.suspend(claim.handle, Suspend([UsePending(pending.waitpoint_id)], Single("a")))
    (point,) = outcome.waitpoints
    assert (point.waitpoint_id, point.key, point.token) == (pending.waitpoint_id, "a", pending.token)
    row = await rig.sql.fetchrow("select state, expires_at_ms, activated_at_ms, token from ff_waitpoint_pending")
    assert row is not None
    assert tuple(row.values()) == ("active", None, await clock.now_ms(), pending.token)


async def test_a_waitpoint_that_cannot_be_used_is_named_and_changes_nothing(rig: Rig, clock: Clock) -> None:
    other = await rig.running()
    foreign = await rig.engine.create_waitpoint(other.handle, "a", expires_in_ms=60_000)
    await rig.create(execution_id=f"{{fp:{parse_execution_id(other.execution_id).partition_key}}}:{new_uuid()}")
    claim = await rig.claim()
    expired = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=10)
    await clock.advance(10)
    good = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    twin = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    unusable: list[tuple[list[Fresh | UsePending], str]] = [
        ([UsePending(str(uuid4()))], "contention.waitpoint_not_found"),
        ([UsePending(foreign.waitpoint_id)], "validation.invalid_waitpoint_for_execution"),
        ([UsePending(expired.waitpoint_id)], "state.pending_waitpoint_expired"),
        ([UsePending(good.waitpoint_id), UsePending(twin.waitpoint_id)], "validation.invalid_waitpoint_key"),
        ([UsePending(good.waitpoint_id), Fresh("a")], "validation.invalid_waitpoint_key"),
        ([Fresh("a", good.waitpoint_id)], "conflict.waitpoint_already_exists"),
        ([Fresh("a", foreign.waitpoint_id)], "conflict.waitpoint_already_exists"),
    ]
    for points, code in unusable:
        error = await rig.refused(rig.engine.suspend(claim.handle, Suspend(points, Single("a"))))
        assert error.code == code, points
    unknown = await rig.refused(rig.engine.suspend(claim.handle, Suspend([UsePending(good.waitpoint_id)], Single("z"))))
    assert (unknown.code, getattr(unknown, "field", "")) == ("validation.invalid_input", "condition.key")
    await rig.engine.suspend(claim.handle, Suspend([UsePending(good.waitpoint_id)], Single("a")))
    await send(rig, claim, good)
    again = await rig.claim()
    gone = await rig.refused(rig.engine.suspend(again.handle, Suspend([UsePending(good.waitpoint_id)], Single("a"))))
    assert (gone.code, gone.is_retryable) == ("contention.waitpoint_not_found", True)


async def test_an_active_waitpoint_is_not_pending(rig: Rig) -> None:
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    await rig.sql.execute("update ff_waitpoint_pending set state = 'active'")
    error = await rig.refused(
        rig.engine.suspend(claim.handle, Suspend([UsePending(pending.waitpoint_id)], Single("a")))
    )
    assert error.code == "state.waitpoint_not_pending"
