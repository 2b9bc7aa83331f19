"""Release, delay and wait_children: the lease goes, the attempt stays."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from ffd import HandleKind, State, StateKind, Validation
from ffd.core.ids import parse_execution_id
from tests.support import OTHER, WORKER, Clock, Rig

pytestmark = pytest.mark.anyio


async def test_released_work_is_claimable_at_once_and_continued(rig: Rig) -> None:
    claim = await rig.running()
    await rig.engine.progress(claim.handle, percent=30)
    await rig.engine.release(claim.handle)
    assert await rig.state(claim.execution_id) == (
        "waiting",
        "runnable",
        "unowned",
        "eligible_now",
        "attempt_interrupted",
    )
    assert (await rig.attempt(claim.execution_id))["lease_epoch"] == 1, "release does not raise the epoch"
    again = await rig.claim(**OTHER)
    assert (again.attempt_index, again.lease_epoch, again.handle.kind) == (0, 2, HandleKind.RESUMED)
    assert again.attempt_id == claim.attempt_id
    assert (await rig.core(claim.execution_id))["lease_reclaim_count"] == 0
    assert await rig.lease_events(claim.execution_id) == [
        ("acquired", None),
        ("revoked", "released"),
        ("acquired", None),
    ]
    (attempt,) = await rig.engine.list_attempts(claim.execution_id)
    assert (attempt.outcome, attempt.progress_percent) == (None, 30)


async def test_a_delay_releases_the_lease_until_its_time(rig: Rig, clock: Clock) -> None:
    """C-023, V-060."""
    claim = await rig.running(deadline_at_ms=2**50)
    until = await clock.now_ms() + 5000
    await rig.engine.delay(claim.handle, until)
    assert await rig.state(claim.execution_id) == (
        "delayed",
        "runnable",
        "unowned",
        "not_eligible_until_time",
        "attempt_interrupted",
    )
    core = await rig.core(claim.execution_id)
    assert (core["delay_until_ms"], core["deadline_at_ms"]) == (until, 2**50), "a delay never touches the deadline"
    assert (await rig.attempt(claim.execution_id))["lease_expires_at_ms"] is None
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "delayed")]
    assert await rig.engine.claim("default", **WORKER) is None


async def test_a_delay_that_is_over_is_claimable_at_once(rig: Rig, clock: Clock) -> None:
    claim = await rig.running()
    await rig.engine.delay(claim.handle, await clock.now_ms())
    again = await rig.claim()
    assert (again.handle.kind, again.lease_epoch, again.attempt_index) == (HandleKind.RESUMED, 2, 0)


@pytest.mark.parametrize("until", [0, -1, 2**60, "soon", None, 1.5])
async def test_a_bad_delay_is_named(rig: Rig, until: Any) -> None:
    claim = await rig.running()
    before = await rig.fingerprint()
    with pytest.raises(Validation) as refused:
        await rig.engine.delay(claim.handle, until)
    assert refused.value.field == "until_ms"
    assert await rig.fingerprint() == before


async def test_only_a_flow_member_can_wait_for_children(rig: Rig) -> None:
    claim = await rig.running()
    before = await rig.fingerprint()
    with pytest.raises(State) as refused:
        await rig.engine.wait_children(claim.handle)
    assert refused.value.kind == StateKind.EXECUTION_NOT_IN_FLOW
    assert await rig.fingerprint() == before


async def _join_flow(rig: Rig, execution_id: str) -> UUID:
    flow = uuid4()
    key = parse_execution_id(execution_id)
    await rig.sql.execute(
        "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
        " values ($1, $2, 'open', 1)",
        key.partition_key,
        flow,
    )
    await rig.sql.execute("update ff_exec_core set flow_id = $1 where execution_id = $2", flow, key.execution_id)
    return flow


async def _edge_into(rig: Rig, flow: UUID, execution_id: str, resolution: str | None) -> None:
    key = parse_execution_id(execution_id)
    await rig.sql.execute(
        "insert into ff_edge (partition_key, flow_id, edge_id, upstream_eid, downstream_eid, policy, resolution)"
        " values ($1, $2, gen_random_uuid(), gen_random_uuid(), $3, '{}', $4)",
        key.partition_key,
        flow,
        key.execution_id,
        resolution,
    )


async def test_a_member_waits_for_its_open_edges(rig: Rig) -> None:
    """C-024."""
    claim = await rig.running()
    flow = await _join_flow(rig, claim.execution_id)
    await _edge_into(rig, flow, claim.execution_id, "satisfied")
    await _edge_into(rig, flow, claim.execution_id, None)
    await rig.engine.wait_children(claim.handle)
    assert await rig.state(claim.execution_id) == (
        "waiting_children",
        "runnable",
        "unowned",
        "blocked_by_dependencies",
        "attempt_interrupted",
    )
    assert (await rig.attempt(claim.execution_id))["lease_expires_at_ms"] is None
    assert await rig.lease_events(claim.execution_id) == [("acquired", None), ("revoked", "waiting_children")]
    assert await rig.engine.claim("default", **WORKER) is None


async def test_a_member_without_open_edges_is_claimable_at_once(rig: Rig) -> None:
    claim = await rig.running()
    flow = await _join_flow(rig, claim.execution_id)
    await _edge_into(rig, flow, claim.execution_id, "impossible")
    await rig.engine.wait_children(claim.handle)
    again = await rig.claim()
    assert (again.handle.kind, again.lease_epoch) == (HandleKind.RESUMED, 2)
