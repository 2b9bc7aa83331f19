"""Suspend, signal, resume: by row locks under READ COMMITTED, and the same with SERIALIZABLE forced.

Both run the engine's own statements, the row lock included, with the same three tries; only the first statement of
a transaction differs. A caller that is answered RETRY_EXHAUSTED calls again at once, until its signal is stored: so
both sides do the same work, on rows of the same size, and a rate counts signals accepted. These signals go to
executions made for the turn, whose conditions they do not meet; a cycle's signal resumes its execution.

SERIALIZABLE finds conflicts by index page: in an almost empty database even executions that have nothing to do with
each other share their pages and abort each other. So that this does not count, others that wait are loaded first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple, TypeVar

from benchmarks.bench import Bench, connected, settle
from benchmarks.report import Figure, Finding, compare, middle, percentile
from benchmarks.workload import LEASE_TTL_MS, spend
from ffd import (
    Accepted,
    Claim,
    Contention,
    ContentionKind,
    Count,
    CountKind,
    Engine,
    EngineError,
    ExecutionPolicy,
    Fresh,
    NewExecution,
    Signal,
    SignalEffect,
    Single,
    Suspend,
)
from ffd.config import DatabaseSettings, OutboxSettings
from ffd.core.conditions import COUNT_MAX, Condition, condition_document
from ffd.core.limits import SIGNALS_MAX
from ffd.db.database import Database
from ffd.db.errors import is_connection_clean
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.ops.stored_signals import encode

T = TypeVar("T")

CONNECTIONS: Final = (1, 8, 64)
MANY: Final = 64
KEY: Final = "bench"
RESUMES: Final = Single(KEY)
ONLY_APPENDS: Final = Count(COUNT_MAX, CountKind.DISTINCT_SIGNALS, (KEY,))
POLICY: Final = ExecutionPolicy(max_signals=SIGNALS_MAX)
_LOCKS, _SERIALIZABLE = "row locks", "SERIALIZABLE"


class _SerializableDatabase(Database):
    """The database door with the other isolation for transactions; single statements stay as they are."""

    async def transact(
        self,
        op: str,
        body: Callable[[Connection], Awaitable[T]],
        planning: Planning = Planning.GENERIC,
    ) -> T:
        """`Database.transact` but for the isolation level; naming it in `begin` costs no round trip."""
        pool = self._pools[planning]
        tries = 0
        while True:
            tries += 1
            connection = pool.take_idle(self._loop) or await self._acquire(pool, op)
            try:
                await connection.execute("begin isolation level serializable")
                result = await body(connection)
                await connection.execute("commit")
            except BaseException as error:  # noqa: BLE001  (settled, then always raised or retried)
                if isinstance(error, EngineError) or is_connection_clean(error):
                    await self._roll_back(pool, connection)
                else:
                    self._settle(pool, connection, error)
                await self._pause(error, tries, op)
            else:
                pool.release(connection)
                return result


@asynccontextmanager
async def _open(dsn: str, database: type[Database], isolation: str) -> AsyncIterator[Engine]:
    """An engine whose isolation is checked: the comparison would be void otherwise."""
    settings = DatabaseSettings(dsn=dsn, pool_max=max(CONNECTIONS))
    runtime = Runtime(settings, OutboxSettings(), "default")
    runtime.db = database(settings)
    try:
        await runtime.open()
        found = await runtime.db.transact("isolation", lambda sql: sql.fetchval("show transaction_isolation"))
        if found != isolation:
            raise RuntimeError(f"expected {isolation}, transactions are {found}")
        yield Engine(runtime)
    finally:
        await runtime.close()


# $1 how many, $2 condition, $3 waitpoint key: executions that wait for a signal which never comes.
LOAD: Final = Statement(
    "bench_load_suspended",
    """
    with k as (
      select floor(random() * 256)::int as partition_key, gen_random_uuid() as id, gen_random_uuid() as other_id,
             ff_now_ms() as now, 'suspended'::text as state_row
      from generate_series(1, $1::int)),
    x as (
      insert into ff_exec_core (partition_key, execution_id, lane_id, raw_fields, created_at_ms, state_since_ms,
                                lease_epoch, [[columns]])
      select partition_key, id, 'other', '{"namespace": "default", "execution_kind": "bench"}', now, now, 2,
             [[values by k.state_row: suspended]]
      from k),
    a as (
      insert into ff_attempt (partition_key, execution_id, attempt_index, worker_id, worker_instance_id, lease_epoch,
                              started_at_ms, outcome)
      select partition_key, id, 0, 'other', 'other-1', 2, now, 'attempt_interrupted' from k),
    s as (
      insert into ff_suspension_current (partition_key, execution_id, suspension_id, suspended_at_ms, condition)
      select partition_key, id, other_id, now, $2::text::jsonb from k)
    insert into ff_waitpoint_pending (partition_key, waitpoint_id, execution_id, token_kid, token, created_at_ms,
                                      waitpoint_key, state, activated_at_ms)
    select partition_key, other_id, id, 'bench', 'bench:', now, $3, 'active', now from k
    """,
)


@dataclass(frozen=True)
class Case:
    """`signals` in all, to so many executions, from callers with a connection each."""

    executions: int
    connections: int
    signals: int

    def __str__(self) -> str:
        to = "one execution" if self.executions == 1 else f"{self.executions} executions"
        return f"signals to {to}, {_on(self.connections)}"


@dataclass(frozen=True)
class Cycles:
    """`cycles` in all, by workers with an execution and a connection each."""

    connections: int
    cycles: int

    def __str__(self) -> str:
        return f"suspend, signal, resumed claim, {_on(self.connections)}"


def _on(connections: int) -> str:
    return f"{connections} connection{'s' if connections > 1 else ''}"


class Measured(NamedTuple):
    """One side of one round: how long it took in all and per cycle, calls made, and those refused."""

    wall_s: float
    seconds: list[float]
    calls: int
    refused: int


Rounds = dict[str, list[Measured]]


class _Caller:
    """Calls until it is served, and counts."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.calls = 0
        self.refused = 0

    async def until_served(self, call: Callable[[], Awaitable[T]]) -> T:
        while True:
            self.calls += 1
            try:
                return await call()
            except Contention as error:
                if error.kind != ContentionKind.RETRY_EXHAUSTED:
                    raise
                self.refused += 1


async def run(bench: Bench) -> list[Finding]:
    """Both sides in turns on one database, case by case."""
    works: list[Cycles | Case] = [Cycles(connections, bench.size(104, 16)) for connections in CONNECTIONS[:2]]
    works += [Case(1, connections, bench.size(128, max(16, connections))) for connections in CONNECTIONS]
    works += [Case(MANY, connections, bench.size(192, max(16, connections))) for connections in CONNECTIONS]
    lanes = count(1)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(bench.database())
        engines = {
            _LOCKS: await stack.enter_async_context(_open(dsn, Database, "read committed")),
            _SERIALIZABLE: await stack.enter_async_context(_open(dsn, _SerializableDatabase, "serializable")),
        }
        await engines[_LOCKS].seed_waitpoint_hmac_secret("bench", "00" * 32)
        await _load(dsn, bench.size(10_000, 2_000))

        async def measure(name: str, work: Cycles | Case) -> Measured:
            lane = f"bench-{next(lanes)}"
            if isinstance(work, Cycles):
                return await _cycle(engines[name], await _claims(engines[name], lane, work.connections), work)
            # Not timed, hence on one side for both.
            signals = await _suspended(engines[_LOCKS], lane, work.executions)
            return await _deliver(engines[name], signals, work)

        # Opens every connection.
        for name in engines:
            await measure(name, Case(MANY, max(CONNECTIONS), 2 * MANY))
            await measure(name, Cycles(8, 8))
        found: dict[Cycles | Case, Rounds] = {work: {name: [] for name in engines} for work in works}
        for number in range(1, bench.rounds + 1):
            bench.progress(f"signals: round {number}/{bench.rounds}, {' and '.join(engines)} in turns")
            for work, rounds in found.items():
                for name in bench.shuffled(engines):
                    rounds[name].append(await measure(name, work))
    return _findings(found)


async def _load(dsn: str, executions: int) -> None:
    async with connected(dsn) as sql:
        await sql.execute(LOAD.sql, executions, encode(condition_document(RESUMES)), KEY)
    await settle(dsn)


async def _claims(engine: Engine, lane: str, size: int) -> list[Claim]:
    await engine.create_executions([NewExecution(lane=lane, kind="bench", policy=POLICY) for _ in range(size)])
    return await engine.claim_many(
        lane, size, worker_id="bench", worker_instance_id="bench-1", lease_ttl_ms=LEASE_TTL_MS
    )


async def _suspended(engine: Engine, lane: str, size: int) -> list[Signal]:
    """New executions that wait; a signal for each."""
    claims = await _claims(engine, lane, size)
    return await asyncio.gather(*(_suspend(engine, _Caller(), claim, ONLY_APPENDS) for claim in claims))


async def _suspend(engine: Engine, caller: _Caller, claim: Claim, condition: Condition) -> Signal:
    """Suspend an execution; a signal for it."""
    suspend = Suspend([Fresh(KEY)], condition)
    suspended = await caller.until_served(lambda: engine.suspend(claim.handle, suspend))
    (waitpoint,) = suspended.waitpoints
    return Signal(
        claim.execution_id,
        waitpoint.waitpoint_id,
        "bench",
        waitpoint.token,
        source_type="bench",
        source_identity="bench",
        payload=b"ok",
    )


async def _send(engine: Engine, caller: _Caller, signal: Signal, effect: SignalEffect) -> None:
    answer = await caller.until_served(lambda: engine.deliver_signal(signal))
    if not isinstance(answer, Accepted) or answer.effect != effect:
        raise RuntimeError(f"a signal was answered {answer}")


async def _deliver(engine: Engine, signals: list[Signal], case: Case) -> Measured:
    """Send signals from as many callers as connections. Of many executions every caller has its own."""

    async def send(caller: _Caller, number: int) -> None:
        own = signals[number :: case.connections] if case.executions > 1 else signals
        for at in range(case.signals // case.connections):
            await _send(engine, caller, own[at % len(own)], SignalEffect.APPENDED_TO_WAITPOINT)

    return await _measure(case.connections, send)


async def _cycle(engine: Engine, claims: list[Claim], cycles: Cycles) -> Measured:
    """Suspend, signal and claim again, over and over."""

    async def work(caller: _Caller, number: int) -> None:
        claim = claims[number]
        for _ in range(cycles.cycles // cycles.connections):
            started = time.perf_counter()
            signal = await _suspend(engine, caller, claim, RESUMES)
            await _send(engine, caller, signal, SignalEffect.RESUME_CONDITION_SATISFIED)
            claim = await engine.claim_resumed_execution(
                claim.execution_id, worker_id="bench", worker_instance_id="bench-1", lease_ttl_ms=LEASE_TTL_MS
            )
            caller.seconds.append(time.perf_counter() - started)

    return await _measure(cycles.connections, work)


async def _measure(connections: int, work: Callable[[_Caller, int], Awaitable[None]]) -> Measured:
    callers = [_Caller() for _ in range(connections)]
    spent = await spend(lambda: asyncio.gather(*(work(caller, number) for number, caller in enumerate(callers))))
    return Measured(
        spent.wall_s,
        [each for caller in callers for each in caller.seconds],
        sum(caller.calls for caller in callers),
        sum(caller.refused for caller in callers),
    )


def _findings(found: dict[Cycles | Case, Rounds]) -> list[Finding]:
    findings = []
    for work, rounds in found.items():
        if isinstance(work, Cycles):
            findings += [compare(f"{work}: p{percent}", *_latencies(rounds, percent)) for percent in (50, 99)]
        else:
            findings.append(compare(str(work), *_rates(rounds)))
    for work, rounds in found.items():
        # Nobody is in the way of a single caller.
        if work.connections > 1:
            locks, serializable = _refused(rounds)
            findings.append(Finding(f"RETRY_EXHAUSTED, {work}", middle(locks), middle(serializable)))
    return findings


def _latencies(rounds: Rounds, percent: int) -> tuple[list[Figure], list[Figure]]:
    return _figures(rounds, "ms", lambda each: percentile(each.seconds, percent) * 1e3)


def _rates(rounds: Rounds) -> tuple[list[Figure], list[Figure]]:
    return _figures(rounds, "/s", lambda each: (each.calls - each.refused) / each.wall_s)


def _refused(rounds: Rounds) -> tuple[list[Figure], list[Figure]]:
    return _figures(rounds, "%", lambda each: each.refused / each.calls * 100)


def _figures(rounds: Rounds, unit: str, value: Callable[[Measured], float]) -> tuple[list[Figure], list[Figure]]:
    """The same figure of every round, for both sides."""
    locks, serializable = ([Figure(value(each), unit, name) for each in taken] for name, taken in rounds.items())
    return locks, serializable
