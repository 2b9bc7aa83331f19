"""The caller's transaction and its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from ffd import Contention, Handle, HandleKind, NotFound, State, Validation
from tests.support import Clock, Rig, stale

pytestmark = pytest.mark.anyio


@pytest.fixture
async def mine(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


async def test_a_live_lease_passes_and_is_held(rig: Rig, mine: asyncpg.Connection[Any]) -> None:
    claim = await rig.running()
    async with mine.transaction():
        await rig.engine.assert_lease(claim.handle, connection=mine)
        await rig.engine.renew(claim.handle)
        completing = asyncio.create_task(rig.engine.complete(claim.handle))
        done, _ = await asyncio.wait({completing}, timeout=0.2)
        assert not done, "the end must wait for the caller's commit"
        assert await rig.expire() == 0, "a sweep passes it by"
    await completing
    assert await rig.completions(claim.execution_id) == ["success"]


async def test_a_lost_lease_raises(rig: Rig, mine: asyncpg.Connection[Any], clock: Clock) -> None:
    claim = await rig.running()
    async with mine.transaction():
        with pytest.raises(Contention):
            await rig.engine.assert_lease(stale(claim, epoch=1), connection=mine)
        lease = claim.handle.lease
        elsewhere = lease._replace(partition_key=(lease.partition_key + 1) % 256)
        with pytest.raises(NotFound):
            await rig.engine.assert_lease(Handle.of_lease(HandleKind.FRESH, elsewhere), connection=mine)
    await clock.advance(30_000)
    async with mine.transaction():
        with pytest.raises(State):
            await rig.engine.assert_lease(claim.handle, connection=mine)
    await rig.expire()
    async with mine.transaction():
        with pytest.raises(Contention):
            await rig.engine.assert_lease(claim.handle, connection=mine)


async def test_it_needs_a_transaction(rig: Rig, mine: asyncpg.Connection[Any]) -> None:
    claim = await rig.running()
    for bad in (mine, None, "connection"):
        with pytest.raises(Validation) as refused:
            await rig.engine.assert_lease(claim.handle, connection=bad)  # type: ignore[arg-type]
        assert refused.value.field == "connection"
