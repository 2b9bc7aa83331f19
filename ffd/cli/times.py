"""Times for people: durations as they are typed, moments as they are read. The clock is always the database's."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(?:[0-9]{1,15}(?:ms|s|m|h|d))+")
_PART: Final = re.compile(r"([0-9]+)(ms|s|m|h|d)")
# The last second of the year 9999; the engine's times may lie beyond what a calendar can name.
_CALENDAR_MS_MAX: Final = 253_402_300_799_999


def parse_duration(text: str) -> int | None:
    """Milliseconds in a duration such as 500ms, 30s, 5m, 2h, 1d or 1h30m; None for any other text."""
    if _DURATION.fullmatch(text) is None:
        return None
    return sum(int(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text))


def duration(ms: int) -> str:
    """A length of time, its two largest units at most."""
    if ms < 1_000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms // 1_000}s"
    if ms < 3_600_000:
        return f"{ms // 60_000}m"
    large, small, per = ("h", "m", 60) if ms < 86_400_000 else ("d", "h", 24)
    count, rest = divmod(ms // _UNITS_MS[small], per)
    return f"{count}{large} {rest}{small}" if rest else f"{count}{large}"


def ago(at_ms: int, now_ms: int) -> str:
    """A moment seen from now: "3m ago", "in 20s", "now"."""
    passed_ms = now_ms - at_ms
    if abs(passed_ms) < 1_000:
        return "now"
    return f"{duration(passed_ms)} ago" if passed_ms > 0 else f"in {duration(-passed_ms)}"


def iso(at_ms: int) -> str:
    """A moment in UTC, to the second."""
    if not 0 <= at_ms <= _CALENDAR_MS_MAX:
        return f"{at_ms} ms"
    return f"{datetime.fromtimestamp(at_ms // 1_000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def moment(at_ms: int, now_ms: int) -> str:
    """A moment both ways: "2024-05-01T12:00:00Z (3m ago)"."""
    return f"{iso(at_ms)} ({ago(at_ms, now_ms)})"
