"""A daemon under load keeps its size: ten minutes in `make test-full`, a short look in `make test`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from tests.chaos.test_replicas import IS_FULL, feeding, start_workers
from tests.daemon.processes import running

pytestmark = pytest.mark.anyio

LOAD_S = 600 if IS_FULL else 20
SAMPLES = 40
# Of what it had when everything was warm; allocators breathe.
GROWTH_MAX = 1.10


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1])


@pytest.mark.timeout(LOAD_S + 120)
async def test_memory_stays_flat_under_load(dsn: str, sql: asyncpg.Connection[Any]) -> None:
    settings = {"FFD_RETENTION__EXECUTION_MS": "2000", "FFD_RETENTION__EVENT_MS": "2000"}
    settings["FFD_RECONCILERS__RETENTION__INTERVAL_MS"] = "1000"
    sizes: list[int] = []
    with ExitStack() as stack:
        run = stack.enter_context(running(FFD_DATABASE__DSN=dsn, **settings))
        await anyio.to_thread.run_sync(run.wait_for, "ready")
        worker = start_workers(dsn, 1)
        stack.callback(worker.wait)
        stack.callback(worker.kill)
        async with feeding(dsn) as created:
            for _ in range(SAMPLES):
                await anyio.sleep(LOAD_S / SAMPLES)
                sizes.append(resident_kib(run.process.pid))
        assert await anyio.to_thread.run_sync(run.end) == 0
    quarter = SAMPLES // 4
    warm, last = mean(sizes[quarter : 2 * quarter]), mean(sizes[-quarter:])
    assert last < warm * GROWTH_MAX, sizes
    # it was at work, and what ended was trimmed all the while.
    assert len(created) > LOAD_S * 20
    kept = await sql.fetchval("select count(*) from ff_exec_core where terminal_at_ms is not null")
    assert kept < len(created) / 2
