"""What every command shares: exit codes, options on both sides, words and JSON out, one way into async code."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from ffd.config import Settings

T = TypeVar("T")

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_MIGRATION: Final = 3
EXIT_UNAVAILABLE: Final = 4


class CliError(Exception):
    """A command failed for a reason that a person can act on. `code` is for programs that read `--json`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Invocation:
    """What the shared options said, wherever on the line they stood."""

    def __init__(self) -> None:
        self.config: Path | None = None
        self.json = False

    def settings(self) -> Settings:
        """Load the configuration that `--config` or the search order names."""
        from ffd.config import load

        return load(self.config, os.environ)

    def say(self, text: str) -> None:
        """Tell a person; a program that asked for JSON hears nothing of it."""
        if not self.json:
            # Flushed, because whoever waits for a line may read from a pipe.
            click.echo(printable(text, keep="\n"))
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Tell a person beside the result, on stderr, so that `$(ffd …)` takes only the result."""
        if not self.json:
            click.echo(printable(text, keep="\n"), err=True)

    def emit(self, document: dict[str, Any]) -> None:
        """Give a program its one JSON object; a person has heard it in words."""
        if self.json:
            click.echo(to_json(document))
            sys.stdout.flush()


def printable(text: str, keep: str = "") -> str:
    """Escape what a terminal would act on: control characters, direction marks, odd white space.

    Names, messages and tags are other people's text; a listing must not let them move the cursor or rewrite
    what stands above.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode() for each in text
    )


def to_json(document: dict[str, Any]) -> str:
    """Encode on one line."""
    import msgspec

    return msgspec.json.encode(document).decode()


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    invocation = ctx.ensure_object(Invocation)
    if value:
        setattr(invocation, str(param.name), value)


def shared_options() -> list[click.Parameter]:
    """Make `--config` and `--json`, for the group and for each command: people put them on either side."""
    config = click.Option(
        ["--config"],
        type=click.Path(dir_okay=False, path_type=Path),
        help="Configuration file. Default: $FFD_CONFIG, ./ffd.toml, /etc/ffd/ffd.toml.",
        expose_value=False,
        callback=_remember,
    )
    json = click.Option(
        ["--json"],
        is_flag=True,
        help="Write JSON: results to stdout, errors to stderr.",
        expose_value=False,
        callback=_remember,
    )
    return [config, json]


class Command(click.Command):
    """A command that takes the shared options as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += shared_options()


class Group(click.Group):
    """A group of commands, in the order they were written; it and they take the shared options."""

    command_class = Command

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += shared_options()

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """Keep the order of the source: what is used first stands first."""
        return list(self.commands)


def run_async(function: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine function to its end, on uvloop where it can be imported."""
    import anyio
    import structlog

    # Standard output belongs to the command's own words, or to its JSON. The stream is looked up for every line:
    # whoever runs commands in one process may have put another one in its place.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    has_uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(function, backend="asyncio", backend_options={"use_uvloop": has_uvloop})
