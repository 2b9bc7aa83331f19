"""What the end of a member does to its flow, by policy; when the call returns it is done, with no daemon."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ffd.ops.cascade as cascade_module
from ffd import (
    AllOfEdges,
    AnyOfEdges,
    Contention,
    ContentionKind,
    Engine,
    ExecutionPolicy,
    FailureClass,
    FlowSpec,
    NewExecution,
    QuorumEdges,
    ResumeToken,
)
from ffd.core.flows import EdgePolicy
from ffd.core.ids import parse_execution_id
from ffd.ops.cascade import settle_owed
from ffd.ops.flow_lock import parse_flow_id
from tests.support import OTHER, Clock, Rig

pytestmark = pytest.mark.anyio

Ids = dict[str, str]


async def fan_in(rig: Rig, size: int, policy: EdgePolicy, *, after: bool = False) -> tuple[str, Ids]:
    """`u0`, `u1`, … into `join`, and `after` behind it if wished; one lane per node."""
    names = [f"u{at}" for at in range(size)]
    edges = [(name, "join") for name in names] + ([("join", "after")] if after else [])
    nodes = {name: NewExecution(lane=name) for name in [*names, "join", *(["after"] if after else [])]}
    flow = await rig.engine.submit_flow(FlowSpec(nodes, edges, {"join": policy}))
    return flow.flow_id, flow.execution_ids


async def succeed(rig: Rig, *lanes: str) -> None:
    for lane in lanes:
        await rig.engine.complete((await rig.claim(lane)).handle, lane.encode())


async def break_(rig: Rig, *lanes: str) -> None:
    for lane in lanes:
        await rig.engine.fail((await rig.claim(lane)).handle, "no", FailureClass.PERMANENT)


async def states(rig: Rig, ids: Ids, *names: str) -> list[str]:
    return [await rig.public(ids[name]) for name in names]


async def flow_state(rig: Rig, flow: str) -> str:
    snapshot = await rig.engine.describe_flow(flow)
    assert snapshot is not None
    return str(snapshot.state)


async def test_all_of_waits_for_every_upstream(rig: Rig) -> None:
    """C-194, C-287, C-289, V-075: explicit AllOf is the default."""
    flow, ids = await fan_in(rig, 3, AllOfEdges())
    await succeed(rig, "u0", "u1")
    assert await rig.public(ids["join"]) == "waiting_children"
    await succeed(rig, "u2")
    assert await rig.public(ids["join"]) == "waiting"
    await succeed(rig, "join")
    assert await flow_state(rig, flow) == "completed"
    group = await rig.sql.fetchrow("select * from ff_edge_group")
    assert group is not None
    assert (group["success_count"], group["fail_count"], group["skip_count"], group["running_count"]) == (3, 0, 0, 0)


async def test_all_of_is_impossible_with_the_first_failure(rig: Rig) -> None:
    """C-288, V-082: the child is skipped and so is what stands behind it, each with one event."""
    flow, ids = await fan_in(rig, 2, AllOfEdges(), after=True)
    await break_(rig, "u0")
    assert await states(rig, ids, "join", "after", "u1") == ["skipped", "skipped", "waiting"]
    for name in ("join", "after"):
        assert await rig.completions(ids[name]) == ["skipped"]
        assert await rig.state(ids[name]) == ("skipped", "terminal", "unowned", "not_applicable", "attempt_terminal")
    assert await flow_state(rig, flow) == "open"
    await succeed(rig, "u1")
    assert await flow_state(rig, flow) == "failed"
    assert [event["event_type"] for event in await rig.operator_events(flow)] == ["flow_ended"]


async def test_any_of_takes_the_first_and_cancels_the_rest(rig: Rig) -> None:
    """C-195, C-201, C-237, C-290: running losers are fenced, waiting ones never run, each with a reason and events."""
    flow, ids = await fan_in(rig, 3, AnyOfEdges("cancel_remaining"))
    running = await rig.claim("u1", **OTHER)
    await succeed(rig, "u0")
    assert await states(rig, ids, "join", "u1", "u2") == ["waiting", "cancelled", "cancelled"]
    for name in ("u1", "u2"):
        core = await rig.core(ids[name])
        assert (core["cancellation_reason"], core["cancelled_by"]) == ("sibling_quorum_satisfied", "flow_cascade")
        assert await rig.completions(ids[name]) == ["cancelled"]
    assert await rig.lease_events(ids["u1"]) == [("acquired", None), ("revoked", "cancelled")]
    assert await rig.lease_events(ids["u2"]) == []
    with pytest.raises(Contention) as fenced:
        await rig.engine.complete(running.handle)
    assert fenced.value.kind == ContentionKind.LEASE_CONFLICT
    await succeed(rig, "join")
    assert await flow_state(rig, flow) == "completed"


async def test_any_of_lets_the_others_run_if_told_so_and_fires_once(rig: Rig) -> None:
    """C-291, V-076, V-080: later successes change nothing."""
    _, ids = await fan_in(rig, 3, AnyOfEdges("let_run"))
    await succeed(rig, "u0")
    claim = await rig.claim("join")
    await succeed(rig, "u1")
    await break_(rig, "u2")
    assert await states(rig, ids, "join", "u0", "u1", "u2") == ["running", "completed", "completed", "failed"]
    await rig.engine.complete(claim.handle)
    assert await rig.completions(ids["join"]) == ["success"]


async def test_any_of_is_impossible_when_all_fail(rig: Rig) -> None:
    """C-292, C-295: cancelled counts as a failure."""
    _, ids = await fan_in(rig, 2, AnyOfEdges())
    await break_(rig, "u0")
    assert await rig.public(ids["join"]) == "waiting_children"
    await rig.engine.cancel_execution(ids["u1"], reason="no")
    assert await rig.public(ids["join"]) == "skipped"
    group = await rig.sql.fetchrow("select * from ff_edge_group")
    assert group is not None
    assert (group["success_count"], group["fail_count"], group["skip_count"]) == (0, 2, 0)


async def test_a_tolerated_failure_does_not_fail_the_flow(rig: Rig) -> None:
    flow, _ = await fan_in(rig, 2, AnyOfEdges())
    await break_(rig, "u0")
    await succeed(rig, "u1", "join")
    assert await flow_state(rig, flow) == "completed"


async def test_a_quorum_fires_at_k(rig: Rig) -> None:
    """C-196, C-293, V-077: two of three, the third runs on."""
    _, ids = await fan_in(rig, 3, QuorumEdges(2, "let_run"))
    await succeed(rig, "u0")
    assert await rig.public(ids["join"]) == "waiting_children"
    await succeed(rig, "u2")
    assert await states(rig, ids, "join", "u1") == ["waiting", "waiting"]


async def test_an_impossible_quorum_skips_and_cancels_the_survivors(rig: Rig) -> None:
    """C-197, C-294, V-078: three failures of five with k = 3."""
    _, ids = await fan_in(rig, 5, QuorumEdges(3, "cancel_remaining"))
    await break_(rig, "u0", "u1")
    assert await rig.public(ids["join"]) == "waiting_children"
    await break_(rig, "u2")
    assert await states(rig, ids, "join", "u3", "u4") == ["skipped", "cancelled", "cancelled"]
    assert (await rig.core(ids["u3"]))["cancellation_reason"] == "sibling_quorum_impossible"
    assert await rig.completions(ids["join"]) == ["skipped"]


async def test_a_skip_counts_as_a_skip(rig: Rig) -> None:
    """C-295."""
    nodes = {name: NewExecution(lane=name) for name in ("a", "b", "c")}
    flow = await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b"), ("b", "c")], {"c": AnyOfEdges()}))
    await break_(rig, "a")
    key = parse_execution_id(flow.execution_ids["c"])
    group = await rig.sql.fetchrow("select * from ff_edge_group where downstream_eid = $1", key.execution_id)
    assert group is not None
    assert (group["fail_count"], group["skip_count"]) == (0, 1)


async def test_a_diamond(rig: Rig) -> None:
    """C-274, C-275, V-091."""
    nodes = {name: NewExecution(lane=name) for name in "abcd"}
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
    for fails in (False, True):
        ids = (await rig.engine.submit_flow(FlowSpec(nodes, edges))).execution_ids
        await succeed(rig, "a")
        await (break_ if fails else succeed)(rig, "b")
        assert await rig.public(ids["d"]) == ("skipped" if fails else "waiting_children")
        await succeed(rig, "c")
        assert await states(rig, ids, "c", "d") == ["completed", "skipped" if fails else "waiting"]
        if not fails:
            await succeed(rig, "d")


async def test_a_cancelled_member_moves_its_descendants(rig: Rig) -> None:
    _, ids = await fan_in(rig, 2, AllOfEdges(), after=True)
    await rig.engine.cancel_execution(ids["u1"], reason="no")
    assert await states(rig, ids, "u0", "join", "after") == ["waiting", "skipped", "skipped"]


async def test_a_retry_is_no_end(rig: Rig) -> None:
    _, ids = await fan_in(rig, 1, AllOfEdges())
    await rig.engine.fail((await rig.claim("u0")).handle, "again", FailureClass.TRANSIENT)
    assert await states(rig, ids, "u0", "join") == ["delayed", "waiting_children"]


async def test_a_repeated_complete_counts_once(rig: Rig) -> None:
    """C-198, V-083, V-093."""
    _, ids = await fan_in(rig, 2, QuorumEdges(2))
    claim = await rig.claim("u0")
    await rig.engine.complete(claim.handle)
    before = await rig.fingerprint()
    await rig.engine.complete(claim.handle)
    assert await rig.fingerprint() == before
    assert await rig.public(ids["join"]) == "waiting_children"


async def test_members_of_several_flows_and_solo_ones_complete_in_one_batch(rig: Rig) -> None:
    first = await fan_in(rig, 2, AllOfEdges())
    second = await fan_in(rig, 2, AllOfEdges())
    claims = [await rig.claim(lane) for lane in ("u0", "u0", "u1", "u1")]
    claims.append(await rig.running(lane="solo"))
    answers = await rig.engine.complete_many([(claim.handle, b"x") for claim in claims])
    assert answers == [None] * 5
    for flow, ids in (first, second):
        assert await rig.public(ids["join"]) == "waiting"
        assert await flow_state(rig, flow) == "open"
    assert await rig.engine.complete_many([(claim.handle, b"x") for claim in claims]) == [None] * 5


async def test_a_large_fan_out_and_fan_in(rig: Rig) -> None:
    """V-084, C-200: fifty wide, released at once, joined at the end, no lock left behind."""
    names = [f"n{at}" for at in range(50)]
    nodes = {name: NewExecution(lane="wide") for name in names} | {
        "root": NewExecution(lane="root"),
        "join": NewExecution(lane="join"),
    }
    edges = [("root", name) for name in names] + [(name, "join") for name in names]
    flow = await rig.engine.submit_flow(FlowSpec(nodes, edges))
    await succeed(rig, "root")
    claims = await rig.engine.claim_many("wide", 100, **OTHER)
    assert len(claims) == 50
    await rig.engine.complete_many([(claim.handle, None) for claim in claims])
    await succeed(rig, "join")
    assert await flow_state(rig, flow.flow_id) == "completed"
    locks = await rig.sql.fetchval(
        "select count(*) from pg_locks where mode = 'RowExclusiveLock' and pid <> pg_backend_pid()"
        " and database = (select oid from pg_database where datname = current_database())"
    )
    assert locks == 0


async def drain(engine: Engine, flow: str) -> int:
    """Settle until nothing is owed; how many rounds it took."""
    rounds = 0
    while await settle_owed(engine._runtime, parse_flow_id(flow)):
        rounds += 1
        assert rounds < 100
    return rounds


async def test_past_the_bound_the_rest_is_owed_and_settled_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cascade_module, "CASCADE_MAX", 3)
    names = [f"n{at}" for at in range(10)]
    nodes = {name: NewExecution(lane=name) for name in [*names, "root", "end"]}
    edges = [("root", name) for name in names] + [(name, "end") for name in names]
    flow = await rig.engine.submit_flow(FlowSpec(nodes, edges))
    await break_(rig, "root")
    skipped = await rig.sql.fetchval("select count(*) from ff_exec_core where public_state = 'skipped'")
    owed = await rig.sql.fetchval("select count(*) from ff_cascade_owed")
    assert (skipped, owed > 0) == (3, True)
    assert await flow_state(rig, flow.flow_id) in ("open", "blocked")
    assert await drain(rig.engine, flow.flow_id) > 1
    assert await rig.sql.fetchval("select count(*) from ff_exec_core where public_state = 'skipped'") == 11
    assert await rig.sql.fetchval("select count(*) from ff_completion_event where outcome = 'skipped'") == 11
    assert await flow_state(rig, flow.flow_id) == "failed"
    assert len(await rig.operator_events(flow.flow_id)) == 1


async def test_losers_past_the_bound_are_owed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """V-081, V-085: an interrupted drain is finished later, once."""
    monkeypatch.setattr(cascade_module, "CASCADE_MAX", 3)
    flow, ids = await fan_in(rig, 8, AnyOfEdges())
    await succeed(rig, "u0")
    assert await rig.public(ids["join"]) == "waiting"
    await drain(rig.engine, flow)
    assert await states(rig, ids, *[f"u{at}" for at in range(1, 8)]) == ["cancelled"] * 7
    assert await rig.sql.fetchval("select count(*) from ff_completion_event where outcome = 'cancelled'") == 7


async def test_a_loser_in_somebody_s_hands_does_not_hold_the_winner_up(rig: Rig) -> None:
    """A handler's own transaction holds its execution: the winner completes, the loser is cancelled afterwards."""
    flow, ids = await fan_in(rig, 2, AnyOfEdges())
    loser = await rig.claim("u1")
    async with rig.sql.transaction():
        await rig.engine.assert_lease(loser.handle, connection=rig.sql)
        await succeed(rig, "u0")
        snapshot = await rig.engine.describe_execution(ids["join"])
        assert snapshot is not None
        assert str(snapshot.public_state) == "waiting"
    assert await rig.public(ids["u1"]) == "running"
    assert await rig.sql.fetchval("select work from ff_cascade_owed") == "cancel"
    await drain(rig.engine, flow)
    assert await rig.public(ids["u1"]) == "cancelled"


async def test_a_loser_that_ended_meanwhile_is_forgotten(rig: Rig) -> None:
    flow, ids = await fan_in(rig, 2, AnyOfEdges())
    loser = await rig.claim("u1")
    async with rig.sql.transaction():
        await rig.engine.assert_lease(loser.handle, connection=rig.sql)
        await succeed(rig, "u0")
    await rig.engine.complete(loser.handle)
    await drain(rig.engine, flow)
    assert await rig.public(ids["u1"]) == "completed"
    assert await rig.sql.fetchval("select count(*) from ff_cascade_owed") == 0


async def test_a_payload_that_kills_its_workers_ends_its_flow_too(rig: Rig, clock: Clock) -> None:
    """V-099: the end by too many reclaims moves the graph, in the call that found it."""
    nodes = {
        "a": NewExecution(lane="a", policy=ExecutionPolicy(max_reclaim_count=0)),
        "b": NewExecution(lane="b"),
    }
    flow = await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))
    claim = await rig.claim("a")
    await clock.advance(60_000)
    with pytest.raises(Contention):
        await rig.engine.claim_from_resume_grant(ResumeToken(claim.execution_id, "w2", "w2-1"))
    assert await states(rig, flow.execution_ids, "a", "b") == ["failed", "skipped"]
    assert await flow_state(rig, flow.flow_id) == "failed"


async def test_what_is_owed_twice_is_done_once(rig: Rig) -> None:
    """C-193, C-198: hearing of an ending again changes nothing."""
    flow, ids = await fan_in(rig, 2, AllOfEdges())
    await succeed(rig, "u0")
    key = parse_execution_id(ids["u0"])
    await rig.sql.execute(
        "insert into ff_cascade_owed values ($1, $2, $3, 'resolve', '', 1)",
        *parse_flow_id(flow),
        key.execution_id,
    )
    group = "select success_count, running_count from ff_edge_group"
    before = await rig.sql.fetchrow(group)
    assert await settle_owed(rig.engine._runtime, parse_flow_id(flow)) == 1
    assert await rig.sql.fetchrow(group) == before
    assert await rig.public(ids["join"]) == "waiting_children"


async def test_a_held_flow_row_is_contention_in_the_end(rig: Rig, open_engine: Callable[..., object]) -> None:
    """C-199."""
    flow, _ = await fan_in(rig, 1, AllOfEdges())
    claim = await rig.claim("u0")
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_flow_core where flow_id = $1 for update", parse_flow_id(flow).flow_id)
        async with open_engine(lock_timeout_ms=50) as impatient:  # type: ignore[attr-defined]
            with pytest.raises(Contention) as refused:
                await impatient.complete(claim.handle)
    assert refused.value.kind == ContentionKind.RETRY_EXHAUSTED
    await rig.engine.complete(claim.handle)


async def test_an_ending_that_is_owed_already_is_recorded_once(rig: Rig, clock: Clock) -> None:
    """Ended past its reclaims with the cascade owed, replayed, and ended that way again before anybody settled."""
    nodes = {
        "a": NewExecution(lane="a", policy=ExecutionPolicy(max_reclaim_count=0)),
        "b": NewExecution(lane="b"),
    }
    flow = await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))
    claim = await rig.claim("a")
    await rig.sql.execute(
        "insert into ff_cascade_owed values ($1, $2, $3, 'resolve', '', 1)",
        *parse_flow_id(flow.flow_id),
        parse_execution_id(claim.execution_id).execution_id,
    )
    await clock.advance(60_000)
    with pytest.raises(Contention) as ended:
        await rig.engine.claim_from_resume_grant(ResumeToken(claim.execution_id, "w2", "w2-1"))
    assert ended.value.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert await states(rig, flow.execution_ids, "a", "b") == ["failed", "skipped"]


async def test_a_race_lost_in_an_earlier_life_does_not_cancel_the_next(rig: Rig) -> None:
    flow, ids = await fan_in(rig, 2, AnyOfEdges())
    loser = await rig.claim("u1")
    async with rig.sql.transaction():
        await rig.engine.assert_lease(loser.handle, connection=rig.sql)
        await succeed(rig, "u0")
    await rig.engine.complete(loser.handle)
    await rig.engine.replay_execution(ids["u1"])
    await drain(rig.engine, flow)
    assert await rig.public(ids["u1"]) == "waiting"
