"""Members of one flow that end at the same time: each child is decided once, nothing is owed, nobody is stuck (I2, I6).

Endings of one flow queue at its row. In some rounds the test holds that row until all callers stand there, so that each
of them has looked at the world before any other changed it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import anyio
import pytest

from ffd import (
    AllOfEdges,
    AnyOfEdges,
    Cancelled,
    CancelPolicy,
    Claim,
    Contention,
    ContentionKind,
    EdgeApplied,
    EngineError,
    ExecutionPolicy,
    FailureClass,
    FlowCancelHeader,
    FlowCancelled,
    FlowSpec,
    FlowState,
    NewExecution,
    QuorumEdges,
    State,
    StateKind,
    TerminalFailed,
)
from ffd.core.flows import EdgePolicy
from ffd.core.ids import new_uuid, parse_execution_id
from ffd.ops.cascade import settle_owed
from ffd.ops.edges import APPLY_EDGE, BLOCK_CHILD, STAGE_EDGE
from ffd.ops.flow_lock import FlowKey, parse_flow_id
from ffd.ops.flows import JOIN_FLOW
from ffd.ops.take_over import TAKE_EXPIRED
from ffd.telemetry.metrics import CASCADE_EXECUTIONS
from tests.concurrency.sessions import (
    INVARIANTS,
    Call,
    assert_invariants,
    both_ways,
    exec_row,
    held,
    race,
    until,
    until_blocked,
)
from tests.support import OTHER, WORKER, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

REASON = "enough of this"
UP, DOWN = "up", "down"

# Each query finds executions (or what stands in their place) for which a rule of flows does not hold.
RULES = {
    "I6: an edge out of who has ended is resolved": """
        select g.upstream_eid as id from ff_edge g
        join ff_exec_core u on u.partition_key = g.partition_key and u.execution_id = g.upstream_eid
        where g.resolution is null and u.lifecycle_phase in ('terminal', 'cancelled')
        """,
    "I6: nothing is owed": "select execution_id as id from ff_cascade_owed",
    "I6: nobody is blocked by resolved edges": """
        select e.execution_id as id from ff_exec_core e
        where e.eligibility_state = 'blocked_by_dependencies' and not exists (
          select 1 from ff_edge g where g.partition_key = e.partition_key and g.flow_id = e.flow_id
            and g.downstream_eid = e.execution_id and g.resolution is null)
        """,
    "an edge is resolved by what became of its upstream": """
        select g.edge_id as id from ff_edge g
        join ff_exec_core u on u.partition_key = g.partition_key and u.execution_id = g.upstream_eid
        where g.resolution is not null
          and g.resolution <> case u.public_state when 'completed' then 'satisfied' else 'impossible' end
        """,
    "a group counts each applied edge once": """
        select g.downstream_eid as id from ff_edge_group g
        left join ff_edge e on e.partition_key = g.partition_key and e.flow_id = g.flow_id
          and e.downstream_eid = g.downstream_eid and e.policy ->> 'edge_state' = 'applied'
        left join ff_exec_core u on u.partition_key = e.partition_key and u.execution_id = e.upstream_eid
        group by g.partition_key, g.flow_id, g.downstream_eid
        having g.success_count <> count(*) filter (where e.resolution = 'satisfied')
            or g.skip_count <> count(*) filter (where e.resolution = 'impossible' and u.public_state = 'skipped')
            or g.fail_count <> count(*) filter (where e.resolution = 'impossible' and u.public_state <> 'skipped')
            or g.running_count <> count(*) filter (where e.edge_id is not null and e.resolution is null)
        """,
    "a child that may run has what its policy asks for": """
        select e.execution_id as id from ff_exec_core e
        join ff_edge_group g on g.partition_key = e.partition_key and g.flow_id = e.flow_id
          and g.downstream_eid = e.execution_id
        where e.public_state in ('waiting', 'running', 'completed')
          and g.success_count < case g.policy ->> 'kind' when 'any_of' then 1
                when 'quorum' then (g.policy ->> 'k')::int
                else g.success_count + g.fail_count + g.skip_count + g.running_count end
        """,
    "a sealed flow ends with its last member, and tells of it once": """
        select f.flow_id as id from ff_flow_core f
        cross join lateral (
          select count(*) as n from ff_exec_core e where e.partition_key = f.partition_key and e.flow_id = f.flow_id
            and e.lifecycle_phase not in ('terminal', 'cancelled')) m
        cross join lateral (
          select count(*) as n from ff_operator_event o
          where o.execution_id = f.flow_id::text and o.event_type = 'flow_ended') o
        where (f.terminal_at_ms is null and f.sealed_at_ms is not null and m.n = 0)
           or (f.public_flow_state in ('completed', 'failed') and m.n > 0)
           or o.n <> case when f.terminal_at_ms is null then 0 else 1 end
        """,
    "a backlog has a header exactly as long as it has members": """
        select coalesce(b.flow_id, m.flow_id) as id from ff_cancel_backlog b
        full join ff_cancel_backlog_member m on m.partition_key = b.partition_key and m.flow_id = b.flow_id
        where b.flow_id is null or m.flow_id is null
        """,
}


# All of them in one look: a race has to leave the machine to its rounds.
LOOK = " union all ".join(
    f"select '{name}' as name, r.{column}::text as id from ({violations}) r"
    for rules, column in ((INVARIANTS, "execution_id"), (RULES, "id"))
    for name, violations in rules.items()
)


async def check(rig: Rig) -> None:
    """What must hold over everything stored, after every round."""
    rows = await rig.sql.fetch(LOOK)
    assert not rows, [(row["name"], row["id"]) for row in rows[:5]]


class Graph(NamedTuple):
    """Parents that run, and the child that waits for them."""

    flow: FlowKey
    ids: dict[str, str]
    claims: dict[str, Claim]

    @property
    def flow_id(self) -> str:
        return str(self.flow.flow_id)

    @property
    def child(self) -> str:
        return self.ids["child"]


async def running_parents(rig: Rig, names: str, policy: EdgePolicy, *, more: Mapping[str, str] | None = None) -> Graph:
    """A flow of one child under parents that are claimed. `more`: further children, by the parent they hang on."""
    nodes = {name: NewExecution(lane=UP) for name in names} | {"child": NewExecution(lane=DOWN)}
    edges = [(name, "child") for name in names]
    for name, parent in (more or {}).items():
        nodes[name] = NewExecution(lane=DOWN)
        edges.append((parent, name))
    submitted = await rig.engine.submit_flow(FlowSpec(nodes, edges, policies={"child": policy}))
    claims = {claim.execution_id: claim for claim in await rig.engine.claim_many(UP, len(names), **WORKER)}
    ids = submitted.execution_ids
    return Graph(parse_flow_id(submitted.flow_id), ids, {name: claims[ids[name]] for name in names})


async def at_the_flow(rig: Rig, dsn: str, flow: FlowKey, rng: random.Random, *calls: Call) -> list[Any]:
    """Let the calls collide: now and then all of them stand at the flow's row before the first goes on."""
    if rng.random() < 0.6:
        return await race(rng, *calls)
    row = (
        f"select 1 from ff_flow_core where partition_key = {flow.partition_key}"
        f" and flow_id = '{flow.flow_id}' for update"
    )
    async with held(dsn, row) as holder:

        async def release() -> None:
            await until_blocked(rig.sql, "lock_flow", count=len(calls))
            await holder.execute("rollback")

        return (await race(rng, *calls, release))[:-1]


async def states(rig: Rig, graph: Graph, names: str) -> str:
    """What became of the members of these names, a letter each."""
    return "".join([(await rig.state(graph.ids[name]))[0][0] for name in names])


async def events_of_flow(rig: Rig, graph: Graph) -> list[str]:
    rows = await rig.sql.fetch(
        "select event_type from ff_operator_event where execution_id = $1 order by event_id", graph.flow_id
    )
    return [row["event_type"] for row in rows]


async def operator_events(rig: Rig, execution_id: str) -> list[str]:
    rows = await rig.sql.fetch(
        "select event_type from ff_operator_event where execution_id = $1 order by event_id",
        str(parse_execution_id(execution_id).execution_id),
    )
    return [row["event_type"] for row in rows]


def released() -> float:
    """How many children this process has released."""
    return float(CASCADE_EXECUTIONS.labels("released")._value.get())


def is_lost(answer: object) -> bool:
    return isinstance(answer, Contention) and answer.kind == ContentionKind.LEASE_CONFLICT


async def finish(rig: Rig, rng: random.Random, graph: Graph) -> None:
    """Three workers want the child, one gets it; its end is the end of the flow."""
    answers = await race(rng, *[partial(rig.engine.claim, DOWN, **OTHER)] * 3)
    (claim,) = [answer for answer in answers if answer is not None]
    assert claim.execution_id == graph.child
    assert claim.lease_epoch == 1
    await rig.engine.complete(claim.handle)
    assert await rig.completions(graph.child) == ["success"]


# Policy, how many parents there are, how many of them succeed when all try at once.
POLICIES = [
    pytest.param(AllOfEdges(), "ab", 2, id="all_of"),
    pytest.param(AnyOfEdges("cancel_remaining"), "ab", 1, id="any_of_cancel_remaining"),
    pytest.param(AnyOfEdges("let_run"), "ab", 2, id="any_of_let_run"),
    pytest.param(QuorumEdges(2, "cancel_remaining"), "abc", 2, id="quorum_cancel_remaining"),
    pytest.param(QuorumEdges(2, "let_run"), "abc", 3, id="quorum_let_run"),
]


@pytest.mark.parametrize(("policy", "names", "succeed"), POLICIES)
async def test_parents_that_complete_at_once_release_their_child_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, policy: EdgePolicy, names: str, succeed: int
) -> None:
    """The group counts each of them, fires once, and cancels who lost once."""
    endings: Counter[str] = Counter()
    ways = 2 if succeed < len(names) else 1
    while both_ways(endings, rounds, ways):
        graph = await running_parents(rig, names, policy)
        before = released()
        answers = await at_the_flow(
            rig, dsn, graph.flow, rng, *(partial(rig.engine.complete, graph.claims[name].handle) for name in names)
        )
        assert released() - before == 1
        lost = [name for name, answer in zip(names, answers, strict=True) if answer is not None]
        assert all(is_lost(answer) for answer in answers if answer is not None), answers
        assert len(names) - len(lost) == succeed
        endings["".join(lost)] += 1
        for name in names:
            is_lost_one = name in lost
            assert await rig.completions(graph.ids[name]) == ["cancelled" if is_lost_one else "success"]
            cause = "cancelled" if is_lost_one else "completed"
            assert await rig.lease_events(graph.ids[name]) == [("acquired", None), ("revoked", cause)]
            assert (await rig.core(graph.ids[name]))["cancelled_by"] == ("flow_cascade" if is_lost_one else None)
        group = await rig.sql.fetchrow("select * from ff_edge_group where flow_id = $1", graph.flow.flow_id)
        assert group is not None
        counters = (group["success_count"], group["fail_count"], group["skip_count"], group["running_count"])
        assert counters == (succeed, len(lost), 0, 0)
        await check(rig)
        await finish(rig, rng, graph)
        assert await events_of_flow(rig, graph) == ["flow_ended"]
        await check(rig)


FAILING = [
    # Policy, parents, and by which of them was first: what became of them and of the child.
    pytest.param(AllOfEdges(), "ab", {"cfs"}, id="all_of"),
    pytest.param(AnyOfEdges("let_run"), "ab", {"cfw"}, id="any_of_let_run"),
    pytest.param(AnyOfEdges("cancel_remaining"), "ab", {"cfw", "ccw"}, id="any_of_cancel_remaining"),
    pytest.param(QuorumEdges(2, "let_run"), "ab", {"cfs"}, id="quorum_let_run"),
    pytest.param(QuorumEdges(2, "cancel_remaining"), "ab", {"cfs"}, id="quorum_cancel_remaining"),
]


@pytest.mark.parametrize(("policy", "names", "expected"), FAILING)
async def test_a_parent_that_completes_against_one_that_fails_decides_the_child_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, policy: EdgePolicy, names: str, expected: set[str]
) -> None:
    """Whichever is first, the child's fate is the one its policy gives for both together, or the loser is cancelled."""
    endings: Counter[str] = Counter()
    impossible = isinstance(policy, QuorumEdges) and policy.on_satisfied == "cancel_remaining"
    while both_ways(endings, rounds, 2 if impossible else len(expected)):
        graph = await running_parents(rig, names, policy, more={"grandchild": "child"})
        completed, failed = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            partial(rig.engine.complete, graph.claims["a"].handle),
            partial(rig.engine.fail, graph.claims["b"].handle, "no", FailureClass.PERMANENT),
        )
        child = (await rig.state(graph.child))[0]
        if impossible and completed is not None:
            # The failure made the quorum impossible: there was nothing left to complete for.
            endings["impossible"] += 1
            assert is_lost(completed)
            assert (await rig.core(graph.ids["a"]))["cancellation_reason"] == "sibling_quorum_impossible"
            assert (await rig.state(graph.ids["a"]))[0] == "cancelled"
        else:
            assert completed is None
            assert (await rig.state(graph.ids["a"]))[0] == "completed"
            endings[await states(rig, graph, "ab") + child[0]] += 1
        if isinstance(failed, EngineError):
            assert is_lost(failed)
            assert (await rig.state(graph.ids["b"]))[0] == "cancelled"
        else:
            assert failed == TerminalFailed()
            assert (await rig.state(graph.ids["b"]))[0] == "failed"
        assert endings.keys() - {"impossible"} <= expected
        for name in names:
            assert len(await rig.completions(graph.ids[name])) == 1
        if child == "skipped":
            assert await rig.completions(graph.child) == ["skipped"]
            assert await rig.completions(graph.ids["grandchild"]) == ["skipped"]
            assert await events_of_flow(rig, graph) == ["flow_ended"]
        else:
            assert (await rig.state(graph.ids["grandchild"]))[0] == "waiting_children"
            await finish(rig, rng, graph)
            await rig.engine.complete((await rig.claim(DOWN)).handle)
        await check(rig)


async def test_one_ending_that_is_repeated_by_its_owner_releases_the_child_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """I2: the same `complete`, three times at once, is one ending to the flow too."""
    for _ in range(rounds):
        graph = await running_parents(rig, "a", AllOfEdges())
        before = released()
        complete = partial(rig.engine.complete, graph.claims["a"].handle, b"r")
        assert await at_the_flow(rig, dsn, graph.flow, rng, complete, complete, complete) == [None] * 3
        assert released() - before == 1
        await check(rig)
        await finish(rig, rng, graph)


@pytest.mark.parametrize("policy", list(CancelPolicy))
async def test_complete_against_cancel_flow_has_exactly_one_outcome_per_member(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, policy: CancelPolicy
) -> None:
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds, 1 if policy != CancelPolicy.CANCEL_ALL else 2):
        graph = await running_parents(rig, "ab", AnyOfEdges("let_run"))
        completed, cancelled = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            partial(rig.engine.complete, graph.claims["a"].handle),
            partial(rig.engine.cancel_flow, graph.flow_id, policy=policy, reason=REASON, wait_ms=5000),
        )
        assert isinstance(cancelled, FlowCancelled)
        assert (cancelled.policy, cancelled.pending_execution_ids) == (policy, [])
        assert (completed is None) == (await rig.completions(graph.ids["a"]) == ["success"])
        if policy == CancelPolicy.CANCEL_ALL:
            assert completed is None or is_lost(completed)
            assert (await states(rig, graph, "b"), (await rig.state(graph.child))[0]) == ("c", "cancelled")
        else:
            assert completed is None, "whoever runs is spared"
            assert (await rig.state(graph.ids["b"]))[0] == "running"
            expected = "cancelled" if policy == CancelPolicy.CANCEL_PENDING else "waiting"
            assert (await rig.state(graph.child))[0] == expected
            await rig.engine.complete(graph.claims["b"].handle)
            if expected == "waiting":
                await rig.engine.complete((await rig.claim(DOWN)).handle)
        endings["lost" if completed else "completed"] += 1
        assert await events_of_flow(rig, graph) == ["flow_cancel_requested", "flow_ended"]
        snapshot = await rig.engine.describe_flow(graph.flow_id)
        assert snapshot is not None
        assert snapshot.state == FlowState.CANCELLED
        await check(rig)


async def test_the_last_complete_against_cancel_flow_ends_the_flow_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """The flow is completed, and the cancel told so, or it is cancelled with its last member."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        submitted = await rig.engine.submit_flow(FlowSpec({"a": NewExecution(lane=UP)}))
        flow = parse_flow_id(submitted.flow_id)
        claim = await rig.claim(UP)
        completed, cancelled = await at_the_flow(
            rig,
            dsn,
            flow,
            rng,
            partial(rig.engine.complete, claim.handle),
            partial(rig.engine.cancel_flow, submitted.flow_id, reason=REASON),
        )
        snapshot = await rig.engine.describe_flow(submitted.flow_id)
        assert snapshot is not None
        endings[snapshot.state] += 1
        if completed is None:
            assert isinstance(cancelled, State)
            assert cancelled.kind == StateKind.FLOW_ALREADY_TERMINAL
            assert snapshot.state == FlowState.COMPLETED
        else:
            assert is_lost(completed)
            assert isinstance(cancelled, FlowCancelled)
            assert snapshot.state == FlowState.CANCELLED
        await check(rig)


async def test_claims_against_cancel_flow_leave_no_owner_behind(rig: Rig, rng: random.Random, rounds: int) -> None:
    """A member whose row a claim holds goes to the backlog, and is cancelled within the time the caller waits."""
    for _ in range(rounds):
        nodes = {str(at): NewExecution(lane=UP) for at in range(6)}
        submitted = await rig.engine.submit_flow(FlowSpec(nodes))
        *claims, cancelled = await race(
            rng,
            *[partial(rig.engine.claim, UP, **WORKER)] * 6,
            partial(rig.engine.cancel_flow, submitted.flow_id, reason=REASON, wait_ms=10_000),
        )
        assert isinstance(cancelled, FlowCancelled)
        assert cancelled.pending_execution_ids == []
        owners = {claim.execution_id: claim for claim in claims if claim is not None}
        for execution_id in submitted.execution_ids.values():
            assert await rig.completions(execution_id) == ["cancelled"]
            events = [event for event, _ in await rig.lease_events(execution_id)]
            assert events == (["acquired", "revoked"] if execution_id in owners else [])
        for answer in await rig.engine.complete_many([(claim.handle, None) for claim in owners.values()]):
            assert is_lost(answer)
        await check(rig)


@pytest.mark.parametrize("policy", [AllOfEdges(), QuorumEdges(4, "cancel_remaining")], ids=["all_of", "quorum"])
async def test_batches_of_one_flows_members_complete_each_of_them_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, policy: EdgePolicy
) -> None:
    """Two `complete_many` that overlap, in different orders: every item is answered by what became of it."""
    names = "abcdef"
    for _ in range(rounds):
        graph = await running_parents(rig, names, policy)
        batches = [rng.sample(names, 4), rng.sample(names, 4)]
        missing = sorted(set(names) - {name for batch in batches for name in batch})
        if isinstance(policy, AllOfEdges) or len(missing) > 2:
            batches[0] += missing
        before = released()
        answers = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            *(
                partial(rig.engine.complete_many, [(graph.claims[name].handle, None) for name in batch])
                for batch in batches
            ),
        )
        assert released() - before == 1
        done = []
        for name in names:
            (ending,) = await rig.completions(graph.ids[name])
            assert ending in ("success", "cancelled")
            if ending == "success":
                done.append(name)
        for batch, items in zip(batches, answers, strict=True):
            for name, answer in zip(batch, items, strict=True):
                assert answer is None if name in done else is_lost(answer)
        assert len(done) == 6 if isinstance(policy, AllOfEdges) else len(done) >= 4
        await check(rig)
        await finish(rig, rng, graph)
        await check(rig)


async def open_pair(rig: Rig) -> Graph:
    """An open flow with an edge that is staged and not applied; the upstream runs."""
    flow_id = (await rig.engine.create_flow()).flow_id
    ids = {UP: await rig.create(lane=UP, flow_id=flow_id), "child": await rig.create(lane=DOWN, flow_id=flow_id)}
    return Graph(parse_flow_id(flow_id), ids, {UP: await rig.claim(UP)})


@pytest.mark.parametrize("is_success", [True, False], ids=["complete", "fail"])
async def test_applying_an_edge_against_the_end_of_its_upstream_blocks_nobody_for_ever(
    rig: Rig, dsn: str, rng: random.Random, rounds: int, is_success: bool
) -> None:
    """I6: seen before or after, the ending counts; the child is never claimable between the two."""
    endings: Counter[int] = Counter()
    while both_ways(endings, rounds):
        graph = await open_pair(rig)
        staged = await rig.engine.stage_dependency_edge(graph.flow_id, graph.ids[UP], graph.child)
        early: list[Any] = []

        async def apply(graph: Graph = graph, edge_id: str = staged.edge_id, early: list[Any] = early) -> EdgeApplied:
            applied = await rig.engine.apply_dependency_to_child(graph.flow_id, edge_id)
            # The edge counts from here on.
            claim = await rig.engine.claim(DOWN, **OTHER)
            upstream = await rig.engine.describe_execution(graph.ids[UP])
            early.append((claim, None if upstream is None else upstream.public_state))
            return applied

        ending: Call = partial(rig.engine.complete, graph.claims[UP].handle)
        if not is_success:
            ending = partial(rig.engine.fail, graph.claims[UP].handle, "no", FailureClass.PERMANENT)
        applied, ended = await at_the_flow(rig, dsn, graph.flow, rng, apply, ending)
        assert not isinstance(ended, EngineError)
        assert isinstance(applied, EdgeApplied)
        assert applied.unsatisfied_count in (0, 1)
        endings[applied.unsatisfied_count] += 1
        ((claim, upstream),) = early
        assert claim is None or (upstream == "completed" and is_success)
        child = (await rig.state(graph.child))[0]
        if is_success:
            assert child == ("waiting" if claim is None else "running")
            await rig.engine.complete((claim or await rig.claim(DOWN)).handle)
        else:
            assert child == "skipped"
        await rig.engine.seal_flow(graph.flow_id)
        snapshot = await rig.engine.describe_flow(graph.flow_id)
        assert snapshot is not None
        assert snapshot.state == (FlowState.COMPLETED if is_success else FlowState.FAILED)
        await check(rig)


async def test_applying_an_edge_against_a_claim_of_the_child_blocks_it_or_comes_too_late(
    rig: Rig, rng: random.Random, rounds: int
) -> None:
    """I1: a child is blocked or claimed, never both."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        graph = await open_pair(rig)
        staged = await rig.engine.stage_dependency_edge(graph.flow_id, graph.ids[UP], graph.child)
        applied, claim = await race(
            rng,
            partial(rig.engine.apply_dependency_to_child, graph.flow_id, staged.edge_id),
            partial(rig.engine.claim, DOWN, **OTHER),
        )
        assert applied.unsatisfied_count == 1
        endings["blocked" if claim is None else "claimed"] += 1
        child = (await rig.state(graph.child))[0]
        assert child == ("waiting_children" if claim is None else "running")
        if claim is not None:
            await rig.engine.complete(claim.handle)
        await rig.engine.complete(graph.claims[UP].handle)
        if claim is None:
            await rig.engine.complete((await rig.claim(DOWN)).handle)
        await rig.engine.seal_flow(graph.flow_id)
        await check(rig)


async def test_staging_an_edge_against_the_end_of_its_upstream_never_loses_the_ending(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    for _ in range(rounds):
        graph = await open_pair(rig)
        staged, completed = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            partial(rig.engine.stage_dependency_edge, graph.flow_id, graph.ids[UP], graph.child),
            partial(rig.engine.complete, graph.claims[UP].handle),
        )
        assert completed is None
        applied = await rig.engine.apply_dependency_to_child(graph.flow_id, staged.edge_id)
        assert applied.unsatisfied_count == 0
        await rig.engine.complete((await rig.claim(DOWN)).handle)
        await rig.engine.seal_flow(graph.flow_id)
        await check(rig)


async def test_wait_children_against_the_end_of_the_upstream_wakes_up(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """I6: a running child that begins to wait while its last upstream ends is claimable afterwards."""
    for _ in range(rounds):
        graph = await open_pair(rig)
        child = await rig.claim(DOWN)
        staged = await rig.engine.stage_dependency_edge(graph.flow_id, graph.ids[UP], graph.child)
        await rig.engine.apply_dependency_to_child(graph.flow_id, staged.edge_id)
        fails = rng.random() < 0.5
        ending: Call = partial(rig.engine.complete, graph.claims[UP].handle)
        if fails:
            ending = partial(rig.engine.fail, graph.claims[UP].handle, "no", FailureClass.PERMANENT)
        waited, ended = await race(rng, partial(rig.engine.wait_children, child.handle), ending)
        assert waited is None
        assert not isinstance(ended, EngineError)
        again = await rig.claim(DOWN)
        assert (again.execution_id, again.attempt_index) == (graph.child, child.attempt_index)
        assert again.lease_epoch > child.lease_epoch
        assert sorted(await rig.completions(graph.ids[UP])) == ["failed" if fails else "success"]
        await rig.engine.complete(again.handle)
        await rig.engine.seal_flow(graph.flow_id)
        assert not await rig.sql.fetch("select 1 from ff_cascade_owed")
        await assert_invariants(rig.sql)


@pytest.mark.parametrize("ending", ["complete", "cancel", "fail"])
async def test_joining_a_flow_against_the_end_of_the_execution_loses_neither(
    rig: Rig, rng: random.Random, rounds: int, ending: str
) -> None:
    """It ends as a solo execution and joins, or joins and ends as a member; the flow ends with it either way."""
    endings: Counter[object] = Counter()
    while both_ways(endings, rounds):
        flow = parse_flow_id((await rig.engine.create_flow()).flow_id)
        flow_id = str(flow.flow_id)
        execution_id = await rig.create(lane=UP, execution_id=f"{{fp:{flow.partition_key}}}:{new_uuid()}")
        claim = await rig.claim(UP)
        call: Call = partial(rig.engine.complete, claim.handle)
        if ending == "cancel":
            call = partial(rig.engine.cancel_execution, execution_id, reason=REASON)
        elif ending == "fail":
            call = partial(rig.engine.fail, claim.handle, "no", FailureClass.PERMANENT)
        joined, ended = await race(rng, partial(rig.engine.add_execution_to_flow, flow_id, execution_id), call)
        assert joined is None
        assert ended is None or isinstance(ended, TerminalFailed | Cancelled)
        assert len(await rig.completions(execution_id)) == 1
        told = await rig.sql.fetchval(
            "select flow_id from ff_completion_event where execution_id = $1",
            parse_execution_id(execution_id).execution_id,
        )
        endings["solo" if told is None else "member"] += 1
        # Whoever hangs on it from now on finds it ended.
        child = await rig.create(lane=DOWN, flow_id=flow_id)
        staged = await rig.engine.stage_dependency_edge(flow_id, execution_id, child)
        assert (await rig.engine.apply_dependency_to_child(flow_id, staged.edge_id)).unsatisfied_count == 0
        if ending == "complete":
            await rig.engine.complete((await rig.claim(DOWN)).handle)
        await rig.engine.seal_flow(flow_id)
        snapshot = await rig.engine.describe_flow(flow_id)
        assert snapshot is not None
        assert snapshot.state == (FlowState.COMPLETED if ending == "complete" else FlowState.FAILED)
        assert (snapshot.node_count, sum(snapshot.members.values())) == (2, 2)
        await check(rig)


async def test_a_cancel_that_waited_while_its_execution_joined_a_flow_tells_the_flow(
    rig: Rig, dsn: str, rounds: int
) -> None:
    """It looked up a solo execution; when it gets the row, a child hangs on it."""
    for _ in range(rounds // 4):
        flow = parse_flow_id((await rig.engine.create_flow()).flow_id)
        key = parse_execution_id(await rig.create(lane=UP, execution_id=f"{{fp:{flow.partition_key}}}:{new_uuid()}"))
        child = await rig.create(lane=DOWN, flow_id=str(flow.flow_id))
        edge = (*flow, new_uuid())
        downstream = parse_execution_id(child).execution_id
        async with held(dsn, exec_row(str(key))) as holder, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(rig.engine.cancel_execution, str(key), reason=REASON))
            await until_blocked(rig.sql, "lock_member")
            # Joined, with an edge that is applied, all at once.
            await holder.execute(JOIN_FLOW.sql, *key, flow.flow_id)
            await holder.execute(STAGE_EDGE.sql, *edge, key.execution_id, downstream)
            await holder.execute(APPLY_EDGE.sql, *edge, downstream)
            await holder.execute(BLOCK_CHILD.sql, flow.partition_key, downstream)
            await holder.execute("commit")
        assert await rig.completions(str(key)) == ["cancelled"]
        assert await rig.completions(child) == ["skipped"]
        await check(rig)


async def backlog(rig: Rig, graph: Graph) -> tuple[int, int]:
    """How many headers and how many members the flow's cancel backlog has."""
    return (
        await rig.sql.fetchval("select count(*) from ff_cancel_backlog where flow_id = $1", graph.flow.flow_id),
        await rig.sql.fetchval("select count(*) from ff_cancel_backlog_member where flow_id = $1", graph.flow.flow_id),
    )


async def test_acks_at_once_delete_the_header_exactly_with_the_last_member(
    rig: Rig, rng: random.Random, rounds: int
) -> None:
    """Show C-091 under concurrency."""
    for at in range(rounds):
        graph = await running_parents(rig, "abc", AllOfEdges())
        header = await rig.engine.cancel_flow_header(
            graph.flow_id, reason=REASON, cancellation_policy=CancelPolicy.CANCEL_ALL
        )
        assert isinstance(header, FlowCancelHeader)
        ids = header.member_execution_ids
        assert sorted(ids) == sorted(graph.ids.values())
        assert await backlog(rig, graph) == (1, 4)
        ack = partial(rig.engine.ack_cancel_member, graph.flow_id)
        if at % 2:
            kept = rng.choice(ids)
            first = [one for one in ids if one != kept]
            await race(rng, *(partial(ack, one) for one in first * 2))
            assert await backlog(rig, graph) == (1, 1)
            await race(rng, partial(ack, kept), partial(ack, kept))
        else:
            await race(rng, *(partial(ack, one) for one in ids))
        assert await backlog(rig, graph) == (0, 0)
        assert await events_of_flow(rig, graph) == ["flow_cancel_requested", "flow_ended"]
        await check(rig)


async def test_two_cancels_of_one_flow_cancel_each_member_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """Both are answered with the policy of the first; its events are written once."""
    winners: Counter[CancelPolicy] = Counter()
    while both_ways(winners, rounds):
        graph = await running_parents(rig, "ab", AllOfEdges())
        answers = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            *(
                partial(rig.engine.cancel_flow, graph.flow_id, policy=policy, reason=REASON)
                for policy in (CancelPolicy.CANCEL_ALL, CancelPolicy.CANCEL_PENDING)
            ),
        )
        assert all(isinstance(answer, FlowCancelled) for answer in answers), answers
        (policy,) = {answer.policy for answer in answers}
        winners[policy] += 1
        assert [answer.pending_execution_ids for answer in answers] == [[], []]
        is_all = policy == CancelPolicy.CANCEL_ALL
        for name in "ab":
            assert await rig.completions(graph.ids[name]) == (["cancelled"] if is_all else [])
        assert await rig.completions(graph.child) == ["cancelled"]
        assert await events_of_flow(rig, graph) == ["flow_cancel_requested", "flow_ended"]
        for name in "" if is_all else "ab":
            await rig.engine.complete(graph.claims[name].handle)
        await check(rig)


async def test_cancelling_a_member_against_its_siblings_complete_ends_it_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """Cancelled by the operator, or because it lost to its sibling; the operator is told it is cancelled."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        graph = await running_parents(rig, "ab", AnyOfEdges("cancel_remaining"), more={"of_b": "b"})
        before = released()
        completed, cancelled = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            partial(rig.engine.complete, graph.claims["a"].handle),
            partial(rig.engine.cancel_execution, graph.ids["b"], reason=REASON),
        )
        assert completed is None
        assert isinstance(cancelled, Cancelled)
        assert released() - before == 1
        row = await rig.core(graph.ids["b"])
        endings[row["cancelled_by"]] += 1
        is_operator = row["cancelled_by"] != "flow_cascade"
        assert await operator_events(rig, graph.ids["b"]) == (["cancelled"] if is_operator else [])
        assert row["cancellation_reason"] == (REASON if is_operator else "sibling_quorum_satisfied")
        assert await rig.completions(graph.ids["b"]) == ["cancelled"]
        assert await rig.lease_events(graph.ids["b"]) == [("acquired", None), ("revoked", "cancelled")]
        assert await rig.completions(graph.ids["of_b"]) == ["skipped"]
        await finish(rig, rng, graph)
        await check(rig)


async def test_a_loser_whose_row_is_held_is_owed_and_cancelled_later(rig: Rig, rng: random.Random, rounds: int) -> None:
    """Calls that hold the row of a loser, against the sibling that beats it: skipped then, cancelled afterwards."""
    for _ in range(rounds):
        graph = await running_parents(rig, "ab", AnyOfEdges("cancel_remaining"))
        loser = graph.claims["b"].handle
        calls: list[Call] = [
            partial(rig.engine.release, loser),
            partial(rig.engine.revoke_lease, graph.ids["b"], reason=REASON),
            partial(rig.engine.claim, UP, **OTHER),
            partial(rig.engine.progress, loser, percent=1),
        ]
        completed, *_ = await race(rng, partial(rig.engine.complete, graph.claims["a"].handle), *calls)
        assert completed is None
        # What the daemon does with the loser that somebody held at that moment.
        while await settle_owed(rig.engine._runtime, graph.flow):
            pass
        assert (await rig.state(graph.ids["b"]))[0] == "cancelled"
        assert await rig.completions(graph.ids["b"]) == ["cancelled"]
        await check(rig)
        await finish(rig, rng, graph)


async def test_an_owed_cancel_against_the_losers_complete_has_exactly_one_outcome(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """The winner does not wait for a row that somebody holds; until the cancel is made up for, the loser may finish."""
    endings: Counter[str] = Counter()
    while both_ways(endings, rounds):
        graph = await running_parents(rig, "ab", AnyOfEdges("cancel_remaining"))
        async with held(dsn, exec_row(graph.ids["b"])):
            await rig.engine.complete(graph.claims["a"].handle)
        assert (await rig.state(graph.child))[0] == "waiting"
        owed = await rig.sql.fetch("select execution_id, work from ff_cascade_owed")
        assert [tuple(row) for row in owed] == [(parse_execution_id(graph.ids["b"]).execution_id, "cancel")]
        settled, completed = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            partial(settle_owed, rig.engine._runtime, graph.flow),
            partial(rig.engine.complete, graph.claims["b"].handle),
        )
        assert settled == 1
        assert completed is None or is_lost(completed)
        ending = "cancelled" if completed else "success"
        endings[ending] += 1
        assert await rig.completions(graph.ids["b"]) == [ending]
        await check(rig)
        await finish(rig, rng, graph)
        await check(rig)


async def swept(rig: Rig, lane: str) -> str:
    """Claim from a lane and vanish: a member that failed by its lost lease, and whose cascade is owed to its flow."""
    claim = await rig.claim(lane, lease_ttl_ms=1)
    key = parse_execution_id(claim.execution_id)

    async def is_taken() -> bool:
        rows = await rig.sql.fetch(TAKE_EXPIRED.sql, *key, "w", "w-1", 1000)
        return bool(rows)

    await until(is_taken, "the lease has run out")
    assert (await rig.state(claim.execution_id))[0] == "failed"
    assert await rig.sql.fetchval("select count(*) from ff_cascade_owed") == 1
    return claim.execution_id


LOST_AT_ONCE = ExecutionPolicy(max_reclaim_count=0)


async def test_two_settlers_and_two_endings_carry_an_owed_ending_through_once(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """Double ownership of a partition wastes work and nothing else: both children are decided once."""
    for _ in range(rounds):
        nodes = {"a": NewExecution(lane="a", policy=LOST_AT_ONCE)}
        nodes |= {name: NewExecution(lane=UP) for name in "bc"}
        nodes |= {"child": NewExecution(lane=DOWN), "all": NewExecution(lane=DOWN)}
        edges = [(parent, child) for parent in "abc" for child in ("child", "all")]
        submitted = await rig.engine.submit_flow(FlowSpec(nodes, edges, policies={"child": QuorumEdges(2, "let_run")}))
        claims = await rig.engine.claim_many(UP, 2, **WORKER)
        graph = Graph(parse_flow_id(submitted.flow_id), submitted.execution_ids, {})
        await swept(rig, "a")
        before = released()
        settle = partial(settle_owed, rig.engine._runtime, graph.flow)
        answers = await at_the_flow(
            rig, dsn, graph.flow, rng, settle, settle, *(partial(rig.engine.complete, claim.handle) for claim in claims)
        )
        assert sorted(answers[:2]) == [0, 1]
        assert answers[2:] == [None, None]
        assert released() - before == 1
        assert await rig.completions(graph.ids["all"]) == ["skipped"]
        await check(rig)
        await finish(rig, rng, graph)
        assert await events_of_flow(rig, graph) == ["flow_ended"]


async def test_settling_against_the_last_complete_ends_the_flow(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """I6: each of them takes the last open member but one; whoever comes second ends the flow, once."""
    for _ in range(rounds):
        nodes = {"a": NewExecution(lane="a", policy=LOST_AT_ONCE), "child": NewExecution(), "b": NewExecution(lane=UP)}
        submitted = await rig.engine.submit_flow(FlowSpec(nodes, [("a", "child")]))
        graph = Graph(parse_flow_id(submitted.flow_id), submitted.execution_ids, {"b": await rig.claim(UP)})
        await swept(rig, "a")
        answers = await at_the_flow(
            rig,
            dsn,
            graph.flow,
            rng,
            partial(settle_owed, rig.engine._runtime, graph.flow),
            partial(rig.engine.complete, graph.claims["b"].handle),
        )
        assert answers == [1, None]
        assert await rig.completions(graph.child) == ["skipped"]
        assert await events_of_flow(rig, graph) == ["flow_ended"]
        await check(rig)


async def test_the_last_two_members_that_end_at_once_end_the_flow(
    rig: Rig, dsn: str, rng: random.Random, rounds: int
) -> None:
    """The same for two owners, and for an owner and an operator."""
    for at in range(rounds):
        submitted = await rig.engine.submit_flow(FlowSpec({name: NewExecution(lane=UP) for name in "ab"}))
        graph = Graph(parse_flow_id(submitted.flow_id), submitted.execution_ids, {})
        one, two = await rig.engine.claim_many(UP, 2, **WORKER)
        second: Call = partial(rig.engine.complete, two.handle)
        if at % 3 == 1:
            second = partial(rig.engine.cancel_execution, two.execution_id, reason=REASON)
        elif at % 3 == 2:
            second = partial(rig.engine.fail, two.handle, "no", FailureClass.PERMANENT)
        answers = await at_the_flow(rig, dsn, graph.flow, rng, partial(rig.engine.complete, one.handle), second)
        assert not [answer for answer in answers if isinstance(answer, EngineError)]
        assert await events_of_flow(rig, graph) == ["flow_ended"]
        await check(rig)
