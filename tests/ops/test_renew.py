"""Renewing leases and reporting progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from ffd import Contention, LeaseRenewal, NewExecution, NotFound, Validation
from ffd.config import OutboxSettings
from tests.support import WORKER, Clock, Rig, stale

pytestmark = pytest.mark.anyio


async def test_a_renewal_moves_the_expiry_and_keeps_the_epoch(rig: Rig, clock: Clock) -> None:
    """C-018, C-174."""
    claim = await rig.running()
    await clock.advance(10_000)
    renewal = await rig.engine.renew(claim.handle)
    assert renewal == LeaseRenewal(await clock.now_ms() + 30_000, 1)
    assert (await rig.attempt(claim.execution_id))["lease_expires_at_ms"] == renewal.expires_at_ms
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("renewed", None)]


async def test_a_renewal_never_shortens_a_lease(rig: Rig) -> None:
    """C-018."""
    claim = await rig.running()
    await rig.sql.execute("update ff_attempt set lease_expires_at_ms = lease_expires_at_ms + 1000000")
    far = (await rig.attempt(claim.execution_id))["lease_expires_at_ms"]
    assert (await rig.engine.renew(claim.handle)).expires_at_ms == far
    (answer,) = await rig.engine.renew_many([claim.handle])
    assert answer == LeaseRenewal(far, 1)


async def test_renewals_can_be_kept_out_of_the_event_stream(rig: Rig, open_engine: Callable[..., Any]) -> None:
    claim = await rig.running()
    async with open_engine(outbox=OutboxSettings(lease_renewed=False)) as quiet:
        await quiet.renew(claim.handle)
        assert len(await quiet.renew_many([claim.handle])) == 1
    assert await rig.lease_events(claim.execution_id) == [("acquired", None)]


async def test_a_renewal_never_waits_for_the_execution(rig: Rig, dsn: str) -> None:
    """A transaction that holds the execution must not cost its worker the lease."""
    claim = await rig.running()
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for update")
        await rig.engine.renew(claim.handle)
        await rig.engine.renew_many([claim.handle])
        await rig.engine.progress(claim.handle, percent=1)


async def test_a_batch_answers_each_handle_by_itself(rig: Rig, clock: Clock) -> None:
    await rig.engine.create_executions([NewExecution() for _ in range(3)])
    a, b, c = await rig.engine.claim_many("default", 3, **WORKER)
    await rig.engine.complete(c.handle)
    unknown = stale(a)
    unknown = type(unknown).of_lease(unknown.kind, unknown.lease._replace(execution_id=uuid4()))
    await clock.advance(5)
    answers = await rig.engine.renew_many([b.handle, stale(b, epoch=1), a.handle, c.handle, unknown, None, b.handle])  # type: ignore[list-item]
    new_expiry = await clock.now_ms() + 30_000
    assert answers[0] == answers[2] == answers[6] == LeaseRenewal(new_expiry, 1)
    assert [type(answer) for answer in answers[3:6]] == [Contention, NotFound, Validation]
    assert isinstance(answers[1], Contention)


async def test_progress_keeps_what_it_is_not_told(rig: Rig) -> None:
    """V-057."""
    claim = await rig.running()
    await rig.engine.progress(claim.handle, percent=40, message="half")
    await rig.engine.progress(claim.handle, percent=60)
    await rig.engine.progress(claim.handle)
    await rig.engine.progress(claim.handle, message="more")
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert (snapshot.progress_percent, snapshot.progress_message) == (60, "more")


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"percent": -1}, "percent"),
        ({"percent": 101}, "percent"),
        ({"percent": 50.5}, "percent"),
        ({"message": "x" * 1025}, "message"),
        ({"message": 5}, "message"),
    ],
)
async def test_bad_progress_is_named(rig: Rig, kwargs: dict[str, Any], field: str) -> None:
    claim = await rig.running()
    with pytest.raises(Validation) as refused:
        await rig.engine.progress(claim.handle, **kwargs)
    assert refused.value.field == field
