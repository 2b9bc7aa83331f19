"""`ffd migrate` and what all commands share, as processes: exit codes, streams, JSON, shared options."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import click
import pytest

from ffd.cli.main import COMMANDS, ffd, run
from ffd.db import migrations
from ffd.db.migration_files import discover

UNREACHABLE = "postgresql://bob:hunter2@127.0.0.1:1/app"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A working directory without configuration."""
    path = tmp_path / "work"
    path.mkdir()
    return path


def environment(dsn: str | None) -> dict[str, str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("FFD_", "PG"))}
    return environ | ({} if dsn is None else {"FFD_DATABASE__DSN": dsn})


def call(
    *arguments: str, dsn: str | None = None, cwd: Path | None = None, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ffd.cli.main", *arguments],
        env=environment(dsn) | (environ or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
    )


def execute(dsn: str, query: str) -> Any:
    async def go() -> Any:
        conn = await asyncpg.connect(dsn)
        try:
            return await conn.fetchval(query)
        finally:
            await conn.close()

    return asyncio.run(go())


def labels() -> list[str]:
    return [migration.label for migration in discover()]


# Migrating


def test_migrate_tells_what_it_does_line_by_line(empty_database: str) -> None:
    first = call("migrate", dsn=empty_database)
    *lines, last = first.stdout.splitlines()
    assert first.returncode == 0
    assert [re.sub(r"\d+\.\d\d s$", "_ s", line) for line in lines] == [f"applied {x} in _ s" for x in labels()]
    assert last == f"schema is at version {len(labels())}"
    second = call("migrate", dsn=empty_database)
    assert second.returncode == 0
    assert second.stdout == f"nothing to do: schema is at version {len(labels())}\n"
    assert first.stderr == second.stderr == ""


def test_migrate_gives_one_json_object(empty_database: str) -> None:
    done = call("migrate", "--json", dsn=empty_database)
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert result["version"] == len(labels())
    assert [step["name"] for step in result["applied"]] == labels()
    assert json.loads(call("migrate", "--json", dsn=empty_database).stdout)["applied"] == []


def test_check_exits_3_until_the_schema_is_current(empty_database: str) -> None:
    behind = call("migrate", "--check", dsn=empty_database)
    assert behind.returncode == 3
    assert behind.stdout.splitlines()[:-1] == [f"pending {label}" for label in labels()]
    assert behind.stdout.splitlines()[-1] == f"schema is at version 0, version {len(labels())} is needed"
    as_json = call("migrate", "--check", "--json", dsn=empty_database)
    assert as_json.returncode == 3
    assert json.loads(as_json.stdout) == {
        "version": 0,
        "target_version": len(labels()),
        "pending": labels(),
    }
    call("migrate", dsn=empty_database)
    current = call("migrate", "--check", dsn=empty_database)
    assert (current.returncode, current.stderr) == (0, "")


def test_dry_run_tells_and_changes_nothing(empty_database: str) -> None:
    done = call("migrate", "--dry-run", dsn=empty_database)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [f"would apply {label}" for label in labels()]
    tables = "select count(*) from pg_class where relnamespace = 'public'::regnamespace"
    assert execute(empty_database, tables) == 0


@pytest.mark.parametrize("options", [(), ("--check",), ("--dry-run",)])
def test_a_newer_or_changed_database_exits_3(empty_database: str, options: tuple[str, ...]) -> None:
    call("migrate", dsn=empty_database)
    insert = "insert into ff_schema_migration values (9999, 'future', '', 0, '9.0') returning 1"
    execute(empty_database, insert)
    newer = call("migrate", *options, dsn=empty_database)
    assert (newer.returncode, newer.stdout) == (3, "")
    assert "9999_future" in newer.stderr
    execute(empty_database, "delete from ff_schema_migration where version = 9999 returning 1")
    execute(empty_database, "update ff_schema_migration set checksum = 'other' where version = 1 returning 1")
    changed = call("migrate", "--json", *options, dsn=empty_database)
    assert (changed.returncode, changed.stdout) == (3, "")
    assert json.loads(changed.stderr)["error"]["code"] == "schema.changed"


def test_two_processes_migrate_once(empty_database: str) -> None:
    command = [sys.executable, "-m", "ffd.cli.main", "migrate", "--json"]
    environ = environment(empty_database)
    both = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(step["name"] for out in outputs for step in json.loads(out)["applied"]) == labels()


# A database that cannot be used


@pytest.mark.parametrize("options", [(), ("--check",), ("--dry-run",)])
def test_a_refused_connection_exits_4_and_names_the_target(options: tuple[str, ...]) -> None:
    done = call("migrate", *options, dsn=UNREACHABLE)
    assert (done.returncode, done.stdout) == (4, "")
    assert "127.0.0.1:1 (database app, user bob)" in done.stderr
    assert "hunter2" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unknown_host_exits_4() -> None:
    done = call("migrate", dsn="postgresql://bob:hunter2@no-such-host.invalid/app")
    assert done.returncode == 4
    assert "no-such-host.invalid:5432" in done.stderr


def test_a_wrong_password_or_database_exits_4(empty_database: str) -> None:
    wrong = call("migrate", dsn=re.sub(r":[^:@/]+@", ":hunter2@", empty_database))
    assert wrong.returncode == 4
    assert "password authentication failed" in wrong.stderr
    assert "hunter2" not in wrong.stderr
    assert call("migrate", dsn=f"{empty_database}_absent").returncode == 4


def test_libpq_variables_count_without_a_dsn(empty_database: str) -> None:
    parts = re.fullmatch(r"\w+://(\w+):(.*)@(.*):(\d+)/(\w+)", empty_database)
    assert parts is not None
    names = "PGUSER", "PGPASSWORD", "PGHOST", "PGPORT", "PGDATABASE"
    done = call("migrate", "--check", environ=dict(zip(names, parts.groups(), strict=True)))
    assert done.returncode == 3
    values = "bob", "hunter2", "127.0.0.1", "1", "bob"
    lost = call("migrate", environ=dict(zip(names, values, strict=True)))
    assert lost.returncode == 4
    assert "127.0.0.1:1 (database bob, user bob)" in lost.stderr
    assert "FFD_DATABASE__DSN" in lost.stderr
    assert call("migrate", environ={"PGPORT": "seven"}).returncode == 2


# Options and usage


def test_config_and_json_stand_before_or_after_the_command(empty_database: str, directory: Path) -> None:
    path = directory / "other.toml"
    path.write_text(f'[database]\ndsn = "{empty_database}"')
    shared = "--json", "--config", "other.toml"
    for line in (*shared, "migrate", "--check"), ("migrate", *shared, "--check"):
        done = call(*line, cwd=directory)
        assert done.returncode == 3
        assert json.loads(done.stdout)["pending"] == labels()
    later_wins = call("--config", "absent.toml", "migrate", "--config", "other.toml", cwd=directory)
    assert later_wins.returncode == 0


def test_a_config_file_in_the_working_directory_is_found(directory: Path) -> None:
    (directory / "ffd.toml").write_text(f'[database]\ndsn = "{UNREACHABLE}"')
    assert call("migrate", cwd=directory).returncode == 4


def test_config_errors_exit_2_with_every_problem(directory: Path) -> None:
    (directory / "ffd.toml").write_text("[database]\npool_max = 0\npool_mix = 1")
    done = call("migrate", cwd=directory)
    assert (done.returncode, done.stdout) == (2, "")
    assert "database.pool_max" in done.stderr
    assert "database.pool_mix" in done.stderr
    assert call("migrate", "--config", "absent.toml", cwd=directory).returncode == 2


@pytest.mark.parametrize(
    "line",
    [("migrate", "--check", "--dry-run"), ("migrate", "--nonsense"), ("nonsense",), ("migrate", "extra"), ()],
)
def test_usage_errors_exit_2_in_words_and_in_json(line: tuple[str, ...]) -> None:
    done = call(*line, dsn=UNREACHABLE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: ffd" in done.stderr
    as_json = call(*line, "--json", dsn=UNREACHABLE)
    assert as_json.returncode == 2
    assert json.loads(as_json.stderr)["error"]["code"] == "usage"


def test_errors_in_json_have_a_code_and_a_message() -> None:
    error = json.loads(call("migrate", "--json", dsn=UNREACHABLE).stderr)["error"]
    assert error["code"] == "unavailable"
    assert "connection refused" in error["message"]


def test_the_version_and_the_help_load_no_command() -> None:
    version = call("--version", dsn=UNREACHABLE)
    assert (version.returncode, version.stdout) == (0, f"ffd {migrations.ffd_version()}\n")
    code = (
        "import sys; from ffd.cli.main import run; assert run(['--help']) == 0; "
        "loaded = [name for name in sys.modules if name.startswith(('ffd.cli.', 'ffd.dev.'))]; "
        "assert sorted(loaded) == ['ffd.cli.main', 'ffd.cli.output'], loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples_and_the_summary_of_the_group(name: str) -> None:
    command = ffd.get_command(click.Context(ffd), name)
    assert command is not None
    assert command.help is not None
    assert command.help.splitlines()[0] == COMMANDS[name]
    assert "Examples:" in command.help
    assert {"config", "json"} <= {param.name for param in command.params}


# The unexpected


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(migrations, "discover", lambda *_: fail())
    monkeypatch.setenv("FFD_DATABASE__DSN", UNREACHABLE)


@pytest.mark.usefixtures("broken")
def test_an_unexpected_error_is_one_line_with_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["migrate"]) == 1
    text = capsys.readouterr().err
    assert text == "Error: KeyError: 'surprise' (unexpected; FFD_TRACEBACK=1 shows where)\n"
    assert run(["migrate", "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "internal"
    monkeypatch.setenv("FFD_TRACEBACK", "1")
    assert run(["migrate"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--check",)])
def test_a_reader_that_went_away_is_no_error_message(empty_database: str, options: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ffd.cli.main", "migrate", *options],
        env=environment(empty_database),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 1
    process.stderr.close()
