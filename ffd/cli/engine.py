"""One command, one engine: open it from the settings, check the schema, run a coroutine, close it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ffd.cli.output import Invocation, run_async
from ffd.core.errors import Unavailable
from ffd.db.statement import Statement

if TYPE_CHECKING:
    from ffd.config import Settings
    from ffd.db.pool import Connection
    from ffd.engine import Engine
    from ffd.ops.runtime import Runtime

T = TypeVar("T")

# One command does one thing after another; it needs no pool worth the name.
CONNECTIONS_MAX: Final = 2

DATABASE_CLOCK: Final = Statement("database_clock", "select ff_now_ms()")

REASONS: Final = {
    "ConnectionRefusedError": "connection refused",
    "TimeoutError": "no answer in time",
    "gaierror": "the host name is not known",
}
_NOT_AN_ADDRESS: Final = frozenset({"ValueError", "ClientConfigurationError"})


class Session(NamedTuple):
    """An engine on a current schema, and the time on the database clock when it was opened."""

    engine: Engine
    now_ms: int
    runtime: Runtime


def with_engine(invocation: Invocation, work: Callable[[Session], Awaitable[T]], *, namespace: str = "default") -> T:
    """Run `work` on an engine. `SchemaMismatch` when the schema is behind, `Unavailable` without a database."""
    settings = invocation.settings()
    return run_async(lambda: _work(settings, work, namespace))


async def _work(settings: Settings, work: Callable[[Session], Awaitable[T]], namespace: str) -> T:
    import msgspec

    from ffd.engine import Engine
    from ffd.ops.runtime import open_runtime

    connections = min(CONNECTIONS_MAX, settings.database.pool_max)
    database = msgspec.structs.replace(settings.database, pool_min=1, pool_max=connections)
    try:
        async with open_runtime(database, settings.outbox, namespace) as runtime:
            now_ms = await runtime.db.transact("check_schema", _check_schema)
            return await work(Session(Engine(runtime), now_ms, runtime))
    except Unavailable as error:
        if error.op != "connect":
            raise
        raise _name_target(error, settings) from error


async def _check_schema(connection: Connection) -> int:
    """Refuse a schema that this version does not know, then read its clock."""
    from ffd.db.migrations import check_schema

    await check_schema(connection)
    now_ms: int = await connection.fetchval(DATABASE_CLOCK.sql)
    return now_ms


def _name_target(error: Unavailable, settings: Settings) -> Exception:
    """Say which database could not be reached; the engine itself never names it."""
    from ffd.config import ConfigError, describe_target

    dsn = settings.database.dsn
    if error.detail in _NOT_AN_ADDRESS:
        return ConfigError("database.dsn or the PG* variables: not an address that can be connected to")
    hint = "" if dsn else "; neither database.dsn nor FFD_DATABASE__DSN is set"
    reason = REASONS.get(error.detail, error.detail)
    return Unavailable("connect", f"cannot connect to {describe_target(dsn, os.environ)}: {reason}{hint}")


def as_fields(record: Any) -> dict[str, Any]:
    """A record of the engine as the fields of a JSON object."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(record)
    return fields
