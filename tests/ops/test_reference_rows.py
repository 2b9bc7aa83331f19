"""Rows that a FlowFabric worker writes, knowing only its own columns, are served."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from ffd import Engine, FailureClass, Handle, HandleKind, PublicState, RetryScheduled
from ffd.core.handles import Lease
from ffd.core.ids import ExecutionKey
from tests.support import WORKER, Rig

pytestmark = pytest.mark.anyio

# The fixture of the reference's own suite, column for column.
INSERT_EXEC = (
    "INSERT INTO ff_exec_core"
    " (partition_key, execution_id, lane_id, attempt_index, lifecycle_phase, ownership_state, eligibility_state,"
    " public_state, attempt_state, created_at_ms)"
    " VALUES ($1, $2, $3, 0, $5, $6, $7, $8, $9, $4)"
)
INSERT_ATTEMPT = (
    "INSERT INTO ff_attempt"
    " (partition_key, execution_id, attempt_index, worker_id, worker_instance_id, lease_epoch, lease_expires_at_ms,"
    " started_at_ms) VALUES ($1, $2, 0, 'w1', 'wi1', $5, $3, $4)"
)
ACTIVE = ("active", "leased", "not_applicable", "running", "running_attempt")
SUBMITTED = ("submitted", "unowned", "eligible_now", "waiting", "pending")


async def _insert(sql: asyncpg.Connection[Any], state: tuple[str, ...], epoch: int | None = None) -> ExecutionKey:
    key = ExecutionKey(86, uuid4())
    now = await sql.fetchval("select ff_now_ms()")
    await sql.execute(INSERT_EXEC, *key, "default", now, *state)
    if epoch is not None:
        await sql.execute(INSERT_ATTEMPT, *key, now + 30_000, now, epoch)
    return key


def _handle(key: ExecutionKey, epoch: int) -> Handle:
    return Handle.of_lease(HandleKind.FRESH, Lease(*key, 0, epoch, 30_000, "default", "wi1"))


async def test_a_submitted_row_is_claimed_and_completed(rig: Rig) -> None:
    """W1 of the reference: its own rows are never runnable there."""
    key = await _insert(rig.sql, SUBMITTED)
    snapshot = await rig.engine.describe_execution(str(key))
    assert snapshot is not None
    assert (snapshot.public_state, snapshot.namespace, snapshot.kind) == (PublicState.WAITING, "", "")
    claim = await rig.claim()
    assert (claim.execution_id, claim.lease_epoch, claim.handle.kind) == (str(key), 1, HandleKind.FRESH)
    await rig.engine.complete(claim.handle, b"r")
    assert await rig.completions(str(key)) == ["success"]


@pytest.mark.parametrize("ending", ["renew", "complete", "fail", "delay", "release", "progress"])
async def test_the_seeds_fixture_rows_are_served(rig: Rig, ending: str) -> None:
    """The raw inserts of the seeds, unchanged: ten columns of the execution, eight of the attempt."""
    key = await _insert(rig.sql, ACTIVE, epoch=1)
    handle = _handle(key, 1)
    match ending:
        case "renew":
            assert (await rig.engine.renew(handle)).lease_epoch == 1
        case "complete":
            await rig.engine.complete(handle, b"r")
            assert await rig.completions(str(key)) == ["success"]
        case "fail":
            assert isinstance(await rig.engine.fail(handle, "", FailureClass.TRANSIENT), RetryScheduled)
        case "delay":
            await rig.engine.delay(handle, 1)
        case "release":
            await rig.engine.release(handle)
        case "progress":
            await rig.engine.progress(handle, percent=1)


@pytest.mark.parametrize("give_back", ["release", "fail"])
async def test_the_epoch_of_a_reference_attempt_is_never_reused(rig: Rig, give_back: str) -> None:
    """I1: the reference raises the attempt's epoch only, the execution's counter stands at 0."""
    key = await _insert(rig.sql, ACTIVE, epoch=7)
    handle = _handle(key, 7)
    if give_back == "release":
        await rig.engine.release(handle)
    else:
        await rig.sql.execute(
            'update ff_exec_core set policy = \'{"retry_policy": {"backoff": {"type": "fixed", "delay_ms": 0}}}\''
        )
        await rig.engine.fail(handle, "", FailureClass.TRANSIENT)
    assert (await rig.claim()).lease_epoch == 8


async def test_a_retry_that_a_reference_worker_left_takes_a_larger_epoch(rig: Rig) -> None:
    """Its `fail` raises attempt_index and leaves the execution's counter alone."""
    key = await _insert(rig.sql, ACTIVE, epoch=5)
    await rig.sql.execute("update ff_attempt set outcome = 'retry', lease_expires_at_ms = null")
    await rig.sql.execute(
        "update ff_exec_core set lifecycle_phase = 'runnable', ownership_state = 'unowned',"
        " eligibility_state = 'eligible_now', attempt_state = 'pending_retry_attempt', attempt_index = 1"
    )
    claim = await rig.claim()
    assert (claim.execution_id, claim.attempt_index, claim.lease_epoch) == (str(key), 1, 6)


async def test_a_resumed_row_of_the_reference_is_continued(rig: Rig) -> None:
    """It leaves ownership `released` after a resume."""
    key = await _insert(rig.sql, ACTIVE, epoch=2)
    await rig.sql.execute("update ff_attempt set lease_expires_at_ms = null")
    await rig.sql.execute(
        "update ff_exec_core set lifecycle_phase = 'suspended', ownership_state = 'released',"
        " public_state = 'suspended', attempt_state = 'attempt_interrupted'"
    )
    await rig.sql.execute(
        "update ff_exec_core set public_state = 'resumable', lifecycle_phase = 'runnable',"
        " eligibility_state = 'eligible_now'"
    )
    claim = await rig.engine.claim_resumed_execution(str(key), **WORKER)
    assert (claim.lease_epoch, claim.handle.kind) == (3, HandleKind.RESUMED)


async def test_a_lease_that_the_reference_swept_is_reclaimed(rig: Rig) -> None:
    await _insert(rig.sql, ACTIVE, epoch=2)
    await rig.sql.execute("update ff_attempt set lease_expires_at_ms = null, outcome = 'lease_expired_reclaimable'")
    await rig.sql.execute(
        "update ff_exec_core set lifecycle_phase = 'runnable', ownership_state = 'unowned',"
        " eligibility_state = 'eligible_now', attempt_state = 'attempt_interrupted'"
    )
    claim = await rig.claim()
    assert (claim.lease_epoch, claim.handle.kind) == (3, HandleKind.RECLAIMED)


async def test_a_pending_claim_reads_as_waiting_and_is_not_taken_twice(rig: Rig) -> None:
    """C-103."""
    key = await _insert(rig.sql, ("runnable", "unowned", "pending_claim", "waiting", "pending_first_attempt"))
    snapshot = await rig.engine.describe_execution(str(key))
    assert snapshot is not None
    assert snapshot.public_state == PublicState.WAITING
    assert await rig.engine.claim("default", **WORKER) is None


async def test_odd_raw_fields_do_not_stop_a_lane(rig: Rig) -> None:
    for document in ('{"tags": 5, "namespace": 7}', '{"tags": {"a.b": 1}}', "[]", '"x"', "5", '{"tags": null}'):
        await _insert(rig.sql, SUBMITTED)
        await rig.sql.execute(
            "update ff_exec_core set raw_fields = $1::text::jsonb where terminal_at_ms is null", document
        )
        claim = await rig.claim()
        await rig.engine.renew(claim.handle)
        assert (await rig.engine.describe_execution(claim.execution_id)) is not None
        await rig.engine.complete(claim.handle)


async def test_a_stale_public_state_reads_as_what_it_is(rig: Rig, engine: Engine) -> None:
    """W2 of the reference: it leaves `running` behind after the end."""
    key = await _insert(rig.sql, ACTIVE, epoch=1)
    await rig.sql.execute("update ff_attempt set outcome = 'success', lease_expires_at_ms = null")
    await rig.sql.execute(
        "update ff_exec_core set lifecycle_phase = 'terminal', ownership_state = 'unowned',"
        " attempt_state = 'attempt_terminal', terminal_at_ms = 5"
    )
    snapshot = await engine.describe_execution(str(key))
    assert snapshot is not None
    assert snapshot.public_state == PublicState.COMPLETED
    assert UUID(snapshot.execution_id.split(":", 2)[2]) == key.execution_id
