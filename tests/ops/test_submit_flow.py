"""submit_flow: a whole graph or nothing, found again by its key; and the views of flows."""

from __future__ import annotations

from uuid import UUID

import pytest

from ffd import (
    AllOfEdges,
    AnyOfEdges,
    Conflict,
    Engine,
    FlowSpec,
    NewExecution,
    Validation,
)
from ffd.core.ids import parse_execution_id, partition_of
from ffd.db.pool import Connection
from tests.support import Rig

pytestmark = pytest.mark.anyio

NODES = {name: NewExecution(lane=name, kind=f"kind-{name}", payload=name.encode()) for name in "abcd"}
EDGES = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
DIAMOND = FlowSpec(NODES, EDGES, {"d": AnyOfEdges("let_run")}, kind="build", tags={"app.team": "core"})


async def test_a_diamond_is_there_at_once(rig: Rig) -> None:
    """C-218: members in the flow's partition, children blocked, edges applied, groups with their policies."""
    flow = await rig.engine.submit_flow(DIAMOND)
    assert set(flow.execution_ids) == set("abcd")
    assert not flow.is_duplicate
    partition = partition_of(UUID(flow.flow_id))
    for name, execution in flow.execution_ids.items():
        assert parse_execution_id(execution).partition_key == partition
        snapshot = await rig.engine.describe_execution(execution)
        assert snapshot is not None
        assert (snapshot.flow_id, snapshot.kind, snapshot.lane) == (flow.flow_id, f"kind-{name}", name)
    states = [await rig.public(flow.execution_ids[name]) for name in "abcd"]
    assert states == ["waiting", "waiting_children", "waiting_children", "waiting_children"]
    described = await rig.engine.describe_flow(flow.flow_id)
    assert described is not None
    assert (described.kind, described.tags, described.is_sealed) == ("build", {"app.team": "core"}, True)
    assert (described.node_count, described.edge_count, described.graph_revision) == (4, 4, 8)
    assert described.members == {"waiting": 1, "waiting_children": 3}
    policies = await rig.sql.fetch("select policy, k_target, running_count from ff_edge_group order by running_count")
    assert [(row["k_target"], row["running_count"]) for row in policies] == [(0, 1), (0, 1), (1, 2)]
    assert (await rig.claim("a")).payload == b"a"


async def test_one_round_trip_per_table(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flow, executions, edges, groups: four statements, however large the graph."""
    sent: list[str] = []
    real_execute, real_fetchrow = Connection.execute, Connection.fetchrow

    async def execute(self: Connection, query: str, *args: object, **more: object) -> str:
        sent.append(query)
        return await real_execute(self, query, *args, **more)  # type: ignore[arg-type]

    async def fetchrow(self: Connection, query: str, *args: object, **more: object) -> object:
        sent.append(query)
        return await real_fetchrow(self, query, *args, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Connection, "execute", execute)
    monkeypatch.setattr(Connection, "fetchrow", fetchrow)
    await rig.engine.submit_flow(DIAMOND)
    statements = [text.split("*/")[0].removeprefix("/* ffd:").strip() for text in sent if "register" not in text]
    assert statements == ["begin", "create_flow", "create_nodes", "create_edges", "create_groups", "commit"]


async def test_the_same_key_gives_the_first_flow(rig: Rig) -> None:
    first = await rig.engine.submit_flow(DIAMOND, idempotency_key="build-7")
    before = await rig.fingerprint()
    again = await rig.engine.submit_flow(FlowSpec({"x": NewExecution()}), idempotency_key="build-7")
    assert again.is_duplicate
    assert (again.flow_id, again.execution_ids) == (first.flow_id, first.execution_ids)
    assert await rig.fingerprint() == before
    other = await rig.engine.submit_flow(DIAMOND, idempotency_key="build-8")
    assert other.flow_id != first.flow_id


async def test_a_key_belongs_to_its_namespace(rig: Rig, dsn: str) -> None:
    first = await rig.engine.submit_flow(DIAMOND, idempotency_key="build-7")
    async with Engine.connect(dsn, namespace="other") as engine:
        second = await engine.submit_flow(DIAMOND, idempotency_key="build-7")
        assert second.flow_id != first.flow_id
        page = await engine.list_flows(namespace="other")
        assert [flow.flow_id for flow in page.items] == [second.flow_id]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (FlowSpec({"a": NewExecution(lane="")}), "nodes[a].lane"),
        (FlowSpec({"a": NewExecution(), "b": NewExecution(deadline_at_ms=1)}), "nodes[b].deadline_at_ms"),
        (FlowSpec({"a": NewExecution()}, kind="k" * 300), "kind"),
        (FlowSpec({"a": NewExecution()}, tags={"bad": "x"}), "tags"),
    ],
)
async def test_a_bad_node_leaves_nothing_behind(rig: Rig, spec: FlowSpec, field: str) -> None:
    before = await rig.fingerprint()
    with pytest.raises(Validation) as refused:
        await rig.engine.submit_flow(spec)
    assert refused.value.field == field
    assert await rig.fingerprint() == before


async def test_a_cycle_leaves_nothing_behind(rig: Rig) -> None:
    before = await rig.fingerprint()
    with pytest.raises(Conflict):
        await rig.engine.submit_flow(FlowSpec(NODES, [("a", "b"), ("b", "a")]))
    assert await rig.fingerprint() == before


async def test_flows_are_listed_in_pages(rig: Rig) -> None:
    """C-220: by state, namespace and tag, each flow once."""
    made = [await rig.engine.submit_flow(FlowSpec(NODES, tags={"app.n": str(at % 2)})) for at in range(7)]
    await rig.engine.cancel_flow(made[3].flow_id, reason="no")
    for _ in range(1):
        await rig.claim("a")
    seen: list[str] = []
    after = None
    while True:
        page = await rig.engine.list_flows(after=after, limit=3)
        seen += [flow.flow_id for flow in page.items]
        if page.next is None:
            break
        after = page.next
    assert seen == sorted((flow.flow_id for flow in made), reverse=True)
    cancelled = await rig.engine.list_flows(state="cancelled")
    assert [flow.flow_id for flow in cancelled.items] == [made[3].flow_id]
    running = await rig.engine.list_flows(state="running", limit=1)
    assert [flow.flow_id for flow in running.items] == [made[0].flow_id]
    tagged = await rig.engine.list_flows(tag="app.n=1")
    assert len(tagged.items) == 3
    with pytest.raises(Validation) as refused:
        await rig.engine.list_flows(state="nope")
    assert refused.value.field == "state"


async def test_edges_are_listed_from_both_ends(rig: Rig) -> None:
    """C-221."""
    flow = await rig.engine.submit_flow(FlowSpec(NODES, EDGES, {"d": AllOfEdges()}))
    ids = flow.execution_ids
    everything = await rig.engine.list_edges(flow.flow_id)
    assert {(edge.upstream, edge.downstream) for edge in everything.items} == {(ids[u], ids[d]) for u, d in EDGES}
    assert all(edge.is_applied and edge.resolution is None for edge in everything.items)
    out = await rig.engine.list_edges(flow.flow_id, upstream=ids["a"])
    assert {edge.downstream for edge in out.items} == {ids["b"], ids["c"]}
    into = await rig.engine.list_edges(flow.flow_id, downstream=ids["d"])
    assert {edge.upstream for edge in into.items} == {ids["b"], ids["c"]}
    first = await rig.engine.list_edges(flow.flow_id, limit=3)
    rest = await rig.engine.list_edges(flow.flow_id, limit=3, after=first.next)
    assert (len(first.items), len(rest.items), rest.next) == (3, 1, None)
    await rig.engine.complete((await rig.claim("a")).handle, b"built")
    out = await rig.engine.list_edges(flow.flow_id, upstream=ids["a"])
    assert [edge.resolution for edge in out.items] == ["satisfied", "satisfied"]
    assert await rig.engine.get_upstream_results(ids["b"]) == {ids["a"]: b"built"}
    assert await rig.engine.get_upstream_results(ids["a"]) == {}


async def test_blocked_work_is_explained_by_its_open_upstreams(rig: Rig) -> None:
    """C-154, C-155."""
    flow = await rig.engine.submit_flow(FlowSpec(NODES, EDGES))
    explanation = await rig.engine.explain_execution(flow.execution_ids["d"])
    assert (str(explanation.state), explanation.waiting_for) == ("waiting_children", "dependencies")
    named = {each["execution_id"]: each["state"] for each in explanation.details["open_upstreams"]}
    assert named == {flow.execution_ids[name]: "waiting_children" for name in "bc"}
