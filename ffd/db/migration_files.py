"""What a migration is: one SQL file, how it is found, checksummed and split into statements.

Files are named `0001_name.sql`, without gaps. The wheel carries them as `ffd/_migrations`, a checkout has
them in `migrations/`. A file runs in one transaction, which it must not end itself. One whose first line is
`-- ffd: no-transaction` runs statement by statement (CREATE INDEX CONCURRENTLY needs that) and must be
written so that running it again is harmless; SQL-standard function bodies (`begin atomic`) do not belong in
it. Nothing here talks to a database; `ffd.db.migrations` does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ffd.core.errors import EngineError

NO_TRANSACTION: Final = "-- ffd: no-transaction"
_FILE_NAME: Final = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_TRANSACTION_CONTROL: Final = re.compile(r"(begin|commit|rollback|start\s+transaction)\b", re.IGNORECASE)

# A doubled quote needs no rule of its own, except behind a backslash: 'a''b' reads as two strings in a row.
_TOKEN: Final = re.compile(
    r"""
      (?P<blank> \s+ | --[^\n]* )
    | (?P<comment> /\* )
    | (?P<end> ; )
    | (?P<text>
          \b[eE]'(?:[^'\\]|\\.|'')*' | '[^']*' | "[^"]*"
        | (?<![\w$]) (?P<tag> \$(?:[^\W\d]\w*)?\$ ) .*? (?: (?P=tag) | \Z )
        | \w+ | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT_MARK: Final = re.compile(r"/\*|\*/")


class MigrationKind(StrEnum):
    """Why migrating did not happen."""

    INVALID_FILES = "invalid_files"
    SERVER_TOO_OLD = "server_too_old"
    POOLED_CONNECTION = "pooled_connection"
    LOCK_HELD = "lock_held"
    FILE_FAILED = "file_failed"
    REFUSED = "refused"


class MigrationFailed(EngineError):
    """A migration could not be applied. Files before it stay applied; it left no trace in the ledger."""

    family = "migration"
    kind: MigrationKind

    def __init__(self, kind: MigrationKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

    @property
    def is_retryable(self) -> bool:
        """Only another runner's lock goes away by itself."""
        return self.kind is MigrationKind.LOCK_HELD


class Migration(msgspec.Struct, frozen=True):
    """One file. `checksum` is the SHA-256 of its bytes, as `sha256sum` prints it."""

    version: int
    name: str
    sql: str
    checksum: str

    @property
    def label(self) -> str:
        """The file name without its ending, as people say it: ``0001_foundation``."""
        return f"{self.version:04d}_{self.name}"

    @property
    def is_transactional(self) -> bool:
        """Whether the file runs in one transaction."""
        return self.sql.partition("\n")[0].strip() != NO_TRANSACTION

    def line(self, offset: int) -> int:
        """The line, counted from 1, that a character of the file is in."""
        return self.sql.count("\n", 0, offset) + 1


def discover(directory: Path | None = None) -> list[Migration]:
    """Read the migration files in order, from `directory` or from where this installation keeps them."""
    directory = directory or _default_directory()
    migrations = [_read(path) for path in sorted(directory.glob("*.sql"))]
    if not migrations:
        raise MigrationFailed(MigrationKind.INVALID_FILES, f"no migration files in {directory}")
    for expected, migration in enumerate(migrations, start=1):
        if migration.version != expected:
            what = "is a second file of its number" if migration.version < expected else "follows a gap"
            raise MigrationFailed(MigrationKind.INVALID_FILES, f"{directory}: {migration.label}.sql {what}")
    return migrations


def _default_directory() -> Path:
    package = Path(__file__).parents[1]
    packaged = package / "_migrations"
    return packaged if packaged.is_dir() else package.parent / "migrations"


def _read(path: Path) -> Migration:
    def refuse(what: str) -> MigrationFailed:
        return MigrationFailed(MigrationKind.INVALID_FILES, f"{path}: {what}")

    match = _FILE_NAME.fullmatch(path.name)
    if match is None:
        raise refuse("the name must be like 0001_some_name.sql")
    content = path.read_bytes()
    try:
        sql = content.decode()
    except UnicodeDecodeError:
        raise refuse("not UTF-8 text") from None
    migration = Migration(int(match[1]), match[2], sql, hashlib.sha256(content).hexdigest())
    if migration.is_transactional:
        for offset, statement in split_statements(sql):
            if _TRANSACTION_CONTROL.match(statement):
                raise refuse(f"line {migration.line(offset)}: the runner begins and commits, the file must not")
    return migration


class SqlStatement(NamedTuple):
    """A statement of a file and where in it it starts."""

    offset: int
    text: str


def split_statements(sql: str) -> Iterator[SqlStatement]:
    """Cut SQL at its semicolons, outside of strings, quoted names, dollar quotes and (nested) comments."""
    position, start = 0, None
    while token := _TOKEN.match(sql, position):
        position = token.end()
        match token.lastgroup:
            case "comment":
                position = _comment_end(sql, position)
            case "text" if start is None:
                start = token.start()
            case "end" if start is not None:
                yield SqlStatement(start, sql[start : token.start()])
                start = None
    if start is not None:
        yield SqlStatement(start, sql[start:])


def _comment_end(sql: str, position: int) -> int:
    depth = 1
    while depth:
        mark = _COMMENT_MARK.search(sql, position)
        if mark is None:
            return len(sql)
        depth += 1 if mark[0] == "/*" else -1
        position = mark.end()
    return position
