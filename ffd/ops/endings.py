"""Who waits for which execution to end.

All waiters of a process share one statement: when a completion is announced, or a poll is due, it asks once for
every execution anyone here waits for. Announcements that arrive during a look lead to one more look, not many.
"""

from __future__ import annotations

import asyncio
from typing import Final

from ffd.core.errors import EngineError, Unavailable
from ffd.core.ids import ExecutionKey
from ffd.core.limits import BATCH_MAX
from ffd.db.database import Database
from ffd.db.statement import Planning, Statement
from ffd.telemetry.logging import get_logger

# A burst of completions costs one look per this long.
LOOK_INTERVAL_S: Final = 0.005

WHICH_ENDED: Final = Statement(
    "which_ended",
    """
    select k.p, k.e from unnest($1::smallint[], $2::uuid[]) k(p, e)
    where not exists (
      select 1 from ff_exec_core x
      where x.partition_key = k.p and x.execution_id = k.e and x.lifecycle_phase not in ('terminal', 'cancelled'))
    """,
    Planning.CUSTOM,
)

_log = get_logger("wait")


class EndingWatch:
    """Who in this process waits for which execution to end."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._waiters: dict[ExecutionKey, list[asyncio.Future[None]]] = {}
        self._is_due = False
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def on_ring(self, _payload: str | None) -> None:
        """Something ended, or a poll is due."""
        self._is_due = True
        if self._task is None and self._waiters:
            self._task = asyncio.get_running_loop().create_task(self._look(), name="ffd wait_for_result")

    async def wait(self, key: ExecutionKey, timeout_s: float) -> bool:
        """Wait until the execution ended or is gone; False when the time is up."""
        if self._is_closed:
            raise Unavailable("wait_for_result", "the engine is closed")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(key, []).append(waiter)
        # It may have ended before this waiter stood here.
        self.on_ring(None)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            waiters = self._waiters.get(key, [])
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(key, None)
        return True

    async def _look(self) -> None:
        try:
            while self._is_due and self._waiters:
                self._is_due = False
                keys = sorted(self._waiters)
                for at in range(0, len(keys), BATCH_MAX):
                    await self._look_at(keys[at : at + BATCH_MAX])
                await asyncio.sleep(LOOK_INTERVAL_S)
        except EngineError as error:
            # The poll asks again; the waiters' own time limits bound how long.
            _log.warning("wait_look_failed", code=error.code)
        finally:
            self._task = None

    async def _look_at(self, keys: list[ExecutionKey]) -> None:
        rows = await self._db.fetch(WHICH_ENDED, [key[0] for key in keys], [key[1] for key in keys])
        for row in rows:
            for waiter in self._waiters.pop(ExecutionKey(row["p"], row["e"]), ()):
                if not waiter.done():
                    waiter.set_result(None)

    async def close(self) -> None:
        """Stop looking; whoever still waits looks for itself and finds the engine closed."""
        self._is_closed = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
