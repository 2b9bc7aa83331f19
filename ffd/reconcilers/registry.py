"""The reconcilers as one kind of thing: a name from the schedule and the module that bears it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from ffd.core.schedule import RECONCILERS
from ffd.db.statement import Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Look
from ffd.reconcilers.isolation import Tick, fault_name, is_row_fault, split
from ffd.reconcilers.report import Report
from ffd.telemetry.logging import get_logger

CANDIDATES_MIN: Final = 100

_log = get_logger("reconciler")


class Reconciler(NamedTuple):
    """What a daemon needs to know of a reconciler."""

    name: str
    tick: Tick
    probe: Statement
    candidates: Statement
    arguments: Callable[[Runtime], Sequence[object]]

    async def look(self, runtime: Runtime, partitions: Sequence[int]) -> Look:
        """Which of these partitions have due rows, and when the next is due in the others."""
        (row,) = await runtime.db.fetch(self.probe, partitions, 1, *self.arguments(runtime))
        return Look(row["now_ms"], row["first_at_ms"], row["next_at_ms"], row["due"])

    async def sweep(self, runtime: Runtime, partition_key: int, limit: int) -> Report:
        """Move up to `limit` due rows of a partition; a row that cannot be moved is set aside."""
        try:
            return await self.tick(runtime, partition_key, limit)
        except Exception as error:
            if not is_row_fault(error):
                raise
            _log.warning("batch_split", reconciler=self.name, partition=partition_key, error=fault_name(error))
            # As many as may be: what stands in front may be held by others, and the one at fault behind it.
            many = max(limit, CANDIDATES_MIN)
            rows = await runtime.db.fetch(self.candidates, [partition_key], many, *self.arguments(runtime))
            entities: list[UUID] = list(dict.fromkeys(row["entity_id"] for row in rows))
            if not entities:
                raise
            return await split(runtime, self.name, self.tick, partition_key, entities)


def _no_arguments(_runtime: Runtime) -> Sequence[object]:
    return ()


def load_reconcilers() -> dict[str, Reconciler]:
    """Every reconciler by its name."""
    found = {}
    for name in RECONCILERS:
        module = importlib.import_module(f"ffd.reconcilers.{name}")
        arguments = getattr(module, "arguments", _no_arguments)
        found[name] = Reconciler(name, module.tick, module.PROBE, module.CANDIDATES, arguments)
    return found
