"""Creating executions."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from ffd import (
    Engine,
    ExecutionPolicy,
    NewExecution,
    NotFound,
    PublicState,
    RetryPolicy,
    State,
    StateKind,
    Validation,
    ValidationKind,
)
from ffd.core.ids import parse_execution_id, partition_of
from tests.support import WORKER, Clock, Rig, until

pytestmark = pytest.mark.anyio

LONG_AGO_MS = 1_000


async def test_a_created_execution_is_waiting_and_described(rig: Rig) -> None:
    """C-213, C-101, C-259."""
    created = await rig.engine.create_execution(
        lane="mail", payload=b"\x00\xff", kind="send", priority=7, tags={"app.tenant": "t1"}, deadline_at_ms=2**50
    )
    assert created.public_state == PublicState.WAITING
    assert not created.is_duplicate
    snapshot = await rig.engine.describe_execution(created.execution_id)
    assert snapshot is not None
    assert (snapshot.lane, snapshot.kind, snapshot.namespace, snapshot.priority) == ("mail", "send", "default", 7)
    assert (snapshot.tags, snapshot.attempt_index, snapshot.lease_epoch) == ({"app.tenant": "t1"}, 0, 0)
    assert (snapshot.started_at_ms, snapshot.terminal_at_ms, snapshot.deadline_at_ms) == (None, None, 2**50)
    assert await rig.state(created.execution_id) == (
        "waiting",
        "runnable",
        "unowned",
        "eligible_now",
        "pending_first_attempt",
    )


async def test_create_claim_complete_needs_no_other_hand(rig: Rig) -> None:
    """X-001, X-004, C-282."""
    execution_id = await rig.create(payload=b"in")
    claim = await rig.claim()
    assert (claim.execution_id, claim.payload) == (execution_id, b"in")
    await rig.engine.complete(claim.handle, b"out")
    snapshot = await rig.engine.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.public_state == PublicState.COMPLETED
    assert await rig.engine.get_execution_result(execution_id) == b"out"


async def test_a_solo_execution_lies_in_the_partition_of_its_uuid(rig: Rig) -> None:
    key = parse_execution_id(await rig.create())
    assert key.partition_key == partition_of(key.execution_id)


async def test_the_same_id_twice_is_one_execution(rig: Rig) -> None:
    """C-214."""
    execution_id = f"{{fp:255}}:{uuid4()}"
    first = await rig.engine.create_execution(execution_id=execution_id, payload=b"1")
    before = await rig.fingerprint()
    second = await rig.engine.create_execution(execution_id=execution_id, payload=b"2")
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.execution_id == execution_id
    assert await rig.fingerprint() == before


async def test_the_same_key_finds_the_first_execution_in_its_present_state(rig: Rig) -> None:
    first = await rig.engine.create_execution(idempotency_key="order-1")
    await rig.engine.complete((await rig.claim()).handle)
    second = await rig.engine.create_execution(idempotency_key="order-1")
    assert second.execution_id == first.execution_id
    assert second.is_duplicate
    assert second.public_state == PublicState.COMPLETED


async def test_a_key_is_free_again_after_its_window(rig: Rig, clock: Clock) -> None:
    first = await rig.create(idempotency_key="k", idempotency_ttl_ms=1000)
    await clock.advance(999)
    assert await rig.create(idempotency_key="k", idempotency_ttl_ms=1000) == first
    await clock.advance(2)
    assert await rig.create(idempotency_key="k", idempotency_ttl_ms=1000) != first


async def test_a_key_belongs_to_its_namespace(dsn: str, rig: Rig) -> None:
    first = await rig.create(idempotency_key="k")
    async with Engine.connect(dsn, namespace="other") as other:
        assert (await other.create_execution(idempotency_key="k")).execution_id != first


async def test_a_key_whose_execution_is_gone_creates_anew(rig: Rig) -> None:
    first = await rig.create(idempotency_key="k")
    await rig.sql.execute("delete from ff_exec_core")
    created = await rig.engine.create_execution(idempotency_key="k")
    assert not created.is_duplicate
    assert created.execution_id != first
    assert await rig.create(idempotency_key="k") == created.execution_id
    await rig.sql.execute("delete from ff_exec_core")
    (bulk,) = await rig.engine.create_executions([NewExecution(idempotency_key="k")])
    assert not bulk.is_duplicate


async def test_a_late_repeat_is_still_a_duplicate(rig: Rig, clock: Clock) -> None:
    """A create whose answer was lost may be repeated after its deadline has passed."""
    deadline = await clock.now_ms() + 1000
    keyed: dict[str, Any] = {"idempotency_key": "k", "deadline_at_ms": deadline}
    first = await rig.engine.create_execution(**keyed)
    await clock.advance(2000)
    assert await rig.engine.create_execution(**keyed) == type(first)(first.execution_id, PublicState.WAITING, True)
    again = await rig.engine.create_executions([NewExecution(**keyed)])
    assert again[0].is_duplicate
    named = await rig.engine.create_execution(execution_id=first.execution_id, deadline_at_ms=deadline)
    assert named.is_duplicate


async def test_a_delayed_execution_is_not_claimable(rig: Rig, clock: Clock) -> None:
    due = await clock.now_ms() + 60_000
    created = await rig.engine.create_execution(delay_until_ms=due)
    assert created.public_state == PublicState.DELAYED
    assert await rig.state(created.execution_id) == (
        "delayed",
        "runnable",
        "unowned",
        "not_eligible_until_time",
        "pending_first_attempt",
    )
    assert await rig.engine.claim("default", **WORKER) is None


async def test_a_delay_in_the_past_is_none(rig: Rig) -> None:
    created = await rig.engine.create_execution(delay_until_ms=LONG_AGO_MS)
    assert created.public_state == PublicState.WAITING
    assert (await rig.core(created.execution_id))["delay_until_ms"] is None


@pytest.mark.parametrize(("given", "stored"), [(-5, 0), (0, 0), (9000, 9000), (2**40, 9000)])
async def test_priority_is_clamped(rig: Rig, given: int, stored: int) -> None:
    """V-056."""
    assert (await rig.core(await rig.create(priority=given)))["priority"] == stored


async def test_capabilities_are_stored_sorted_and_once(rig: Rig) -> None:
    execution_id = await rig.create(required_capabilities=["gpu", "a", "gpu"])
    assert (await rig.core(execution_id))["required_capabilities"] == ["a", "gpu"]


BAD: list[tuple[dict[str, Any], str, ValidationKind]] = [
    ({"lane": "x" * 65}, "lane", ValidationKind.INVALID_INPUT),
    ({"lane": ""}, "lane", ValidationKind.INVALID_INPUT),
    ({"lane": "ü"}, "lane", ValidationKind.INVALID_INPUT),
    ({"payload": b"x" * (1024 * 1024 + 1)}, "payload", ValidationKind.PAYLOAD_TOO_LARGE),
    ({"payload": "text"}, "payload", ValidationKind.INVALID_INPUT),
    ({"kind": "x" * 257}, "kind", ValidationKind.INVALID_INPUT),
    ({"kind": "a\0b"}, "kind", ValidationKind.INVALID_INPUT),
    ({"kind": "\ud800"}, "kind", ValidationKind.INVALID_INPUT),
    ({"priority": "high"}, "priority", ValidationKind.INVALID_INPUT),
    ({"required_capabilities": ["a,b"]}, "required_capabilities", ValidationKind.INVALID_CAPABILITIES),
    ({"required_capabilities": [""]}, "required_capabilities", ValidationKind.INVALID_CAPABILITIES),
    ({"required_capabilities": ["a b"]}, "required_capabilities", ValidationKind.INVALID_CAPABILITIES),
    ({"required_capabilities": ["a\x7f"]}, "required_capabilities", ValidationKind.INVALID_CAPABILITIES),
    ({"required_capabilities": [7]}, "required_capabilities", ValidationKind.INVALID_CAPABILITIES),
    ({"required_capabilities": "gpu"}, "required_capabilities", ValidationKind.INVALID_CAPABILITIES),
    (
        {"required_capabilities": [f"c{i}" for i in range(257)]},
        "required_capabilities",
        ValidationKind.INVALID_CAPABILITIES,
    ),
    ({"required_capabilities": ["x" * 4097]}, "required_capabilities", ValidationKind.INVALID_INPUT),
    ({"policy": {"retry": 1}}, "policy", ValidationKind.INVALID_POLICY_JSON),
    (
        {"policy": ExecutionPolicy(retry=RetryPolicy(max_retries=-1))},
        "policy.retry.max_retries",
        ValidationKind.INVALID_POLICY_JSON,
    ),
    ({"delay_until_ms": "soon"}, "delay_until_ms", ValidationKind.INVALID_INPUT),
    ({"delay_until_ms": 2**63}, "delay_until_ms", ValidationKind.INVALID_INPUT),
    ({"deadline_at_ms": LONG_AGO_MS}, "deadline_at_ms", ValidationKind.INVALID_INPUT),
    ({"deadline_at_ms": LONG_AGO_MS, "idempotency_key": "k"}, "deadline_at_ms", ValidationKind.INVALID_INPUT),
    ({"flow_id": "nope"}, "flow_id", ValidationKind.INVALID_INPUT),
    ({"execution_id": "nope"}, "execution_id", ValidationKind.INVALID_INPUT),
    ({"idempotency_key": ""}, "idempotency_key", ValidationKind.INVALID_INPUT),
    ({"idempotency_key": "x" * 257}, "idempotency_key", ValidationKind.INVALID_INPUT),
    ({"idempotency_ttl_ms": 0}, "idempotency_ttl_ms", ValidationKind.INVALID_INPUT),
    ({"tags": {"Cairn.x": "v"}}, "tags", ValidationKind.INVALID_TAG_KEY),  # C-263
    ({"tags": {"cairn": "v"}}, "tags", ValidationKind.INVALID_TAG_KEY),
    ({"tags": {"cairn.": "v"}}, "tags", ValidationKind.INVALID_TAG_KEY),
    ({"tags": {"cairn..x": "v"}}, "tags", ValidationKind.INVALID_TAG_KEY),
    ({"tags": {"1cairn.x": "v"}}, "tags", ValidationKind.INVALID_TAG_KEY),
    ({"tags": {"a.b": "x" * 257}}, "tags[a.b]", ValidationKind.INVALID_INPUT),
    ({"tags": {"a.b": 5}}, "tags[a.b]", ValidationKind.INVALID_INPUT),
    ({"tags": {f"a.k{i}": "" for i in range(65)}}, "tags", ValidationKind.INVALID_INPUT),
    ({"tags": [("a.b", "c")]}, "tags", ValidationKind.INVALID_INPUT),
]


@pytest.mark.parametrize(("kwargs", "field", "kind"), BAD)
async def test_bad_input_names_its_field_and_changes_nothing(
    rig: Rig, kwargs: dict[str, Any], field: str, kind: ValidationKind
) -> None:
    """V-066, V-067."""
    before = await rig.fingerprint()
    for call in (
        rig.engine.create_execution(**kwargs),
        rig.engine.create_executions([NewExecution(), NewExecution(**kwargs)]),
    ):
        with pytest.raises(Validation) as refused:
            await call
        assert refused.value.kind == kind
        assert refused.value.field in (field, f"executions[1].{field}")
    assert await rig.fingerprint() == before


async def test_bulk_creation_answers_each_in_order(rig: Rig) -> None:
    fixed = f"{{fp:3}}:{uuid4()}"
    await rig.create(execution_id=fixed)
    keyed = await rig.create(idempotency_key="old")
    created = await rig.engine.create_executions(
        [
            NewExecution(lane="a", payload=b"1"),
            NewExecution(execution_id=fixed),
            NewExecution(idempotency_key="old"),
            NewExecution(idempotency_key="new"),
            NewExecution(idempotency_key="new"),
            NewExecution(lane="b", required_capabilities=["gpu", "cpu"], delay_until_ms=2**50),
        ]
    )
    assert [one.is_duplicate for one in created] == [False, True, True, False, True, False]
    assert created[1].execution_id == fixed
    assert created[2].execution_id == keyed
    assert created[3].execution_id == created[4].execution_id
    assert created[5].public_state == PublicState.DELAYED
    assert (await rig.core(created[5].execution_id))["required_capabilities"] == ["cpu", "gpu"]
    assert (await rig.core(created[0].execution_id))["required_capabilities"] == []


async def test_bulk_creation_is_all_or_nothing(rig: Rig) -> None:
    before = await rig.fingerprint()
    with pytest.raises(Validation) as refused:
        await rig.engine.create_executions(
            [NewExecution(idempotency_key="k"), NewExecution(), NewExecution(deadline_at_ms=LONG_AGO_MS)]
        )
    assert refused.value.field == "executions[2].deadline_at_ms"
    assert await rig.fingerprint() == before


async def test_bulk_creation_is_bounded(rig: Rig) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.create_executions([NewExecution()] * 10_001)
    assert refused.value.field == "executions"
    assert await rig.engine.create_executions([]) == []
    for bad in ("text", [1], None):
        with pytest.raises(Validation):
            await rig.engine.create_executions(bad)  # type: ignore[arg-type]


async def test_ten_thousand_at_once(rig: Rig) -> None:
    created = await rig.engine.create_executions([NewExecution(priority=i) for i in range(10_000)])
    assert len({one.execution_id for one in created}) == 10_000
    assert await rig.sql.fetchval("select count(*) from ff_exec_core") == 10_000


@pytest.mark.parametrize("keyed", [{}, {"idempotency_key": "k"}])
async def test_creation_joins_the_callers_transaction(rig: Rig, dsn: str, keyed: dict[str, Any]) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        transaction = connection.transaction()
        await transaction.start()
        created = await rig.engine.create_execution(**keyed, connection=connection)
        bulk = await rig.engine.create_executions([NewExecution()], connection=connection)
        assert await rig.engine.describe_execution(created.execution_id) is None
        await transaction.rollback()
        assert await rig.engine.describe_execution(created.execution_id) is None
        async with connection.transaction():
            kept = await rig.engine.create_execution(**keyed, connection=connection)
        assert not kept.is_duplicate
        assert await rig.engine.describe_execution(kept.execution_id) is not None
        assert await rig.engine.describe_execution(bulk[0].execution_id) is None
    finally:
        await connection.close()


async def test_a_refused_bulk_leaves_nothing_in_the_callers_transaction(rig: Rig, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            with pytest.raises(Validation):
                await rig.engine.create_executions(
                    [NewExecution(idempotency_key="k"), NewExecution(deadline_at_ms=LONG_AGO_MS)],
                    connection=connection,
                )
        assert await rig.sql.fetchval("select count(*) from ff_exec_dedup") == 0
    finally:
        await connection.close()


async def _flow(rig: Rig, state: str = "open") -> str:
    flow = uuid4()
    await rig.sql.execute(
        "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms) values ($1, $2, $3, 1)",
        partition_of(flow),
        flow,
        state,
    )
    return str(flow)


async def test_a_flow_member_lies_in_its_flows_partition(rig: Rig) -> None:
    """C-104, C-217."""
    flow = await _flow(rig)
    one = await rig.create(flow_id=flow)
    two, three = await rig.engine.create_executions([NewExecution(flow_id=flow), NewExecution()])
    assert parse_execution_id(one).partition_key == partition_of(UUID(flow))
    snapshot = await rig.engine.describe_execution(one)
    assert snapshot is not None
    assert snapshot.flow_id == flow
    members = await rig.engine.list_executions(flow_id=flow)
    assert {item.execution_id for item in members.items} == {one, two.execution_id}
    row = await rig.sql.fetchrow("select graph_revision, raw_fields->>'node_count' as nodes from ff_flow_core")
    assert row is not None
    assert (row["graph_revision"], row["nodes"]) == (2, "2")
    assert three.execution_id not in {item.execution_id for item in members.items}


async def test_a_member_cannot_lie_elsewhere(rig: Rig) -> None:
    flow = await _flow(rig)
    elsewhere = (partition_of(UUID(flow)) + 1) % 256
    with pytest.raises(Validation) as refused:
        await rig.create(flow_id=flow, execution_id=f"{{fp:{elsewhere}}}:{uuid4()}")
    assert refused.value.field == "execution_id"


async def test_an_unknown_or_ended_flow_takes_no_members(rig: Rig) -> None:
    """V-090."""
    before = await rig.fingerprint()
    with pytest.raises(NotFound) as missing:
        await rig.create(flow_id=str(uuid4()))
    assert missing.value.entity == "flow"
    assert await rig.fingerprint() == before
    ended = await _flow(rig, "cancelled")
    with pytest.raises(State) as refused:
        await rig.create(flow_id=ended)
    assert refused.value.kind == StateKind.FLOW_ALREADY_TERMINAL


async def test_lanes_are_registered(rig: Rig) -> None:
    await rig.create(lane="one")
    await rig.engine.create_executions([NewExecution(lane="two"), NewExecution(lane="one", delay_until_ms=2**50)])

    async def both_are_there() -> bool:
        lanes = await rig.sql.fetch("select lane_id from ff_lane_registry order by 1")
        return [row["lane_id"] for row in lanes] == ["one", "two"]

    await until(both_are_there)
