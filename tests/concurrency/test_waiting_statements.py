"""Statements that had to wait: what they read before the wait is stale, and must not decide anything.

Each test stops an operation at a row that another session holds, lets that session change what the operation has
read, and then looks at what the operation does (design §7, postgres.md §1).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
import pytest

from ffd import (
    Claim,
    Contention,
    ContentionKind,
    Engine,
    EngineError,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    Handle,
    NewExecution,
    ResumeToken,
    RetryPolicy,
    State,
    StateKind,
)
from ffd.config import DatabaseSettings
from ffd.core.ids import new_uuid, parse_execution_id, partition_of
from ffd.db.database import open_connection
from ffd.db.pool import Connection
from ffd.db.statement import Statement
from ffd.ops.claim import CLAIM, CLAIM_MANY
from tests.concurrency.sessions import (
    assert_invariants,
    attempt_row,
    exec_row,
    held,
    until,
    until_blocked,
)
from tests.support import OTHER, WORKER, Rig

pytestmark = pytest.mark.anyio

FAR_MS = 10**15


class Waiting(NamedTuple):
    """An owner's operation that stops at a row of its execution."""

    statement: str
    row: Callable[[str], str]
    call: Callable[[Engine, Handle], Awaitable[object]]

    @property
    def moves(self) -> list[str]:
        """What a holder of that row can do to the lease without locking in the wrong order."""
        is_ordered = self.row is exec_row or self.statement in ("renew_with_event", "renew_many", "progress")
        return [move for move, commands in MOVES.items() if is_ordered or "ff_exec_core" not in "".join(commands)]


async def only(answers: Awaitable[list[Any]]) -> object:
    """The one answer of a batch, raised when it is an error."""
    (answer,) = await answers
    if isinstance(answer, EngineError):
        raise answer
    return answer


OWNERS = {
    "complete": Waiting("complete", exec_row, lambda engine, handle: engine.complete(handle, b"stale")),
    "complete_many": Waiting(
        "complete_many", exec_row, lambda engine, handle: only(engine.complete_many([(handle, b"stale")]))
    ),
    "fail": Waiting("fail", exec_row, lambda engine, handle: engine.fail(handle, "stale", FailureClass.TRANSIENT)),
    "delay": Waiting("delay", exec_row, lambda engine, handle: engine.delay(handle, FAR_MS)),
    "release": Waiting("release", exec_row, lambda engine, handle: engine.release(handle)),
    "renew": Waiting("renew_with_event", attempt_row, lambda engine, handle: engine.renew(handle)),
    "renew_many": Waiting("renew_many", attempt_row, lambda engine, handle: only(engine.renew_many([handle]))),
    "progress": Waiting("progress", attempt_row, lambda engine, handle: engine.progress(handle, percent=50)),
    # These find the attempt, not the execution, held by somebody else.
    "complete behind an attempt": Waiting("complete", attempt_row, lambda engine, handle: engine.complete(handle)),
    "fail behind an attempt": Waiting(
        "fail", attempt_row, lambda engine, handle: engine.fail(handle, "stale", FailureClass.TRANSIENT)
    ),
}

# How the lease moved while the operation waited, in SQL over one execution's rows.
MOVES = {
    # Nothing that the operation can recheck on the execution's row has changed: only the fence itself tells.
    "taken over by another worker": (
        "update ff_exec_core set lease_epoch = 3 where {key}",
        "update ff_attempt set lease_epoch = 3, worker_id = 'other', lease_expires_at_ms = 9e15::bigint where {key}",
    ),
    # As a FlowFabric worker does it: the execution's row is not even touched.
    "epoch moved on the attempt alone": ("update ff_attempt set lease_epoch = lease_epoch + 1 where {key}",),
    "expired and claimable": (
        "update ff_attempt set lease_epoch = 2, lease_expires_at_ms = null where {key}",
        "update ff_exec_core set lease_epoch = 2, lifecycle_phase = 'runnable', ownership_state = 'unowned',"
        " eligibility_state = 'eligible_now', public_state = 'waiting', attempt_state = 'attempt_interrupted',"
        " interruption = 'lease_expiry' where {key}",
    ),
    "lease run out": ("update ff_attempt set lease_expires_at_ms = 1 where {key}",),
}


def where(execution_id: str) -> str:
    key = parse_execution_id(execution_id)
    return f"partition_key = {key.partition_key} and execution_id = '{key.execution_id}'"


async def apply(holder: Connection, execution_id: str, move: str) -> None:
    for command in MOVES[move]:
        await holder.execute(command.format(key=where(execution_id)))


@pytest.mark.parametrize("operation", OWNERS)
async def test_an_owner_that_waited_while_its_lease_moved_is_refused_and_changes_nothing(
    dsn: str, rig: Rig, operation: str
) -> None:
    """Show: stale join partners. The fence is judged on its newest version, also after a wait (I1)."""
    waiting = OWNERS[operation]
    for move in waiting.moves:
        claim = await rig.running(lane=move)
        async with held(dsn, waiting.row(claim.execution_id)) as holder:
            task = asyncio.ensure_future(waiting.call(rig.engine, claim.handle))
            await until_blocked(rig.sql, waiting.statement)
            await apply(holder, claim.execution_id, move)
            after_the_move = await Rig(rig.engine, holder).fingerprint()
            await holder.execute("commit")
            (answer,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(answer, Contention | State), f"{move}: {answer!r}"
        assert answer.kind == (StateKind.LEASE_EXPIRED if move == "lease run out" else ContentionKind.LEASE_CONFLICT), (
            move
        )
        assert await rig.fingerprint() == after_the_move, move


async def test_an_owner_that_waited_for_nothing_goes_on(dsn: str, rig: Rig) -> None:
    """Show: the wait alone refuses nobody: when the holder changes nothing the operation succeeds."""
    for operation, waiting in OWNERS.items():
        claim = await rig.running(lane=operation)
        async with held(dsn, waiting.row(claim.execution_id)) as holder:
            task = asyncio.ensure_future(waiting.call(rig.engine, claim.handle))
            await until_blocked(rig.sql, waiting.statement)
            await holder.execute("rollback")
            (answer,) = await asyncio.gather(task, return_exceptions=True)
        assert not isinstance(answer, BaseException), f"{operation}: {answer!r}"
    await assert_invariants(rig.sql)


async def test_an_owner_whose_lease_ran_out_while_it_waited_is_refused(dsn: str, rig: Rig) -> None:
    """Show: a lease is judged at the time of the write, not of the call: the wait counts (I1, I7)."""
    operations = ("complete", "complete_many", "fail", "delay", "release")
    claims = {}
    for operation in operations:
        await rig.create(lane=operation)
        claims[operation] = await rig.claim(operation, lease_ttl_ms=700)
    async with held(dsn, *(exec_row(claim.execution_id) for claim in claims.values())) as holder:
        tasks = [
            asyncio.ensure_future(OWNERS[operation].call(rig.engine, claim.handle))
            for operation, claim in claims.items()
        ]
        await until_blocked(rig.sql, *operations, count=len(operations))

        async def have_run_out() -> bool:
            return bool(await rig.sql.fetchval("select bool_and(ff_now_ms() > lease_expires_at_ms) from ff_attempt"))

        await until(have_run_out, "the leases have run out")
        before = await rig.fingerprint()
        await holder.execute("rollback")
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    for operation, answer in zip(operations, answers, strict=True):
        assert isinstance(answer, State), f"{operation}: {answer!r}"
        assert answer.kind == StateKind.LEASE_EXPIRED
    assert await rig.fingerprint() == before


async def test_assert_lease_that_waited_while_its_lease_moved_is_refused(dsn: str, rig: Rig) -> None:
    """Show: assert_lease sees the fence as it is after the wait, not as its first statement saw it."""
    mine = await asyncpg.connect(dsn)
    try:
        for move in MOVES:
            claim = await rig.running(lane=move)
            async with held(dsn, exec_row(claim.execution_id)) as holder, mine.transaction():
                task = asyncio.ensure_future(rig.engine.assert_lease(claim.handle, connection=mine))
                await until_blocked(rig.sql, "hold_execution")
                await apply(holder, claim.execution_id, move)
                after_the_move = await Rig(rig.engine, holder).fingerprint()
                await holder.execute("commit")
                (answer,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(answer, Contention | State), f"{move}: {answer!r}"
            assert await rig.fingerprint() == after_the_move, move
    finally:
        await mine.close()


async def test_assert_lease_keeps_the_lease_until_the_callers_transaction_ends(dsn: str, rig: Rig) -> None:
    """Show: while a caller's transaction relies on a lease, sweeps pass by, take-overs wait, renewals go on."""
    claim = await rig.running()
    mine = await asyncpg.connect(dsn)
    try:
        async with mine.transaction():
            await rig.engine.assert_lease(claim.handle, connection=mine)
            await rig.engine.renew(claim.handle)
            await rig.sql.execute("update ff_attempt set lease_expires_at_ms = 1")
            assert await rig.expire() == 0
            grant = ResumeToken(claim.execution_id, "other", "other-1")
            task = asyncio.ensure_future(rig.engine.claim_from_resume_grant(grant))
            await until_blocked(rig.sql, "take_expired")
            assert not task.done()
        taken = await task
    finally:
        await mine.close()
    assert taken is not None
    assert taken.lease_epoch > claim.lease_epoch


@pytest.mark.parametrize("row", [exec_row, attempt_row], ids=["execution", "attempt"])
async def test_a_take_over_that_waited_for_a_renewal_takes_nothing(
    dsn: str, rig: Rig, row: Callable[[str], str]
) -> None:
    """Show: claim_from_resume_grant behind a renewal: None, and nothing changes."""
    claim = await rig.running()
    await rig.sql.execute("update ff_attempt set lease_expires_at_ms = 1")
    async with held(dsn, row(claim.execution_id)) as holder:
        grant = ResumeToken(claim.execution_id, "other", "other-1")
        task = asyncio.ensure_future(rig.engine.claim_from_resume_grant(grant))
        await until_blocked(rig.sql, "take_expired")
        await holder.execute("update ff_attempt set lease_expires_at_ms = 9e15::bigint")
        after_the_renewal = await Rig(rig.engine, holder).fingerprint()
        await holder.execute("commit")
        assert await task is None
    assert await rig.fingerprint() == after_the_renewal


async def test_a_take_over_that_waited_for_an_ending_takes_nothing(dsn: str, rig: Rig) -> None:
    """Show: claim_from_resume_grant behind a completion: refused, the ending stands alone."""
    claim = await rig.running()
    async with held(dsn, exec_row(claim.execution_id)) as holder:
        await rig.sql.execute("update ff_attempt set lease_expires_at_ms = ff_now_ms() + 60000")
        completing = asyncio.ensure_future(rig.engine.complete(claim.handle))
        await until_blocked(rig.sql, "complete")
        grant = ResumeToken(claim.execution_id, "other", "other-1")
        task = asyncio.ensure_future(rig.engine.claim_from_resume_grant(grant))
        await until_blocked(rig.sql, "take_expired")
        await holder.execute("rollback")
        await completing
        (answer,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(answer, Contention), repr(answer)
    assert answer.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert await rig.completions(claim.execution_id) == ["success"]
    await assert_invariants(rig.sql)


# Flow members


async def member(rig: Rig, lane: str = "default") -> tuple[Claim, str]:
    """A running member of a flow, and SQL that locks the flow's row."""
    flow = new_uuid()
    await rig.sql.execute(
        "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
        " values ($1, $2, 'open', 1)",
        partition_of(flow),
        flow,
    )
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=5, backoff=Fixed(0)))
    claim = await rig.running(lane=lane, flow_id=str(flow), policy=policy)
    return claim, f"select 1 from ff_flow_core where flow_id = '{flow}' for update"


MEMBER_CALLS: dict[str, Callable[[Engine, Handle], Awaitable[object]]] = {
    "complete": lambda engine, handle: engine.complete(handle),
    "fail": lambda engine, handle: engine.fail(handle, "stale", FailureClass.TRANSIENT),
    "wait_children": lambda engine, handle: engine.wait_children(handle),
}


@pytest.mark.parametrize("operation", MEMBER_CALLS)
async def test_a_member_that_waited_for_its_flow_while_its_lease_moved_is_refused(
    dsn: str, rig: Rig, operation: str
) -> None:
    """Show: the flow row is taken first; the fence is judged after it was granted."""
    for move in MOVES:
        claim, flow_row = await member(rig, move)
        async with held(dsn, flow_row) as holder:
            task = asyncio.ensure_future(MEMBER_CALLS[operation](rig.engine, claim.handle))
            await until_blocked(rig.sql, "lock_flow")
            await apply(holder, claim.execution_id, move)
            after_the_move = await Rig(rig.engine, holder).fingerprint()
            await holder.execute("commit")
            (answer,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(answer, Contention | State), f"{move}: {answer!r}"
        assert await rig.fingerprint() == after_the_move, move


@pytest.mark.parametrize("operation", ["complete", "fail"])
async def test_two_endings_of_one_member_by_its_owner_are_answered_alike(dsn: str, rig: Rig, operation: str) -> None:
    """Show: double complete and double fail of a flow member by the same owner: one ending, one answer (I2)."""
    claim, flow_row = await member(rig)
    async with held(dsn, flow_row) as holder:
        call = MEMBER_CALLS[operation]
        tasks = [asyncio.ensure_future(call(rig.engine, claim.handle)) for _ in range(2)]
        await until_blocked(rig.sql, "lock_flow", count=2)
        await holder.execute("rollback")
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert not isinstance(first, BaseException), first
    assert first == second
    await assert_invariants(rig.sql)


# Claims

PAUSED_CLAIM = """
create or replace function ff_now_ms() returns bigint language plpgsql stable parallel safe as $$
begin
  if current_query() like '/* ffd:claim */%' then
    perform pg_advisory_xact_lock_shared(42);
  end if;
  return floor(extract(epoch from clock_timestamp()) * 1000)::bigint;
end $$;
"""


@pytest.mark.parametrize("how", ["fail", "release", "lease_expiry"])
async def test_a_claim_whose_snapshot_predates_another_owner_gets_a_larger_epoch(dsn: str, rig: Rig, how: str) -> None:
    """Show: trap C. A claim that saw the execution before somebody else owned it never gives epoch 1 again."""
    await rig.sql.execute(PAUSED_CLAIM)
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=5, backoff=Fixed(0)))
    execution_id = await rig.create(policy=policy)
    async with held(dsn, "select pg_advisory_xact_lock(42)") as holder:
        task = asyncio.ensure_future(rig.engine.claim("default", **WORKER))
        await until_blocked(rig.sql, "claim")
        # The claim has its snapshot and its candidate; now another worker comes and goes.
        (other,) = await rig.engine.claim_many("default", 1, **OTHER)
        assert (other.execution_id, other.lease_epoch) == (execution_id, 1)
        if how == "fail":
            await rig.engine.fail(other.handle, "oops", FailureClass.TRANSIENT)
        elif how == "release":
            await rig.engine.release(other.handle)
        else:
            await rig.sql.execute("update ff_attempt set lease_expires_at_ms = 1")
            assert await rig.expire() == 1
        await holder.execute("commit")
        claim = await task
    assert claim is not None
    assert claim.execution_id == execution_id
    assert claim.attempt_index == (1 if how == "fail" else 0)
    assert claim.lease_epoch == (3 if how == "lease_expiry" else 2)
    await assert_invariants(rig.sql)
    await rig.engine.complete(claim.handle)
    with pytest.raises(Contention):
        await rig.engine.complete(other.handle)


async def test_a_claim_whose_candidate_was_taken_meanwhile_takes_another(dsn: str, rig: Rig) -> None:
    """Show: a claim rechecks its candidate on its newest version; it neither doubles it nor gives up."""
    await rig.sql.execute(PAUSED_CLAIM)
    first, second = await rig.create(), await rig.create()
    async with held(dsn, "select pg_advisory_xact_lock(42)") as holder:
        task = asyncio.ensure_future(rig.engine.claim("default", **WORKER))
        await until_blocked(rig.sql, "claim")
        (other,) = await rig.engine.claim_many("default", 1, **OTHER)
        assert other.execution_id == first
        await holder.execute("commit")
        claim = await task
    assert claim is not None
    assert claim.execution_id == second
    await assert_invariants(rig.sql)


async def test_claims_pass_by_locked_executions_without_waiting(dsn: str, rig: Rig) -> None:
    """Show: SKIP LOCKED. A held execution at the head delays nobody and is claimable afterwards."""
    first, second = await rig.create(priority=5), await rig.create()
    async with held(dsn, exec_row(first)) as holder:
        claim = await asyncio.wait_for(rig.engine.claim("default", **WORKER), 5)
        assert claim is not None
        assert claim.execution_id == second
        assert await asyncio.wait_for(rig.engine.claim("default", **WORKER), 5) is None
        assert await asyncio.wait_for(rig.engine.claim_many("default", 5, **WORKER), 5) == []
        await holder.execute("rollback")
    assert (await rig.claim()).execution_id == first


@asynccontextmanager
async def claiming(dsn: str, statement: Statement, *limit: int) -> AsyncIterator[list[asyncpg.Record]]:
    """A claim whose transaction is kept open, with the settings of the engine's own sessions."""
    connection = await open_connection(DatabaseSettings(dsn=dsn), statement.planning)
    try:
        await connection.execute("begin")
        capabilities = ["a", "b", "c"]
        yield await connection.fetch(statement.sql, "default", capabilities, "w", "w-1", 30_000, *limit)
    finally:
        await connection.close()


@pytest.mark.parametrize("sets", [1, 5])
async def test_a_claim_locks_exactly_the_executions_it_takes(dsn: str, rig: Rig, sets: int) -> None:
    """Show: LIMIT under SKIP LOCKED: rows that a claim does not take stay free for others at the same moment."""
    capabilities: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b"), ("c",)]
    await rig.engine.create_executions(
        [NewExecution(required_capabilities=capabilities[at % sets], priority=at % 7) for at in range(300)]
    )
    for limit in (None, 1, 10, 100):
        statement, args = (CLAIM, ()) if limit is None else (CLAIM_MANY, (limit,))
        async with claiming(dsn, statement, *args) as taken:
            assert len(taken) == (limit or 1)
            free = await rig.sql.fetch("select execution_id from ff_exec_core for update skip locked")
            assert 300 - len(free) == len(taken)
            assert not {row["execution_id"] for row in free} & {row["execution_id"] for row in taken}
        assert await rig.sql.fetchval("select count(*) from ff_attempt") == 0
