"""The commands of `ffd execution` that steer: cancel, revoke, replay, priority, resume.

What destroys asks first: a cancel ends the work, a revoke takes it out of a worker's hands, a replay drops a stored
result. The command that is confirmed hits what was shown: a lease that has moved meanwhile is not revoked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ffd.cli.confirm import ask, must_ask, yes_option
from ffd.cli.engine import Session, as_fields, with_engine
from ffd.cli.execution_text import lease_of, summary
from ffd.cli.inputs import EXECUTION_ID, LEASE_ID, Duration, operator_options, text
from ffd.cli.output import Command, Invocation
from ffd.cli.times import duration
from ffd.core.errors import NotFound
from ffd.core.limits import PRIORITY_MAX, PRIORITY_MIN, RESUME_DELAY_MS_MAX

if TYPE_CHECKING:
    from ffd.core.control import AlreadySatisfied, Cancelled, PriorityChanged, Replayed, Revoked
    from ffd.core.records import ExecutionSnapshot


def _look(invocation: Invocation, execution_id: str) -> tuple[ExecutionSnapshot, int]:
    """The execution as it is now, for whoever has to decide."""

    async def work(session: Session) -> tuple[ExecutionSnapshot, int]:
        snapshot = await session.engine.describe_execution(execution_id)
        if snapshot is None:
            raise NotFound("execution", execution_id)
        return snapshot, session.now_ms

    return with_engine(invocation, work)


@click.command(cls=Command)
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@operator_options
@yes_option
@click.pass_obj
def cancel(invocation: Invocation, execution_id: str, reason: str, actor: str, is_yes: bool) -> None:
    """End an execution that has not ended.

    Whoever runs it is fenced: nothing that its worker does afterwards counts. Cancelling again changes nothing.

    \b
    Examples:
      ffd execution cancel '{fp:12}:0190a8d1-…' --reason "wrong customer"
      ffd execution cancel '{fp:12}:0190a8d1-…' --yes --json
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if must_ask(invocation, is_yes=is_yes):
        snapshot, now_ms = _look(invocation, execution_id)
        ask("This execution will be cancelled:", summary(snapshot, now_ms), "Cancel it?")

    async def work(session: Session) -> Cancelled:
        return await session.engine.cancel_execution(execution_id, reason=reason, actor=actor)

    cancelled = with_engine(invocation, work)
    invocation.say(f"cancelled {cancelled.execution_id}")
    invocation.emit(as_fields(cancelled))


@click.command(cls=Command)
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@click.option("--worker-instance", type=text(), help="Only if this worker instance has the lease.")
@click.option("--lease-id", type=LEASE_ID, help="Only this lease, as `ffd execution show` names it.")
@operator_options
@yes_option
@click.pass_obj
def revoke(
    invocation: Invocation,
    execution_id: str,
    worker_instance: str | None,
    lease_id: str | None,
    reason: str,
    actor: str,
    is_yes: bool,
) -> None:
    """Take a running execution away from its worker.

    Other workers can claim it at once; whatever its worker still does is refused. When the lease is gone
    already, nothing happens and the command succeeds.

    \b
    Examples:
      ffd execution revoke '{fp:12}:0190a8d1-…' --reason "worker hangs"
      ffd execution revoke '{fp:12}:0190a8d1-…' --worker-instance mailer-1 --yes
      ffd execution revoke '{fp:12}:0190a8d1-…' --lease-id pg:0190a8d1-…:0:3 --yes
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if must_ask(invocation, is_yes=is_yes):
        snapshot, now_ms = _look(invocation, execution_id)
        standing = lease_of(snapshot)
        if standing is not None:
            ask("This execution will lose its worker:", summary(snapshot, now_ms), "Revoke the lease?")
            # What was agreed to, and not the lease of whoever comes next.
            lease_id = lease_id or standing

    async def work(session: Session) -> Revoked | AlreadySatisfied:
        return await session.engine.revoke_lease(
            execution_id,
            reason=reason,
            actor=actor,
            worker_instance_id=worker_instance or "",
            expected_lease_id=lease_id,
        )

    answer = with_engine(invocation, work)
    fields = as_fields(answer)
    if "lease_id" in fields:
        invocation.say(f"revoked {fields['lease_id']}; other workers can claim the execution now")
    else:
        invocation.say(f"nothing to revoke: {fields['reason']}")
    result = "revoked" if "lease_id" in fields else "already_satisfied"
    invocation.emit({"result": result, "execution_id": execution_id, **fields})


@click.command(cls=Command)
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@operator_options
@yes_option
@click.pass_obj
def replay(invocation: Invocation, execution_id: str, reason: str, actor: str, is_yes: bool) -> None:
    """Run an ended execution again, with its payload and policy.

    Its result, its deadline and its signals are dropped; asks first when there is a result to lose.

    \b
    Examples:
      ffd execution replay '{fp:12}:0190a8d1-…' --reason "the mail server is back"
      ffd execution replay '{fp:12}:0190a8d1-…' --yes --json
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)
    if not is_yes:
        snapshot, now_ms = _look(invocation, execution_id)
        if snapshot.result_size is not None and must_ask(invocation, is_yes=is_yes):
            pairs = [*summary(snapshot, now_ms), ("result", f"{snapshot.result_size} bytes, which will be dropped")]
            ask("This execution will run again:", pairs, "Replay it?")

    async def work(session: Session) -> Replayed:
        return await session.engine.replay_execution(execution_id, reason=reason, actor=actor)

    replayed = with_engine(invocation, work)
    invocation.say(f"replayed {execution_id}: it is {replayed.public_state}")
    invocation.emit({"execution_id": execution_id, **as_fields(replayed)})


@click.command(cls=Command)
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@click.argument("new_priority", metavar="N", type=click.IntRange(PRIORITY_MIN, PRIORITY_MAX, clamp=True))
@operator_options
@click.pass_obj
def priority(invocation: Invocation, execution_id: str, new_priority: int, reason: str, actor: str) -> None:
    """Move a waiting execution up or down its lane.

    N is 0 to 9000, higher runs first; what lies outside is moved to the nearer end.

    \b
    Examples:
      ffd execution priority '{fp:12}:0190a8d1-…' 9000
      ffd execution priority '{fp:12}:0190a8d1-…' 0 --reason "can wait"
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)

    async def work(session: Session) -> PriorityChanged:
        return await session.engine.change_priority(execution_id, new_priority, reason=reason, actor=actor)

    changed = with_engine(invocation, work)
    invocation.say(f"priority of {execution_id}: {changed.old_priority} → {changed.new_priority}")
    invocation.emit({"execution_id": execution_id, **as_fields(changed)})


@click.command(cls=Command)
@click.argument("execution_id", metavar="ID", type=EXECUTION_ID)
@click.option(
    "--delay",
    "resume_delay_ms",
    type=Duration(0, RESUME_DELAY_MS_MAX),
    default=0,
    help="Let workers have it only after this time: 30s, 5m, 2h.",
)
@operator_options
@click.pass_obj
def resume(invocation: Invocation, execution_id: str, resume_delay_ms: int, reason: str, actor: str) -> None:
    """Resume a suspended execution, whatever it waits for.

    Its waitpoints close: signals that come later are refused.

    \b
    Examples:
      ffd execution resume '{fp:12}:0190a8d1-…' --reason "approved by phone"
      ffd execution resume '{fp:12}:0190a8d1-…' --delay 5m
    """  # noqa: D301  (click reads the backspace as: keep these lines as they are)

    async def work(session: Session) -> None:
        await session.engine.resume_execution(execution_id, reason=reason, actor=actor, resume_delay_ms=resume_delay_ms)

    with_engine(invocation, work)
    later = f"; workers can have it in {duration(resume_delay_ms)}" if resume_delay_ms else ""
    invocation.say(f"resumed {execution_id}{later}")
    invocation.emit({"execution_id": execution_id, "resume_delay_ms": resume_delay_ms})
