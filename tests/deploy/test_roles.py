"""The roles of deploy/roles.sql are enough, and not too much."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from ffd import Engine
from ffd.db.migrations import migrate
from tests.support import WORKER

pytestmark = pytest.mark.anyio

ROLES = Path(__file__).parent.parent.parent / "deploy" / "roles.sql"


def _as(dsn: str, role: str) -> str:
    parts = urlsplit(dsn)
    host = parts.netloc.rsplit("@", 1)[-1]
    return urlunsplit(parts._replace(netloc=f"{role}:secret@{host}"))


async def test_the_owner_migrates_and_the_application_works_without_owning_anything(empty_database: str) -> None:
    admin = await asyncpg.connect(empty_database)
    try:
        for _ in range(2):  # it may be run again
            await admin.execute(ROLES.read_text())
        for role in ("ffd_owner", "ffd_app"):
            await admin.execute(f"alter role {role} password 'secret'")
        await migrate(_as(empty_database, "ffd_owner"), on_progress=lambda _: None)
        async with Engine.connect(_as(empty_database, "ffd_app")) as engine:
            created = await engine.create_execution(idempotency_key="k")
            claim = await engine.claim("default", **WORKER)
            assert claim is not None
            assert claim.execution_id == created.execution_id
            await engine.renew(claim.handle)
            await engine.complete(claim.handle, b"r")
            assert (await engine.wait_for_result(created.execution_id, timeout_ms=0)).result_size == 1
        app = await asyncpg.connect(_as(empty_database, "ffd_app"))
        try:
            for forbidden in (
                "drop table ff_exec_core",
                "create table mine (i int)",
                "truncate ff_lease_event",
                "create or replace function ff_now_ms() returns bigint language sql as 'select 1::bigint'",
            ):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await app.execute(forbidden)
        finally:
            await app.close()
    finally:
        await admin.execute("drop owned by ffd_app cascade")
        await admin.close()
