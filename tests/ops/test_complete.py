"""Completing: once, with its result and its events."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from ffd import (
    Contention,
    ContentionKind,
    FailureClass,
    NewExecution,
    NotFound,
    PublicState,
    Validation,
    ValidationKind,
)
from ffd.core.ids import parse_execution_id
from tests.support import WORKER, Clock, Rig, stale

pytestmark = pytest.mark.anyio


async def test_the_happy_path(rig: Rig, clock: Clock) -> None:
    """C-017, C-141, C-097, C-100, X-004."""
    claim = await rig.running()
    await rig.engine.progress(claim.handle, percent=10)
    await rig.engine.progress(claim.handle, percent=90, message="nearly")
    await clock.advance(10)
    await rig.engine.complete(claim.handle, b"\x00result")
    assert await rig.state(claim.execution_id) == (
        "completed",
        "terminal",
        "unowned",
        "not_applicable",
        "attempt_terminal",
    )
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert (snapshot.public_state, snapshot.result_size) == (PublicState.COMPLETED, 7)
    assert snapshot.terminal_at_ms == await clock.now_ms()
    assert (snapshot.worker_id, snapshot.lease_expires_at_ms) == (None, None)
    assert (snapshot.progress_percent, snapshot.progress_message) == (90, "nearly")
    assert await rig.engine.get_execution_result(claim.execution_id) == b"\x00result"
    assert await rig.completions(claim.execution_id) == ["success"]
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "completed")]
    (attempt,) = await rig.engine.list_attempts(claim.execution_id)
    assert attempt.outcome == "success"


async def test_a_repeat_by_the_owner_is_answered_and_writes_nothing(rig: Rig) -> None:
    """I2, V-047."""
    claim = await rig.running()
    await rig.engine.complete(claim.handle, b"first")
    before = await rig.fingerprint()
    await rig.engine.complete(claim.handle, b"second")
    assert await rig.engine.complete_many([(claim.handle, b"third")]) == [None]
    assert await rig.fingerprint() == before
    assert await rig.engine.get_execution_result(claim.execution_id) == b"first"


async def test_anybody_elses_repeat_is_refused(rig: Rig) -> None:
    claim = await rig.running()
    await rig.engine.complete(claim.handle)
    with pytest.raises(Contention) as refused:
        await rig.engine.complete(stale(claim, epoch=1))
    assert refused.value.kind == ContentionKind.LEASE_CONFLICT


async def test_complete_after_fail_by_the_same_owner_is_refused(rig: Rig) -> None:
    claim = await rig.running()
    await rig.engine.fail(claim.handle, "no", FailureClass.PERMANENT)
    with pytest.raises(Contention) as refused:
        await rig.engine.complete(claim.handle)
    assert refused.value.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert await rig.completions(claim.execution_id) == ["failed"]


@pytest.mark.parametrize("result", [None, b"", b"x" * 1024 * 1024])
async def test_results_come_back_exactly(rig: Rig, result: bytes | None) -> None:
    claim = await rig.running()
    await rig.engine.complete(claim.handle, result)
    assert await rig.engine.get_execution_result(claim.execution_id) == result


@pytest.mark.parametrize(
    ("result", "kind"),
    [(b"x" * (1024 * 1024 + 1), ValidationKind.PAYLOAD_TOO_LARGE), ("text", ValidationKind.INVALID_INPUT)],
)
async def test_a_bad_result_is_named_and_ends_nothing(rig: Rig, result: Any, kind: ValidationKind) -> None:
    claim = await rig.running()
    for call in (rig.engine.complete(claim.handle, result), rig.engine.complete_many([(claim.handle, result)])):
        with pytest.raises(Validation) as refused:
            await call
        assert (refused.value.field, refused.value.kind) == ("result", kind)
    assert (await rig.state(claim.execution_id))[0] == "running"


async def test_a_batch_answers_each_item_by_itself(rig: Rig) -> None:
    await rig.engine.create_executions([NewExecution() for _ in range(4)])
    a, b, c, d = await rig.engine.claim_many("default", 4, **WORKER)
    await rig.engine.complete(d.handle, b"before")
    missing = stale(a)
    missing = type(missing).of_lease(missing.kind, missing.lease._replace(execution_id=uuid4()))
    answers = await rig.engine.complete_many(
        [
            (b.handle, b"b"),
            (stale(c, epoch=1), b"no"),
            (a.handle, b"a"),
            (d.handle, b"again"),
            (missing, None),
            ("garbage", None),  # type: ignore[list-item]
            (a.handle, b"a twice"),
        ]
    )
    assert [type(answer) for answer in answers] == [
        type(None),
        Contention,
        type(None),
        type(None),
        NotFound,
        Validation,
        type(None),
    ]
    assert [await rig.engine.get_execution_result(claim.execution_id) for claim in (a, b, c, d)] == [
        b"a",
        b"b",
        None,
        b"before",
    ]
    assert [await rig.completions(claim.execution_id) for claim in (a, b, c, d)] == [
        ["success"],
        ["success"],
        [],
        ["success"],
    ]


async def test_batches_are_bounded_and_may_be_empty(rig: Rig) -> None:
    claim = await rig.running()
    assert await rig.engine.complete_many([]) == []
    assert await rig.engine.renew_many([]) == []
    for call in (rig.engine.complete_many([(claim.handle, None)] * 1001), rig.engine.renew_many([claim.handle] * 1001)):
        with pytest.raises(Validation):
            await call
    for bad in (None, 5, [claim.handle]):
        with pytest.raises(Validation):
            await rig.engine.complete_many(bad)  # type: ignore[arg-type]


async def test_a_flow_member_completes_under_its_flows_lock(rig: Rig) -> None:
    claim = await rig.running()
    flow = uuid4()
    key = parse_execution_id(claim.execution_id)
    await rig.sql.execute(
        "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
        " values ($1, $2, 'open', 1)",
        key.partition_key,
        flow,
    )
    await rig.sql.execute("update ff_exec_core set flow_id = $1", flow)
    await rig.engine.complete(claim.handle, b"r")
    await rig.engine.complete(claim.handle, b"again")
    assert await rig.engine.get_execution_result(claim.execution_id) == b"r"
    row = await rig.sql.fetchrow("select flow_id, outcome from ff_completion_event")
    assert row is not None
    assert (row["flow_id"], row["outcome"]) == (flow, "success")
    assert await rig.engine.complete_many([(claim.handle, None)]) == [None]


async def test_members_complete_in_a_batch_too(rig: Rig) -> None:
    await rig.engine.create_executions([NewExecution(), NewExecution()])
    claims = await rig.engine.claim_many("default", 2, **WORKER)
    await rig.sql.execute("update ff_exec_core set flow_id = gen_random_uuid()")
    assert await rig.engine.complete_many([(claim.handle, b"r") for claim in claims]) == [None, None]
    assert [await rig.completions(claim.execution_id) for claim in claims] == [["success"], ["success"]]
