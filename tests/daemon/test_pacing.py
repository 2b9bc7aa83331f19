"""After an outage: many expired leases are given back at a bounded pace, few at once."""

from __future__ import annotations

import time

import pytest
from prometheus_client import REGISTRY

from ffd.daemon import pacing
from ffd.daemon.pacing import ReclaimPace
from tests.reconcilers.scenes import DUE_AFTER_MS, SCENES
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio

ALL = list(range(256))


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "PACED_FROM_ROWS", 10)


async def expired(rig: Rig, clock: Clock, count: int) -> None:
    await SCENES["lease_expiry"](rig, clock, 3, count)
    await clock.advance(DUE_AFTER_MS)


async def test_few_are_given_back_at_once(rig: Rig, clock: Clock) -> None:
    pace = ReclaimPace()
    await expired(rig, clock, 9)
    await pace.look(rig.engine._runtime, ALL)
    assert not pace.is_paced
    assert pace.take(1000) == 1000


async def test_many_are_spread_and_the_end_is_in_sight(rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = ReclaimPace()
    await expired(rig, clock, 120)
    await pace.look(rig.engine._runtime, ALL)
    assert pace.is_paced
    assert REGISTRY.get_sample_value("ffd_reclaim_paced") == 1
    assert pace.take(1000) == 0, "nothing has been earned yet"
    given = 0
    for _ in range(60):
        now += 1
        given += pace.take(1000)
    assert given == 120, "all of it within a minute"
    now += 1
    await pace.look(rig.engine._runtime, ALL)
    assert not pace.is_paced
    assert REGISTRY.get_sample_value("ffd_reclaim_paced") == 0


async def test_what_a_sweep_did_not_need_goes_to_the_next(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = ReclaimPace()
    await expired(rig, clock, 600)
    await pace.look(rig.engine._runtime, ALL)
    now += 1
    assert (pace.take(6), pace.take(1000), pace.take(1000)) == (6, 4, 0)
    pace.give_back(5)
    assert pace.take(1000) == 5


async def test_it_looks_only_when_there_is_a_reason(rig: Rig, clock: Clock) -> None:
    pace = ReclaimPace()
    await pace.look(rig.engine._runtime, ALL)
    await expired(rig, clock, 20)
    await pace.look(rig.engine._runtime, ALL)
    assert not pace.is_paced, "many workers may die in ordinary times"
    pace.suspect("outage")
    await pace.look(rig.engine._runtime, ALL)
    assert pace.is_paced
