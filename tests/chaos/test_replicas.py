"""Three replicas and twenty workers on one database, and everything that can happen to a replica.

Real processes. `make test-full` pauses a replica for thirty seconds; `make test` runs the short form.
The seed of the workers is printed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from ffd import Engine, ExecutionPolicy, Fixed, NewExecution, RetryPolicy, Unavailable
from ffd.core.ids import ExecutionKey, new_uuid, partition_of
from ffd.db.migrations import migrate
from ffd.dev.postgres import EmbeddedPostgres
from tests.chaos.relay import Relay, relayed
from tests.daemon.processes import Run, running

pytestmark = pytest.mark.anyio

IS_FULL = bool(os.environ.get("FFD_TEST_FULL"))
# Created all the while, this many every so often.
BATCH, EVERY_S = 20, 0.25
PAUSE_S = 30.0 if IS_FULL else 6.0
LEASE_MS = 2_000
# Nothing but success ends an execution here, so anything else is a fault of ours.
STUBBORN = ExecutionPolicy(
    retry=RetryPolicy(max_retries=1000, backoff=Fixed(100)), max_reclaim_count=1000, attempt_timeout_ms=10_000
)

LIVE_OWNERS = """
select p.partition_key, n.node_id from ff_partition p
left join ff_node n on n.node_id = p.node_id and n.expires_at_ms > ff_now_ms()
"""


async def connect(dsn: str) -> asyncpg.Connection[Any]:
    while True:
        try:
            return await asyncpg.connect(dsn, timeout=2)
        except (OSError, TimeoutError, asyncpg.PostgresError):
            await anyio.sleep(0.05)


class Watcher:
    """Looks at who owns what, and keeps the longest time that a partition was nobody's while the database was there."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self.owners: dict[int, str | None] = {}
        self.longest_s = 0.0
        self._unowned_s: defaultdict[int, float] = defaultdict(float)

    async def run(self) -> None:
        self._connection = await connect(self._dsn)
        try:
            await self._look()
        finally:
            self._connection.terminate()

    async def _look(self) -> None:
        last = time.monotonic()
        while True:
            await anyio.sleep(0.1)
            try:
                rows = await self._connection.fetch(LIVE_OWNERS, timeout=2)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._connection.terminate()
                self._connection = await connect(self._dsn)
                # While it was away nobody could own anything: counted from here.
                last = time.monotonic()
                self._unowned_s.clear()
                continue
            passed_s, last = time.monotonic() - last, time.monotonic()
            self.owners = {row["partition_key"]: row["node_id"] for row in rows}
            for partition, owner in self.owners.items():
                if owner is None:
                    self._unowned_s[partition] += passed_s
                    self.longest_s = max(self.longest_s, self._unowned_s[partition])
                else:
                    self._unowned_s.pop(partition, None)

    async def until(self, is_so: Callable[[dict[int, str | None]], bool], timeout_s: float = 30) -> None:
        """Wait until the owners are as they should be."""
        with anyio.fail_after(timeout_s):
            while not self.owners or not is_so(self.owners):  # noqa: ASYNC110  (the database is polled)
                await anyio.sleep(0.05)

    async def until_shared_by(self, *names: str) -> None:
        """Each of these nodes owns something, nobody else does, and nothing is nobody's."""
        await self.until(lambda owners: {(owner or "").rpartition("-")[0] for owner in owners.values()} == set(names))


@asynccontextmanager
async def watching(dsn: str) -> AsyncIterator[Watcher]:
    watcher = Watcher(dsn)
    async with anyio.create_task_group() as group:
        group.start_soon(watcher.run)
        yield watcher
        group.cancel_scope.cancel()


@asynccontextmanager
async def feeding(dsn: str) -> AsyncIterator[set[str]]:
    """Work comes in for the length of the block; a create of which nobody knows whether it worked is repeated."""
    created: set[str] = set()
    is_over = anyio.Event()

    async def feed(engine: Engine) -> None:
        while not is_over.is_set():
            uuids = [new_uuid() for _ in range(BATCH)]
            ids = [str(ExecutionKey(partition_of(uuid), uuid)) for uuid in uuids]
            new = [NewExecution(lane="chaos", policy=STUBBORN, execution_id=each) for each in ids]
            while True:
                try:
                    await engine.create_executions(new)
                    break
                except Unavailable:
                    await anyio.sleep(0.1)
            created.update(ids)
            await anyio.sleep(EVERY_S)

    async with Engine.connect(dsn) as engine, anyio.create_task_group() as group:
        group.start_soon(feed, engine)
        yield created
        is_over.set()


class Fleet:
    """Replicas by name."""

    def __init__(self, stack: ExitStack, dsn: str) -> None:
        self._stack = stack
        self._dsn = dsn
        self.runs: dict[str, Run] = {}
        self.all_runs: list[Run] = []

    async def start(self, name: str, dsn: str | None = None) -> Run:
        """Start one, again if it was killed, and wait until it works."""
        settings = {
            "FFD_DATABASE__DSN": dsn or self._dsn,
            "FFD_NODE__NAME": name,
            "FFD_NODE__LEASE_TTL_MS": str(LEASE_MS),
            "FFD_DATABASE__POOL_MAX": "5",
        }
        run = self.runs[name] = self._stack.enter_context(running(**settings))
        self.all_runs.append(run)
        await anyio.to_thread.run_sync(run.wait_for, "ready")
        return run


async def restart_twice(server: EmbeddedPostgres) -> None:
    for restart in (partial(server.restart, mode="fast"), partial(server.restart, mode="immediate")):
        await anyio.to_thread.run_sync(restart)
        await anyio.sleep(2)


async def torment(fleet: Fleet, watcher: Watcher, relay: Relay, server: EmbeddedPostgres) -> None:
    """Kill each, pause one, cut one off, restart the database twice."""
    names = ("a", "b", "c")
    for name in names:
        fleet.runs[name].process.kill()
        rest = [each for each in names if each != name]
        await watcher.until_shared_by(*rest)
        before = dict(watcher.owners)
        await fleet.start(name, relay.dsn if name == "c" else None)
        await watcher.until_shared_by(*names)
        moved = [at for at, owner in watcher.owners.items() if owner != before[at]]
        assert {(watcher.owners[at] or "").rpartition("-")[0] for at in moved} == {name}, "only its share moves"
        assert 256 / 3 * 0.5 < len(moved) < 256 / 3 * 1.6, "about a third"
    paused = fleet.runs["a"].process
    paused.send_signal(signal.SIGSTOP)
    await watcher.until_shared_by("b", "c")
    await anyio.sleep(PAUSE_S)
    paused.send_signal(signal.SIGCONT)
    await watcher.until_shared_by(*names)
    relay.cut()
    await watcher.until_shared_by("a", "b")
    await anyio.to_thread.run_sync(fleet.runs["c"].wait_for, "node_lease_lost")
    await anyio.sleep(2)
    relay.mend()
    await watcher.until_shared_by(*names)
    await restart_twice(server)
    await watcher.until_shared_by(*names)


def start_workers(dsn: str, seed: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.chaos.workers", dsn, str(seed)])


async def all_ended(dsn: str, count: int) -> bool:
    connection = await connect(dsn)
    try:
        ended = await connection.fetchval("select count(*) from ff_exec_core where terminal_at_ms is not null")
    finally:
        await connection.close()
    return bool(ended == count)


@pytest.mark.timeout(600)
async def test_whatever_happens_to_replicas_nothing_is_lost_and_nothing_ends_twice() -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")  # noqa: T201  (a failure is repeated with it)
    with EmbeddedPostgres.temporary(settings={"max_connections": "200"}) as server, ExitStack() as stack:
        admin = await asyncpg.connect(server.dsn())
        await admin.execute("create database ffd")
        await admin.close()
        dsn = server.dsn("ffd")
        await migrate(dsn, on_progress=lambda _: None)
        async with relayed(dsn) as relay, watching(dsn) as watcher:
            fleet = Fleet(stack, dsn)
            for name in ("a", "b"):
                await fleet.start(name)
            await fleet.start("c", relay.dsn)
            await watcher.until_shared_by("a", "b", "c")
            watcher.longest_s = 0.0
            worker = start_workers(dsn, seed)
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            async with feeding(dsn) as created:
                await torment(fleet, watcher, relay, server)
            assert len(created) > 1000
            with anyio.fail_after(240):
                while not await all_ended(dsn, len(created)):  # noqa: ASYNC110  (the database is polled)
                    await anyio.sleep(0.5)
            for run in fleet.runs.values():
                assert await anyio.to_thread.run_sync(run.end) == 0
        assert worker.poll() is None, "the workers outlived all of it"
        await check_history(dsn, created)
        assert watcher.longest_s < 2 * LEASE_MS / 1000
        for run in fleet.all_runs:
            assert not [line for line in run.log if line["event"] in ("task_failed", "row_quarantined")], run.text


async def check_history(dsn: str, created: set[str]) -> None:
    """What the tables and the events tell of every execution."""
    connection = await asyncpg.connect(dsn)
    try:
        rows = await connection.fetch(
            "select public_state, lease_reclaim_count, execution_id from ff_exec_core where lane_id = 'chaos'"
        )
        assert len(rows) == len(created)
        assert {row["public_state"] for row in rows} == {"completed"}
        endings = await connection.fetch("select execution_id, outcome from ff_completion_event")
        assert Counter(row["outcome"] for row in endings) == {"success": len(created)}
        assert len({row["execution_id"] for row in endings}) == len(created), "one ending each"
        twice = await connection.fetch(
            "select execution_id, lease_epoch, event_type, count(*) from ff_lease_event"
            " where event_type <> 'renewed' group by 1, 2, 3 having count(*) > 1"
        )
        assert twice == [], "an epoch begins once and ends once, whoever swept it"
        expired = await connection.fetch(
            "select execution_id, count(*) from ff_lease_event where cause = 'lease_expiry' group by 1"
        )
        reclaims = {str(row["execution_id"]): row["lease_reclaim_count"] for row in rows if row["lease_reclaim_count"]}
        assert {row["execution_id"]: row["count"] for row in expired} == reclaims
        assert sum(reclaims.values()) > 0, "some workers vanished"
    finally:
        await connection.close()
