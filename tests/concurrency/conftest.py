"""Every race also checks the server's log: a deadlock that the retry wrapper hid is still a deadlock."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ffd.dev.postgres import EmbeddedPostgres


class ServerLog:
    """What the server has logged since the test began."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size

    def lines(self) -> list[str]:
        """The new lines; each starts with time, pid and SQLSTATE."""
        with self._path.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace").splitlines()

    def deadlocks(self) -> list[str]:
        """The new lines that tell of a deadlock."""
        return [line for line in self.lines() if "] 40P01 " in line or "deadlock detected" in line]

    def forget(self) -> None:
        """Begin anew."""
        self._start = self._path.stat().st_size


@pytest.fixture(autouse=True)
def server_log(pg: EmbeddedPostgres) -> Iterator[ServerLog]:
    """The log of this test; it must hold no deadlock at the end."""
    log = ServerLog(pg.log_path)
    yield log
    assert log.deadlocks() == []


@pytest.fixture
def rng() -> random.Random:
    """A seeded source of jitter; set FFD_TEST_SEED to repeat a run."""
    seed = int(os.environ.get("FFD_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"FFD_TEST_SEED={seed}")  # noqa: T201  (pytest shows it when the test fails)
    return random.Random(seed)
