"""Retention: what has ended goes with everything that hangs on it, and nothing else does."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from ffd import (
    ExecutionPolicy,
    FailureClass,
    FlowSpec,
    Fresh,
    NewExecution,
    Signal,
    Single,
    Suspend,
    Suspended,
    Wildcard,
)
from ffd.config import RetentionSettings
from ffd.core.ids import ExecutionKey, new_uuid, parse_execution_id
from ffd.reconcilers import retention
from ffd.reconcilers.registry import load_reconcilers
from tests.signalling import SECRET
from tests.support import WORKER, Clock, Rig

pytestmark = pytest.mark.anyio

DAY = 86_400_000
WEEK = 7 * DAY
KEPT = {
    "ff_event_trim",
    "ff_lane_registry",
    "ff_partition",
    "ff_schema_migration",
    "ff_test_clock",
    "ff_waitpoint_hmac",
}


def partition(execution_id: str) -> int:
    return parse_execution_id(execution_id).partition_key


async def sweep(rig: Rig, *partitions: int, limit: int = 100) -> int:
    """Sweep until nothing moves; how many rows went."""
    moved = 0
    for at in partitions:
        while step := (await retention.tick(rig.engine._runtime, at, limit)).moved:
            moved += step
    return moved


async def rows_by_table(rig: Rig) -> dict[str, int]:
    """How many rows each table holds, those that stay for ever left out."""
    tables = await rig.sql.fetch("select tablename from pg_tables where schemaname = 'public'")
    counts = {row[0]: await rig.sql.fetchval(f"select count(*) from {row[0]}") for row in tables}
    return {name: count for name, count in counts.items() if count and name not in KEPT}


async def ended(rig: Rig, **more: Any) -> str:
    claim = await rig.running(**more)
    await rig.engine.complete(claim.handle)
    return claim.execution_id


async def test_an_ended_execution_goes_after_a_week_with_everything_that_hangs_on_it(rig: Rig, clock: Clock) -> None:
    """X-023: attempts, suspension, waitpoints, grants, dedup rows and, in time, its events: nothing is left."""
    await rig.engine.seed_waitpoint_hmac_secret("k", SECRET)
    at = 5
    execution = await rig.create(execution_id=str(ExecutionKey(at, new_uuid())), idempotency_key="once")
    claim = await rig.claim()
    await rig.engine.create_waitpoint(claim.handle, "unused", expires_in_ms=DAY)
    asleep = await rig.engine.suspend(
        claim.handle, Suspend([Fresh("go")], Single("go", Wildcard())), idempotency_key="s"
    )
    assert isinstance(asleep, Suspended)
    point = asleep.waitpoints[0]
    signal = Signal(execution, point.waitpoint_id, "go", point.token, source_type="t", source_identity="me")
    await rig.engine.deliver_signal(signal, idempotency_key="d")
    again = await rig.engine.claim_resumed_execution(execution, **WORKER)
    await rig.engine.renew(again.handle)
    await rig.engine.fail(again.handle, "no", FailureClass.PERMANENT)
    await rig.sql.execute(
        "insert into ff_claim_grant (partition_key, grant_id, execution_id, kind, worker_id, worker_instance_id,"
        " grant_ttl_ms, issued_at_ms, expires_at_ms) values ($1, 'g', $2, 'claim', 'w', 'w-1', 1, 1, 1)",
        *parse_execution_id(execution),
    )
    await rig.engine.change_priority(await rig.create(lane="alive"), 7)
    await clock.advance(WEEK - 1)
    await sweep(rig, at, 0)
    assert await rig.engine.describe_execution(execution) is not None, "not a millisecond before its time"
    await clock.advance(1)
    # Its idempotency key lies in a partition of the key's own.
    await sweep(rig, *range(256))
    assert await rig.engine.describe_execution(execution) is None
    assert await rows_by_table(rig) == {"ff_exec_core": 1}, "only what has not ended is left"


async def test_what_has_not_ended_and_what_is_younger_stays(rig: Rig, clock: Clock) -> None:
    old = await ended(rig, lane="old")
    await clock.advance(WEEK - 1000)
    young = await ended(rig, lane="young")
    running = await rig.running(lane="running")
    await clock.advance(1000)
    await sweep(rig, *range(256))
    kept = [await rig.engine.describe_execution(each) is not None for each in (old, young, running.execution_id)]
    assert kept == [False, True, True]


async def test_a_policy_keeps_shorter_or_longer(rig: Rig, clock: Clock) -> None:
    brief = await ended(rig, lane="a", policy=ExecutionPolicy(retention_ms=1000))
    usual = await ended(rig, lane="b")
    forever = await ended(rig, lane="c", policy=ExecutionPolicy(retention_ms=10 * WEEK))

    async def kept() -> list[bool]:
        await sweep(rig, *{partition(each) for each in (brief, usual, forever)})
        return [await rig.engine.describe_execution(each) is not None for each in (brief, usual, forever)]

    assert await kept() == [True, True, True]
    await clock.advance(1000)
    assert await kept() == [False, True, True]
    await clock.advance(WEEK)
    assert await kept() == [False, False, True]
    await clock.advance(9 * WEEK)
    assert await kept() == [False, False, False]


async def test_a_replayed_execution_is_not_taken_away(rig: Rig, clock: Clock) -> None:
    """It was over when it was found and is not when it is locked."""
    execution = await ended(rig)
    await clock.advance(WEEK)
    await rig.engine.replay_execution(execution)
    await sweep(rig, partition(execution))
    assert (await rig.claim()).execution_id == execution


async def test_members_go_with_their_flow(rig: Rig, clock: Clock) -> None:
    """However long ago a member ended, it is there while its flow is; then all of it goes: edges, groups, backlog."""
    nodes = {"a": NewExecution(lane="a"), "b": NewExecution(lane="b"), "c": NewExecution(lane="c")}
    flow = await rig.engine.submit_flow(FlowSpec(nodes, [("a", "b"), ("a", "c")]))
    at = partition(flow.execution_ids["a"])
    await rig.engine.complete((await rig.claim("a")).handle, b"kept for b")
    await clock.advance(10 * WEEK)
    await sweep(rig, at, 0)
    assert list((await rig.engine.get_upstream_results(flow.execution_ids["b"])).values()) == [b"kept for b"]
    await rig.engine.complete((await rig.claim("b")).handle)
    await rig.engine.cancel_flow(flow.flow_id, reason="x")
    await clock.advance(WEEK - 1)
    assert await sweep(rig, at) == 0
    await clock.advance(1)
    # Three members, two edges, the flow, whatever the size of a batch.
    assert await sweep(rig, at, limit=1) == 6
    await sweep(rig, 0)
    assert await rows_by_table(rig) == {}


async def test_a_member_whose_policy_asks_for_more_keeps_its_flow(rig: Rig, clock: Clock) -> None:
    nodes = {"a": NewExecution(lane="a", policy=ExecutionPolicy(retention_ms=2 * WEEK)), "b": NewExecution(lane="b")}
    flow = await rig.engine.submit_flow(FlowSpec(nodes))
    at = partition(flow.execution_ids["a"])
    for lane in nodes:
        await rig.engine.complete((await rig.claim(lane)).handle)
    await clock.advance(WEEK)
    assert await sweep(rig, at) == 0
    look = await load_reconcilers()["retention"].look(rig.engine._runtime, [at])
    assert look.due == [], "a flow that is kept wakes nobody"
    await clock.advance(WEEK)
    assert await sweep(rig, at) == 3


@pytest.mark.parametrize("policy", ["cancel_flow_only", "cancel_pending"])
async def test_members_that_a_cancelled_flow_left_running_stay_until_they_are_old(
    rig: Rig, clock: Clock, policy: str
) -> None:
    """The flow is over, they are not: nothing that has not ended is ever deleted."""
    flow = await rig.engine.submit_flow(FlowSpec({"a": NewExecution(lane="a")}))
    claim = await rig.claim("a", lease_ttl_ms=86_400_000)
    await rig.engine.cancel_flow(flow.flow_id, policy=policy, reason="x")
    await clock.advance(10 * WEEK)
    at = partition(claim.execution_id)
    assert (await load_reconcilers()["retention"].look(rig.engine._runtime, [at])).due == []
    assert await sweep(rig, at) == 0
    assert await rig.public(claim.execution_id) == "running"
    await rig.engine.cancel_execution(claim.execution_id, reason="enough")
    assert await sweep(rig, at) == 0, "it has only just ended"
    await clock.advance(WEEK)
    assert await sweep(rig, at) == 2


async def test_an_execution_that_joins_a_flow_meanwhile_is_kept(rig: Rig, clock: Clock, dsn: str) -> None:
    """It was outside of flows when it was found, and a member when it is locked."""
    execution = await ended(rig)
    await clock.advance(WEEK)
    # The sweep's snapshot is taken, then it is held up in its first function call until the other has committed.
    await rig.sql.execute(
        """
        create or replace function ff_now_ms() returns bigint language plpgsql stable parallel safe as $$
        begin
          if current_setting('application_name') = 'ffd' then perform pg_sleep(0.2); end if;
          return (select now_ms from ff_test_clock);
        end $$
        """
    )
    async with anyio.create_task_group() as group:
        group.start_soon(retention.tick, rig.engine._runtime, partition(execution), 100)
        await anyio.sleep(0.1)
        await rig.sql.execute("update ff_exec_core set flow_id = gen_random_uuid()")
    assert await rig.sql.fetchval("select count(*) from ff_exec_core") == 1


async def test_keys_go_when_they_have_run_out(rig: Rig, clock: Clock) -> None:
    await rig.create(idempotency_key="k", idempotency_ttl_ms=DAY)
    await rig.create(idempotency_key="other", idempotency_ttl_ms=2 * DAY)
    await clock.advance(DAY)
    await sweep(rig, *range(256))
    assert await rig.sql.fetchval("select array_agg(idempotency_key) from ff_exec_dedup") == ["other"]


async def test_events_are_trimmed_from_the_oldest_and_the_mark_moves_with_them(rig: Rig, clock: Clock) -> None:
    for _ in range(3):
        await ended(rig)
    await clock.advance(DAY)
    await ended(rig)
    await clock.advance(WEEK - DAY)
    await sweep(rig, 0, limit=2)
    for stream, kept, total in (("completion", 1, 4), ("lease", 2, 8)):
        ids = await rig.sql.fetchval(f"select array_agg(event_id order by event_id) from ff_{stream}_event")
        mark = await rig.sql.fetchval("select trimmed_through from ff_event_trim where stream = $1", stream)
        assert ids == list(range(total - kept + 1, total + 1))
        assert mark == total - kept


async def test_an_event_that_came_late_waits_with_those_behind_it(rig: Rig, clock: Clock) -> None:
    """Ids are trimmed without holes: a young event with a small id keeps older ones with larger ids."""
    for _ in range(3):
        await ended(rig)
    await rig.sql.execute("update ff_completion_event set occurred_at_ms = occurred_at_ms + $1 where event_id = 2", DAY)
    await clock.advance(WEEK)
    await sweep(rig, 0)
    assert await rig.sql.fetchval("select array_agg(event_id order by event_id) from ff_completion_event") == [2, 3]


async def test_renewals_go_earlier_than_other_events(rig: Rig, clock: Clock) -> None:
    claim = await rig.running()
    for _ in range(5):
        await rig.engine.renew(claim.handle)
    await clock.advance(1000)
    await rig.engine.renew(claim.handle)
    await rig.engine.complete(claim.handle)
    rig.engine._runtime.retention = RetentionSettings(renewal_ms=1000)
    await sweep(rig, 0, limit=1)
    assert [kind for kind, _ in await rig.lease_events(claim.execution_id)] == ["acquired", "renewed", "revoked"]
    await clock.advance(1000)
    await sweep(rig, 0)
    assert [kind for kind, _ in await rig.lease_events(claim.execution_id)] == ["acquired", "revoked"]
    look = await load_reconcilers()["retention"].look(rig.engine._runtime, [0])
    assert look.due == []


async def test_nodes_that_are_gone_are_forgotten(rig: Rig, clock: Clock) -> None:
    now = await clock.now_ms()
    await rig.sql.executemany(
        "insert into ff_node (node_id, name, version, started_at_ms, heartbeat_at_ms, expires_at_ms)"
        " values ($1, 'n', 'v', 0, 0, $2)",
        [("gone", now), ("alive", now + DAY)],
    )
    await clock.advance(3_600_000)
    await sweep(rig, 0)
    assert await rig.sql.fetchval("select array_agg(node_id) from ff_node") == ["alive"]
