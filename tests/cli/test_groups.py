"""What all commands that use the engine share: the shared options at every level, help, and a database in trouble."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ffd.cli.main import COMMANDS, ffd
from ffd.cli.output import printable
from tests.cli.calls import NO_UUID, NOBODY, UNREACHABLE, Cli, call, create, execute

# One line for each command, complete enough to reach the database.
LINES = [
    ("status",),
    ("execution", "create"),
    ("execution", "list"),
    ("execution", "show", NOBODY),
    ("execution", "show", NOBODY, "--result"),
    ("execution", "explain", NOBODY),
    ("execution", "cancel", NOBODY, "--yes"),
    ("execution", "revoke", NOBODY, "--yes"),
    ("execution", "replay", NOBODY),
    ("execution", "priority", NOBODY, "5"),
    ("execution", "resume", NOBODY),
    ("flow", "show", NO_UUID),
    ("flow", "cancel", NO_UUID, "--yes"),
    ("keys", "seed", "--kid", "k1"),
    ("keys", "rotate", "--kid", "k1", "--grace", "1h", "--yes"),
    ("keys", "list"),
    ("waitpoint", "list", NOBODY),
    ("waitpoint", "list", "--suspended"),
    ("signal", "send", NOBODY, NO_UUID, "approve", "--approve"),
]
# These ask no database.
OFFLINE = {"config check", "config show"}


def commands() -> Iterator[tuple[str, click.Command]]:
    for name in COMMANDS:
        command = ffd.get_command(click.Context(ffd), name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {sub}", each) for sub, each in command.commands.items())


def test_the_groups_are_those_of_the_contract() -> None:
    assert {name for name, _ in commands() if " " in name} == {
        *(
            f"execution {name}"
            for name in ["create", "list", "show", "explain", "cancel", "revoke", "replay", "priority", "resume"]
        ),
        *("flow show", "flow cancel", "keys seed", "keys rotate", "keys list", "waitpoint list", "signal send"),
        *OFFLINE,
    }
    assert {" ".join(line[:2]) for line in LINES} == {
        "status",
        *(name for name, _ in commands() if " " in name and name not in OFFLINE),
    }


@pytest.mark.parametrize(("name", "command"), list(commands()), ids=[name for name, _ in commands()])
def test_every_command_has_help_examples_and_the_shared_options(name: str, command: click.Command) -> None:
    assert command.help is not None
    assert re.search(rf"Examples:\n(.*\n)*.*ffd {name}", command.help)
    assert {"config", "json"} <= {param.name for param in command.params}
    for param in command.params:
        assert not isinstance(param, click.Option) or param.help, param.name


@pytest.mark.parametrize("group", ["config", "execution", "flow", "keys", "waitpoint", "signal"])
def test_the_help_of_a_group_lists_its_commands(cli_down: Cli, group: str) -> None:
    done = cli_down(group, "--help")
    assert (done.code, done.err) == (0, "")
    assert "Examples:" in done.out
    for name, _ in commands():
        if name.startswith(f"{group} "):
            assert f"\n  {name.split()[1]} " in done.out
    missing = cli_down(group)
    assert (missing.code, missing.out) == (2, "")
    assert cli_down(group, "nonsense", "--json").error["code"] == "usage"


def test_the_shared_options_stand_at_every_level(dsn: str, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(f'[database]\ndsn = "{dsn}"')
    shared = "--json", "--config", "other.toml"
    for line in (
        (*shared, "keys", "list"),
        ("keys", *shared, "list"),
        ("keys", "list", *shared),
        ("--json", "keys", "--config", "other.toml", "list"),
    ):
        assert call(*line, dsn=None, cwd=tmp_path).json == {"items": [], "next": None}


def test_the_next_page_is_asked_with_the_same_configuration(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "my config.toml").write_text(f'[database]\ndsn = "{cli.dsn}"')
    for _ in range(2):
        create(cli.dsn)
    told = cli("--config", "my config.toml", "execution", "list", "--limit", "1").out
    assert "--config 'my config.toml' --after" in told


# A database in trouble


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_without_a_database_every_command_exits_4_and_names_it(line: tuple[str, ...]) -> None:
    done = call(*line, dsn=UNREACHABLE, stdin="x")
    assert (done.code, done.out) == (4, "")
    assert "127.0.0.1:1 (database app, user bob): connection refused" in done.err
    assert "hunter2" not in done.err


@pytest.mark.parametrize("line", LINES, ids=" ".join)
def test_without_the_schema_every_command_exits_3_and_says_what_to_run(cli_empty: Cli, line: tuple[str, ...]) -> None:
    done = cli_empty(*line)
    assert (done.code, done.out) == (3, "")
    assert "run `ffd migrate`" in done.err
    assert execute(cli_empty.dsn, "select count(*) from pg_class where relnamespace = 'public'::regnamespace") == 0


@pytest.mark.parametrize("line", [line for line in LINES if {NOBODY, NO_UUID} & set(line)], ids=" ".join)
def test_an_unknown_id_exits_1_and_says_so(dsn: str, line: tuple[str, ...]) -> None:
    done = call(*line, dsn=dsn)
    assert (done.code, done.out) == (1, "")
    assert "not found" in done.err
    if "--result" in line:
        return  # raw bytes; no JSON to ask for
    told = call(*line, "--json", dsn=dsn)
    assert (told.code, told.error["code"]) == (1, "not_found")


def test_as_a_process_too(empty_database: str) -> None:
    down = call("execution", "list", "--json", dsn=UNREACHABLE)
    assert (down.code, down.error["code"]) == (4, "unavailable")
    behind = call("execution", "list", "--json", dsn=empty_database)
    assert (behind.code, behind.error["code"]) == (3, "schema.behind")


def test_a_schema_that_is_behind_or_ahead_exits_3(cli: Cli) -> None:
    execute(cli.dsn, "insert into ff_schema_migration values (9999, 'future', '', 0, '9.0')")
    ahead = cli("execution", "list", "--json")
    assert (ahead.code, ahead.error["code"]) == (3, "schema.ahead")
    execute(
        cli.dsn,
        "delete from ff_schema_migration where version in (9999, (select max(version) - 1 from ff_schema_migration))",
    )
    execute(cli.dsn, "delete from ff_schema_migration where version > 1")
    behind = cli("execution", "list")
    assert behind.code == 3
    assert "the schema is at version 1" in behind.err


def test_an_address_that_is_none_and_a_wrong_config_exit_2(
    cli_down: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ffd.toml").write_text("[database]\npool_max = 0")
    assert "database.pool_max" in cli_down("execution", "list").err
    (tmp_path / "ffd.toml").unlink()
    monkeypatch.delenv("FFD_DATABASE__DSN")
    monkeypatch.setenv("PGPORT", "seven")
    done = cli_down("execution", "list")
    assert done.code == 2
    assert "PG* variables" in done.err


def test_a_reader_that_went_away_is_no_error_message(dsn: str) -> None:
    create(dsn)
    process = subprocess.Popen(
        [sys.executable, "-m", "ffd.cli.main", "execution", "list"],
        env={"FFD_DATABASE__DSN": dsn, "PYTHONPATH": ":".join(sys.path)},
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


def test_an_output_that_cannot_show_a_character_gets_another(dsn: str) -> None:
    create(dsn, kind="a snowman: ☃")
    done = call("execution", "list", dsn=dsn, environ={"PYTHONIOENCODING": "latin-1"})
    assert (done.code, done.err) == (0, "")
    assert "a snowman: ?" in done.out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain grün ☃", "plain grün ☃"),
        ("\x1b[31m\x07\x9b", r"\x1b[31m\x07\x9b"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\u202etxt.exe\u2066", r"\u202etxt.exe\u2066"),
        ("\x7f\u2028", r"\x7f\u2028"),
    ],
)
def test_what_a_terminal_would_act_on_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(f"{text}\n", keep="\n").endswith("\n")
