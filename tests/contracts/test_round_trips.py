"""One round trip per call, counted on the wire.

A round trip is one ReadyForQuery from the server: asyncpg sends Bind, Execute and Sync together and waits for it.
The calls are warm: statements are prepared once per connection. The doorbell and the listener have sessions of
their own, which are no caller's business and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from ffd import Claim, Contention, Engine, FailureClass, NewExecution, ResumeToken
from ffd.config import DatabaseSettings, OutboxSettings
from ffd.core.ids import new_uuid, partition_of
from ffd.db.pool import Connection
from tests.concurrency.proxy import Proxy, proxied
from tests.concurrency.sessions import until, until_idle
from tests.support import WORKER, stale

pytestmark = pytest.mark.anyio

Call = Callable[[Engine, list[Claim]], Awaitable[object]]


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    async with proxied(dsn) as proxy:
        yield proxy


@pytest.fixture
async def engine(proxy: Proxy) -> AsyncIterator[Engine]:
    """An engine with one connection of each kind, behind the proxy."""
    settings = DatabaseSettings(dsn=proxy.dsn, pool_max=1)
    async with Engine.open(settings, OutboxSettings()) as engine:
        yield engine


async def running(engine: Engine, count: int, lane: str = "default") -> list[Claim]:
    await engine.create_executions([NewExecution(lane=lane)] * count)
    return await engine.claim_many(lane, count, **WORKER)


async def raises(call: Awaitable[object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await call


# Each call gets ten claims of its own.
ONE: dict[str, Call] = {
    "claim": lambda e, c: e.claim("work", **WORKER),
    "claim of nothing": lambda e, c: e.claim("idle", **WORKER),
    "claim_many": lambda e, c: e.claim_many("work", 10, **WORKER),
    "renew": lambda e, c: e.renew(c[0].handle),
    "renew_many": lambda e, c: e.renew_many([claim.handle for claim in c[2:]]),
    "progress": lambda e, c: e.progress(c[0].handle, percent=1),
    "complete": lambda e, c: e.complete(c[0].handle, b"x"),
    "complete_many": lambda e, c: e.complete_many([(claim.handle, b"x") for claim in c[2:]]),
    "fail": lambda e, c: e.fail(c[0].handle, "x", FailureClass.TRANSIENT),
    "fail for good": lambda e, c: e.fail(c[0].handle, "x", FailureClass.PERMANENT),
    "release": lambda e, c: e.release(c[0].handle),
    "delay": lambda e, c: e.delay(c[0].handle, 10**15),
    "create_execution": lambda e, c: e.create_execution(lane="new"),
    "create_execution with a key": lambda e, c: e.create_execution(lane="new", idempotency_key=str(new_uuid())),
    "create_executions": lambda e, c: e.create_executions([NewExecution(lane="new")] * 100),
    "describe_execution": lambda e, c: e.describe_execution(c[0].execution_id),
    "get_execution_result": lambda e, c: e.get_execution_result(c[0].execution_id),
    "explain_execution": lambda e, c: e.explain_execution(c[0].execution_id),
    "list_executions": lambda e, c: e.list_executions(limit=5),
    "list_attempts": lambda e, c: e.list_attempts(c[0].execution_id),
}

# A refusal is told apart in a second statement, which alone sees the present (design §7).
TWO: dict[str, Call] = {
    "complete with a lost lease": lambda e, c: raises(e.complete(stale(c[0], epoch=-1)), Contention),
    "renew with a lost lease": lambda e, c: raises(e.renew(stale(c[0], epoch=-1)), Contention),
    "renew_many with lost leases": lambda e, c: e.renew_many([stale(claim, epoch=-1) for claim in c]),
    "complete_many with lost leases": lambda e, c: e.complete_many([(stale(claim, epoch=-1), None) for claim in c]),
    "create_execution that exists": lambda e, c: e.create_execution(execution_id=c[0].execution_id),
    "claim_from_resume_grant after a release": lambda e, c: take_over(e, c[1]),
}


async def take_over(engine: Engine, released: Claim) -> None:
    assert await engine.claim_from_resume_grant(ResumeToken(released.execution_id, "o", "o-1")) is not None


async def count(engine: Engine, proxy: Proxy, call: Call) -> tuple[int, Counter[str]]:
    """The round trips of one warm call, and the messages it sent."""
    await engine.create_executions([NewExecution(lane="work")] * 50)
    for _ in range(2):
        await call(engine, await prepared(engine))
    claims = await prepared(engine)
    await until_settled(engine)
    trips, sent = proxy.round_trips(), proxy.sent["ffd"].copy()
    await call(engine, claims)
    return proxy.round_trips() - trips, proxy.sent["ffd"] - sent


async def until_settled(engine: Engine) -> None:
    """Lanes are registered in the background, once: wait until that is over."""

    async def is_registered() -> bool:
        return not engine._runtime._registering

    await until(is_registered, "new lanes are registered")
    await until_idle(engine)


async def prepared(engine: Engine) -> list[Claim]:
    """Ten running executions, the second of them given back."""
    claims = await running(engine, 10, str(new_uuid()))
    await engine.release(claims[1].handle)
    return claims


@pytest.mark.parametrize("name", ONE)
async def test_a_call_is_one_round_trip(engine: Engine, proxy: Proxy, name: str) -> None:
    """Show: one autocommit statement, one round trip: no BEGIN, no reset, no second PREPARE."""
    trips, sent = await count(engine, proxy, ONE[name])
    assert trips == 1, sent
    assert sent == {"B": 1, "E": 1, "S": 1}


@pytest.mark.parametrize("name", TWO)
async def test_a_refusal_or_a_second_look_is_two_round_trips(engine: Engine, proxy: Proxy, name: str) -> None:
    """Show: whatever was refused is classified in one more statement, for a batch as well, not one per item."""
    trips, sent = await count(engine, proxy, TWO[name])
    assert trips == 2, sent
    assert sent == {"B": 2, "E": 2, "S": 2}


async def test_an_executions_life_is_three_round_trips(engine: Engine, proxy: Proxy) -> None:
    """Show: create, claim, complete on a warm engine: three statements, whoever listens."""
    for _ in range(3):
        await until_settled(engine)
        trips = proxy.round_trips()
        await engine.create_execution(lane="life")
        claim = await engine.claim("life", **WORKER)
        assert claim is not None
        await engine.complete(claim.handle)
    assert proxy.round_trips() - trips == 3


async def test_endings_of_flow_members_take_the_flow_row_first(engine: Engine, proxy: Proxy, sql: Connection) -> None:
    """Show: the exception to one round trip: a member's ending is a transaction under its flow's lock (design §3.3)."""
    flow = new_uuid()
    await sql.execute(
        "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
        " values ($1, $2, 'open', 1)",
        partition_of(flow),
        flow,
    )
    for _ in range(3):
        await engine.create_execution(lane="flow", flow_id=str(flow))
        claim = await engine.claim("flow", **WORKER)
        assert claim is not None
        await until_settled(engine)
        trips = proxy.round_trips()
        await engine.complete(claim.handle)
    # A look that finds a member, why, begin, flow, execution, its edges, the flow's end, commit.
    assert proxy.round_trips() - trips <= 8


async def test_rings_and_listening_use_sessions_of_their_own(engine: Engine, proxy: Proxy) -> None:
    """Show: the doorbell and the listener are not on the path of a call: the counts above are of callers alone."""
    assert await engine.claim("idle", wait_ms=20, **WORKER) is None
    await engine.create_execution(lane="idle")
    assert await engine.claim("idle", wait_ms=20, **WORKER) is not None
    assert proxy.round_trips("ffd listener") > 0
    names: set[Any] = {name for name, sent in proxy.sent.items() if sent}
    assert names <= {"ffd", "ffd listener", "ffd doorbell"}
