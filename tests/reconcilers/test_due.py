"""Every reconciler, the same promises: due, not due, raced by the owner, more than a batch, a poisoned row."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import anyio
import asyncpg
import pytest

from ffd.core.schedule import RECONCILERS
from ffd.reconcilers.registry import load_reconcilers
from tests.reconcilers.scenes import DUE_AFTER_MS, ENTITIES, EXECUTIONS, SCENES
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio

AT = 7
EVERYWHERE = list(range(256))
LOADED = load_reconcilers()


def test_every_reconciler_has_a_scene() -> None:
    assert set(SCENES) == set(RECONCILERS) == set(LOADED)


async def poison(sql: asyncpg.Connection[Any], reconciler: str, entity: UUID) -> None:
    """From now on the server refuses every change of this row."""
    table, column = ENTITIES.get(reconciler, EXECUTIONS)
    await sql.execute(
        f"""
        create function ff_test_poison() returns trigger language plpgsql as $$
        begin
          if old.{column} = '{entity}' then
            raise exception 'poisoned' using errcode = '22000';
          end if;
          return coalesce(new, old);
        end $$;
        create trigger ff_test_poison before update or delete on {table}
          for each row execute function ff_test_poison();
        """
    )


async def heal(sql: asyncpg.Connection[Any], reconciler: str) -> None:
    table, _ = ENTITIES.get(reconciler, EXECUTIONS)
    await sql.execute(f"drop trigger ff_test_poison on {table}")


@pytest.mark.parametrize("name", RECONCILERS)
async def test_the_probe_knows_who_is_due_and_when_the_next_will_be(rig: Rig, clock: Clock, name: str) -> None:
    """X-005 and C-238 and on: what the probe finds the sweep moves, and then nothing is left to find."""
    runtime, reconciler = rig.engine._runtime, LOADED[name]
    nothing = await reconciler.look(runtime, EVERYWHERE)
    assert (nothing.due, nothing.next_at_ms, nothing.lag_ms) == ([], None, 0)
    await SCENES[name](rig, clock, AT, 3)
    before = await reconciler.look(runtime, EVERYWHERE)
    assert before.due == []
    assert before.next_at_ms is not None
    assert before.now_ms < before.next_at_ms <= before.now_ms + DUE_AFTER_MS
    assert (await reconciler.sweep(runtime, AT, 100)).moved == 0
    await clock.advance(DUE_AFTER_MS + 2000)
    due = await reconciler.look(runtime, EVERYWHERE)
    assert due.due == [AT]
    assert due.lag_ms >= 2000
    assert (await reconciler.look(runtime, [each for each in EVERYWHERE if each != AT])).due == []
    while (await reconciler.sweep(runtime, AT, 100)).moved:
        pass
    after = await reconciler.look(runtime, EVERYWHERE)
    assert (after.due, after.lag_ms) == ([], 0)


@pytest.mark.parametrize("name", RECONCILERS)
async def test_more_than_a_batch_takes_several_sweeps(rig: Rig, clock: Clock, name: str) -> None:
    runtime, reconciler = rig.engine._runtime, LOADED[name]
    await SCENES[name](rig, clock, AT, 5)
    await clock.advance(DUE_AFTER_MS)
    assert [(await reconciler.sweep(runtime, AT, 2)).moved for _ in range(4)] == [2, 2, 1, 0]


@pytest.mark.parametrize("name", ["dependency", "cancel_backlog"])
async def test_a_flow_that_somebody_holds_keeps_nobody_waiting(rig: Rig, clock: Clock, name: str) -> None:
    runtime, reconciler = rig.engine._runtime, LOADED[name]
    entities = await SCENES[name](rig, clock, AT, 3)
    await clock.advance(DUE_AFTER_MS)
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_flow_core where flow_id = $1 for no key update", entities[0])
        with anyio.fail_after(3):  # a lock is waited for five seconds
            assert [(await reconciler.sweep(runtime, AT, 100)).moved for _ in range(2)] == [2, 0]
    assert (await reconciler.sweep(runtime, AT, 100)).moved == 1


@pytest.mark.parametrize("name", [name for name in RECONCILERS if name not in ("dependency", "cancel_backlog")])
async def test_a_row_that_somebody_holds_is_passed_over(rig: Rig, clock: Clock, name: str) -> None:
    runtime, reconciler = rig.engine._runtime, LOADED[name]
    entities = await SCENES[name](rig, clock, AT, 3)
    await clock.advance(DUE_AFTER_MS)
    table, column = ENTITIES.get(name, EXECUTIONS)
    async with rig.sql.transaction():
        await rig.sql.execute(f"select 1 from {table} where {column} = $1 for no key update", entities[0])
        assert [(await reconciler.sweep(runtime, AT, 100)).moved for _ in range(2)] == [2, 0]
        assert (await reconciler.look(runtime, EVERYWHERE)).due == [AT]
    assert (await reconciler.sweep(runtime, AT, 100)).moved == 1


@pytest.mark.parametrize("name", RECONCILERS)
async def test_a_poisoned_row_is_set_aside_and_tried_again_later(rig: Rig, clock: Clock, name: str) -> None:
    """One row that cannot be moved stops nobody else, is recorded without its text, and has its turn again."""
    runtime, reconciler = rig.engine._runtime, LOADED[name]
    entities = await SCENES[name](rig, clock, AT, 5)
    await clock.advance(DUE_AFTER_MS)
    await poison(rig.sql, name, entities[2])
    report = await reconciler.sweep(runtime, AT, 100)
    assert report.outcomes["quarantined"] == 1
    row = await rig.sql.fetchrow("select * from ff_quarantine")
    assert row is not None
    assert (row["partition_key"], row["reconciler"], row["entity_id"]) == (AT, name, entities[2])
    assert (row["failures"], row["error"]) == (1, "DataError 22000")
    look = await reconciler.look(runtime, EVERYWHERE)
    assert (look.due, look.lag_ms) == ([], 0), "the others are done, and nobody is woken for this one"
    assert (await reconciler.sweep(runtime, AT, 100)).moved == 0
    await clock.advance(60_000)
    assert (await reconciler.look(runtime, EVERYWHERE)).due == [AT]
    assert (await reconciler.sweep(runtime, AT, 100)).outcomes == {"quarantined": 1}
    again = await rig.sql.fetchrow("select failures, retry_at_ms - ff_now_ms() as wait_ms from ff_quarantine")
    assert again is not None
    assert (again["failures"], again["wait_ms"]) == (2, 120_000)
    await heal(rig.sql, name)
    await clock.advance(120_000)
    healed = await reconciler.sweep(runtime, AT, 100)
    assert healed.moved == 1
    assert healed.outcomes["quarantined"] == 0
    assert (await reconciler.look(runtime, EVERYWHERE)).due == []
