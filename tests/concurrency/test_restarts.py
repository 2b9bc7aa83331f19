"""The server goes away and comes back: the same Engine goes on (design §6)."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import asyncpg
import pytest

from ffd import Engine, FailureClass, NewExecution, PublicState, Unavailable
from ffd.config import DatabaseSettings, OutboxSettings
from ffd.core.ids import new_execution_key
from ffd.db import listener, pool
from ffd.db.migrations import migrate
from ffd.db.pool import Connection
from ffd.db.statement import Planning
from ffd.dev.postgres import EmbeddedPostgres
from ffd.telemetry.metrics import LISTEN_RECONNECTS
from tests.concurrency.proxy import Proxy, proxied
from tests.concurrency.sessions import assert_invariants, held, until, until_blocked, until_idle
from tests.support import WORKER, Rig

pytestmark = pytest.mark.anyio

T = TypeVar("T")
Outage = Callable[[EmbeddedPostgres, str], Awaitable[None]]

POOL_MAX = 5


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server that these tests may restart."""
    with EmbeddedPostgres.temporary() as server:
        yield server


@pytest.fixture
async def own_dsn(own_server: EmbeddedPostgres) -> str:
    name = f"t_{uuid.uuid4().hex}"
    async with watching(own_server.dsn()) as sql:
        await sql.execute(f"create database {name}")
    await migrate(own_server.dsn(name), on_progress=lambda _: None)
    return own_server.dsn(name)


@asynccontextmanager
async def watching(dsn: str) -> AsyncIterator[Connection]:
    """A session to look with."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def opened(dsn: str, *, poll_interval_ms: int = 1_000, **database: Any) -> AsyncIterator[Engine]:
    settings = DatabaseSettings(dsn=dsn, **{"pool_max": POOL_MAX, **database})
    async with Engine.open(settings, OutboxSettings(poll_interval_ms=poll_interval_ms)) as engine:
        yield engine


async def restart(server: EmbeddedPostgres, _dsn: str) -> None:
    await anyio.to_thread.run_sync(lambda: server.restart(mode="immediate"))


async def restart_in_order(server: EmbeddedPostgres, _dsn: str) -> None:
    await anyio.to_thread.run_sync(lambda: server.restart(mode="fast"))


async def terminate(_server: EmbeddedPostgres, dsn: str) -> None:
    async with watching(dsn) as sql:
        await sql.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name like 'ffd%'"
        )


OUTAGES = {"restart": restart, "restart_in_order": restart_in_order, "terminate": terminate}
every_outage = pytest.mark.parametrize("outage", OUTAGES.values(), ids=list(OUTAGES))
sudden_outage = pytest.mark.parametrize("outage", [restart, terminate], ids=["restart", "terminate"])


async def fill(engine: Engine, dsn: str) -> None:
    """Open every connection of the two pools that operations use."""
    async with watching(dsn) as sql, held(dsn, "lock table ff_exec_core in access exclusive mode") as holder:
        calls = [engine.create_execution(lane="fill") for _ in range(POOL_MAX)]
        batches = [engine.create_executions([NewExecution(lane="fill")]) for _ in range(POOL_MAX)]
        tasks = [asyncio.ensure_future(call) for call in (*calls, *batches)]
        await until_blocked(sql, "create", count=POOL_MAX)
        await until_blocked(sql, "create_many", count=POOL_MAX)
        await holder.execute("rollback")
        await asyncio.gather(*tasks)
    await until_idle(engine)
    for planning in (Planning.GENERIC, Planning.CUSTOM):
        assert engine._runtime.db.pool(planning).idle == POOL_MAX


@every_outage
async def test_the_pool_survives_an_outage_without_a_new_engine(
    own_server: EmbeddedPostgres, own_dsn: str, outage: Outage
) -> None:
    """Show: after a restart or pg_terminate_backend: `Unavailable` at most once per connection, then all works."""
    async with opened(own_dsn) as engine:
        await fill(engine, own_dsn)
        await outage(own_server, own_dsn)
        unavailable = 0
        for _ in range(4 * POOL_MAX):
            try:
                await engine.create_execution(lane="after")
                await engine.create_executions([NewExecution(lane="after")])
                assert await engine.claim("after", **WORKER) is not None
                assert len(await engine.claim_many("after", 1, **WORKER)) == 1
                await engine.list_executions(limit=1)
            except Unavailable:
                unavailable += 1
        assert unavailable <= 2 * POOL_MAX
        # By now every broken connection has been found.
        await asyncio.gather(*(engine.create_execution(lane="after") for _ in range(3 * POOL_MAX)))


@every_outage
async def test_calls_cut_off_by_an_outage_raise_unavailable_and_may_be_repeated(
    own_server: EmbeddedPostgres, own_dsn: str, outage: Outage
) -> None:
    """Show: every call in flight raises `Unavailable`, nothing else; repeated, each has happened exactly once."""
    async with opened(own_dsn) as engine:
        async with watching(own_dsn) as sql:
            claims = [await Rig(engine, sql).running() for _ in range(5)]
        new_id = str(new_execution_key())
        keyed = [NewExecution(lane="bulk", idempotency_key=f"k{at}") for at in range(3)]
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: engine.complete(claims[0].handle, b"x"),
            lambda: engine.fail(claims[1].handle, "x", FailureClass.PERMANENT),
            lambda: engine.complete_many([(claims[2].handle, b"x"), (claims[3].handle, None)]),
            lambda: engine.renew(claims[4].handle),
            lambda: engine.create_execution(lane="single", execution_id=new_id),
            lambda: engine.create_executions(keyed),
        ]
        tables = "ff_exec_core, ff_attempt, ff_exec_dedup"
        statements = ("complete", "fail", "complete_many", "renew_with_event", "create", "take_keys")
        async with (
            watching(own_dsn) as sql,
            held(own_dsn, f"lock table {tables} in access exclusive mode"),
        ):
            tasks = [asyncio.ensure_future(call()) for call in calls]
            await until_blocked(sql, *statements, count=len(calls))
            await outage(own_server, own_dsn)
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(answer) for answer in answers] == [Unavailable] * len(calls)
        for call in calls:
            await repeated(call)
        async with watching(own_dsn) as sql:
            assert await sql.fetchval("select count(*) from ff_exec_core where lane_id = 'bulk'") == 3
            assert await sql.fetchval("select count(*) from ff_completion_event") == 4
            await assert_invariants(sql)


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a call that is repeated while the database is unavailable."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return await call()
        except Unavailable:
            assert time.monotonic() < deadline
            await anyio.sleep(0.01)


async def until_listening(engine: Engine) -> None:
    async def is_connected() -> bool:
        return engine._runtime.listener.is_connected

    await until(is_connected, "the listener is connected")


@sudden_outage
async def test_a_waiting_claim_survives_an_outage_and_gets_the_work_created_afterwards(
    own_server: EmbeddedPostgres, own_dsn: str, outage: Outage
) -> None:
    """Show: a claim waiting with wait_ms survives the outage; the listener reconnects and wakes it."""
    async with opened(own_dsn, poll_interval_ms=60_000) as engine, opened(own_dsn) as other:
        waiting = asyncio.ensure_future(engine.claim("idle", wait_ms=60_000, **WORKER))
        await until_listening(engine)
        await outage(own_server, own_dsn)
        await until_listening(engine)
        created = await repeated(lambda: other.create_execution(lane="idle"))
        with anyio.fail_after(20):
            claim = await waiting
        assert claim is not None
        assert claim.execution_id == created.execution_id


@sudden_outage
async def test_a_waiting_claim_that_looks_during_an_outage_goes_on_waiting(
    own_server: EmbeddedPostgres, own_dsn: str, outage: Outage
) -> None:
    """Show: a claim waiting with wait_ms survives looks that fall into the outage: it has time left to wait."""
    async with opened(own_dsn, poll_interval_ms=10) as engine, opened(own_dsn) as other:
        waiting = asyncio.ensure_future(engine.claim("idle", wait_ms=60_000, **WORKER))
        many = asyncio.ensure_future(engine.claim_many("idle", 1, wait_ms=60_000, **WORKER))
        await until_listening(engine)
        await outage(own_server, own_dsn)
        for _ in range(2):
            await repeated(lambda: other.create_execution(lane="idle"))
        with anyio.fail_after(20):
            assert await waiting is not None
            assert len(await many) == 1


@sudden_outage
async def test_wait_for_result_survives_an_outage(own_server: EmbeddedPostgres, own_dsn: str, outage: Outage) -> None:
    """Show: wait_for_result survives the outage and returns when the execution ends afterwards."""
    async with opened(own_dsn, poll_interval_ms=20) as engine, opened(own_dsn) as other:
        created = await other.create_execution(lane="job")
        waiting = asyncio.ensure_future(engine.wait_for_result(created.execution_id, timeout_ms=60_000))
        await until_listening(engine)
        await outage(own_server, own_dsn)
        claim = await repeated(lambda: other.claim("job", **WORKER))
        assert claim is not None
        await repeated(lambda: other.complete(claim.handle, b"x"))
        with anyio.fail_after(20):
            assert (await waiting).public_state == PublicState.COMPLETED


@sudden_outage
async def test_the_doorbell_rings_again_after_an_outage(
    own_server: EmbeddedPostgres, own_dsn: str, outage: Outage
) -> None:
    """Show: writers ring again after an outage: a waiter with a long poll is woken by a create."""
    async with opened(own_dsn, poll_interval_ms=60_000) as engine, opened(own_dsn) as other:
        await other.create_execution(lane="warm")
        await until_listening_somewhere(engine)
        await outage(own_server, own_dsn)
        await until_listening(engine)
        waiting = asyncio.ensure_future(repeated(lambda: engine.claim("idle", wait_ms=60_000, **WORKER)))
        await until_waiting(engine)
        await repeated(lambda: other.create_execution(lane="idle"))
        with anyio.fail_after(10):
            assert await waiting is not None


async def until_listening_somewhere(engine: Engine) -> None:
    """Start the listener, as the first waiter does."""
    assert await engine.claim("nothing", wait_ms=1, **WORKER) is None
    await until_listening(engine)


async def until_waiting(engine: Engine) -> None:
    async def has_ticket() -> bool:
        return "idle" in engine._runtime.wakeups._lanes

    await until(has_ticket, "the claim waits")


async def test_a_server_that_is_down_is_unavailable_and_nothing_else(
    own_server: EmbeddedPostgres, own_dsn: str
) -> None:
    """Show: every operation on a server that is down raises `Unavailable`; none hangs, none raises a driver's error."""
    async with opened(own_dsn) as engine:
        async with watching(own_dsn) as sql:
            claim = await Rig(engine, sql).running()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: engine.claim("default", **WORKER),
            lambda: engine.claim_many("default", 2, **WORKER),
            lambda: engine.renew(claim.handle),
            lambda: engine.renew_many([claim.handle]),
            lambda: engine.complete(claim.handle),
            lambda: engine.create_execution(),
            lambda: engine.create_executions([NewExecution(idempotency_key="k")]),
            lambda: engine.describe_execution(claim.execution_id),
            lambda: engine.list_executions(),
        ]
        await anyio.to_thread.run_sync(own_server.stop)
        try:
            for call in calls:
                with pytest.raises(Unavailable), anyio.fail_after(15):
                    await call()
        finally:
            await anyio.to_thread.run_sync(own_server.start)


async def end_sessions(sql: Connection, name: str) -> None:
    await sql.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        f" where datname = current_database() and application_name = '{name}'"
    )


async def is_woken_by_a_create(engine: Engine, other: Engine) -> None:
    """A waiting claim gets what another engine creates, long before the next poll."""
    waiting = asyncio.ensure_future(engine.claim("idle", wait_ms=60_000, **WORKER))
    await until_waiting(engine)
    await other.create_execution(lane="idle")
    with anyio.fail_after(10):
        while not waiting.done():
            # A ring that was under way when the session ended may be lost, later ones must not be.
            other._runtime.ring((("ff_work", "idle"),))
            await anyio.sleep(0.01)
    assert await waiting is not None


async def test_the_doorbell_outlives_a_session_that_ended_unseen(dsn: str) -> None:
    """Show: the server said farewell, the end of the connection is still on its way: the doorbell connects again."""
    async with (
        proxied(dsn) as proxy,
        watching(dsn) as sql,
        opened(dsn, poll_interval_ms=60_000) as engine,
        opened(proxy.dsn, poll_interval_ms=60_000) as other,
    ):
        await other.create_execution(lane="warm")
        await until(rang(proxy), "the doorbell is connected")
        proxy.keeps_ends = True
        await end_sessions(sql, "ffd doorbell")
        await until(said_farewell(proxy, "ffd doorbell"), "the farewell has arrived")
        await is_woken_by_a_create(engine, other)


async def test_the_listener_outlives_a_session_that_ended_unseen(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show: the server said farewell, the end of the connection never comes: the probe finds it, LISTEN is renewed."""
    monkeypatch.setattr(listener, "PROBE_INTERVAL_S", 0.05)
    async with (
        proxied(dsn) as proxy,
        watching(dsn) as sql,
        opened(dsn, poll_interval_ms=60_000) as other,
        opened(proxy.dsn, poll_interval_ms=60_000) as engine,
    ):
        await until_listening_somewhere(engine)
        proxy.keeps_ends = True
        reconnects = LISTEN_RECONNECTS._value.get()
        await end_sessions(sql, "ffd listener")
        await until(said_farewell(proxy, "ffd listener"), "the farewell has arrived")

        async def has_reconnected() -> bool:
            return bool(LISTEN_RECONNECTS._value.get() > reconnects and engine._runtime.listener.is_connected)

        await until(has_reconnected, "the listener has reconnected", 10)
        await is_woken_by_a_create(engine, other)


async def test_operations_outlive_sessions_that_ended_unseen(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show: the server said farewell, the end of the connection never comes: `Unavailable` once per connection."""
    monkeypatch.setattr(pool, "CLOSE_TIMEOUT_S", 0.2)
    async with proxied(dsn) as proxy, watching(dsn) as sql, opened(proxy.dsn, pool_max=1) as engine:
        await engine.create_execution()
        await until_registered(sql)
        await until_idle(engine)
        proxy.keeps_ends = True
        await end_sessions(sql, "ffd")
        await until(said_farewell(proxy, "ffd"), "the farewell has arrived")
        with pytest.raises(Unavailable):
            await engine.create_execution()
        with anyio.fail_after(10):
            await engine.create_execution()


async def until_registered(sql: Connection) -> None:
    """Lanes are registered in the background, once: wait until that is over."""

    async def is_registered() -> bool:
        return bool(await sql.fetchval("select count(*) from ff_lane_registry"))

    await until(is_registered, "the lane is registered")


def rang(proxy: Proxy) -> Callable[[], Awaitable[bool]]:
    async def has_rung() -> bool:
        return proxy.sent["ffd doorbell"]["E"] > 0

    return has_rung


def said_farewell(proxy: Proxy, name: str) -> Callable[[], Awaitable[bool]]:
    async def has_arrived() -> bool:
        return proxy.received[name]["E"] > 0

    return has_arrived


Fate = Callable[[Connection, Connection], Awaitable[None]]


async def blocked_bulk_create(engine: Engine, dsn: str, fate: Fate) -> object:
    """A keyed bulk create, stopped inside its transaction, and what it says when `fate` has struck."""
    first = await engine.create_execution(lane="bulk")
    new = NewExecution(idempotency_key="k", execution_id=first.execution_id)
    async with watching(dsn) as sql, held(dsn, "delete from ff_exec_core") as holder:
        task = asyncio.ensure_future(engine.create_executions([new]))
        await until_blocked(sql, "create_many")
        await fate(sql, holder)
        (answer,) = await asyncio.gather(task, return_exceptions=True)
    return answer


async def test_a_transaction_whose_connection_is_lost_raises_unavailable(dsn: str) -> None:
    """Show: connection loss inside a transaction of several statements is `Unavailable`, not a driver's error."""

    async def kill(sql: Connection, _holder: Connection) -> None:
        await sql.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name = 'ffd'"
        )

    async with opened(dsn) as engine:
        answer = await blocked_bulk_create(engine, dsn, kill)
        assert isinstance(answer, Unavailable), repr(answer)
        await repeated(lambda: engine.create_execution(lane="bulk"))


async def test_a_transaction_that_meets_a_lock_timeout_is_tried_again(dsn: str) -> None:
    """Show: 55P03 in a transaction of several statements: tried again, like a single statement (three tries)."""

    async def wait_for_one_timeout(sql: Connection, holder: Connection) -> None:
        start_of_try = (
            "select xact_start from pg_stat_activity where datname = current_database()"
            " and query like '/* ffd:create_many */%' and wait_event_type = 'Lock'"
        )
        first = await sql.fetchval(start_of_try)

        async def is_second_try() -> bool:
            latest = await sql.fetchval(start_of_try)
            return latest is not None and latest != first

        with anyio.move_on_after(3):
            await until(is_second_try, "a second try")
        await holder.execute("rollback")

    async with opened(dsn, lock_timeout_ms=300) as engine:
        answer = await blocked_bulk_create(engine, dsn, wait_for_one_timeout)
    assert isinstance(answer, list), repr(answer)
