"""What the tests of the runner share: files to apply, a run with its steps, a look into the database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from ffd.db.migration_files import Migration
from ffd.db.migrations import Progress, migrate

CREATE_A = "create table a (id int primary key);\ninsert into a values (1);\n"
CREATE_B = "create table b (id int);\n"

WriteFiles = Callable[..., Path]


@asynccontextmanager
async def connected(dsn: str, name: str = "tests") -> AsyncIterator[Any]:
    conn = await asyncpg.connect(dsn, server_settings={"application_name": name})
    try:
        yield conn
    finally:
        await conn.close(timeout=5)


@asynccontextmanager
async def other_role(dsn: str) -> AsyncIterator[str]:
    """The same database for a role that owns nothing and sees nothing of others."""
    parts = urlsplit(dsn)
    async with connected(dsn) as conn:
        role = f"other_{conn.get_server_pid()}"
        await conn.execute(f"create role {role} login password 'pw'")
        try:
            yield f"postgresql://{role}:pw@{parts.netloc.rpartition('@')[2]}{parts.path}"
        finally:
            await conn.execute(f"drop role {role}")


async def value(dsn: str, query: str) -> Any:
    async with connected(dsn) as conn:
        return await conn.fetchval(query)


async def run(dsn: str, directory: Path | None, **options: Any) -> tuple[list[Migration], list[Progress]]:
    steps: list[Progress] = []
    applied = await migrate(dsn, on_progress=steps.append, directory=directory, **options)
    return applied, steps


async def has_table(dsn: str, name: str) -> bool:
    return await value(dsn, f"select to_regclass('{name}') is not null") is True


async def ledger(dsn: str) -> list[int]:
    if not await has_table(dsn, "ff_schema_migration"):
        return []
    async with connected(dsn) as conn:
        return [row[0] for row in await conn.fetch("select version from ff_schema_migration order by version")]
