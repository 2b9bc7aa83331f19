"""Looking for due rows and moving them: one watch per reconciler, one task per owned partition.

A watch probes all owned partitions in one statement, wakes those that have due rows and sleeps until the next row is
due or its interval is over. A partition's task sleeps until it is woken, then sweeps one reconciler after another,
batch by batch, until nothing is left. So an idle daemon costs a few statements a second, however many partitions it
owns.

What is due but cannot be moved (somebody holds the row, the sweep fails) is tried again after a pause that grows; a
watch does not wake a partition for it before.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import anyio
import asyncpg
from anyio.abc import TaskGroup

from ffd.config import ReconcilerSettings
from ffd.core.errors import Contention, EngineError
from ffd.daemon.pacing import ReclaimPace
from ffd.daemon.tasks import Task, Tasks
from ffd.db.errors import sqlstate
from ffd.ops.runtime import Runtime
from ffd.reconcilers.registry import Reconciler
from ffd.reconcilers.report import Report
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import (
    RECONCILER_LAG_SECONDS,
    RECONCILER_LAST_SUCCESS,
    RECONCILER_ROWS,
    RECONCILER_TICK_DURATION_SECONDS,
    RECONCILER_TICKS,
)

# However soon the next row is due, two looks are at least this far apart.
LOOK_EVERY_S: Final = 0.1
# A watch that has nothing to do looks up this often, to show that it lives.
IDLE_S: Final = 15.0
SWEEPS_MAX: Final = 4
# Pauses of a partition that could not be moved on.
PAUSES_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0)
# After this long without success a partition is given up, if another node is there.
NO_PROGRESS_S: Final = 15.0

# The reconciler whose rows are given back at a bounded pace after an outage.
PACED: Final = "lease_expiry"
# What happens all day long and is worth no line.
ROUTINE: Final = frozenset({"promoted", "deleted", "trimmed", "cleared", "settled"})

QUERY_CANCELED: Final = "57014"

_EXPECTED: Final = (EngineError, asyncpg.PostgresError, OSError)

_log = get_logger("sweeping")


class Partition:
    """One owned partition: what is to be swept, and what is being held back."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.due: dict[str, None] = {}
        self.is_idle = anyio.Event()
        self.is_idle.set()
        self.is_ending = False
        self.failing: dict[str, float] = {}
        self._too_long: dict[str, int] = {}
        self._wanted = anyio.Event()
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self.scope = anyio.CancelScope()

    def wake(self, reconciler: str) -> None:
        """Sweep this soon, unless it is being held back."""
        if not self.is_ending and time.monotonic() >= self._not_before.get(reconciler, 0.0):
            self.due[reconciler] = None
            self._wanted.set()

    async def next(self) -> str:
        """What to sweep now, in the order of waking; waits until there is something."""
        while not self.due:
            self.is_idle.set()
            self._wanted = anyio.Event()
            await self._wanted.wait()
        if self.is_idle.is_set():
            self.is_idle = anyio.Event()
        name = next(iter(self.due))
        del self.due[name]
        return name

    def moved_on(self, reconciler: str) -> None:
        """A sweep moved something, or nothing is due any more: nothing is held back."""
        self._failures.pop(reconciler, None)
        self._not_before.pop(reconciler, None)
        self._too_long.pop(reconciler, None)
        self.failing.pop(reconciler, None)

    def batch(self, reconciler: str, rows: int) -> int:
        """How many rows to try: fewer each time that a batch took too long, until it fits."""
        return max(1, rows >> 2 * self._too_long.get(reconciler, 0))

    def fail(self, reconciler: str, error: Exception, since: float) -> None:
        """A sweep failed. That somebody holds rows is no fault of this node's."""
        if sqlstate(error.__cause__ or error) == QUERY_CANCELED:
            self._too_long[reconciler] = self._too_long.get(reconciler, 0) + 1
        if not isinstance(error, Contention):
            self.failing.setdefault(reconciler, since)
        self.hold_back(reconciler)

    def hold_back(self, reconciler: str) -> None:
        """A sweep moved nothing although something was due."""
        failures = self._failures[reconciler] = self._failures.get(reconciler, 0) + 1
        pause_s = PAUSES_S[min(failures, len(PAUSES_S)) - 1]
        jitter = random.uniform(0.8, 1.2)  # noqa: S311  (not a secret)
        self._not_before[reconciler] = time.monotonic() + pause_s * jitter


class Sweeping:
    """The watches and partition tasks of one node. `owned` tells at any moment what may be swept."""

    def __init__(
        self,
        runtime: Runtime,
        reconcilers: Mapping[str, Reconciler],
        settings: Mapping[str, ReconcilerSettings],
        tasks: Tasks,
        group: TaskGroup,
    ) -> None:
        self.runtime = runtime
        self.reconcilers = reconcilers
        self.settings = settings
        self.pace = ReclaimPace()
        self.lag_s = 0.0
        self._tasks = tasks
        self._group = group
        self._partitions: dict[int, Partition] = {}
        self._slots = anyio.Semaphore(max(1, min(SWEEPS_MAX, runtime.db.settings.pool_max - 2)))
        self._pokes: dict[str, anyio.Event] = {}
        self._lags: dict[str, float] = {}
        self._is_stopping = False
        # Whether the others still count on this node; asked before every sweep.
        self.is_held: Callable[[], bool] = lambda: True
        for name in reconcilers:
            RECONCILER_LAG_SECONDS.labels(name).set(0)
            if settings[name].is_on:
                # One that never succeeds must be seen as well.
                RECONCILER_LAST_SUCCESS.labels(name).set(0)
            RECONCILER_TICK_DURATION_SECONDS.labels(name)
            for result in ("ok", "idle", "error"):
                RECONCILER_TICKS.labels(name, result)

    @property
    def partitions(self) -> list[int]:
        """What is being swept."""
        return list(self._partitions)

    def begin(self, partitions: Iterable[int]) -> None:
        """Sweep these from now on."""
        for key in partitions:
            partition = self._partitions[key] = Partition(key)
            self._group.start_soon(self._run_partition, partition)
        self.poke_all()

    async def finish(self, partitions: Iterable[int]) -> None:
        """Begin nothing more with these, and return when what is under way has ended; cancelled, end it."""
        ending = [self._partitions.pop(key) for key in partitions if key in self._partitions]
        for partition in ending:
            partition.is_ending = True
            partition.due.clear()
        try:
            for partition in ending:
                await partition.is_idle.wait()
        finally:
            for partition in ending:
                partition.scope.cancel()

    def abandon(self, partitions: Iterable[int]) -> None:
        """Stop sweeping these, in the middle of a statement if need be."""
        for key in partitions:
            if key in self._partitions:
                self._partitions.pop(key).scope.cancel()

    async def stop(self) -> None:
        """Begin nothing more, and return when what is under way has ended."""
        self._is_stopping = True
        await self.finish(list(self._partitions))

    def failing(self) -> list[int]:
        """Partitions that have made no progress for too long."""
        since = time.monotonic() - NO_PROGRESS_S
        return [key for key, each in self._partitions.items() if min(each.failing.values(), default=since) < since]

    def suspect(self, why: str) -> None:
        """Leases may have run out although their owners are alive."""
        self.pace.suspect(why)

    def configure(self, settings: Mapping[str, ReconcilerSettings]) -> None:
        """Go on with other settings."""
        self.settings = settings
        for name in self.reconcilers:
            if not settings[name].is_on:
                RECONCILER_LAST_SUCCESS.remove(name)
        self.poke_all()

    def poke(self, reconciler: str) -> None:
        """Let a watch look at once."""
        if reconciler in self._pokes:
            self._pokes[reconciler].set()

    def poke_all(self) -> None:
        """Let every watch look at once."""
        for event in self._pokes.values():
            event.set()

    async def watch(self, reconciler: Reconciler, task: Task) -> None:
        """Probe, wake the partitions that have due rows, sleep until the next row is due."""
        failures = 0
        while not self._is_stopping:
            task.progress()
            self._pokes[reconciler.name] = poked = anyio.Event()
            settings = self.settings[reconciler.name]
            began = time.monotonic()
            try:
                pause_s = await self._look(reconciler, settings)
                failures = 0
            except _EXPECTED as error:
                pause_s = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
                failures += 1
                RECONCILER_TICKS.labels(reconciler.name, "error").inc()
                if failures == 1:
                    _log.warning("look_failed", reconciler=reconciler.name, error=_name(error))
            with anyio.move_on_after(pause_s):
                await poked.wait()
            # Pokes come in bursts; a look each would not see more.
            await anyio.sleep(max(0.0, began + LOOK_EVERY_S - time.monotonic()))

    async def _look(self, reconciler: Reconciler, settings: ReconcilerSettings) -> float:
        owned = list(self._partitions)
        if not owned or not settings.is_on:
            self._set_lag(reconciler.name, 0.0)
            return IDLE_S
        seen = await reconciler.look(self.runtime, owned)
        RECONCILER_LAST_SUCCESS.labels(reconciler.name).set(seen.now_ms / 1000)
        self._set_lag(reconciler.name, seen.lag_ms / 1000)
        if reconciler.name == PACED:
            await self.pace.look(self.runtime, owned)
        # In any order: while sweeps are paced, the first ones take what there is.
        for key in self._partitions.keys() - set(seen.due):
            self._partitions[key].moved_on(reconciler.name)
        random.shuffle(seen.due)
        for key in seen.due:
            if key in self._partitions:
                self._partitions[key].wake(reconciler.name)
        until_next_s = IDLE_S if seen.next_at_ms is None else (seen.next_at_ms - seen.now_ms) / 1000
        return min(settings.interval_ms / 1000, IDLE_S, max(until_next_s, LOOK_EVERY_S))

    def _set_lag(self, reconciler: str, lag_s: float) -> None:
        self._lags[reconciler] = lag_s
        self.lag_s = max(self._lags.values())
        RECONCILER_LAG_SECONDS.labels(reconciler).set(lag_s)

    async def _run_partition(self, partition: Partition) -> None:
        with partition.scope:
            await self._tasks.run(
                f"partition-{partition.key}", lambda task: self._serve(partition, task), kind="partition"
            )

    async def _serve(self, partition: Partition, task: Task) -> None:
        while True:
            task.rest()
            name = await partition.next()
            async with self._slots:
                # Asked here: there may have been a queue.
                if self._may_sweep(partition, name):
                    task.progress()
                    await self._sweep(partition, name)

    def _may_sweep(self, partition: Partition, name: str) -> bool:
        is_over = self._is_stopping or partition.is_ending
        return not is_over and self.settings[name].is_on and self.is_held()

    async def _sweep(self, partition: Partition, name: str) -> None:
        limit = partition.batch(name, self.settings[name].batch_rows)
        allowed = self.pace.take(limit) if name == PACED else limit
        if allowed == 0:
            return
        began = time.monotonic()
        try:
            report = await self.reconcilers[name].sweep(self.runtime, partition.key, allowed)
        except _EXPECTED as error:
            RECONCILER_TICKS.labels(name, "error").inc()
            partition.fail(name, error, began)
            if name == PACED and self.pace.is_paced:
                self.pace.give_back(allowed)
            _log.warning("sweep_failed", reconciler=name, partition=partition.key, error=_name(error))
            return
        RECONCILER_TICK_DURATION_SECONDS.labels(name).observe(time.monotonic() - began)
        if name == PACED and self.pace.is_paced:
            self.pace.give_back(allowed - report.moved)
        self._account(partition, name, report, has_more=report.moved >= allowed)

    def _account(self, partition: Partition, name: str, report: Report, *, has_more: bool) -> None:
        for outcome, rows in report.outcomes.items():
            RECONCILER_ROWS.labels(name, outcome).inc(rows)
        RECONCILER_TICKS.labels(name, "ok" if report.moved else "idle").inc()
        partition.failing.pop(name, None)
        if report.moved == 0:
            partition.hold_back(name)
            return
        partition.moved_on(name)
        log = _log.debug if report.outcomes.keys() <= ROUTINE else _log.info
        log("swept", reconciler=name, partition=partition.key, **report.outcomes)
        if has_more:
            partition.wake(name)
        if report.has_owed:
            partition.wake("dependency")


def _name(error: BaseException) -> str:
    return error.code if isinstance(error, EngineError) else type(error).__name__
