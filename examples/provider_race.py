"""Three providers are asked for a price. The first answer wins, and nobody works on for the others.

Run it against a migrated database: DSN=postgresql://… python examples/provider_race.py
"""

from __future__ import annotations

import asyncio
import os
import sys

from ffd import AnyOfEdges, Claim, Contention, Engine, FlowSpec, NewExecution

PROVIDERS = ("swift", "steady", "silent")


def say(text: str) -> None:
    """Tell what happens."""
    sys.stdout.write(f"{text}\n")


async def take(engine: Engine, lane: str) -> Claim:
    """What there is to do."""
    claim = await engine.claim(lane, worker_id=lane, worker_instance_id=f"{lane}-1", wait_ms=10_000)
    if claim is None:
        raise SystemExit(f"nothing to do for {lane}")
    return claim


async def ask_swift(engine: Engine, claim: Claim) -> None:
    """A provider that answers soon. When `complete` returns, the others are cancelled."""
    await asyncio.sleep(0.1)
    say("swift answers first")
    await engine.complete(claim.handle, b"42 EUR")


async def ask_steady(engine: Engine, claim: Claim) -> None:
    """One that takes long; its worker renews its lease meanwhile and so learns that nobody waits any more."""
    try:
        while True:
            await asyncio.sleep(1)
            await engine.renew(claim.handle)
    except Contention as error:
        say(f"steady may stop, its renewal is refused: {error.kind}")


async def ask_silent(engine: Engine, claim: Claim) -> None:
    """One whose worker does not look before it has an answer, and that is too late."""
    try:
        await engine.complete(claim.handle, b"39 EUR")
    except Contention as error:
        say(f"silent is too late, its answer is refused: {error.kind}")


async def main() -> None:
    """Submit a race, run it, use what came first."""
    dsn = os.environ.get("FFD_DATABASE__DSN") or os.environ.get("DSN")
    async with Engine.connect(dsn) as engine:
        race = await engine.submit_flow(
            FlowSpec(
                {name: NewExecution(lane=name, kind="ask") for name in (*PROVIDERS, "offer")},
                [(name, "offer") for name in PROVIDERS],
                {"offer": AnyOfEdges("cancel_remaining")},
                kind="race",
            )
        )
        swift, steady, silent = [await take(engine, name) for name in PROVIDERS]
        say("three workers ask three providers")
        await asyncio.gather(ask_swift(engine, swift), ask_steady(engine, steady))
        await ask_silent(engine, silent)

        offer = await take(engine, "offer")
        results = await engine.get_upstream_results(offer.execution_id)
        for name in PROVIDERS:
            execution_id = race.execution_ids[name]
            asked = await engine.explain_execution(execution_id)
            say(f"{name} is {asked.state}: {(results[execution_id] or b'no answer').decode()}")
        await engine.complete(offer.handle)
        flow = await engine.describe_flow(race.flow_id)
        say(f"the race is {flow.state if flow else 'gone'}")


if __name__ == "__main__":
    asyncio.run(main())
