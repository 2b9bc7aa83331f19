"""Connecting, timing out, and telling the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg
import pytest

from ffd import Contention, ContentionKind, Engine, Unavailable, Validation
from ffd.db.statement import Planning
from tests.support import WORKER, Rig, until

pytestmark = pytest.mark.anyio


def _with(dsn: str, **parts: Any) -> str:
    return urlunsplit(urlsplit(dsn)._replace(**parts))


async def test_a_server_that_is_not_there_is_unavailable(dsn: str) -> None:
    """C-284."""
    nobody = _with(dsn, netloc="postgres:hunter2@127.0.0.1:1")
    with pytest.raises(Unavailable) as refused:
        async with Engine.connect(nobody):
            pass
    assert refused.value.is_retryable
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("netloc_and_path", [("postgres:wrong-password@{host}", None), (None, "/no_such_database")])
async def test_a_refused_login_says_why_without_the_password(
    dsn: str, netloc_and_path: tuple[str | None, str | None]
) -> None:
    netloc, path = netloc_and_path
    host = urlsplit(dsn).netloc.rsplit("@", 1)[-1]
    parts = {"netloc": netloc.format(host=host)} if netloc else {"path": path}
    with pytest.raises(Unavailable) as refused:
        async with Engine.connect(_with(dsn, **parts)):
            pass
    assert "wrong-password" not in str(refused.value)


@pytest.mark.parametrize("bad", ["nonsense://x", "postgresql://u:p#w@h/d", 7])
async def test_a_malformed_dsn_is_named_without_being_shown(bad: Any) -> None:
    with pytest.raises(Validation) as refused:
        async with Engine.connect(bad):
            pass
    assert refused.value.field == "dsn"
    assert "p#w" not in str(refused.value)


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"pool_max": 0}, "pool_max"),
        ({"pool_min": 11}, "pool_min"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "x" * 257}, "namespace"),
    ],
)
async def test_bad_settings_are_named(dsn: str, kwargs: dict[str, Any], field: str) -> None:
    with pytest.raises(Validation) as refused:
        async with Engine.connect(dsn, **kwargs):
            pass
    assert refused.value.field == field


async def test_a_missing_schema_says_what_to_do(empty_database: str) -> None:
    async with Engine.connect(empty_database) as engine:
        with pytest.raises(Unavailable, match="ffd migrate"):
            await engine.create_execution()


async def test_an_exception_in_the_block_comes_out_as_it_is(dsn: str) -> None:
    with pytest.raises(ZeroDivisionError):
        async with Engine.connect(dsn):
            raise ZeroDivisionError


async def test_a_row_held_by_others_is_contention_after_three_tries(rig: Rig, open_engine: Callable[..., Any]) -> None:
    """C-199: typed, retryable, and not a lost lease."""
    claim = await rig.running()
    async with open_engine(lock_timeout_ms=50) as hurried, rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for update")
        with pytest.raises(Contention) as refused:
            await hurried.complete(claim.handle)
    assert refused.value.kind == ContentionKind.RETRY_EXHAUSTED
    assert refused.value.is_retryable
    await rig.engine.complete(claim.handle)


async def test_a_full_pool_says_so(open_engine: Callable[..., Any]) -> None:
    async with open_engine(pool_max=1, pool_min=0, statement_timeout_ms=200) as small:
        pool = small._runtime.db.pool(Planning.GENERIC)
        held = await pool.acquire()
        with pytest.raises(Unavailable, match="all 1 are busy"):
            await small.claim("default", **WORKER)
        pool.release(held)
        assert await small.claim("default", **WORKER) is None


async def test_a_cancelled_waiter_leaves_the_queue(rig: Rig, open_engine: Callable[..., Any]) -> None:
    claim = await rig.running()
    async with open_engine(pool_max=1) as small:
        async with rig.sql.transaction():
            await rig.sql.execute("select 1 from ff_exec_core for update")
            completing = asyncio.create_task(small.complete(claim.handle))
            with anyio.move_on_after(0.05):
                await small.describe_execution(claim.execution_id)
            waiting = asyncio.create_task(small.describe_execution(claim.execution_id))
        await completing
        assert (await waiting) is not None
        pool = small._runtime.db.pool(Planning.GENERIC)
        assert (pool.busy, pool.idle) == (0, 1)


async def test_an_engine_that_is_closed_refuses(dsn: str) -> None:
    async with Engine.connect(dsn) as engine:
        pass
    with pytest.raises(Unavailable, match="closed"):
        await engine.create_execution()


async def test_nothing_is_left_on_the_server_after_closing(dsn: str, sql: asyncpg.Connection[Any]) -> None:
    async with Engine.connect(dsn) as engine:
        await engine.create_execution()
        await engine.claim("default", **WORKER, wait_ms=10)
        await engine.claim_many("none", 5, **WORKER, wait_ms=10)

    async def nobody_is_left() -> bool:
        return not await sql.fetchval(
            "select count(*) from pg_stat_activity where application_name like 'ffd%' and datname = current_database()"
        )

    await until(nobody_is_left)
