"""Signals: proof before state (I8), none lost (I5), and one answer for each way to be too late."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from ffd import (
    AllOf,
    ByName,
    Count,
    CountKind,
    Duplicate,
    Engine,
    Fresh,
    HandleKind,
    NotFound,
    OperatorOnly,
    ResumeSignal,
    Single,
    Suspend,
    Suspended,
    SuspensionAlreadySatisfied,
    TimeoutOnly,
    UsePending,
    Validation,
    Wildcard,
    all_of_waitpoints,
)
from ffd.core.conditions import Condition
from ffd.core.ids import parse_execution_id
from tests.signalling import (
    APPENDED,
    BUFFERED,
    SATISFIED,
    SECRET,
    SIGNALS,
    SOURCES,
    member_map,
    refused,
    send,
    signal,
    waiting,
)
from tests.support import OTHER, Clock, Rig, stale

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)


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
    early = await rig.refused(rig.engine.claim_resumed_execution(claim.execution_id, **OTHER))
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
    late = await rig.refused(rig.engine.deliver_signal(signal(claim, pending)))
    assert late.code == "state.waitpoint_closed"
