"""`ffd run`: the daemon."""

from __future__ import annotations

import os

import click

from ffd.cli.output import Command, Invocation, run_async


@click.command(cls=Command)
@click.pass_obj
def run(invocation: Invocation) -> None:
    """Run the daemon that keeps everything moving.

    Gives work of vanished workers to others, ends what has timed out, promotes delayed work, carries endings through
    flows and deletes what has been kept long enough. Runs until SIGTERM or Ctrl-C, then finishes what it has begun.
    Start as many as you like: they divide the work among them. Waits for the database and its schema.

    \b
    Examples:
      ffd run
      ffd run --config /etc/ffd/ffd.toml
      FFD_HTTP__BIND=0.0.0.0:9464 FFD_LOG__FORMAT=json ffd run

    /livez, /readyz and /metrics are served on http.bind. SIGHUP reads the configuration again.
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    from ffd import __version__
    from ffd.daemon.supervisor import Daemon
    from ffd.telemetry.logging import configure

    settings = invocation.settings()

    async def live() -> None:
        configure(settings.log)
        daemon = Daemon(settings, version=__version__, reload=invocation.settings, environ=os.environ)
        await daemon.run()

    run_async(live)
