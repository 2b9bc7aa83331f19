"""Random graphs, random endings in random order, and crashes between an ending and its cascade, against a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

import ffd.ops.cascade
from ffd import (
    AllOfEdges,
    AnyOfEdges,
    Claim,
    Engine,
    ExecutionPolicy,
    FailureClass,
    FlowSpec,
    NewExecution,
    QuorumEdges,
    RetryPolicy,
)
from ffd.core.flows import EdgePolicy
from ffd.core.ids import parse_execution_id
from ffd.core.state import expand_rows
from ffd.ops.cascade import settle_owed
from ffd.ops.flow_lock import FlowKey, parse_flow_id
from tests.property.flow_model import CANCELLED, COMPLETED, RUNNING, SKIPPED, Edge, FlowModel, Policy
from tests.support import WORKER

IS_FULL = bool(os.environ.get("FFD_TEST_FULL"))
NODES_MAX = 50
NO_RETRY = ExecutionPolicy(retry=RetryPolicy(max_retries=0))
FEW = 3

TABLES = (
    "ff_exec_core",
    "ff_attempt",
    "ff_flow_core",
    "ff_edge",
    "ff_edge_group",
    "ff_cascade_owed",
    "ff_completion_event",
    "ff_lease_event",
    "ff_operator_event",
)

# $1 partition_key, $2 execution_id, $3 `failed` or `expired`. Ends a running member as a sweep does: no flow lock, the
# cascade is owed.
SWEEP = expand_rows("""
with x as (
  update ff_exec_core e set [[by w.next_row: failed, expired]], terminal_at_ms = ff_now_ms(),
         lease_epoch = e.lease_epoch + 1
  from (select $3::text as next_row) w
  where e.partition_key = $1 and e.execution_id = $2 and e.lifecycle_phase = 'active'
  returning e.partition_key, e.execution_id, e.flow_id, e.attempt_index, e.lease_epoch),
a as (
  update ff_attempt t set outcome = $3, terminal_at_ms = ff_now_ms(), lease_expires_at_ms = null,
         lease_epoch = x.lease_epoch
  from x where t.partition_key = x.partition_key and t.execution_id = x.execution_id
    and t.attempt_index = x.attempt_index),
v as (
  insert into ff_lease_event
    (partition_key, execution_id, event_type, cause, occurred_at_ms, attempt_index, lease_epoch)
  select partition_key, execution_id::text, 'expired', 'lease_expiry', ff_now_ms(), attempt_index, lease_epoch from x),
c as (
  insert into ff_completion_event (partition_key, execution_id, flow_id, outcome, occurred_at_ms)
  select partition_key, execution_id, flow_id, $3, ff_now_ms() from x),
o as (
  insert into ff_cascade_owed (partition_key, flow_id, execution_id, work, enqueued_at_ms)
  select partition_key, flow_id, execution_id, 'resolve', ff_now_ms() from x)
select count(*) from x
""")


class Plan(NamedTuple):
    """A graph and the endings of its members, in order."""

    size: int
    edges: list[Edge]
    policies: dict[int, Policy]
    steps: list[tuple[str, int]]


# The number chooses among those whom the step can happen to.
STEPS = st.tuples(
    st.sampled_from(
        ("complete",) * 6 + ("fail", "fail", "cancel", "claim", "sweep_failed", "sweep_expired", "settle", "settle")
    ),
    st.integers(0, 10**6),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size = draw(st.integers(1, NODES_MAX))
    edges: list[Edge] = []
    policies: dict[int, Policy] = {}
    for node in range(1, size):
        # Near and far upstreams, often none: chains, fans and diamonds.
        back = st.one_of(st.integers(1, min(node, 4)), st.integers(1, node))
        upstreams = sorted({node - step for step in draw(st.lists(back, max_size=4))})
        edges += [(upstream, node) for upstream in upstreams]
        if upstreams:
            needs = st.one_of(st.none(), st.just(1), st.integers(1, len(upstreams)))
            policies[node] = Policy(draw(needs), draw(st.booleans()))
    steps = draw(st.lists(STEPS, min_size=size // 2, max_size=2 * size))
    return Plan(size, edges, policies, steps)


def public_policy(policy: Policy) -> EdgePolicy:
    on_satisfied = "cancel_remaining" if policy.cancels else "let_run"
    if policy.need is None:
        return AllOfEdges()
    return AnyOfEdges(on_satisfied) if policy.need == 1 else QuorumEdges(policy.need, on_satisfied)


def normal(plan: Plan) -> Plan:
    """`all_of` cancels nobody."""
    policies = {
        node: policy._replace(cancels=policy.cancels and policy.need is not None)
        for node, policy in plan.policies.items()
    }
    return plan._replace(policies=policies)


class Run:
    """One flow in the database, and the model of it."""

    def __init__(self, engine: Engine, sql: asyncpg.Connection[Any], plan: Plan) -> None:
        self.engine = engine
        self.sql = sql
        self.plan = plan
        self.model = FlowModel(plan.size, plan.edges, plan.policies)
        self.claims: dict[int, Claim] = {}
        self.cancelled: set[int] = set()
        # Whether the cascade may stop early, so that only the states after a settlement are the model's.
        self.is_bounded = False

    async def submit(self) -> None:
        nodes = {str(node): NewExecution(lane=f"n{node}", policy=NO_RETRY) for node in range(self.plan.size)}
        submitted = await self.engine.submit_flow(
            FlowSpec(
                nodes,
                [(str(upstream), str(child)) for upstream, child in self.plan.edges],
                policies={str(node): public_policy(policy) for node, policy in self.plan.policies.items()},
            )
        )
        self.flow: FlowKey = parse_flow_id(submitted.flow_id)
        self.ids = [submitted.execution_ids[str(node)] for node in range(self.plan.size)]
        self.node_of: dict[UUID, int] = {
            parse_execution_id(text).execution_id: node for node, text in enumerate(self.ids)
        }

    async def claim(self, node: int) -> Claim:
        claim = await self.engine.claim(f"n{node}", **WORKER)
        assert claim is not None, f"{node} should be claimable"
        assert claim.execution_id == self.ids[node]
        self.model.states[node] = RUNNING
        self.claims[node] = claim
        return claim

    async def step(self, name: str, number: int) -> None:
        """One thing happens to one member, if there is one it can happen to."""
        model = self.model
        if name == "settle":
            await self.settle()
            return
        able = model.open() if name == "cancel" else model.waiting()
        if name not in ("cancel", "claim"):
            able += [node for node, state in enumerate(model.states) if state == RUNNING]
        if not able:
            return
        node = able[number % len(able)]
        if name == "cancel":
            await self.engine.cancel_execution(self.ids[node], reason="no more")
            self.cancelled.add(node)
            model.end(node, CANCELLED)
            return
        claim = self.claims.get(node) or await self.claim(node)
        match name:
            case "complete":
                await self.engine.complete(claim.handle, b"%d" % node)
                model.end(node, COMPLETED)
            case "fail":
                await self.engine.fail(claim.handle, "no", FailureClass.PERMANENT)
                model.end(node, "failed")
            case "sweep_failed" | "sweep_expired":
                state = name.removeprefix("sweep_")
                assert await self.sql.fetchval(SWEEP, *parse_execution_id(self.ids[node]), state) == 1
                model.end_unheard(node, state)

    async def settle(self) -> None:
        for _ in range(10_000):
            if not await settle_owed(self.engine._runtime, self.flow):
                break
        else:
            raise AssertionError("settling never ends")
        assert not await self.sql.fetchval("select count(*) from ff_cascade_owed")
        self.model.settle()

    async def states(self) -> list[str]:
        rows = await self.sql.fetch(
            "select execution_id, public_state from ff_exec_core where partition_key = $1 and flow_id = $2", *self.flow
        )
        found = {self.node_of[row["execution_id"]]: row["public_state"] for row in rows}
        return [found[node] for node in range(self.plan.size)]

    async def compare(self) -> None:
        found = await self.states()
        wrong = [
            (node, state, expected)
            for node, (state, expected) in enumerate(zip(found, self.model.states, strict=True))
            if state != expected
        ]
        assert not wrong, f"(node, stored, expected): {wrong}"

    async def fingerprint(self) -> list[str]:
        return [
            await self.sql.fetchval(
                f"select coalesce(md5(string_agg(t::text, '|' order by t::text)), '') from {table} t"
            )
            for table in TABLES
        ]

    async def check_end(self) -> None:
        """Every member ended, and wrote that once; the flow ended; whatever is repeated changes nothing."""
        states = await self.states()
        rows = await self.sql.fetch("select execution_id, flow_id, outcome from ff_completion_event")
        outcomes = sorted((self.node_of[row["execution_id"]], row["outcome"]) for row in rows)
        assert outcomes == [(node, "success" if state == COMPLETED else state) for node, state in enumerate(states)]
        assert {row["flow_id"] for row in rows} == {self.flow.flow_id}
        snapshot = await self.engine.describe_flow(str(self.flow.flow_id))
        assert snapshot is not None
        assert snapshot.state == self.model.flow_state()
        told = await self.sql.fetch(
            "select event_type from ff_operator_event where execution_id = $1", str(snapshot.flow_id)
        )
        assert [row["event_type"] for row in told] == ["flow_ended"]
        leases = await self.sql.fetchval("select count(*) from ff_attempt where lease_expires_at_ms is not null")
        assert leases == 0
        skipped = [self.ids[node] for node, state in enumerate(states) if state == SKIPPED]
        started = await self.sql.fetch("select execution_id from ff_exec_core where started_at_ms is not null")
        assert not {self.node_of[row["execution_id"]] for row in started} & {self.ids.index(one) for one in skipped}
        before = await self.fingerprint()
        for node, claim in self.claims.items():
            if states[node] == COMPLETED:
                await self.engine.complete(claim.handle, b"another result")
            elif states[node] == CANCELLED:
                await self.engine.cancel_execution(self.ids[node], reason="again")
        assert await settle_owed(self.engine._runtime, self.flow) == 0
        assert await self.fingerprint() == before


async def finish(run: Run) -> None:
    """Whoever is left completes, the last first."""
    while left := run.model.open():
        ready = [node for node in left if run.model.states[node] in ("waiting", RUNNING)]
        if not ready:
            assert run.model.owed, "nobody can run, nothing is owed, and the flow is not over"
            await run.settle()
            continue
        node = ready[-1]
        claim = run.claims.get(node) or await run.claim(node)
        await run.engine.complete(claim.handle)
        run.model.end(node, COMPLETED)
        if run.is_bounded:
            await run.settle()
    await run.settle()


def scenario(dsn: str, plan: Plan, play: Callable[[Run], Any]) -> None:
    """Play a plan on an empty database."""

    async def body() -> None:
        sql = await asyncpg.connect(dsn)
        try:
            await sql.execute(f"truncate {', '.join(TABLES)}")
            async with Engine.connect(dsn) as engine:
                run = Run(engine, sql, plan)
                await run.submit()
                await play(run)
        finally:
            await sql.close()

    asyncio.run(body())


def examples(count: int) -> settings:
    return settings(
        max_examples=count * (8 if IS_FULL else 1),
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


async def play_exactly(run: Run) -> None:
    await run.compare()
    for name, number in run.plan.steps:
        await run.step(name, number)
        if run.is_bounded and name != "claim" and not name.startswith("sweep"):
            await run.settle()
        await run.compare()
    await finish(run)
    await run.compare()
    await run.check_end()
    for state in sorted(set(run.model.states)):
        event(f"some {state}")


@given(plans().map(normal))
@examples(25)
@pytest.mark.timeout(900)
def test_every_member_becomes_what_the_model_says_after_every_step(dsn: str, plan: Plan) -> None:
    """I2, I6: all policies; endings that were cut off from their cascade are made up for, in any order."""
    scenario(dsn, plan, play_exactly)


def without_order(plan: Plan) -> Plan:
    """Races only between members that wait for nobody.

    A cascade that stops at its bound goes on with another part of the graph than the next level. A loser that waits
    for dependencies itself may then be cancelled before its own group has decided, or after; both are right, but only
    one of them is the model's.
    """
    children = set(plan.policies)
    blocked = {child for upstream, child in plan.edges if upstream in children}
    policies = {
        node: policy._replace(cancels=policy.cancels and node not in blocked)
        for node, policy in normal(plan).policies.items()
    }
    return plan._replace(policies=policies)


@given(plans().map(without_order))
@examples(14)
@pytest.mark.timeout(900)
def test_a_cascade_in_small_pieces_ends_where_a_whole_one_does(dsn: str, plan: Plan) -> None:
    """Past its bound an ending leaves the rest owed; settling until nothing is owed gives the same states."""

    async def play(run: Run) -> None:
        run.is_bounded = True
        await play_exactly(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffd.ops.cascade, "CASCADE_MAX", FEW)
        scenario(dsn, plan, play)


@given(plans().map(normal))
@examples(14)
@pytest.mark.timeout(900)
def test_a_cascade_in_small_pieces_gives_every_member_an_ending_that_a_rule_explains(dsn: str, plan: Plan) -> None:
    """The same for every graph: whatever order the pieces came in, nobody is stuck and every ending has its reason."""
    assume(any(policy.cancels for policy in plan.policies.values()))

    async def play(run: Run) -> None:
        for name, number in plan.steps:
            run.model.states = await run.states()
            await run.step(name, number)
        for _ in range(10 * NODES_MAX):
            await run.settle()
            run.model.states = await run.states()
            if not run.model.open():
                break
            ready = [node for node, state in enumerate(run.model.states) if state in ("waiting", RUNNING)]
            assert ready, "nobody can run, nothing is owed, and the flow is not over"
            claim = run.claims.get(ready[0]) or await run.claim(ready[0])
            await run.engine.complete(claim.handle)
        assert run.model.unjustified(run.cancelled) == []
        await run.check_end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ffd.ops.cascade, "CASCADE_MAX", FEW)
        scenario(dsn, plan, play)
