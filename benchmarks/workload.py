"""The work that several benchmarks do: plain executions, taken and completed by concurrent workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

from benchmarks.bench import Spent
from ffd import Claim, Engine, NewExecution
from ffd.core.limits import BULK_MAX

WORKERS: Final = 8
LEASE_TTL_MS: Final = 600_000
PAYLOAD: Final = b"x" * 100
RESULT: Final = b"done"
BATCH: Final = 100


def new_executions(lane: str, count: int) -> list[NewExecution]:
    """Executions without requirements, delays or policies, each with a small payload."""
    return [NewExecution(lane=lane, kind="bench", payload=PAYLOAD) for _ in range(count)]


async def fill(engine: Engine, lane: str, count: int) -> None:
    """Create waiting executions."""
    for start in range(0, count, BULK_MAX):
        await engine.create_executions(new_executions(lane, min(BULK_MAX, count - start)))


async def spend(work: Callable[[], Awaitable[object]]) -> Spent:
    """Do some work; what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


async def side_by_side(worker: Callable[[int], Awaitable[None]]) -> Spent:
    """Run the workers concurrently; each is given its number."""
    return await spend(lambda: asyncio.gather(*(worker(number) for number in range(WORKERS))))


async def one_at_a_time(engine: Engine, lane: str, count: int) -> Spent:
    """Claim and complete `count` executions, each with two calls."""

    async def worker(number: int) -> None:
        for _ in range(count // WORKERS):
            claim = await claim_one(engine, lane, number)
            await engine.complete(claim.handle, RESULT)

    return await side_by_side(worker)


async def in_batches(engine: Engine, lane: str, count: int) -> Spent:
    """Claim and complete `count` executions, each call for a batch of them."""

    async def worker(number: int) -> None:
        for _ in range(count // WORKERS // BATCH):
            claims = await engine.claim_many(
                lane, BATCH, worker_id="bench", worker_instance_id=f"bench-{number}", lease_ttl_ms=LEASE_TTL_MS
            )
            answers = await engine.complete_many([(claim.handle, RESULT) for claim in claims])
            if len(answers) != BATCH or any(answers):
                raise RuntimeError(f"a batch of {BATCH} completed {answers.count(None)}")

    return await side_by_side(worker)


async def claim_one(engine: Engine, lane: str, number: int = 0) -> Claim:
    """A claim that finds work."""
    claim = await engine.claim(lane, worker_id="bench", worker_instance_id=f"bench-{number}", lease_ttl_ms=LEASE_TTL_MS)
    if claim is None:
        raise RuntimeError(f"lane {lane} ran out of work")
    return claim
