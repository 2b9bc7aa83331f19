"""The daemon: what a sweep moves per second, how late it is, and what it costs while nothing is due.

All rows are seeded in SQL: creating and claiming them is measured elsewhere. The time at which a row was due is kept in
a column that nobody else uses here, so that its lag can be read from the table when all is done.

What sweeping is compared with: a transaction per row, as FlowFabric does it (look for due rows, then for each begin,
lock, write the attempt, the execution and the event, commit). Both on one connection.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.bench import Bench, connected, settle
from benchmarks.report import Bound, Figure, Finding, compare, percentile
from ffd.config import DatabaseSettings, OutboxSettings
from ffd.ops.runtime import open_runtime
from ffd.reconcilers.registry import load_reconcilers

BATCH_ROWS: Final = 1_000
# Spread over this many partitions, as sweeps see them.
PARTITIONS: Final = 256
STATEMENTS_PER_S: Final = 10.0
CPU_PERCENT: Final = 1.0

# $1 how many, $2 from when on they are due, $3 over how many ms. `started_at_ms` of the attempt keeps the due time.
SEED_LEASES: Final = """
with n as (select at, ($2 + at::bigint * $3 / $1)::bigint as due,
                  ('00000000-0000-7000-8000-' || lpad(to_hex(at), 12, '0'))::uuid as id
           from generate_series(0, $1::bigint - 1) at),
e as (
  insert into ff_exec_core (partition_key, execution_id, lane_id, lifecycle_phase, ownership_state, eligibility_state,
    public_state, attempt_state, created_at_ms, started_at_ms, lease_epoch)
  select at % 256, id, 'bench', 'active', 'leased', 'not_applicable', 'running', 'running_attempt', due, due, 1 from n)
insert into ff_attempt (partition_key, execution_id, attempt_index, worker_id, worker_instance_id, lease_epoch,
  lease_expires_at_ms, started_at_ms)
select at % 256, id, 0, 'w', 'w-1', 1, due, due from n
"""
# The same for delays; `created_at_ms` keeps the due time.
SEED_DELAYS: Final = """
insert into ff_exec_core (partition_key, execution_id, lane_id, lifecycle_phase, ownership_state, eligibility_state,
  public_state, attempt_state, created_at_ms, delay_until_ms)
select at % 256, ('00000000-0000-7000-8000-' || lpad(to_hex(at), 12, '0'))::uuid, 'bench', 'runnable',
       'unowned', 'not_eligible_until_time', 'delayed', 'pending_first_attempt',
       $2 + at::bigint * $3 / $1, $2 + at::bigint * $3 / $1
from generate_series(0, $1::bigint - 1) at
"""
SEEDS: Final = {"lease_expiry": SEED_LEASES, "delayed_promoter": SEED_DELAYS}
LAGS: Final = """
select state_since_ms - created_at_ms as lag_ms from ff_exec_core where public_state = 'waiting'
"""
DUE: Final = """
select execution_id, attempt_index from ff_attempt
where partition_key = $1 and lease_expires_at_ms <= ff_now_ms() order by lease_expires_at_ms limit 1000
"""
LOCK_ONE: Final = """
select lifecycle_phase, attempt_index from ff_exec_core where partition_key = $1 and execution_id = $2 for update
"""
END_LEASE: Final = """
update ff_attempt set lease_expires_at_ms = null, lease_epoch = lease_epoch + 1, outcome = 'lease_expired_reclaimable'
where partition_key = $1 and execution_id = $2 and attempt_index = $3
"""
OFFER_AGAIN: Final = """
update ff_exec_core set lifecycle_phase = 'runnable', ownership_state = 'unowned', eligibility_state = 'eligible_now',
  public_state = 'waiting', attempt_state = 'attempt_interrupted', lease_epoch = lease_epoch + 1,
  lease_reclaim_count = lease_reclaim_count + 1
where partition_key = $1 and execution_id = $2 and lifecycle_phase = 'active'
"""
TELL: Final = """
insert into ff_lease_event (partition_key, execution_id, event_type, occurred_at_ms)
values ($1, $2, 'expired', ff_now_ms())
"""
STATEMENTS: Final = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


async def run(bench: Bench) -> list[Finding]:
    """Sweeping against row by row, lag at rest and under load, the cost of idling."""
    return [await _expire(bench), *await _lag(bench), *await _idle(bench)]


# Rows per second


async def _expire(bench: Bench) -> Finding:
    many, few = bench.size(50_000, 5_000), bench.size(5_000, 500)

    async def sweep(_number: int) -> Figure:
        return await _rows_per_s(bench, many, _sweep_all, "a statement per partition")

    async def row_by_row(_number: int) -> Figure:
        return await _rows_per_s(bench, few, _row_by_row, "a transaction per row")

    found = await bench.in_turns("expire leases", {"sweep": sweep, "row by row": row_by_row})
    return compare(
        f"expiring {many:,} leases, rows per second", found["sweep"], found["row by row"], Bound("at least", 20)
    )


async def _rows_per_s(bench: Bench, rows: int, work: Callable[[str], Awaitable[int]], what: str) -> Figure:
    async with bench.database() as dsn:
        await _seed(dsn, SEED_LEASES, rows, 0, 1000)
        await settle(dsn, has_checkpoint=True)
        began = time.perf_counter()
        moved = await work(dsn)
        took_s = time.perf_counter() - began
    if moved != rows:
        raise AssertionError(f"{moved} of {rows} were moved")
    return Figure(rows / took_s, "/s", what)


async def _sweep_all(dsn: str) -> int:
    """Every partition until nothing is due, as the daemon does it."""
    reconciler, moved = load_reconcilers()["lease_expiry"], 0
    async with open_runtime(DatabaseSettings(dsn=dsn), OutboxSettings(notify="off"), "default") as runtime:
        for key in range(PARTITIONS):
            step = BATCH_ROWS
            while step == BATCH_ROWS:
                step = (await reconciler.sweep(runtime, key, BATCH_ROWS)).moved
                moved += step
    return moved


async def _row_by_row(dsn: str) -> int:
    moved = 0
    async with connected(dsn) as sql:
        # Planned once and by key: it shall not look worse than it is.
        await sql.execute("set enable_seqscan = off; set plan_cache_mode = force_generic_plan")
        for key in range(PARTITIONS):
            for row in await sql.fetch(DUE, key):
                await _expire_one(sql, key, row)
                moved += 1
    return moved


async def _expire_one(sql: asyncpg.Connection[Any], key: int, row: asyncpg.Record) -> None:
    async with sql.transaction():
        execution, attempt = row["execution_id"], row["attempt_index"]
        if await sql.fetchrow(LOCK_ONE, key, execution) is None:
            raise AssertionError("nobody else is there")
        await sql.execute(END_LEASE, key, execution, attempt)
        await sql.execute(OFFER_AGAIN, key, execution)
        await sql.execute(TELL, key, str(execution))


async def _seed(dsn: str, statement: str, rows: int, due_ms: int, over_ms: int) -> None:
    async with connected(dsn) as sql:
        await sql.execute(statement, rows, due_ms, over_ms)


# Lag


@asynccontextmanager
async def _daemon(dsn: str) -> AsyncIterator[int]:
    """`ffd run` on its defaults, swept up and settled; its process id."""
    environ = {**os.environ, "FFD_DATABASE__DSN": dsn, "FFD_HTTP__BIND": "", "FFD_LOG__LEVEL": "warning"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "ffd.cli.main", "run", env=environ)
    try:
        async with connected(dsn) as sql:
            owned = "select bool_and(node_id is not null) from ff_partition"
            while not await sql.fetchval(owned):  # noqa: ASYNC110  (the database is polled)
                await asyncio.sleep(0.05)
        await asyncio.sleep(2)
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


async def _lag(bench: Bench) -> list[Finding]:
    findings = []
    seconds = bench.size(10, 2)
    for name in SEEDS:
        rest, load = 100 * seconds, 10_000 * seconds

        async def at_rest(_number: int, name: str = name, rows: int = rest) -> Figure:
            return await _p99(bench, name, rows, seconds)

        async def loaded(_number: int, name: str = name, rows: int = load) -> Figure:
            return await _p99(bench, name, rows, seconds)

        found = await bench.in_turns(f"lag of {name}", {"at rest": at_rest, "loaded": loaded})
        findings.append(compare(f"{name}: p99 from due to done, 10,000 due/s", found["loaded"], found["at rest"]))
    return findings


async def _p99(bench: Bench, name: str, rows: int, seconds: int) -> Figure:
    async with bench.database() as dsn, _daemon(dsn), connected(dsn) as sql:
        now = await sql.fetchval("select ff_now_ms()")
        # Far enough away that everything is there before the first is due.
        start = now + 3_000 + rows // 20
        await _seed(dsn, SEEDS[name], rows, start, seconds * 1000)
        await sql.execute("vacuum analyze ff_exec_core, ff_attempt")
        if await sql.fetchval("select ff_now_ms()") > start:
            raise AssertionError("seeding took too long")
        lags = await _lags(sql, rows, seconds)
    return Figure(percentile(lags, 99), "ms", f"p99, {rows // seconds:,} due/s")


async def _lags(sql: asyncpg.Connection[Any], rows: int, seconds: int) -> list[float]:
    deadline = time.monotonic() + 12 * seconds + 60
    waiting = "select count(*) from ff_exec_core where public_state = 'waiting'"
    while await sql.fetchval(waiting) < rows:
        if time.monotonic() > deadline:
            raise AssertionError("the daemon did not keep up")
        await asyncio.sleep(1)
    return [float(row["lag_ms"]) for row in await sql.fetch(LAGS)]


# Rest


async def _idle(bench: Bench) -> list[Finding]:
    seconds = bench.size(30, 5)

    async def rest(_number: int) -> tuple[Figure, Figure]:
        async with bench.database() as dsn, _daemon(dsn) as pid, connected(dsn) as sql:
            before, cpu_before, began = await sql.fetchval(STATEMENTS), _cpu_s(pid), time.monotonic()
            await asyncio.sleep(seconds)
            took_s = time.monotonic() - began
            # The look itself is one of them.
            statements = (await sql.fetchval(STATEMENTS) - before - 1) / took_s
            cpu = (_cpu_s(pid) - cpu_before) / took_s * 100
            return Figure(statements, "/s", "statements"), Figure(cpu, "%", "of a core")

    found = (await bench.in_turns("at rest, 256 partitions", {"rest": rest}))["rest"]
    budget = [Figure(STATEMENTS_PER_S, "/s", "budget")] * len(found)
    cpu_budget = [Figure(CPU_PERCENT, "%", "budget")] * len(found)
    return [
        compare("at rest: statements per second", [each[0] for each in found], budget, Bound("at most", 1)),
        compare("at rest: CPU of the daemon", [each[1] for each in found], cpu_budget, Bound("at most", 1)),
    ]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
