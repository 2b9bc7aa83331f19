"""`ffd keys`: the keys that sign waitpoint tokens. Secrets come from a file or from chance; none is shown (I8)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

import click

from ffd.cli.confirm import ask, must_ask, yes_option
from ffd.cli.engine import Session, as_fields, with_engine
from ffd.cli.execution_text import at
from ffd.cli.inputs import KID, Content, Duration, secret_text
from ffd.cli.output import CliError, Group, Invocation
from ffd.cli.tables import Column, table, terminal_width
from ffd.cli.times import duration
from ffd.core.errors import Validation
from ffd.core.limits import KEY_GRACE_MS_MAX
from ffd.core.tokens import check_secret_hex

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from ffd.core.suspension import AlreadySeeded, Noop, Rotated, Seeded, WaitpointKey

    F = TypeVar("F", bound=Callable[..., Any])

SECRET_BYTES: Final = 32
SECRET_FILE_BYTES_MAX: Final = 4096

_COLUMNS: Final = tuple(Column(title) for title in ("KID", "STATE", "SIGNS SINCE", "VERIFIES UNTIL"))


def _secret_option(command: F) -> F:
    return click.option(
        "--secret-file",
        type=Content(SECRET_FILE_BYTES_MAX, is_secret=True),
        help="The secret, 64 hex digits, from a file, - for stdin. Default: 32 random bytes.",
    )(command)


def _secret_hex(content: bytes | None) -> str:
    """The given secret, or a new one."""
    if content is None:
        return secrets.token_hex(SECRET_BYTES)
    given = secret_text(content, "--secret-file")
    try:
        check_secret_hex(given)
    except Validation as error:
        raise click.BadParameter(error.detail, param_hint="--secret-file") from None
    return given


@click.group(cls=Group)
def keys() -> None:
    """Manage the keys that sign waitpoint tokens.

    Executions can be suspended once a key is seeded. No command takes a secret as an argument or shows one.

    \b
    Examples:
      ffd keys seed --kid 2024-05
      ffd keys rotate --kid 2024-06 --grace 7d
      ffd keys list
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


@keys.command()
@click.option("--kid", type=KID, required=True, help="The key's name; it stands in every token.")
@_secret_option
@click.pass_obj
def seed(invocation: Invocation, kid: str, secret_file: bytes | None) -> None:
    """Store the first signing key.

    A key of that name that is there already is kept, so that a deployment can run this every time; with
    --secret-file another secret under that name is an error.

    \b
    Examples:
      ffd keys seed --kid 2024-05
      ffd keys seed --kid 2024-05 --secret-file /run/secrets/ffd-key
      openssl rand -hex 32 | ffd keys seed --kid 2024-05 --secret-file -
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    secret_hex = _secret_hex(secret_file)

    async def work(session: Session) -> Seeded | AlreadySeeded:
        return await session.engine.seed_waitpoint_hmac_secret(kid, secret_hex)

    fields = as_fields(with_engine(invocation, work))
    is_new = "same_secret" not in fields
    if not is_new and secret_file is not None and not fields["same_secret"]:
        raise CliError("other_secret", f"key {kid!r} was there already, with another secret; it was kept")
    invocation.say(f"seeded {kid}; it signs now" if is_new else f"{kid} was there already; it was kept")
    invocation.emit({"result": "seeded" if is_new else "already_seeded", **fields})


@keys.command()
@click.option("--kid", type=KID, required=True, help="The new key's name.")
@_secret_option
@click.option(
    "--grace",
    "grace_ms",
    type=Duration(0, KEY_GRACE_MS_MAX),
    required=True,
    help="How long tokens of the present key still hold: 1h, 7d. 0s ends them at once.",
)
@yes_option
@click.pass_obj
def rotate(invocation: Invocation, kid: str, secret_file: bytes | None, grace_ms: int, is_yes: bool) -> None:
    """Sign with a new key from now on.

    The present key verifies for the length of --grace; tokens that are still out then stop working.

    \b
    Examples:
      ffd keys rotate --kid 2024-06 --grace 7d
      ffd keys rotate --kid 2024-06 --grace 7d --secret-file /run/secrets/ffd-key --yes
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    secret_hex = _secret_hex(secret_file)
    if must_ask(invocation, is_yes=is_yes):
        signing = next((key.kid for key in _list(invocation)[0] if key.is_active), "")
        tokens = f"of {signing} hold for {duration(grace_ms)} more" if grace_ms else "that are out stop working at once"
        ask("The signing key will be replaced:", [("present", signing), ("new", kid), ("tokens", tokens)], "Rotate?")

    async def work(session: Session) -> Rotated | Noop:
        return await session.engine.rotate_waitpoint_hmac_secret_all(kid, secret_hex, grace_ms)

    fields = as_fields(with_engine(invocation, work))
    if "new_kid" in fields:
        previous = fields["previous_kid"]
        held = f"; tokens of {previous} hold for {duration(grace_ms)} more" if previous and grace_ms else ""
        invocation.say(f"{kid} signs now{held}")
    else:
        invocation.say(f"{kid} was there already with this secret; nothing was changed")
    invocation.emit({"result": "rotated" if "new_kid" in fields else "noop", **fields})


def _list(invocation: Invocation) -> tuple[list[WaitpointKey], int]:
    async def work(session: Session) -> tuple[list[WaitpointKey], int]:
        return await session.engine.list_waitpoint_keys(), session.now_ms

    return with_engine(invocation, work)


@keys.command("list")
@click.pass_obj
def list_(invocation: Invocation) -> None:
    """List the keys that sign or still verify; never a secret.

    \b
    Examples:
      ffd keys list
      ffd keys list --json | jq -r '.items[] | select(.is_active) | .kid'
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    found, now_ms = _list(invocation)
    rows = [
        (
            key.kid,
            "signs" if key.is_active else "verifies",
            at(key.rotated_at_ms, now_ms),
            at(key.verifies_until_ms, now_ms),
        )
        for key in found
    ]
    for line in table(_COLUMNS, rows, terminal_width()) if rows else ["no keys; `ffd keys seed` makes the first"]:
        invocation.say(line)
    invocation.emit({"items": [as_fields(key) for key in found], "next": None})
