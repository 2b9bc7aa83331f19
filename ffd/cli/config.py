"""`ffd config`: the configuration as it takes effect, and where each value came from. No password is shown (I8)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec

from ffd.cli.output import Group, Invocation, printable
from ffd.config import DEFAULTS, SECRET_KEYS, Loaded, describe_target, load_with_origins, redact_dsn

_FILE: Final = "_file"


class _Key(NamedTuple):
    """One key as it takes effect. `origin` is empty for a default; a key that is not `is_usable` is only told."""

    table: str
    name: str
    value: Any
    origin: str = ""
    is_usable: bool = True
    is_redacted: bool = False


@click.group(cls=Group)
def config() -> None:
    """Check and show the configuration.

    Read from --config, $FFD_CONFIG, ./ffd.toml or /etc/ffd/ffd.toml, then from FFD_TABLE__KEY variables, which
    win. The database is not asked.

    \b
    Examples:
      ffd config check
      ffd config show
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


@config.command()
@click.pass_obj
def check(invocation: Invocation) -> None:
    """Check the configuration; exit 2 with every problem at once.

    Does not connect to the database: `ffd status` does.

    \b
    Examples:
      ffd config check
      ffd config check --config new.toml && sudo systemctl reload ffd
      ffd config check --json | jq -r .file
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    loaded = _load(invocation)
    file = _file_of(loaded)
    variables = sorted({origin for origin in loaded.origins.values() if origin != file})
    invocation.say("no configuration file: defaults and environment" if file is None else f"read {file}")
    if variables:
        invocation.say(f"environment: {', '.join(variables)}")
    invocation.say("ok")
    invocation.emit({"file": file, "environment": variables, "is_ok": True})


@config.command()
@click.pass_obj
def show(invocation: Invocation) -> None:
    """Show every key with the value that takes effect.

    The output is a configuration file itself. A comment tells where a value came from that is not the default.
    Passwords are shown as ***, and such a line is a comment as a whole.

    \b
    Examples:
      ffd config show
      ffd config show | grep '# from'
      ffd config show --json | jq .settings.database
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    loaded = _load(invocation)
    keys = _keys(loaded)
    file = _file_of(loaded)
    source = "No configuration file: defaults and" if file is None else f"Read from {printable(file)}, then"
    invocation.say(f"# {source} the environment.")
    table = ""
    for key in keys:
        if key.table != table:
            table = key.table
            invocation.say(f"\n[{table}]")
        invocation.say(_line(key))
    settings: dict[str, Any] = {}
    for key in keys:
        _place(settings, key.table)[key.name] = key.value
    invocation.emit(
        {
            "file": file,
            "settings": settings,
            "origins": {f"{key.table}.{key.name}": key.origin for key in keys if key.origin},
            "redacted": [f"{key.table}.{key.name}" for key in keys if key.is_redacted],
        }
    )


def _load(invocation: Invocation) -> Loaded:
    """The configuration as every command loads it, its files by their whole paths."""
    loaded = load_with_origins(invocation.config, os.environ)
    if loaded.file is None:
        return loaded
    given, file = str(loaded.file), loaded.file.absolute()
    origins = {name: str(file) if origin == given else origin for name, origin in loaded.origins.items()}
    return Loaded(loaded.settings, file, origins)


def _file_of(loaded: Loaded) -> str | None:
    return None if loaded.file is None else str(loaded.file)


def _keys(loaded: Loaded) -> list[_Key]:
    keys = []
    for table, values in loaded.settings.tables().items():
        defaults = msgspec.structs.asdict(DEFAULTS[table])
        for name, value in msgspec.structs.asdict(values).items():
            origin = "" if value == defaults[name] else loaded.origins.get((table, name), "")
            key = _Key(table, name, value, origin)
            keys.append(_secret(loaded, key) if name.removesuffix(_FILE) in SECRET_KEYS and value is not None else key)
    return keys


def _secret(loaded: Loaded, key: _Key) -> _Key:
    """A key that holds a DSN or names its file: without a password, and with a path that leads there from anywhere."""
    if key.name.endswith(_FILE):
        return key._replace(value=_path(loaded, key.table, key.name, key.value))
    shown = redact_dsn(key.value)
    from_file = getattr(loaded.settings.tables()[key.table], f"{key.name}{_FILE}")
    if from_file is not None:
        # Only one of the two may be given.
        origin = _path(loaded, key.table, f"{key.name}{_FILE}", from_file)
        return key._replace(value=shown, origin=origin, is_usable=False, is_redacted=shown != key.value)
    return key._replace(value=shown, is_usable=shown == key.value, is_redacted=shown != key.value)


def _path(loaded: Loaded, table: str, name: str, value: str) -> str:
    """Relative paths count from the file that names them; of the environment, from here."""
    base = Path()
    if loaded.file is not None and loaded.origins[table, name] == str(loaded.file):
        base = loaded.file.parent
    return str((base / value).absolute())


def _place(settings: dict[str, Any], table: str) -> dict[str, Any]:
    for part in table.split("."):
        settings = settings.setdefault(part, {})
    return settings


def _line(key: _Key) -> str:
    if key.value is None:
        target = f"; libpq's PG* variables lead to {describe_target(None, os.environ)}" if key.name == "dsn" else ""
        return f"# {key.name}: not set{printable(target)}"
    mark = "" if key.is_usable else "# "
    notes = [f"from {printable(key.origin)}"] if key.origin else []
    notes += ["password left out"] if key.is_redacted else []
    return f"{mark}{key.name} = {_toml(key.value)}{'  # ' if notes else ''}{', '.join(notes)}"


def _toml(value: bool | int | str) -> str:
    """A value in TOML. Of text, everything that a terminal would act on is escaped."""
    if not isinstance(value, str):
        return json.dumps(value)
    return "".join(each if each.isprintable() else _escaped(each) for each in json.dumps(value, ensure_ascii=False))


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
