"""Claiming: order, capabilities, epochs, what a claim tells."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from ffd import Engine, ExecutionPolicy, HandleKind, NewExecution, Validation
from tests.support import OTHER, WORKER, Clock, Rig

pytestmark = pytest.mark.anyio


async def test_an_empty_lane_gives_none(rig: Rig) -> None:
    """V-042."""
    assert await rig.engine.claim("default", **WORKER) is None
    assert await rig.engine.claim_many("default", 10, **WORKER) == []


async def test_a_claim_runs_the_execution_under_epoch_one(rig: Rig, clock: Clock) -> None:
    """C-017, C-185, C-135."""
    execution_id = await rig.create(payload=b"p", kind="k", tags={"a.b": "c"})
    claim = await rig.claim(lease_ttl_ms=5000)
    now = await clock.now_ms()
    assert (claim.execution_id, claim.lane, claim.kind, claim.namespace) == (execution_id, "default", "k", "default")
    assert (claim.payload, claim.tags, claim.attempt_index, claim.lease_epoch) == (b"p", {"a.b": "c"}, 0, 1)
    assert claim.lease_expires_at_ms == now + 5000
    assert claim.handle.kind == HandleKind.FRESH
    assert claim.lease_id == f"pg:{execution_id.split(':', 2)[2]}:0:1"
    assert str(UUID(claim.attempt_id)) == claim.attempt_id
    assert await rig.state(execution_id) == ("running", "active", "leased", "not_applicable", "running_attempt")
    assert await rig.lease_events(execution_id) == [("acquired", None)]
    snapshot = await rig.engine.describe_execution(execution_id)
    assert snapshot is not None
    assert (snapshot.worker_id, snapshot.worker_instance_id) == ("w", "w-1")
    assert snapshot.lease_expires_at_ms == claim.lease_expires_at_ms


async def test_events_carry_namespace_and_tags(dsn: str, rig: Rig) -> None:
    async with Engine.connect(dsn, namespace="team") as engine:
        await engine.create_execution(tags={"app.x": "1", "cairn.instance_id": "i-9"})
        claim = await engine.claim("default", **WORKER)
        assert claim is not None
        assert claim.namespace == "team"
        await engine.complete(claim.handle)
    for table in ("ff_lease_event", "ff_completion_event"):
        rows = await rig.sql.fetch(f"select namespace, instance_tag, tags->>'app.x' as tag from {table}")
        assert rows
        assert all((row["namespace"], row["instance_tag"], row["tag"]) == ("team", "i-9", "1") for row in rows)


async def test_a_lease_event_names_lease_and_worker(rig: Rig) -> None:
    claim = await rig.running()
    row = await rig.sql.fetchrow("select * from ff_lease_event")
    assert row is not None
    assert (row["attempt_index"], row["lease_epoch"]) == (0, 1)
    assert (row["worker_id"], row["worker_instance_id"]) == ("w", "w-1")
    assert row["partition_key"] == claim.handle.lease.partition_key


async def test_highest_priority_first_then_the_oldest(rig: Rig) -> None:
    """C-256."""
    low = await rig.create(priority=1)
    old = await rig.create(priority=5)
    new = await rig.create(priority=5)
    taken = [(await rig.claim()).execution_id for _ in range(3)]
    assert taken == [old, new, low]


async def test_a_batch_comes_in_the_same_order(rig: Rig) -> None:
    ids = [await rig.create(priority=priority) for priority in (3, 1, 2)]
    claims = await rig.engine.claim_many("default", 2, **WORKER)
    assert [claim.execution_id for claim in claims] == [ids[0], ids[2]]
    assert [claim.execution_id for claim in await rig.engine.claim_many("default", 9, **WORKER)] == [ids[1]]


async def test_a_lane_serves_only_its_own_but_every_namespace(dsn: str, rig: Rig) -> None:
    async with Engine.connect(dsn, namespace="other") as other:
        foreign = (await other.create_execution(lane="b")).execution_id
    await rig.create(lane="a")
    assert (await rig.claim("b")).execution_id == foreign
    assert await rig.engine.claim("b", **WORKER) is None


@pytest.mark.parametrize(
    ("needs", "has", "fits"),
    [
        ((), (), True),
        ((), ("gpu",), True),
        (("gpu",), ("gpu",), True),
        (("gpu",), ("gpu", "cpu"), True),
        (("gpu", "cpu"), ("gpu",), False),
        (("gpu",), (), False),
        (("gpu",), ("GPU",), False),
    ],
)
async def test_required_capabilities_must_be_a_subset(
    rig: Rig, needs: tuple[str, ...], has: tuple[str, ...], fits: bool
) -> None:
    """X-002, V-065, C-254."""
    await rig.create(required_capabilities=needs)
    assert (await rig.engine.claim("default", **WORKER, capabilities=has) is not None) == fits
    if not fits:
        assert await rig.engine.claim_many("default", 5, **WORKER, capabilities=has) == []


async def test_what_nobody_can_run_does_not_block_what_stands_behind(rig: Rig) -> None:
    """X-014, V-043."""
    await rig.engine.create_executions(
        [NewExecution(priority=9000, required_capabilities=[f"c{i % 7}"]) for i in range(500)]
    )
    behind = await rig.create(priority=1)
    assert (await rig.claim(capabilities=("other",))).execution_id == behind


async def test_the_best_of_several_matching_sets_wins(rig: Rig) -> None:
    await rig.create(priority=1)
    await rig.create(priority=2, required_capabilities=["a"])
    best = await rig.create(priority=3, required_capabilities=["b"])
    await rig.create(priority=4, required_capabilities=["c"])
    assert (await rig.claim(capabilities=("a", "b"))).execution_id == best


async def test_started_is_set_by_the_first_claim_only(rig: Rig, clock: Clock) -> None:
    """C-184, C-096."""
    claim = await rig.running()
    first = (await rig.core(claim.execution_id))["started_at_ms"]
    assert first == await clock.now_ms()
    await clock.advance(1000)
    await rig.engine.release(claim.handle)
    again = await rig.claim()
    assert (await rig.core(again.execution_id))["started_at_ms"] == first
    (attempt,) = await rig.engine.list_attempts(claim.execution_id)
    assert attempt.started_at_ms == first + 1000


async def test_an_attempt_timeout_counts_from_the_latest_claim(rig: Rig, clock: Clock) -> None:
    claim = await rig.running(policy=ExecutionPolicy(attempt_timeout_ms=700))
    assert (await rig.attempt(claim.execution_id))["timeout_at_ms"] == await clock.now_ms() + 700
    await rig.engine.release(claim.handle)
    assert (await rig.attempt(claim.execution_id))["timeout_at_ms"] is None
    await clock.advance(50)
    await rig.claim()
    assert (await rig.attempt(claim.execution_id))["timeout_at_ms"] == await clock.now_ms() + 700


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lane": "x" * 65}, "lane"),
    ({"lane": None}, "lane"),
    ({"worker_id": ""}, "worker_id"),
    ({"worker_id": 7}, "worker_id"),
    ({"worker_instance_id": "x" * 257}, "worker_instance_id"),
    ({"lease_ttl_ms": 0}, "lease_ttl_ms"),
    ({"lease_ttl_ms": 86_400_001}, "lease_ttl_ms"),
    ({"lease_ttl_ms": True}, "lease_ttl_ms"),
    ({"lease_ttl_ms": 1.5}, "lease_ttl_ms"),
    ({"wait_ms": -1}, "wait_ms"),
    ({"capabilities": "gpu"}, "capabilities"),
    ({"capabilities": ["a b"]}, "capabilities"),
]


@pytest.mark.parametrize(("kwargs", "field"), BAD)
async def test_bad_input_is_named_and_takes_nothing(rig: Rig, kwargs: dict[str, Any], field: str) -> None:
    await rig.create()
    before = await rig.fingerprint()
    lane = kwargs.get("lane", "default")
    rest: dict[str, Any] = {**WORKER, **{key: value for key, value in kwargs.items() if key != "lane"}}
    for call in (rig.engine.claim(lane, **rest), rig.engine.claim_many(lane, 1, **rest)):
        with pytest.raises(Validation) as refused:
            await call
        assert refused.value.field == field
    assert await rig.fingerprint() == before


@pytest.mark.parametrize("limit", [0, 1001, "3", None])
async def test_a_batch_is_bounded(rig: Rig, limit: Any) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.claim_many("default", limit, **WORKER)
    assert refused.value.field == "limit"


async def test_two_workers_get_different_work(rig: Rig) -> None:
    """C-257."""
    await rig.create()
    await rig.create()
    mine = await rig.claim()
    theirs = await rig.claim(**OTHER)
    assert mine.execution_id != theirs.execution_id
    assert await rig.engine.claim("default", **WORKER) is None
