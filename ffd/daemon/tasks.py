"""Tasks that do not die: each is started again when it fails, and what it does is known to health.

A task that fails is started again after a pause that grows with each failure and is drawn at random, so that the tasks
of a fleet do not fail in step. One that keeps failing is a crash loop, which turns readiness red with the reason. A
task that is busy and has shown no progress for too long is stale, which turns liveness red and stops the watchdog's
ping.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from ffd.db.errors import sqlstate
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import TASK_RESTARTS

BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# A task that ran this long without failing has recovered.
HEALTHY_S: Final = 60.0
CRASH_LOOP: Final = 5
# Besides the time that two statements may take.
STALE_AFTER_S: Final = 30.0

_log = get_logger("tasks")


class Task:
    """What is known of one task. `kind` is its metric label; several tasks may be of one kind."""

    def __init__(self, name: str, kind: str, stale_after_s: float) -> None:
        self.name = name
        self.kind = kind
        self.stale_after_s = stale_after_s
        self.restarts = 0
        self.last_error: str | None = None
        self._failures: deque[float] = deque(maxlen=CRASH_LOOP)
        self._busy_since: float | None = time.monotonic()

    def progress(self) -> None:
        """Say that it has come a step further."""
        self._busy_since = time.monotonic()

    def rest(self) -> None:
        """Say that it waits for something that may never come; until it makes progress again it is not stale."""
        self._busy_since = None

    @property
    def is_stale(self) -> bool:
        """Whether it has been busy with one thing for too long."""
        return self._busy_since is not None and time.monotonic() - self._busy_since > self.stale_after_s

    @property
    def is_looping(self) -> bool:
        """Whether it fails again and again."""
        now = time.monotonic()
        return (
            len(self._failures) == CRASH_LOOP
            and now - self._failures[0] < CRASH_LOOP * HEALTHY_S
            and now - self._failures[-1] < HEALTHY_S
        )

    def failed(self, error: Exception) -> float:
        """Count a failure; how long to wait before the next start."""
        now = time.monotonic()
        if self._failures and now - self._failures[-1] > HEALTHY_S:
            self._failures.clear()
        self._failures.append(now)
        self.restarts += 1
        self.last_error = type(error).__name__
        pause = BACKOFF_S[min(len(self._failures), len(BACKOFF_S)) - 1]
        return pause * random.uniform(0.5, 1.0)  # noqa: S311  (not a secret)


class Tasks:
    """The tasks of a daemon, by name."""

    def __init__(self, statement_timeout_s: float = 30.0) -> None:
        self._stale_after_s = STALE_AFTER_S + 2 * statement_timeout_s
        self._tasks: dict[str, Task] = {}

    def all(self) -> list[Task]:
        """Those that run now."""
        return list(self._tasks.values())

    def stale(self) -> list[str]:
        """Names of those that make no progress."""
        return sorted(task.name for task in self._tasks.values() if task.is_stale)

    def restarted(self) -> dict[str, dict[str, int | str | None]]:
        """Those that have failed so far, how often, and with what at last."""
        return {
            task.name: {"restarts": task.restarts, "last_error": task.last_error}
            for task in self._tasks.values()
            if task.restarts
        }

    def looping(self) -> dict[str, str]:
        """Those that keep failing, with the last error."""
        return {task.name: task.last_error or "" for task in self._tasks.values() if task.is_looping}

    async def run(
        self,
        name: str,
        body: Callable[[Task], Awaitable[None]],
        *,
        kind: str | None = None,
        stale_after_s: float | None = None,
    ) -> None:
        """Run `body` until it returns, starting it again whenever it raises."""
        task = self._tasks[name] = Task(name, kind or name, stale_after_s or self._stale_after_s)
        TASK_RESTARTS.labels(task.kind)
        try:
            while True:
                try:
                    task.progress()
                    await body(task)
                except Exception as error:  # noqa: BLE001  (here a task ends, and starts again)
                    pause_s = task.failed(error)
                    TASK_RESTARTS.labels(task.kind).inc()
                    _log.error(
                        "task_failed",
                        task=name,
                        restarts=task.restarts,
                        restart_in_s=round(pause_s, 1),
                        is_crash_loop=task.is_looping,
                        error=" ".join(filter(None, (type(error).__name__, sqlstate(error)))),
                        # What the server says about an error may quote a row.
                        exc_info=None if sqlstate(error) else error,
                    )
                    task.rest()
                    await anyio.sleep(pause_s)
                else:
                    return
        finally:
            # Another of the same name may have begun meanwhile.
            if self._tasks.get(name) is task:
                del self._tasks[name]
