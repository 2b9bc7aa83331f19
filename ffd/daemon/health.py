"""What health checks are told. Nothing here asks the database: every fact is what the tasks last saw.

Liveness: the event loop turns (an answer proves it) and no task is stuck. Readiness: this node does its part of the
work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ffd.daemon.tasks import Tasks


class Verdict(NamedTuple):
    """An answer: whether all is well, and what is not, by the name of the check."""

    is_ok: bool
    checks: dict[str, str]


# A check gives the reason why it fails, or None.
Check = Callable[[], str | None]


class Health:
    """Checks by name, added by whoever knows."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks
        self.is_draining = False
        self._checks: dict[str, Check] = {}

    def add(self, name: str, check: Check) -> None:
        """Readiness depends on this from now on."""
        self._checks[name] = check

    def live(self) -> Verdict:
        """Whether the process should be left alone."""
        stale = self.tasks.stale()
        return Verdict(not stale, {"tasks": f"no progress: {', '.join(stale)}" if stale else "ok"})

    def ready(self) -> Verdict:
        """Whether this node does its work."""
        checks = {name: check() for name, check in self._checks.items()}
        looping = self.tasks.looping()
        checks["tasks"] = (
            f"failing again and again: {', '.join(f'{name} ({error})' for name, error in sorted(looping.items()))}"
            if looping
            else None
        )
        checks["draining"] = "stopping" if self.is_draining else None
        return Verdict(not any(checks.values()), {name: reason or "ok" for name, reason in checks.items()})
