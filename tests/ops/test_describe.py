"""Reading: snapshots, attempts, results, pages."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from ffd import Engine, ExecutionSnapshot, FailureClass, NewExecution, NotFound, PublicState, Validation
from tests.support import WORKER, Rig

pytestmark = pytest.mark.anyio

UNKNOWN = f"{{fp:9}}:{uuid4()}"


async def test_an_unknown_execution_reads_as_none(rig: Rig) -> None:
    """C-093, C-095, C-098, C-213, C-260."""
    assert await rig.engine.describe_execution(UNKNOWN) is None
    assert await rig.engine.get_execution_result(UNKNOWN) is None
    with pytest.raises(NotFound):
        await rig.engine.list_attempts(UNKNOWN)
    with pytest.raises(NotFound):
        await rig.engine.explain_execution(UNKNOWN)


async def test_a_running_execution_has_no_result(rig: Rig) -> None:
    """C-099, C-094."""
    claim = await rig.running()
    assert await rig.engine.get_execution_result(claim.execution_id) is None
    snapshot = await rig.engine.describe_execution(claim.execution_id)
    assert snapshot is not None
    assert snapshot.public_state == PublicState.RUNNING
    assert str(snapshot.public_state) == "running"


async def test_no_attempts_before_the_first_claim(rig: Rig) -> None:
    assert await rig.engine.list_attempts(await rig.create()) == []


@pytest.mark.parametrize("bad", ["", "nope", None, 7, "{fp:300}:00000000-0000-4000-8000-000000000001"])
async def test_a_malformed_id_is_named(rig: Rig, bad: Any) -> None:
    for call in (
        rig.engine.describe_execution(bad),
        rig.engine.list_attempts(bad),
        rig.engine.get_execution_result(bad),
        rig.engine.explain_execution(bad),
        rig.engine.wait_for_result(bad, timeout_ms=1),
    ):
        with pytest.raises(Validation) as refused:
            await call
        assert refused.value.field == "execution_id"


async def _all(engine: Engine, limit: int, **filters: Any) -> list[ExecutionSnapshot]:
    items: list[ExecutionSnapshot] = []
    after = None
    while True:
        page = await engine.list_executions(after=after, limit=limit, **filters)
        assert len(page.items) <= limit
        items += page.items
        if page.next is None:
            return items
        assert len(page.items) == limit
        after = page.next


async def test_pages_show_each_execution_once_newest_first(rig: Rig) -> None:
    """C-215, C-266, C-267."""
    created = await rig.engine.create_executions([NewExecution() for _ in range(15)])
    for _ in range(4):
        await rig.engine.complete((await rig.claim()).handle)
    await rig.claim()
    listed = await _all(rig.engine, 5)
    ids = [item.execution_id for item in listed]
    assert sorted(ids) == sorted(one.execution_id for one in created)
    assert [text.split(":", 2)[2] for text in ids] == sorted((text.split(":", 2)[2] for text in ids), reverse=True)
    assert len(await _all(rig.engine, 7)) == 15
    assert (await rig.engine.list_executions(limit=15)).next is None


async def test_filters_narrow(dsn: str, rig: Rig) -> None:
    async with Engine.connect(dsn, namespace="team") as team:
        theirs = (await team.create_execution(lane="b", tags={"app.x": "1"})).execution_id
    mine = await rig.create(lane="a", tags={"app.x": "1", "app.y": "z=9"})
    done = await rig.running(lane="a")
    done_id = (await rig.engine.list_executions(public_state="running")).items[0].execution_id

    async def ids(**filters: Any) -> set[str]:
        return {item.execution_id for item in await _all(rig.engine, 1, **filters)}

    assert done.execution_id in (mine, done_id)
    assert await ids(lane="b") == {theirs}
    assert await ids(namespace="team") == {theirs}
    assert theirs in await ids(tag=("app.x", "1"))
    assert await ids(tag="app.x=1", lane="b") == {theirs}
    assert await ids(tag="app.y=z=9") == {mine}
    assert await ids(public_state=PublicState.RUNNING) == {done.execution_id}
    assert await ids(public_state="failed") == set()
    assert await ids(flow_id=str(uuid4())) == set()


async def test_limit_zero_is_an_empty_page(rig: Rig) -> None:
    """C-204."""
    await rig.create()
    assert (await rig.engine.list_executions(limit=0)).items == []


@pytest.mark.parametrize(
    ("filters", "field"),
    [
        ({"limit": 1001}, "limit"),
        ({"limit": -1}, "limit"),
        ({"public_state": "nonsense"}, "public_state"),
        ({"lane": "x" * 65}, "lane"),
        ({"flow_id": "x"}, "flow_id"),
        ({"namespace": ""}, "namespace"),
        ({"tag": "no-equals"}, "tag"),
        ({"tag": ("Bad", "v")}, "tag"),
        ({"tag": ("a.b", 5)}, "tag"),
        ({"after": "nonsense"}, "after"),
    ],
)
async def test_a_bad_filter_is_named(rig: Rig, filters: dict[str, Any], field: str) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.list_executions(**filters)
    assert refused.value.field == field


async def test_explain_names_what_each_state_waits_for(rig: Rig) -> None:
    """I6."""

    async def told(execution_id: str) -> tuple[str, str]:
        explanation = await rig.engine.explain_execution(execution_id)
        assert explanation.next_step
        assert explanation.since_ms > 0
        return (str(explanation.state), explanation.waiting_for)

    waiting = await rig.create(required_capabilities=["gpu"])
    assert await told(waiting) == ("waiting", "worker")
    assert "gpu" in (await rig.engine.explain_execution(waiting)).next_step
    delayed = await rig.create(delay_until_ms=2**50)
    assert await told(delayed) == ("delayed", "delay")
    running = await rig.running(lane="run")
    assert await told(running.execution_id) == ("running", "owner")
    await rig.sql.execute("update ff_attempt set lease_expires_at_ms = 1")
    assert await told(running.execution_id) == ("running", "lease_expiry")
    retrying = await rig.running(lane="fail")
    await rig.engine.fail(retrying.handle, "boom", FailureClass.TRANSIENT)
    assert await told(retrying.execution_id) == ("delayed", "retry_backoff")
    assert (await rig.engine.explain_execution(retrying.execution_id)).details["failure_message"] == "boom"
    done = await rig.running(lane="done")
    await rig.engine.complete(done.handle)
    assert await told(done.execution_id) == ("completed", "nothing")
    failed = await rig.running(lane="failed")
    await rig.engine.fail(failed.handle, "bad", FailureClass.PERMANENT)
    assert await told(failed.execution_id) == ("failed", "nothing")


async def test_explain_has_a_word_for_every_state(rig: Rig) -> None:
    from ffd.core.state import ROWS

    execution_id = await rig.create()
    for name, row in ROWS.items():
        await rig.sql.execute(
            "update ff_exec_core set lifecycle_phase = $1, ownership_state = $2, eligibility_state = $3,"
            " public_state = $4, attempt_state = $5, blocking_reason = $6",
            row.lifecycle_phase,
            row.ownership_state,
            row.eligibility_state,
            row.public_state.value,
            row.attempt_state,
            row.blocking_reason,
        )
        explanation = await rig.engine.explain_execution(execution_id)
        assert explanation.state == row.public_state, name
        assert explanation.waiting_for, name


async def test_explain_counts_what_stands_in_front(rig: Rig) -> None:
    await rig.engine.create_executions([NewExecution(priority=5) for _ in range(3)])
    await rig.create(priority=9, required_capabilities=["other"])
    last = await rig.create(priority=1)
    assert (await rig.engine.explain_execution(last)).details["ahead"] == 3
    await rig.engine.claim("default", **WORKER)
    assert (await rig.engine.explain_execution(last)).details["ahead"] == 2
