"""A bounded set of connections that survives restarts and failovers of the server.

Why not asyncpg's own pool: it awaits on every release (a round trip to reset the session, or at least several
turns of the event loop), and a task cancelled by anyio cannot await. Here giving back a healthy connection is
one synchronous call; a connection whose last command did not end cleanly is never given back, it is closed.
Only `ffd.db.database` uses this.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import asyncpg
import asyncpg.pool

from ffd.core.errors import Unavailable, Validation, ValidationKind

if TYPE_CHECKING:
    Connection = asyncpg.Connection[Any]
else:
    Connection = asyncpg.Connection  # generic in its stubs only

CLOSE_TIMEOUT_S = 5.0


def check_connection(connection: object) -> None:
    """Refuse what the caller presents as its own connection and is none."""
    if not isinstance(connection, asyncpg.Connection | asyncpg.pool.PoolConnectionProxy):
        raise Validation(ValidationKind.INVALID_INPUT, "expected an asyncpg connection", "connection")


class Pool:
    """At most `size_max` connections, the most recently used first."""

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], *, size_max: int, acquire_timeout_s: float
    ) -> None:
        self._connect = connect
        self._size_max = size_max
        self._acquire_timeout_s = acquire_timeout_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._connecting = 0
        self._waiters: deque[asyncio.Future[Connection | None]] = deque()
        self._stale: set[Connection] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._opening: set[asyncio.Task[Connection]] = set()
        self._is_closed = False

    @property
    def idle(self) -> int:
        """Connections at rest."""
        return len(self._idle)

    @property
    def busy(self) -> int:
        """Connections in use or being made."""
        return len(self._busy) + self._connecting

    def take_idle(self, loop: asyncio.AbstractEventLoop | None) -> Connection | None:
        """A live idle connection, without waiting; the common case of `acquire`. None on another event loop."""
        while self._idle and not self._is_closed and loop is asyncio.get_running_loop():
            connection = self._idle.pop()
            if not connection.is_closed():
                self._busy.add(connection)
                return connection
        return None

    async def acquire(self) -> Connection:
        """A live connection: an idle one, a new one, or the next to be given back."""
        try:
            async with asyncio.timeout(self._acquire_timeout_s):
                while True:
                    if self._is_closed:
                        raise Unavailable("acquire", "the engine is closed")
                    connection = self.take_idle(asyncio.get_running_loop())
                    if connection is not None:
                        return connection
                    if len(self._busy) + self._connecting < self._size_max:
                        return await self._open()
                    connection = await self._wait()
                    if connection is not None:
                        return connection
        except TimeoutError:
            raise Unavailable(
                "acquire",
                f"no connection within {self._acquire_timeout_s:.0f} s; all {self._size_max} are busy"
                " or the server does not answer",
            ) from None

    async def _open(self) -> Connection:
        self._connecting += 1
        # A task of its own: whoever asked may be cancelled, the connection then serves the next.
        task = asyncio.get_running_loop().create_task(self._make(), name="ffd connect")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        try:
            connection = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._adopt)
            raise
        if self._is_closed:
            self.discard(connection)
            raise Unavailable("acquire", "the engine is closed")
        return connection

    async def _make(self) -> Connection:
        try:
            connection = await self._connect()
        except BaseException:
            self._connecting -= 1
            self._pass_on(None)
            raise
        self._connecting -= 1
        self._busy.add(connection)
        return connection

    def _adopt(self, task: asyncio.Task[Connection]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.release(task.result())

    async def _wait(self) -> Connection | None:
        waiter: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        except BaseException:
            # Cancelled with a connection already in hand: the next in line gets it.
            if waiter.done() and not waiter.cancelled():
                connection = waiter.result()
                if connection is None:
                    self._pass_on(None)
                else:
                    self.release(connection)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def _pass_on(self, connection: Connection | None) -> bool:
        """Hand a connection, or the room for a new one, to whoever waits longest."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return True
        return False

    def release(self, connection: Connection) -> None:
        """Give back a connection whose last command ended cleanly and that is in no transaction."""
        if self._is_closed or (self._stale and connection in self._stale):
            self.discard(connection)
        elif not self._waiters or not self._pass_on(connection):
            self._busy.discard(connection)
            self._idle.append(connection)

    def discard(self, connection: Connection) -> None:
        """Close a connection in the background and let a new one take its place.

        Closing waits for the cancel request that asyncpg sends for an interrupted statement, so that the
        statement does not go on behind the caller's back, and rolls back what was open.
        """
        self._busy.discard(connection)
        self._stale.discard(connection)
        task = asyncio.get_running_loop().create_task(_close(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._pass_on(None)

    def invalidate(self) -> None:
        """The server went away or changed its role: no present connection is used for another statement."""
        self._stale.update(self._busy)
        idle, self._idle = self._idle, []
        for connection in idle:
            self.discard(connection)

    async def warm(self, size_min: int) -> None:
        """Open connections ahead of use."""
        opened: list[Connection] = []
        try:
            while len(opened) + len(self._idle) < size_min:
                opened.append(await self._open())
        finally:
            for connection in opened:
                self.release(connection)

    def stop(self) -> None:
        """Hand out no more connections; whoever waits for one is refused."""
        self._is_closed = True
        while self._pass_on(None):
            pass

    async def close(self) -> None:
        """Close everything; statements still running are cut off."""
        self.stop()
        for task in list(self._opening):
            task.cancel()
        self.invalidate()
        for connection in list(self._busy):
            self.discard(connection)
        while self._closing or self._opening:
            await asyncio.wait(self._closing | self._opening)


async def _close(connection: Connection) -> None:
    try:
        await connection.close(timeout=CLOSE_TIMEOUT_S)
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        # It is gone either way; asyncpg has aborted the transport.
        connection.terminate()
