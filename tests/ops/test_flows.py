"""Flows by hand: create, join, set a policy, stage, apply, seal. Happy, wrong state, not found, called twice."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from ffd import (
    AllOfEdges,
    AnyOfEdges,
    Conflict,
    ConflictKind,
    Contention,
    ContentionKind,
    EdgeApplied,
    Engine,
    FailureClass,
    NotFound,
    QuorumEdges,
    State,
    StateKind,
    Validation,
    ValidationKind,
)
from ffd.core.ids import ExecutionKey, new_execution_key, new_uuid, partition_of
from tests.support import WORKER, Rig

pytestmark = pytest.mark.anyio


async def flow_with(rig: Rig, *lanes: str) -> tuple[str, list[str]]:
    """An open flow with one member per lane."""
    flow = (await rig.engine.create_flow()).flow_id
    return flow, [await rig.create(lane=lane, flow_id=flow) for lane in lanes]


async def edge(rig: Rig, flow: str, upstream: str, downstream: str) -> str:
    """Stage and apply."""
    staged = await rig.engine.stage_dependency_edge(flow, upstream, downstream)
    await rig.engine.apply_dependency_to_child(flow, staged.edge_id)
    return staged.edge_id


async def revision(rig: Rig, flow: str) -> int:
    snapshot = await rig.engine.describe_flow(flow)
    assert snapshot is not None
    return snapshot.graph_revision


async def test_create_is_idempotent_by_id(rig: Rig) -> None:
    """C-233."""
    flow = str(uuid4())
    first = await rig.engine.create_flow(flow_id=flow, kind="build", tags={"app.team": "core"})
    assert (first.flow_id, first.is_duplicate) == (flow, False)
    again = await rig.engine.create_flow(flow_id=flow, kind="other")
    assert (again.flow_id, again.is_duplicate) == (flow, True)
    snapshot = await rig.engine.describe_flow(flow)
    assert snapshot is not None
    assert (snapshot.kind, snapshot.tags, str(snapshot.state), snapshot.is_sealed) == (
        "build",
        {"app.team": "core"},
        "open",
        False,
    )


@pytest.mark.parametrize(
    ("keywords", "field"),
    [({"flow_id": "x"}, "flow_id"), ({"kind": "k" * 257}, "kind"), ({"tags": {"bad": "x"}}, "tags")],
)
async def test_bad_flows_are_refused(rig: Rig, keywords: dict[str, object], field: str) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.create_flow(**keywords)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert await rig.sql.fetchval("select count(*) from ff_flow_core") == 0


async def test_joining_raises_the_revision_once(rig: Rig) -> None:
    """C-234."""
    flow = await rig.engine.create_flow()
    key = ExecutionKey(partition_of(UUID(flow.flow_id)), new_uuid())
    execution = await rig.create(execution_id=str(key))
    await rig.engine.add_execution_to_flow(flow.flow_id, execution)
    before = await rig.fingerprint()
    assert await revision(rig, flow.flow_id) == 1
    await rig.engine.add_execution_to_flow(flow.flow_id, execution)
    assert await rig.fingerprint() == before
    assert str((await rig.core(execution))["flow_id"]) == flow.flow_id


async def test_joining_checks_both_sides_before_it_writes(rig: Rig) -> None:
    """V-087, V-089, V-090: missing flow, missing execution, another partition, another flow, a cancelled flow."""
    flow, (member,) = await flow_with(rig, "a")
    partition = (await rig.core(member))["partition_key"]
    unknown = str(ExecutionKey(partition, new_uuid()))
    stranger = str(ExecutionKey((partition + 1) % 256, new_uuid()))
    await rig.create(execution_id=stranger)
    other = (await rig.engine.create_flow()).flow_id
    before = await rig.fingerprint()
    with pytest.raises(NotFound, match="execution"):
        await rig.engine.add_execution_to_flow(flow, unknown)
    with pytest.raises(Validation) as apart:
        await rig.engine.add_execution_to_flow(flow, stranger)
    assert apart.value.field == "execution_id"
    missing = new_uuid()
    with pytest.raises(NotFound, match="flow"):
        await rig.engine.add_execution_to_flow(str(missing), str(ExecutionKey(partition_of(missing), new_uuid())))
    with pytest.raises((Conflict, Validation)):
        await rig.engine.add_execution_to_flow(other, member)
    assert await rig.fingerprint() == before
    late = str(ExecutionKey(partition, new_uuid()))
    await rig.create(execution_id=late)
    await rig.engine.cancel_flow(flow, reason="no")
    with pytest.raises(State) as ended:
        await rig.engine.add_execution_to_flow(flow, late)
    assert ended.value.kind == StateKind.FLOW_ALREADY_TERMINAL


async def test_a_member_of_another_flow_in_the_same_partition_is_refused(rig: Rig) -> None:
    flow, (member,) = await flow_with(rig, "a")
    await rig.sql.execute(
        "insert into ff_flow_core select partition_key, $2, 0, 'open', 1 from ff_flow_core where flow_id = $1",
        UUID(flow),
        (twin := _twin(flow)),
    )
    with pytest.raises(Conflict) as refused:
        await rig.engine.add_execution_to_flow(str(twin), member)
    assert refused.value.kind == ConflictKind.EXECUTION_ALREADY_IN_FLOW


def _twin(flow: str) -> UUID:
    """Another flow id in the same partition."""
    wanted = partition_of(UUID(flow))
    while partition_of(candidate := uuid4()) != wanted:
        pass
    return candidate


async def test_a_staged_edge_changes_nothing_for_the_child_an_applied_one_blocks_it(rig: Rig) -> None:
    """C-235, X-003: revision 3 after two members and an edge; one unsatisfied; not claimable until satisfied."""
    flow, (up, down) = await flow_with(rig, "up", "down")
    staged = await rig.engine.stage_dependency_edge(flow, up, down, expected_graph_revision=2)
    assert staged.graph_revision == 3
    assert await rig.public(down) == "waiting"
    applied = await rig.engine.apply_dependency_to_child(flow, staged.edge_id)
    assert applied == EdgeApplied(staged.edge_id, 1)
    before = await rig.fingerprint()
    assert await rig.engine.apply_dependency_to_child(flow, staged.edge_id) == applied
    assert await rig.fingerprint() == before
    assert await rig.state(down) == (
        "waiting_children",
        "runnable",
        "unowned",
        "blocked_by_dependencies",
        "pending_first_attempt",
    )
    assert await rig.engine.claim("down", **WORKER) is None
    with pytest.raises(Contention):
        await rig.engine.change_priority(down, 5)
    await rig.engine.complete((await rig.claim("up")).handle)
    assert (await rig.claim("down")).execution_id == down


async def test_a_stale_revision_is_refused(rig: Rig) -> None:
    """C-236."""
    flow, (up, down) = await flow_with(rig, "up", "down")
    before = await rig.fingerprint()
    with pytest.raises(Contention) as refused:
        await rig.engine.stage_dependency_edge(flow, up, down, expected_graph_revision=1)
    assert (refused.value.kind, refused.value.is_retryable) == (ContentionKind.STALE_GRAPH_REVISION, True)
    assert await rig.fingerprint() == before


async def test_cycles_self_edges_and_repeats_are_refused(rig: Rig) -> None:
    flow, (a, b, c) = await flow_with(rig, "a", "b", "c")
    first = await rig.engine.stage_dependency_edge(flow, a, b)
    await rig.engine.stage_dependency_edge(flow, b, c)
    before = await rig.fingerprint()
    for upstream, downstream, kind in (
        (c, a, ConflictKind.CYCLE_DETECTED),
        (b, a, ConflictKind.CYCLE_DETECTED),
        (a, a, ConflictKind.SELF_REFERENCING_EDGE),
        (a, b, ConflictKind.DEPENDENCY_ALREADY_EXISTS),
    ):
        with pytest.raises(Conflict) as refused:
            await rig.engine.stage_dependency_edge(flow, upstream, downstream)
        assert refused.value.kind == kind
    with pytest.raises(Conflict) as twice:
        await rig.engine.stage_dependency_edge(flow, a, c, edge_id=first.edge_id)
    assert twice.value.kind == ConflictKind.DEPENDENCY_ALREADY_EXISTS
    assert await rig.fingerprint() == before


async def test_edges_join_members_of_flows_that_exist_and_go_on(rig: Rig) -> None:
    flow, (a, b) = await flow_with(rig, "a", "b")
    stranger = await rig.create()
    for call in (
        rig.engine.stage_dependency_edge(flow, a, stranger),
        rig.engine.stage_dependency_edge(flow, str(ExecutionKey((await rig.core(a))["partition_key"], new_uuid())), b),
        rig.engine.set_edge_group_policy(flow, stranger, AllOfEdges()),
    ):
        with pytest.raises(State) as refused:
            await call
        assert refused.value.kind == StateKind.EXECUTION_NOT_IN_FLOW
    missing = new_uuid()
    member = str(ExecutionKey(partition_of(missing), new_uuid()))
    other = str(ExecutionKey(partition_of(missing), new_uuid()))
    for unknown in (
        rig.engine.stage_dependency_edge(str(missing), member, other),
        rig.engine.apply_dependency_to_child(str(missing), str(uuid4())),
        rig.engine.set_edge_group_policy(str(missing), member, AllOfEdges()),
        rig.engine.seal_flow(str(missing)),
        rig.engine.cancel_flow(str(missing), reason="x"),
        rig.engine.list_edges(str(missing)),
    ):
        with pytest.raises(NotFound, match="flow"):
            await unknown
    with pytest.raises(NotFound, match="edge"):
        await rig.engine.apply_dependency_to_child(flow, str(uuid4()))
    await rig.engine.cancel_flow(flow, reason="x")
    with pytest.raises(State) as ended:
        await rig.engine.stage_dependency_edge(flow, a, b)
    assert ended.value.kind == StateKind.FLOW_ALREADY_TERMINAL


async def test_a_policy_is_set_before_the_first_edge_and_may_be_repeated(rig: Rig) -> None:
    """C-224, C-225, V-079."""
    flow, (a, b) = await flow_with(rig, "a", "b")
    await rig.engine.set_edge_group_policy(flow, b, QuorumEdges(1, "let_run"))
    before = await rig.fingerprint()
    await rig.engine.set_edge_group_policy(flow, b, QuorumEdges(1, "let_run"))
    assert await rig.fingerprint() == before
    await rig.engine.stage_dependency_edge(flow, a, b)
    with pytest.raises(Validation) as fixed:
        await rig.engine.set_edge_group_policy(flow, b, AnyOfEdges())
    assert fixed.value.field == "policy"
    for policy, field in (
        (QuorumEdges(0), "policy.k"),
        (AnyOfEdges("maybe"), "policy.on_satisfied"),
        ("all", "policy"),
    ):
        with pytest.raises(Validation) as bad:
            await rig.engine.set_edge_group_policy(flow, a, policy)  # type: ignore[arg-type]
        assert bad.value.field == field


@pytest.mark.parametrize("ending", ["complete", "fail", "cancel"])
async def test_an_upstream_that_ended_before_counts_at_once(rig: Rig, ending: str) -> None:
    flow, (up, down) = await flow_with(rig, "up", "down")
    claim = await rig.claim("up")
    if ending == "complete":
        await rig.engine.complete(claim.handle)
    elif ending == "fail":
        await rig.engine.fail(claim.handle, "x", FailureClass.PERMANENT)
    else:
        await rig.engine.cancel_execution(up, reason="x")
    staged = await rig.engine.stage_dependency_edge(flow, up, down)
    applied = await rig.engine.apply_dependency_to_child(flow, staged.edge_id)
    assert applied.unsatisfied_count == 0
    assert await rig.public(down) == ("waiting" if ending == "complete" else "skipped")
    assert await rig.completions(down) == ([] if ending == "complete" else ["skipped"])


async def test_an_upstream_that_ends_between_stage_and_apply_counts(rig: Rig) -> None:
    flow, (up, down) = await flow_with(rig, "up", "down")
    staged = await rig.engine.stage_dependency_edge(flow, up, down)
    await rig.engine.fail((await rig.claim("up")).handle, "x", FailureClass.PERMANENT)
    assert await rig.public(down) == "waiting"
    await rig.engine.apply_dependency_to_child(flow, staged.edge_id)
    assert await rig.public(down) == "skipped"


async def test_a_child_that_was_claimed_is_neither_blocked_nor_skipped(rig: Rig) -> None:
    flow, (up, down) = await flow_with(rig, "up", "down")
    claim = await rig.claim("down")
    await edge(rig, flow, up, down)
    assert await rig.public(down) == "running"
    await rig.engine.release(claim.handle)
    assert await rig.public(down) == "waiting"
    await rig.engine.fail((await rig.claim("up")).handle, "x", FailureClass.PERMANENT)
    assert await rig.public(down) == "waiting"


async def test_a_delayed_child_waits_for_both(rig: Rig) -> None:
    flow, (up,) = await flow_with(rig, "up")
    down = await rig.create(lane="down", flow_id=flow, delay_until_ms=2**52)
    await edge(rig, flow, up, down)
    assert await rig.public(down) == "waiting_children"
    await rig.engine.complete((await rig.claim("up")).handle)
    assert await rig.public(down) == "delayed"
    assert (await rig.core(down))["delay_until_ms"] == 2**52


async def test_wait_children_waits_for_every_edge_whatever_its_outcome(rig: Rig) -> None:
    """Edges staged while it runs included; it is claimable again when all have ended, and never skipped."""
    flow, (good, bad, parent) = await flow_with(rig, "good", "bad", "parent")
    claim = await rig.claim("parent")
    await edge(rig, flow, good, parent)
    await rig.engine.stage_dependency_edge(flow, bad, parent)
    await rig.engine.wait_children(claim.handle)
    assert await rig.public(parent) == "waiting_children"
    await rig.engine.fail((await rig.claim("bad")).handle, "x", FailureClass.PERMANENT)
    assert await rig.public(parent) == "waiting_children"
    await rig.engine.complete((await rig.claim("good")).handle, b"fine")
    again = await rig.claim("parent")
    assert (again.attempt_index, again.handle.kind) == (0, "resumed")
    assert await rig.engine.get_upstream_results(parent) == {good: b"fine", bad: None}


async def test_a_sealed_flow_takes_no_members_and_ends_with_its_last(rig: Rig) -> None:
    flow, (a, b) = await flow_with(rig, "a", "b")
    await rig.engine.complete((await rig.claim("a")).handle)
    await rig.engine.seal_flow(flow)
    before = await rig.fingerprint()
    await rig.engine.seal_flow(flow)
    assert await rig.fingerprint() == before
    for call in (
        rig.engine.create_execution(flow_id=flow),
        rig.engine.add_execution_to_flow(flow, str(ExecutionKey((await rig.core(a))["partition_key"], new_uuid()))),
    ):
        with pytest.raises((Validation, NotFound)):
            await call
    states = [str((await rig.engine.describe_flow(flow)).state)]  # type: ignore[union-attr]
    claim = await rig.claim("b")
    states.append(str((await rig.engine.describe_flow(flow)).state))  # type: ignore[union-attr]
    await rig.engine.delay(claim.handle, 2**52)
    states.append(str((await rig.engine.describe_flow(flow)).state))  # type: ignore[union-attr]
    await rig.engine.cancel_execution(b, reason="x")
    states.append(str((await rig.engine.describe_flow(flow)).state))  # type: ignore[union-attr]
    assert states == ["open", "running", "blocked", "failed"]
    (event,) = await rig.operator_events(flow)
    assert (event["event_type"], event["details"]) == ("flow_ended", {"flow_id": flow, "state": "failed"})
    with pytest.raises(State) as ended:
        await rig.engine.seal_flow(flow)
    assert ended.value.kind == StateKind.FLOW_ALREADY_TERMINAL


async def test_sealing_ends_a_flow_whose_members_have_all_ended_and_an_empty_one(rig: Rig) -> None:
    flow, _ = await flow_with(rig, "a")
    await rig.engine.complete((await rig.claim("a")).handle)
    empty = (await rig.engine.create_flow()).flow_id
    for each in (flow, empty):
        await rig.engine.seal_flow(each)
        snapshot = await rig.engine.describe_flow(each)
        assert snapshot is not None
        assert (str(snapshot.state), snapshot.terminal_at_ms is not None) == ("completed", True)


async def test_a_quorum_that_its_edges_cannot_reach_is_refused_at_the_seal(rig: Rig) -> None:
    flow, (a, b) = await flow_with(rig, "a", "b")
    await rig.engine.set_edge_group_policy(flow, b, QuorumEdges(2))
    await edge(rig, flow, a, b)
    with pytest.raises(Validation) as refused:
        await rig.engine.seal_flow(flow)
    assert refused.value.kind == ValidationKind.INVALID_DEPENDENCY


async def test_unsealed_groups_wait_for_edges_to_come(rig: Rig) -> None:
    """A quorum of two with one edge is pending, not impossible, while nothing has failed."""
    flow, (a, b, c) = await flow_with(rig, "a", "b", "c")
    await rig.engine.set_edge_group_policy(flow, c, QuorumEdges(2, "let_run"))
    await edge(rig, flow, a, c)
    await rig.engine.complete((await rig.claim("a")).handle)
    assert await rig.public(c) == "waiting_children"
    await edge(rig, flow, b, c)
    await rig.engine.complete((await rig.claim("b")).handle)
    assert await rig.public(c) == "waiting"


async def test_unknown_flows_are_none(engine: Engine) -> None:
    """C-219."""
    assert await engine.describe_flow(str(uuid4())) is None
    with pytest.raises(NotFound):
        await engine.get_upstream_results(str(new_execution_key()))
