"""Rings after commit, off the commit path.

A transaction that notifies holds a database-wide lock through its commit, so writers do not. They commit, then
call `ring`, which only remembers; one task per process sends what was remembered, at most once per few
milliseconds, on a connection of its own. A ring that is lost (crash, dead connection) costs its listeners one
poll interval, never an event: notifications carry no facts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from ffd.db.pool import Connection
from ffd.db.statement import Statement
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import DOORBELL_FAILURES

RING_INTERVAL_S: Final = 0.005
RETRY_S: Final = 1.0
PENDING_MAX: Final = 10_000

RING: Final = Statement(
    "ring",
    "select pg_notify(r.channel, r.payload) from unnest($1::text[], $2::text[]) as r(channel, payload)",
)

_log = get_logger("doorbell")


class Doorbell:
    """Coalesces rings and sends them. `ring` never waits and never fails."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._pending: set[tuple[str, str]] = set()
        self._rung = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._is_closing = False

    def ring(self, rings: Iterable[tuple[str, str]]) -> None:
        """Remember to notify these (channel, payload) pairs soon."""
        if len(self._pending) < PENDING_MAX:
            self._pending.update(rings)
        if not self._rung.is_set():
            self._rung.set()
            if self._task is None and not self._is_closing:
                self._task = asyncio.get_running_loop().create_task(self._run(), name="ffd doorbell")

    async def close(self) -> None:
        """Send what is still pending, then hang up."""
        self._is_closing = True
        self._rung.set()
        if self._task is not None:
            await self._task
        if self._connection is not None:
            self._connection.terminate()

    async def _run(self) -> None:
        while True:
            await self._rung.wait()
            self._rung.clear()
            if self._pending and not await self._send() and not self._is_closing:
                await self._rest(RETRY_S)
            if self._is_closing and not self._pending:
                return
            await self._rest(RING_INTERVAL_S)

    async def _rest(self, seconds: float) -> None:
        """Let rings pile up a little; closing does not wait for it."""
        if not self._is_closing:
            await asyncio.sleep(seconds)

    async def _send(self) -> bool:
        rings, self._pending = self._pending, set()
        try:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._connect()
            channels, payloads = zip(*rings, strict=True)
            await self._connection.fetch(RING.sql, channels, payloads)
        except Exception as error:  # noqa: BLE001  (this task must outlive whatever a connection does)
            DOORBELL_FAILURES.inc(len(rings))
            _log.warning("doorbell_failed", error=type(error).__name__, rings=len(rings))
            if self._connection is not None:
                self._connection.terminate()
                self._connection = None
            return False
        return True
