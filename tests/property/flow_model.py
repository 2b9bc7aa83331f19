"""What a flow's members become, in plain Python: a graph, its policies, and endings carried through it level by level.

Written from the contract, not from the engine: a child that was never claimed waits for its group; the group decides
once; a success satisfies an edge, any other ending makes it impossible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

BLOCKED = "waiting_children"
WAITING = "waiting"
RUNNING = "running"
COMPLETED = "completed"
SKIPPED = "skipped"
CANCELLED = "cancelled"
ENDED = frozenset({COMPLETED, "failed", "expired", SKIPPED, CANCELLED})

Edge = tuple[int, int]


class Policy(NamedTuple):
    """How many successes a child needs (None: all), and whether its group cancels who is still under way."""

    need: int | None
    cancels: bool


ALL_OF = Policy(None, False)


class FlowModel:
    """The members of one sealed flow by number."""

    def __init__(self, count: int, edges: Sequence[Edge], policies: Mapping[int, Policy]) -> None:
        self.edges = list(edges)
        self.policies = {child: policies.get(child, ALL_OF) for _, child in edges}
        self.states = [BLOCKED if node in self.policies else WAITING for node in range(count)]
        # What became of each edge; an edge is resolved once.
        self.resolved: dict[Edge, str] = {}
        # Who has ended without its flow having heard of it.
        self.owed: set[int] = set()

    def waiting(self) -> list[int]:
        """Who can be claimed."""
        return [node for node, state in enumerate(self.states) if state == WAITING]

    def open(self) -> list[int]:
        """Who has not ended."""
        return [node for node, state in enumerate(self.states) if state not in ENDED]

    def end(self, node: int, state: str) -> None:
        """A member ends, and its flow hears of it."""
        self.states[node] = state
        self._carry([node])

    def end_unheard(self, node: int, state: str) -> None:
        """A member ends, and whoever ended it is gone before telling the flow."""
        self.states[node] = state
        self.owed.add(node)

    def settle(self) -> None:
        """The flow hears of what it was owed."""
        self._carry(self.owed)
        self.owed = set()

    def _carry(self, ended: Iterable[int]) -> None:
        level = set(ended)
        while level:
            touched = set()
            for edge in self.edges:
                if edge[0] in level and edge not in self.resolved:
                    self.resolved[edge] = self.states[edge[0]]
                    touched.add(edge[1])
            # All children of a level decide on what they see together; then the losers are cancelled.
            decided = {child: verdict for child in touched if (verdict := self._verdict(child)) is not None}
            self.states = [decided.get(node, state) for node, state in enumerate(self.states)]
            skipped = {child for child, verdict in decided.items() if verdict == SKIPPED}
            losers = {
                upstream
                for upstream, child in self.edges
                if child in decided
                and self.policies[child].cancels
                and (upstream, child) not in self.resolved
                and self.states[upstream] not in ENDED
            }
            for loser in losers:
                self.states[loser] = CANCELLED
            level = skipped | losers

    def _verdict(self, child: int) -> str | None:
        if self.states[child] != BLOCKED:
            return None
        incoming = [edge for edge in self.edges if edge[1] == child]
        known = [self.resolved[edge] for edge in incoming if edge in self.resolved]
        need = self.policies[child].need
        wanted = len(incoming) if need is None else need
        successes = known.count(COMPLETED)
        if successes >= wanted:
            return WAITING
        still_possible = successes + len(incoming) - len(known)
        return SKIPPED if still_possible < wanted else None

    def flow_state(self) -> str | None:
        """How the flow ended: by the members that nothing depends on. None while a member is open."""
        if self.open():
            return None
        upstreams = {upstream for upstream, _ in self.edges}
        sinks = [state for node, state in enumerate(self.states) if node not in upstreams]
        return COMPLETED if all(state == COMPLETED for state in sinks) else "failed"

    def unjustified(self, cancelled_by_operator: set[int]) -> list[int]:
        """Whose ending no rule explains, whatever order the engine worked in; for flows that have ended."""
        found = []
        for node, state in enumerate(self.states):
            outcomes = [self.states[upstream] for upstream, child in self.edges if child == node]
            need = self.policies[node].need if outcomes else 0
            is_met = outcomes.count(COMPLETED) >= (len(outcomes) if need is None else need)
            if state == CANCELLED:
                is_right = node in cancelled_by_operator or any(
                    self.policies[child].cancels and self.states[child] != BLOCKED
                    for upstream, child in self.edges
                    if upstream == node
                )
            else:
                is_right = state in ENDED and (state == SKIPPED) != is_met
            if not is_right:
                found.append(node)
        return found
