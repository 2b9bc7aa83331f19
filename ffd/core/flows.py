"""Flows: what their calls take and return, and the checks of a whole graph before anything is written."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from ffd.core.checks import check_int, check_text
from ffd.core.errors import Conflict, ConflictKind, Validation, ValidationKind
from ffd.core.limits import BULK_MAX, FLOW_EDGES_MAX, KIND_BYTES_MAX
from ffd.core.records import NewExecution


class FlowState(StrEnum):
    """The state of a flow. It is `open` until sealed, follows its members then, and ends with the last of them."""

    OPEN = "open"
    RUNNING = "running"
    BLOCKED = "blocked"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether the flow has ended (the replay of a member can open it again, unless it was cancelled)."""
        return self in ENDED_FLOW_STATES


ENDED_FLOW_STATES: Final = frozenset({FlowState.COMPLETED, FlowState.FAILED, FlowState.CANCELLED})


class OnSatisfied(StrEnum):
    """What happens to upstream executions that are still under way when their group is decided."""

    CANCEL_REMAINING = "cancel_remaining"
    LET_RUN = "let_run"


class CancelPolicy(StrEnum):
    """Which members a cancelled flow takes with it: all, those that do not run and are not suspended, or none."""

    CANCEL_ALL = "cancel_all"
    CANCEL_PENDING = "cancel_pending"
    CANCEL_FLOW_ONLY = "cancel_flow_only"


class AllOfEdges(msgspec.Struct, frozen=True):
    """Every upstream must succeed; the first that does not makes the child impossible."""


class AnyOfEdges(msgspec.Struct, frozen=True):
    """One success is enough; the child is impossible when none is left that could give it."""

    on_satisfied: OnSatisfied | str = OnSatisfied.CANCEL_REMAINING


class QuorumEdges(msgspec.Struct, frozen=True):
    """`k` successes are enough; the child is impossible when fewer than `k` can still be reached."""

    k: int
    on_satisfied: OnSatisfied | str = OnSatisfied.CANCEL_REMAINING


EdgePolicy = AllOfEdges | AnyOfEdges | QuorumEdges


class FlowCreated(msgspec.Struct, frozen=True):
    """A flow, new or (`is_duplicate`) there before."""

    flow_id: str
    is_duplicate: bool


class EdgeStaged(msgspec.Struct, frozen=True):
    """The edge is in the graph, whose revision is now `graph_revision`; it counts once it is applied."""

    edge_id: str
    graph_revision: int


class EdgeApplied(msgspec.Struct, frozen=True):
    """The edge counts. `unsatisfied_count`: applied edges into the same child that are still open."""

    edge_id: str
    unsatisfied_count: int


class FlowSpec(msgspec.Struct, frozen=True):
    """A whole graph: its executions by name, the edges between them, and how each child decides."""

    nodes: Mapping[str, NewExecution]
    edges: Sequence[tuple[str, str]] = ()
    policies: Mapping[str, EdgePolicy] = {}
    kind: str = ""
    tags: Mapping[str, str] | None = None


class FlowSubmitted(msgspec.Struct, frozen=True):
    """The flow and the execution behind each name. `is_duplicate`: an earlier call with this key made them."""

    flow_id: str
    execution_ids: dict[str, str]
    is_duplicate: bool = False


class FlowSnapshot(msgspec.Struct, frozen=True):
    """A flow at one moment. `members` counts its executions by public state."""

    flow_id: str
    kind: str
    namespace: str
    state: FlowState
    is_sealed: bool
    tags: dict[str, str]
    graph_revision: int
    node_count: int
    edge_count: int
    members: dict[str, int]
    created_at_ms: int
    terminal_at_ms: int | None
    cancellation_policy: str | None
    cancel_reason: str | None


class EdgeSnapshot(msgspec.Struct, frozen=True):
    """One edge. `resolution` is `satisfied`, `impossible`, or None while its upstream is under way."""

    edge_id: str
    upstream: str
    downstream: str
    is_applied: bool
    resolution: str | None
    created_at_ms: int | None


class FlowCancelled(msgspec.Struct, frozen=True):
    """The flow is cancelled. `pending_execution_ids` are members that were not cancelled in time (yet)."""

    flow_id: str
    policy: CancelPolicy
    member_execution_ids: list[str]
    pending_execution_ids: list[str]


class FlowCancelHeader(msgspec.Struct, frozen=True):
    """The flow is cancelled; its members are to be acknowledged one by one."""

    cancellation_policy: CancelPolicy
    member_execution_ids: list[str]


class FlowAlreadyTerminal(msgspec.Struct, frozen=True):
    """The flow had ended before; what was stored when it did."""

    stored_cancellation_policy: str | None
    stored_cancel_reason: str | None
    member_execution_ids: list[str]


def _bad(field: str, detail: str) -> Validation:
    return Validation(ValidationKind.INVALID_INPUT, detail, field)


def check_cancel_policy(policy: object, field: str) -> CancelPolicy:
    """One of the three policies of a flow's cancel."""
    try:
        return CancelPolicy(policy)  # type: ignore[arg-type]
    except ValueError:
        raise _bad(field, f"expected one of {', '.join(CancelPolicy)}") from None


def policy_document(policy: object, field: str) -> dict[str, Any]:
    """The stored form of a group's policy, FlowFabric's."""
    match policy:
        case AllOfEdges():
            return {"kind": "all_of"}
        case AnyOfEdges(on_satisfied):
            return {"kind": "any_of", "on_satisfied": _check_on_satisfied(on_satisfied, field)}
        case QuorumEdges(k, on_satisfied):
            check_int(k, f"{field}.k", 1, BULK_MAX)
            return {"kind": "quorum", "k": k, "on_satisfied": _check_on_satisfied(on_satisfied, field)}
    raise _bad(field, "expected AllOfEdges, AnyOfEdges or QuorumEdges")


def _check_on_satisfied(value: object, field: str) -> str:
    try:
        return OnSatisfied(value).value  # type: ignore[arg-type]
    except ValueError:
        raise _bad(f"{field}.on_satisfied", f"expected one of {', '.join(OnSatisfied)}") from None


class Graph(NamedTuple):
    """A checked specification. Names in the order given; edges as pairs of names, none twice."""

    names: list[str]
    edges: list[tuple[str, str]]
    policies: dict[str, dict[str, Any]]
    incoming: Counter[str]


def check_graph(spec: object) -> Graph:
    """Check a whole specification: names, edges, cycles, and that every policy can be met."""
    if not isinstance(spec, FlowSpec):
        raise _bad("spec", "expected a FlowSpec")
    names = _check_names(spec.nodes)
    edges = _check_edges(spec.edges, set(names))
    incoming = Counter(downstream for _, downstream in edges)
    if not isinstance(spec.policies, Mapping):
        raise _bad("policies", "expected a mapping of names to policies")
    policies = {}
    for name, policy in spec.policies.items():
        if name not in incoming:
            raise _bad(f"policies[{name}]", "no edge leads to a node of this name")
        document = policy_document(policy, f"policies[{name}]")
        if document.get("k", 1) > incoming[name]:
            raise _bad(f"policies[{name}].k", f"a quorum of {document['k']} over {incoming[name]} edges")
        policies[name] = document
    _check_acyclic(names, edges, incoming)
    return Graph(names, edges, policies, incoming)


def _check_names(nodes: object) -> list[str]:
    if not isinstance(nodes, Mapping):
        raise _bad("nodes", "expected a mapping of names to NewExecution")
    if not 1 <= len(nodes) <= BULK_MAX:
        raise _bad("nodes", f"{len(nodes)} nodes, expected 1..{BULK_MAX}")
    names = []
    for name, new in nodes.items():
        names.append(check_text(name, "nodes", KIND_BYTES_MAX))
        if not isinstance(new, NewExecution):
            raise _bad(f"nodes[{name}]", "expected a NewExecution")
        for field in ("flow_id", "execution_id", "idempotency_key"):
            if getattr(new, field) is not None:
                raise _bad(f"nodes[{name}].{field}", "is given by the flow; leave it out")
    return names


def _check_edges(edges: object, names: set[str]) -> list[tuple[str, str]]:
    if isinstance(edges, str | bytes) or not isinstance(edges, Sequence):
        raise _bad("edges", "expected a list of (upstream, downstream) pairs of names")
    if len(edges) > FLOW_EDGES_MAX:
        raise _bad("edges", f"{len(edges)} edges, at most {FLOW_EDGES_MAX} are allowed")
    seen = set()
    for at, pair in enumerate(edges):
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise _bad(f"edges[{at}]", "expected a pair (upstream, downstream)")
        upstream, downstream = pair
        for name in (upstream, downstream):
            if not isinstance(name, str) or name not in names:
                raise _bad(f"edges[{at}]", f"{name!r:.80} is no node of this flow")
        if upstream == downstream:
            raise Conflict(ConflictKind.SELF_REFERENCING_EDGE, f"edges[{at}]: {upstream!r:.80} would wait for itself")
        if (upstream, downstream) in seen:
            raise _bad(f"edges[{at}]", f"the edge from {upstream!r:.80} to {downstream!r:.80} stands twice")
        seen.add((upstream, downstream))
    return [(upstream, downstream) for upstream, downstream in edges]


def _check_acyclic(names: list[str], edges: list[tuple[str, str]], incoming: Counter[str]) -> None:
    """Take away what nothing leads to, again and again; what cannot be taken away is on a cycle or behind one."""
    children: dict[str, list[str]] = {}
    for upstream, downstream in edges:
        children.setdefault(upstream, []).append(downstream)
    open_edges = Counter(incoming)
    free = deque(name for name in names if not open_edges[name])
    taken = 0
    while free:
        taken += 1
        for child in children.get(free.popleft(), ()):
            open_edges[child] -= 1
            if not open_edges[child]:
                free.append(child)
    if taken < len(names):
        stuck = next(name for name in names if open_edges[name])
        raise Conflict(ConflictKind.CYCLE_DETECTED, f"edges: {stuck!r:.80} is on a cycle or behind one")
