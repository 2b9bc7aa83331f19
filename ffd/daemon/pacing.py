"""After an outage every lease has run out at once: they are given back at a bounded pace, and this is said aloud.

When nobody could renew (the database was away, its clock stepped, no daemon ran), the first sweep would offer
everything that was running to workers that are just coming back. What has expired by then is spread over about a
minute instead.
"""

from __future__ import annotations

import time
from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import RECLAIM_PACED

# Fewer than this are given back at once.
PACED_FROM_ROWS: Final = 1_000
SPREAD_S: Final = 60.0

COUNT_EXPIRED: Final = Statement(
    "count_expired",
    """
    select count(*) as expired from ff_attempt
    where partition_key = any ($1::smallint[]) and lease_expires_at_ms <= ff_now_ms()
    """,
    Planning.CUSTOM,
)

_log = get_logger("pacing")


class ReclaimPace:
    """How many leases may be given back, over all partitions of this node."""

    def __init__(self) -> None:
        self._is_suspicious = True
        self._why = "start"
        self._rows_per_s: float | None = None
        self._until = 0.0
        self._tokens = 0.0
        self._filled_at = 0.0

    def suspect(self, why: str) -> None:
        """Leases may have run out although their owners are alive: look before the next sweep."""
        self._is_suspicious = True
        self._why = why

    @property
    def is_paced(self) -> bool:
        """Whether sweeps of leases are held back now."""
        return self._rows_per_s is not None

    async def look(self, runtime: Runtime, partitions: list[int]) -> None:
        """Before partitions with expired leases are swept: find out whether there are suspiciously many."""
        if self._rows_per_s is not None and time.monotonic() > self._until:
            self._rows_per_s = None
            RECLAIM_PACED.set(0)
            _log.info("reclaim_pace_over")
        if not self._is_suspicious:
            return
        (row,) = await runtime.db.fetch(COUNT_EXPIRED, partitions)
        self._is_suspicious = False
        expired = int(row["expired"])
        if expired < PACED_FROM_ROWS:
            return
        self._rows_per_s = expired / SPREAD_S
        self._until = time.monotonic() + SPREAD_S
        self._tokens = 0.0
        self._filled_at = time.monotonic()
        RECLAIM_PACED.set(1)
        _log.warning(
            "reclaim_paced", expired=expired, after=self._why, rows_per_s=round(self._rows_per_s), spread_s=SPREAD_S
        )

    def take(self, batch_rows: int) -> int:
        """How many rows a sweep may give back now: all of a batch, unless paced; 0 for none yet."""
        if self._rows_per_s is None:
            return batch_rows
        now = time.monotonic()
        # At most two seconds' worth: looks are a second apart.
        burst = max(1.0, 2 * self._rows_per_s)
        self._tokens = min(burst, self._tokens + (now - self._filled_at) * self._rows_per_s)
        self._filled_at = now
        rows = min(batch_rows, int(self._tokens))
        self._tokens -= rows
        return rows

    def give_back(self, rows: int) -> None:
        """A sweep found fewer than it was allowed."""
        self._tokens += rows
