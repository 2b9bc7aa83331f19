"""What every operation needs: the database, the doorbell, and who waits for what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from ffd.config import DatabaseSettings, OutboxSettings
from ffd.core.events import Channel, Rings
from ffd.db.database import Database, open_connection
from ffd.db.doorbell import Doorbell
from ffd.db.listener import Listener
from ffd.db.wakeups import Wakeups
from ffd.ops.endings import EndingWatch


class Runtime:
    """The shared parts of one engine. Background tasks start with their first use and end with `close`.

    They are plain tasks, not an anyio task group: a group would wrap whatever the user's own code raises inside
    `async with Engine.connect(…)` in an ExceptionGroup.
    """

    def __init__(self, database: DatabaseSettings, outbox: OutboxSettings, namespace: str) -> None:
        self.namespace = namespace
        self.outbox = outbox
        self.db = Database(database)
        self.wakeups = Wakeups()
        self.endings = EndingWatch(self.db)
        self.known_lanes: set[str] = set()
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

    async def open(self) -> None:
        """Reach the database."""
        await self.db.open()

    async def close(self) -> None:
        """Stop listening, send the last rings, close every connection."""
        await self.listener.close()
        await self.endings.close()
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
