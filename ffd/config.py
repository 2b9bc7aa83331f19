"""Settings: typed, bounded, read once.

A TOML file first, then `FFD_TABLE__KEY` environment variables on top (`FFD_TABLE__NAME__KEY` for `[table.name]`).
Every key has a default and a bound; an unknown key or a value out of bounds is refused by name, all problems in one
error. No text made here ever holds the password of a DSN (I8).

Without a DSN asyncpg honours libpq's own `PG*` variables, so an absent DSN stays absent.
"""

from __future__ import annotations

import difflib
import getpass
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args
from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit

import msgspec

from ffd.core.errors import EngineError
from ffd.core.limits import DURATION_MS_MAX
from ffd.core.schedule import RECONCILERS

SEARCH_PATHS: Final = (Path("ffd.toml"), Path("/etc/ffd/ffd.toml"))
ENV_PREFIX: Final = "FFD_"
CONFIG_BYTES_MAX: Final = 1024 * 1024

# Keys that may hold a password. Each has a `<key>_file` neighbour, so that the secret can stay out of the
# file and of the environment.
SECRET_KEYS: Final = frozenset({"dsn", "listen_dsn"})


class ConfigError(EngineError):
    """The configuration cannot be used; `problems` has one line for each thing to mend."""

    family = "config"

    def __init__(self, *problems: str) -> None:
        several = (f"{len(problems)} problems", *(f"  {problem}" for problem in problems))
        super().__init__("configuration: " + "\n".join(problems if len(problems) == 1 else several))
        self.problems = problems


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file. Its text form leaves passwords out, also in tracebacks that print locals."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._shown())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return list(self._shown())

    def _shown(self) -> Iterator[tuple[str, Any]]:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            yield name, redact_dsn(value) if name in SECRET_KEYS and value is not None else value


class DatabaseSettings(Table, frozen=True, kw_only=True):
    """How to reach PostgreSQL and how long to wait for it."""

    dsn: str | None = None
    dsn_file: str | None = None
    listen_dsn: str | None = None
    listen_dsn_file: str | None = None
    pool_min: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    pool_max: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10
    lock_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 5_000
    statement_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)] = 30_000
    statement_cache: bool = True


class NodeSettings(Table, frozen=True, kw_only=True):
    """The daemon among its replicas."""

    name: Annotated[str, msgspec.Meta(max_length=128)] = ""
    lease_ttl_ms: Annotated[int, msgspec.Meta(ge=500, le=600_000)] = 5_000
    drain_timeout_s: Annotated[int, msgspec.Meta(ge=1, le=3_600)] = 25


class ReconcilerSettings(Table, frozen=True, kw_only=True):
    """One reconciler: whether it runs, how long it may look away, how many rows one statement moves."""

    enabled: bool = True
    interval_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 1_000
    batch_rows: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000

    @property
    def is_on(self) -> bool:
        """An interval of zero switches a reconciler off as well."""
        return self.enabled and self.interval_ms > 0


class RetentionSettings(Table, frozen=True, kw_only=True):
    """How long what has ended is kept."""

    execution_ms: Annotated[int, msgspec.Meta(ge=0, le=DURATION_MS_MAX)] = 604_800_000
    event_ms: Annotated[int, msgspec.Meta(ge=0, le=DURATION_MS_MAX)] = 604_800_000
    renewal_ms: Annotated[int, msgspec.Meta(ge=0, le=DURATION_MS_MAX)] = 3_600_000


class HttpSettings(Table, frozen=True, kw_only=True):
    """Where health and metrics are served."""

    bind: Annotated[str, msgspec.Meta(pattern=r"^(.+:\d{1,5})?$", max_length=256)] = "127.0.0.1:9464"


class OutboxSettings(Table, frozen=True, kw_only=True):
    """How events are announced and read."""

    notify: Literal["doorbell", "off"] = "doorbell"
    poll_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 1_000
    lease_renewed: bool = True


class LogSettings(Table, frozen=True, kw_only=True):
    """What is logged, and in which form."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


def _default_reconcilers() -> dict[str, ReconcilerSettings]:
    return {name: ReconcilerSettings(**pace._asdict()) for name, pace in RECONCILERS.items()}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be configured. The defaults alone are a working configuration."""

    database: DatabaseSettings = DatabaseSettings()
    node: NodeSettings = NodeSettings()
    reconcilers: dict[str, ReconcilerSettings] = msgspec.field(default_factory=_default_reconcilers)
    retention: RetentionSettings = RetentionSettings()
    outbox: OutboxSettings = OutboxSettings()
    http: HttpSettings = HttpSettings()
    log: LogSettings = LogSettings()

    def tables(self) -> dict[str, Table]:
        """Every table by its name in the file, `reconcilers.lease_expiry` among them."""
        found: dict[str, Table] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            found |= (
                {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        return found


DEFAULTS: Final[Mapping[str, Table]] = Settings().tables()
# Tables of tables.
_GROUPS: Final = frozenset(name.partition(".")[0] for name in DEFAULTS if "." in name)


class Loaded(NamedTuple):
    """Settings, and where they came from: the file that was read, and who gave each key (a file or a variable)."""

    settings: Settings
    file: Path | None
    origins: Mapping[tuple[str, str], str]


def load(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the file that `path`, `$FFD_CONFIG` or the search order names, then apply the environment.

    No file at all is fine; a file that was asked for and is not there is a `ConfigError`, as is any problem
    with a key.
    """
    return load_with_origins(path, environ).settings


def load_with_origins(path: Path | None, environ: Mapping[str, str]) -> Loaded:
    """What `load` gives, and where it came from. Keys of `origins` are a table and a key; the others are defaults."""
    loader = _Loader()
    found = _find(path, environ)
    if found is not None:
        loader.take_file(found)
    loader.take_environ(environ)
    return Loaded(loader.build(), found, {name: given.origin for name, given in loader.given.items()})


def _find(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    asked = path or (Path(environ["FFD_CONFIG"]) if environ.get("FFD_CONFIG") else None)
    if asked is not None:
        return asked
    return next((candidate for candidate in SEARCH_PATHS if _may_exist(candidate)), None)


def _may_exist(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # A directory closed to this user: reading will fail and say so. Passing over settings that an
        # administrator made would be worse.
        return True


class _Given(NamedTuple):
    value: object
    origin: str
    is_text: bool  # environment variables are text and are parsed by the type of their key
    directory: Path  # relative paths count from the file that names them


class _Loader:
    """Collects values and problems from each source, so that one run reports all of them."""

    def __init__(self) -> None:
        self.given: dict[tuple[str, str], _Given] = {}
        self.problems: list[str] = []

    def take_file(self, path: Path) -> None:
        origin = str(path)
        try:
            text = _read_text(path)
            content = tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {path}: {_reason(error)}") from None
        layer: dict[tuple[str, str], _Given] = {}
        for table, keys in _tables_of(content):
            if table not in DEFAULTS:
                self.problems.append(f"{table} ({origin}): unknown table{_suggest(table, DEFAULTS)}")
            elif not isinstance(keys, dict):
                self.problems.append(f"{table} ({origin}): must be a table, write [{table}]")
            else:
                for key, value in keys.items():
                    layer[table, key] = _Given(value, origin, is_text=False, directory=path.parent)
        self._merge(layer)

    def take_environ(self, environ: Mapping[str, str]) -> None:
        layer: dict[tuple[str, str], _Given] = {}
        for name, value in sorted(environ.items()):
            # Single underscores belong to others: FFD_CONFIG, or what Kubernetes sets for a service `ffd`.
            if not name.startswith(ENV_PREFIX) or "__" not in name:
                continue
            path, _, key = name.removeprefix(ENV_PREFIX).lower().rpartition("__")
            table = path.replace("__", ".")
            if table not in DEFAULTS:
                self.problems.append(f"{table} ({name}): unknown table{_suggest(table, DEFAULTS)}")
            else:
                layer[table, key] = _Given(value, name, is_text=True, directory=Path())
        self._merge(layer)

    def _merge(self, layer: dict[tuple[str, str], _Given]) -> None:
        """Lay one source over the previous ones. A secret and its file are one setting in two spellings."""
        for table, key in list(layer):
            if key not in SECRET_KEYS and key.removesuffix("_file") not in SECRET_KEYS:
                continue
            secret = key.removesuffix("_file")
            if key == secret and (table, f"{secret}_file") in layer:
                names = f"{table}.{secret} and {table}.{secret}_file"
                self.problems.append(f"{names} ({layer[table, key].origin}): give one of the two")
            self.given.pop((table, secret), None)
            self.given.pop((table, f"{secret}_file"), None)
        self.given.update(layer)

    def build(self) -> Settings:
        values: dict[str, dict[str, Any]] = {table: {} for table in DEFAULTS}
        for (table, key), given in self.given.items():
            types = {field.name: field.type for field in msgspec.structs.fields(DEFAULTS[table])}
            if key not in types:
                self.problems.append(f"{table}.{key} ({given.origin}): unknown key{_suggest(key, types)}")
                continue
            try:
                converted = msgspec.convert(given.value, types[key], strict=not given.is_text)
            except msgspec.ValidationError:
                self.problems.append(f"{table}.{key} ({given.origin}): {_refusal(key, given.value, types[key])}")
                continue
            values[table][key] = converted
            if key.removesuffix("_file") in SECRET_KEYS and isinstance(converted, str):
                self._take_secret(values[table], table, key, given)
        if self.problems:
            raise ConfigError(*self.problems)
        settings = _assemble({table: msgspec.structs.replace(DEFAULTS[table], **values[table]) for table in DEFAULTS})
        _check_pool(settings.database)
        return settings

    def _take_secret(self, values: dict[str, Any], table: str, key: str, given: _Given) -> None:
        dsn = values[key]
        if key.endswith("_file"):
            path = given.directory / dsn
            try:
                dsn = _read_text(path).strip()
            except (OSError, ValueError) as error:
                self.problems.append(f"{table}.{key} ({given.origin}): cannot read {path}: {_reason(error)}")
                return
            values[key.removesuffix("_file")] = dsn
        problem = dsn_problem(dsn)
        if problem is not None:
            self.problems.append(f"{table}.{key} ({given.origin}): {problem}")


def _tables_of(content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Each table by its whole name; what stands in a group of tables and is none itself keeps its value."""
    for name, value in content.items():
        if name in _GROUPS and isinstance(value, dict):
            for key, each in value.items():
                yield f"{name}.{key}", each
        else:
            yield name, value


def _assemble(tables: Mapping[str, Table]) -> Settings:
    fields: dict[str, Any] = {}
    for name, table in tables.items():
        group, _, key = name.partition(".")
        if key:
            fields.setdefault(group, {})[key] = table
        else:
            fields[name] = table
    return Settings(**fields)


def _check_pool(database: DatabaseSettings) -> None:
    if database.pool_min > database.pool_max:
        raise ConfigError(
            f"database.pool_min: {database.pool_min} is more than database.pool_max = {database.pool_max}"
        )


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(CONFIG_BYTES_MAX + 1)
    if len(content) > CONFIG_BYTES_MAX:
        raise ValueError(f"more than {CONFIG_BYTES_MAX} bytes")
    return content.decode()


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    # The text of a decoding error repeats bytes of the file, which may be a secret.
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def _suggest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"


def _refusal(key: str, value: object, type_: Any) -> str:
    # A secret is not repeated, not even a malformed one.
    got = "" if key.removesuffix("_file") in SECRET_KEYS else f", not {value!r}"
    match msgspec.inspect.type_info(type_):
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"must be a whole number from {low} to {high}{got}"
        case msgspec.inspect.LiteralType():
            *others, last = (repr(literal) for literal in get_args(type_))
            return f"must be {', '.join(others)} or {last}{got}"
        case msgspec.inspect.StrType(max_length=longest, pattern=pattern) if pattern is not None:
            return f"must be host:port, or empty for none, at most {longest} characters{got}"
        case msgspec.inspect.StrType(max_length=longest) if longest is not None:
            return f"must be text of at most {longest} characters{got}"
        case msgspec.inspect.BoolType():
            return f"must be true or false{got}"
        case _:
            return f"must be text{got}"


def dsn_problem(dsn: str) -> str | None:
    """Say why `dsn` cannot be used, or nothing. The answer repeats no part of it.

    An unescaped `/ ? # @` in a password moves its rest into the host or database name, from where it would
    reach error texts; such a DSN is refused.
    """
    try:
        parts = urlsplit(dsn)
    except ValueError:
        return "is not a valid PostgreSQL URI"
    if not dsn:
        return "is empty; leave the key out to use libpq's PG* variables"
    if parts.scheme not in {"postgresql", "postgres"} or "://" not in dsn:
        return "must be a URI such as postgresql://user@host:5432/database"
    hosts = parts.netloc.rpartition("@")[2]
    has_stray_at = parts.netloc.count("@") > 1 or "@" in parts.path
    has_lost_at = bool(parts.netloc) and "@" not in parts.netloc and "@" in parts.query
    is_port_wrong = any(not re.fullmatch(r"(\[[^]]*\]|[^:]*)(:\d*)?", host) for host in hosts.split(","))
    if parts.fragment or has_stray_at or has_lost_at or is_port_wrong:
        return "is not a valid PostgreSQL URI; percent-encode special characters such as / ? # @ : % in it"
    return None


def redact_dsn(dsn: str) -> str:
    """Give `dsn` with `***` in the place of its passwords; one that cannot be parsed is withheld whole."""
    if dsn_problem(dsn) is not None:
        return "***"
    parts = urlsplit(dsn)
    auth, at, hosts = parts.netloc.rpartition("@")
    user, colon, _ = auth.partition(":")
    query = "&".join(
        f"{name}=***" if "password" in unquote_plus(name).lower() else f"{name}{equals}{value}"
        for name, equals, value in (pair.partition("=") for pair in parts.query.split("&"))
    )
    password = ":***" if colon else ""
    return f"{parts.scheme}://{user}{password}{at}{hosts}{parts.path}{'?' if query else ''}{query}"


def describe_target(dsn: str | None, environ: Mapping[str, str]) -> str:
    """Name host, port, database and user that a connection would use, for error texts. Never the password."""
    parts = urlsplit(dsn if dsn is not None and dsn_problem(dsn) is None else "")
    query = dict(parse_qsl(parts.query))
    auth, _, hosts = parts.netloc.rpartition("@")
    user = unquote(auth.partition(":")[0]) or query.get("user") or environ.get("PGUSER") or _system_user()
    database = unquote(parts.path.lstrip("/")) or query.get("dbname") or query.get("database")
    database = database or environ.get("PGDATABASE") or user
    port = query.get("port") or environ.get("PGPORT") or "5432"
    hosts = unquote(hosts) or query.get("host") or environ.get("PGHOST") or "localhost"
    named = (host if re.search(r"[^:]:\d+$", host) else f"{host}:{port}" for host in hosts.split(","))
    return f"{','.join(named)} (database {database}, user {user})"


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's uid often has no name
        return "unknown"
