"""A build: check out, then test and lint side by side, then publish what both have passed.

Run it against a migrated database: DSN=postgresql://… python examples/build_pipeline.py
"""

from __future__ import annotations

import asyncio
import os
import sys

from ffd import Engine, FlowSpec, NewExecution

# What every step's work comes to.
STEPS = {
    "checkout": b"commit 4f2a",
    "test": b"212 tests passed",
    "lint": b"no complaints",
    "publish": b"web v42",
}
EDGES = [("checkout", "test"), ("checkout", "lint"), ("test", "publish"), ("lint", "publish")]


def say(text: str) -> None:
    """Tell what happens."""
    sys.stdout.write(f"{text}\n")


async def work(engine: Engine, step: str) -> None:
    """The worker of one step waits for work: when there is some, everything before it has succeeded."""
    claim = await engine.claim(f"build {step}", worker_id=step, worker_instance_id=f"{step}-1", wait_ms=30_000)
    if claim is None:
        raise SystemExit(f"nothing to do for {step}")
    results = await engine.get_upstream_results(claim.execution_id)
    given = sorted((result or b"").decode() for result in results.values())
    say(f"{step} starts, given {' and '.join(given) or 'nothing'}")
    # When this returns, the steps that waited for this one only can be claimed: no scheduler comes in between.
    await engine.complete(claim.handle, STEPS[step])


async def main() -> None:
    """Submit a build, have it worked off, look at its end."""
    dsn = os.environ.get("FFD_DATABASE__DSN") or os.environ.get("DSN")
    async with Engine.connect(dsn) as engine:
        nodes = {step: NewExecution(lane=f"build {step}", kind=step) for step in STEPS}
        build = await engine.submit_flow(FlowSpec(nodes, EDGES, kind="build"))
        explanation = await engine.explain_execution(build.execution_ids["publish"])
        say(f"the build is submitted, publish is {explanation.state}")

        await asyncio.gather(*(work(engine, step) for step in STEPS))

        flow = await engine.describe_flow(build.flow_id)
        result = await engine.get_execution_result(build.execution_ids["publish"])
        say(f"the build is {flow.state if flow else 'gone'}: {(result or b'').decode()}")


if __name__ == "__main__":
    asyncio.run(main())
