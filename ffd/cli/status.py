"""`ffd status`: the whole system on one screen, once or again and again."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from ffd.cli.engine import REASONS, Session, as_fields, with_engine
from ffd.cli.output import Command, Invocation, printable, to_json
from ffd.cli.tables import Column, cut, facts, table, terminal_width
from ffd.cli.times import ago, duration, iso
from ffd.core.errors import EngineError, Unavailable

if TYPE_CHECKING:
    from ffd.daemon.status import NodeStatus, Status
    from ffd.ops.runtime import Runtime
    from ffd.reconcilers.registry import Reconciler

LANES_MAX: Final = 1000
INTERVAL_S: Final = 2
INTERVAL_S_MAX: Final = 3600
# However short the interval, counting takes at most one part in this many of the time.
DUTY: Final = 5

_HOME: Final = "\x1b[H"
_CLEAR: Final = "\x1b[2J\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_CLEAR_BELOW: Final = "\x1b[J"

_NODES: Final = (
    Column("NODE"),
    Column("ID", is_id=True, spare=2),
    Column("VERSION", is_whole=True, spare=1),
    Column("STATE", is_whole=True),
    Column("STARTED", is_whole=True, spare=3),
    Column("PARTITIONS", is_whole=True),
)
_LANES: Final = (
    Column("LANE"),
    Column("WAITING", is_whole=True),
    Column("OLDEST", is_whole=True),
    Column("RUNNING", is_whole=True),
    Column("DELAYED", is_whole=True, spare=1),
    Column("SUSPENDED", is_whole=True, spare=2),
    Column("WAITING_CHILDREN", is_whole=True, spare=3),
)
_RECONCILERS: Final = (
    Column("RECONCILER"),
    Column("DUE NOW", is_whole=True),
    Column("LAG", is_whole=True),
    Column("QUARANTINED", is_whole=True, spare=1),
)


@click.command(cls=Command)
@click.option("--watch", "is_watch", is_flag=True, help="Look again and again until Ctrl-C.")
@click.option(
    "--interval",
    "interval_s",
    type=click.IntRange(1, INTERVAL_S_MAX),
    metavar="SECONDS",
    help=f"With --watch: how long between two looks. Default: {INTERVAL_S}.",
)
@click.option(
    "--lanes",
    "lanes_max",
    type=click.IntRange(1, LANES_MAX),
    default=20,
    show_default=True,
    help="How many lanes, the largest first.",
)
@click.pass_obj
def status(invocation: Invocation, is_watch: bool, interval_s: int | None, lanes_max: int) -> None:
    """Show what is alive, what waits and what is overdue.

    Nodes are daemons (`ffd run`); each sweeps the partitions it owns. A reconciler that stays due has nobody who
    sweeps for it, or cannot keep up. Asks the database only, so it works with no daemon running.

    \b
    Examples:
      ffd status
      ffd status --watch --interval 5
      ffd status --json | jq .partitions.unowned
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if interval_s is not None and not is_watch:
        raise click.UsageError("--interval needs --watch.")
    settings = invocation.settings()

    async def work(session: Session) -> None:
        from ffd.daemon.status import read_status
        from ffd.reconcilers.registry import load_reconcilers

        runtime = session.runtime
        runtime.retention = settings.retention
        reconcilers = load_reconcilers()
        if is_watch:
            await _watch(invocation, runtime, reconcilers, lanes_max, interval_s or INTERVAL_S)
            return
        found = await read_status(runtime, reconcilers, lanes_max)
        for line in status_lines(found, terminal_width()):
            invocation.say(line)
        invocation.emit(as_fields(found))

    try:
        with_engine(invocation, work)
    except KeyboardInterrupt:
        # How a watch is meant to end.
        if not is_watch:
            raise


async def _watch(
    invocation: Invocation, runtime: Runtime, reconcilers: dict[str, Reconciler], lanes_max: int, interval_s: int
) -> None:
    """Look until cancelled; a database that is away is told and waited for."""
    import anyio

    from ffd.daemon.status import read_status

    tell = _teller(invocation, interval_s)
    found: Status | None = None
    while True:
        began = time.monotonic()
        trouble = None
        try:
            found = await read_status(runtime, reconcilers, lanes_max)
        except EngineError as error:
            trouble = error
        tell(found, trouble)
        await anyio.sleep(max(interval_s, (DUTY - 1) * (time.monotonic() - began)))


def _teller(invocation: Invocation, interval_s: int) -> Callable[[Status | None, EngineError | None], None]:
    if invocation.json:
        return _Lines(invocation)
    is_screen = terminal_width() is not None and os.environ.get("TERM") != "dumb"
    return _Screen(interval_s) if is_screen else _Lines(invocation)


class _Lines:
    """A watch for a pipe or a file: one sample after the other; trouble once, on stderr."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        self._said = ""

    def __call__(self, found: Status | None, trouble: EngineError | None) -> None:
        """Tell a sample, or why there is none."""
        text = "" if trouble is None else _trouble_text(trouble)
        if trouble is not None and text != self._said:
            self._invocation.note(f"{text}; trying again")
            if self._invocation.json:
                click.echo(to_json({"error": {"code": trouble.code, "message": str(trouble)}}), err=True)
        self._said = text
        if trouble is not None or found is None:
            return
        self._invocation.emit(as_fields(found))
        for line in [iso(found.now_ms), *status_lines(found, terminal_width()), ""]:
            self._invocation.say(line)


class _Screen:
    """A watch for a terminal: each sample in the place of the last one. In trouble the last one stays."""

    def __init__(self, interval_s: int) -> None:
        self._interval_s = interval_s
        self._start = _CLEAR

    def __call__(self, found: Status | None, trouble: EngineError | None) -> None:
        """Draw a sample, or why there is no new one."""
        width, height = shutil.get_terminal_size()
        at = "" if found is None else iso(found.now_ms)
        lines = [f"{at}  every {self._interval_s}s, Ctrl-C ends" if at else "Ctrl-C ends"]
        if trouble is not None:
            lines.append(f"{_trouble_text(trouble)}; trying again{'; below is the last sample' if at else ''}")
        lines += ["", *([] if found is None else status_lines(found, width))]
        if len(lines) >= height:
            lines[height - 2 :] = ["… enlarge the window to see the rest"]
        # One write, and nothing is cleared before it is written over: no flicker.
        frame = "\n".join(f"{cut(printable(line), width)}{_CLEAR_LINE}" for line in lines)
        sys.stdout.write(f"{self._start}{frame}\n{_CLEAR_BELOW}")
        sys.stdout.flush()
        self._start = _HOME


def _trouble_text(trouble: EngineError) -> str:
    if isinstance(trouble, Unavailable):
        return f"the database is unavailable: {REASONS.get(trouble.detail, trouble.detail)}"
    return str(trouble)


def status_lines(found: Status, width: int | None) -> list[str]:
    """A sample in words: nodes, partitions, lanes, reconcilers."""
    return [
        *_node_lines(found, width),
        "",
        *facts([("partitions", _partition_text(found)), ("quarantined", _rows_text(found.quarantined))]),
        "",
        *_lane_lines(found, width),
        "",
        *_reconciler_lines(found, width),
    ]


def _node_lines(found: Status, width: int | None) -> list[str]:
    rows = [
        (
            node.name,
            node.node_id,
            node.version,
            "alive" if node.is_alive else f"dead for {duration(max(0, found.now_ms - node.expires_at_ms))}",
            ago(node.started_at_ms, found.now_ms),
            _owned_text(node),
        )
        for node in found.nodes
    ]
    lines = table(_NODES, rows, width) if rows else []
    if found.nodes_left_out:
        lines.append(f"… and {found.nodes_left_out} more")
    if not found.is_swept:
        lines = ["no node is alive: nothing is being swept; start `ffd run`", *([""] if rows else []), *lines]
    return lines


def _owned_text(node: NodeStatus) -> str:
    return str(node.partitions) if node.is_alive or not node.partitions else f"{node.partitions} left behind"


def _partition_text(found: Status) -> str:
    each = found.partitions
    return f"{each.owned} of {each.total} owned" + (f", {each.unowned} unowned" if each.unowned else "")


def _rows_text(rows: int) -> str:
    return f"{rows} row{'' if rows == 1 else 's'}"


def _lane_lines(found: Status, width: int | None) -> list[str]:
    if found.lanes is None:
        return ["lanes: too much to count within database.statement_timeout_ms"]
    if not found.lanes:
        return ["no executions that have not ended"]
    rows = [
        (
            each.lane,
            str(each.waiting),
            "-" if each.oldest_ms is None else duration(max(0, each.oldest_ms)),
            str(each.running),
            str(each.delayed),
            str(each.suspended),
            str(each.waiting_children),
        )
        for each in found.lanes
    ]
    lines = table(_LANES, rows, width)
    if found.lanes_left_out:
        lines.append(f"… and {found.lanes_left_out} more; --lanes shows them")
    return lines


def _reconciler_lines(found: Status, width: int | None) -> list[str]:
    rows = []
    for each in found.reconcilers:
        due = (
            f"{each.due_partitions} partition{'' if each.due_partitions == 1 else 's'}" if each.due_partitions else "-"
        )
        lag = duration(each.lag_ms)
        rows.append((each.reconciler, due, lag if each.due_partitions else "-", str(each.quarantined or "-")))
    return table(_RECONCILERS, rows, width)
