"""Asking before something is destroyed. Where nobody can answer, only `--yes` goes ahead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from ffd.cli.output import CliError, Invocation, printable
from ffd.cli.tables import facts

F = TypeVar("F", bound=Callable[..., Any])


def yes_option(command: F) -> F:
    """Give a command `--yes`."""
    return click.option("--yes", "-y", "is_yes", is_flag=True, help="Do not ask.")(command)


def must_ask(invocation: Invocation, *, is_yes: bool) -> bool:
    """Whether a person must agree first. Refused where there is nobody to ask."""
    if is_yes:
        return False
    if invocation.json or not sys.stdin.isatty():
        who = "--json never asks" if invocation.json else "stdin is not a terminal"
        raise click.UsageError(f"This needs a confirmation and {who}: pass --yes to go ahead.")
    return True


def ask(title: str, pairs: Sequence[tuple[str, str]], question: str) -> None:
    """Show what will be hit and ask; anything but yes ends the command before it changed something."""
    click.echo(printable(title), err=True)
    for line in facts(pairs, indent="  "):
        click.echo(line, err=True)
    if not click.confirm(question, err=True):
        raise CliError("declined", "declined; nothing was changed")
