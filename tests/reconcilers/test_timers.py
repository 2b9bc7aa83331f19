"""delayed_promoter, execution_deadline, waitpoint_expiry, dependency and cancel_backlog."""

from __future__ import annotations

from typing import Any

import pytest

from ffd import (
    Contention,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    FlowSpec,
    Fresh,
    NewExecution,
    RetryPolicy,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    Wildcard,
)
from ffd.core.ids import parse_execution_id
from ffd.core.suspension import Signal
from ffd.reconcilers import cancel_backlog, delayed_promoter, dependency, execution_deadline, waitpoint_expiry
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio


def partition(execution_id: str) -> int:
    return parse_execution_id(execution_id).partition_key


async def promote(rig: Rig, execution_id: str) -> dict[str, int]:
    return dict((await delayed_promoter.tick(rig.engine._runtime, partition(execution_id), 100)).outcomes)


async def expire(rig: Rig, execution_id: str) -> dict[str, int]:
    return dict((await execution_deadline.tick(rig.engine._runtime, partition(execution_id), 100)).outcomes)


async def test_a_delay_that_is_over_makes_work_claimable(rig: Rig, clock: Clock) -> None:
    execution = await rig.create(delay_until_ms=await clock.now_ms() + 500)
    assert await promote(rig, execution) == {}
    await clock.advance(500)
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for no key update")
        assert await promote(rig, execution) == {}
    assert await promote(rig, execution) == {"promoted": 1}
    assert await promote(rig, execution) == {}
    claim = await rig.claim()
    await rig.engine.delay(claim.handle, await clock.now_ms() + 500)
    await clock.advance(500)
    assert await promote(rig, execution) == {"promoted": 1}
    again = await rig.claim()
    assert (again.attempt_index, str(again.handle.kind)) == (0, "resumed")


async def test_a_retry_is_promoted_as_a_retry(rig: Rig, clock: Clock) -> None:
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=1, backoff=Fixed(1000)))
    claim = await rig.running(policy=policy)
    await rig.engine.fail(claim.handle, "x", FailureClass.TRANSIENT)
    await clock.advance(1000)
    assert await promote(rig, claim.execution_id) == {"promoted": 1}
    assert (await rig.core(claim.execution_id))["attempt_state"] == "pending_retry_attempt"
    assert (await rig.claim()).attempt_index == 1


async def test_a_resume_delay_ends_in_resumable_with_no_second_event(rig: Rig, clock: Clock) -> None:
    """The event was written once, when the condition was met."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    claim = await rig.running()
    await rig.engine.suspend(claim.handle, Suspend([Fresh("go")], Single("go", Wildcard()), resume_delay_ms=1000))
    await rig.engine.resume_execution(claim.execution_id, reason="x", resume_delay_ms=1000)
    assert await rig.public(claim.execution_id) == "delayed"
    await clock.advance(1000)
    assert await promote(rig, claim.execution_id) == {"promoted": 1}
    assert await rig.public(claim.execution_id) == "resumable"
    assert await rig.completions(claim.execution_id) == ["resumable"]
    assert str((await rig.claim()).handle.kind) == "resumed"


async def test_a_delay_in_the_deadline_column_is_served_and_cleared(rig: Rig, clock: Clock) -> None:
    """FlowFabric's rows: due at deadline_at_ms, then without a deadline; the deadline sweep ignores them."""
    execution = await rig.create(delay_until_ms=2**52)
    await rig.sql.execute(
        "update ff_exec_core set delay_until_ms = null, deadline_at_ms = $1", await clock.now_ms() + 10
    )
    await clock.advance(10)
    assert await expire(rig, execution) == {}
    assert await promote(rig, execution) == {"promoted": 1}
    core = await rig.core(execution)
    assert (core["public_state"], core["deadline_at_ms"]) == ("waiting", None)


@pytest.mark.parametrize("state", ["waiting", "delayed", "running", "suspended", "blocked"])
async def test_a_deadline_ends_an_execution_in_any_state(rig: Rig, clock: Clock, state: str) -> None:
    deadline = await clock.now_ms() + 1000
    if state == "blocked":
        nodes = {"a": NewExecution(lane="a"), "b": NewExecution(lane="b", deadline_at_ms=deadline)}
        execution = (await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))).execution_ids["b"]
    else:
        execution = await rig.create(
            deadline_at_ms=deadline, delay_until_ms=deadline + 5000 if state == "delayed" else None
        )
    waiting: Any = None
    claim = await rig.claim() if state in ("running", "suspended") else None
    if state == "suspended":
        assert claim is not None
        await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
        waiting = await rig.engine.suspend(claim.handle, Suspend([Fresh("go")], Single("go", Wildcard())))
    assert await expire(rig, execution) == {}
    await clock.advance(1000)
    assert await expire(rig, execution) == {"expired": 1}
    assert await expire(rig, execution) == {}
    assert await rig.state(execution) == ("expired", "terminal", "unowned", "not_applicable", "attempt_terminal")
    assert await rig.completions(execution) == ["expired"]
    assert (await rig.core(execution))["failure_message"] == "execution_deadline"
    if state == "running":
        assert claim is not None
        assert (await rig.lease_events(execution))[-1] == ("expired", "execution_deadline")
        assert (await rig.attempt(execution))["lease_epoch"] == claim.lease_epoch + 1
        with pytest.raises(Contention):
            await rig.engine.complete(claim.handle)
    if state == "suspended":
        assert isinstance(waiting, Suspended)
        point = waiting.waitpoints[0]
        assert await rig.sql.fetchval("select close_reason from ff_suspension_current") == "deadline"
        assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
        with pytest.raises(State) as late:
            await rig.engine.deliver_signal(
                Signal(execution, point.waitpoint_id, "go", point.token, source_type="t", source_identity="t")
            )
        assert late.value.kind == StateKind.TARGET_NOT_SIGNALABLE
    if state == "blocked":
        assert (await dependency.tick(rig.engine._runtime, partition(execution), 100)).moved == 1


async def test_a_deadline_does_not_wait_for_a_held_row_and_takes_batches(rig: Rig, clock: Clock) -> None:
    execution = await rig.create(deadline_at_ms=await clock.now_ms() + 10)
    await clock.advance(10)
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for no key update")
        assert await expire(rig, execution) == {}
    report = await execution_deadline.tick(rig.engine._runtime, partition(execution), 0)
    assert report.moved == 0
    assert await expire(rig, execution) == {"expired": 1}


async def test_waitpoints_that_nobody_suspended_on_expire(rig: Rig, clock: Clock) -> None:
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    claim = await rig.running(lane="a")
    at = partition(claim.execution_id)
    await rig.engine.create_waitpoint(claim.handle, "early", expires_in_ms=1000)
    asleep = await rig.running(lane="b")
    await rig.engine.suspend(
        asleep.handle,
        Suspend([Fresh("go")], Single("go", Wildcard()), timeout_at_ms=await clock.now_ms() + 1000),
    )
    assert (await waitpoint_expiry.tick(rig.engine._runtime, at, 100)).moved == 0
    await clock.advance(1000)
    assert (await waitpoint_expiry.tick(rig.engine._runtime, at, 100)).moved == 1
    await waitpoint_expiry.tick(rig.engine._runtime, partition(asleep.execution_id), 100)
    keys = await rig.sql.fetch("select waitpoint_key from ff_waitpoint_pending")
    assert [row["waitpoint_key"] for row in keys] == ["go"]


async def test_missed_cascades_are_found_by_what_is_stored(rig: Rig) -> None:
    """C-238, C-239, C-240, C-242: a writer that knows no cascade ended the first of three hops."""
    nodes = {name: NewExecution(lane=name) for name in "abc"}
    ids = (await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b"), ("b", "c")]))).execution_ids
    at = partition(ids["a"])
    await rig.sql.execute(
        "update ff_exec_core set lifecycle_phase = 'terminal', eligibility_state = 'not_applicable',"
        " public_state = 'failed', attempt_state = 'attempt_terminal', terminal_at_ms = 1 where lane_id = 'a'"
    )
    runtime = rig.engine._runtime
    assert (await dependency.tick(runtime, at, 100)).moved == 0
    assert (await dependency.find_missed(runtime, [at]))[0] == [at]
    assert (await dependency.tick(runtime, at, 100)).moved == 1
    assert [await rig.public(ids[name]) for name in "bc"] == ["skipped", "skipped"]
    before = await rig.fingerprint()
    assert (await dependency.find_missed(runtime, [at]))[0] == []
    assert (await dependency.tick(runtime, at, 100)).moved == 0
    assert await rig.fingerprint() == before


async def test_the_backlog_is_drained_after_a_crash(rig: Rig, clock: Clock) -> None:
    """A header whose caller died is acknowledged after its grace; members left running are cancelled at once."""
    flow = await rig.engine.submit_flow(FlowSpec({"a": NewExecution(), "b": NewExecution()}))
    at = partition(flow.execution_ids["a"])
    runtime = rig.engine._runtime
    await rig.engine.cancel_flow_header(flow.flow_id, reason="x", cancellation_policy="cancel_all")
    assert (await cancel_backlog.tick(runtime, at, 100)).moved == 0
    await clock.advance(30_000)
    assert (await cancel_backlog.tick(runtime, at, 100)).moved == 2
    assert await rig.sql.fetchval("select count(*) from ff_cancel_backlog") == 0
    held = await rig.engine.submit_flow(FlowSpec({"a": NewExecution(lane="held")}))
    claim = await rig.claim("held")
    async with rig.sql.transaction():
        await rig.engine.assert_lease(claim.handle, connection=rig.sql)
        await rig.engine.cancel_flow(held.flow_id, reason="x")
    assert (await cancel_backlog.tick(runtime, partition(claim.execution_id), 100)).moved == 1
    assert await rig.public(claim.execution_id) == "cancelled"
