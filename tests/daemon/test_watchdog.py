"""The watchdog is fed only while every task makes progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from ffd.config import DatabaseSettings, HttpSettings, ReconcilerSettings, Settings
from ffd.daemon import tasks
from ffd.daemon.supervisor import Daemon
from tests.daemon.processes import Manager
from tests.support import Rig, until

pytestmark = pytest.mark.anyio


def pings(manager: Manager) -> int:
    return manager.states().count("WATCHDOG=1")


async def test_one_blocked_task_stops_the_ping_and_turns_liveness_red(
    rig: Rig, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, may_go = anyio.Event(), anyio.Event()

    async def block(*_args: Any) -> Any:
        blocked.set()
        await may_go.wait()
        raise ConnectionResetError

    monkeypatch.setattr(tasks, "STALE_AFTER_S", 2.0)
    monkeypatch.setattr("ffd.reconcilers.delayed_promoter.tick", block)
    manager = Manager(tmp_path / "notify")
    settings = Settings(
        database=DatabaseSettings(dsn=dsn, statement_timeout_ms=1000),
        http=HttpSettings(bind=""),
        reconcilers={name: ReconcilerSettings(interval_ms=200) for name in Settings().reconcilers},
    )
    daemon = Daemon(
        settings,
        version="1",
        reload=lambda: settings,
        environ={"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "100000"},
    )
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(daemon.run)
            await until(lambda: pings(manager) > 5)
            assert daemon.health.live().is_ok
            await rig.create(delay_until_ms=500 + await rig.sql.fetchval("select ff_now_ms()"))
            await blocked.wait()
            await until(lambda: not daemon.health.live().is_ok)
            (stale,) = daemon.tasks.stale()
            assert stale.startswith("partition-")
            await anyio.sleep(0.2)
            before = pings(manager)
            await anyio.sleep(0.5)
            assert pings(manager) == before, "the manager hears nothing and will start the service anew"
            may_go.set()
            await until(lambda: pings(manager) > before)
            assert daemon.health.live().is_ok
            daemon.stop()
    finally:
        manager.close()
    assert "STOPPING=1" in manager.states()
