"""Cancelling flows: three policies, the backlog, the header and its acknowledgements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

import ffd.ops.cancel_flow as cancel_flow_module
from ffd import (
    Contention,
    ContentionKind,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowSpec,
    Fresh,
    NewExecution,
    NotFound,
    Single,
    State,
    StateKind,
    Suspend,
    Validation,
    Wildcard,
)
from ffd.core.ids import new_uuid
from ffd.ops.cancel_flow import drain_backlog
from ffd.ops.flow_lock import parse_flow_id
from tests.concurrency.sessions import held, until_blocked
from tests.support import Rig

pytestmark = pytest.mark.anyio


async def bag(rig: Rig, *lanes: str) -> tuple[str, dict[str, str]]:
    """A flow of independent members, one lane each."""
    flow = await rig.engine.submit_flow(FlowSpec({lane: NewExecution(lane=lane) for lane in lanes}))
    return flow.flow_id, flow.execution_ids


async def test_all_members_are_cancelled_with_their_events(rig: Rig) -> None:
    """C-222, C-183: running, waiting and suspended ones; what had ended stays."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    flow, ids = await bag(rig, "run", "wait", "sleep", "done")
    running = await rig.claim("run")
    asleep = await rig.claim("sleep")
    await rig.engine.suspend(asleep.handle, Suspend([Fresh("go")], Single("go", Wildcard())))
    await rig.engine.complete((await rig.claim("done")).handle)
    cancelled = await rig.engine.cancel_flow(flow, reason="enough", actor="ann")
    assert str(cancelled.policy) == "cancel_all"
    assert set(cancelled.member_execution_ids) == {ids["run"], ids["wait"], ids["sleep"]}
    assert cancelled.pending_execution_ids == []
    assert [await rig.public(ids[name]) for name in ("run", "wait", "sleep", "done")] == ["cancelled"] * 3 + [
        "completed"
    ]
    for name in ("run", "wait", "sleep"):
        assert await rig.completions(ids[name]) == ["cancelled"]
        core = await rig.core(ids[name])
        assert (core["cancellation_reason"], core["cancelled_by"]) == ("enough", "cancel_flow")
    assert await rig.lease_events(ids["run"]) == [("acquired", None), ("revoked", "cancelled")]
    assert await rig.completions(ids["done"]) == ["success"]
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == 0
    with pytest.raises(Contention) as fenced:
        await rig.engine.complete(running.handle)
    assert fenced.value.kind == ContentionKind.LEASE_CONFLICT
    snapshot = await rig.engine.describe_flow(flow)
    assert snapshot is not None
    assert (str(snapshot.state), snapshot.cancellation_policy, snapshot.cancel_reason) == (
        "cancelled",
        "cancel_all",
        "enough",
    )
    requested, ended = await rig.operator_events(flow)
    assert (requested["event_type"], requested["actor"], requested["reason"]) == (
        "flow_cancel_requested",
        "ann",
        "enough",
    )
    assert (requested["details"]["member_count"], ended["event_type"], ended["details"]["state"]) == (
        3,
        "flow_ended",
        "cancelled",
    )


async def test_pending_members_alone(rig: Rig) -> None:
    """What runs goes on, and what it waits for among the cancelled counts as ended."""
    flow = (await rig.engine.create_flow()).flow_id
    parent = await rig.create(lane="parent", flow_id=flow)
    child = await rig.create(lane="child", flow_id=flow)
    claim = await rig.claim("parent")
    await rig.engine.stage_dependency_edge(flow, child, parent)
    cancelled = await rig.engine.cancel_flow(flow, policy="cancel_pending", reason="no")
    assert cancelled.member_execution_ids == [child]
    assert (await rig.public(parent), await rig.public(child)) == ("running", "cancelled")
    await rig.engine.wait_children(claim.handle)
    again = await rig.claim("parent")
    await rig.engine.complete(again.handle)


async def test_the_flow_only(rig: Rig) -> None:
    flow, ids = await bag(rig, "a")
    cancelled = await rig.engine.cancel_flow(flow, policy="cancel_flow_only", reason="no")
    assert cancelled.member_execution_ids == []
    assert await rig.public(ids["a"]) == "waiting"
    await rig.engine.complete((await rig.claim("a")).handle)
    snapshot = await rig.engine.describe_flow(flow)
    assert snapshot is not None
    assert str(snapshot.state) == "cancelled"


async def test_twice_is_once_and_an_ended_flow_is_refused(rig: Rig) -> None:
    flow, ids = await bag(rig, "a")
    await rig.engine.cancel_flow(flow, reason="no")
    before = await rig.fingerprint()
    again = await rig.engine.cancel_flow(flow, policy="cancel_pending", reason="other")
    assert (str(again.policy), again.member_execution_ids, again.pending_execution_ids) == (
        "cancel_all",
        [ids["a"]],
        [],
    )
    assert await rig.fingerprint() == before
    done, _ = await bag(rig, "b")
    await rig.engine.complete((await rig.claim("b")).handle)
    with pytest.raises(State) as refused:
        await rig.engine.cancel_flow(done, reason="no")
    assert refused.value.kind == StateKind.FLOW_ALREADY_TERMINAL


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"policy": "all", "reason": "x"}, "policy"),
        ({"reason": "x" * 2000}, "reason"),
        ({"reason": "x", "wait_ms": -1}, "wait_ms"),
    ],
)
async def test_bad_input_changes_nothing(rig: Rig, keywords: dict[str, Any], field: str) -> None:
    """V-096."""
    flow, _ = await bag(rig, "a")
    before = await rig.fingerprint()
    with pytest.raises(Validation) as refused:
        await rig.engine.cancel_flow(flow, **keywords)
    assert refused.value.field == field
    assert await rig.fingerprint() == before


async def test_a_member_in_somebody_s_hands_is_named_and_cancelled_later(rig: Rig) -> None:
    """C-227, C-273: the bounded wait reports who was not cancelled in time; the backlog holds them until it is done."""
    flow, ids = await bag(rig, "a", "b")
    held = await rig.claim("a")
    async with rig.sql.transaction():
        await rig.engine.assert_lease(held.handle, connection=rig.sql)
        cancelled = await rig.engine.cancel_flow(flow, reason="no", wait_ms=100)
        assert cancelled.pending_execution_ids == [ids["a"]]
        snapshot = await rig.engine.describe_execution(ids["b"])
        assert snapshot is not None
        assert str(snapshot.public_state) == "cancelled"
        again = await rig.engine.cancel_flow(flow, reason="no")
        assert again.pending_execution_ids == [ids["a"]]
    assert await rig.public(ids["a"]) == "running"
    done = await rig.engine.cancel_flow(flow, reason="no", wait_ms=5000)
    assert done.pending_execution_ids == []
    assert await rig.public(ids["a"]) == "cancelled"
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == 0


async def test_past_the_bound_the_backlog_takes_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """C-226, and a crash after the header: draining cancels and acknowledges, once each."""
    monkeypatch.setattr(cancel_flow_module, "CASCADE_MAX", 3)
    flow, ids = await bag(rig, *[f"n{at}" for at in range(8)])
    first = await rig.engine.cancel_flow(flow, reason="no")
    assert len(first.pending_execution_ids) == 5
    assert await drain_backlog(rig.engine._runtime, parse_flow_id(flow)) == 3
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog_member") == 2
    second = await rig.engine.cancel_flow(flow, reason="no", wait_ms=5000)
    assert second.pending_execution_ids == []
    assert await drain_backlog(rig.engine._runtime, parse_flow_id(flow)) == 0
    for execution in ids.values():
        assert await rig.completions(execution) == ["cancelled"]
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == 0


async def test_the_backlog_of_pending_members_spares_who_has_started(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancel_flow_module, "CASCADE_MAX", 1)
    flow, ids = await bag(rig, "a", "b", "c")
    left = (await rig.engine.cancel_flow(flow, policy="cancel_pending", reason="no")).pending_execution_ids
    started = await rig.claim_of(left[0])
    while await drain_backlog(rig.engine._runtime, parse_flow_id(flow)):
        pass
    assert await rig.public(started.execution_id) == "running"
    assert sorted([await rig.public(each) for each in ids.values()]) == ["cancelled", "cancelled", "running"]
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog_member") == 0


async def test_the_header_lists_every_member_until_it_is_acknowledged(rig: Rig) -> None:
    """C-089, C-091, C-092: members cancelled with their events, backlog rows, gone with the last ack."""
    flow, ids = await bag(rig, "a", "b")
    header = await rig.engine.cancel_flow_header(flow, reason="no", cancellation_policy="cancel_all")
    assert isinstance(header, FlowCancelHeader)
    assert set(header.member_execution_ids) == set(ids.values())
    assert [await rig.public(each) for each in ids.values()] == ["cancelled", "cancelled"]
    assert [await rig.completions(each) for each in ids.values()] == [["cancelled"], ["cancelled"]]
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog_member") == 2
    events = [event["event_type"] for event in await rig.operator_events(flow)]
    assert events == ["flow_cancel_requested", "flow_ended"]
    for execution, left in ((ids["a"], 1), (ids["a"], 1), (ids["b"], 0)):
        await rig.engine.ack_cancel_member(flow, execution)
        assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog_member") == left
        assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == (1 if left else 0)
    await rig.engine.ack_cancel_member(flow, ids["b"])
    assert [event["event_type"] for event in await rig.operator_events(flow)] == events


async def test_a_second_header_tells_what_was_stored(rig: Rig) -> None:
    """C-090, V-097: the stored policy and reason; the backlog is not filled again."""
    flow, ids = await bag(rig, "a")
    await rig.engine.cancel_flow_header(flow, reason="first", cancellation_policy="cancel_all")
    await rig.engine.ack_cancel_member(flow, ids["a"])
    before = await rig.fingerprint()
    again = await rig.engine.cancel_flow_header(flow, reason="second", cancellation_policy="cancel_flow_only")
    assert again == FlowAlreadyTerminal("cancel_all", "first", [ids["a"]])
    assert await rig.fingerprint() == before


@pytest.mark.parametrize("policy", ["cancel_pending", "cancel_flow_only"])
async def test_other_policies_and_empty_flows_make_no_backlog(rig: Rig, policy: str) -> None:
    """V-095: and the policy is honoured."""
    flow, ids = await bag(rig, "a", "b")
    await rig.claim("a")
    await rig.engine.cancel_flow_header(flow, reason="no", cancellation_policy=policy)
    assert await rig.public(ids["a"]) == "running"
    assert await rig.public(ids["b"]) == ("cancelled" if policy == "cancel_pending" else "waiting")
    empty = (await rig.engine.create_flow()).flow_id
    header = await rig.engine.cancel_flow_header(empty, reason="no", cancellation_policy="cancel_all")
    assert isinstance(header, FlowCancelHeader)
    assert header.member_execution_ids == []
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == 0


async def test_unknown_flows(rig: Rig) -> None:
    with pytest.raises(NotFound):
        await rig.engine.cancel_flow_header(str(new_uuid()), reason="x", cancellation_policy="cancel_all")
    with pytest.raises(Validation) as refused:
        await rig.engine.cancel_flow_header(str(new_uuid()), reason="x", cancellation_policy="all")
    assert refused.value.field == "cancellation_policy"


async def test_a_held_flow_row_is_contention_in_the_end(rig: Rig, open_engine: Callable[..., Any]) -> None:
    """C-223."""
    flow, _ = await bag(rig, "a")
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_flow_core for update")
        async with open_engine(lock_timeout_ms=50) as impatient:
            with pytest.raises(Contention) as refused:
                await impatient.cancel_flow(flow, reason="no")
    assert refused.value.kind == ContentionKind.RETRY_EXHAUSTED


async def test_draining_and_acknowledging_queue_at_the_header(rig: Rig, dsn: str) -> None:
    """C-091: neither overlooks what the other has just struck off, so the header goes with the last member."""
    flow, ids = await bag(rig, "a", "b")
    await rig.engine.cancel_flow_header(flow, reason="no", cancellation_policy="cancel_all")
    key = parse_flow_id(flow)
    async with held(dsn) as other, anyio.create_task_group() as tasks:
        # An acknowledgement under way: it holds the header and has struck its member off.
        await other.execute(cancel_flow_module.LOCK_BACKLOG.sql, *key)
        await other.execute(cancel_flow_module.ACK_MEMBERS.sql, *key, [ids["a"]])
        tasks.start_soon(drain_backlog, rig.engine._runtime, key)
        await until_blocked(rig.sql, "lock_backlog")
        await other.execute(cancel_flow_module.CLOSE_BACKLOG.sql, *key)
        await other.execute("commit")
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog_member") == 0
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == 0
