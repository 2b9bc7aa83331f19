"""Twenty workers in one process: they complete, fail, delay, and now and then vanish with their lease."""

from __future__ import annotations

import asyncio
import random
import sys
import time

from ffd import Claim, Engine, EngineError, FailureClass, Unavailable

LEASE_MS = 1_500


async def work(engine: Engine, name: str, dice: random.Random) -> None:
    """One worker, for ever."""
    while True:
        try:
            claim = await engine.claim(
                "chaos", worker_id=name, worker_instance_id=name, lease_ttl_ms=LEASE_MS, wait_ms=1000
            )
            if claim is not None:
                await asyncio.sleep(dice.uniform(0, 0.05))
                await finish(engine, claim, dice.random())
        except Unavailable:
            await asyncio.sleep(0.2)
        except EngineError:
            # Fenced: the work belongs to somebody else by now, or a timer was faster.
            await asyncio.sleep(0.01)


async def finish(engine: Engine, claim: Claim, luck: float) -> None:
    """Complete, mostly."""
    if luck < 0.70:
        await engine.complete(claim.handle, b"done")
    elif luck < 0.85:
        return  # vanished: the lease runs out
    elif luck < 0.92:
        await engine.delay(claim.handle, int(time.time() * 1000) + 300)
    else:
        await engine.fail(claim.handle, "again", FailureClass.TRANSIENT)


async def main(dsn: str, seed: int) -> None:
    """Until killed."""
    async with Engine.connect(dsn, pool_max=8) as engine, asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(work(engine, f"w{number}", random.Random(seed + number)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
