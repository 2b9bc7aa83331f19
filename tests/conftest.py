"""One real PostgreSQL per test process, one migrated template, one clone of it per test."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from ffd import Engine
from ffd.config import DatabaseSettings, OutboxSettings
from ffd.db.migrations import migrate
from ffd.dev.postgres import EmbeddedPostgres
from tests.support import Clock, Rig, install_clock

TEMPLATE = "ffd_template"


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """asyncpg needs asyncio; debug mode finds what is never awaited and what blocks the loop."""
    return ("asyncio", {"use_uvloop": True, "debug": True})


@pytest.fixture(scope="session")
def rounds() -> int:
    """How often a race is run: `make test-full` asks for more."""
    return 200 if os.environ.get("FFD_TEST_FULL") else 20


@pytest.fixture(scope="session")
def pg() -> Iterator[EmbeddedPostgres]:
    """The server of this test process."""
    settings = {"max_connections": "400", "deadlock_timeout": "100ms"}
    with EmbeddedPostgres.temporary(settings=settings) as server:
        yield server


async def _execute(dsn: str, *commands: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        for command in commands:
            await connection.execute(command)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def template(pg: EmbeddedPostgres) -> str:
    """A migrated database that tests clone."""
    asyncio.run(_execute(pg.dsn(), f"create database {TEMPLATE}"))
    asyncio.run(migrate(pg.dsn(TEMPLATE), on_progress=lambda _: None))
    return TEMPLATE


def _new_database(pg: EmbeddedPostgres, template: str | None) -> Iterator[str]:
    name = f"t_{uuid.uuid4().hex}"
    clause = "" if template is None else f" template {template} strategy wal_log"
    asyncio.run(_execute(pg.dsn(), f"create database {name}{clause}"))
    yield pg.dsn(name)
    asyncio.run(_execute(pg.dsn(), f"drop database if exists {name} with (force)"))


@pytest.fixture
def empty_database(pg: EmbeddedPostgres) -> Iterator[str]:
    """A new database without the schema."""
    yield from _new_database(pg, None)


@pytest.fixture
def dsn(pg: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A new migrated database."""
    yield from _new_database(pg, template)


@pytest.fixture
async def engine(dsn: str) -> AsyncIterator[Engine]:
    """An engine on a database of its own."""
    async with Engine.connect(dsn) as engine:
        yield engine


@pytest.fixture
async def sql(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A plain connection to the test's database, to look behind the engine's back."""
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def rig(engine: Engine, sql: asyncpg.Connection[Any]) -> Rig:
    """An engine with shorthand for what most tests do."""
    return Rig(engine, sql)


@pytest.fixture
async def clock(sql: asyncpg.Connection[Any]) -> Clock:
    """Time under the test's control: the database clock of this test's database."""
    await install_clock(sql)
    return Clock(sql)


@pytest.fixture
def open_engine(dsn: str) -> Callable[..., Any]:
    """Make engines with other settings on the test's database."""

    def make(*, outbox: OutboxSettings | None = None, **database: Any) -> Any:
        return Engine.open(DatabaseSettings(dsn=dsn, **database), outbox or OutboxSettings())

    return make


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return Path(__file__).parent.parent
