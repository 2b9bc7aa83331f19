"""`ffd config`: what is read is told, what is shown can be read again, and no password ever shows."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ffd import config
from ffd.config import DEFAULTS, Settings, load
from tests.cli.calls import UNREACHABLE, Cli, call

# A value other than the default for every key that can have one, some of them awkward in TOML.
CHANGED: dict[str, dict[str, Any]] = {
    "database": {
        "dsn": "postgresql://bob@db.example:5433/app?application_name=a%20b",
        "listen_dsn": "postgresql://bob@direct.example/app",
        "pool_min": 0,
        "pool_max": 20,
        "lock_timeout_ms": 1,
        "statement_timeout_ms": 2,
        "statement_cache": False,
    },
    "node": {"name": 'a "node" \\ grün # \t\x1b[31m\x7f\u202e\U000e0001', "lease_ttl_ms": 600, "drain_timeout_s": 1},
    **{f"reconcilers.{name}": {"enabled": False, "interval_ms": 7, "batch_rows": 8} for name in Settings().reconcilers},
    "retention": {"execution_ms": 1, "event_ms": 2, "renewal_ms": 3},
    "outbox": {"notify": "off", "poll_interval_ms": 11, "lease_renewed": False},
    "http": {"bind": ""},
    "log": {"level": "error", "format": "json"},
}


@pytest.fixture(autouse=True)
def _elsewhere(apart: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of this machine takes part."""
    monkeypatch.setattr(config, "SEARCH_PATHS", (Path("ffd.toml"), tmp_path / "etc" / "ffd.toml"))


@pytest.fixture
def cli_bare(cli_down: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands without any setting in the environment."""
    monkeypatch.delenv("FFD_DATABASE__DSN")
    return cli_down


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def loaded_again(shown: str, tmp_path: Path) -> Settings:
    """What the output gives as the only configuration there is, in a directory of its own."""
    return load(write(tmp_path / "again" / "shown.toml", shown), {})


# check


def test_check_names_the_file_it_read(cli_bare: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = write(tmp_path / "ffd.toml", ""), write(tmp_path / "other.toml", "")
    assert cli_bare("config", "check").out == f"read {here}\nok\n"
    monkeypatch.setenv("FFD_CONFIG", "other.toml")
    assert cli_bare("config", "check").out == f"read {other}\nok\n"
    assert cli_bare("config", "check", "--config", "ffd.toml").out == f"read {here}\nok\n"


def test_check_says_that_no_file_was_read(cli_bare: Cli) -> None:
    done = cli_bare("config", "check")
    assert (done.code, done.out, done.err) == (0, "no configuration file: defaults and environment\nok\n", "")


def test_check_names_the_variables_that_count(cli_down: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FFD_LOG__LEVEL", "debug")
    told = cli_down("config", "check")
    assert told.out.splitlines()[1:] == ["environment: FFD_DATABASE__DSN, FFD_LOG__LEVEL", "ok"]
    assert cli_down("config", "check", "--json").json == {
        "file": None,
        "environment": ["FFD_DATABASE__DSN", "FFD_LOG__LEVEL"],
        "is_ok": True,
    }


@pytest.mark.parametrize("command", ["check", "show"])
def test_every_problem_is_told_at_once_and_exits_2(
    cli_down: Cli, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "ffd.toml", "[database]\npool_mix = 1\n[plog]\nlevel = 'info'")
    monkeypatch.setenv("FFD_NODE__LEASE_TTL_MS", "1")
    done = cli_down("config", command)
    assert (done.code, done.out) == (2, "")
    for problem in ("3 problems", "database.pool_mix (ffd.toml)", "plog (ffd.toml)", "(FFD_NODE__LEASE_TTL_MS)"):
        assert problem in done.err
    assert cli_down("config", command, "--json").error["code"] == "config"
    assert cli_down("config", command, "--config", "absent.toml").code == 2


@pytest.mark.parametrize("command", ["check", "show"])
def test_the_database_is_not_asked(command: str, tmp_path: Path) -> None:
    done = call("config", command, dsn=UNREACHABLE, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "hunter2" not in done.out


# show


def test_show_has_every_table_and_key_in_the_order_of_the_settings(cli_bare: Cli) -> None:
    lines = [line.lstrip("# ") for line in cli_bare("config", "show").out.splitlines()]
    shown = [line.partition(" ")[0].rstrip(":") for line in lines[1:] if line]
    assert shown == [
        name
        for table, values in Settings().tables().items()
        for name in (f"[{table}]", *msgspec.structs.asdict(values))
    ]


def test_show_of_the_defaults_is_the_defaults(cli_bare: Cli, tmp_path: Path) -> None:
    shown = cli_bare("config", "show").out
    assert loaded_again(shown, tmp_path) == Settings()
    assert "# from" not in shown


def test_show_can_be_read_again_whatever_the_values(
    cli_bare: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table, values in CHANGED.items():
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            monkeypatch.setenv(f"FFD_{table.replace('.', '__')}__{key}".upper(), text)
    shown = cli_bare("config", "show").out
    assert shown.replace("\n", "").isprintable()
    found = loaded_again(shown, tmp_path)
    assert found == load(None, os.environ)
    same = [
        f"{table}.{key}"
        for table, values in found.tables().items()
        for key, value in msgspec.structs.asdict(values).items()
        if value == getattr(DEFAULTS[table], key)
    ]
    assert same == ["database.dsn_file", "database.listen_dsn_file"], "the others are all tried here"


def test_show_tells_where_a_value_came_from_unless_it_is_the_default(
    cli_bare: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "ffd.toml", "[database]\npool_max = 20\npool_min = 1\n[retention]\nevent_ms = 5\n")
    monkeypatch.setenv("FFD_RETENTION__EVENT_MS", "6")
    monkeypatch.setenv("FFD_RECONCILERS__RETENTION__ENABLED", "false")
    monkeypatch.setenv("FFD_LOG__LEVEL", "info")
    lines = cli_bare("config", "show").out.splitlines()
    assert lines[0] == f"# Read from {file}, then the environment."
    assert [line for line in lines[1:] if "# from" in line] == [
        f"pool_max = 20  # from {file}",
        "enabled = false  # from FFD_RECONCILERS__RETENTION__ENABLED",
        "event_ms = 6  # from FFD_RETENTION__EVENT_MS",
    ]


@pytest.mark.parametrize("key", ["dsn", "listen_dsn"])
@pytest.mark.parametrize("query", ["", "?sslpassword=hunter2", "?password=hunter2"])
def test_show_leaves_passwords_out_and_comments_such_a_line(
    cli_bare: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, query: str
) -> None:
    variable = f"FFD_DATABASE__{key.upper()}"
    monkeypatch.setenv(variable, f"{UNREACHABLE}{query}")
    shown = cli_bare("config", "show").out
    redacted = f"postgresql://bob:***@127.0.0.1:1/app{query.replace('hunter2', '***')}"
    assert f'\n# {key} = "{redacted}"  # from {variable}, password left out\n' in shown
    as_json = cli_bare("config", "show", "--json")
    assert as_json.json["settings"]["database"][key] == redacted
    assert as_json.json["redacted"] == [f"database.{key}"]
    assert "hunter2" not in shown + as_json.out
    assert loaded_again(shown, tmp_path) == Settings()


def test_show_of_a_secret_file_leads_there_from_anywhere(cli_bare: Cli, tmp_path: Path) -> None:
    secret = write(tmp_path / "secrets" / "dsn", UNREACHABLE)
    file = write(tmp_path / "etc" / "ffd.toml", '[database]\ndsn_file = "../secrets/dsn"')
    shown = cli_bare("config", "show").out
    path = tmp_path / "etc" / ".." / "secrets" / "dsn"
    assert f'\ndsn_file = "{path}"  # from {file}\n' in shown
    assert f'\n# dsn = "postgresql://bob:***@127.0.0.1:1/app"  # from {path}, password left out\n' in shown
    assert loaded_again(shown, tmp_path).database.dsn == secret.read_text()


def test_show_of_a_secret_file_without_a_password_gives_one_of_the_two(
    cli_bare: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "dsn", "postgresql://bob@db.example/app")
    monkeypatch.setenv("FFD_DATABASE__DSN_FILE", "dsn")
    shown = cli_bare("config", "show").out
    assert f'\n# dsn = "postgresql://bob@db.example/app"  # from {tmp_path / "dsn"}\n' in shown
    assert loaded_again(shown, tmp_path).database.dsn == "postgresql://bob@db.example/app"


def test_show_without_a_dsn_tells_where_libpqs_variables_lead(cli_bare: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGHOST": "db.example", "PGPORT": "5433", "PGUSER": "bob", "PGPASSWORD": "hunter2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PGDATABASE", "a\nb")
    shown = cli_bare("config", "show").out
    assert "# dsn: not set; libpq's PG* variables lead to db.example:5433 (database a\\nb, user bob)\n" in shown
    assert "hunter2" not in shown
    assert "dsn" not in tomllib.loads(shown)["database"]


def test_show_in_json_is_one_object_with_the_names_of_the_file(cli_bare: Cli, tmp_path: Path) -> None:
    file = write(tmp_path / "ffd.toml", "[node]\nname = 'n1'")
    shown = cli_bare("config", "show", "--json").json
    assert (shown["file"], shown["origins"], shown["redacted"]) == (str(file), {"node.name": str(file)}, [])
    assert shown["settings"] == {**msgspec.to_builtins(Settings()), "node": {**shown["settings"]["node"], "name": "n1"}}
