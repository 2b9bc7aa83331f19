"""A flow's specification is checked as a whole before anything is written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ffd import (
    AllOfEdges,
    AnyOfEdges,
    Conflict,
    ConflictKind,
    FlowSpec,
    NewExecution,
    QuorumEdges,
    Validation,
)
from ffd.core.flows import check_graph, policy_document

N = NewExecution()


def test_a_diamond_is_fine() -> None:
    graph = check_graph(
        FlowSpec(dict.fromkeys("abcd", N), [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")], {"d": QuorumEdges(2)})
    )
    assert graph.names == ["a", "b", "c", "d"]
    assert dict(graph.incoming) == {"b": 1, "c": 1, "d": 2}
    assert graph.policies == {"d": {"kind": "quorum", "k": 2, "on_satisfied": "cancel_remaining"}}


def test_policies_are_stored_as_flowfabric_stores_them() -> None:
    assert policy_document(AllOfEdges(), "p") == {"kind": "all_of"}
    assert policy_document(AnyOfEdges("let_run"), "p") == {"kind": "any_of", "on_satisfied": "let_run"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("not a spec", "spec"),
        (FlowSpec({}), "nodes"),
        (FlowSpec({"": N}), "nodes"),
        (FlowSpec({"a": "x"}), "nodes[a]"),  # type: ignore[dict-item]
        (FlowSpec({"a": NewExecution(flow_id="x")}), "nodes[a].flow_id"),
        (FlowSpec({"a": NewExecution(idempotency_key="x")}), "nodes[a].idempotency_key"),
        (FlowSpec({"a": N}, "ab"), "edges"),  # type: ignore[arg-type]
        (FlowSpec({"a": N}, [("a", "z")]), "edges[0]"),
        (FlowSpec({"a": N}, [("a",)]), "edges[0]"),  # type: ignore[list-item]
        (FlowSpec({"a": N, "b": N}, [("a", "b"), ("a", "b")]), "edges[1]"),
        (FlowSpec({"a": N, "b": N}, [("a", "b")], {"a": AnyOfEdges()}), "policies[a]"),
        (FlowSpec({"a": N, "b": N}, [("a", "b")], {"b": QuorumEdges(2)}), "policies[b].k"),
        (FlowSpec({"a": N, "b": N}, [("a", "b")], {"b": QuorumEdges(0)}), "policies[b].k"),
        (FlowSpec({"a": N, "b": N}, [("a", "b")], {"b": AnyOfEdges("x")}), "policies[b].on_satisfied"),
    ],
)
def test_a_bad_specification_names_the_place(spec: Any, field: str) -> None:
    with pytest.raises(Validation) as refused:
        check_graph(spec)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("edges", "kind"),
    [
        ([("a", "a")], ConflictKind.SELF_REFERENCING_EDGE),
        ([("a", "b"), ("b", "a")], ConflictKind.CYCLE_DETECTED),
        ([("a", "b"), ("b", "c"), ("c", "b")], ConflictKind.CYCLE_DETECTED),
    ],
)
def test_cycles_are_refused(edges: list[tuple[str, str]], kind: ConflictKind) -> None:
    with pytest.raises(Conflict) as refused:
        check_graph(FlowSpec({"a": N, "b": N, "c": N}, edges))
    assert refused.value.kind == kind


def test_a_long_chain_needs_no_recursion() -> None:
    names = [str(at) for at in range(10_000)]
    graph = check_graph(FlowSpec(dict.fromkeys(names, N), list(itertools.pairwise(names))))
    assert len(graph.edges) == 9_999


def test_too_many_nodes_or_edges_are_refused() -> None:
    with pytest.raises(Validation, match=r"1\.\.10000"):
        check_graph(FlowSpec({str(at): N for at in range(10_001)}))
    with pytest.raises(Validation, match="50000"):
        check_graph(FlowSpec({"a": N, "b": N}, [("a", "b")] * 50_001))
