"""The one door to PostgreSQL: acquire, begin, commit, rollback and release happen here and nowhere else.

Guarantees: a statement is tried three times when the server reports contention, never on a fence mismatch; an
operation that is cancelled, at any await and at any level, leaves no transaction, no lock and no half-used
connection behind; after a failover every connection is made anew. Errors come out as the engine's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakSet

import asyncpg

from ffd.config import DatabaseSettings
from ffd.core.errors import EngineError, Unavailable
from ffd.core.limits import CONTENTION_PAUSES_MS, CONTENTION_TRIES
from ffd.db.errors import is_connection_clean, is_contention, is_failover, to_engine_error
from ffd.db.pool import Connection, Pool
from ffd.db.statement import Planning, Statement
from ffd.telemetry.metrics import CONTENTION_RETRIES, POOL_CONNECTIONS

T = TypeVar("T")
Row = asyncpg.Record

CONNECT_TIMEOUT_S: Final = 10.0

# Without these, plans cached while tables were small are a hundred times too slow after the first burst.
_KEYED: Final = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
_PLANNING: Final[dict[Planning, dict[str, str]]] = {
    Planning.GENERIC: {**_KEYED, "plan_cache_mode": "force_generic_plan"},
    Planning.CUSTOM: {**_KEYED, "plan_cache_mode": "force_custom_plan"},
    Planning.READ: {**_KEYED, "plan_cache_mode": "force_custom_plan"},
}
READ_CONNECTIONS_MAX: Final = 4

_databases: WeakSet[Database] = WeakSet()


def _connections(state: str) -> float:
    return float(sum(getattr(pool, state) for database in _databases for pool in database.pools()))


POOL_CONNECTIONS.labels("idle").set_function(partial(_connections, "idle"))
POOL_CONNECTIONS.labels("busy").set_function(partial(_connections, "busy"))


def session_settings(settings: DatabaseSettings, planning: Planning) -> dict[str, str]:
    """What every connection pins at its start: a role's or a database's defaults must not break the rules."""
    return {
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "off",
        "synchronous_commit": "on",
        "jit": "off",
        "lock_timeout": str(settings.lock_timeout_ms),
        "statement_timeout": str(settings.statement_timeout_ms),
        "idle_in_transaction_session_timeout": str(settings.statement_timeout_ms),
        "tcp_user_timeout": str(settings.statement_timeout_ms),
        **_PLANNING[planning],
    }


async def open_connection(
    settings: DatabaseSettings,
    planning: Planning = Planning.GENERIC,
    *,
    application_name: str = "ffd",
    dsn: str | None = None,
) -> Connection:
    """One connection with the session pinned. Through a transaction pooler the role carries the settings."""
    pinned = session_settings(settings, planning) if settings.statement_cache else {}
    return await asyncpg.connect(
        dsn if dsn is not None else settings.dsn,
        timeout=CONNECT_TIMEOUT_S,
        # The server ends a statement first; this is for a server that no longer answers.
        command_timeout=settings.statement_timeout_ms / 1000 + 5,
        statement_cache_size=200 if settings.statement_cache else 0,
        max_cached_statement_lifetime=0,
        max_cacheable_statement_size=0,
        server_settings={"application_name": application_name, **pinned},
    )


async def fetch_one(connection: Connection, statement: Statement, *args: Any) -> Row:
    """Run a statement that always answers with one row, inside a transaction."""
    row: Row | None = await connection.fetchrow(statement.sql, *args)
    if row is None:
        raise LookupError(f"{statement.name} gave no row")
    return row


class Database:
    """Statements and transactions on pooled connections."""

    def __init__(self, settings: DatabaseSettings) -> None:
        self.settings = settings
        sizes = {
            Planning.GENERIC: settings.pool_max,
            Planning.CUSTOM: settings.pool_max,
            Planning.READ: min(READ_CONNECTIONS_MAX, settings.pool_max),
        }
        self._pools = {
            planning: Pool(
                partial(open_connection, settings, planning),
                size_max=size,
                acquire_timeout_s=settings.statement_timeout_ms / 1000,
            )
            for planning, size in sizes.items()
        }
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = False
        _databases.add(self)

    async def open(self) -> None:
        """Reach the server once, so that a wrong address fails here and not in the first operation."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._pools[Planning.GENERIC].warm(max(1, self.settings.pool_min))
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            # Never the text: an address that cannot be parsed may hold a password anywhere.
            raise to_engine_error(error, "connect") or Unavailable("connect", type(error).__name__) from None

    def stop(self) -> None:
        """Start no more statements; those under way go on until `close`."""
        self._is_stopped = True
        for pool in self._pools.values():
            pool.stop()

    async def close(self) -> None:
        """Close every connection."""
        for pool in self._pools.values():
            await pool.close()

    def pools(self) -> list[Pool]:
        """All of them."""
        return list(self._pools.values())

    def pool(self, planning: Planning) -> Pool:
        """The connections of one kind, for tests and metrics."""
        return self._pools[planning]

    def _settle(self, pool: Pool, connection: Connection, error: BaseException) -> None:
        """After a failed statement: keep the connection only if the server is known to be done with it."""
        if is_connection_clean(error) and not connection.is_closed() and not connection.is_in_transaction():
            pool.release(connection)
            return
        pool.discard(connection)
        if is_failover(error):
            for each in self._pools.values():
                each.invalidate()

    async def _pause(self, error: BaseException, tries: int, op: str) -> None:
        """Wait before the next try, or raise what the caller shall see."""
        if tries < CONTENTION_TRIES and is_contention(error):
            CONTENTION_RETRIES.labels(op).inc()
            await asyncio.sleep(CONTENTION_PAUSES_MS[tries - 1] / 1000)
            return
        engine_error = to_engine_error(error, op)
        if self._is_stopped and isinstance(engine_error, Unavailable):
            raise Unavailable(op, "the engine is closed") from error
        if engine_error is None or engine_error is error:
            raise error
        raise engine_error from error

    async def _acquire(self, pool: Pool, op: str) -> Connection:
        """A connection when none was idle; what goes wrong in making one comes out as the engine's error."""
        if asyncio.get_running_loop() is not self._loop:
            raise Unavailable(op, "an engine belongs to the event loop that opened it; open another one here")
        try:
            return await pool.acquire()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise to_engine_error(error, op) or error from error

    async def fetch(self, statement: Statement, *args: Any) -> list[Row]:
        """Run one statement in its own transaction: one round trip. The rows it returns."""
        pool = self._pools[statement.planning]
        tries = 0
        while True:
            tries += 1
            connection = pool.take_idle(self._loop) or await self._acquire(pool, statement.name)
            try:
                rows = await connection.fetch(statement.sql, *args)
            except BaseException as error:  # noqa: BLE001  (settled, then always raised or retried)
                self._settle(pool, connection, error)
                await self._pause(error, tries, statement.name)
            else:
                pool.release(connection)
                return rows

    async def fetchrow(self, statement: Statement, *args: Any) -> Row | None:
        """Run one statement and return its first row, if any."""
        rows = await self.fetch(statement, *args)
        return rows[0] if rows else None

    async def transact(
        self,
        op: str,
        body: Callable[[Connection], Awaitable[T]],
        planning: Planning = Planning.GENERIC,
    ) -> T:
        """Run `body` in one READ COMMITTED transaction; commit when it returns, roll back when it raises.

        `body` may run up to three times and must keep its effects inside the transaction.
        """
        pool = self._pools[planning]
        tries = 0
        while True:
            tries += 1
            connection = pool.take_idle(self._loop) or await self._acquire(pool, op)
            try:
                await connection.execute("begin")
                result = await body(connection)
                await connection.execute("commit")
            except BaseException as error:  # noqa: BLE001  (settled, then always raised or retried)
                if isinstance(error, EngineError) or is_connection_clean(error):
                    await self._roll_back(pool, connection)
                else:
                    self._settle(pool, connection, error)
                await self._pause(error, tries, op)
            else:
                pool.release(connection)
                return result

    async def _roll_back(self, pool: Pool, connection: Connection) -> None:
        """Undo after a refusal by the engine or the server; the connection is healthy and kept."""
        try:
            await connection.execute("rollback")
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            # Lost meanwhile, and the transaction with it: the first error is what the caller must hear.
            pool.discard(connection)
        except BaseException:
            pool.discard(connection)
            raise
        else:
            pool.release(connection)
