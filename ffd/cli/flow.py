"""`ffd flow`: look at a graph of executions, and cancel it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import click

from ffd.cli.confirm import ask, must_ask, yes_option
from ffd.cli.engine import Session, as_fields, with_engine
from ffd.cli.execution_text import at
from ffd.cli.graph import arrange, as_documents, draw
from ffd.cli.inputs import FLOW_ID, Duration, operator_options
from ffd.cli.output import EXIT_FAILED, EXIT_OK, Group, Invocation
from ffd.cli.tables import facts, terminal_width
from ffd.core.errors import NotFound
from ffd.core.flows import CancelPolicy
from ffd.core.limits import BULK_MAX, FLOW_EDGES_MAX, PAGE_MAX, WAIT_MS_MAX

if TYPE_CHECKING:
    from ffd.core.flows import EdgeSnapshot, FlowCancelled, FlowSnapshot
    from ffd.core.records import ExecutionSnapshot, Page

T = TypeVar("T")

NAMES_SHOWN_MAX: Final = 20


class _Picture(NamedTuple):
    flow: FlowSnapshot
    executions: list[ExecutionSnapshot]
    edges: list[EdgeSnapshot]
    now_ms: int


@click.group(cls=Group)
def flow() -> None:
    """Look at and cancel flows.

    \b
    Examples:
      ffd flow show 0190a8d1-…
      ffd flow cancel 0190a8d1-… --policy cancel_pending --reason "superseded"
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)


@flow.command()
@click.argument("flow_id", metavar="ID", type=FLOW_ID)
@click.option(
    "--limit", type=click.IntRange(1, BULK_MAX), default=200, show_default=True, help="How many nodes at most."
)
@click.pass_obj
def show(invocation: Invocation, flow_id: str, limit: int) -> None:
    """Show a flow and draw its graph.

    Nodes stand in layers, each below everything it waits for. AFTER names those by number: ✓ is satisfied, ✗ can
    no longer be, the others are open. On a narrow terminal ids lose their beginning; into a pipe they are whole.

    \b
    Examples:
      ffd flow show 0190a8d1-…
      ffd flow show 0190a8d1-… --limit 1000 | grep failed
      ffd flow show 0190a8d1-… --json | jq '.nodes[] | select(.public_state == "failed")'
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    picture = with_engine(invocation, lambda session: _look(session, flow_id))
    nodes = arrange(picture.executions, picture.edges)
    for line in facts(_header(picture.flow, picture.now_ms)):
        invocation.say(line)
    if nodes:
        invocation.say("")
        for line in draw(nodes, limit, terminal_width()):
            invocation.say(line)
    left = sum(picture.flow.members.values()) - len(nodes[:limit])
    if left > 0:
        invocation.say(f"… and {left} more")
    invocation.emit({**as_fields(picture.flow), "nodes": as_documents(nodes[:limit]), "nodes_left_out": max(0, left)})


async def _look(session: Session, flow_id: str) -> _Picture:
    engine = session.engine
    found = await engine.describe_flow(flow_id)
    if found is None:
        raise NotFound("flow", flow_id)
    executions = await _all(
        lambda after: engine.list_executions(flow_id=flow_id, after=after, limit=PAGE_MAX), BULK_MAX
    )
    edges = await _all(lambda after: engine.list_edges(flow_id, after=after, limit=PAGE_MAX), FLOW_EDGES_MAX)
    return _Picture(found, executions, edges, session.now_ms)


async def _all(page_after: Callable[[str | None], Awaitable[Page[T]]], most: int) -> list[T]:
    """Every page, up to a bound."""
    page = await page_after(None)
    items = list(page.items)
    while page.next is not None and len(items) < most:
        page = await page_after(page.next)
        items += page.items
    return items[:most]


def _header(found: FlowSnapshot, now_ms: int) -> list[tuple[str, str]]:
    members = ", ".join(f"{count} {state}" for state, count in sorted(found.members.items()) if count)
    pairs = [
        ("flow", found.flow_id),
        ("state", f"{found.state}{'' if found.is_sealed else ', takes new members'}"),
        ("kind", found.kind),
        ("namespace", found.namespace),
        ("members", members),
        ("edges", str(found.edge_count)),
        ("tags", ", ".join(f"{key}={value}" for key, value in sorted(found.tags.items()))),
        ("created", at(found.created_at_ms, now_ms)),
        ("ended", at(found.terminal_at_ms, now_ms)),
    ]
    if found.cancellation_policy is not None:
        pairs.append(
            ("cancelled", ": ".join(part for part in (found.cancellation_policy, found.cancel_reason) if part))
        )
    return pairs


@flow.command()
@click.argument("flow_id", metavar="ID", type=FLOW_ID)
@click.option(
    "--policy",
    type=click.Choice([policy.value for policy in CancelPolicy]),
    default=CancelPolicy.CANCEL_ALL.value,
    show_default=True,
    help="Cancel all members, those that neither run nor are suspended, or only the flow itself.",
)
@click.option(
    "--wait",
    "wait_ms",
    type=Duration(1, WAIT_MS_MAX),
    help="Stay until all of them are cancelled, this long at most; exit 1 when some are not.",
)
@operator_options
@yes_option
@click.pass_obj
def cancel(
    invocation: Invocation, flow_id: str, policy: str, wait_ms: int | None, reason: str, actor: str, is_yes: bool
) -> int:
    """Cancel a flow and, by its policy, its members.

    Members that cannot be cancelled at once are left to the daemon, or to this command with --wait.

    \b
    Examples:
      ffd flow cancel 0190a8d1-… --reason "superseded"
      ffd flow cancel 0190a8d1-… --policy cancel_pending --yes
      ffd flow cancel 0190a8d1-… --wait 30s --yes --json | jq .pending_execution_ids
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if must_ask(invocation, is_yes=is_yes):
        found, now_ms = with_engine(invocation, lambda session: _describe(session, flow_id))
        ask("This flow will be cancelled:", [*_header(found, now_ms), ("policy", policy)], "Cancel it?")

    async def work(session: Session) -> FlowCancelled:
        return await session.engine.cancel_flow(flow_id, policy=policy, reason=reason, actor=actor, wait_ms=wait_ms)

    cancelled = with_engine(invocation, work)
    pending = cancelled.pending_execution_ids
    left = f"; {len(pending)} of its members not yet" if pending else ""
    invocation.say(f"cancelled flow {flow_id} ({cancelled.policy}){left}")
    invocation.emit(as_fields(cancelled))
    if pending:
        invocation.note("not cancelled yet; the daemon goes on with them:")
        for name in pending[:NAMES_SHOWN_MAX]:
            invocation.note(f"  {name}")
        if len(pending) > NAMES_SHOWN_MAX:
            invocation.note(f"  … and {len(pending) - NAMES_SHOWN_MAX} more")
    return EXIT_FAILED if pending and wait_ms is not None else EXIT_OK


async def _describe(session: Session, flow_id: str) -> tuple[FlowSnapshot, int]:
    found = await session.engine.describe_flow(flow_id)
    if found is None:
        raise NotFound("flow", flow_id)
    return found, session.now_ms
