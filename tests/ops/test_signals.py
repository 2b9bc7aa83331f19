"""Signals: proof before state (I8), none lost (I5), and one answer for each way to be too late."""

from __future__ import annotations

import asyncio
import logging
import pprint
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
import structlog
from prometheus_client import REGISTRY

from ffd import (
    Accepted,
    AllOf,
    ByName,
    Claim,
    Count,
    CountKind,
    Duplicate,
    Engine,
    EngineError,
    ExecutionPolicy,
    Fresh,
    HandleKind,
    LeaseFence,
    NewExecution,
    NotFound,
    OperatorOnly,
    PublicState,
    ResumeSignal,
    Signal,
    SignalEffect,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    TimeoutOnly,
    UsePending,
    Validation,
    ValidationKind,
    Wildcard,
    all_of_waitpoints,
)
from ffd.core import tokens
from ffd.core.conditions import Condition
from ffd.core.ids import new_uuid, parse_execution_id
from ffd.core.tokens import mint_token
from tests.support import OTHER, WORKER, Clock, Rig, stale, until

pytestmark = pytest.mark.anyio

SECRET = "9c" * 32
SIGNALS, SOURCES = CountKind.DISTINCT_SIGNALS, CountKind.DISTINCT_SOURCES
APPENDED = SignalEffect.APPENDED_TO_WAITPOINT
SATISFIED = SignalEffect.RESUME_CONDITION_SATISFIED
BUFFERED = SignalEffect.BUFFERED_FOR_PENDING_WAITPOINT
MANY = Count(1000, SIGNALS, ("a",))


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


async def everything(rig: Rig) -> str:
    """A digest of every table but the lane registry, which is filled in the background."""
    tables = await rig.sql.fetch(
        "select tablename from pg_tables where schemaname = 'public' and tablename <> 'ff_lane_registry' order by 1"
    )
    assert len(tables) > 15
    parts = [
        await rig.sql.fetchval(f"select md5(string_agg(t::text, '|' order by t::text)) from {row['tablename']} t")
        for row in tables
    ]
    return "/".join(part or "" for part in parts)


def rejections() -> float:
    return REGISTRY.get_sample_value("ffd_token_rejections_total") or 0.0


async def waiting(
    rig: Rig, condition: Condition = MANY, *keys: str, policy: ExecutionPolicy | None = None, **suspend: Any
) -> tuple[Claim, Suspended]:
    claim = await rig.running(policy=policy)
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([Fresh(key) for key in keys or ("a",)], condition, **suspend)
    )
    assert isinstance(outcome, Suspended)
    return claim, outcome


def signal(claim: Claim, point: Any, name: str = "go", source: str = "s", **more: Any) -> Signal:
    return Signal(
        claim.execution_id, point.waitpoint_id, name, point.token, source_type="test", source_identity=source, **more
    )


async def send(rig: Rig, one: Signal, **kwargs: Any) -> SignalEffect:
    answer = await rig.engine.deliver_signal(one, **kwargs)
    assert isinstance(answer, Accepted)
    return answer.effect


async def refused(call: Any) -> EngineError:
    with pytest.raises(EngineError) as info:
        await call
    return info.value


async def unchanged(rig: Rig, call: Any) -> EngineError:
    before = await everything(rig)
    error = await refused(call)
    assert await everything(rig) == before, "a refused signal changed something"
    return error


async def member_map(rig: Rig, claim: Claim) -> dict[str, list[dict[str, Any]]]:
    text = await rig.sql.fetchval(
        "select member_map from ff_suspension_current where partition_key = $1 and execution_id = $2",
        *parse_execution_id(claim.execution_id),
    )
    found: dict[str, list[dict[str, Any]]] = msgspec.json.decode(text)
    return found


# What a signal does


async def test_a_matching_signal_resumes_and_another_is_only_stored(rig: Rig, clock: Clock) -> None:
    """C-118, V-001; the event of the effect and the completion event `resumable` commit with it (I3)."""
    claim, outcome = await waiting(rig, Single("wpk:single", ByName("ready")), "wpk:single")
    (point,) = outcome.waitpoints
    assert await send(rig, signal(claim, point, "other")) == APPENDED
    assert (await rig.state(claim.execution_id))[0] == "suspended"
    assert await rig.completions(claim.execution_id) == []
    await clock.advance(7)
    assert await send(rig, signal(claim, point, "ready", "w1")) == SATISFIED
    assert await rig.state(claim.execution_id) == (
        "resumable",
        "runnable",
        "unowned",
        "eligible_now",
        "attempt_interrupted",
    )
    assert await rig.completions(claim.execution_id) == ["resumable"]
    rows = await rig.sql.fetch(
        "select execution_id, waitpoint_id, signal_name, source_identity, effect, delivered_at_ms, namespace, xmin"
        " from ff_signal_event order by event_id"
    )
    now = await clock.now_ms()
    bare = str(parse_execution_id(claim.execution_id).execution_id)
    assert [tuple(row.values())[:-1] for row in rows] == [
        (bare, point.waitpoint_id, "other", "s", "appended_to_waitpoint", now - 7, "default"),
        (bare, point.waitpoint_id, "ready", "w1", "resume_condition_satisfied", now, "default"),
    ]
    completed = await rig.sql.fetchrow("select xmin, occurred_at_ms from ff_completion_event")
    assert completed is not None
    assert (completed["xmin"], completed["occurred_at_ms"]) == (rows[1]["xmin"], now), "one transaction wrote both"
    closed = await rig.sql.fetchrow("select closed_at_ms, close_reason, timeout_at_ms from ff_suspension_current")
    assert closed is not None
    assert tuple(closed.values()) == (now, "resumed", None)
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0


async def test_two_signals_of_one_source_are_one_for_a_count_of_sources(rig: Rig) -> None:
    """C-119."""
    claim, outcome = await waiting(rig, Count(2, SOURCES, ("a",)))
    (point,) = outcome.waitpoints
    assert [await send(rig, signal(claim, point, "x", source)) for source in ("src1", "src1", "src2")] == [
        APPENDED,
        APPENDED,
        SATISFIED,
    ]


async def test_all_of_two_waitpoints_needs_both(rig: Rig) -> None:
    """C-120, V-034: and both are there for the worker."""
    claim, outcome = await waiting(rig, all_of_waitpoints(["wpk:a", "wpk:b"]), "wpk:a", "wpk:b")
    a, b = outcome.waitpoints
    assert await send(rig, signal(claim, a)) == APPENDED
    assert await send(rig, signal(claim, a, "again")) == APPENDED
    assert await send(rig, signal(claim, b)) == SATISFIED
    assert len(await rig.engine.observe_signals(outcome.handle)) == 3


async def test_all_of_two_names_at_one_waitpoint(rig: Rig) -> None:
    """V-027, V-028: the same signal twice counts once."""
    claim, outcome = await waiting(rig, AllOf((Single("a", ByName("build")), Single("a", ByName("test")))))
    build = signal(claim, outcome.waitpoints[0], "build", signal_id=str(uuid4()))
    assert await send(rig, build) == APPENDED
    assert await rig.engine.deliver_signal(build) == Duplicate(str(build.signal_id))
    assert await send(rig, signal(claim, outcome.waitpoints[0], "test")) == SATISFIED


async def test_a_count_of_waitpoints(rig: Rig) -> None:
    """V-029."""
    claim, outcome = await waiting(rig, Count(2, CountKind.DISTINCT_WAITPOINTS, ("a", "b", "c")), "a", "b", "c")
    a, _, c = outcome.waitpoints
    assert [await send(rig, signal(claim, point)) for point in (a, a, c)] == [APPENDED, APPENDED, SATISFIED]


async def test_a_count_of_signals_with_a_matcher(rig: Rig) -> None:
    """V-030, V-031."""
    claim, outcome = await waiting(rig, Count(2, SIGNALS, ("a",), ByName("yes")))
    (point,) = outcome.waitpoints
    yes = signal(claim, point, "yes", signal_id=str(uuid4()))
    assert await send(rig, yes) == APPENDED
    assert isinstance(await rig.engine.deliver_signal(yes), Duplicate)
    assert await send(rig, signal(claim, point, "no")) == APPENDED
    assert await send(rig, signal(claim, point, "yes")) == SATISFIED


async def test_nested_conditions_are_met_through_the_database(rig: Rig) -> None:
    """V-032: depth 4."""
    leaf = AllOf((Single("b", ByName("x")), Count(2, SOURCES, ("a", "b"))))
    claim, outcome = await waiting(rig, AllOf((AllOf((leaf,)), Single("a", Wildcard()))), "a", "b")
    a, b = outcome.waitpoints
    effects = [await send(rig, one) for one in (signal(claim, b, "x"), signal(claim, a), signal(claim, a, source="t"))]
    assert effects == [APPENDED, APPENDED, SATISFIED]


@pytest.mark.parametrize("condition", [OperatorOnly(), TimeoutOnly()], ids=["operator", "timeout"])
async def test_no_signal_meets_a_condition_without_signals(rig: Rig, clock: Clock, condition: Condition) -> None:
    timeout = await clock.now_ms() + 1000
    claim, outcome = await waiting(rig, condition, timeout_at_ms=timeout)
    assert await send(rig, signal(claim, outcome.waitpoints[0])) == APPENDED
    assert (await rig.state(claim.execution_id))[0] == "suspended"


async def test_a_stored_signal_has_the_shape_of_the_reference_and_a_sequence_number(rig: Rig, clock: Clock) -> None:
    """Reference §2.11; design §3.13."""
    claim, outcome = await waiting(rig)
    first = signal(claim, outcome.waitpoints[0], "n", "me", payload=b"\x00\xff", correlation_id="c", category="webhook")
    await send(rig, first)
    await send(rig, signal(claim, outcome.waitpoints[0]))
    one, two = (await member_map(rig, claim))["a"]
    assert one == {
        "signal_id": one["signal_id"],
        "signal_name": "n",
        "signal_category": "webhook",
        "source_type": "test",
        "source_identity": "me",
        "correlation_id": "c",
        "accepted_at": await clock.now_ms(),
        "payload_hex": "00ff",
        "seq": 0,
    }
    assert (two["correlation_id"], two["payload_hex"], two["seq"]) == ("", None, 1)


# What the worker sees


async def test_the_worker_sees_every_signal_in_the_order_of_arrival(rig: Rig, clock: Clock) -> None:
    """C-123, V-034, V-038: also within one millisecond, over several waitpoints (the reference sorts by key)."""
    claim, outcome = await waiting(rig, Single("z", ByName("ready")), "z", "b", "a")
    z, b, a = outcome.waitpoints
    sent = [(a, "1", b"p"), (z, "2", None), (b, "3", b""), (a, "4", None), (b, "5", None), (z, "ready", b"\x00")]
    for point, name, payload in sent:
        await send(rig, signal(claim, point, name, payload=payload, correlation_id=name))
    now = await clock.now_ms()
    resumed = await rig.engine.claim_resumed_execution(claim.execution_id, **OTHER)
    for handle in (outcome.handle, resumed.handle, claim.handle):
        found = await rig.engine.observe_signals(handle)
        assert [(one.signal_name, one.payload) for one in found] == [(name, payload) for _, name, payload in sent]
        first = found[0]
        assert first == ResumeSignal(first.signal_id, "1", "external", "test", "s", "1", now, b"p")


async def test_signals_buffered_and_appended_keep_one_order(rig: Rig, clock: Clock) -> None:
    claim = await rig.running()
    z = await rig.engine.create_waitpoint(claim.handle, "z", expires_in_ms=1000)
    a = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=1000)
    for at, point in enumerate((z, a, z)):
        assert await send(rig, signal(claim, point, str(at))) == BUFFERED
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([UsePending(a.waitpoint_id), UsePending(z.waitpoint_id)], Count(5, SIGNALS, ("a", "z")))
    )
    assert isinstance(outcome, Suspended)
    assert [await send(rig, signal(claim, point, str(at))) for at, point in ((3, a), (4, z))] == [APPENDED, SATISFIED]
    assert [one.signal_name for one in await rig.engine.observe_signals(outcome.handle)] == ["0", "1", "2", "3", "4"]


async def test_a_worker_that_was_never_suspended_sees_no_signals(rig: Rig) -> None:
    """V-039."""
    assert await rig.engine.observe_signals((await rig.running()).handle) == []


async def test_only_the_latest_suspension_is_seen(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0], "first"))
    again = await rig.claim()
    second = await rig.engine.suspend(again.handle, Suspend([Fresh("a")], Single("a")))
    assert await rig.engine.observe_signals(second.handle) == []
    await send(rig, signal(claim, second.waitpoints[0], "second"))
    assert [one.signal_name for one in await rig.engine.observe_signals(again.handle)] == ["second"]


async def test_observing_needs_a_handle_and_no_lease(rig: Rig) -> None:
    claim, _ = await waiting(rig)
    assert await rig.engine.observe_signals(stale(claim, epoch=9)) == []
    with pytest.raises(Validation):
        await rig.engine.observe_signals("handle")  # type: ignore[arg-type]


async def test_blobs_of_another_writer_are_read_as_far_as_they_can_be_understood(rig: Rig) -> None:
    """FlowFabric stores no sequence number, and markers that are no signals."""
    claim, outcome = await waiting(rig, Count(3, SIGNALS, ("a",)))
    await rig.sql.execute(
        "update ff_suspension_current set member_map = $1::text::jsonb",
        '{"a": [{"signal_id": "s-1", "signal_name": "old", "accepted_at": 5, "payload_hex": "zz"}, 7, {"x": 1}],'
        ' "b": {"never_committed": true}}',
    )
    assert await send(rig, signal(claim, outcome.waitpoints[0], "new")) in (APPENDED, SATISFIED)
    found = await rig.engine.observe_signals(outcome.handle)
    assert [(one.signal_id, one.signal_name, one.payload) for one in found if one.signal_name == "old"] == [
        ("s-1", "old", None)
    ]
    assert found[-1].signal_name == "new"


# Resuming


async def test_a_resumed_execution_is_claimed_under_a_larger_epoch_and_not_before(rig: Rig) -> None:
    """C-122, V-040, V-041: the same attempt goes on; a fresh or suspended execution is not a resumed one."""
    fresh = await rig.create(lane="fresh")
    assert (
        await refused(rig.engine.claim_resumed_execution(fresh, **OTHER))
    ).code == "contention.not_a_resumed_execution"
    claim, outcome = await waiting(rig, Single("wpk:claim"), "wpk:claim")
    early = await unchanged(rig, rig.engine.claim_resumed_execution(claim.execution_id, **OTHER))
    assert early.code == "contention.not_a_resumed_execution"
    assert await rig.engine.claim("default", **OTHER) is None
    await send(rig, signal(claim, outcome.waitpoints[0]))
    resumed = await rig.engine.claim_resumed_execution(claim.execution_id, **OTHER)
    assert resumed.handle.kind == HandleKind.RESUMED
    assert (resumed.execution_id, resumed.attempt_index, resumed.attempt_id) == (
        claim.execution_id,
        claim.attempt_index,
        claim.attempt_id,
    )
    assert resumed.lease_epoch == claim.lease_epoch + 2
    again = await refused(rig.engine.claim_resumed_execution(claim.execution_id, **OTHER))
    assert again.code == "contention.not_a_resumed_execution"
    assert (await refused(rig.engine.complete(claim.handle))).code == "contention.lease_conflict"
    await rig.engine.complete(resumed.handle, b"done")
    assert await rig.completions(claim.execution_id) == ["resumable", "success"]
    missing = await refused(rig.engine.claim_resumed_execution(f"{{fp:1}}:{uuid4()}", **OTHER))
    assert isinstance(missing, NotFound)


async def test_plain_claim_serves_resumed_work(rig: Rig) -> None:
    """C-272."""
    claim, outcome = await waiting(rig, Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    resumed = await rig.claim(**OTHER)
    assert (resumed.execution_id, resumed.handle.kind) == (claim.execution_id, HandleKind.RESUMED)
    assert await rig.lease_events(claim.execution_id) == [
        ("acquired", None),
        ("revoked", "suspended"),
        ("acquired", None),
    ]


async def test_a_waiting_claim_is_woken_by_the_signal_that_resumes(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Single("a"))
    call = asyncio.create_task(rig.engine.claim("default", **OTHER, wait_ms=60_000))
    await asyncio.sleep(0)
    await send(rig, signal(claim, outcome.waitpoints[0]))
    resumed = await asyncio.wait_for(call, 30)
    assert resumed is not None
    assert resumed.execution_id == claim.execution_id


async def test_a_resume_delay_makes_it_delayed_first_and_writes_the_event_once(rig: Rig, clock: Clock) -> None:
    """Design §4: blocking reason `waiting_for_resume_delay`, the event when the condition is met."""
    claim, outcome = await waiting(rig, Single("a"), resume_delay_ms=5000)
    assert await send(rig, signal(claim, outcome.waitpoints[0])) == SATISFIED
    assert await rig.state(claim.execution_id) == (
        "delayed",
        "runnable",
        "unowned",
        "not_eligible_until_time",
        "attempt_interrupted",
    )
    row = await rig.core(claim.execution_id)
    assert (row["blocking_reason"], row["delay_until_ms"]) == (
        "waiting_for_resume_delay",
        await clock.now_ms() + 5000,
    )
    assert await rig.completions(claim.execution_id) == ["resumable"]
    assert await rig.engine.claim("default", **OTHER) is None
    late = await refused(rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
    assert late.code == "state.waitpoint_closed"
    assert await rig.completions(claim.execution_id) == ["resumable"]


# Buffering


async def test_a_signal_before_the_suspension_is_buffered_and_meets_it(rig: Rig) -> None:
    """V-017: the worker keeps its lease."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    assert await send(rig, signal(claim, pending, "ready")) == BUFFERED
    assert (await rig.state(claim.execution_id))[0] == "running"
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([UsePending(pending.waitpoint_id)], Single("a", ByName("ready")))
    )
    assert isinstance(outcome, SuspensionAlreadySatisfied)
    assert outcome.handle == claim.handle
    assert [one.signal_name for one in await rig.engine.observe_signals(outcome.handle)] == ["ready"]
    await rig.engine.renew(outcome.handle)
    late = await refused(rig.engine.deliver_signal(signal(claim, pending)))
    assert late.code == "state.waitpoint_closed"


async def test_a_buffered_signal_counts_after_the_suspension(rig: Rig) -> None:
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    await send(rig, signal(claim, pending, source="1"))
    outcome = await rig.engine.suspend(
        claim.handle, Suspend([UsePending(pending.waitpoint_id)], Count(2, SOURCES, ("a",)))
    )
    assert isinstance(outcome, Suspended)
    assert outcome.waitpoints[0].token == pending.token
    assert await send(rig, signal(claim, pending, source="1")) == APPENDED
    assert await send(rig, signal(claim, pending, source="2")) == SATISFIED


async def test_buffering_to_an_expired_waitpoint_is_refused(rig: Rig, clock: Clock) -> None:
    """V-009."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=1000)
    await clock.advance(999)
    assert await send(rig, signal(claim, pending)) == BUFFERED
    await clock.advance(1)
    late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, pending)))
    assert late.code == "state.waitpoint_closed"


# Repeats


async def test_a_repeated_key_is_a_duplicate_for_24_hours(rig: Rig, clock: Clock) -> None:
    """V-016."""
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    first = await rig.engine.deliver_signal(one, idempotency_key="hook-1")
    assert isinstance(first, Accepted)
    before = await everything(rig)
    await clock.advance(86_399_999)
    await rig.sql.execute("update ff_test_clock set now_ms = now_ms - 86399999")
    assert await rig.engine.deliver_signal(one, idempotency_key="hook-1") == Duplicate(first.signal_id)
    assert await everything(rig) == before
    await clock.advance(86_399_999)
    assert await rig.engine.deliver_signal(one, idempotency_key="hook-1") == Duplicate(first.signal_id)
    await clock.advance(1)
    again = await rig.engine.deliver_signal(one, idempotency_key="hook-1")
    assert isinstance(again, Accepted)
    assert again.signal_id != first.signal_id
    assert await rig.engine.deliver_signal(one, idempotency_key="hook-1") == Duplicate(again.signal_id)
    assert (await rig.core(claim.execution_id))["signal_count"] == 2


async def test_the_time_of_a_key_can_be_chosen(rig: Rig, clock: Clock) -> None:
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    await rig.engine.deliver_signal(one, idempotency_key="k", idempotency_ttl_ms=10)
    await clock.advance(10)
    assert isinstance(await rig.engine.deliver_signal(one, idempotency_key="k"), Accepted)


async def test_keys_are_scoped_to_their_waitpoint(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Count(9, SIGNALS, ("a", "b")), "a", "b")
    for point in outcome.waitpoints:
        assert await send(rig, signal(claim, point), idempotency_key="same") == APPENDED


async def test_a_key_used_at_another_executions_waitpoint_of_the_same_id_swallows_nothing(rig: Rig) -> None:
    """I5: callers may choose waitpoint ids; a signal must never be taken for another execution's."""
    ids = [f"{{fp:7}}:{new_uuid()}" for _ in range(2)]
    waitpoint_id = str(new_uuid())
    for at, execution_id in enumerate(ids):
        await rig.create(execution_id=execution_id, lane=f"lane {at}")
        claim = await rig.claim(f"lane {at}")
        outcome = await rig.engine.suspend(claim.handle, Suspend([Fresh("a", waitpoint_id)], Single("a")))
        effect = await send(rig, signal(claim, outcome.waitpoints[0]), idempotency_key="same")
        assert effect == SATISFIED
        repeat = await rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0]), idempotency_key="same")
        assert isinstance(repeat, Duplicate)


async def test_a_repeated_signal_id_is_a_duplicate_wherever_the_first_one_is(rig: Rig) -> None:
    """V-028, V-030: stored, buffered, moved by the suspension, or seen by the resumed worker."""
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    one = signal(claim, pending, signal_id=str(uuid4()))
    two = signal(claim, pending, signal_id=str(uuid4()))
    duplicate = Duplicate(str(one.signal_id))
    assert await send(rig, one) == BUFFERED
    assert await rig.engine.deliver_signal(one) == duplicate
    await rig.engine.suspend(claim.handle, Suspend([UsePending(pending.waitpoint_id)], Count(2, SIGNALS, ("a",))))
    assert await rig.engine.deliver_signal(one) == duplicate
    assert await send(rig, two) == SATISFIED
    for is_claimed in (False, True):
        if is_claimed:
            await rig.claim()
        assert await rig.engine.deliver_signal(one) == duplicate
        assert await rig.engine.deliver_signal(two) == Duplicate(str(two.signal_id))
    assert (await rig.core(claim.execution_id))["signal_count"] == 2


async def test_a_repeat_is_answered_even_after_the_end(rig: Rig) -> None:
    """Whoever lost the answer may ask again; the ids are accepted in either case of their letters."""
    claim, outcome = await waiting(rig, Single("a"))
    one = signal(claim, outcome.waitpoints[0], signal_id=str(uuid4()).upper())
    assert await rig.engine.deliver_signal(one, idempotency_key="k") == Accepted(str(one.signal_id).lower(), SATISFIED)
    await rig.engine.complete((await rig.claim()).handle)
    before = await everything(rig)
    assert await rig.engine.deliver_signal(one, idempotency_key="k") == Duplicate(str(one.signal_id).lower())
    assert await rig.engine.deliver_signal(one) == Duplicate(str(one.signal_id).lower())
    assert await everything(rig) == before


# Too late


async def test_a_late_signal_with_a_good_token_is_told_what_has_become_of_its_target(rig: Rig) -> None:
    """Contract §2.3: closed, ended, gone. The token proves itself: no waitpoint row is left by then."""
    claim, outcome = await waiting(rig, Single("a"), "a", "b")
    a, b = outcome.waitpoints
    await send(rig, signal(claim, a))
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    for point in (a, b):
        late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, point)))
        assert (type(late), late.code) == (State, "state.waitpoint_closed")
    resumed = await rig.claim()
    assert (await unchanged(rig, rig.engine.deliver_signal(signal(claim, b)))).kind == StateKind.WAITPOINT_CLOSED
    await rig.engine.complete(resumed.handle)
    for point in (a, b):
        late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, point)))
        assert (type(late), late.code) == (State, "state.target_not_signalable")
        assert not late.is_retryable
    await rig.sql.execute("delete from ff_exec_core")
    for point in (a, b):
        late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, point)))
        assert isinstance(late, NotFound)
        assert (late.entity, late.id) == ("execution", claim.execution_id)


async def test_every_ending_refuses_signals(rig: Rig) -> None:
    """V-035…V-037: the ways out that do not exist yet are made with SQL; a waitpoint left over changes nothing."""
    for state in ("failed", "expired", "skipped", "cancelled"):
        claim, outcome = await waiting(rig)
        phase, attempt = ("cancelled", "cancelled") if state == "cancelled" else ("terminal", "attempt_terminal")
        await rig.sql.execute(
            "update ff_exec_core set public_state = $1, lifecycle_phase = $2, attempt_state = $3,"
            " ownership_state = 'unowned', blocking_reason = null where public_state = 'suspended'",
            state,
            phase,
            attempt,
        )
        late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
        assert late.code == "state.target_not_signalable"


async def test_a_suspension_that_was_closed_takes_no_signal_even_if_its_waitpoint_is_left(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    await rig.sql.execute("update ff_suspension_current set closed_at_ms = 1")
    late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
    assert late.code == "state.waitpoint_closed"
    await rig.sql.execute("delete from ff_suspension_current")
    late = await unchanged(rig, rig.engine.deliver_signal(signal(claim, outcome.waitpoints[0])))
    assert late.code == "state.waitpoint_closed"


async def test_a_good_token_for_a_waitpoint_that_never_was_finds_it_closed(rig: Rig) -> None:
    """Nobody but the holder of the secret can make one."""
    claim, _ = await waiting(rig)
    point = str(uuid4())
    token = mint_token("k1", bytes.fromhex(SECRET), claim.execution_id, point)
    one = Signal(claim.execution_id, point, "x", token, source_type="t", source_identity="")
    assert (await unchanged(rig, rig.engine.deliver_signal(one))).code == "state.waitpoint_closed"


# Bounds


async def test_the_policy_bounds_the_signals_of_an_execution_over_its_whole_life(rig: Rig) -> None:
    claim, outcome = await waiting(rig, Count(2, SIGNALS, ("a",)), policy=ExecutionPolicy(max_signals=3))
    for _ in range(2):
        await send(rig, signal(claim, outcome.waitpoints[0]))
    again = await rig.claim()
    second = await rig.engine.suspend(again.handle, Suspend([Fresh("a")], MANY))
    one = signal(claim, second.waitpoints[0], signal_id=str(uuid4()))
    await send(rig, one)
    error = await unchanged(rig, rig.engine.deliver_signal(signal(claim, second.waitpoints[0])))
    assert error.code == "validation.signal_limit_exceeded"
    assert isinstance(await rig.engine.deliver_signal(one), Duplicate), "a repeat is no further signal"


async def test_the_limit_holds_for_buffered_signals_too(rig: Rig) -> None:
    claim = await rig.running(policy=ExecutionPolicy(max_signals=1))
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    await send(rig, signal(claim, pending))
    error = await unchanged(rig, rig.engine.deliver_signal(signal(claim, pending)))
    assert error.code == "validation.signal_limit_exceeded"


async def test_a_payload_of_64_kib_is_taken_and_one_byte_more_is_not(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    (point,) = outcome.waitpoints
    await send(rig, signal(claim, point, payload=b"x" * 65_536))
    error = await unchanged(rig, rig.engine.deliver_signal(signal(claim, point, payload=b"x" * 65_537)))
    assert (error.code, getattr(error, "field", "")) == ("validation.payload_too_large", "payload")
    (seen,) = await rig.engine.observe_signals(outcome.handle)
    assert seen.payload == b"x" * 65_536


async def test_one_suspension_stores_at_most_a_mebibyte_of_signals(rig: Rig) -> None:
    """Hex doubles the payload: seven of 64 KiB fit, the eighth does not, a small one still does."""
    claim, outcome = await waiting(rig)
    (point,) = outcome.waitpoints
    for _ in range(7):
        await send(rig, signal(claim, point, payload=b"x" * 65_536))
    error = await unchanged(rig, rig.engine.deliver_signal(signal(claim, point, payload=b"x" * 65_536)))
    assert error.code == "validation.signal_limit_exceeded"
    await send(rig, signal(claim, point))


async def test_buffers_that_one_suspension_could_use_are_bounded_together(rig: Rig) -> None:
    claim = await rig.running()
    points = [await rig.engine.create_waitpoint(claim.handle, key, expires_in_ms=60_000) for key in "abcdefgh"]
    for point in points[:7]:
        assert await send(rig, signal(claim, point, payload=b"x" * 65_536)) == BUFFERED
    error = await unchanged(rig, rig.engine.deliver_signal(signal(claim, points[7], payload=b"x" * 65_536)))
    assert error.code == "validation.signal_limit_exceeded"
    await rig.engine.suspend(
        claim.handle, Suspend([UsePending(point.waitpoint_id) for point in points], Count(99, SIGNALS, ("a",)))
    )
    assert await rig.sql.fetchval("select octet_length(member_map::text) from ff_suspension_current") <= 1024 * 1024


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "execution_id": ({"execution_id": "nope"}, "execution_id"),
    "partition": ({"execution_id": f"{{fp:256}}:{uuid4()}"}, "execution_id"),
    "waitpoint_id": ({"waitpoint_id": "nope"}, "waitpoint_id"),
    "no waitpoint_id": ({"waitpoint_id": None}, "waitpoint_id"),
    "empty name": ({"name": ""}, "name"),
    "long name": ({"name": "n" * 257}, "name"),
    "NUL in the name": ({"name": "a\0"}, "name"),
    "surrogate": ({"name": "\ud800"}, "name"),
    "no source type": ({"source_type": ""}, "source_type"),
    "source identity": ({"source_identity": None}, "source_identity"),
    "category": ({"category": ""}, "category"),
    "payload": ({"payload": "text"}, "payload"),
    "correlation_id": ({"correlation_id": 5}, "correlation_id"),
    "signal_id": ({"signal_id": "s-1"}, "signal_id"),
}


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"idempotency_key": ""}, "idempotency_key"),
    ({"idempotency_key": "k" * 257}, "idempotency_key"),
    ({"idempotency_key": "a\0"}, "idempotency_key"),
    ({"idempotency_key": 5}, "idempotency_key"),
    ({"idempotency_key": "k", "idempotency_ttl_ms": 0}, "idempotency_ttl_ms"),
    ({"idempotency_key": "k", "idempotency_ttl_ms": 2**62}, "idempotency_ttl_ms"),
    ({"idempotency_key": "k", "idempotency_ttl_ms": None}, "idempotency_ttl_ms"),
]


async def test_bad_input_is_named_and_changes_nothing(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    good = signal(claim, outcome.waitpoints[0])
    count = rejections()
    for name, (change, field) in BAD_FIELDS.items():
        error = await unchanged(rig, rig.engine.deliver_signal(msgspec.structs.replace(good, **change)))
        assert (error.code, getattr(error, "field", None)) == ("validation.invalid_input", field), name
    for options, field in BAD_OPTIONS:
        error = await unchanged(rig, rig.engine.deliver_signal(good, **options))
        assert (error.code, getattr(error, "field", None)) == ("validation.invalid_input", field), options
    assert rejections() == count
    assert await send(rig, good) == APPENDED


async def test_what_is_no_signal_is_refused(rig: Rig) -> None:
    for one in (None, "signal", {"name": "x"}):
        error = await refused(rig.engine.deliver_signal(one))  # type: ignore[arg-type]
        assert getattr(error, "field", None) == "signal"


# Proof before state


async def targets(rig: Rig, clock: Clock) -> dict[str, tuple[str, str]]:
    """An execution and a waitpoint in every state that a signal can meet, and those that do not exist."""
    found: dict[str, tuple[str, str]] = {}

    async def add(name: str, condition: Condition = MANY, **suspend: Any) -> tuple[Claim, Suspended]:
        claim, outcome = await waiting(rig, condition, **suspend)
        found[name] = (claim.execution_id, outcome.waitpoints[0].waitpoint_id)
        return claim, outcome

    await add("suspended")
    claim, outcome = await add("delayed", Single("a"), resume_delay_ms=1000)
    await send(rig, signal(claim, outcome.waitpoints[0]))
    claim, outcome = await add("completed", Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    await rig.engine.complete((await rig.claim()).handle)
    claim, outcome = await add("running again", Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    await rig.claim()
    claim, outcome = await add("gone", Single("a"))
    await rig.sql.execute(
        "delete from ff_exec_core where partition_key = $1 and execution_id = $2",
        *parse_execution_id(claim.execution_id),
    )
    claim = await rig.running()
    pending = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=10**9)
    found["running with a pending waitpoint"] = (claim.execution_id, pending.waitpoint_id)
    found["a waitpoint that never was"] = (claim.execution_id, str(uuid4()))
    claim = await rig.running()
    expired = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=1)
    found["an expired waitpoint"] = (claim.execution_id, expired.waitpoint_id)
    found["never claimed"] = (await rig.create(lane="later"), str(uuid4()))
    found["an execution that never was"] = (f"{{fp:9}}:{uuid4()}", str(uuid4()))
    claim, outcome = await add("resumable", Single("a"))
    await send(rig, signal(claim, outcome.waitpoints[0]))
    await clock.advance(1)
    return found


async def test_a_token_that_does_not_hold_gets_one_answer_whatever_exists(rig: Rig, clock: Clock) -> None:
    """I8, V-002…V-004, V-006…V-008, V-018: same type, kind and text; nothing written but a counter."""
    await rig.engine.rotate_waitpoint_hmac_secret_all("k2", "22" * 32, 5)
    await rig.engine.rotate_waitpoint_hmac_secret_all("k3", "33" * 32, 5)
    places = await targets(rig, clock)
    await clock.advance(10)
    secrets = {"k1": bytes.fromhex(SECRET), "k2": b"\x22" * 32, "k3": b"\x33" * 32}
    other = mint_token("k3", secrets["k3"], *places["suspended"])
    answers = Counter[tuple[Any, ...]]()
    before, count, sent = await everything(rig), rejections(), 0
    for name, (execution_id, waitpoint_id) in places.items():
        good = mint_token("k3", secrets["k3"], execution_id, waitpoint_id)
        bad: list[Any] = [
            None,
            "",
            b"bytes",
            5,
            "kid:0",
            good[:-1],
            good + "0",
            good[:-1] + ("0" if good[-1] != "0" else "1"),
            good.upper(),
            good.replace("k3:", "k2:"),
            good.replace("k3:", "nobody:"),
            "k3:" + "0" * 64,
            "x" * 1_000_000,
            "k3:" + "f" * 1_000_000,
            "ключ:" + "ж" * 64,
            "ключ:" + good[3:],
            "\ud800:" + good[3:],
            good.replace("k3:", "k\0:"),
            mint_token("k3", secrets["k3"], execution_id, str(uuid4())),
            mint_token("k3", secrets["k3"], f"{{fp:3}}:{uuid4()}", waitpoint_id),
            # Keys past their grace.
            mint_token("k1", secrets["k1"], execution_id, waitpoint_id),
            mint_token("k2", secrets["k2"], execution_id, waitpoint_id),
            # What a missing key is compared with.
            mint_token("nobody", b"\0" * 32, execution_id, waitpoint_id),
        ]
        if name != "suspended":
            bad.append(other)
        for token in bad:
            one = Signal(execution_id, waitpoint_id, "x", token, source_type="t", source_identity="i")
            error = await refused(rig.engine.deliver_signal(one, idempotency_key="k"))
            assert isinstance(error, Validation)
            answers[type(error), error.kind, error.code, str(error), repr(error), error.detail, error.field] += 1
            sent += 1
    assert len(answers) == 1
    ((_, kind, *_),) = answers
    assert kind == ValidationKind.INVALID_TOKEN
    assert rejections() == count + sent
    assert await everything(rig) == before


async def test_every_place_of_that_matrix_answers_differently_to_a_good_token(rig: Rig, clock: Clock) -> None:
    """Otherwise the test before would prove nothing."""
    codes = Counter[str]()
    for execution_id, waitpoint_id in (await targets(rig, clock)).values():
        token = mint_token("k1", bytes.fromhex(SECRET), execution_id, waitpoint_id)
        one = Signal(execution_id, waitpoint_id, "x", token, source_type="t", source_identity="i")
        try:
            answer = await rig.engine.deliver_signal(one)
        except EngineError as error:
            codes[error.code] += 1
        else:
            assert isinstance(answer, Accepted)
            codes[answer.effect] += 1
    assert codes == {
        "appended_to_waitpoint": 1,
        "buffered_for_pending_waitpoint": 1,
        "state.waitpoint_closed": 6,
        "state.target_not_signalable": 1,
        "not_found": 2,
    }


async def test_a_bad_token_is_refused_before_any_row_is_looked_at(rig: Rig, dsn: str) -> None:
    """I8: nobody can tell by waiting either, though everything but the key store is locked."""
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    blocker = await asyncpg.connect(dsn)
    try:
        await blocker.execute("begin")
        tables = await blocker.fetch(
            "select tablename from pg_tables where schemaname = 'public' and tablename <> 'ff_waitpoint_hmac'"
        )
        await blocker.execute(f"lock table {', '.join(row['tablename'] for row in tables)} in access exclusive mode")
        async with asyncio.timeout(4):
            error = await refused(rig.engine.deliver_signal(msgspec.structs.replace(one, token=one.token[:-1])))
        assert error.code == "validation.invalid_token"
    finally:
        await blocker.close()
    assert await send(rig, one) == APPENDED


async def test_every_presented_token_is_verified_in_constant_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """I8: unknown kids and malformed tokens are compared like any other (the comparison itself: core/test_tokens)."""
    verified: list[object] = []
    verify = tokens.verify_token

    def spy(token: object, *rest: Any) -> bool:
        verified.append(token)
        return verify(token, *rest)

    monkeypatch.setattr("ffd.ops.keys.verify_token", spy)
    claim, outcome = await waiting(rig)
    presented: list[Any] = [outcome.waitpoints[0].token, "nobody:" + "0" * 64, "x", None]
    for token in presented:
        try:
            await rig.engine.deliver_signal(msgspec.structs.replace(signal(claim, outcome.waitpoints[0]), token=token))
        except Validation as error:
            assert error.kind == ValidationKind.INVALID_TOKEN
    assert verified == presented


# Nothing is told


class Heard:
    """Everything that a program could have written down, and the secrets that must not be in it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.secrets: set[str] = set()

    def keep(self, *secrets: str) -> None:
        for secret in secrets:
            self.secrets |= {secret, secret.rpartition(":")[2]}

    def hear(self, value: object) -> None:
        """Every usual way to print a value."""
        self.texts += [repr(value), str(value), f"{value}", pprint.pformat(value, width=40), repr([{"v": (value,)}])]
        if hasattr(value, "__rich_repr__"):
            self.texts.append(repr(list(value.__rich_repr__())))

    async def try_(self, call: Any) -> Any:
        """Run a call; its result or everything about its error."""
        try:
            value = await call
        except Exception as error:
            self.texts += traceback.format_exception(error)
            self.hear(error)
            self.hear(error.args)
            self.hear(getattr(error, "context", None))
            return None
        self.hear(value)
        return value


@pytest.fixture
async def loud(open_engine: Callable[..., Any]) -> AsyncIterator[Engine]:
    async with open_engine(lock_timeout_ms=100, pool_max=2) as engine:
        yield engine


async def test_no_token_and_no_secret_reaches_a_log_a_repr_or_an_error(
    rig: Rig,
    loud: Engine,
    dsn: str,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """I8: a whole life with every kind of failure, then a search through all that was said."""
    caplog.set_level(logging.DEBUG)
    heard = Heard()
    engine = loud
    heard.keep(SECRET, "a1" * 32, "a2" * 32, "a3" * 32)
    with structlog.testing.capture_logs() as logs:
        await heard.try_(engine.seed_waitpoint_hmac_secret("k1", "a1" * 32))
        await heard.try_(engine.seed_waitpoint_hmac_secret("k9", "a2" * 32))
        await heard.try_(engine.seed_waitpoint_hmac_secret("k:9", "a2" * 32))
        await heard.try_(engine.seed_waitpoint_hmac_secret("k9", "a2" * 32 + "zz"))
        await heard.try_(engine.rotate_waitpoint_hmac_secret_all("k1", "a3" * 32, 0))
        await heard.try_(engine.rotate_waitpoint_hmac_secret_all("k9", "a3" * 32, -1))
        await heard.try_(engine.list_waitpoint_keys())
        claim = await rig.running()
        pending = await heard.try_(engine.create_waitpoint(claim.handle, "p", expires_in_ms=10**6))
        heard.keep(pending.token)
        await heard.try_(engine.deliver_signal(signal(claim, pending, "no")))
        request = Suspend(
            [UsePending(pending.waitpoint_id), Fresh("a")],
            AllOf((Single("p", ByName("yes")), Count(2, SOURCES, ("a",)))),
            timeout_at_ms=await clock.now_ms() + 10**6,
        )
        await heard.try_(engine.suspend(stale(claim, epoch=1), request))
        await heard.try_(engine.suspend_by_triple(claim.execution_id, LeaseFence("l", 99, "a"), request))
        await heard.try_(engine.suspend(claim.handle, Suspend([Fresh("a", pending.waitpoint_id)], Single("a"))))
        outcome = await heard.try_(engine.suspend(claim.handle, request, idempotency_key="s"))
        await heard.try_(engine.suspend(claim.handle, request, idempotency_key="s"))
        await heard.try_(engine.suspend(claim.handle, request))
        await heard.try_(engine.suspend(outcome.handle, request))
        heard.keep(*(point.token for point in outcome.waitpoints))
        _, a = outcome.waitpoints
        one = signal(claim, a, payload=b"p")
        heard.hear(one)
        heard.hear(request)
        await heard.try_(engine.list_pending_waitpoints(claim.execution_id))
        await heard.try_(engine.list_suspended())
        await heard.try_(engine.describe_execution(claim.execution_id))
        await heard.try_(engine.explain_execution(claim.execution_id))
        for token in (a.token[:-1], a.token.upper(), pending.token, "x" + a.token, a.token * 1000, a.token + "\ud800"):
            bad = msgspec.structs.replace(one, token=token)
            heard.hear(bad)
            await heard.try_(engine.deliver_signal(bad))
        # A token or a secret in the wrong place.
        for field in ("execution_id", "waitpoint_id", "signal_id", "payload"):
            await heard.try_(engine.deliver_signal(msgspec.structs.replace(one, **{field: a.token})))
        await heard.try_(engine.read_waitpoint_token(claim.execution_id, a.token))
        await heard.try_(engine.rotate_waitpoint_hmac_secret_all("k" * 10 + SECRET, SECRET, 0))
        await heard.try_(engine.deliver_signal(one, idempotency_key=""))
        await heard.try_(engine.deliver_signal(one, idempotency_key="once"))
        await heard.try_(engine.deliver_signal(one, idempotency_key="once"))
        await heard.try_(engine.deliver_approval_signal(claim.execution_id, a.waitpoint_id, "approve", actor="x"))
        # The database in trouble: a lock that is not granted, a missing table, a broken constraint.
        blocker = await asyncpg.connect(dsn)
        await blocker.execute("begin")
        await blocker.execute("select * from ff_exec_core for update")
        await heard.try_(engine.deliver_signal(one))
        await blocker.close()
        await rig.sql.execute("alter table ff_signal_event add constraint no check (signal_name <> 'broken') not valid")
        await heard.try_(engine.deliver_signal(signal(claim, pending, "broken")))
        await rig.sql.execute("alter table ff_signal_event rename to ff_signal_event_away")
        await heard.try_(engine.deliver_signal(signal(claim, a)))
        await rig.sql.execute("alter table ff_signal_event_away rename to ff_signal_event")
        await heard.try_(engine.deliver_signal(signal(claim, pending, "yes")))
        await heard.try_(engine.deliver_signal(signal(claim, pending, "late")))
        await heard.try_(engine.observe_signals(outcome.handle))
        resumed = await heard.try_(engine.claim_resumed_execution(claim.execution_id, **OTHER))
        await heard.try_(engine.complete(resumed.handle))
        await heard.try_(engine.deliver_signal(signal(claim, pending, "late")))
        # AlreadySatisfied holds tokens too.
        claim = await rig.running()
        pending = await heard.try_(engine.create_waitpoint(claim.handle, "p", expires_in_ms=10**6))
        heard.keep(pending.token)
        await heard.try_(engine.deliver_signal(signal(claim, pending)))
        done = await heard.try_(engine.suspend(claim.handle, Suspend([UsePending(pending.waitpoint_id)], Single("p"))))
        assert isinstance(done, SuspensionAlreadySatisfied)
        structlog.get_logger().info("the library's caller logs what it has", outcome=repr(outcome), signal=str(one))
    captured = capfd.readouterr()
    said = "\n".join([*heard.texts, repr(logs), caplog.text, captured.out, captured.err])
    assert len(heard.secrets) == 10, "four keys, and three tokens with their MACs"
    assert len(heard.texts) > 300
    assert "invalid_token" in said or "does not authorise" in said
    assert "retry_exhausted" in said or "try again" in said
    leaked = [secret for secret in heard.secrets if secret.lower() in said.lower()]
    assert leaked == []
    raw = [repr(bytes.fromhex(secret))[2:-1] for secret in heard.secrets if len(secret) == 64]
    assert [secret for secret in raw if secret in said] == []


async def test_metrics_hold_no_token(rig: Rig) -> None:
    claim, outcome = await waiting(rig)
    one = signal(claim, outcome.waitpoints[0])
    await refused(rig.engine.deliver_signal(msgspec.structs.replace(one, token=one.token[:-1])))
    page = repr(list(REGISTRY.collect()))
    assert "ffd_token_rejections" in page
    assert one.token.partition(":")[2][:16] not in page


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
        error = await unchanged(
            rig, rig.engine.deliver_approval_signal(execution_id, waitpoint_id, "approved", actor="a")
        )
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
    before = await everything(rig)
    assert await rig.engine.deliver_approval_signal(*where, "approved", actor="alice") == Duplicate(first.signal_id)
    late = await refused(rig.engine.deliver_approval_signal(*where, "approved", actor="bob"))
    assert isinstance(late, NotFound)
    assert await everything(rig) == before


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
        error = await unchanged(rig, rig.engine.deliver_approval_signal(**{**call, field: value}))
        assert getattr(error, "field", None) == field
    assert isinstance(await rig.engine.deliver_approval_signal(**call), Accepted), "the bounds themselves are taken"


# Contention


async def test_a_signal_waits_for_the_row_and_is_then_delivered(rig: Rig, dsn: str) -> None:
    """C-124: with the row lock a contended signal is answered, not sent away."""
    claim, outcome = await waiting(rig, Single("a"))
    blocker = await asyncpg.connect(dsn)
    await blocker.execute("begin")
    await blocker.execute("select 1 from ff_exec_core for update")
    await blocker.execute("update ff_suspension_current set member_map = '{\"holder\": []}'")
    call = asyncio.create_task(send(rig, signal(claim, outcome.waitpoints[0])))
    await until(
        lambda: rig.sql.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
    )
    await blocker.execute("commit")
    await blocker.close()
    assert await call == SATISFIED
    assert (await member_map(rig, claim)).keys() == {"holder", "a"}, "what was committed meanwhile is seen"


async def test_a_row_that_is_never_free_is_reported_after_three_tries(rig: Rig, loud: Engine, dsn: str) -> None:
    """C-124: `RETRY_EXHAUSTED` when the lock is not granted in time; nothing is written, and it may be repeated."""
    claim, outcome = await waiting(rig, Single("a"))
    before = await everything(rig)
    blocker = await asyncpg.connect(dsn)
    await blocker.execute("begin")
    await blocker.execute("select 1 from ff_exec_core for update")
    error = await refused(loud.deliver_signal(signal(claim, outcome.waitpoints[0])))
    await blocker.close()
    assert (error.code, error.is_retryable) == ("contention.retry_exhausted", True)
    assert await everything(rig) == before
    assert isinstance(await loud.deliver_signal(signal(claim, outcome.waitpoints[0])), Accepted)


async def test_signals_leave_the_execution_public_state_alone_until_they_resume(rig: Rig) -> None:
    await rig.engine.create_executions([NewExecution(), NewExecution()])
    one, two = await rig.engine.claim_many("default", 2, **WORKER)
    outcome = await rig.engine.suspend(one.handle, Suspend([Fresh("a")], MANY))
    await send(rig, signal(one, outcome.waitpoints[0]))
    for claim, state in ((one, PublicState.SUSPENDED), (two, PublicState.RUNNING)):
        snapshot = await rig.engine.describe_execution(claim.execution_id)
        assert snapshot is not None
        assert snapshot.public_state == state


async def test_a_repeated_signal_id_is_a_duplicate_at_another_pending_waitpoint(rig: Rig) -> None:
    claim = await rig.running()
    first = await rig.engine.create_waitpoint(claim.handle, "a", expires_in_ms=60_000)
    second = await rig.engine.create_waitpoint(claim.handle, "b", expires_in_ms=60_000)
    same = str(uuid4())
    assert await send(rig, signal(claim, first, signal_id=same)) == BUFFERED
    assert await rig.engine.deliver_signal(signal(claim, second, signal_id=same)) == Duplicate(same)
    assert (await rig.core(claim.execution_id))["signal_count"] == 1
