"""What commands take: typed, bounded, checked before the database is asked. A wrong one is a usage error.

The checks are the engine's own; here they only get the name of the option.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from ffd.cli.times import duration, parse_duration
from ffd.core.checks import check_capabilities, check_lane, check_tag_key, check_tags, check_text
from ffd.core.errors import Validation
from ffd.core.ids import lease_id_text, parse_execution_id, parse_lease_id, parse_uuid
from ffd.core.limits import ID_BYTES_MAX, PAGE_MAX, REASON_BYTES_MAX, TAG_VALUE_BYTES_MAX
from ffd.core.tokens import check_kid

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic in newer versions of click only

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_BYTES_MAX: Final = 4096
_STDIN: Final = "ffd.cli.stdin"


class Checked(ParamType):
    """Text that one of the engine's checks accepts; the value is what the check returns."""

    def __init__(self, name: str, check: Callable[[str], Any]) -> None:
        self.name = name
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check, and name the option in the refusal."""
        try:
            return self._check(value)
        except Validation as error:
            self.fail(error.detail, param, ctx)


class Duration(ParamType):
    """A length of time with its unit, as milliseconds."""

    name = "duration"

    def __init__(self, low_ms: int, high_ms: int) -> None:
        self._low_ms = low_ms
        self._high_ms = high_ms

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the units, then the bounds."""
        if isinstance(value, int):
            return value
        ms = parse_duration(value)
        if ms is None:
            self.fail(f"{value!r} is no duration; write it like 500ms, 30s, 5m, 2h, 1d or 1h30m", param, ctx)
        if not self._low_ms <= ms <= self._high_ms:
            self.fail(f"expected {duration(self._low_ms)} to {duration(self._high_ms)}", param, ctx)
        return ms


class Content(ParamType):
    """The bytes of a file, or of stdin for `-`. A secret is not echoed when it is typed."""

    name = "path"

    def __init__(self, bytes_max: int, *, is_secret: bool = False) -> None:
        self._bytes_max = bytes_max
        self._is_secret = is_secret

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Read at most one byte too many."""
        if isinstance(value, bytes):
            return value
        try:
            content = self._read(value, param, ctx)
        except OSError as error:
            self.fail(f"cannot read {value}: {error.strerror or type(error).__name__}", param, ctx)
        if len(content) > self._bytes_max:
            self.fail(f"more than {self._bytes_max} bytes", param, ctx)
        return content

    def _read(self, path: str, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        if path != "-":
            with Path(path).open("rb") as file:
                return file.read(self._bytes_max + 1)
        if ctx is not None and ctx.meta.setdefault(_STDIN, param) is not param:
            self.fail("stdin is read by another option already", param, ctx)
        if self._is_secret and sys.stdin.isatty():
            return getpass.getpass("secret (not shown): ").encode()
        return sys.stdin.buffer.read(self._bytes_max + 1)


def _execution_id(text: str) -> str:
    return str(parse_execution_id(text))


def _lease_id(text: str) -> str:
    parts = parse_lease_id(text)
    if parts is None:
        raise click.BadParameter("expected pg:<uuid>:<attempt>:<epoch>, as `ffd execution show` prints it")
    return lease_id_text(*parts)


def _tag(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter("expected key=value")
    return check_tag_key(key), check_text(value, "", TAG_VALUE_BYTES_MAX, may_be_empty=True)


def text(bytes_max: int = ID_BYTES_MAX, *, may_be_empty: bool = False) -> Checked:
    """Text of bounded size."""
    return Checked("text", lambda value: check_text(value, "", bytes_max, may_be_empty=may_be_empty))


def uuid(name: str) -> Checked:
    """A bare uuid."""
    return Checked(name, lambda value: str(parse_uuid(value, "")))


EXECUTION_ID: Final = Checked("execution", _execution_id)
FLOW_ID: Final = uuid("flow")
WAITPOINT_ID: Final = uuid("waitpoint")
LEASE_ID: Final = Checked("lease", _lease_id)
LANE: Final = Checked("lane", check_lane)
KID: Final = Checked("kid", check_kid)
TAG: Final = Checked("key=value", _tag)
LIMIT: Final = click.IntRange(1, PAGE_MAX)


def take_tags(ctx: click.Context, param: click.Parameter, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """All `--tag`s together."""
    try:
        return check_tags(dict(pairs))
    except Validation as error:
        _refuse(error, param, ctx)


def take_capabilities(ctx: click.Context, param: click.Parameter, tokens: Sequence[str]) -> list[str]:
    """All `--capability`s together."""
    try:
        return check_capabilities(tokens, "")
    except Validation as error:
        _refuse(error, param, ctx)


def _refuse(error: Validation, param: click.Parameter, ctx: click.Context) -> NoReturn:
    raise click.BadParameter(error.detail, ctx, param) from None


def given_bytes(ctx: click.Context, argument: str | None, content: bytes | None, option: str) -> bytes | None:
    """A payload from `--payload` or from `--payload-file`."""
    if argument is not None and content is not None:
        raise click.UsageError(f"{option} and {option}-file exclude each other.", ctx)
    # As it was typed, whatever its encoding.
    return content if argument is None else os.fsencode(argument)


def secret_text(content: bytes, option: str) -> str:
    """The one line of a secret's file. The refusal repeats nothing of it."""
    try:
        return content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise click.BadParameter("expected one line of ASCII text", param_hint=option) from None


def system_user() -> str:
    """The name of the user who runs this; empty when it has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's uid often has no name
        return ""


def operator_options(command: F) -> F:
    """Give a command `--reason` and `--actor`, which the operator event keeps."""
    reason = click.option(
        "--reason",
        type=text(REASON_BYTES_MAX, may_be_empty=True),
        default="",
        help="Why, for the operator event and for whoever asks later.",
    )
    actor = click.option(
        "--actor",
        type=text(may_be_empty=True),
        default=system_user,
        show_default="your user name",
        help="Who does this, for the operator event.",
    )
    return reason(actor(command))
