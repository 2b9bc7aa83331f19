"""What an execution writes over its life (create, claim, complete): bytes of WAL and transactions.

Both are counted, not estimated: the distance of the WAL's insert position and of the next transaction id. The
doorbell's transactions are included. A warm-up before the count has the pages in use already written in full
since the last checkpoint, so full-page images hardly add to the bytes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import asyncpg

from benchmarks.bench import Bench, connected
from benchmarks.report import Figure, Finding, compare
from benchmarks.workload import BATCH, PAYLOAD, WORKERS, fill, in_batches, one_at_a_time, side_by_side
from ffd import Engine

_POSITION = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn, pg_current_xact_id()::text::bigint"


class Written(NamedTuple):
    """Per execution."""

    wal: Figure
    transactions: Figure


async def run(bench: Bench) -> list[Finding]:
    """Count both ways in turns."""
    count = bench.size(1_600, WORKERS * BATCH)
    async with bench.database() as dsn, Engine.connect(dsn, pool_max=WORKERS) as engine, connected(dsn) as sql:

        async def single(number: int) -> Written:
            return await _count(sql, count, "one at a time", lambda: _live_one_by_one(engine, f"s-{number}", count))

        async def batched(number: int) -> Written:
            return await _count(
                sql, count, f"batches of {BATCH}", lambda: _live_in_batches(engine, f"b-{number}", count)
            )

        await single(0)
        await batched(0)
        rounds = await bench.in_turns("wal", {"one at a time": single, "batches": batched})
    one, many = rounds["one at a time"], rounds["batches"]
    return [
        compare("WAL per execution", [each.wal for each in one], [each.wal for each in many]),
        compare(
            "transactions per execution", [each.transactions for each in one], [each.transactions for each in many]
        ),
    ]


async def _live_one_by_one(engine: Engine, lane: str, count: int) -> None:
    async def creator(_number: int) -> None:
        for _ in range(count // WORKERS):
            await engine.create_execution(lane=lane, kind="bench", payload=PAYLOAD)

    await side_by_side(creator)
    await one_at_a_time(engine, lane, count)


async def _live_in_batches(engine: Engine, lane: str, count: int) -> None:
    for _ in range(count // BATCH):
        await fill(engine, lane, BATCH)
    await in_batches(engine, lane, count)


async def _count(sql: asyncpg.Connection[Any], count: int, what: str, live: Callable[[], Awaitable[None]]) -> Written:
    wal_before, xid_before = await _position(sql)
    await live()
    wal_after, xid_after = await _position(sql)
    return Written(
        Figure((wal_after - wal_before) / count, "bytes", what),
        # Reading the position takes a transaction id itself.
        Figure((xid_after - xid_before - 1) / count, "", what),
    )


async def _position(sql: asyncpg.Connection[Any]) -> tuple[int, int]:
    row = await sql.fetchrow(_POSITION)
    assert row is not None
    return int(row[0]), int(row[1])
