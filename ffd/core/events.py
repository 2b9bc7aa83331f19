"""The streams of events, the literals in them, and the channels that announce them.

A notification is a doorbell: it says "look", never what happened. Events are read from their tables.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Channel(StrEnum):
    """NOTIFY channels. The four stream channels are FlowFabric's; `WORK` carries the lane as its payload."""

    COMPLETION = "ff_completion"
    LEASE = "ff_lease_event"
    SIGNAL = "ff_signal_event"
    OPERATOR = "ff_operator_event"
    WORK = "ff_work"


Rings = tuple[tuple[str, str], ...]

LEASE_RINGS: Final[Rings] = ((Channel.LEASE.value, ""),)
ENDED_RINGS: Final[Rings] = ((Channel.COMPLETION.value, ""), (Channel.LEASE.value, ""))
COMPLETION_RINGS: Final[Rings] = ((Channel.COMPLETION.value, ""),)


def work_ring(lane: str) -> tuple[str, str]:
    """The ring that tells idle workers of a lane to look again."""
    return (Channel.WORK.value, lane)
