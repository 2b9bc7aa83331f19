"""The process's one LISTEN connection, and the poll that stands in for it.

It starts with the first subscriber. asyncpg does not notice a dead idle socket, so the connection is probed; on
loss it is made again with backoff, in the order LISTEN, catch up (every subscriber is told to look), healthy.
Every subscriber is also told to look once per poll interval: a lost notification costs that long, no more.
Pollers and the listener share nothing but the callbacks, so either can fail alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import nan
from typing import Any, Final

from ffd.core.errors import Unavailable
from ffd.core.events import Channel
from ffd.db.pool import Connection
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import LISTEN_CONNECTED, LISTEN_RECONNECTS

PROBE_INTERVAL_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 5.0
BACKOFF_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)

# Called with the payload of a notification, or with None for "anything may have happened: look".
Callback = Callable[[str | None], None]

_log = get_logger("listener")


class Listener:
    """Tells subscribers when to look. Callbacks are synchronous and quick."""

    def __init__(
        self, connect: Callable[[], Awaitable[Connection]], *, poll_interval_s: float, is_enabled: bool = True
    ) -> None:
        self._connect = connect
        self._poll_interval_s = poll_interval_s
        self._is_enabled = is_enabled
        self._callbacks: dict[str, list[Callback]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._settled = asyncio.Event()
        self._is_closed = False
        self.is_connected = False

    def subscribe(self, channel: Channel, callback: Callback) -> None:
        """Call `callback` for notifications on `channel`, after a reconnect, and once per poll interval."""
        self._callbacks.setdefault(channel.value, []).append(callback)

    async def ready(self, timeout_s: float) -> None:
        """Start if need be, and wait until the first connect has worked or failed; polling needs no connection."""
        if self._is_closed:
            raise Unavailable("listen", "the engine is closed")
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks.append(loop.create_task(self._poll(), name="ffd poll"))
            if self._is_enabled:
                self._tasks.append(loop.create_task(self._listen(), name="ffd listener"))
            else:
                # Neither up nor down.
                LISTEN_CONNECTED.set(nan)
                self._settled.set()
        if not self._settled.is_set():
            await asyncio.wait({asyncio.ensure_future(self._settled.wait())}, timeout=timeout_s)

    async def close(self) -> None:
        """Stop listening and polling."""
        self._is_closed = True
        self._settled.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _tell_all(self) -> None:
        for callbacks in self._callbacks.values():
            for callback in callbacks:
                callback(None)

    async def _poll(self) -> None:
        while True:
            # Jittered, so that the processes of a fleet do not poll in step.
            await asyncio.sleep(self._poll_interval_s * random.uniform(0.9, 1.0))  # noqa: S311  (not a secret)
            self._tell_all()

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                connection = await self._connect()
                try:
                    await self._serve(connection)
                finally:
                    connection.terminate()
            except Exception as error:  # noqa: BLE001  (this task must outlive whatever a connection does)
                failures = 0 if self.is_connected else failures + 1
                if failures <= 1:
                    _log.warning("listen_lost", error=type(error).__name__, falls_back_to="polling")
            finally:
                self._settled.set()
                self.is_connected = False
                LISTEN_CONNECTED.set(0)
            LISTEN_RECONNECTS.inc()
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311  (not a secret)

    async def _serve(self, connection: Connection) -> None:
        """LISTEN first, then catch up, then healthy; probe until it breaks, which always raises."""
        lost = asyncio.get_running_loop().create_future()

        def on_lost(_connection: Any) -> None:
            if not lost.done():
                lost.set_result(None)

        connection.add_termination_listener(on_lost)
        for channel in Channel:
            await connection.add_listener(channel.value, self._on_notification)
        self._tell_all()
        self.is_connected = True
        LISTEN_CONNECTED.set(1)
        self._settled.set()
        while True:
            done, _ = await asyncio.wait({lost}, timeout=PROBE_INTERVAL_S)
            if done:
                raise ConnectionResetError("the server closed the LISTEN connection")
            await connection.execute("select 1", timeout=PROBE_TIMEOUT_S)

    def _on_notification(self, _connection: Any, _pid: int, channel: str, payload: object) -> None:
        for callback in self._callbacks.get(channel, ()):
            callback(str(payload))
