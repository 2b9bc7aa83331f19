"""`ffd execution`: create executions and look at them. What steers them is in `ffd.cli.control`."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

import click

from ffd.cli.control import cancel, priority, replay, resume, revoke
from ffd.cli.engine import Session, as_fields, with_engine
from ffd.cli.execution_text import attempt_lines, execution_lines
from ffd.cli.explain_text import paragraph
from ffd.cli.inputs import (
    EXECUTION_ID,
    FLOW_ID,
    LANE,
    LIMIT,
    TAG,
    Content,
    Duration,
    given_bytes,
    take_capabilities,
    take_tags,
    text,
)
from ffd.cli.output import CliError, Group, Invocation
from ffd.cli.tables import Column, table, tell_page, terminal_width
from ffd.cli.times import ago
from ffd.core.errors import NotFound
from ffd.core.limits import (
    DURATION_MS_MAX,
    KEY_BYTES_MAX,
    KIND_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    RETRIES_MAX,
)
from ffd.core.state import PublicState

if TYPE_CHECKING:
    from ffd.core.policy import ExecutionPolicy
    from ffd.core.records import AttemptSnapshot, Created, ExecutionSnapshot, Explanation, Page

PARAGRAPH_WIDTH_MAX: Final = 100

_COLUMNS: Final = (
    Column("EXECUTION", is_id=True),
    Column("STATE", is_whole=True),
    Column("LANE"),
    Column("KIND", spare=1),
    Column("PRIORITY", is_whole=True, spare=3),
    Column("CREATED", is_whole=True, spare=2),
    Column("WORKER", spare=4),
)


@click.group(cls=Group)
def execution() -> None:
    """Create, look at and steer executions.

    Ids have the form {fp:N}:uuid; put them in quotes. Times are the database's.

    \b
    Examples:
      ffd execution create --lane mail --kind shout --payload hello
      ffd execution list --state failed
      ffd execution explain '{fp:12}:0190a8d1-…'
      ffd execution cancel '{fp:12}:0190a8d1-…' --reason "wrong customer"
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


@execution.command()
@click.option("--lane", type=LANE, default="default", show_default=True, help="The lane whose workers run it.")
@click.option(
    "--kind", type=text(KIND_BYTES_MAX, may_be_empty=True), default="", help="What workers choose a handler by."
)
@click.option("--payload", help="The payload as text. It shows in `ps`; use --payload-file for what must not.")
@click.option(
    "--payload-file", type=Content(PAYLOAD_BYTES_MAX), help="The payload from a file, - for stdin; at most 1 MiB."
)
@click.option(
    "--priority",
    type=click.IntRange(PRIORITY_MIN, PRIORITY_MAX, clamp=True),
    default=0,
    show_default=True,
    help="Higher runs first.",
)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    callback=take_capabilities,
    help="Only workers that have it may run this. Repeatable.",
)
@click.option(
    "--delay", "delay_ms", type=Duration(0, DURATION_MS_MAX), help="Not before this time has passed: 30s, 5m, 2h."
)
@click.option(
    "--deadline", "deadline_ms", type=Duration(1, DURATION_MS_MAX), help="Expires when not done after this time."
)
@click.option(
    "--idempotency-key", type=text(KEY_BYTES_MAX), help="The same key within a day gives the first execution."
)
@click.option(
    "--tag", "tags", type=TAG, multiple=True, callback=take_tags, help="A tag such as shop.customer=c-9. Repeatable."
)
@click.option("--namespace", type=text(), default="default", show_default=True, help="The namespace it belongs to.")
@click.option("--flow", "flow_id", type=FLOW_ID, help="Make it a member of this open flow.")
@click.option("--id", "execution_id", type=EXECUTION_ID, help="Its id. Default: a new one.")
@click.option("--max-retries", type=click.IntRange(0, RETRIES_MAX), help="Retries after a failure. Default: 3.")
@click.option(
    "--attempt-timeout", "attempt_timeout_ms", type=Duration(1, DURATION_MS_MAX), help="The most one attempt may take."
)
@click.pass_context
def create(
    ctx: click.Context,
    /,
    payload: str | None,
    payload_file: bytes | None,
    delay_ms: int | None,
    deadline_ms: int | None,
    namespace: str,
    max_retries: int | None,
    attempt_timeout_ms: int | None,
    **fields: Any,
) -> None:
    """Create an execution and print its id.

    --delay and --deadline count from now on the database clock.

    \b
    Examples:
      ffd execution create --lane mail --kind shout --payload hello
      ffd execution create --payload-file order.json --tag shop.customer=c-9 --idempotency-key order-17
      generate | ffd execution create --payload-file - --delay 5m --deadline 1h
      id=$(ffd execution create --lane mail) && ffd execution show "$id"
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    invocation = ctx.ensure_object(Invocation)
    body = given_bytes(ctx, payload, payload_file, "--payload") or b""
    if len(body) > PAYLOAD_BYTES_MAX:
        raise click.UsageError(f"--payload: more than {PAYLOAD_BYTES_MAX} bytes.", ctx)
    policy = _policy(max_retries, attempt_timeout_ms)

    async def work(session: Session) -> Created:
        return await session.engine.create_execution(
            payload=body,
            policy=policy,
            delay_until_ms=None if delay_ms is None else session.now_ms + delay_ms,
            deadline_at_ms=None if deadline_ms is None else session.now_ms + deadline_ms,
            required_capabilities=fields.pop("capabilities"),
            **fields,
        )

    created = with_engine(invocation, work, namespace=namespace)
    if created.is_duplicate:
        invocation.note(f"existed already, {created.public_state}; nothing was created")
    invocation.say(created.execution_id)
    invocation.emit(as_fields(created))


def _policy(max_retries: int | None, attempt_timeout_ms: int | None) -> ExecutionPolicy | None:
    """The policy that the options ask for; None leaves the defaults to the engine."""
    from ffd.core.policy import ExecutionPolicy, RetryPolicy

    if max_retries is None and attempt_timeout_ms is None:
        return None
    retry = RetryPolicy() if max_retries is None else RetryPolicy(max_retries=max_retries)
    return ExecutionPolicy(retry=retry, attempt_timeout_ms=attempt_timeout_ms)


@execution.command("list")
@click.option("--lane", type=LANE, help="Only this lane.")
@click.option("--state", type=click.Choice([state.value for state in PublicState]), help="Only this state.")
@click.option("--flow", type=FLOW_ID, help="Only members of this flow.")
@click.option("--namespace", type=text(), help="Only this namespace.")
@click.option("--tag", type=TAG, help="Only with this tag.")
@click.option("--limit", type=LIMIT, default=50, show_default=True, help="How many at once.")
@click.option("--after", type=EXECUTION_ID, help="Go on after this id; the previous page ends with it.")
@click.pass_obj
def list_(
    invocation: Invocation,
    lane: str | None,
    state: str | None,
    flow: str | None,
    namespace: str | None,
    tag: tuple[str, str] | None,
    limit: int,
    after: str | None,
) -> None:
    """List executions, the newest ids first.

    A terminal shows what fits, a pipe gets everything. --state and --flow are fast; other filters
    alone are applied while walking, so a rare tag among millions takes time.

    \b
    Examples:
      ffd execution list --state failed
      ffd execution list --lane mail --tag shop.customer=c-9 --limit 200
      ffd execution list --state running --json | jq -r '.items[].execution_id'
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)

    async def work(session: Session) -> tuple[Page[ExecutionSnapshot], int]:
        page = await session.engine.list_executions(
            lane=lane, public_state=state, flow_id=flow, namespace=namespace, tag=tag, after=after, limit=limit
        )
        return page, session.now_ms

    page, now_ms = with_engine(invocation, work)
    rows = [
        (
            each.execution_id,
            each.public_state,
            each.lane,
            each.kind,
            str(each.priority),
            ago(each.created_at_ms, now_ms),
            each.worker_id or "",
        )
        for each in page.items
    ]
    given = {"--lane": lane, "--state": state, "--flow": flow, "--namespace": namespace}
    given["--tag"] = None if tag is None else "=".join(tag)
    words = ["execution", "list"]
    for name, value in given.items():
        words += [] if value is None else [name, value]
    tell_page(
        invocation,
        page,
        table(_COLUMNS, rows, terminal_width()),
        command=[*words, "--limit", str(limit)],
        empty="no executions",
    )


@execution.command()
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@click.option("--result", "is_result", is_flag=True, help="Write the bytes of its result to stdout, and nothing else.")
@click.pass_obj
def show(invocation: Invocation, execution_id: str, is_result: bool) -> None:
    """Show an execution and its attempts.

    Payloads are never shown, results only with --result.

    \b
    Examples:
      ffd execution show '{fp:12}:0190a8d1-…'
      ffd execution show '{fp:12}:0190a8d1-…' --result > result.bin
      ffd execution show '{fp:12}:0190a8d1-…' --json | jq .attempts
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if is_result:
        if invocation.json:
            raise click.UsageError("--result and --json exclude each other: a result is bytes.")
        _write_result(invocation, execution_id)
        return

    async def work(session: Session) -> tuple[ExecutionSnapshot, list[AttemptSnapshot], int]:
        attempts = await session.engine.list_attempts(execution_id)
        snapshot = await session.engine.describe_execution(execution_id)
        if snapshot is None:
            raise NotFound("execution", execution_id)
        return snapshot, attempts, session.now_ms

    snapshot, attempts, now_ms = with_engine(invocation, work)
    for line in execution_lines(snapshot, now_ms):
        invocation.say(line)
    invocation.say("")
    for line in attempt_lines(attempts, terminal_width()):
        invocation.say(line)
    invocation.emit({**as_fields(snapshot), "attempts": [as_fields(attempt) for attempt in attempts]})


def _write_result(invocation: Invocation, execution_id: str) -> None:
    async def work(session: Session) -> bytes:
        result = await session.engine.get_execution_result(execution_id)
        if result is None:
            snapshot = await session.engine.describe_execution(execution_id)
            if snapshot is None:
                raise NotFound("execution", execution_id)
            raise CliError("no_result", f"{execution_id} has no result: it is {snapshot.public_state}")
        return result

    result = with_engine(invocation, work)
    sys.stdout.buffer.write(result)
    sys.stdout.buffer.flush()


@execution.command()
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@click.pass_obj
def explain(invocation: Invocation, execution_id: str) -> None:
    """Say why an execution is not running, and what to do.

    \b
    Examples:
      ffd execution explain '{fp:12}:0190a8d1-…'
      ffd execution explain '{fp:12}:0190a8d1-…' --json | jq -r .waiting_for
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)

    async def work(session: Session) -> tuple[Explanation, int]:
        return await session.engine.explain_execution(execution_id), session.now_ms

    explanation, now_ms = with_engine(invocation, work)
    told = paragraph(execution_id, explanation, now_ms)
    width = terminal_width()
    if width is not None:
        # Commands are for copying: an id is never broken over two lines.
        told = textwrap.fill(told, min(width, PARAGRAPH_WIDTH_MAX), break_long_words=False, break_on_hyphens=False)
    invocation.say(told)
    invocation.emit({"execution_id": execution_id, **as_fields(explanation)})


for command in (cancel, revoke, replay, priority, resume):
    execution.add_command(command)
