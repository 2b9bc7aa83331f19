"""Waiting for work without polling the database.

A waiter takes a ticket first and looks second, so that a ring between the two is not lost. A ring wakes one
waiter per (lane, capabilities); a waiter that found something passes the ring on, because there may be more. So
n waiters cost one statement per ring and one per piece of work, not n.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ffd.core.errors import Unavailable


class WaitKey(NamedTuple):
    """What a waiter looks for. Waiters with equal keys can stand in for each other."""

    lane: str
    detail: Hashable


class Ticket:
    """A place in the queue of one key."""

    __slots__ = ("_is_rung", "_waiter")

    def __init__(self) -> None:
        self._is_rung = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_rung(self) -> bool:
        """Whether this waiter has been told to look and has not looked since."""
        return self._is_rung

    def ring(self) -> None:
        """Tell the waiter to look."""
        self._is_rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the ring and take it; False when the time is up."""
        if not self._is_rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._waiter
            except TimeoutError:
                return False
            finally:
                self._waiter = None
        self._is_rung = False
        return True


class Wakeups:
    """The waiters of this process, by lane and key."""

    def __init__(self) -> None:
        self._lanes: dict[str, dict[WaitKey, list[Ticket]]] = {}
        self._is_closed = False

    @contextmanager
    def ticket(self, key: WaitKey) -> Iterator[Ticket]:
        """Queue up. On leaving, a ring that was not used goes to the next in line."""
        if self._is_closed:
            raise Unavailable("wait", "the engine is closed")
        ticket = Ticket()
        keys = self._lanes.setdefault(key.lane, {})
        tickets = keys.setdefault(key, [])
        tickets.append(ticket)
        try:
            yield ticket
        finally:
            tickets.remove(ticket)
            if ticket.is_rung:
                self.pass_on(key)
            if not tickets:
                keys.pop(key, None)
                if not keys:
                    self._lanes.pop(key.lane, None)

    def pass_on(self, key: WaitKey) -> None:
        """Wake the longest waiting ticket of one key that is not yet awake."""
        for ticket in self._lanes.get(key.lane, {}).get(key, ()):
            if not ticket.is_rung:
                ticket.ring()
                return

    def close(self) -> None:
        """Send every waiter to look once more; they find the engine closed."""
        self._is_closed = True
        for keys in self._lanes.values():
            for tickets in keys.values():
                for ticket in tickets:
                    ticket.ring()

    def on_ring(self, lane: str | None) -> None:
        """A ring for a lane, or for all of them (None): one waiter per key looks."""
        lanes = list(self._lanes) if lane is None else [lane]
        for each in lanes:
            for key in list(self._lanes.get(each, ())):
                self.pass_on(key)
