"""For each reconciler: something it will have to move, once a minute has passed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

from ffd import ExecutionPolicy, Fresh, Single, Suspend, Wildcard
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id, partition_of
from tests.signalling import SECRET
from tests.support import Clock, Rig

DUE_AFTER_MS = 60_000
RETAINED = ExecutionPolicy(retention_ms=DUE_AFTER_MS)
TIMED = ExecutionPolicy(attempt_timeout_ms=DUE_AFTER_MS)

# Makes `count` due entities in a partition and gives their ids.
Scene = Callable[[Rig, Clock, int, int], Awaitable[list[UUID]]]


def flow_id_in(partition: int) -> UUID:
    """A flow id of one partition."""
    while True:
        candidate = new_uuid()
        if partition_of(candidate) == partition:
            return candidate


async def create(rig: Rig, at: int, count: int, **more: object) -> list[UUID]:
    """Executions of one partition and a lane of their own."""
    ids = [await rig.create(execution_id=str(ExecutionKey(at, new_uuid())), lane="scene", **more) for _ in range(count)]
    return [parse_execution_id(each).execution_id for each in ids]


async def lease_expiry(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    ids = await create(rig, at, count)
    await rig.engine.claim_many("scene", count, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=DUE_AFTER_MS)
    return ids


async def attempt_timeout(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    ids = await create(rig, at, count, policy=TIMED)
    await rig.engine.claim_many("scene", count, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=3_600_000)
    return ids


async def suspension_timeout(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    await rig.engine.seed_waitpoint_hmac_secret("k", SECRET)
    ids = await create(rig, at, count)
    for claim in await rig.engine.claim_many("scene", count, worker_id="w", worker_instance_id="w-1"):
        until = await clock.now_ms() + DUE_AFTER_MS
        await rig.engine.suspend(claim.handle, Suspend([Fresh("a")], Single("a", Wildcard()), timeout_at_ms=until))
    return ids


async def delayed_promoter(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    return await create(rig, at, count, delay_until_ms=await clock.now_ms() + DUE_AFTER_MS)


async def execution_deadline(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    return await create(rig, at, count, deadline_at_ms=await clock.now_ms() + DUE_AFTER_MS)


async def waitpoint_expiry(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    await rig.engine.seed_waitpoint_hmac_secret("k", SECRET)
    await create(rig, at, count)
    claims = await rig.engine.claim_many("scene", count, worker_id="w", worker_instance_id="w-1")
    points = [await rig.engine.create_waitpoint(each.handle, "a", expires_in_ms=DUE_AFTER_MS) for each in claims]
    return [UUID(point.waitpoint_id) for point in points]


async def dependency(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    """Owed from the first moment, but by the clock only later."""
    flows = [flow_id_in(at) for _ in range(count)]
    for flow in flows:
        await rig.engine.create_flow(flow_id=str(flow))
        await rig.sql.execute(
            "insert into ff_cascade_owed (partition_key, flow_id, execution_id, work, enqueued_at_ms)"
            " values ($1, $2, $3, 'resolve', $4)",
            at,
            flow,
            new_uuid(),
            await clock.now_ms() + DUE_AFTER_MS,
        )
    return flows


async def cancel_backlog(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    flows = [flow_id_in(at) for _ in range(count)]
    for flow in flows:
        await rig.engine.create_flow(flow_id=str(flow))
        await rig.create(flow_id=str(flow))
        await rig.engine.cancel_flow_header(str(flow), reason="x", cancellation_policy="cancel_all")
    return flows


async def retention(rig: Rig, clock: Clock, at: int, count: int) -> list[UUID]:
    ids = await create(rig, at, count, policy=RETAINED)
    for claim in await rig.engine.claim_many("scene", count, worker_id="w", worker_instance_id="w-1"):
        await rig.engine.complete(claim.handle)
    return ids


SCENES: dict[str, Scene] = {
    scene.__name__: scene
    for scene in (
        lease_expiry,
        attempt_timeout,
        suspension_timeout,
        delayed_promoter,
        execution_deadline,
        waitpoint_expiry,
        dependency,
        cancel_backlog,
        retention,
    )
}
# The table and column by which an entity is written when it is moved, for locks and for poison.
ENTITIES = {
    "waitpoint_expiry": ("ff_waitpoint_pending", "waitpoint_id"),
    "dependency": ("ff_cascade_owed", "flow_id"),
    "cancel_backlog": ("ff_cancel_backlog_member", "flow_id"),
}
EXECUTIONS = ("ff_exec_core", "execution_id")
