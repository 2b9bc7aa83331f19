"""`ffd signal`: send a signal to a waitpoint, with its token or as an operator. A token is never an argument (I8)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from ffd.cli.engine import Session, as_fields, with_engine
from ffd.cli.inputs import (
    EXECUTION_ID,
    TOKEN_BYTES_MAX,
    WAITPOINT_ID,
    Content,
    given_bytes,
    secret_text,
    system_user,
    text,
)
from ffd.cli.output import Group, Invocation
from ffd.core.checks import check_text
from ffd.core.errors import Validation
from ffd.core.limits import KEY_BYTES_MAX, SIGNAL_PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from ffd.core.suspension import Accepted, Duplicate

TOKEN_VARIABLE: Final = "FFD_WAITPOINT_TOKEN"  # noqa: S105  (the name of a variable, not a secret)

# The engine's bounds for an approval, whose parts make its idempotency key.
APPROVAL_NAME_BYTES_MAX: Final = 64
APPROVAL_ACTOR_BYTES_MAX: Final = 128
APPROVAL_SUFFIX_BYTES_MAX: Final = 48

_EFFECTS: Final = {
    "appended_to_waitpoint": "it counts, and the condition waits for more",
    "resume_condition_satisfied": "the condition is met and the execution resumes",
    "buffered_for_pending_waitpoint": "it is kept until the execution suspends",
}


@click.group(cls=Group)
def signal() -> None:
    """Send signals to waitpoints.

    \b
    Examples:
      ffd signal send '{fp:12}:0190a8d1-…' 0190a8d2-… approve --token-file token.txt
      ffd signal send '{fp:12}:0190a8d1-…' 0190a8d2-… approve --approve
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


@signal.command()
@click.argument("execution_id", metavar="EXECUTION", type=EXECUTION_ID)
@click.argument("waitpoint_id", metavar="WAITPOINT", type=WAITPOINT_ID)
@click.argument("name", metavar="NAME", type=text())
@click.option(
    "--token-file",
    type=Content(TOKEN_BYTES_MAX, is_secret=True),
    help=f"The waitpoint's token from a file, - for stdin. Default: ${TOKEN_VARIABLE}.",
)
@click.option("--approve", "is_approval", is_flag=True, help="Send as an operator; the engine finds the token.")
@click.option("--payload", help="The payload as text.")
@click.option(
    "--payload-file",
    type=Content(SIGNAL_PAYLOAD_BYTES_MAX),
    help="The payload from a file, - for stdin; at most 64 KiB.",
)
@click.option("--source-type", type=text(), default="cli", show_default=True, help="What kind of sender this is.")
@click.option(
    "--source",
    type=text(may_be_empty=True),
    default=system_user,
    show_default="your user name",
    help="Who sends it; conditions may count distinct senders.",
)
@click.option(
    "--idempotency-key", type=text(KEY_BYTES_MAX), help="The same key at this waitpoint within a day counts once."
)
@click.option(
    "--actor",
    type=text(may_be_empty=True),
    default=system_user,
    show_default="your user name",
    help="Who decides, with --approve.",
)
@click.pass_context
def send(
    ctx: click.Context,
    execution_id: str,
    waitpoint_id: str,
    name: str,
    token_file: bytes | None,
    is_approval: bool,
    payload: str | None,
    payload_file: bytes | None,
    source_type: str,
    source: str,
    idempotency_key: str | None,
    actor: str,
) -> None:
    """Send the signal NAME to a waitpoint.

    The token proves the right to send it. --approve needs none: it is for operators, is sent in the name of
    --actor, carries no payload, and the same decision by the same actor counts once.

    \b
    Examples:
      ffd signal send '{fp:12}:0190a8d1-…' 0190a8d2-… approve --token-file token.txt
      pass ffd/token | ffd signal send '{fp:12}:0190a8d1-…' 0190a8d2-… paid --token-file - --payload '{"sum": 12}'
      ffd signal send '{fp:12}:0190a8d1-…' 0190a8d2-… approve --approve --actor ada
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    body = given_bytes(ctx, payload, payload_file, "--payload")
    if body is not None and len(body) > SIGNAL_PAYLOAD_BYTES_MAX:
        raise click.UsageError(f"--payload: more than {SIGNAL_PAYLOAD_BYTES_MAX} bytes.", ctx)
    if is_approval:
        if token_file is not None or body is not None:
            raise click.UsageError("--approve takes neither a token nor a payload.", ctx)
        _check_approval(ctx, name, actor, idempotency_key or "")
    token = "" if is_approval else _token(ctx, token_file)

    async def work(session: Session) -> Accepted | Duplicate:
        from ffd.core.suspension import Signal

        if is_approval:
            return await session.engine.deliver_approval_signal(
                execution_id, waitpoint_id, name, actor=actor, idempotency_suffix=idempotency_key or ""
            )
        sent = Signal(
            execution_id,
            waitpoint_id,
            name,
            token,
            source_type=source_type,
            source_identity=source,
            payload=body,
        )
        return await session.engine.deliver_signal(sent, idempotency_key=idempotency_key)

    invocation = ctx.ensure_object(Invocation)
    fields = as_fields(with_engine(invocation, work))
    effect = fields.get("effect")
    if effect is None:
        invocation.say(f"delivered before as {fields['signal_id']}; nothing was changed")
    else:
        invocation.say(f"delivered {fields['signal_id']}: {_EFFECTS.get(effect, effect)}")
    invocation.emit({"result": "duplicate" if effect is None else "accepted", **fields})


def _token(ctx: click.Context, content: bytes | None) -> str:
    """The token from its file or from the environment."""
    if content is not None:
        return secret_text(content, "--token-file")
    from_environment = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not from_environment:
        raise click.UsageError(f"A token is needed: --token-file PATH, ${TOKEN_VARIABLE}, or --approve.", ctx)
    return from_environment


def _check_approval(ctx: click.Context, name: str, actor: str, suffix: str) -> None:
    bounds = (
        ("NAME", name, APPROVAL_NAME_BYTES_MAX, False),
        ("--actor", actor, APPROVAL_ACTOR_BYTES_MAX, False),
        ("--idempotency-key", suffix, APPROVAL_SUFFIX_BYTES_MAX, True),
    )
    for option, value, bytes_max, may_be_empty in bounds:
        try:
            check_text(value, option, bytes_max, may_be_empty=may_be_empty)
        except Validation as error:
            raise click.BadParameter(f"with --approve: {error.detail}", ctx, param_hint=option) from None
