"""Graphs of executions: making them, looking at them, cancelling them."""

from __future__ import annotations

from collections.abc import Mapping

from ffd.core.flows import (
    CancelPolicy,
    EdgeApplied,
    EdgePolicy,
    EdgeSnapshot,
    EdgeStaged,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowCancelled,
    FlowCreated,
    FlowSnapshot,
    FlowSpec,
    FlowState,
    FlowSubmitted,
)
from ffd.core.records import Page
from ffd.engine.calls import Calls
from ffd.ops import cancel_flow as cancel_flow_op
from ffd.ops import edges as edges_op
from ffd.ops import flow_views as flow_views_op
from ffd.ops import flows as flows_op
from ffd.ops import submit_flow as submit_flow_op


class FlowCalls(Calls):
    """Flows.

    A child waits while edges into it are open. An edge is satisfied by its upstream's success and impossible by
    any other ending; the group of a child's edges decides by its policy, once: the child becomes claimable, or it
    is skipped and so are, in turn, its own children. All of that has happened when the call that ended the
    upstream returns.
    """

    async def create_flow(
        self, *, flow_id: str | None = None, kind: str = "", tags: Mapping[str, str] | None = None
    ) -> FlowCreated:
        """Open a flow; it takes members until it is sealed. The same `flow_id` again gives the first."""
        with self._timed("create_flow"):
            return await flows_op.create_flow(self._runtime, flow_id=flow_id, kind=kind, tags=tags)

    async def add_execution_to_flow(self, flow_id: str, execution_id: str) -> None:
        """Make an execution of the flow's partition a member; nothing happens if it is one already."""
        with self._timed("add_execution_to_flow"):
            await flows_op.add_execution_to_flow(self._runtime, flow_id, execution_id)

    async def set_edge_group_policy(self, flow_id: str, downstream: str, policy: EdgePolicy) -> None:
        """Say how a child decides, before any edge into it is staged. Without a call it is `AllOfEdges()`."""
        with self._timed("set_edge_group_policy"):
            await edges_op.set_edge_group_policy(self._runtime, flow_id, downstream, policy)

    async def stage_dependency_edge(
        self,
        flow_id: str,
        upstream: str,
        downstream: str,
        *,
        edge_id: str | None = None,
        expected_graph_revision: int | None = None,
    ) -> EdgeStaged:
        """Put an edge between two members into the graph; it counts once it is applied.

        `Contention(STALE_GRAPH_REVISION)` when the graph has changed since `expected_graph_revision`, `Conflict`
        for a cycle, a self edge or an edge that exists.
        """
        with self._timed("stage_dependency_edge"):
            return await edges_op.stage_dependency_edge(
                self._runtime,
                flow_id,
                upstream,
                downstream,
                edge_id=edge_id,
                expected_graph_revision=expected_graph_revision,
            )

    async def apply_dependency_to_child(self, flow_id: str, edge_id: str) -> EdgeApplied:
        """Make a staged edge count: a child that no worker has claimed yet waits for it from now on.

        An upstream that has ended counts at once. A second call changes nothing.
        """
        with self._timed("apply_dependency_to_child"):
            return await edges_op.apply_dependency_to_child(self._runtime, flow_id, edge_id)

    async def seal_flow(self, flow_id: str) -> None:
        """Take no new members; the flow ends with its last one, at once if all have ended. Edges may still come."""
        with self._timed("seal_flow"):
            await flows_op.seal_flow(self._runtime, flow_id)

    async def submit_flow(self, spec: FlowSpec, *, idempotency_key: str | None = None) -> FlowSubmitted:
        """Create a whole graph, sealed, in one transaction.

        The same `idempotency_key` in this namespace gives the first flow for as long as that flow is kept.
        """
        with self._timed("submit_flow"):
            return await submit_flow_op.submit_flow(self._runtime, spec, idempotency_key)

    async def describe_flow(self, flow_id: str) -> FlowSnapshot | None:
        """The flow as it is now; None when there is none."""
        with self._timed("describe_flow"):
            return await flow_views_op.describe_flow(self._runtime, flow_id)

    async def list_flows(
        self,
        *,
        state: FlowState | str | None = None,
        namespace: str | None = None,
        tag: str | tuple[str, str] | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page[FlowSnapshot]:
        """A page of flows, newest ids first; pass a page's `next` as `after` for the following one."""
        with self._timed("list_flows"):
            return await flow_views_op.list_flows(
                self._runtime, state=state, namespace=namespace, tag=tag, after=after, limit=limit
            )

    async def list_edges(
        self,
        flow_id: str,
        *,
        upstream: str | None = None,
        downstream: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page[EdgeSnapshot]:
        """A page of a flow's edges by id, all or those of one execution. `NotFound` for an unknown flow."""
        with self._timed("list_edges"):
            return await flow_views_op.list_edges(
                self._runtime, flow_id, upstream=upstream, downstream=downstream, after=after, limit=limit
            )

    async def get_upstream_results(self, execution_id: str) -> dict[str, bytes | None]:
        """The result of every execution with an edge into this one; None for those without (yet)."""
        with self._timed("get_upstream_results"):
            return await flow_views_op.get_upstream_results(self._runtime, execution_id)

    async def cancel_flow(
        self,
        flow_id: str,
        *,
        policy: CancelPolicy | str = CancelPolicy.CANCEL_ALL,
        reason: str,
        actor: str = "",
        wait_ms: int | None = None,
    ) -> FlowCancelled:
        """Cancel a flow and, by its policy, its members.

        Up to a bound, members are cancelled before the call returns. The rest, and members whose rows somebody
        holds, are cancelled by a reconciler, or within `wait_ms` by this call; who is left over is named.
        A flow that is cancelled already is answered likewise; one that ended otherwise is
        `State(FLOW_ALREADY_TERMINAL)`.
        """
        with self._timed("cancel_flow_wait" if wait_ms else "cancel_flow"):
            return await cancel_flow_op.cancel_flow(
                self._runtime, flow_id, policy=policy, reason=reason, actor=actor, wait_ms=wait_ms
            )

    async def cancel_flow_header(
        self, flow_id: str, *, reason: str, cancellation_policy: CancelPolicy | str
    ) -> FlowCancelHeader | FlowAlreadyTerminal:
        """Cancel a flow for a caller that acknowledges each member with `ack_cancel_member`."""
        with self._timed("cancel_flow_header"):
            return await cancel_flow_op.cancel_flow_header(
                self._runtime, flow_id, reason=reason, cancellation_policy=cancellation_policy
            )

    async def ack_cancel_member(self, flow_id: str, execution_id: str) -> None:
        """Strike a member off the backlog of a cancelled flow; the backlog goes with its last one."""
        with self._timed("ack_cancel_member"):
            await cancel_flow_op.ack_cancel_member(self._runtime, flow_id, execution_id)
