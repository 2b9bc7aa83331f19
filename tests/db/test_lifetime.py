"""Starting, waiting and ending: nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import asyncpg
import pytest

from ffd import Engine, Unavailable
from ffd.db.listener import Listener
from tests.support import WORKER, Rig, until

pytestmark = pytest.mark.anyio


async def _no_sessions(sql: asyncpg.Connection[Any]) -> bool:
    return not await sql.fetchval(
        "select count(*) from pg_stat_activity where application_name like 'ffd%' and datname = current_database()"
    )


async def test_leaving_by_cancellation_leaves_nothing_behind(dsn: str, sql: asyncpg.Connection[Any]) -> None:
    with anyio.move_on_after(0.4) as scope:
        async with Engine.connect(dsn) as engine:
            await engine.create_execution()
            await engine.claim("none", **WORKER, wait_ms=60_000)
    assert scope.cancelled_caught
    await until(lambda: _no_sessions(sql))
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not {name for name in names if name.startswith("ffd ")}


async def test_closing_wakes_whoever_waits(dsn: str, rig: Rig) -> None:
    execution_id = await rig.create(lane="busy")
    async with Engine.connect(dsn) as engine:
        claiming = asyncio.create_task(engine.claim("none", **WORKER, wait_ms=60_000))
        waiting = asyncio.create_task(engine.wait_for_result(execution_id, timeout_ms=60_000))
        await until(lambda: engine._runtime.endings._waiters and engine._runtime.wakeups._lanes)
    for task in (claiming, waiting):
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.wait_for(task, timeout=5)
    with pytest.raises(Unavailable, match="closed"):
        await engine._runtime.listener.ready(1)


@pytest.mark.parametrize("listen_dsn", ["postgresql://u:p@127.0.0.1:1/x", "postgresql://u:p/q@127.0.0.1/x"])
async def test_a_listener_that_cannot_connect_costs_only_the_poll(
    open_engine: Callable[..., Any], rig: Rig, listen_dsn: str
) -> None:
    async with open_engine(listen_dsn=listen_dsn) as engine:
        started = time.monotonic()
        assert await engine.claim("default", **WORKER, wait_ms=300) is None
        assert time.monotonic() - started < 5
        claiming = asyncio.create_task(engine.claim("default", **WORKER, wait_ms=30_000))
        await rig.create()
        assert await claiming is not None


async def test_a_listener_that_fails_after_connecting_backs_off() -> None:
    connects = 0

    class Broken:
        def add_termination_listener(self, _callback: object) -> None:
            pass

        async def add_listener(self, _channel: str, _callback: object) -> None:
            raise asyncpg.ReadOnlySQLTransactionError("cannot execute LISTEN during recovery")

        def terminate(self) -> None:
            pass

    async def connect() -> Any:
        nonlocal connects
        connects += 1
        return Broken()

    listener = Listener(connect, poll_interval_s=60)
    await listener.ready(5)
    await asyncio.sleep(0.5)
    await listener.close()
    assert connects < 12


async def test_another_event_loop_is_refused_and_does_no_harm(engine: Engine) -> None:
    await engine.create_execution()
    refused: list[BaseException] = []

    def elsewhere() -> None:
        async def call() -> None:
            try:
                await engine.create_execution()
            except Unavailable as error:
                refused.append(error)

        asyncio.run(call())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await anyio.to_thread.run_sync(thread.join)
    assert len(refused) == 1
    assert "event loop" in str(refused[0])
    assert await engine.claim("default", **WORKER) is not None
