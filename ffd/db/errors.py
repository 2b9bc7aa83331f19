"""From what PostgreSQL and the network report to the engine's errors: by SQLSTATE, never by message text."""

from __future__ import annotations

from typing import Final

import asyncpg

from ffd.core.errors import Contention, ContentionKind, EngineError, Unavailable

# Worth another try of the same call: nothing was committed and the other party will be done soon.
_CONTENTION: Final = frozenset({"40001", "40P01", "55P03"})

# The server is going away, coming up, full, or no longer the primary: other connections are as good as dead.
_FAILOVER: Final = frozenset({"25006", "57P01", "57P02", "57P03"})
# Not reachable, out of resources, cut off by a timeout, or not let in: nothing that the caller can mend in its call.
_UNAVAILABLE: Final = frozenset({"25P03", "26000", "28000", "28P01", "3D000", "42501"})
_UNAVAILABLE_CLASSES: Final = ("08", "53", "57", "58", "XX")
_SCHEMA: Final = frozenset({"42P01", "42703", "42883", "3F000"})


def sqlstate(error: BaseException) -> str:
    """The SQLSTATE of a server error; empty for anything else."""
    return getattr(error, "sqlstate", None) or "" if isinstance(error, asyncpg.PostgresError) else ""


def is_contention(error: BaseException) -> bool:
    """Whether the same call should be tried again at once."""
    # A plan invalidated by a migration cannot be replanned inside a transaction; a new one sees the new schema.
    return sqlstate(error) in _CONTENTION or isinstance(error, asyncpg.InvalidCachedStatementError)


def is_failover(error: BaseException) -> bool:
    """Whether every other connection to this server should be considered lost as well."""
    return sqlstate(error) in _FAILOVER


def is_connection_clean(error: BaseException) -> bool:
    """Whether the connection can be used again after this error: only when the server answered the statement."""
    state = sqlstate(error)
    return bool(state) and state not in _FAILOVER and not state.startswith(("08", "57P")) and state != "25P03"


def to_engine_error(error: BaseException, op: str) -> EngineError | None:
    """The engine's name for `error`; None when it is not the database's doing (a cancellation, a bug)."""
    if isinstance(error, EngineError):
        return error
    state = sqlstate(error)
    if is_contention(error):
        return Contention(ContentionKind.RETRY_EXHAUSTED, f"{op}: rows are held by others; try again", sqlstate=state)
    if state in _SCHEMA:
        return Unavailable(op, f"the schema is missing or older than this version ({state}): run `ffd migrate`")
    if state in _FAILOVER or state in _UNAVAILABLE or (state and state.startswith(_UNAVAILABLE_CLASSES)):
        return Unavailable(op, f"{type(error).__name__} ({state})")
    if isinstance(error, OSError | TimeoutError | asyncpg.InterfaceError | asyncpg.InternalClientError):
        return Unavailable(op, type(error).__name__)
    return None
