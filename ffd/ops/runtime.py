"""What every operation needs: the database, the doorbell, and who waits for what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import anyio

from ffd.config import DatabaseSettings, OutboxSettings, RetentionSettings
from ffd.core.errors import EngineError
from ffd.core.events import Channel, Rings
from ffd.db.database import Database, open_connection
from ffd.db.doorbell import Doorbell
from ffd.db.listener import Listener
from ffd.db.statement import Statement
from ffd.db.wakeups import Wakeups
from ffd.ops.endings import EndingWatch
from ffd.telemetry.logging import get_logger

KNOWN_LANES_MAX: Final = 10_000
CLOSE_GRACE_S: Final = 1.0

REGISTER_LANES: Final = Statement(
    "register_lanes",
    """
    insert into ff_lane_registry (lane_id, registered_at_ms, registered_by)
    select l.lane_id, ff_now_ms(), 'create_execution' from unnest($1::text[]) l(lane_id)
    on conflict (lane_id) do nothing
    """,
)

_log = get_logger("runtime")


class Runtime:
    """The shared parts of one engine. Background tasks start with their first use and end with `close`.

    They are plain tasks, not an anyio task group: a group would wrap whatever the user's own code raises inside
    `async with Engine.connect(…)` in an ExceptionGroup.
    """

    def __init__(self, database: DatabaseSettings, outbox: OutboxSettings, namespace: str) -> None:
        self.namespace = namespace
        self.is_closed = False
        self.outbox = outbox
        self.retention = RetentionSettings()
        self.db = Database(database)
        self.wakeups = Wakeups()
        self.endings = EndingWatch(self.db)
        self._known_lanes: set[str] = set()
        self._registering: set[asyncio.Task[None]] = set()
        is_on = outbox.notify != "off"
        self._doorbell = (
            Doorbell(partial(open_connection, database, application_name="ffd doorbell")) if is_on else None
        )
        self.listener = Listener(
            partial(open_connection, database, application_name="ffd listener", dsn=database.listen_dsn or None),
            poll_interval_s=outbox.poll_interval_ms / 1000,
            is_enabled=is_on,
        )
        self.listener.subscribe(Channel.WORK, self.wakeups.on_ring)
        self.listener.subscribe(Channel.COMPLETION, self.endings.on_ring)

    def ring(self, rings: Rings) -> None:
        """Announce what has just been committed."""
        if self._doorbell is not None:
            self._doorbell.ring(rings)

    def register_lanes(self, lanes: set[str]) -> None:
        """Enter lanes that this process has not met in the registry, in the background and once.

        Not in the transaction that creates: others would wait there for its commit. Not before the caller's
        answer: the registry is a convenience, and its trouble is not the caller's.
        """
        unknown = lanes - self._known_lanes
        if not unknown:
            return
        if len(self._known_lanes) > KNOWN_LANES_MAX:
            self._known_lanes.clear()
        self._known_lanes |= unknown
        task = asyncio.get_running_loop().create_task(self._register(sorted(unknown)), name="ffd register lanes")
        self._registering.add(task)
        task.add_done_callback(self._registering.discard)

    async def _register(self, lanes: list[str]) -> None:
        try:
            await self.db.fetch(REGISTER_LANES, lanes)
        except EngineError as error:
            self._known_lanes.difference_update(lanes)
            _log.warning("lanes_not_registered", lanes=lanes, code=error.code)

    async def open(self) -> None:
        """Reach the database."""
        await self.db.open()

    async def close(self) -> None:
        """Wake whoever waits, stop listening, send the last rings, close every connection.

        Shielded: an engine that is left because its task was cancelled must leave nothing behind either.
        """
        with anyio.CancelScope(shield=True):
            if self._registering:
                await asyncio.wait(self._registering, timeout=CLOSE_GRACE_S)
            self.is_closed = True
            self.db.stop()
            self.wakeups.close()
            await self.endings.close()
            await self.listener.close()
            if self._doorbell is not None:
                await self._doorbell.close()
            await self.db.close()


@asynccontextmanager
async def open_runtime(database: DatabaseSettings, outbox: OutboxSettings, namespace: str) -> AsyncIterator[Runtime]:
    """A runtime for the length of the block."""
    runtime = Runtime(database, outbox, namespace)
    try:
        await runtime.open()
        yield runtime
    finally:
        await runtime.close()
