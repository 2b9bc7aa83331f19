"""Tasks that do not die, and what is known of them."""

from __future__ import annotations

import anyio
import pytest
from prometheus_client import REGISTRY

from ffd.daemon import tasks as tasks_module
from ffd.daemon.health import Health
from ffd.daemon.tasks import CRASH_LOOP, Task, Tasks
from tests.support import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "BACKOFF_S", (0.001,))


def restarts(kind: str) -> float:
    return REGISTRY.get_sample_value("ffd_task_restarts_total", {"task": kind}) or 0.0


async def test_a_task_that_returns_is_over() -> None:
    tasks = Tasks()

    async def body(task: Task) -> None:
        assert [each.name for each in tasks.all()] == ["t"]

    await tasks.run("t", body)
    assert tasks.all() == []


async def test_a_task_that_fails_is_started_again_and_counted() -> None:
    tasks, before = Tasks(), restarts("a kind")
    runs = 0

    async def body(task: Task) -> None:
        nonlocal runs
        runs += 1
        if runs < 4:
            raise ZeroDivisionError
        assert (task.restarts, task.last_error) == (3, "ZeroDivisionError")

    await tasks.run("t", body, kind="a kind")
    assert (runs, restarts("a kind") - before) == (4, 3)


async def test_a_crash_loop_turns_readiness_red_with_the_reason_and_ends() -> None:
    tasks = Tasks()
    health = Health(tasks)
    may_fail = True

    async def body(task: Task) -> None:
        if may_fail:
            raise ZeroDivisionError
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(tasks.run, "bad", body)
        await until(lambda: tasks.looping())
        assert tasks.looping() == {"bad": "ZeroDivisionError"}
        verdict = health.ready()
        assert not verdict.is_ok
        assert verdict.checks["tasks"] == "failing again and again: bad (ZeroDivisionError)"
        assert health.live().is_ok, "a restart of the process would not help"
        assert tasks.restarted()["bad"]["last_error"] == "ZeroDivisionError"
        group.cancel_scope.cancel()
    assert tasks.all() == []


async def test_few_failures_are_no_crash_loop() -> None:
    task = Task("t", "t", 60)
    for _ in range(CRASH_LOOP - 1):
        task.failed(ValueError())
        assert not task.is_looping
    task.failed(ValueError())
    assert task.is_looping


async def test_a_pause_grows_and_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "BACKOFF_S", (1.0, 2.0, 4.0))
    task = Task("t", "t", 60)
    for longest in (1.0, 2.0, 4.0, 4.0):
        assert longest / 2 <= task.failed(ValueError()) <= longest


async def test_a_busy_task_without_progress_turns_liveness_red() -> None:
    tasks = Tasks()
    health = Health(tasks)
    going = anyio.Event()

    async def body(task: Task) -> None:
        task.rest()
        await going.wait()
        task.progress()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: tasks.run("slow", body, stale_after_s=0.05))
        await anyio.sleep(0.1)
        assert health.live().is_ok, "one that waits is not stale"
        going.set()
        await until(lambda: not health.live().is_ok)
        assert health.live().checks == {"tasks": "no progress: slow"}
        assert health.ready().checks["tasks"] == "ok"
        group.cancel_scope.cancel()


async def test_readiness_names_each_check_that_fails() -> None:
    health = Health(Tasks())
    health.add("database", lambda: "away")
    health.add("schema", lambda: None)
    health.is_draining = True
    assert health.ready() == (
        False,
        {"database": "away", "schema": "ok", "tasks": "ok", "draining": "stopping"},
    )
