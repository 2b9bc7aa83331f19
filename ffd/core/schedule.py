"""The reconcilers by name: each is a module of `ffd.reconcilers`, a table of the configuration and a metric label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Pace(NamedTuple):
    """How long a reconciler may look away, and how many rows one of its statements moves, unless configured otherwise.

    A probe knows the next time that anything is due, so the interval bounds only how late something is noticed that
    was written after the probe and is due before the next one.
    """

    interval_ms: int
    batch_rows: int


RECONCILERS: Final[Mapping[str, Pace]] = {
    "lease_expiry": Pace(1_000, 1_000),
    "attempt_timeout": Pace(2_000, 1_000),
    "suspension_timeout": Pace(1_000, 1_000),
    "delayed_promoter": Pace(500, 1_000),
    "execution_deadline": Pace(2_000, 1_000),
    "waitpoint_expiry": Pace(5_000, 1_000),
    "dependency": Pace(1_000, 100),
    "cancel_backlog": Pace(5_000, 100),
    "retention": Pace(60_000, 500),
}
