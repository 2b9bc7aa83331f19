"""The `ffd` command.

Command modules are imported when they are called, so that `ffd --help` does not wait for a database driver.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import click

from ffd.cli.output import (
    EXIT_FAILED,
    EXIT_MIGRATION,
    EXIT_OK,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    CliError,
    printable,
    shared_options,
    to_json,
)
from ffd.core.errors import EngineError

# By the family of the error; every other one is a plain failure.
EXIT_CODES: Final[Mapping[str, int]] = {
    "config": EXIT_USAGE,
    "schema": EXIT_MIGRATION,
    "migration": EXIT_MIGRATION,
    "unavailable": EXIT_UNAVAILABLE,
}

# Each is the command of the same name in `ffd.cli.<name>`; the text is the first sentence of its own help.
COMMANDS: Final[Mapping[str, str]] = {
    "run": "Run the daemon that keeps everything moving.",
    "dev": "Start a development server with its own PostgreSQL.",
    "migrate": "Bring the database to the schema this version needs.",
    "status": "Show what is alive, what waits and what is overdue.",
    "config": "Check and show the configuration.",
    "execution": "Create, look at and steer executions.",
    "flow": "Look at and cancel flows.",
    "waitpoint": "Look at what suspended executions wait for.",
    "signal": "Send signals to waitpoints.",
    "keys": "Manage the keys that sign waitpoint tokens.",
}


class _LazyGroup(click.Group):
    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"ffd.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101  (a mistake in COMMANDS, not of the user)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="ffd", prog_name="ffd", message="%(prog)s %(version)s")
def ffd() -> None:
    """Durable execution on PostgreSQL.

    \b
    Examples:
      ffd dev                      a database to try things on
      ffd run                      the daemon
      ffd migrate                  create or update the schema
      ffd migrate --check          exit 3 when the schema is behind
      ffd status                   who sweeps, what waits, what is overdue
      ffd config check             mistakes in the configuration, all at once
      ffd execution list           what there is, the newest first
      ffd execution explain ID     why it is not running, and what to do
      ffd flow show ID             a flow as a graph, with the state of each node

    The database is found by database.dsn in the configuration file, by FFD_DATABASE__DSN, or by libpq's
    PGHOST, PGDATABASE, PGUSER and so on.

    Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 migration needed or failed, 4 database
    unavailable.
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


ffd.params += shared_options()


class _Failure(NamedTuple):
    exit_code: int
    code: str
    message: str


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # Read from the line itself: a usage error may come before the option is parsed.
    wants_json = "--json" in arguments
    try:
        result = ffd.main(args=list(arguments), prog_name="ffd", standalone_mode=False)
    except BrokenPipeError:
        # The reader has gone, as in `ffd ... | head`. Keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except click.ClickException as error:
        if wants_json:
            _report(_Failure(error.exit_code, "usage", error.format_message()), wants_json)
        else:
            error.show(file=sys.stderr)
        return error.exit_code
    except (Exception, KeyboardInterrupt, click.Abort) as error:  # noqa: BLE001  (here the program ends)
        if os.environ.get("FFD_TRACEBACK"):
            traceback.print_exc()
        failure = _explain(error)
        _report(failure, wants_json)
        return failure.exit_code
    return result if isinstance(result, int) else EXIT_OK


def _explain(error: BaseException) -> _Failure:
    match error:
        case EngineError():
            return _Failure(EXIT_CODES.get(error.family, EXIT_FAILED), error.code, str(error))
        case CliError():
            return _Failure(EXIT_FAILED, error.code, str(error))
        case KeyboardInterrupt() | click.Abort():
            return _Failure(EXIT_FAILED, "interrupted", "interrupted")
        case _:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            return _Failure(EXIT_FAILED, "internal", f"{what} (unexpected; FFD_TRACEBACK=1 shows where)")


def _report(failure: _Failure, wants_json: bool) -> None:
    if wants_json:
        click.echo(to_json({"error": {"code": failure.code, "message": failure.message}}), err=True)
    else:
        click.echo(f"Error: {printable(failure.message, keep=chr(10))}", err=True)


def main() -> None:
    """Start from the console."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets a question mark, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
