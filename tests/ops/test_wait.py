"""Waiting for results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from ffd import Engine, FailureClass, NewExecution, NotFound, PublicState, Validation
from ffd.config import OutboxSettings
from tests.support import WORKER, Rig, until

pytestmark = pytest.mark.anyio

NO_POLL = OutboxSettings(poll_interval_ms=60_000)


async def test_an_ended_execution_answers_at_once(rig: Rig) -> None:
    claim = await rig.running()
    await rig.engine.complete(claim.handle, b"r")
    snapshot = await rig.engine.wait_for_result(claim.execution_id, timeout_ms=0)
    assert snapshot.public_state == PublicState.COMPLETED


async def test_waiters_are_woken_by_the_ending_in_another_engine(rig: Rig, open_engine: Callable[..., Any]) -> None:
    """Without a poll: only the ring can wake them within the limit."""
    created = await rig.engine.create_executions([NewExecution() for _ in range(20)])
    async with open_engine(outbox=NO_POLL) as waiting:
        waits = [asyncio.create_task(waiting.wait_for_result(one.execution_id, timeout_ms=30_000)) for one in created]
        await until(lambda: waiting._runtime.endings._waiters and waiting._runtime.listener.is_connected)
        for claim in await rig.engine.claim_many("default", 20, **WORKER):
            await rig.engine.fail(claim.handle, "no", FailureClass.PERMANENT)
        snapshots = await asyncio.gather(*waits)
    assert {snapshot.public_state for snapshot in snapshots} == {PublicState.FAILED}
    assert not waiting._runtime.endings._waiters


async def test_polling_stands_in_for_lost_rings(dsn: str, rig: Rig, open_engine: Callable[..., Any]) -> None:
    claim = await rig.running()
    silent = OutboxSettings(notify="off", poll_interval_ms=20)
    async with open_engine(outbox=silent) as waiting, open_engine(outbox=silent) as ending:
        wait = asyncio.create_task(waiting.wait_for_result(claim.execution_id, timeout_ms=30_000))
        await asyncio.sleep(0)
        await ending.complete(claim.handle)
        assert (await wait).public_state == PublicState.COMPLETED


async def test_time_runs_out(rig: Rig) -> None:
    execution_id = await rig.create()
    with pytest.raises(TimeoutError, match="waiting after 30 ms"):
        await rig.engine.wait_for_result(execution_id, timeout_ms=30)
    assert not rig.engine._runtime.endings._waiters


async def test_an_unknown_or_vanished_execution_is_not_found(rig: Rig) -> None:
    with pytest.raises(NotFound):
        await rig.engine.wait_for_result(f"{{fp:1}}:{uuid4()}", timeout_ms=10)
    execution_id = await rig.create()
    wait = asyncio.create_task(rig.engine.wait_for_result(execution_id, timeout_ms=30_000))
    await until(lambda: rig.engine._runtime.endings._waiters)
    await rig.sql.execute("delete from ff_exec_core")
    with pytest.raises(NotFound):
        await wait


@pytest.mark.parametrize("timeout_ms", [-1, None, 1.5, 10**12])
async def test_a_bad_timeout_is_named(rig: Rig, timeout_ms: Any) -> None:
    with pytest.raises(Validation) as refused:
        await rig.engine.wait_for_result(await rig.create(), timeout_ms=timeout_ms)
    assert refused.value.field == "timeout_ms"


async def test_closing_the_engine_ends_its_waits(dsn: str, rig: Rig) -> None:
    execution_id = await rig.create()
    async with Engine.connect(dsn) as engine:
        wait = asyncio.create_task(engine.wait_for_result(execution_id, timeout_ms=200))
        await until(lambda: engine._runtime.endings._waiters)
    with pytest.raises(Exception, match=r"closed|after 200 ms"):
        await wait
