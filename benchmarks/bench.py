"""What every benchmark is given: a durable server, fresh migrated databases, the number of rounds, a progress line.

The server is the embedded one with a distribution's durability: every commit waits for the disk. Otherwise a
statement's own cost would look larger than it is, and the gain of batches smaller.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg

from ffd.db.migrations import Progress, migrate
from ffd.dev.postgres import EmbeddedPostgres

T = TypeVar("T")


class Spent(NamedTuple):
    """What a piece of work took: wall clock, and the CPU of this process, which is the client's side."""

    wall_s: float
    cpu_s: float


Variant = Callable[[str], Awaitable[Spent]]

DURABLE_SETTINGS: Final = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
SHOWN_SETTINGS: Final = (
    "server_version",
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "wal_sync_method",
    "shared_buffers",
    "max_wal_size",
    "autovacuum",
)
ROUNDS: Final = 5
QUICK_ROUNDS: Final = 2
_TEMPLATE: Final = "bench_template"


class Bench:
    """The server and the sizes of one run."""

    def __init__(self, server: EmbeddedPostgres, *, is_quick: bool) -> None:
        self._server = server
        self._started = time.monotonic()
        self._databases = 0
        self._random = random.Random(0)
        self.is_quick = is_quick
        self.rounds = QUICK_ROUNDS if is_quick else ROUNDS

    def size(self, full: int, quick: int) -> int:
        """A size for this run."""
        return quick if self.is_quick else full

    def progress(self, text: str) -> None:
        """Say what happens now."""
        print(f"[{time.monotonic() - self._started:5.1f} s] {text}", flush=True)

    async def open(self) -> dict[str, str]:
        """Make the template of all databases; the settings that the figures depend on."""

        def show(step: Progress) -> None:
            self.progress(f"migrate: {step.step} {step.migration.label if step.migration else step.detail}")

        async with connected(self._server.dsn()) as sql:
            await sql.execute(f"create database {_TEMPLATE}")
            settings = {name: str(await sql.fetchval(f"show {name}")) for name in SHOWN_SETTINGS}
        await migrate(self._server.dsn(_TEMPLATE), on_progress=show)
        return settings

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """A fresh migrated database, dropped afterwards; its DSN."""
        self._databases += 1
        name = f"bench_{self._databases}"
        async with connected(self._server.dsn()) as sql:
            await sql.execute(f"create database {name} template {_TEMPLATE}")
        try:
            yield self._server.dsn(name)
        finally:
            async with connected(self._server.dsn()) as sql:
                await sql.execute(f"drop database {name} with (force)")

    async def in_turns(self, what: str, variants: Mapping[str, Callable[[int], Awaitable[T]]]) -> dict[str, list[T]]:
        """Run every variant once per round, in another order each time; the results by variant.

        A variant is given the number of its round, so that it can keep off what an earlier round left.
        """
        results: dict[str, list[T]] = {name: [] for name in variants}
        for number in range(1, self.rounds + 1):
            for name in self.shuffled(variants):
                self.progress(f"{what}: round {number}/{self.rounds}, {name}")
                results[name].append(await variants[name](number))
        return results

    async def in_slices(
        self,
        what: str,
        variants: Mapping[str, Variant],
        slices: int,
        prepare: Callable[[list[str]], Awaitable[None]] | None = None,
    ) -> dict[str, list[Spent]]:
        """The same with every round cut into slices that take turns, so that a disturbance hits all variants.

        A variant is given the name of its slice; a round has spent what its slices have. Before a round,
        `prepare` is given the names of all its slices.
        """
        rounds: dict[str, list[Spent]] = {name: [] for name in variants}
        for number in range(1, self.rounds + 1):
            self.progress(f"{what}: round {number}/{self.rounds}, {' and '.join(variants)} in turns")
            parts = [f"{number}-{at}" for at in range(slices)]
            if prepare is not None:
                await prepare(parts)
            spent: dict[str, list[Spent]] = {name: [] for name in variants}
            for part in parts:
                for name in self.shuffled(variants):
                    spent[name].append(await variants[name](part))
            for name, each in spent.items():
                rounds[name].append(Spent(sum(one.wall_s for one in each), sum(one.cpu_s for one in each)))
        return rounds

    def shuffled(self, names: Iterable[str]) -> list[str]:
        """The names in a random order, the same in every run."""
        order = list(names)
        self._random.shuffle(order)
        return order


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A plain connection, for what is not measured."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def settle(dsn: str, *, has_checkpoint: bool = False) -> None:
    """Bring a loaded database into the state that autovacuum would have brought it to, before measuring."""
    async with connected(dsn) as sql:
        await sql.execute("vacuum (analyze)")
        if has_checkpoint:
            await sql.execute("checkpoint")
