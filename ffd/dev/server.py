"""The development server: an embedded PostgreSQL with ffd's schema, for as long as the command runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import anyio

from ffd.db import migrations
from ffd.dev.postgres import EmbeddedPostgres, EmbeddedPostgresError

DATABASE: Final = "ffd"
WATCH_INTERVAL_S: Final = 0.5
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

DATABASE_EXISTS: Final = "select exists (select from pg_database where datname = $1)"
DATABASE_CREATE: Final = f"create database {DATABASE}"


@contextmanager
def running_postgres(data_dir: Path, port: int) -> Iterator[EmbeddedPostgres]:
    """Run the database server around the event loop, from the main thread.

    The server ends with the thread that started it, and a loop's worker threads come and go. While no loop
    runs, both stop signals raise KeyboardInterrupt, so that a start that was given up is cleaned up.
    """
    previous = {number: signal.signal(number, _interrupt) for number in _STOP_SIGNALS}
    try:
        with EmbeddedPostgres(data_dir, port=port) as server:
            try:
                yield server
            finally:
                # The loop leaves SIGTERM at its default, which would cut the shutdown short.
                for number in _STOP_SIGNALS:
                    signal.signal(number, _interrupt)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


async def serve(
    server: EmbeddedPostgres,
    *,
    on_progress: Callable[[migrations.Progress], None],
    on_ready: Callable[[str], None],
) -> None:
    """Prepare the database, tell its DSN and wait for SIGINT or SIGTERM, which end this at any point.

    Raises `EmbeddedPostgresError` when the database server ends by itself.
    """
    loop = asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, scope.cancel)
        try:
            await _create_database(server.dsn())
            dsn = server.dsn(DATABASE)
            await migrations.migrate(dsn, on_progress=on_progress)
            on_ready(dsn)
            await _watch(server)
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)


async def _create_database(dsn: str) -> None:
    async with migrations.session(dsn) as conn:
        if not await conn.fetchval(DATABASE_EXISTS, DATABASE):
            await conn.execute(DATABASE_CREATE)


async def _watch(server: EmbeddedPostgres) -> None:
    while True:
        await anyio.sleep(WATCH_INTERVAL_S)
        try:
            _ = server.pid
        except EmbeddedPostgresError:
            raise EmbeddedPostgresError(f"PostgreSQL ended by itself; its log is {server.log_path}") from None
