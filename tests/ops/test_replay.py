"""replay_execution: an ended execution runs again, with a clean slate, a larger epoch and a record of what was."""

from __future__ import annotations

import pytest

from ffd import (
    AnyOfEdges,
    Contention,
    Engine,
    ExecutionPolicy,
    FailureClass,
    FlowSpec,
    Fresh,
    HandleKind,
    NewExecution,
    NotFound,
    PublicState,
    Replayed,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    Wildcard,
)
from ffd.core.ids import new_execution_key
from tests.support import Rig

pytestmark = pytest.mark.anyio


async def test_a_failed_execution_runs_again_in_place(rig: Rig) -> None:
    """C-086: same attempt row, outcome cleared, epoch + 1, replay count + 1, one event `branch=normal`."""
    claim = await rig.running(policy=ExecutionPolicy(), deadline_at_ms=2**52, payload=b"p")
    await rig.engine.fail(claim.handle, "boom", FailureClass.PERMANENT)
    assert await rig.engine.replay_execution(claim.execution_id, reason="fixed", actor="ann") == Replayed(
        PublicState.WAITING
    )
    assert await rig.state(claim.execution_id) == (
        "waiting",
        "runnable",
        "unowned",
        "eligible_now",
        "pending_replay_attempt",
    )
    attempt = await rig.attempt(claim.execution_id)
    assert (attempt["outcome"], attempt["terminal_at_ms"], attempt["worker_id"]) == (None, None, None)
    assert attempt["lease_epoch"] == claim.lease_epoch + 1
    core = await rig.core(claim.execution_id)
    assert (core["replay_count"], core["attempt_index"], core["terminal_at_ms"], core["deadline_at_ms"]) == (
        1,
        0,
        None,
        None,
    )
    (event,) = await rig.operator_events(claim.execution_id)
    assert (event["event_type"], event["actor"], event["reason"]) == ("replayed", "ann", "fixed")
    details = event["details"]
    assert (details["branch"], details["previous_state"], details["outcome"]) == ("normal", "failed", "failed")
    assert (details["failure_message"], details["worker_instance_id"], details["deadline_at_ms"]) == (
        "boom",
        "w-1",
        2**52,
    )
    assert details["terminal_at_ms"] is not None
    again = await rig.claim()
    assert (again.handle.kind, again.attempt_index, again.payload) == (HandleKind.FRESH, 0, b"p")
    assert again.lease_epoch == claim.lease_epoch + 2
    with pytest.raises(Contention):
        await rig.engine.complete(claim.handle)
    await rig.engine.complete(again.handle, b"ok")
    assert await rig.completions(claim.execution_id) == ["failed", "success"]


@pytest.mark.parametrize("ending", ["completed", "cancelled", "cancelled while waiting"])
async def test_every_ending_can_be_replayed(rig: Rig, ending: str) -> None:
    execution = await rig.create()
    if ending == "completed":
        await rig.engine.complete((await rig.claim()).handle, b"result")
    elif ending == "cancelled":
        await rig.claim()
    if ending.startswith("cancelled"):
        await rig.engine.cancel_execution(execution, reason="no")
    assert (await rig.engine.replay_execution(execution)).public_state == PublicState.WAITING
    core = await rig.core(execution)
    assert (core["result"], core["cancellation_reason"], core["cancelled_by"]) == (None, None, None)
    details = (await rig.operator_events(execution))[-1]["details"]
    assert details["result_size"] == (6 if ending == "completed" else None)
    await rig.engine.complete((await rig.claim()).handle)


async def test_counts_start_over(rig: Rig) -> None:
    claim = await rig.running(policy=ExecutionPolicy())
    await rig.sql.execute("update ff_exec_core set retry_count = 2, lease_reclaim_count = 7")
    await rig.engine.fail(claim.handle, "x", FailureClass.PERMANENT)
    await rig.engine.replay_execution(claim.execution_id)
    core = await rig.core(claim.execution_id)
    assert (core["retry_count"], core["lease_reclaim_count"]) == (0, 0)
    details = (await rig.operator_events(claim.execution_id))[0]["details"]
    assert (details["retry_count"], details["reclaim_count"]) == (2, 7)


async def test_signals_and_suspensions_of_the_earlier_life_are_gone(rig: Rig) -> None:
    """The same idempotency key suspends anew, with a token of its own; no old signal is seen."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    request = Suspend([Fresh("go")], Single("go", Wildcard()))
    claim = await rig.running()
    first = await rig.engine.suspend(claim.handle, request, idempotency_key="step-1")
    assert isinstance(first, Suspended)
    await rig.engine.deliver_approval_signal(claim.execution_id, first.waitpoints[0].waitpoint_id, "go", actor="ann")
    again = await rig.claim()
    assert len(await rig.engine.observe_signals(again.handle)) == 1
    await rig.engine.complete(again.handle)
    await rig.engine.replay_execution(claim.execution_id)
    replayed = await rig.claim()
    assert await rig.engine.observe_signals(replayed.handle) == []
    second = await rig.engine.suspend(replayed.handle, request, idempotency_key="step-1")
    assert isinstance(second, Suspended)
    assert second.waitpoints[0].waitpoint_id != first.waitpoints[0].waitpoint_id
    assert await rig.public(claim.execution_id) == "suspended"


async def test_what_has_not_ended_is_not_replayed(rig: Rig) -> None:
    """C-088."""
    claim = await rig.running()
    before = await rig.fingerprint()
    with pytest.raises(State) as refused:
        await rig.engine.replay_execution(claim.execution_id)
    assert refused.value.kind == StateKind.EXECUTION_NOT_TERMINAL
    assert await rig.fingerprint() == before


async def test_a_second_replay_finds_it_waiting(rig: Rig) -> None:
    execution = await rig.create()
    await rig.engine.cancel_execution(execution, reason="no")
    await rig.engine.replay_execution(execution)
    with pytest.raises(State) as refused:
        await rig.engine.replay_execution(execution)
    assert refused.value.kind == StateKind.EXECUTION_NOT_TERMINAL


async def test_the_policy_limits_replays(rig: Rig) -> None:
    execution = await rig.create(policy=ExecutionPolicy(max_replay_count=1))
    await rig.engine.cancel_execution(execution, reason="no")
    await rig.engine.replay_execution(execution)
    await rig.engine.cancel_execution(execution, reason="no")
    before = await rig.fingerprint()
    with pytest.raises(State) as refused:
        await rig.engine.replay_execution(execution)
    assert refused.value.kind == StateKind.MAX_REPLAYS_EXHAUSTED
    assert await rig.fingerprint() == before


async def test_without_a_policy_ten_replays_are_allowed(rig: Rig) -> None:
    execution = await rig.create()
    for _ in range(10):
        await rig.engine.cancel_execution(execution, reason="no")
        await rig.engine.replay_execution(execution)
    await rig.engine.cancel_execution(execution, reason="no")
    with pytest.raises(State) as refused:
        await rig.engine.replay_execution(execution)
    assert refused.value.kind == StateKind.MAX_REPLAYS_EXHAUSTED


async def test_an_unknown_execution_is_not_found(engine: Engine) -> None:
    with pytest.raises(NotFound):
        await engine.replay_execution(str(new_execution_key()))


async def chain(rig: Rig) -> dict[str, str]:
    nodes = {name: NewExecution(lane=name) for name in ("a", "b", "c")}
    return (await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b"), ("b", "c")]))).execution_ids


async def test_a_skipped_member_waits_for_its_upstream_s_replay(rig: Rig) -> None:
    """C-087, V-094: back to blocked, fail and skip counters zeroed; it moves when the replayed upstream succeeds."""
    ids = await chain(rig)
    await rig.engine.fail((await rig.claim("a")).handle, "x", FailureClass.PERMANENT)
    assert await rig.public(ids["b"]) == "skipped"
    assert await rig.engine.replay_execution(ids["b"]) == Replayed(PublicState.WAITING_CHILDREN)
    core = await rig.core(ids["b"])
    assert (core["attempt_state"], core["eligibility_state"]) == ("pending_replay_attempt", "blocked_by_dependencies")
    (event,) = await rig.operator_events(ids["b"])
    assert (event["details"]["branch"], event["details"]["groups_reset"]) == ("skipped_flow_member", 1)
    group = await rig.sql.fetchrow("select * from ff_edge_group where downstream_eid = $1", core["execution_id"])
    assert group is not None
    assert (group["success_count"], group["fail_count"], group["skip_count"], group["running_count"]) == (0, 0, 0, 0)
    explanation = await rig.engine.explain_execution(ids["b"])
    assert explanation.waiting_for == "dependencies"
    assert explanation.next_step.startswith(f"Replay {ids['a']}")
    await rig.engine.replay_execution(ids["a"])
    await rig.engine.complete((await rig.claim("a")).handle)
    assert await rig.public(ids["b"]) == "waiting"
    assert await rig.public(ids["c"]) == "skipped"


async def test_an_upstream_replayed_to_success_before_counts_at_once(rig: Rig) -> None:
    ids = await chain(rig)
    await rig.engine.fail((await rig.claim("a")).handle, "x", FailureClass.PERMANENT)
    await rig.engine.replay_execution(ids["a"])
    await rig.engine.complete((await rig.claim("a")).handle)
    assert await rig.public(ids["b"]) == "skipped"
    assert await rig.engine.replay_execution(ids["b"]) == Replayed(PublicState.WAITING)
    await rig.claim("b")


async def test_a_replayed_upstream_that_fails_again_skips_again(rig: Rig) -> None:
    ids = await chain(rig)
    await rig.engine.fail((await rig.claim("a")).handle, "x", FailureClass.PERMANENT)
    await rig.engine.replay_execution(ids["b"])
    await rig.engine.replay_execution(ids["a"])
    await rig.engine.fail((await rig.claim("a")).handle, "x", FailureClass.PERMANENT)
    assert await rig.public(ids["b"]) == "skipped"
    assert await rig.completions(ids["b"]) == ["skipped", "skipped"]


async def test_a_replay_opens_an_ended_flow_and_leaves_ended_descendants(rig: Rig) -> None:
    nodes = {name: NewExecution(lane=name) for name in ("a", "b")}
    flow = await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))
    for name in ("a", "b"):
        await rig.engine.complete((await rig.claim(name)).handle)
    before = await rig.core(flow.execution_ids["b"])
    await rig.engine.replay_execution(flow.execution_ids["a"])
    reopened = await rig.engine.describe_flow(flow.flow_id)
    assert reopened is not None
    assert (str(reopened.state), reopened.terminal_at_ms) == ("open", None)
    await rig.engine.fail((await rig.claim("a")).handle, "x", FailureClass.PERMANENT)
    assert await rig.core(flow.execution_ids["b"]) == before
    ended = await rig.engine.describe_flow(flow.flow_id)
    assert ended is not None
    assert str(ended.state) == "completed"
    assert [event["event_type"] for event in await rig.operator_events(flow.flow_id)] == ["flow_ended"] * 2


async def test_a_cancelled_flow_refuses_replays(rig: Rig) -> None:
    flow = await rig.engine.submit_flow(FlowSpec({"a": NewExecution()}))
    await rig.engine.cancel_flow(flow.flow_id, reason="no")
    with pytest.raises(State) as refused:
        await rig.engine.replay_execution(flow.execution_ids["a"])
    assert refused.value.kind == StateKind.REPLAY_NOT_ALLOWED


async def test_a_race_s_satisfied_edges_stay_satisfied(rig: Rig) -> None:
    """A join that was released by one upstream and failed: its replay needs no edge again."""
    nodes = {name: NewExecution(lane=name) for name in ("p", "q", "join")}
    flow = await rig.engine.submit_flow(
        FlowSpec(nodes, [("p", "join"), ("q", "join")], {"join": AnyOfEdges("let_run")})
    )
    await rig.engine.complete((await rig.claim("p")).handle)
    await rig.engine.fail((await rig.claim("join")).handle, "x", FailureClass.PERMANENT)
    assert await rig.engine.replay_execution(flow.execution_ids["join"]) == Replayed(PublicState.WAITING)
