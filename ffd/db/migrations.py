"""The migration runner: forward only, each file of `ffd.db.migration_files` applied once.

The ledger `ff_schema_migration` remembers the checksum of each applied file, so a file that changed afterwards
is refused, and so is a database that knows more than this code. A file and its ledger row are one transaction,
unless the file asks for none.

Two guards keep a live system alive. Runners exclude each other with a session advisory lock that is polled
for, never waited for: a session inside `pg_advisory_lock()` holds a snapshot, CREATE INDEX CONCURRENTLY of
the lock's holder waits for that snapshot, and the server calls it a deadlock. And no statement waits long for
a table lock, because everybody else would queue behind it: it gives up, lets the others through and comes
back, a bounded number of times.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final

import anyio
import asyncpg
import msgspec

from ffd.config import ConfigError, describe_target
from ffd.core.errors import EngineError, Unavailable
from ffd.db.errors import is_connection_clean, is_contention
from ffd.db.migration_files import Migration, MigrationFailed, MigrationKind, discover, split_statements
from ffd.db.pool import CLOSE_TIMEOUT_S, Connection
from ffd.db.statement import Planning, Statement

SERVER_MAJOR_MIN: Final = 15
APPLICATION_NAME: Final = "ffd migrate"
CONNECT_TIMEOUT_S: Final = 10.0

# One fixed number per database, the bytes of "ffd_migr": whoever migrates holds it.
LOCK_KEY: Final = int.from_bytes(b"ffd_migr", "big")
LOCK_WAIT_S: Final = 60.0
LOCK_POLL_S: Final = 0.2

# How long a statement waits for a table lock, and how often the file comes back; pauses double from 1 s.
LOCK_TIMEOUT_MS: Final = 5_000
LOCK_ATTEMPTS: Final = 6
# CONCURRENTLY waits for older transactions while nobody queues behind it, so it may be patient.
CONCURRENTLY_LOCK_TIMEOUT_MS: Final = 600_000
_CONCURRENTLY: Final = re.compile(r"\bconcurrently\b", re.IGNORECASE)

LEDGER_EXISTS: Final = Statement(
    "ledger_exists", "select to_regclass('ff_schema_migration') is not null", Planning.READ
)

LEDGER_READ: Final = Statement(
    "ledger_read",
    "select version, name, checksum, ffd_version from ff_schema_migration order by version",
    Planning.READ,
)

LEDGER_CREATE: Final = """
create table if not exists ff_schema_migration (
    version int primary key,
    name text not null,
    checksum text not null,
    applied_at_ms bigint not null,
    ffd_version text not null
)
"""

# ff_now_ms() is made by a migration, so the ledger reads the database's clock by itself.
LEDGER_APPEND: Final = Statement(
    "ledger_append",
    """
    insert into ff_schema_migration (version, name, checksum, applied_at_ms, ffd_version)
    values ($1, $2, $3, (extract(epoch from clock_timestamp()) * 1000)::bigint, $4)
    """,
)

BACKEND_PID: Final = Statement("backend_pid", "select pg_backend_pid()", Planning.READ)
LOCK_TRY: Final = Statement("migration_lock_try", "select pg_try_advisory_lock($1)", Planning.READ)

# A bigint advisory lock shows as its two halves. Address and time are null where this role may not look, the
# address also for a Unix socket; concat() leaves such parts out.
LOCK_HOLDER: Final = Statement(
    "migration_lock_holder",
    """
    select concat('pid ', a.pid, ' (', a.application_name, ')',
                  ' from ' || host(a.client_addr) || ':' || a.client_port,
                  ', connected for ' || round(extract(epoch from clock_timestamp() - a.backend_start), 1) || ' s')
    from pg_locks l
    join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'advisory' and l.granted and l.objsubid = 1
      and l.database = (select oid from pg_database where datname = current_database())
      and (l.classid::bigint << 32 | l.objid::bigint) = $1
    """,
    Planning.READ,
)

# After a lock timeout the one in the way is most likely the oldest transaction that is still open.
OLDEST_TRANSACTION: Final = Statement(
    "oldest_transaction",
    """
    select concat('; oldest open transaction: pid ', a.pid, ' (', a.application_name, ')',
                  ' from ' || host(a.client_addr) || ':' || a.client_port,
                  ', for ', round(extract(epoch from clock_timestamp() - a.xact_start), 1), ' s')
    from pg_stat_activity a
    where a.xact_start is not null and a.pid <> pg_backend_pid() and a.datname = current_database()
    order by a.xact_start limit 1
    """,
    Planning.READ,
)

# A role's defaults are made for short statements; a migration may take its time, except for locks.
SESSION_SETTINGS: Final = Statement(
    "migration_session",
    """
    select set_config('statement_timeout', '0', false),
           set_config('idle_in_transaction_session_timeout', '0', false),
           set_config('synchronous_commit', 'on', false)
    """,
    Planning.READ,
)
LOCK_TIMEOUT: Final = Statement("lock_timeout", "select set_config('lock_timeout', $1, false)", Planning.READ)


class SchemaKind(StrEnum):
    """How a database can differ from what this code needs."""

    BEHIND = "behind"
    AHEAD = "ahead"
    CHANGED = "changed"
    OUT_OF_ORDER = "out_of_order"


class SchemaMismatch(EngineError):
    """The database's schema is not the one this code was written for. Migrating cures only `BEHIND`."""

    family = "schema"
    kind: SchemaKind

    def __init__(self, kind: SchemaKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class SchemaStatus(msgspec.Struct, frozen=True):
    """Where a database stands, 0 when it is empty; `target_version` is the one this code needs."""

    version: int
    target_version: int
    pending: list[Migration]


class ProgressStep(StrEnum):
    """What the runner has to tell."""

    WAITING = "waiting"
    RETRYING = "retrying"
    APPLIED = "applied"


class Progress(msgspec.Struct, frozen=True):
    """One step of a run, for whoever watches. `detail` says what is in the way."""

    step: ProgressStep
    migration: Migration | None = None
    elapsed_s: float = 0.0
    detail: str = ""


def ffd_version() -> str:
    """Name the installed version, as the ledger records it."""
    try:
        return importlib.metadata.version("ffd")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def status(conn: Connection, directory: Path | None = None) -> SchemaStatus:
    """Compare the ledger with the files. Reads only; a database without a ledger has everything pending.

    Raises `SchemaMismatch` for what migrating does not cure.
    """
    return await _compare(conn, discover(directory))


async def check_schema(conn: Connection, directory: Path | None = None) -> None:
    """Raise `SchemaMismatch` unless the database has exactly the migrations of this code."""
    _require_server(conn)
    found = await status(conn, directory)
    if found.pending:
        names = ", ".join(migration.label for migration in found.pending)
        raise SchemaMismatch(
            SchemaKind.BEHIND,
            f"the schema is at version {found.version}, this ffd needs version {found.target_version} "
            f"(pending: {names}); run `ffd migrate`",
        )


def _require_server(conn: Connection) -> None:
    version = conn.get_server_version()
    if version.major < SERVER_MAJOR_MIN:
        raise MigrationFailed(
            MigrationKind.SERVER_TOO_OLD,
            f"PostgreSQL {version.major}.{version.minor} is too old, ffd needs {SERVER_MAJOR_MIN} or later",
        )


async def _compare(conn: Connection, files: Sequence[Migration]) -> SchemaStatus:
    applied = await conn.fetch(LEDGER_READ.sql) if await conn.fetchval(LEDGER_EXISTS.sql) else []
    version, target_version = applied[-1]["version"] if applied else 0, files[-1].version
    if version > target_version:
        raise SchemaMismatch(
            SchemaKind.AHEAD,
            f"the database is newer than this ffd {ffd_version()}: it has migration "
            f"{version:04d}_{applied[-1]['name']}, applied by ffd {applied[-1]['ffd_version']}; upgrade ffd",
        )
    # The files count from 1 without gaps, so the ledger must read like their beginning.
    for row, migration in zip(applied, files, strict=False):
        if row["version"] != migration.version:
            raise SchemaMismatch(
                SchemaKind.OUT_OF_ORDER,
                f"{migration.label} is not in the ledger, but version {row['version']} is: a row was removed",
            )
        if row["checksum"] != migration.checksum:
            raise SchemaMismatch(
                SchemaKind.CHANGED,
                f"{migration.label}.sql was changed after it was applied (checksum {row['checksum'][:12]} then, "
                f"{migration.checksum[:12]} now); restore it and put the change into a new migration",
            )
    return SchemaStatus(version, target_version, list(files[len(applied) :]))


@asynccontextmanager
async def session(dsn: str | None) -> AsyncIterator[Connection]:
    """Connect as the runner does: to a server that is new enough, without statement timeout, with its name.

    Not reaching the database, or losing it, is `Unavailable`; what it refuses is `MigrationFailed`.
    """
    conn = await _connect(dsn)
    try:
        _require_server(conn)
        await conn.fetchrow(SESSION_SETTINGS.sql)
        yield conn
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        if isinstance(error, asyncpg.PostgresError) and is_connection_clean(error):
            raise MigrationFailed(MigrationKind.REFUSED, _server_text(error)) from error
        raise Unavailable("migrate", f"{describe_target(dsn, os.environ)}: {error}") from error
    finally:
        # A close that fails has aborted the connection, which is as good here.
        with anyio.CancelScope(shield=True), suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await conn.close(timeout=CLOSE_TIMEOUT_S)


async def _connect(dsn: str | None) -> Connection:
    try:
        return await asyncpg.connect(
            dsn,
            timeout=CONNECT_TIMEOUT_S,
            # Every migration can change what a cached statement means.
            statement_cache_size=0,
            server_settings={"application_name": APPLICATION_NAME},
        )
    except ValueError as error:  # asyncpg's own complaint, or a port that is no number
        raise ConfigError(f"database.dsn or the PG* variables: {error}") from None
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
        detail = f"cannot connect to {describe_target(dsn, os.environ)}: {_connect_reason(error)}"
        hint = "" if dsn else "; neither database.dsn nor FFD_DATABASE__DSN is set"
        raise Unavailable("migrate", detail + hint) from error


def _connect_reason(error: Exception) -> str:
    match error:
        case TimeoutError():
            return f"no answer in {CONNECT_TIMEOUT_S:.0f} s"
        case ConnectionRefusedError():
            return "connection refused"
        case OSError(strerror=str(reason)):
            return reason
        case _:
            return str(error)


async def migrate(
    dsn: str | None,
    *,
    on_progress: Callable[[Progress], None],
    lock_wait_s: float = LOCK_WAIT_S,
    lock_timeout_ms: int = LOCK_TIMEOUT_MS,
    lock_attempts: int = LOCK_ATTEMPTS,
    directory: Path | None = None,
) -> list[Migration]:
    """Bring the database to this code's schema and return what was applied now, oldest first.

    Any number may run this at once: one works, the others wait up to `lock_wait_s` and find nothing left to
    do. `SchemaMismatch` when the database is newer or a file changed; `MigrationFailed` when a file fails,
    when the lock stays taken or the server is too old. Files applied before a failing one stay applied.
    """
    files = discover(directory)
    async with session(dsn) as conn:
        # Without work there is no reason to wait for somebody's lock.
        if not (await _compare(conn, files)).pending:
            return []
        await _take_lock(conn, on_progress, lock_wait_s)
        pending = (await _compare(conn, files)).pending
        for migration in pending:
            await _apply(conn, migration, on_progress, lock_timeout_ms, lock_attempts)
        # The end of the session releases the lock.
        return pending


async def _take_lock(conn: Connection, on_progress: Callable[[Progress], None], wait_s: float) -> None:
    # A pooler makes up the process id it tells its clients. A session lock taken through it would stay behind
    # on a server connection that somebody else gets next.
    if await conn.fetchval(BACKEND_PID.sql) != conn.get_server_pid():
        raise MigrationFailed(
            MigrationKind.POOLED_CONNECTION,
            "this connection leads through a pooler such as PgBouncer, where the lock between runners "
            "does not hold; connect to PostgreSQL directly to migrate",
        )
    deadline = time.monotonic() + wait_s
    is_announced = False
    while not await conn.fetchval(LOCK_TRY.sql, LOCK_KEY):
        holder = await conn.fetchval(LOCK_HOLDER.sql, LOCK_KEY) or "another runner"
        if time.monotonic() >= deadline:
            raise MigrationFailed(
                MigrationKind.LOCK_HELD,
                f"another migration holds the lock: {holder}; waited {wait_s:g} s, try again later",
            )
        if not is_announced:
            is_announced = True
            on_progress(Progress(ProgressStep.WAITING, detail=holder))
        await anyio.sleep(LOCK_POLL_S)


async def _apply(
    conn: Connection,
    migration: Migration,
    on_progress: Callable[[Progress], None],
    lock_timeout_ms: int,
    lock_attempts: int,
) -> None:
    started = time.monotonic()
    for attempt in range(1, lock_attempts + 1):
        try:
            await _run(conn, migration, lock_timeout_ms)
            break
        except asyncpg.PostgresError as error:
            if not is_connection_clean(error):
                raise
            detail = _server_text(error)
            if is_contention(error):
                blocker = await conn.fetchval(OLDEST_TRANSACTION.sql) or ""
                detail += f"; attempt {attempt} of {lock_attempts}{blocker}"
            if not is_contention(error) or attempt == lock_attempts:
                raise _failure(migration, error, detail) from error
        on_progress(Progress(ProgressStep.RETRYING, migration, time.monotonic() - started, detail))
        await anyio.sleep(2 ** (attempt - 1))
    on_progress(Progress(ProgressStep.APPLIED, migration, time.monotonic() - started))


async def _run(conn: Connection, migration: Migration, lock_timeout_ms: int) -> None:
    if not migration.is_transactional:
        await _run_statements(conn, migration, lock_timeout_ms)
    async with conn.transaction(isolation="read_committed"):
        await conn.fetchval(LOCK_TIMEOUT.sql, str(lock_timeout_ms))
        if migration.is_transactional:
            await conn.execute(migration.sql)
        await conn.execute(LEDGER_CREATE)
        await conn.execute(LEDGER_APPEND.sql, migration.version, migration.name, migration.checksum, ffd_version())


async def _run_statements(conn: Connection, migration: Migration, lock_timeout_ms: int) -> None:
    for offset, statement in split_statements(migration.sql):
        timeout_ms = CONCURRENTLY_LOCK_TIMEOUT_MS if _CONCURRENTLY.search(statement) else lock_timeout_ms
        await conn.fetchval(LOCK_TIMEOUT.sql, str(timeout_ms))
        try:
            await conn.execute(statement)
        except asyncpg.PostgresError as error:
            # Counted from the start of the file; an error without a place of its own is at its statement.
            error.position = str(offset + int(error.position or 1))
            raise


def _failure(migration: Migration, error: asyncpg.PostgresError, detail: str) -> MigrationFailed:
    # The server counts characters from 1.
    line = "" if error.position is None else f" line {migration.line(int(error.position) - 1)}"
    state = "rolled back" if migration.is_transactional else "its earlier statements stay; it will run from its start"
    return MigrationFailed(MigrationKind.FILE_FAILED, f"{migration.label}.sql{line}: {detail} ({state})")


def _server_text(error: asyncpg.PostgresError) -> str:
    parts = (error.message, error.detail, error.hint)
    return f"{'; '.join(part for part in parts if part)} [{error.sqlstate}]"
