"""Rows and inputs that are odd, and must disturb nobody else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from ffd import (
    Claim,
    Contention,
    ContentionKind,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    Handle,
    LeaseRenewal,
    NewExecution,
    ResumeToken,
    RetryPolicy,
    RetryScheduled,
    State,
    StateKind,
    Validation,
)
from tests.support import WORKER, Rig, until

pytestmark = pytest.mark.anyio


class Text(str):
    """A subclass of str, as enumerations and templating libraries make them."""

    __slots__ = ()


@pytest.mark.parametrize(
    "policy",
    [
        '{"timeout_policy": {"attempt_timeout_ms": 1e-400}}',
        '{"retry_policy": {"max_retries": 1e-400}}',
        '{"retry_policy": {"backoff": {"type": "exponential", "multiplier": 1e-300, "initial_delay_ms": 1e-300}}}',
    ],
)
async def test_a_policy_number_out_of_range_stops_nobody(rig: Rig, policy: str) -> None:
    await rig.create(priority=9)
    await rig.sql.execute("update ff_exec_core set policy = $1::text::jsonb, retry_count = 2", policy)
    await rig.create()
    claims = await rig.engine.claim_many("default", 2, **WORKER)
    assert len(claims) == 2
    for claim in claims:
        await rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT)


async def test_raw_fields_beyond_python_stop_nobody(rig: Rig) -> None:
    await rig.create()
    deep = '{"namespace": 5, "x": ' + "[" * 3000 + "]" * 3000 + "}"
    await rig.sql.execute("update ff_exec_core set raw_fields = $1::text::jsonb", deep)
    await rig.create()
    wide = '{"namespace": 5, "x": ' + "9" * 5000 + "}"
    await rig.sql.execute(
        "update ff_exec_core set raw_fields = $1::text::jsonb where raw_fields ->> 'namespace' <> '5'", wide
    )
    await rig.create()
    assert len((await rig.engine.list_executions()).items) == 3
    claims = await rig.engine.claim_many("default", 3, **WORKER)
    assert await rig.engine.complete_many([(claim.handle, None) for claim in claims]) == [None] * 3


@pytest.mark.parametrize("how", ["cancelled", "moved"])
async def test_a_lease_that_the_reference_left_behind_cannot_be_renewed(rig: Rig, how: str) -> None:
    """Its flow cancel ends the execution, its reclaim moves the attempt, and neither touches the old lease."""
    claim = await rig.running()
    if how == "cancelled":
        await rig.sql.execute(
            "update ff_exec_core set lifecycle_phase = 'cancelled', eligibility_state = 'cancelled',"
            " public_state = 'cancelled'"
        )
        expected = ContentionKind.EXECUTION_NOT_ACTIVE
    else:
        await rig.sql.execute("update ff_exec_core set attempt_index = 1")
        expected = ContentionKind.LEASE_CONFLICT
    before = await rig.fingerprint()
    for call in (rig.engine.renew(claim.handle), rig.engine.progress(claim.handle, percent=1)):
        with pytest.raises(Contention) as refused:
            await call
        assert refused.value.kind == expected
    (answer,) = await rig.engine.renew_many([claim.handle])
    assert isinstance(answer, Contention)
    assert answer.kind == expected
    assert await rig.fingerprint() == before


OWNER_CALLS: dict[str, tuple[str, Callable[[Rig, Claim], Any]]] = {
    "complete": ("ff_exec_core", lambda rig, claim: rig.engine.complete(claim.handle)),
    "fail": ("ff_exec_core", lambda rig, claim: rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT)),
    "release": ("ff_exec_core", lambda rig, claim: rig.engine.release(claim.handle)),
    "delay": ("ff_exec_core", lambda rig, claim: rig.engine.delay(claim.handle, 2**50)),
    "renew": ("ff_attempt", lambda rig, claim: rig.engine.renew(claim.handle)),
    "progress": ("ff_attempt", lambda rig, claim: rig.engine.progress(claim.handle, percent=1)),
}


@pytest.mark.parametrize(("table", "call"), OWNER_CALLS.values(), ids=OWNER_CALLS.keys())
async def test_a_lease_that_ran_out_during_a_wait_has_run_out(
    rig: Rig, table: str, call: Callable[[Rig, Claim], Any]
) -> None:
    """The clock is read after the lock was granted, also when whoever held it changed nothing."""
    await rig.create()
    claim = await rig.claim(lease_ttl_ms=300)
    async with rig.sql.transaction():
        await rig.sql.execute(f"select 1 from {table} for update")
        waiting = asyncio.ensure_future(call(rig, claim))

        async def is_waiting() -> bool:
            return bool(await rig.sql.fetchval("select exists (select 1 from pg_locks where not granted)"))

        async def is_over() -> bool:
            return bool(await rig.sql.fetchval("select max(lease_expires_at_ms) <= ff_now_ms() from ff_attempt"))

        await until(is_waiting)
        await until(is_over)
    with pytest.raises(State) as refused:
        await waiting
    assert refused.value.kind == StateKind.LEASE_EXPIRED


async def test_a_taken_over_lease_counts_from_when_it_was_granted(rig: Rig) -> None:
    claim = await rig.running()
    await rig.sql.execute("update ff_attempt set lease_expires_at_ms = 1")
    async with rig.sql.transaction():
        await rig.sql.execute("select 1 from ff_exec_core for update")
        taking = asyncio.create_task(
            rig.engine.claim_from_resume_grant(ResumeToken(claim.execution_id, "o", "o-1", 60_000))
        )

        async def is_waiting() -> bool:
            return bool(await rig.sql.fetchval("select exists (select 1 from pg_locks where not granted)"))

        await until(is_waiting)
        began_at_ms = await rig.sql.fetchval("select ff_now_ms()")
        await until(lambda: rig.sql.fetchval("select ff_now_ms() > $1::bigint + 100", began_at_ms))
        released_at_ms = await rig.sql.fetchval("select ff_now_ms()")
    taken = await taking
    assert taken is not None
    assert taken.lease_expires_at_ms >= released_at_ms + 60_000


async def test_a_concurrent_repeat_of_a_members_failure_gets_the_same_answer(rig: Rig) -> None:
    """I2."""
    policy = ExecutionPolicy(retry=RetryPolicy(max_retries=100, backoff=Fixed(0)))
    await rig.create(policy=policy)
    await rig.sql.execute("update ff_exec_core set flow_id = gen_random_uuid()")
    for _ in range(20):
        claim = await rig.claim()
        answers = await asyncio.gather(*(rig.engine.fail(claim.handle, "", FailureClass.TRANSIENT) for _ in range(3)))
        assert isinstance(answers[0], RetryScheduled)
        assert answers[0] == answers[1] == answers[2]


async def test_a_held_registry_row_is_not_the_creators_trouble(rig: Rig) -> None:
    async with rig.sql.transaction():
        await rig.sql.execute("insert into ff_lane_registry values ('busy', 1, 'somebody')")
        created = await asyncio.wait_for(rig.engine.create_execution(lane="busy"), timeout=4)
    assert not created.is_duplicate


async def test_a_large_keyed_repeat_finds_them_all(rig: Rig) -> None:
    new = [NewExecution(idempotency_key=f"k{i}") for i in range(5000)]
    first = await rig.engine.create_executions(new)
    again = await rig.engine.create_executions(new)
    assert all(one.is_duplicate for one in again)
    assert [one.execution_id for one in again] == [one.execution_id for one in first]


async def test_a_late_item_is_blamed_by_its_own_place(rig: Rig) -> None:
    old = await rig.create()
    with pytest.raises(Validation) as refused:
        await rig.engine.create_executions(
            [NewExecution(execution_id=old, deadline_at_ms=5), NewExecution(deadline_at_ms=5)]
        )
    assert refused.value.field == "executions[1].deadline_at_ms"


async def test_bulk_bytes_are_bounded(rig: Rig) -> None:
    payload = b"x" * (1024 * 1024)
    with pytest.raises(Validation) as refused:
        await rig.engine.create_executions([NewExecution(payload=payload)] * 129)
    assert refused.value.field == "executions"


async def test_the_same_lease_in_two_shapes_is_one(rig: Rig) -> None:
    claim = await rig.running()
    decoded = Handle.decode(claim.handle.encode())
    other_ttl = Handle.of_lease(claim.handle.kind, claim.handle.lease._replace(lease_ttl_ms=5))
    answers = await rig.engine.renew_many([claim.handle, decoded, other_ttl])
    assert [type(answer) for answer in answers] == [LeaseRenewal] * 3
    assert await rig.engine.complete_many([(decoded, b"1"), (claim.handle, b"2"), (other_ttl, b"3")]) == [None] * 3


async def test_stale_states_of_the_reference_are_listed_where_they_belong(rig: Rig) -> None:
    """It leaves `running` behind after the end (W2)."""
    done = await rig.running()
    await rig.engine.complete(done.handle)
    await rig.sql.execute("update ff_exec_core set public_state = 'running'")
    live = await rig.running()

    async def ids(state: str) -> list[str]:
        return [item.execution_id for item in (await rig.engine.list_executions(public_state=state)).items]

    assert await ids("running") == [live.execution_id]
    assert await ids("completed") == [done.execution_id]
    created = await rig.engine.create_execution(execution_id=done.execution_id)
    assert created.public_state == "completed"


async def test_one_uuid_in_two_partitions_is_listed_twice(rig: Rig) -> None:
    uuid = "01900000-0000-7000-8000-000000000001"
    for partition in (3, 200, 7):
        await rig.create(execution_id=f"{{fp:{partition}}}:{uuid}")
    seen = []
    after = None
    while True:
        page = await rig.engine.list_executions(limit=1, after=after)
        seen += [item.execution_id for item in page.items]
        after = page.next
        if after is None:
            break
    assert seen == [f"{{fp:{partition}}}:{uuid}" for partition in (200, 7, 3)]


async def test_subclasses_of_text_are_taken_at_their_value(rig: Rig) -> None:
    created = await rig.engine.create_execution(
        lane=Text("l"), kind=Text("k"), idempotency_key=Text("i"), tags={Text("a.b"): Text("v")}
    )
    snapshot = await rig.engine.describe_execution(created.execution_id)
    assert snapshot is not None
    assert (snapshot.lane, snapshot.kind, snapshot.tags) == ("l", "k", {"a.b": "v"})
    assert await rig.engine.claim(Text("l"), worker_id=Text("w"), worker_instance_id=Text("i")) is not None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"worker_id": []},
        {"worker_id": {}},
        {"worker_instance_id": bytearray(b"x")},
        {"lease_ttl_ms": []},
        {"capabilities": 0},
        {"capabilities": ""},
        {"capabilities": b""},
        {"capabilities": False},
        {"capabilities": itertools.repeat("a")},
    ],
)
async def test_what_is_of_no_use_as_input_is_refused_and_never_raises_otherwise(
    rig: Rig, kwargs: dict[str, Any]
) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.claim("default", **{**WORKER, **kwargs})
    assert refused.value.field in kwargs


@pytest.mark.parametrize("flow_id", ["3_333333-3333-4333-8333-333333333333", " 1111111-1111-4111-8111-111111111111"])
async def test_only_canonical_uuids_pass(rig: Rig, flow_id: str) -> None:
    with pytest.raises(Validation):
        await rig.engine.create_execution(flow_id=flow_id)


async def test_many_unmatchable_sets_cost_nothing(rig: Rig) -> None:
    """X-014: a claim walks only the sets it may satisfy."""
    await rig.sql.execute(
        "insert into ff_exec_core (partition_key, execution_id, lane_id, required_capabilities, lifecycle_phase,"
        " ownership_state, eligibility_state, public_state, attempt_state, created_at_ms)"
        " select 1, gen_random_uuid(), 'default', array['host-' || i, 'linux'], 'runnable', 'unowned',"
        " 'eligible_now', 'waiting', 'pending_first_attempt', 1 from generate_series(1, 5000) i"
    )
    mine = await rig.create(required_capabilities=["linux", "host-7"])
    assert (await rig.claim(capabilities=("linux", "gpu", "host-7"))).execution_id is not None
    plan = await rig.sql.fetchval(
        "with recursive s(rc, n) as ("
        " (select required_capabilities, 1 from ff_exec_core where lane_id = 'default' order by 1 limit 1) union all"
        " select x.rc, s.n + 1 from s cross join lateral (select required_capabilities as rc from ff_exec_core"
        " where lane_id = 'default' and required_capabilities >= ff_next_set(s.rc, array['linux', 'gpu', 'host-7'])"
        " order by 1 limit 1) x) select count(*) from s"
    )
    assert plan < 10
    assert mine
