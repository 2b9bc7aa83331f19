"""A flow's graph as text: its nodes in layers, each after everything it waits for.

Nodes are numbered in that order, and a node names what it waits for by number, so that a diamond, a fan and a long
chain read alike and every node stands once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ffd.cli.tables import Column, table
from ffd.core.flows import EdgeSnapshot
from ffd.core.records import ExecutionSnapshot
from ffd.core.state import PublicState

UPSTREAM_SHOWN_MAX: Final = 8

SYMBOLS: Final[Mapping[PublicState, str]] = {
    PublicState.WAITING: "○",
    PublicState.RESUMABLE: "○",
    PublicState.DELAYED: "◔",
    PublicState.WAITING_CHILDREN: "·",
    PublicState.RUNNING: "▶",
    PublicState.SUSPENDED: "‖",
    PublicState.COMPLETED: "✓",
    PublicState.FAILED: "✗",
    PublicState.EXPIRED: "⧖",
    PublicState.SKIPPED: "↷",
    PublicState.CANCELLED: "⊘",
}
_RESOLUTIONS: Final = {"satisfied": "✓", "impossible": "✗"}
_COLUMNS: Final = (
    Column("#", is_whole=True),
    Column("STATE", is_whole=True),
    Column("KIND"),
    Column("EXECUTION", is_id=True),
    Column("AFTER"),
)
BETWEEN_LAYERS: Final = "↓"


class Node(NamedTuple):
    """A member of a flow at its place in the graph; `layer` counts from 0."""

    execution: ExecutionSnapshot
    layer: int
    upstream: list[EdgeSnapshot]


def arrange(executions: Sequence[ExecutionSnapshot], edges: Sequence[EdgeSnapshot]) -> list[Node]:
    """Every execution one layer below the lowest one that it waits for; within a layer by id.

    An edge whose ends are not both given does not count. What lies on a cycle, which the engine does not let
    anybody make, comes last.
    """
    members = {each.execution_id: each for each in executions}
    into: dict[str, list[EdgeSnapshot]] = defaultdict(list)
    out_of: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        if edge.upstream in members and edge.downstream in members:
            into[edge.downstream].append(edge)
            out_of[edge.upstream].append(edge.downstream)
    open_edges = {name: len(into[name]) for name in members}
    layers: dict[str, int] = {}
    ready = [name for name, count in open_edges.items() if not count]
    depth = 0
    while ready:
        layers.update(dict.fromkeys(ready, depth))
        below = []
        for name in ready:
            for child in out_of[name]:
                open_edges[child] -= 1
                if not open_edges[child]:
                    below.append(child)
        ready, depth = below, depth + 1
    nodes = [Node(each, layers.get(name, depth), into[name]) for name, each in members.items()]
    return sorted(nodes, key=lambda node: (node.layer, node.execution.execution_id))


def draw(nodes: Sequence[Node], shown: int, width: int | None) -> list[str]:
    """The first `shown` nodes; an arrow stands between layers."""
    numbers = {node.execution.execution_id: str(at) for at, node in enumerate(nodes, start=1)}
    rows = [
        (
            numbers[node.execution.execution_id],
            f"{SYMBOLS[node.execution.public_state]} {node.execution.public_state}",
            node.execution.kind,
            node.execution.execution_id,
            _after(node.upstream, numbers),
        )
        for node in nodes[:shown]
    ]
    title, *drawn = table(_COLUMNS, rows, width)
    lines = [title]
    for at, line in enumerate(drawn):
        if at and nodes[at].layer != nodes[at - 1].layer:
            lines.append(BETWEEN_LAYERS)
        lines.append(line)
    return lines


def _after(upstream: Sequence[EdgeSnapshot], numbers: Mapping[str, str]) -> str:
    ordered = sorted(upstream, key=lambda edge: int(numbers[edge.upstream]))
    told = [f"{numbers[edge.upstream]}{_mark(edge)}" for edge in ordered[:UPSTREAM_SHOWN_MAX]]
    left = len(ordered) - len(told)
    return ", ".join(told) + (f" and {left} more" if left else "")


def _mark(edge: EdgeSnapshot) -> str:
    """How the edge stands: satisfied, impossible, not yet applied, or open."""
    return _RESOLUTIONS.get(edge.resolution or "", "" if edge.is_applied else " (staged)")


def as_documents(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """The nodes for a program."""
    return [
        {
            "execution_id": node.execution.execution_id,
            "kind": node.execution.kind,
            "public_state": node.execution.public_state.value,
            "layer": node.layer,
            "upstream": [
                {"execution_id": edge.upstream, "is_applied": edge.is_applied, "resolution": edge.resolution}
                for edge in node.upstream
            ],
        }
        for node in nodes
    ]
