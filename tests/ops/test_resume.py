"""Operators resume: whatever the condition says, once, and it is kept who did it and why."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import anyio
import msgspec
import pytest

from ffd import (
    Claim,
    Engine,
    Fresh,
    HandleKind,
    NotFound,
    OperatorOnly,
    Signal,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
)
from ffd.core.ids import parse_execution_id
from tests.concurrency.sessions import held, until_blocked
from tests.support import OTHER, Clock, Rig

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def _key(engine: Engine) -> None:
    await engine.seed_waitpoint_hmac_secret("k1", "9c" * 32)


async def suspended(rig: Rig, **suspend: Any) -> tuple[Claim, Suspended]:
    claim = await rig.running()
    outcome = await rig.engine.suspend(claim.handle, Suspend([Fresh("a"), Fresh("b")], OperatorOnly(), **suspend))
    assert isinstance(outcome, Suspended)
    return claim, outcome


async def test_resuming_closes_the_suspension_and_every_waitpoint(rig: Rig, clock: Clock) -> None:
    """C-179, V-037. The item deletes the suspension's row; here it stays for `observe_signals`, closed."""
    claim, outcome = await suspended(rig, timeout_at_ms=await clock.now_ms() + 10**6)
    point = outcome.waitpoints[0]
    signal = Signal(claim.execution_id, point.waitpoint_id, "note", point.token, source_type="t", source_identity="i")
    await rig.engine.deliver_signal(signal)
    await clock.advance(9)
    await rig.engine.resume_execution(claim.execution_id, reason="checked by hand", actor="alice")
    now = await clock.now_ms()
    assert await rig.state(claim.execution_id) == (
        "resumable",
        "runnable",
        "unowned",
        "eligible_now",
        "attempt_interrupted",
    )
    assert await rig.completions(claim.execution_id) == ["resumable"]
    row = await rig.sql.fetchrow("select closed_at_ms, close_reason, timeout_at_ms from ff_suspension_current")
    assert row is not None
    assert tuple(row.values()) == (now, "operator", None)
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    event = await rig.sql.fetchrow("select * from ff_operator_event")
    assert event is not None
    assert (event["event_type"], event["actor"], event["reason"], event["occurred_at_ms"]) == (
        "resumed",
        "alice",
        "checked by hand",
        now,
    )
    assert event["execution_id"] == str(parse_execution_id(claim.execution_id).execution_id)
    assert msgspec.json.decode(event["details"]) == {"resume_delay_ms": 0, "previous_state": "suspended"}
    for late in outcome.waitpoints:
        again = msgspec.structs.replace(signal, waitpoint_id=late.waitpoint_id, token=late.token)
        assert (await rig.refused(rig.engine.deliver_signal(again))).code == "state.waitpoint_closed"
    resumed = await rig.engine.claim_resumed_execution(claim.execution_id, **OTHER)
    assert (resumed.handle.kind, resumed.attempt_index) == (HandleKind.RESUMED, 0)
    assert [one.signal_name for one in await rig.engine.observe_signals(resumed.handle)] == ["note"]
    await rig.engine.complete(resumed.handle)


async def test_plain_claim_takes_it_too(rig: Rig) -> None:
    """The reference's was out of reach of every typed claim."""
    claim, _ = await suspended(rig)
    await rig.engine.resume_execution(claim.execution_id, reason="")
    assert (await rig.claim()).execution_id == claim.execution_id


async def test_a_delay_makes_it_delayed_first(rig: Rig, clock: Clock) -> None:
    """C-180: the time is stored, so that somebody can act on it; the event is written once, now."""
    claim, _ = await suspended(rig, resume_delay_ms=77)
    await rig.engine.resume_execution(claim.execution_id, reason="later", resume_delay_ms=5000)
    assert await rig.state(claim.execution_id) == (
        "delayed",
        "runnable",
        "unowned",
        "not_eligible_until_time",
        "attempt_interrupted",
    )
    row = await rig.core(claim.execution_id)
    assert (row["blocking_reason"], row["delay_until_ms"]) == (
        "waiting_for_resume_delay",
        await clock.now_ms() + 5000,
    )
    assert await rig.completions(claim.execution_id) == ["resumable"]
    assert await rig.engine.claim("default", **OTHER) is None


async def test_what_is_not_suspended_cannot_be_resumed(rig: Rig) -> None:
    """C-181: never claimed, running, resumed already (called twice), ended."""
    created = await rig.create(lane="other")
    claim = await rig.running()
    error = await rig.refused(rig.engine.resume_execution(created, reason="x"))
    assert isinstance(error, State)
    assert (error.kind, error.context["public_state"]) == (StateKind.EXECUTION_NOT_SUSPENDED, "waiting")
    error = await rig.refused(rig.engine.resume_execution(claim.execution_id, reason="x"))
    assert error.code == "state.execution_not_suspended"
    await rig.engine.suspend(claim.handle, Suspend([Fresh("a")], Single("a")))
    await rig.engine.resume_execution(claim.execution_id, reason="x")
    error = await rig.refused(rig.engine.resume_execution(claim.execution_id, reason="x"))
    assert error.code == "state.execution_not_suspended"
    await rig.engine.complete((await rig.claim()).handle)
    error = await rig.refused(rig.engine.resume_execution(claim.execution_id, reason="x"))
    assert error.code == "state.execution_not_suspended"
    assert await rig.sql.fetchval("select count(*) from ff_operator_event") == 1


async def test_an_unknown_execution_is_not_found(rig: Rig) -> None:
    """C-182."""
    assert isinstance(await rig.refused(rig.engine.resume_execution(f"{{fp:1}}:{uuid4()}", reason="x")), NotFound)


async def test_bad_input_is_named_and_changes_nothing(rig: Rig) -> None:
    claim, _ = await suspended(rig)
    bad: list[tuple[str, Any]] = [
        ("execution_id", "x"),
        ("reason", None),
        ("reason", "r" * 1025),
        ("reason", "a\0"),
        ("actor", "a" * 257),
        ("actor", 5),
        ("resume_delay_ms", -1),
        ("resume_delay_ms", 2**62),
        ("resume_delay_ms", None),
    ]
    for field, value in bad:
        call: dict[str, Any] = {"execution_id": claim.execution_id, "reason": "x", field: value}
        error = await rig.refused(rig.engine.resume_execution(**call))
        assert getattr(error, "field", None) == field
    await rig.engine.resume_execution(claim.execution_id, reason="r" * 1024, actor="a" * 256)


async def test_a_member_of_a_flow_carries_its_flow_into_the_event(rig: Rig) -> None:
    claim, _ = await suspended(rig)
    flow = uuid4()
    await rig.sql.execute("update ff_exec_core set flow_id = $1", flow)
    await rig.engine.resume_execution(claim.execution_id, reason="x")
    assert await rig.sql.fetchval("select flow_id from ff_completion_event") == flow


async def test_a_suspension_written_while_the_resume_waited_is_closed(rig: Rig, dsn: str) -> None:
    """What a statement reads beside the lock it waited for is old; the suspension it finds is new."""
    claim = await rig.running()
    key = parse_execution_id(claim.execution_id)
    async with held(dsn) as other, anyio.create_task_group() as tasks:
        await other.execute(
            "update ff_exec_core set lifecycle_phase = 'suspended', ownership_state = 'released',"
            " public_state = 'suspended', attempt_state = 'attempt_interrupted'"
        )
        await other.execute(
            "insert into ff_suspension_current (partition_key, execution_id, suspension_id, suspended_at_ms,"
            " timeout_at_ms, condition) values ($1, $2, $3, 1, 5, '\"OperatorOnly\"')",
            *key,
            uuid4(),
        )
        await other.execute(
            "insert into ff_waitpoint_pending (partition_key, waitpoint_id, execution_id, token_kid, token,"
            " created_at_ms, state) values ($1, $3, $2, 'k1', 't', 1, 'active')",
            *key,
            uuid4(),
        )

        async def resume() -> None:
            await rig.engine.resume_execution(claim.execution_id, reason="x")

        tasks.start_soon(resume)
        await until_blocked(rig.sql, "lock_execution")
        await other.execute("commit")
    assert await rig.public(claim.execution_id) == "resumable"
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    row = await rig.sql.fetchrow("select timeout_at_ms, close_reason from ff_suspension_current")
    assert row is not None
    assert tuple(row) == (None, "operator")
