"""`ffd flow`: the graph of a flow as text, and its end."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from ffd import Engine, FailureClass, FlowSpec, FlowSubmitted, NewExecution
from tests.cli.calls import NO_UUID, Cli, act, call, claim, create, execute
from tests.support import WORKER

DIAMOND = FlowSpec(
    {name: NewExecution(lane=name, kind=name) for name in ("extract", "left", "right", "join")},
    [("extract", "left"), ("extract", "right"), ("left", "join"), ("right", "join")],
    kind="nightly",
)


def diamond(dsn: str) -> FlowSubmitted:
    """A diamond whose first node is done and whose left one runs."""

    async def work(engine: Engine) -> FlowSubmitted:
        submitted = await engine.submit_flow(DIAMOND)
        first = await claim(engine, "extract")
        await engine.complete(first.handle)
        await claim(engine, "left")
        return submitted

    return act(dsn, work)


def chain(dsn: str, count: int) -> str:
    nodes = {f"n{at}": NewExecution() for at in range(count)}
    spec = FlowSpec(nodes, [(f"n{at}", f"n{at + 1}") for at in range(count - 1)])
    return act(dsn, lambda engine: engine.submit_flow(spec)).flow_id


# show


def test_show_draws_a_diamond_in_layers_with_the_state_of_each_node(dsn: str) -> None:
    flow = diamond(dsn)
    done = call("flow", "show", flow.flow_id, dsn=dsn)
    assert (done.code, done.err) == (0, "")
    header, graph = done.out.split("\n\n")
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in header.splitlines()}
    assert facts["flow"] == flow.flow_id
    assert (facts["state"], facts["kind"], facts["edges"]) == ("running", "nightly", "4")
    assert facts["members"] == "1 completed, 1 running, 1 waiting, 1 waiting_children"
    title, *lines = [line.split() for line in graph.splitlines()]
    ids = flow.execution_ids
    assert title == ["#", "STATE", "KIND", "EXECUTION", "AFTER"]
    assert lines[0] == ["1", "✓", "completed", "extract", ids["extract"]]
    assert lines[1] == lines[4] == ["↓"]
    middle = sorted(line[1:] for line in lines[2:4])
    assert middle == [["▶", "running", "left", ids["left"], "1✓"], ["○", "waiting", "right", ids["right"], "1✓"]]
    assert lines[5] == ["4", "·", "waiting_children", "join", ids["join"], "2,", "3"]
    assert len(lines) == 6


def test_show_in_json_has_the_nodes_in_order(cli: Cli) -> None:
    flow = diamond(cli.dsn)
    document = cli("flow", "show", flow.flow_id, "--json").json
    assert (document["flow_id"], document["state"], document["nodes_left_out"]) == (flow.flow_id, "running", 0)
    nodes = {node["kind"]: node for node in document["nodes"]}
    assert [node["layer"] for node in document["nodes"]] == [0, 1, 1, 2]
    upstream = {(edge["execution_id"], edge["resolution"]) for edge in nodes["join"]["upstream"]}
    assert upstream == {(flow.execution_ids["left"], None), (flow.execution_ids["right"], None)}
    assert nodes["left"]["upstream"][0]["resolution"] == "satisfied"


def test_show_marks_what_can_no_longer_be(cli: Cli) -> None:
    async def work(engine: Engine) -> str:
        submitted = await engine.submit_flow(DIAMOND)
        first = await claim(engine, "extract")
        await engine.fail(first.handle, "no", FailureClass.PERMANENT)
        return submitted.flow_id

    lines = cli("flow", "show", act(cli.dsn, work)).out.splitlines()
    assert any("✗ failed" in line for line in lines)
    assert any("↷ skipped" in line and line.endswith("1✗") for line in lines)


def test_show_is_bounded_and_counts_the_rest(cli: Cli) -> None:
    flow_id = chain(cli.dsn, 210)
    lines = cli("flow", "show", flow_id).out.splitlines()
    assert lines[-1] == "… and 10 more"
    assert sum(line == "↓" for line in lines) == 199
    shorter = cli("flow", "show", flow_id, "--limit", "3", "--json").json
    assert (len(shorter["nodes"]), shorter["nodes_left_out"]) == (3, 207)
    assert cli("flow", "show", flow_id, "--limit", "0").code == 2


def test_show_of_an_open_flow_and_of_an_edge_that_is_only_staged(cli: Cli) -> None:
    async def work(engine: Engine) -> str:
        flow_id = (await engine.create_flow()).flow_id
        first = await engine.create_execution(flow_id=flow_id)
        second = await engine.create_execution(flow_id=flow_id)
        await engine.stage_dependency_edge(flow_id, first.execution_id, second.execution_id)
        return flow_id

    flow_id = act(cli.dsn, work)
    out = cli("flow", "show", flow_id).out
    assert "open, takes new members" in out
    assert out.rstrip().endswith("1 (staged)")
    empty = act(cli.dsn, lambda engine: engine.create_flow()).flow_id
    assert "members" in cli("flow", "show", empty).out
    assert cli("flow", "show", empty, "--json").json["nodes"] == []


# cancel


def test_cancel_ends_the_flow_and_its_members(dsn: str) -> None:
    flow = diamond(dsn)
    done = call("flow", "cancel", flow.flow_id, "--reason", "superseded", "--actor", "ada", "--yes", dsn=dsn)
    assert (done.code, done.out, done.err) == (0, f"cancelled flow {flow.flow_id} (cancel_all)\n", "")
    states = execute(dsn, "select array_agg(distinct public_state order by public_state) from ff_exec_core")
    assert states == ["cancelled", "completed"]
    shown = call("flow", "show", flow.flow_id, dsn=dsn)
    assert "cancel_all: superseded" in shown.out


@pytest.mark.parametrize(("policy", "left"), [("cancel_pending", {"running"}), ("cancel_flow_only", None)])
def test_cancel_spares_what_its_policy_spares(cli: Cli, policy: str, left: set[str] | None) -> None:
    flow = diamond(cli.dsn)
    document = cli("flow", "cancel", flow.flow_id, "--policy", policy, "--yes", "--json").json
    assert (document["flow_id"], document["policy"], document["pending_execution_ids"]) == (flow.flow_id, policy, [])
    page = act(cli.dsn, lambda engine: engine.list_executions(flow_id=flow.flow_id))
    alive = {each.public_state.value for each in page.items if not each.public_state.is_terminal}
    assert alive == ({"running", "waiting", "waiting_children"} if left is None else left)


def test_cancel_asks_and_shows_the_flow(cli: Cli) -> None:
    flow = diamond(cli.dsn)
    assert cli("flow", "cancel", flow.flow_id).code == 2
    assert cli("flow", "cancel", flow.flow_id, "--json", is_terminal=True).code == 2
    declined = cli("flow", "cancel", flow.flow_id, is_terminal=True, stdin="n\n")
    assert declined.code == 1
    for shown in (flow.flow_id, "nightly", "1 running", "cancel_all"):
        assert shown in declined.err
    agreed = cli("flow", "cancel", flow.flow_id, is_terminal=True, stdin="y\n")
    assert agreed.code == 0
    assert "not found" in cli("flow", "cancel", NO_UUID, is_terminal=True, stdin="y\n").err


def test_members_that_outlast_the_wait_are_named_and_exit_1(dsn: str) -> None:
    async def work() -> tuple[str, str]:
        async with Engine.connect(dsn) as engine:
            spec = FlowSpec({"only": NewExecution()})
            submitted = await engine.submit_flow(spec)
            claimed = await engine.claim("default", **WORKER)
            assert claimed is not None
            connection = await asyncpg.connect(dsn)
            try:
                async with connection.transaction():
                    # Somebody works under the lease: the member's row is held.
                    await engine.assert_lease(claimed.handle, connection=connection)
                    line = "flow", "cancel", submitted.flow_id, "--wait", "100ms", "--yes"
                    done = await asyncio.to_thread(call, *line, dsn=dsn)
                    as_json = await asyncio.to_thread(call, *line, "--json", dsn=dsn)
            finally:
                await connection.close()
        assert (done.code, as_json.code) == (1, 1)
        assert done.out.endswith("; 1 of its members not yet\n")
        assert f"  {claimed.execution_id}\n" in done.err
        assert as_json.json["pending_execution_ids"] == [claimed.execution_id]
        return submitted.flow_id, claimed.execution_id

    flow_id, _ = asyncio.run(work())
    assert call("flow", "cancel", flow_id, "--wait", "5s", "--yes", dsn=dsn).code == 0


@pytest.mark.parametrize("line", [("show",), ("cancel", "--yes")])
def test_an_unknown_flow_is_not_found(cli: Cli, line: tuple[str, ...]) -> None:
    name, *rest = line
    done = cli("flow", name, NO_UUID, *rest)
    assert (done.code, done.out, done.err) == (1, "", f"Error: flow not found: {NO_UUID}\n")
    assert cli("flow", name, create(cli.dsn), *rest).code == 2


def test_cancel_refuses_what_is_out_of_bounds(cli_down: Cli) -> None:
    assert cli_down("flow", "cancel", NO_UUID, "--yes", "--policy", "some").code == 2
    assert cli_down("flow", "cancel", NO_UUID, "--yes", "--wait", "2d").code == 2
    assert cli_down("flow", "cancel", NO_UUID, "--yes", "--reason", "r" * 1025).code == 2
