"""Ownership across nodes: join, leave, vanish, pause, no progress. Nodes are real, on one real database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import anyio
import pytest

from ffd import Engine
from ffd.core.rendezvous import choose
from ffd.daemon import ownership
from ffd.daemon.ownership import Node, Owner
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio

TTL_MS = 5_000
EVERYTHING = frozenset(range(256))


class Desk:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.finished: list[int] = []
        self.abandoned: list[int] = []
        self.stuck: list[int] = []
        self.suspicions: list[str] = []

    def begin(self, partitions: Iterable[int]) -> None:
        new = set(partitions)
        assert new, "told of nothing"
        assert not new & self.held, "begun twice"
        self.held |= new

    async def finish(self, partitions: Iterable[int]) -> None:
        await anyio.lowlevel.checkpoint()
        self.finished += partitions
        self.held -= set(partitions)

    def abandon(self, partitions: Iterable[int]) -> None:
        self.abandoned += partitions
        self.held -= set(partitions)

    def failing(self) -> Sequence[int]:
        return self.stuck

    def suspect(self, why: str) -> None:
        self.suspicions.append(why)


def node(engine: Engine, name: str) -> tuple[Owner, Desk]:
    desk = Desk()
    return Owner(engine._runtime, Node(name, name, "1"), TTL_MS, desk), desk


async def owners(rig: Rig) -> dict[int, str | None]:
    rows = await rig.sql.fetch("select partition_key, node_id from ff_partition")
    return {row["partition_key"]: row["node_id"] for row in rows}


async def settle(*nodes: Owner) -> None:
    """Beat in turn until everybody has given and taken."""
    for _ in range(2):
        for each in nodes:
            await each.beat()


async def test_one_node_owns_all(rig: Rig, engine: Engine) -> None:
    owner, desk = node(engine, "a")
    assert owner.owned == frozenset()
    await owner.beat()
    assert owner.owned == EVERYTHING == desk.held
    assert set((await owners(rig)).values()) == {"a"}
    await owner.beat()
    assert await rig.sql.fetchval("select max(epoch) from ff_partition") == 1, "rows are written on moves only"


async def test_a_join_moves_its_share_after_what_was_under_way(rig: Rig, engine: Engine) -> None:
    a, desk_a = node(engine, "a")
    await a.beat()
    b, desk_b = node(engine, "b")
    await b.beat()
    assert b.owned == frozenset(), "nothing is taken from a living node"
    await settle(a, b)
    wanted = frozenset(at for at in EVERYTHING if choose(at, ["a", "b"]) == "b")
    assert (b.owned, a.owned) == (wanted, EVERYTHING - wanted)
    assert set(desk_a.finished) == wanted
    assert desk_a.abandoned == []
    assert desk_a.held | desk_b.held == EVERYTHING
    assert 90 < len(wanted) < 166


async def test_a_leave_gives_everything_back_at_once(rig: Rig, engine: Engine, clock: Clock) -> None:
    a, _ = node(engine, "a")
    b, _ = node(engine, "b")
    await settle(a, b)
    await b.leave()
    assert b.owned == frozenset()
    assert "b" not in set((await owners(rig)).values())
    await a.beat()
    assert a.owned == EVERYTHING
    assert await rig.sql.fetchval("select array_agg(node_id) from ff_node") == ["a"]


async def test_a_node_that_vanished_is_followed_when_its_lease_has_run_out(
    rig: Rig, engine: Engine, clock: Clock
) -> None:
    a, _ = node(engine, "a")
    b, _ = node(engine, "b")
    await settle(a, b)
    share = len(a.owned)
    await clock.advance(TTL_MS - 1)
    await a.beat()
    assert len(a.owned) == share
    await clock.advance(1)
    await a.beat()
    assert a.owned == EVERYTHING


async def test_a_node_that_cannot_renew_stops_before_its_lease_ends(
    rig: Rig, engine: Engine, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, desk = node(engine, "a")
    await a.beat()
    real = time.monotonic
    await clock.advance(4500)
    monkeypatch.setattr(time, "monotonic", lambda: real() + TTL_MS / 1000 * 0.9)
    assert a.owned == frozenset(), "by the clock of its own host, counted from when the heartbeat was sent"
    await rig.sql.execute("alter table ff_node rename to ff_node_away")
    await a.beat()
    assert desk.held == set()
    assert set(desk.abandoned) == EVERYTHING
    assert a.last_error is not None
    await rig.sql.execute("alter table ff_node_away rename to ff_node")
    await a.beat()
    assert a.owned == EVERYTHING == desk.held
    assert desk.suspicions == ["outage"]


async def test_a_paused_node_that_wakes_up_gives_way(rig: Rig, engine: Engine, clock: Clock) -> None:
    """It was followed while it slept: it learns of it with its first heartbeat and takes its share again."""
    a, desk_a = node(engine, "a")
    b, _ = node(engine, "b")
    await settle(a, b)
    share = a.owned
    await clock.advance(TTL_MS)
    await b.beat()
    assert b.owned == EVERYTHING
    await a.beat()
    assert a.owned == frozenset()
    assert set(desk_a.abandoned) == share
    await settle(b, a)
    assert (a.owned, b.owned) == (share, EVERYTHING - share)


async def test_a_partition_without_progress_is_given_to_another_for_a_while(
    rig: Rig, engine: Engine, clock: Clock
) -> None:
    a, desk = node(engine, "a")
    await a.beat()
    desk.stuck = [7]
    await a.beat()
    assert 7 in a.owned, "there is nobody else"
    b, _ = node(engine, "b")
    await settle(b, a, b)
    mine = next(at for at in sorted(a.owned))
    desk.stuck = [mine]
    await a.beat()
    desk.stuck = []
    await settle(b, a)
    assert mine in b.owned
    assert mine not in a.owned
    await clock.advance(ownership.AVOID_MS)
    await settle(a, b, a)
    assert mine in a.owned


async def test_a_heartbeat_does_not_bring_back_a_node_that_has_left(rig: Rig, engine: Engine) -> None:
    a, _ = node(engine, "a")
    await a.beat()
    async with anyio.create_task_group() as group:
        group.start_soon(a.leave)
        group.start_soon(a.beat)
    await a.beat()
    assert await rig.sql.fetchval("select count(*) from ff_node") == 0
    assert set((await owners(rig)).values()) == {None}


async def test_a_sweep_that_does_not_end_holds_up_no_heartbeat(
    rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, desk = node(engine, "a")
    b, _ = node(engine, "b")
    await a.beat()

    async def finish(partitions: Iterable[int]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            desk.held -= set(partitions)

    monkeypatch.setattr(desk, "finish", finish)
    monkeypatch.setattr(ownership, "BEAT_FRACTION", 0.05)
    await b.beat()
    await settle(a, b)
    assert a.is_alive
    assert a.owned == frozenset(desk.held)
    assert len(b.owned) + len(a.owned) == 256


async def test_a_node_that_is_leaving_takes_nothing_more(rig: Rig, engine: Engine, clock: Clock) -> None:
    a, _ = node(engine, "a")
    b, _ = node(engine, "b")
    await settle(a, b)
    share = a.owned
    a.stop_taking()
    await clock.advance(TTL_MS)
    await a.beat()
    assert a.owned == share


async def test_a_step_of_the_database_clock_is_suspicious(rig: Rig, engine: Engine, clock: Clock) -> None:
    a, desk = node(engine, "a")
    await a.beat()
    await a.beat()
    assert desk.suspicions == []
    await clock.advance(10_000)
    await a.beat()
    assert desk.suspicions == ["clock step"]


async def test_many_nodes_at_once_end_up_with_everything_exactly_once(rig: Rig, engine: Engine) -> None:
    """Racing heartbeats neither deadlock nor take the same partition twice."""
    nodes = [node(engine, f"n{at}") for at in range(8)]
    for _ in range(6):
        async with anyio.create_task_group() as group:
            for owner, _ in nodes:
                group.start_soon(owner.beat)
    held = [at for owner, _ in nodes for at in owner.owned]
    assert sorted(held) == list(range(256))
    for owner, desk in nodes:
        assert desk.held == owner.owned
