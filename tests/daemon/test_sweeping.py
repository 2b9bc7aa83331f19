"""Watches and partition tasks: due rows are found and moved, idle ones cost nothing, trouble is held back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import asyncpg
import pytest
from prometheus_client import REGISTRY

from ffd import Contention, ContentionKind
from ffd.config import ReconcilerSettings, Settings
from ffd.daemon import sweeping as sweeping_module
from ffd.daemon.sweeping import Partition, Sweeping
from ffd.daemon.tasks import Tasks
from ffd.db.statement import Statement
from ffd.reconcilers.registry import Reconciler, load_reconcilers
from tests.reconcilers.scenes import DUE_AFTER_MS, SCENES, create
from tests.reconcilers.test_due import poison
from tests.support import Clock, Rig, until

pytestmark = pytest.mark.anyio

AT = 7
# Long: a test that passes does not wait for the interval.
SLOW = {name: ReconcilerSettings(interval_ms=600_000, batch_rows=2) for name in Settings().reconcilers}


@asynccontextmanager
async def daemon(rig: Rig, settings: Any = SLOW, owned: range = range(256)) -> AsyncIterator[Sweeping]:
    """All watches and partition tasks, in this process."""
    tasks = Tasks()
    async with anyio.create_task_group() as group:
        sweeping = Sweeping(rig.engine._runtime, load_reconcilers(), settings, tasks, group)
        sweeping.begin(owned)
        for reconciler in sweeping.reconcilers.values():
            group.start_soon(tasks.run, f"watch-{reconciler.name}", _watch(sweeping, reconciler))
        yield sweeping
        group.cancel_scope.cancel()


def _watch(sweeping: Sweeping, reconciler: Reconciler) -> Callable[[Any], Any]:
    return lambda task: sweeping.watch(reconciler, task)


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_what_is_due_is_moved_in_every_partition(rig: Rig, clock: Clock) -> None:
    """More than a batch in one of them; nothing before its time."""
    for at in (0, 7, 255):
        await create(rig, at, 5, delay_until_ms=await clock.now_ms() + 1000)
    async with daemon(rig) as sweeping:
        await until(lambda: sample("ffd_reconciler_last_success_timestamp_seconds", reconciler="delayed_promoter") > 0)
        assert await rig.engine.claim("scene", worker_id="w", worker_instance_id="i") is None
        await clock.advance(1000)
        sweeping.poke("delayed_promoter")
        await until(lambda: _waiting(rig, 15))


async def _waiting(rig: Rig, count: int) -> bool:
    return bool(count == await rig.sql.fetchval("select count(*) from ff_exec_core where public_state = 'waiting'"))


async def test_it_sleeps_until_the_next_row_is_due_and_not_until_its_interval(rig: Rig) -> None:
    """On the real clock: a delay of a moment, an interval of ten minutes."""
    now = await rig.sql.fetchval("select ff_now_ms()")
    await rig.create(lane="scene", delay_until_ms=now + 700)
    async with daemon(rig):
        claim = await rig.engine.claim("scene", worker_id="w", worker_instance_id="i", wait_ms=10_000)
    assert claim is not None


async def test_at_rest_partitions_are_left_alone(rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs one statement for all partitions; nobody is woken for what is not due."""
    statements: list[str] = []
    real = rig.engine._runtime.db.fetch

    async def fetch(statement: Statement, *args: Any) -> Any:
        statements.append(statement.name)
        return await real(statement, *args)

    await create(rig, AT, 3, delay_until_ms=await clock.now_ms() + DUE_AFTER_MS)
    monkeypatch.setattr(rig.engine._runtime.db, "fetch", fetch)
    async with daemon(rig):
        await anyio.sleep(0.5)
    assert len(statements) <= 2 * len(SLOW) + 2
    assert {name.removesuffix("_probe") for name in statements} <= {*SLOW, "count_expired", "register_lanes"}


async def test_due_but_not_moved_backs_off_instead_of_spinning(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(rig, AT, 1, delay_until_ms=await clock.now_ms() + 1000)
    await clock.advance(1000)
    monkeypatch.setattr(sweeping_module, "LOOK_EVERY_S", 0.01)
    quick = {**SLOW, "delayed_promoter": ReconcilerSettings(interval_ms=10)}
    before = sample("ffd_reconciler_ticks_total", reconciler="delayed_promoter", result="idle")

    def idle() -> float:
        return sample("ffd_reconciler_ticks_total", reconciler="delayed_promoter", result="idle") - before

    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for no key update")
        async with daemon(rig, quick) as sweeping:
            await anyio.sleep(1.0)
            assert 1 <= idle() <= 4, "looks are 10 ms apart"
            assert sample("ffd_reconciler_lag_seconds", reconciler="delayed_promoter") == 0, "due at this very moment"
            assert sweeping.failing() == []


async def test_a_held_row_is_moved_when_it_is_free(rig: Rig, clock: Clock) -> None:
    await create(rig, AT, 1, delay_until_ms=await clock.now_ms() + 1000)
    await clock.advance(1000)
    quick = {**SLOW, "delayed_promoter": ReconcilerSettings(interval_ms=10)}
    async with daemon(rig, quick):
        async with rig.sql.transaction():
            await rig.sql.execute("select 1 from ff_exec_core for no key update")
            await anyio.sleep(0.3)
        await until(lambda: _waiting(rig, 1))


async def test_a_poisoned_row_does_not_stop_its_partition(rig: Rig, clock: Clock) -> None:
    entities = await create(rig, AT, 7, delay_until_ms=await clock.now_ms() + 1000)
    await poison(rig.sql, "delayed_promoter", entities[0])
    await clock.advance(1000)
    before = sample("ffd_reconciler_rows_total", reconciler="delayed_promoter", outcome="quarantined")
    async with daemon(rig):
        await until(lambda: _waiting(rig, 6))
    assert sample("ffd_reconciler_rows_total", reconciler="delayed_promoter", outcome="quarantined") == before + 1


async def test_what_an_ending_owes_its_flow_is_settled_at_once(rig: Rig, clock: Clock) -> None:
    """The dependency reconciler is woken by the sweep, not by its interval."""
    from ffd import ExecutionPolicy, FlowSpec, NewExecution

    nodes = {"a": NewExecution(lane="a", policy=ExecutionPolicy(max_reclaim_count=0)), "b": NewExecution(lane="b")}
    ids = (await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))).execution_ids
    await rig.claim("a")
    await clock.advance(30_000)
    async with daemon(rig):

        async def is_skipped() -> bool:
            return await rig.public(ids["b"]) == "skipped"

        await until(is_skipped)


async def test_a_reconciler_can_be_switched_off_and_on(rig: Rig, clock: Clock) -> None:
    """V-132: an interval of zero, or not enabled; other settings are taken over while it runs."""
    await create(rig, AT, 1, delay_until_ms=await clock.now_ms() + 1000)
    await clock.advance(1000)
    for off in (ReconcilerSettings(interval_ms=0), ReconcilerSettings(enabled=False)):
        async with daemon(rig, {**SLOW, "delayed_promoter": off}):
            await anyio.sleep(0.2)
            assert await _waiting(rig, 0)
    async with daemon(rig, {**SLOW, "delayed_promoter": ReconcilerSettings(enabled=False)}) as sweeping:
        await anyio.sleep(0.1)
        sweeping.configure(SLOW)
        await until(lambda: _waiting(rig, 1))


async def test_only_owned_partitions_are_swept(rig: Rig, clock: Clock) -> None:
    for at in (3, 200):
        await create(rig, at, 1, delay_until_ms=await clock.now_ms() + 1000)
    await clock.advance(1000)
    async with daemon(rig, owned=range(100)) as sweeping:
        await until(lambda: _waiting(rig, 1))
        await anyio.sleep(0.2)
        assert await _waiting(rig, 1)
        sweeping.begin([200])
        await until(lambda: _waiting(rig, 2))


async def test_nothing_is_swept_without_the_lease_of_the_node(rig: Rig, clock: Clock) -> None:
    await create(rig, AT, 1, delay_until_ms=await clock.now_ms() + 1000)
    async with daemon(rig) as sweeping:
        sweeping.is_held = lambda: False
        await clock.advance(1000)
        sweeping.poke("delayed_promoter")
        await anyio.sleep(0.3)
        assert await _waiting(rig, 0)
        sweeping.is_held = lambda: True
        sweeping.poke("delayed_promoter")
        await until(lambda: _waiting(rig, 1))


async def test_finishing_waits_for_the_sweep_under_way_and_begins_no_other(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(rig, AT, 5, delay_until_ms=await clock.now_ms() + 1000)
    await clock.advance(1000)
    begun, may_go = anyio.Event(), anyio.Event()
    real = load_reconcilers()["delayed_promoter"].tick

    async def slow(*args: Any) -> Any:
        begun.set()
        await may_go.wait()
        return await real(*args)

    monkeypatch.setattr("ffd.reconcilers.delayed_promoter.tick", slow)
    async with daemon(rig) as sweeping:
        await begun.wait()
        finished = anyio.Event()

        async def finish() -> None:
            await sweeping.finish([AT])
            finished.set()

        async with anyio.create_task_group() as group:
            group.start_soon(finish)
            await anyio.sleep(0.1)
            assert not finished.is_set()
            may_go.set()
        assert finished.is_set()
        assert await _waiting(rig, 2), "one batch and no more"
        await anyio.sleep(0.2)
        assert await _waiting(rig, 2)


async def test_a_partition_that_only_fails_is_reported_for_giving_up(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping_module, "NO_PROGRESS_S", 0.2)
    await create(rig, AT, 1, delay_until_ms=await clock.now_ms() + 1000)
    await clock.advance(1000)

    async def broken(*_args: Any) -> Any:
        raise ConnectionResetError

    monkeypatch.setattr("ffd.reconcilers.delayed_promoter.tick", broken)
    quick = {**SLOW, "delayed_promoter": ReconcilerSettings(interval_ms=10)}
    async with daemon(rig, quick) as sweeping:
        await until(lambda: sweeping.failing() == [AT])


async def test_every_reconciler_runs_in_the_daemon(rig: Rig, clock: Clock) -> None:
    """X-005 and the rest of contract 1.1: each does its part without any of the library's callers."""
    partitions = dict(zip(SCENES, range(10, 100, 10), strict=True))
    for name, at in partitions.items():
        await rig.sql.execute("update ff_exec_core set lane_id = 'other' where lane_id = 'scene'")
        await SCENES[name](rig, clock, at, 1)
    await clock.advance(DUE_AFTER_MS)
    moved = {name: sample("ffd_reconciler_ticks_total", reconciler=name, result="ok") for name in SCENES}
    async with daemon(rig):
        await until(
            lambda: all(
                sample("ffd_reconciler_ticks_total", reconciler=name, result="ok") > moved[name] for name in SCENES
            )
        )


def test_a_partition_wakes_in_order_and_holds_back() -> None:
    async def check() -> None:
        partition = Partition(1)
        for name in ("a", "b", "a"):
            partition.wake(name)
        assert [await partition.next(), await partition.next()] == ["a", "b"]
        assert partition.batch("a", 1000) == 1000
        partition.hold_back("a")
        partition.wake("a")
        assert not partition.due
        assert partition.batch("a", 1000) == 1000, "nothing is the matter with the size"
        partition.fail("a", asyncpg.QueryCanceledError("too long"), 1.0)
        assert (partition.batch("a", 1000), partition.batch("b", 1000)) == (250, 1000)
        for _ in range(10):
            partition.fail("a", asyncpg.QueryCanceledError("too long"), 2.0)
        assert partition.batch("a", 1000) == 1
        assert partition.failing == {"a": 1.0}
        partition.fail("b", Contention(ContentionKind.RETRY_EXHAUSTED, "held"), 3.0)
        assert partition.failing == {"a": 1.0}, "what others hold is no fault of this node's"
        partition.moved_on("a")
        assert partition.batch("a", 1000) == 1000
        partition.wake("a")
        assert list(partition.due) == ["a"]
        partition.is_ending = True
        partition.wake("b")
        assert list(partition.due) == ["a"]

    anyio.run(check)
