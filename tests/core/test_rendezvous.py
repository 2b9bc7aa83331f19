"""Who should own what: everybody agrees, shares are even, and only what must move moves."""

from __future__ import annotations

from collections import Counter

import pytest

from ffd.core.rendezvous import choose

NODES = [f"node-{at}" for at in range(5)]
THINGS = range(256)


def owners(nodes: list[str]) -> list[str | None]:
    return [choose(thing, nodes) for thing in THINGS]


def test_nobody_owns_anything_where_nobody_is() -> None:
    assert set(owners([])) == {None}


def test_one_node_owns_everything() -> None:
    assert set(owners(["only"])) == {"only"}


def test_the_order_in_which_nodes_are_known_does_not_matter() -> None:
    assert owners(NODES) == owners(NODES[::-1])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_shares_are_about_even(count: int) -> None:
    shares = Counter(owners(NODES[:count])).values()
    assert min(shares) > 256 / count * 0.6
    assert max(shares) < 256 / count * 1.4


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_join_moves_its_share_and_nothing_else(count: int) -> None:
    before, after = owners(NODES[:count]), owners(NODES[: count + 1])
    moved = [thing for thing in THINGS if before[thing] != after[thing]]
    assert {after[thing] for thing in moved} == {NODES[count]}
    assert len(moved) == pytest.approx(256 / (count + 1), rel=0.4)
