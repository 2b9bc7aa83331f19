"""lease_expiry and attempt_timeout: due, not due, raced by the owner, more than a batch, left-overs cleared."""

from __future__ import annotations

import pytest

from ffd import (
    Contention,
    ContentionKind,
    ExecutionPolicy,
    Fixed,
    FlowSpec,
    HandleKind,
    NewExecution,
    RetryPolicy,
)
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id
from ffd.reconcilers import attempt_timeout, dependency, lease_expiry
from ffd.reconcilers.registry import load_reconcilers
from tests.support import OTHER, Clock, Rig

pytestmark = pytest.mark.anyio


def partition(execution_id: str) -> int:
    return parse_execution_id(execution_id).partition_key


async def in_partition(rig: Rig, at: int, count: int, **more: object) -> list[str]:
    """Executions of one partition."""
    return [await rig.create(execution_id=str(ExecutionKey(at, new_uuid())), **more) for _ in range(count)]


async def test_a_lost_worker_s_work_is_offered_again(rig: Rig, clock: Clock) -> None:
    """C-250: the same attempt, one reclaim counted, the old owner fenced; nothing before its time."""
    claim = await rig.running()
    at = partition(claim.execution_id)
    assert (await lease_expiry.tick(rig.engine._runtime, at, 100)).moved == 0
    await clock.advance(30_000)
    report = await lease_expiry.tick(rig.engine._runtime, at, 100)
    assert (dict(report.outcomes), report.lanes) == ({"reclaimed": 1}, {"default"})
    assert await rig.state(claim.execution_id) == (
        "waiting",
        "runnable",
        "unowned",
        "eligible_now",
        "attempt_interrupted",
    )
    core = await rig.core(claim.execution_id)
    assert (core["lease_reclaim_count"], core["lease_epoch"]) == (1, claim.lease_epoch + 1)
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("expired", "lease_expiry")]
    with pytest.raises(Contention) as fenced:
        await rig.engine.renew(claim.handle)
    assert fenced.value.kind == ContentionKind.LEASE_CONFLICT
    assert (await lease_expiry.tick(rig.engine._runtime, at, 100)).moved == 0
    again = await rig.claim(**OTHER)
    assert (again.handle.kind, again.attempt_index, again.lease_epoch) == (
        HandleKind.RECLAIMED,
        0,
        claim.lease_epoch + 2,
    )


async def test_too_many_reclaims_end_it_and_its_flow_hears_of_it(rig: Rig, clock: Clock) -> None:
    nodes = {
        "a": NewExecution(lane="a", policy=ExecutionPolicy(max_reclaim_count=0)),
        "b": NewExecution(lane="b"),
    }
    ids = (await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))).execution_ids
    claim = await rig.claim("a")
    await clock.advance(60_000)
    report = await lease_expiry.tick(rig.engine._runtime, partition(claim.execution_id), 100)
    assert (dict(report.outcomes), report.has_owed) == ({"failed": 1}, True)
    assert await rig.completions(ids["a"]) == ["failed"]
    assert (await rig.core(ids["a"]))["failure_message"] == "max_reclaims_exceeded"
    assert await rig.public(ids["b"]) == "waiting_children"
    settled = await dependency.tick(rig.engine._runtime, partition(claim.execution_id), 100)
    assert settled.moved == 1
    assert await rig.public(ids["b"]) == "skipped"
    assert (await dependency.tick(rig.engine._runtime, partition(claim.execution_id), 100)).moved == 0


async def test_an_owner_at_work_is_not_waited_for(rig: Rig, clock: Clock) -> None:
    """Whoever holds the execution or the attempt just now is skipped, and found by the next tick."""
    claim = await rig.running()
    at = partition(claim.execution_id)
    await clock.advance(60_000)
    for table in ("ff_exec_core", "ff_attempt"):
        async with rig.sql.transaction():
            await rig.sql.execute(f"select 1 from {table} for no key update")
            assert (await lease_expiry.tick(rig.engine._runtime, at, 100)).moved == 0
    assert (await lease_expiry.tick(rig.engine._runtime, at, 100)).moved == 1


async def test_a_batch_is_a_batch(rig: Rig, clock: Clock) -> None:
    await in_partition(rig, 7, 5)
    await in_partition(rig, 8, 1)
    for _ in range(6):
        await rig.claim()
    await clock.advance(60_000)
    moved = [(await lease_expiry.tick(rig.engine._runtime, 7, 2)).moved for _ in range(4)]
    assert moved == [2, 2, 1, 0]
    assert (await lease_expiry.tick(rig.engine._runtime, 8, 2)).moved == 1


@pytest.mark.parametrize("left_by", ["an ended execution", "an execution that is gone", "another attempt"])
async def test_a_lease_with_nothing_behind_it_is_cleared(rig: Rig, clock: Clock, left_by: str) -> None:
    """X-023: it would be due for ever."""
    claim = await rig.running()
    if left_by == "an ended execution":
        await rig.sql.execute(
            "update ff_exec_core set lifecycle_phase = 'cancelled', ownership_state = 'unowned',"
            " eligibility_state = 'cancelled', public_state = 'cancelled', attempt_state = 'cancelled'"
        )
    elif left_by == "another attempt":
        await rig.sql.execute("update ff_exec_core set attempt_index = 1")
    else:
        await rig.sql.execute("delete from ff_exec_core")
    await clock.advance(60_000)
    at = partition(claim.execution_id)
    assert dict((await lease_expiry.tick(rig.engine._runtime, at, 100)).outcomes) == {"cleared": 1}
    assert (await lease_expiry.tick(rig.engine._runtime, at, 100)).moved == 0


async def test_work_granted_to_a_worker_that_never_came_returns(rig: Rig, clock: Clock) -> None:
    execution = await rig.create()
    core = await rig.core(execution)
    await rig.sql.execute("update ff_exec_core set eligibility_state = 'pending_claim'")
    await rig.sql.execute(
        "insert into ff_claim_grant (partition_key, grant_id, execution_id, kind, worker_id, worker_instance_id,"
        " grant_ttl_ms, issued_at_ms, expires_at_ms) values ($1, 'g', $2, 'claim', 'w', 'w-1', 1, 1, $3)",
        core["partition_key"],
        core["execution_id"],
        await clock.now_ms() + 1000,
    )
    assert (await lease_expiry.tick(rig.engine._runtime, core["partition_key"], 100)).moved == 0
    await clock.advance(1000)
    report = await lease_expiry.tick(rig.engine._runtime, core["partition_key"], 100)
    assert dict(report.outcomes) == {"returned": 1}
    assert (await rig.claim()).execution_id == execution


async def test_a_granted_child_that_was_skipped_is_not_due(rig: Rig) -> None:
    """FlowFabric skips without touching eligibility: nobody has anything to do with such a row."""
    execution = await rig.create()
    await rig.sql.execute(
        "update ff_exec_core set eligibility_state = 'pending_claim', lifecycle_phase = 'terminal',"
        " public_state = 'skipped', attempt_state = 'attempt_terminal', terminal_at_ms = 1"
    )
    look = await load_reconcilers()["lease_expiry"].look(rig.engine._runtime, [partition(execution)])
    assert look.due == []


TIMED = ExecutionPolicy(retry=RetryPolicy(max_retries=1, backoff=Fixed(0)), attempt_timeout_ms=1000)


async def test_a_slow_attempt_is_retried_then_the_execution_expires(rig: Rig, clock: Clock) -> None:
    """C-248, C-249: attempt `interrupted`, index + 1; without retries left, `expired` with its event."""
    execution = await rig.create(policy=TIMED)
    at = partition(execution)
    first = await rig.claim()
    assert (await attempt_timeout.tick(rig.engine._runtime, at, 100)).moved == 0
    await clock.advance(1000)
    report = await attempt_timeout.tick(rig.engine._runtime, at, 100)
    assert (dict(report.outcomes), report.lanes) == ({"retried": 1}, {"default"})
    attempt = await rig.attempt(execution)
    assert (attempt["outcome"], attempt["failure_message"]) == ("interrupted", "attempt_timeout")
    with pytest.raises(Contention):
        await rig.engine.complete(first.handle)
    second = await rig.claim()
    assert (second.attempt_index, second.lease_epoch) == (1, first.lease_epoch + 2)
    await clock.advance(1000)
    assert dict((await attempt_timeout.tick(rig.engine._runtime, at, 100)).outcomes) == {"expired": 1}
    assert await rig.state(execution) == ("expired", "terminal", "unowned", "not_applicable", "attempt_terminal")
    assert await rig.completions(execution) == ["expired"]
    events = [("acquired", None), ("expired", "attempt_timeout")]
    assert await rig.lease_events(execution) == events * 2


async def test_a_renewed_lease_does_not_stop_the_attempt_s_clock(rig: Rig, clock: Clock) -> None:
    claim = await rig.running(policy=TIMED)
    await clock.advance(900)
    await rig.engine.renew(claim.handle)
    await clock.advance(100)
    assert (await attempt_timeout.tick(rig.engine._runtime, partition(claim.execution_id), 100)).moved == 1


async def test_a_held_attempt_and_a_batch_and_a_stale_timer(rig: Rig, clock: Clock) -> None:
    await in_partition(rig, 9, 3, policy=TIMED)
    for _ in range(3):
        await rig.claim()
    await clock.advance(1000)
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for no key update")
        assert (await attempt_timeout.tick(rig.engine._runtime, 9, 100)).moved == 0
    assert [(await attempt_timeout.tick(rig.engine._runtime, 9, 2)).moved for _ in range(3)] == [2, 1, 0]
    await rig.sql.execute("update ff_attempt set timeout_at_ms = 1")
    assert dict((await attempt_timeout.tick(rig.engine._runtime, 9, 100)).outcomes) == {"cleared": 3}
