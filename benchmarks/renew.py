"""What the event of a renewal costs: `renew` with the outbox setting `lease_renewed` on and off.

A lease that is kept for long is renewed far more often than anything else happens to it. Each worker renews a
lease of its own; bytes of WAL are counted by the position of the log.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import NamedTuple

from benchmarks.bench import Bench, connected
from benchmarks.report import Figure, Finding, compare
from benchmarks.workload import WORKERS, claim_one, fill, side_by_side
from ffd import Engine
from ffd.config import DatabaseSettings, OutboxSettings

LEASES: int = 200
_LANE = "bench"
_WITH, _WITHOUT = "with its event", "without"
_WAL = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"


class Renewed(NamedTuple):
    """One round of renewals."""

    rate: Figure
    wal: Figure


async def run(bench: Bench) -> list[Finding]:
    """Renew the same leases through two engines in turns."""
    count = bench.size(4_000, 240)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(bench.database())
        sql = await stack.enter_async_context(connected(dsn))
        settings = DatabaseSettings(dsn=dsn, pool_max=WORKERS)
        loud = await stack.enter_async_context(Engine.open(settings, OutboxSettings(lease_renewed=True)))
        quiet = await stack.enter_async_context(Engine.open(settings, OutboxSettings(lease_renewed=False)))
        await fill(loud, _LANE, LEASES)
        handles = [(await claim_one(loud, _LANE)).handle for _ in range(LEASES)]

        async def renew(engine: Engine, what: str) -> Renewed:
            async def worker(number: int) -> None:
                own = handles[number::WORKERS]
                for at in range(count // WORKERS):
                    await engine.renew(own[at % len(own)])

            before = await sql.fetchval(_WAL)
            spent = await side_by_side(worker)
            written = await sql.fetchval(_WAL) - before
            return Renewed(Figure(count / spent.wall_s, "/s", what), Figure(float(written) / count, "bytes", what))

        async def with_event(_number: int) -> Renewed:
            return await renew(loud, _WITH)

        async def without(_number: int) -> Renewed:
            return await renew(quiet, _WITHOUT)

        await with_event(0)
        await without(0)
        rounds = await bench.in_turns("renew", {_WITH: with_event, _WITHOUT: without})
    return [
        compare(
            f"renew, {WORKERS} workers", [each.rate for each in rounds[_WITH]], [each.rate for each in rounds[_WITHOUT]]
        ),
        compare("WAL per renewal", [each.wal for each in rounds[_WITH]], [each.wal for each in rounds[_WITHOUT]]),
    ]
