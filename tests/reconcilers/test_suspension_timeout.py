"""suspension_timeout: five behaviours; a signal before it wins, one after it is told so."""

from __future__ import annotations

import pytest

from ffd import (
    FlowSpec,
    Fresh,
    NewExecution,
    Signal,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    Wildcard,
)
from ffd.core.ids import parse_execution_id
from ffd.reconcilers import dependency, suspension_timeout
from tests.support import Clock, Rig

pytestmark = pytest.mark.anyio


async def asleep(rig: Rig, clock: Clock, on_timeout: str, resume_delay_ms: int = 0) -> tuple[str, Suspended]:
    """A suspension that times out in a second."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    claim = await rig.running()
    suspended = await rig.engine.suspend(
        claim.handle,
        Suspend(
            [Fresh("go")],
            Single("go", Wildcard()),
            timeout_at_ms=await clock.now_ms() + 1000,
            on_timeout=on_timeout,
            resume_delay_ms=resume_delay_ms,
        ),
    )
    assert isinstance(suspended, Suspended)
    return claim.execution_id, suspended


async def tick(rig: Rig, execution_id: str, limit: int = 100) -> dict[str, int]:
    partition = parse_execution_id(execution_id).partition_key
    return dict((await suspension_timeout.tick(rig.engine._runtime, partition, limit)).outcomes)


async def signal(rig: Rig, execution_id: str, suspended: Suspended) -> object:
    point = suspended.waitpoints[0]
    return await rig.engine.deliver_signal(
        Signal(execution_id, point.waitpoint_id, "go", point.token, source_type="t", source_identity="t")
    )


@pytest.mark.parametrize(("on_timeout", "state"), [("fail", "failed"), ("cancel", "cancelled"), ("expire", "expired")])
async def test_it_ends_as_asked(rig: Rig, clock: Clock, on_timeout: str, state: str) -> None:
    """C-252: the reason tells which timeout; everything is closed, and a late signal hears of the end."""
    execution, suspended = await asleep(rig, clock, on_timeout)
    assert await tick(rig, execution) == {}
    await clock.advance(1000)
    assert await tick(rig, execution) == {state: 1}
    assert await tick(rig, execution) == {}
    core = await rig.core(execution)
    assert (core["public_state"], core["cancellation_reason"]) == (state, f"suspension_timeout_{on_timeout}")
    assert core["terminal_at_ms"] is not None
    assert await rig.completions(execution) == [state]
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    row = await rig.sql.fetchrow("select timeout_at_ms, close_reason from ff_suspension_current")
    assert row is not None
    assert tuple(row) == (None, "timeout")
    with pytest.raises(State) as late:
        await signal(rig, execution, suspended)
    assert late.value.kind == StateKind.TARGET_NOT_SIGNALABLE


async def test_escalation_waits_for_an_operator(rig: Rig, clock: Clock) -> None:
    execution, suspended = await asleep(rig, clock, "escalate")
    await clock.advance(1000)
    assert await tick(rig, execution) == {"escalated": 1}
    assert await tick(rig, execution) == {}
    core = await rig.core(execution)
    assert (core["public_state"], core["blocking_reason"]) == ("suspended", "paused_by_operator")
    assert [event["event_type"] for event in await rig.operator_events(execution)] == ["escalated"]
    assert (await rig.engine.explain_execution(execution)).waiting_for == "operator"
    assert await rig.completions(execution) == []
    await signal(rig, execution, suspended)
    assert await rig.public(execution) == "resumable"


async def test_auto_resume_brings_a_timeout_signal(rig: Rig, clock: Clock) -> None:
    """C-251: once, under its own key, seen by the worker that takes it."""
    execution, suspended = await asleep(rig, clock, "auto_resume_with_timeout_signal")
    await clock.advance(1000)
    assert await tick(rig, execution) == {"resumed": 1}
    assert await tick(rig, execution) == {}
    assert await rig.completions(execution) == ["resumable"]
    claim = await rig.claim()
    (seen,) = await rig.engine.observe_signals(claim.handle)
    assert (seen.signal_name, seen.source_identity, seen.payload) == ("timeout", "suspension_timeout", None)
    with pytest.raises(State) as late:
        await signal(rig, execution, suspended)
    assert late.value.kind == StateKind.WAITPOINT_CLOSED


async def test_auto_resume_with_a_resume_delay_is_delayed_first(rig: Rig, clock: Clock) -> None:
    execution, _ = await asleep(rig, clock, "auto_resume_with_timeout_signal", resume_delay_ms=500)
    await clock.advance(1000)
    assert await tick(rig, execution) == {"resumed": 1}
    core = await rig.core(execution)
    assert (core["public_state"], core["blocking_reason"]) == ("delayed", "waiting_for_resume_delay")
    assert core["delay_until_ms"] == await clock.now_ms() + 500


async def test_a_signal_that_came_first_wins(rig: Rig, clock: Clock) -> None:
    execution, suspended = await asleep(rig, clock, "fail")
    await clock.advance(1000)
    await signal(rig, execution, suspended)
    assert await tick(rig, execution) == {}
    assert await rig.public(execution) == "resumable"


async def test_a_held_execution_is_skipped_and_a_stale_timer_cleared(rig: Rig, clock: Clock) -> None:
    execution, _ = await asleep(rig, clock, "fail")
    await clock.advance(1000)
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for no key update")
        assert await tick(rig, execution) == {}
    assert await tick(rig, execution, limit=0) == {}
    await rig.sql.execute("delete from ff_exec_core")
    assert await tick(rig, execution) == {"cleared": 1}
    assert await tick(rig, execution) == {}


async def test_the_end_of_a_member_moves_its_flow(rig: Rig, clock: Clock) -> None:
    """V-099."""
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    nodes = {"a": NewExecution(lane="a"), "b": NewExecution(lane="b")}
    ids = (await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b")]))).execution_ids
    claim = await rig.claim("a")
    await rig.engine.suspend(
        claim.handle,
        Suspend([Fresh("go")], Single("go", Wildcard()), timeout_at_ms=await clock.now_ms() + 1000),
    )
    await clock.advance(1000)
    assert await tick(rig, ids["a"]) == {"failed": 1}
    await dependency.tick(rig.engine._runtime, parse_execution_id(ids["a"]).partition_key, 100)
    assert await rig.public(ids["b"]) == "skipped"
