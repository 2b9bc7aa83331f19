"""The daemon's life on one page.

    run
    ├─ http              /livez /readyz /metrics, from the first moment to the last
    ├─ signals           SIGTERM, SIGINT: drain, and at once when told twice; SIGHUP: read the configuration again
    ├─ manager           tells systemd: ready, status, watchdog
    ├─ loop              measures the event loop
    └─ work              when the database answers and its schema fits
       ├─ owner          heartbeat; gives and takes partitions             daemon/ownership.py
       ├─ watch x 9      one per reconciler: looks for due rows            daemon/sweeping.py
       ├─ partition x n  one per owned partition: moves them
       ├─ sample         counts executions for the metrics                 daemon/sampling.py
       └─ missed         looks for cascades that another writer missed

Every task is started again when it fails (`daemon/tasks.py`). Stopping goes from the outside in: begin nothing more,
finish what is under way within the grace, release the partitions, close the listener, then the pool.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from uuid import uuid4

import anyio
import asyncpg
import msgspec
from anyio.abc import TaskGroup

from ffd.config import ConfigError, Settings
from ffd.core.errors import EngineError, Unavailable
from ffd.core.limits import PARTITIONS
from ffd.daemon.health import Health
from ffd.daemon.http import HttpServer, address_of, listen
from ffd.daemon.ownership import Node, Owner
from ffd.daemon.sampling import look_for_missed, measure_loop, sample
from ffd.daemon.sd_notify import Notifier
from ffd.daemon.sweeping import Sweeping
from ffd.daemon.tasks import Task, Tasks
from ffd.db.errors import sqlstate
from ffd.db.migrations import SchemaKind, SchemaMismatch, check_schema
from ffd.db.pool import Connection
from ffd.ops.runtime import Runtime
from ffd.reconcilers.registry import load_reconcilers
from ffd.telemetry import logging
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import BUILD_INFO, PARTITIONS_OWNED

# What SIGHUP can change; everything else is named and left for a restart.
RELOADABLE: Final = ("reconcilers.", "retention", "log")
WAIT_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0)
# While the reason to wait stays the same it is said this often.
REMIND_S: Final = 30.0
LEAVE_TIMEOUT_S: Final = 5.0
MANAGER_EVERY_S: Final = 5.0
# What a claim asks for unless told otherwise; the bound on recovery is counted from it.
DEFAULT_LEASE_S: Final = 30

_log = get_logger("supervisor")


class Daemon:
    """One node. `reload` reads the configuration again."""

    def __init__(
        self,
        settings: Settings,
        *,
        version: str,
        reload: Callable[[], Settings],
        environ: Mapping[str, str],
    ) -> None:
        name = settings.node.name or socket.gethostname()
        self.settings = settings
        self.node = Node(f"{name}-{uuid4().hex[:8]}", name, version)
        self.tasks = Tasks(settings.database.statement_timeout_ms / 1000)
        self.health = Health(self.tasks)
        self.notifier = Notifier(environ)
        self._reload = reload
        self._stop = anyio.Event()
        self._waiting_for: str | None = "the database"
        self._is_announced = False
        self._sweeping: Sweeping | None = None
        self._owner: Owner | None = None
        self._runtime: Runtime | None = None

    async def run(self) -> None:
        """Live until told to stop. `ConfigError` when the configuration cannot work."""
        server, address = None, None
        BUILD_INFO.labels(self.node.version).set(1)
        PARTITIONS_OWNED.set(0)
        self.health.add("database", self._database_trouble)
        self.health.add("schema", self._schema_trouble)
        self.health.add("ownership", self._ownership_trouble)
        self.health.add("listener", self._listener_trouble)
        if self.settings.http.bind:
            sock = listen(self.settings.http.bind)
            server = HttpServer(sock, self.health)
            address = address_of(sock)
        _log.info("starting", node=self.node.node_id, version=self.node.version, http=address)
        self._say_recovery_bound()
        try:
            async with only_error(), anyio.create_task_group() as group:
                if server is not None:
                    group.start_soon(server.run)
                group.start_soon(self._obey)
                group.start_soon(self.tasks.run, "manager", self._tell_manager)
                group.start_soon(self.tasks.run, "loop", measure_loop)
                await self._work()
                if server is not None:
                    server.stop()
                group.cancel_scope.cancel()
        finally:
            self.notifier.close()
        _log.info("stopped", node=self.node.node_id)

    def stop(self) -> None:
        """Drain, as SIGTERM does."""
        self._stop.set()

    # Signals

    async def _obey(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            async for number in signals:
                if number == signal.SIGHUP:
                    self.reload()
                elif self._stop.is_set():
                    _log.warning("stopped_at_once", signal=number.name)
                    os._exit(1)
                else:
                    _log.info("stopping", signal=number.name, drain_timeout_s=self.settings.node.drain_timeout_s)
                    self.stop()

    def reload(self) -> None:
        """Take over what can be changed while running, and name what cannot."""
        if self._is_announced:
            self.notifier.reloading()
        try:
            new = self._reload()
        except ConfigError as error:
            _log.error("reload_refused", problems=list(error.problems))
        except Exception as error:  # noqa: BLE001  (whatever is wrong with the file, the daemon goes on as it was)
            _log.error("reload_refused", problems=[type(error).__name__])
        else:
            old, fresh = self.settings.tables(), new.tables()
            changed = [
                f"{table}.{key}"
                for table in fresh
                for key in fresh[table].__struct_fields__
                if getattr(old[table], key) != getattr(fresh[table], key)
            ]
            taken = [key for key in changed if key.startswith(RELOADABLE)]
            self.settings = msgspec.structs.replace(
                self.settings, reconcilers=new.reconcilers, retention=new.retention, log=new.log
            )
            logging.configure(new.log)
            if self._sweeping is not None:
                self._sweeping.configure(new.reconcilers)
            if self._runtime is not None:
                self._runtime.retention = new.retention
            _log.info("reloaded", changed=taken)
            if kept := sorted(set(changed) - set(taken)):
                _log.warning("restart_needed", keys=kept)
        if self._is_announced:
            # Also when something is wrong at this moment: a reload that never ends would be a second trouble.
            self.notifier.ready(self._status())

    # Work

    async def _work(self) -> None:
        runtime = self._runtime = Runtime(self.settings.database, self.settings.outbox, "default")
        runtime.retention = self.settings.retention
        async with AsyncExitStack() as stack:
            stack.push_async_callback(runtime.close)
            await self._until_stopped(self._open)
            if self._stop.is_set():
                return
            async with anyio.create_task_group() as group:
                self._start(runtime, group)
                await self._stop.wait()
                await self._drain()
                group.cancel_scope.cancel()

    async def _until_stopped(self, body: Callable[[], Awaitable[None]]) -> None:
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                await self._stop.wait()
                group.cancel_scope.cancel()

            group.start_soon(watch)
            await body()
            group.cancel_scope.cancel()

    async def _open(self) -> None:
        """Wait for the database and its schema, visibly."""
        tries, said_at = 0, 0.0
        while True:
            reason = await self._try_open()
            if reason is None:
                self._waiting_for = None
                return
            if reason != self._waiting_for or time.monotonic() - said_at > REMIND_S:
                self._waiting_for, said_at = reason, time.monotonic()
                _log.warning("waiting", reason=reason)
            await anyio.sleep(WAIT_S[min(tries, len(WAIT_S) - 1)])
            tries += 1

    async def _try_open(self) -> str | None:
        assert self._runtime is not None  # noqa: S101  (made before this is called)
        try:
            await self._runtime.open()
            await self._runtime.db.transact("check_schema", _check_schema)
            await self._runtime.listener.ready(0)
        except Unavailable as error:
            if error.detail in ("ValueError", "ClientConfigurationError"):
                raise ConfigError(
                    "database.dsn or the PG* variables: not an address that can be connected to"
                ) from None
            return f"the database: {error.detail}"
        except EngineError as error:
            return f"the schema: {error}"
        except asyncpg.PostgresError as error:
            return f"the database: {type(error).__name__} {sqlstate(error)}"
        return None

    def _start(self, runtime: Runtime, group: TaskGroup) -> None:
        reconcilers = load_reconcilers()
        sweeping = self._sweeping = Sweeping(runtime, reconcilers, self.settings.reconcilers, self.tasks, group)
        owner = self._owner = Owner(runtime, self.node, self.settings.node.lease_ttl_ms, sweeping)
        sweeping.is_held = lambda: owner.is_alive
        group.start_soon(self.tasks.run, "owner", owner.run)
        for reconciler in reconcilers.values():
            group.start_soon(
                self.tasks.run, f"watch-{reconciler.name}", lambda task, r=reconciler: sweeping.watch(r, task)
            )
        group.start_soon(self.tasks.run, "sample", lambda task: sample(runtime, lambda: sweeping.partitions, task))
        group.start_soon(self.tasks.run, "missed", lambda task: look_for_missed(runtime, sweeping, task))

    async def _drain(self) -> None:
        assert self._sweeping is not None  # noqa: S101  (started before it is stopped)
        assert self._owner is not None  # noqa: S101
        grace_s = self.settings.node.drain_timeout_s
        self.health.is_draining = True
        self.notifier.stopping(grace_s)
        self._owner.stop_taking()
        with anyio.move_on_after(grace_s) as scope:
            await self._sweeping.stop()
        if scope.cancelled_caught:
            _log.warning("drain_timed_out", drain_timeout_s=grace_s)
        try:
            with anyio.fail_after(LEAVE_TIMEOUT_S):
                await self._owner.leave()
        except (EngineError, TimeoutError) as error:
            _log.warning("not_left", error=type(error).__name__, others_wait_ms=self.settings.node.lease_ttl_ms)

    # What is told

    async def _tell_manager(self, task: Task) -> None:
        """READY when this node does its work; then a ping as long as every task makes progress."""
        every_s = min(MANAGER_EVERY_S, (self.notifier.watchdog_s or 2 * MANAGER_EVERY_S) / 2)
        said, said_at = "", 0.0
        while not self.health.ready().is_ok and not self._stop.is_set():
            task.progress()
            if self._status() != said or time.monotonic() - said_at > MANAGER_EVERY_S:
                said, said_at = self._status(), time.monotonic()
                self.notifier.extend(3 * MANAGER_EVERY_S)
                self.notifier.status(said)
            await anyio.sleep(0.1)
        if not self._stop.is_set():
            self._is_announced = True
            self.notifier.ready(self._status())
            _log.info("ready", node=self.node.node_id)
        was_live = True
        while True:
            task.progress()
            verdict = self.health.live()
            if verdict.is_ok:
                self.notifier.ping(self._status())
            elif was_live:
                _log.error("no_progress", **verdict.checks)
            was_live = verdict.is_ok
            await anyio.sleep(every_s)

    def _status(self) -> str:
        if self._waiting_for is not None:
            return f"waiting for {self._waiting_for}"
        owned = 0 if self._owner is None else len(self._owner.owned)
        lag_s = 0.0 if self._sweeping is None else self._sweeping.lag_s
        return f"sweeps {owned} of {PARTITIONS} partitions, lag {lag_s:.1f} s"

    def _database_trouble(self) -> str | None:
        if self._waiting_for is not None and not self._waiting_for.startswith("the schema"):
            return f"waiting for {self._waiting_for}"
        return None if self._owner is None else self._owner.last_error

    def _schema_trouble(self) -> str | None:
        if self._waiting_for is None:
            return None
        return "not known yet" if self._waiting_for.startswith("the database") else f"waiting for {self._waiting_for}"

    def _ownership_trouble(self) -> str | None:
        if self._owner is None or not self._owner.has_settled:
            return "not settled yet"
        return None if self._owner.is_alive else "the lease of this node has run out"

    def _listener_trouble(self) -> str | None:
        if self._runtime is None or self.settings.outbox.notify == "off" or self._runtime.listener.is_connected:
            return None
        return "LISTEN connection is down, polling instead"

    def _say_recovery_bound(self) -> None:
        """Within which time the work of a killed worker is offered again."""
        expiry = self.settings.reconcilers["lease_expiry"]
        if not expiry.is_on:
            _log.warning("no_recovery", reason="reconcilers.lease_expiry is off: work of killed workers stays theirs")
            return
        bound_s = DEFAULT_LEASE_S + expiry.interval_ms / 1000
        with_node_s = bound_s + 2 * self.settings.node.lease_ttl_ms / 1000
        _log.info(
            "recovery_bound",
            killed_worker_s=bound_s,
            killed_worker_and_node_s=with_node_s,
            lease_ttl_s=DEFAULT_LEASE_S,
        )


@asynccontextmanager
async def only_error() -> AsyncIterator[None]:
    """An error that ended a task group by itself, as itself: the command line knows what to say about it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


async def _check_schema(connection: Connection) -> None:
    """A schema that is newer than this code is fine: migrations are safe while the previous version runs."""
    try:
        await check_schema(connection)
    except SchemaMismatch as error:
        if error.kind != SchemaKind.AHEAD:
            raise
        _log.warning("schema_is_newer", detail=str(error))
