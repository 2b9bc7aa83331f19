"""What a tick did."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Final

from ffd.core.events import Channel, Rings, work_ring
from ffd.db.database import Row
from ffd.ops.runtime import Runtime

# What has to be rung for each outcome, besides the lane of work that became claimable.
_RINGS: dict[str, tuple[Channel, ...]] = {
    "reclaimed": (Channel.LEASE,),
    "retried": (Channel.LEASE,),
    "promoted": (),
    "resumed": (Channel.COMPLETION,),
    "escalated": (Channel.OPERATOR,),
    "cleared": (),
    "returned": (),
    "deleted": (),
}
_ENDED: tuple[Channel, ...] = (Channel.COMPLETION, Channel.LEASE)


# One tick in so many also clears up, although it had other work to do.
CLEAR_ONE_IN: Final = 10


def may_clear(report: Report) -> bool:
    """Whether a tick should look for timers that nothing stands behind: when it moved nothing, and now and then.

    They are as due as any other, so a partition that has only these is woken again and finds nothing else to move.
    """
    return report.moved == 0 or random.randrange(CLEAR_ONE_IN) == 0  # noqa: S311  (not a secret)


class Report:
    """How many rows a tick moved, by what became of them."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.lanes: set[str] = set()
        self.has_owed = False

    @property
    def moved(self) -> int:
        """How many rows in all."""
        return self.outcomes.total()

    def add(self, rows: Iterable[Row]) -> Report:
        """Count rows of (outcome, lane_id or NULL, whether their flow is owed a cascade)."""
        for outcome, lane, owes in rows:
            self.outcomes[outcome] += 1
            self.has_owed |= bool(owes)
            if lane is not None:
                self.lanes.add(lane)
        return self

    def merge(self, other: Report) -> None:
        """Count what another tick did."""
        self.outcomes += other.outcomes
        self.lanes |= other.lanes
        self.has_owed |= other.has_owed

    def announce(self, runtime: Runtime) -> Report:
        """Ring for whoever waits for what has just been committed."""
        channels = {channel for outcome in self.outcomes for channel in _RINGS.get(outcome, _ENDED)}
        rings: Rings = tuple((channel.value, "") for channel in sorted(channels))
        runtime.ring(rings + tuple(work_ring(lane) for lane in sorted(self.lanes)))
        return self
