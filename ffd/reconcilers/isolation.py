"""One row that cannot be moved must not stop its partition: find it, set it aside, try it again later.

A batch that fails is split until the rows at fault are alone. They go to `ff_quarantine` with a time to try again,
which grows with every failure; probes and sweeps pass over them until then. What the server said beyond its code is not
kept: it may quote the row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Final, Protocol
from uuid import UUID

from ffd.core.errors import Contention, Unavailable
from ffd.db.errors import sqlstate
from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only
from ffd.reconcilers.report import Report
from ffd.telemetry.logging import get_logger

# $1 partition_key, $2 reconciler, $3 entity, $4 error. One minute, doubled with every failure, at most an hour.
QUARANTINE: Final = Statement(
    "quarantine",
    """
    insert into ff_quarantine as t (partition_key, reconciler, entity_id, error, first_at_ms, retry_at_ms)
    values ($1, $2, $3, $4, ff_now_ms(), ff_now_ms() + 60000)
    on conflict (partition_key, reconciler, entity_id) do update
    set failures = t.failures + 1, error = excluded.error,
        retry_at_ms = ff_now_ms() + least(60000 * power(2, least(t.failures, 6)), 3600000)::bigint
    returning failures, retry_at_ms - ff_now_ms() as retry_in_ms
    """,
)
# What has been moved since, or is gone.
FORGET_QUARANTINE: Final = Statement(
    "forget_quarantine",
    "delete from ff_quarantine where partition_key = $1 and retry_at_ms <= ff_now_ms() - 86400000",
)
COUNT_QUARANTINE: Final = Statement(
    "count_quarantine",
    "select count(*) from ff_quarantine where partition_key = any ($1::smallint[]) and retry_at_ms > ff_now_ms()",
    Planning.CUSTOM,
)

_log = get_logger("reconciler")


class Tick(Protocol):
    """Moves due rows of one partition."""

    def __call__(self, runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Awaitable[Report]:
        """Up to `limit` rows, of the entities in `only` if given."""
        ...


def is_row_fault(error: Exception) -> bool:
    """Whether a row may be to blame; trouble with the server or with locks is nobody's in particular."""
    return not isinstance(error, Unavailable | Contention | OSError | TimeoutError)


def fault_name(error: Exception) -> str:
    """What went wrong, without what the server says about the row."""
    return " ".join(filter(None, (type(error).__name__, sqlstate(error))))


async def split(runtime: Runtime, reconciler: str, tick: Tick, partition_key: int, entities: Sequence[UUID]) -> Report:
    """Move what can be moved of these, and set aside what cannot."""
    try:
        return await tick(runtime, partition_key, len(entities), entities)
    except Exception as error:
        if not is_row_fault(error):
            raise
        if len(entities) == 1:
            return await _set_aside(runtime, reconciler, partition_key, entities[0], error)
    report = Report()
    half = len(entities) // 2
    for part in (entities[:half], entities[half:]):
        report.merge(await split(runtime, reconciler, tick, partition_key, part))
    return report


async def _set_aside(runtime: Runtime, reconciler: str, partition_key: int, entity: UUID, error: Exception) -> Report:
    what = fault_name(error)
    (row,) = await runtime.db.fetch(QUARANTINE, partition_key, reconciler, entity, what)
    _log.error(
        "row_quarantined",
        reconciler=reconciler,
        partition=partition_key,
        entity_id=str(entity),
        error=what,
        failures=row["failures"],
        retry_in_s=row["retry_in_ms"] // 1000,
    )
    report = Report()
    report.outcomes["quarantined"] += 1
    return report
