"""Two different people must approve a deploy, before a deadline.

Run it against a migrated database: DSN=postgresql://… python examples/deploy_approval.py
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys

from ffd import Accepted, ByName, Count, CountKind, Engine, Fresh, Signal, Suspend, Suspended, WaitpointToken

LANE = "deploys"
HOUR_MS = 3_600_000


def say(text: str) -> None:
    """Tell what happens."""
    sys.stdout.write(f"{text}\n")


async def ask_for_approval(engine: Engine) -> tuple[str, WaitpointToken]:
    """The worker takes the deploy, asks for two approvals, and lets go: nothing waits in memory from here on."""
    claim = await engine.claim(LANE, worker_id="deployer", worker_instance_id="deployer-1")
    if claim is None:
        raise SystemExit("no deploy to do")
    two_people = Count(2, CountKind.DISTINCT_SOURCES, ("approval",), ByName("approve"))
    outcome = await engine.suspend(
        claim.handle,
        Suspend(
            [Fresh("approval")],
            two_people,
            reason="waiting_for_approval",
            # Times are the database's; a claim tells one.
            timeout_at_ms=claim.lease_expires_at_ms + HOUR_MS,
            on_timeout="cancel",
        ),
        # The worker may crash and ask again: it gets the same token, not a second suspension.
        idempotency_key="approval",
    )
    if not isinstance(outcome, Suspended):
        raise SystemExit("approved already")
    (waitpoint,) = outcome.waitpoints
    return claim.execution_id, waitpoint


async def approve(engine: Engine, execution_id: str, waitpoint: WaitpointToken, person: str) -> None:
    """What a button in a mail or a chat does: it holds the token and needs no other right."""
    signal = Signal(
        execution_id,
        waitpoint.waitpoint_id,
        "approve",
        waitpoint.token,
        source_type="person",
        source_identity=person,
    )
    answer = await engine.deliver_signal(signal, idempotency_key=f"approve:{person}")
    say(f"{person} approves: {answer.effect if isinstance(answer, Accepted) else 'counted already'}")


async def main() -> None:
    """Create a deploy, have it approved, finish it."""
    dsn = os.environ.get("FFD_DATABASE__DSN") or os.environ.get("DSN")
    async with Engine.connect(dsn) as engine:
        if not await engine.list_waitpoint_keys():
            await engine.seed_waitpoint_hmac_secret("example", secrets.token_hex(32))
        await engine.create_execution(lane=LANE, kind="deploy", payload=b"web v42")

        execution_id, waitpoint = await ask_for_approval(engine)
        say("deploy of web v42 waits for two people, for an hour at most; no worker is held")

        await approve(engine, execution_id, waitpoint, "alice")
        await approve(engine, execution_id, waitpoint, "alice")
        explanation = await engine.explain_execution(execution_id)
        say(f"the deploy is still {explanation.state}: one person is not enough")
        await approve(engine, execution_id, waitpoint, "bob")

        claim = await engine.claim_resumed_execution(
            execution_id, worker_id="deployer", worker_instance_id="deployer-1"
        )
        people = [signal.source_identity for signal in await engine.observe_signals(claim.handle)]
        say(f"a worker goes on: approved by {' and '.join(people)}")
        await engine.complete(claim.handle, b"deployed")
        result = await engine.get_execution_result(execution_id)
        say(f"done: {(result or b'').decode()}")


if __name__ == "__main__":
    asyncio.run(main())
