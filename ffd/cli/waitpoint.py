"""`ffd waitpoint`: what suspended executions wait for. A fingerprint stands for each token (I8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from ffd.cli.engine import Session, with_engine
from ffd.cli.inputs import EXECUTION_ID, LANE, LIMIT, WAITPOINT_ID
from ffd.cli.output import Group, Invocation
from ffd.cli.tables import Column, table, tell_page, terminal_width
from ffd.cli.times import ago

if TYPE_CHECKING:
    from ffd.core.records import Page
    from ffd.core.suspension import SuspendedExecution, WaitpointInfo

_WAITPOINT_COLUMNS: Final = (
    Column("WAITPOINT", is_id=True),
    Column("KEY"),
    Column("STATE", is_whole=True),
    Column("SIGNALS"),
    Column("KID", spare=1),
    Column("FINGERPRINT", is_whole=True, spare=2),
    Column("CREATED", is_whole=True, spare=3),
    Column("EXPIRES", is_whole=True),
)
_SUSPENDED_COLUMNS: Final = (
    Column("EXECUTION", is_id=True),
    Column("LANE"),
    Column("REASON"),
    Column("SUSPENDED", is_whole=True),
    Column("TIMEOUT", is_whole=True),
)


@click.group(cls=Group)
def waitpoint() -> None:
    """Look at what suspended executions wait for.

    \b
    Examples:
      ffd waitpoint list --suspended
      ffd waitpoint list '{fp:12}:0190a8d1-…'
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


@waitpoint.command("list")
@click.argument("execution_id", metavar="[ID]", type=EXECUTION_ID, required=False)
@click.option("--suspended", "is_suspended", is_flag=True, help="List suspended executions instead.")
@click.option("--lane", type=LANE, help="With --suspended: only this lane.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="How many at once.")
@click.option("--after", help="Go on after this id; the previous page ends with it.")
@click.pass_context
def list_(
    ctx: click.Context, execution_id: str | None, is_suspended: bool, lane: str | None, limit: int, after: str | None
) -> None:
    """List the open waitpoints of an execution, or suspended executions.

    Tokens are never listed; KID and FINGERPRINT tell which one belongs to a waitpoint.

    \b
    Examples:
      ffd waitpoint list '{fp:12}:0190a8d1-…'
      ffd waitpoint list --suspended --lane mail
      ffd waitpoint list '{fp:12}:0190a8d1-…' --json | jq -r '.items[].waitpoint_id'
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if (execution_id is None) == (not is_suspended):
        raise click.UsageError("Give the ID of an execution, or --suspended.", ctx)
    if lane is not None and not is_suspended:
        raise click.UsageError("--lane belongs to --suspended.", ctx)
    invocation = ctx.ensure_object(Invocation)
    cursor = _cursor(ctx, after, is_execution=is_suspended)
    if execution_id is None:
        _list_suspended(invocation, lane, limit, cursor)
    else:
        _list_waitpoints(invocation, execution_id, limit, cursor)


def _seen(at_ms: int | None, now_ms: int) -> str:
    return "" if at_ms is None else ago(at_ms, now_ms)


def _cursor(ctx: click.Context, after: str | None, *, is_execution: bool) -> str | None:
    param = next(each for each in ctx.command.params if each.name == "after")
    cursor: str | None = (EXECUTION_ID if is_execution else WAITPOINT_ID)(after, param, ctx)
    return cursor


def _list_suspended(invocation: Invocation, lane: str | None, limit: int, after: str | None) -> None:
    async def work(session: Session) -> tuple[Page[SuspendedExecution], int]:
        return await session.engine.list_suspended(lane=lane, after=after, limit=limit), session.now_ms

    page, now_ms = with_engine(invocation, work)
    rows = [
        (
            each.execution_id,
            each.lane,
            each.reason or "",
            _seen(each.suspended_at_ms, now_ms),
            _seen(each.timeout_at_ms, now_ms),
        )
        for each in page.items
    ]
    words = ["waitpoint", "list", "--suspended", *([] if lane is None else ["--lane", lane]), "--limit", str(limit)]
    lines = table(_SUSPENDED_COLUMNS, rows, terminal_width())
    tell_page(invocation, page, lines, command=words, empty="no suspended executions")


def _list_waitpoints(invocation: Invocation, execution_id: str, limit: int, after: str | None) -> None:
    async def work(session: Session) -> tuple[Page[WaitpointInfo], int]:
        page = await session.engine.list_pending_waitpoints(execution_id, after=after, limit=limit)
        return page, session.now_ms

    page, now_ms = with_engine(invocation, work)
    rows = [
        (
            each.waitpoint_id,
            each.key,
            each.state,
            ", ".join(each.required_signal_names) or "any",
            each.token_kid,
            each.token_fingerprint,
            _seen(each.created_at_ms, now_ms),
            _seen(each.expires_at_ms, now_ms),
        )
        for each in page.items
    ]
    words = ["waitpoint", "list", execution_id, "--limit", str(limit)]
    lines = table(_WAITPOINT_COLUMNS, rows, terminal_width())
    tell_page(invocation, page, lines, command=words, empty="no open waitpoints")
