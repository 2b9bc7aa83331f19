"""What batches gain: `claim_many(100)` and `complete_many` against one execution per call, both by the engine."""

from __future__ import annotations

from typing import Final

from benchmarks.bench import Bench, Spent, settle
from benchmarks.report import Bound, Figure, Finding, compare
from benchmarks.workload import BATCH, WORKERS, fill, in_batches, one_at_a_time
from ffd import Engine

BOUND: Final = Bound("at least", 6)
_BATCHES, _SINGLE = f"batches of {BATCH}", "one at a time"


async def run(bench: Bench) -> list[Finding]:
    """Measure both in turns, with the same number of workers, each slice on a lane of its own."""
    slices = bench.size(4, 1)
    counts = {_BATCHES: WORKERS * BATCH * bench.size(6, 2), _SINGLE: bench.size(600, 240)}
    async with bench.database() as dsn, Engine.connect(dsn, pool_max=WORKERS) as engine:

        async def batched(part: str) -> Spent:
            return await in_batches(engine, f"{_BATCHES}-{part}", counts[_BATCHES])

        async def single(part: str) -> Spent:
            return await one_at_a_time(engine, f"{_SINGLE}-{part}", counts[_SINGLE])

        async def prepare(parts: list[str]) -> None:
            for name, count in counts.items():
                for part in parts:
                    await fill(engine, f"{name}-{part}", count)
            await settle(dsn)

        await prepare(["warm-up"])
        await batched("warm-up")
        await single("warm-up")
        spent = await bench.in_slices("batches", {_BATCHES: batched, _SINGLE: single}, slices, prepare)
    rates = {
        name: [Figure(counts[name] * slices / each.wall_s, "/s", name) for each in taken]
        for name, taken in spent.items()
    }
    cpu = {
        name: [Figure(each.cpu_s / counts[name] / slices * 1e6, "µs", name) for each in taken]
        for name, taken in spent.items()
    }
    return [
        compare(f"claim+complete in batches, {WORKERS} workers", rates[_BATCHES], rates[_SINGLE], BOUND),
        compare("client CPU per execution in batches", cpu[_BATCHES], cpu[_SINGLE]),
    ]
