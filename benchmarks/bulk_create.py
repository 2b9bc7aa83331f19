"""Bulk creation against the fastest way into the same table with the same indexes: binary COPY of finished rows.

The engine's time includes what COPY is spared: checking every field, minting ids, sorting by key, finding out
which rows are new, and an answer per execution. COPY gets its rows in the order in which the engine writes them.
"""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from benchmarks.bench import Bench, Spent, connected
from benchmarks.report import Bound, Figure, Finding, compare
from benchmarks.workload import new_executions, spend
from ffd import Engine
from ffd.core.limits import BULK_MAX
from ffd.core.state import ROWS
from ffd.ops.create import draft

BOUND: Final = Bound("at least", 0.3)
COLUMNS: Final = (
    "partition_key",
    "execution_id",
    "flow_id",
    "lane_id",
    "required_capabilities",
    "priority",
    "delay_until_ms",
    "deadline_at_ms",
    "payload",
    "policy",
    "raw_fields",
    "created_at_ms",
    "state_since_ms",
    "lifecycle_phase",
    "ownership_state",
    "eligibility_state",
    "public_state",
    "attempt_state",
    "blocking_reason",
)
_ENGINE, _COPY = "engine", "COPY"


async def run(bench: Bench) -> list[Finding]:
    """Fill one table from both sides in turns."""
    rows = bench.size(BULK_MAX, 1_000)
    calls = bench.size(4, 1)
    async with bench.database() as dsn, Engine.connect(dsn) as engine, connected(dsn) as sql:

        async def through_engine(_part: str) -> Spent:
            executions = new_executions("bench", rows)
            return await spend(lambda: engine.create_executions(executions))

        async def through_copy(_part: str) -> Spent:
            records = await prepared_rows(sql, rows)
            return await spend(lambda: sql.copy_records_to_table("ff_exec_core", records=records, columns=COLUMNS))

        await through_engine("warm-up")
        await through_copy("warm-up")
        await _check_rows_alike(sql)
        spent = await bench.in_slices("bulk_create", {_ENGINE: through_engine, _COPY: through_copy}, calls)
    count = rows * calls
    rates = {name: [Figure(count / each.wall_s, "/s", name) for each in taken] for name, taken in spent.items()}
    cpu = {name: [Figure(each.cpu_s / count * 1e6, "µs", name) for each in taken] for name, taken in spent.items()}
    return [
        compare(f"create_executions, {rows:,} at once", rates[_ENGINE], rates[_COPY], BOUND),
        compare("client CPU per execution created", cpu[_ENGINE], cpu[_COPY]),
    ]


async def prepared_rows(sql: asyncpg.Connection[Any], count: int) -> list[tuple[object, ...]]:
    """Rows as the engine would store them."""
    now = await sql.fetchval("select ff_now_ms()")
    state = ROWS["waiting_first"]
    vector = tuple(getattr(state, column) for column in COLUMNS[13:])
    drafts = sorted((draft(new, "default") for new in new_executions("bench", count)), key=lambda new: new.key)
    return [(*new[:11], now, now, *vector) for new in drafts]


async def _check_rows_alike(sql: asyncpg.Connection[Any]) -> None:
    """Both sides must have filled the same columns with the same kind of thing, or the comparison is void."""
    shapes = await sql.fetch(
        """
        select distinct array(
          select key || case when key in ('partition_key', 'execution_id') or key like '%\\_ms' then ''
                             else '=' || value::text end
          from jsonb_each(jsonb_strip_nulls(to_jsonb(e))) order by key) as shape
        from ff_exec_core e
        """
    )
    if len(shapes) != 1:
        raise RuntimeError(f"the engine and COPY store different rows: {[row['shape'] for row in shapes]}")
