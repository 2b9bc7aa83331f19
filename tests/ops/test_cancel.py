"""cancel_execution: from every state, once, with everything closed behind it."""

from __future__ import annotations

import pytest

from ffd import (
    Cancelled,
    Contention,
    ContentionKind,
    Engine,
    FailureClass,
    Fresh,
    NotFound,
    PublicState,
    Signal,
    Single,
    State,
    StateKind,
    Suspend,
    Suspended,
    Validation,
    Wildcard,
)
from ffd.core.ids import new_execution_key
from tests.support import Rig

pytestmark = pytest.mark.anyio

CANCELLED = ("cancelled", "cancelled", "unowned", "not_applicable", "cancelled")


async def suspended(rig: Rig) -> tuple[str, Suspended]:
    await rig.engine.seed_waitpoint_hmac_secret("k1", "ab" * 32)
    claim = await rig.running()
    waiting = await rig.engine.suspend(claim.handle, Suspend([Fresh("go")], Single("go", Wildcard())))
    assert isinstance(waiting, Suspended)
    return claim.execution_id, waiting


async def test_a_running_execution_loses_its_lease_and_its_owner_is_fenced(rig: Rig) -> None:
    """C-071: cancelled, lease cleared, epoch + 1, one `revoked` event; the completion event and who did it."""
    claim = await rig.running()
    answer = await rig.engine.cancel_execution(claim.execution_id, reason="wrong input", actor="ann")
    assert answer == Cancelled(claim.execution_id, PublicState.CANCELLED)
    assert await rig.state(claim.execution_id) == CANCELLED
    attempt = await rig.attempt(claim.execution_id)
    assert (attempt["lease_expires_at_ms"], attempt["worker_instance_id"], attempt["outcome"]) == (
        None,
        None,
        "cancelled",
    )
    assert attempt["lease_epoch"] == claim.lease_epoch + 1
    assert (await rig.core(claim.execution_id))["lease_epoch"] == claim.lease_epoch + 1
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "cancelled")]
    assert await rig.completions(claim.execution_id) == ["cancelled"]
    (event,) = await rig.operator_events(claim.execution_id)
    assert (event["event_type"], event["actor"], event["reason"]) == ("cancelled", "ann", "wrong input")
    assert event["details"]["previous_state"] == "running"
    assert event["details"]["lease_id"] == claim.lease_id
    assert event["details"]["worker_instance_id"] == "w-1"
    for call in (
        rig.engine.complete(claim.handle),
        rig.engine.renew(claim.handle),
        rig.engine.fail(claim.handle, "x", FailureClass.TRANSIENT),
        rig.engine.release(claim.handle),
    ):
        with pytest.raises(Contention) as refused:
            await call
        assert refused.value.kind == ContentionKind.LEASE_CONFLICT
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert (snapshot.cancellation_reason, snapshot.terminal_at_ms is not None) == ("wrong input", True)


async def test_waiting_work_writes_no_lease_event(rig: Rig) -> None:
    """C-072."""
    execution = await rig.create()
    await rig.engine.cancel_execution(execution, reason="no")
    assert await rig.state(execution) == CANCELLED
    assert await rig.lease_events(execution) == []
    assert await rig.completions(execution) == ["cancelled"]
    assert await rig.engine.claim("default", worker_id="w", worker_instance_id="w-1") is None


async def test_delayed_work_and_a_retry_to_come_are_cancelled_too(rig: Rig) -> None:
    delayed = await rig.create(delay_until_ms=2**52)
    claim = await rig.running()
    await rig.engine.fail(claim.handle, "x", FailureClass.TRANSIENT)
    for execution in (delayed, claim.execution_id):
        await rig.engine.cancel_execution(execution, reason="no")
        assert await rig.state(execution) == CANCELLED
        assert (await rig.core(execution))["delay_until_ms"] is None
    assert (await rig.attempt(claim.execution_id))["outcome"] == "retry"


async def test_a_suspension_closes_with_its_waitpoints(rig: Rig) -> None:
    """A late signal with a good token hears that its target has ended."""
    execution, waiting = await suspended(rig)
    await rig.engine.cancel_execution(execution, reason="too late")
    assert await rig.state(execution) == CANCELLED
    assert await rig.sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
    row = await rig.sql.fetchrow("select timeout_at_ms, closed_at_ms, close_reason from ff_suspension_current")
    assert row is not None
    assert (row["timeout_at_ms"], row["closed_at_ms"] is not None, row["close_reason"]) == (None, True, "cancelled")
    point = waiting.waitpoints[0]
    with pytest.raises(State) as refused:
        await rig.engine.deliver_signal(
            Signal(execution, point.waitpoint_id, "go", point.token, source_type="test", source_identity="t")
        )
    assert refused.value.kind == StateKind.TARGET_NOT_SIGNALABLE
    assert await rig.lease_events(execution) == [("acquired", None), ("revoked", "suspended")]


async def test_grants_go_with_the_execution(rig: Rig) -> None:
    execution = await rig.create()
    core = await rig.core(execution)
    await rig.sql.execute(
        "insert into ff_claim_grant (partition_key, grant_id, execution_id, kind, worker_id, worker_instance_id,"
        " grant_ttl_ms, issued_at_ms, expires_at_ms) values ($1, 'g', $2, 'claim', 'w', 'w-1', 1, 1, 1)",
        core["partition_key"],
        core["execution_id"],
    )
    await rig.engine.cancel_execution(execution, reason="no")
    assert await rig.sql.fetchval("select count(*) from ff_claim_grant") == 0


async def test_a_second_cancel_is_answered_alike_and_writes_nothing(rig: Rig) -> None:
    """C-073."""
    execution = await rig.create()
    first = await rig.engine.cancel_execution(execution, reason="no")
    before = await rig.fingerprint()
    assert await rig.engine.cancel_execution(execution, reason="again") == first
    assert await rig.fingerprint() == before


async def test_what_ended_otherwise_cannot_be_cancelled(rig: Rig) -> None:
    """C-074."""
    claim = await rig.running()
    await rig.engine.complete(claim.handle)
    before = await rig.fingerprint()
    with pytest.raises(Validation, match="completed") as refused:
        await rig.engine.cancel_execution(claim.execution_id, reason="no")
    assert refused.value.field == "execution_id"
    assert await rig.fingerprint() == before


async def test_anyone_but_the_operator_presents_the_epoch(rig: Rig) -> None:
    """C-075."""
    claim = await rig.running()
    before = await rig.fingerprint()
    with pytest.raises(Validation) as missing:
        await rig.engine.cancel_execution(claim.execution_id, reason="no", source="lease_holder")
    assert missing.value.field == "lease_epoch"
    with pytest.raises(State) as stale:
        await rig.engine.cancel_execution(
            claim.execution_id, reason="no", source="lease_holder", lease_epoch=claim.lease_epoch + 1
        )
    assert stale.value.kind == StateKind.STALE_LEASE
    assert await rig.fingerprint() == before
    await rig.engine.cancel_execution(
        claim.execution_id, reason="no", source="lease_holder", lease_epoch=claim.lease_epoch
    )
    assert (await rig.core(claim.execution_id))["cancelled_by"] == "lease_holder"


async def test_an_unknown_execution_is_not_found(engine: Engine) -> None:
    """C-076."""
    with pytest.raises(NotFound):
        await engine.cancel_execution(str(new_execution_key()), reason="no")


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        ({"reason": "x" * 1025}, "reason"),
        ({"reason": "x", "actor": "y" * 257}, "actor"),
        ({"reason": "x", "source": ""}, "source"),
        ({"reason": "x", "lease_epoch": -1}, "lease_epoch"),
    ],
)
async def test_bad_input_is_named_and_changes_nothing(rig: Rig, keywords: dict[str, object], field: str) -> None:
    execution = await rig.create()
    before = await rig.fingerprint()
    with pytest.raises(Validation) as refused:
        await rig.engine.cancel_execution(execution, **keywords)  # type: ignore[arg-type]
    assert refused.value.field == field
    assert await rig.fingerprint() == before


async def test_whoever_waits_for_the_result_wakes(rig: Rig) -> None:
    execution = await rig.create()
    await rig.engine.cancel_execution(execution, reason="no")
    snapshot = await rig.engine.wait_for_result(execution, timeout_ms=5000)
    assert snapshot.public_state == PublicState.CANCELLED
