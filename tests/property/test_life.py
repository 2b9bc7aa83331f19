"""Random lives against a small model: whatever the order of calls, the invariants hold after every step.

Two workers, three executions, and a clock that jumps. The model knows only who owns what under which epoch.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffd import (
    Claim,
    Contention,
    Engine,
    ExecutionPolicy,
    FailureClass,
    Fixed,
    PublicState,
    ResumeToken,
    RetryPolicy,
    State,
)
from ffd.core.state import ROWS, read_public_state
from tests.support import WORKER, Clock, Rig, install_clock

CALLS = ("create", "claim", "claim_many", "renew", "progress", "complete", "fail", "fail_for_good", "release", "delay")
TURNS = ("advance", "expire", "promote", "take_over", "old_handle")
STEPS = st.lists(st.tuples(st.sampled_from(CALLS + TURNS), st.integers(0, 5)), min_size=5, max_size=40)
POLICY = ExecutionPolicy(retry=RetryPolicy(max_retries=2, backoff=Fixed(0)), max_reclaim_count=2)
ADMITTED = {
    (row.lifecycle_phase, row.ownership_state, row.eligibility_state, str(row.public_state), row.attempt_state)
    for row in ROWS.values()
}


class Life:
    """One scenario: the engine, and what the model believes."""

    def __init__(self, rig: Rig, clock: Clock) -> None:
        self.rig = rig
        self.clock = clock
        self.ids: list[str] = []
        self.claims: list[Claim] = []
        self.epochs: dict[str, int] = {}

    def note(self, claim: Claim) -> None:
        """Every new owner has a larger epoch than all before it."""
        assert claim.lease_epoch > self.epochs.get(claim.execution_id, 0)
        self.epochs[claim.execution_id] = claim.lease_epoch
        self.claims.append(claim)

    async def step(self, name: str, n: int) -> None:
        engine = self.rig.engine
        claim = self.claims[-1 - n % 3] if len(self.claims) > n % 3 else None
        match name:
            case "create" if len(self.ids) < 3:
                self.ids.append(await self.rig.create(policy=POLICY, priority=n))
            case "claim":
                taken = await engine.claim("default", **WORKER)
                if taken is not None:
                    self.note(taken)
            case "claim_many":
                for taken in await engine.claim_many("default", 2, **WORKER):
                    self.note(taken)
            case "take_over" if self.ids:
                await self.take_over(self.ids[n % len(self.ids)])
            case "advance":
                await self.clock.advance([1, 1000, 29_999, 30_000, 60_000, 5][n])
            case "expire":
                await self.rig.expire()
            case "promote":
                await self.rig.sql.execute(
                    "update ff_exec_core set eligibility_state = 'eligible_now', public_state = 'waiting',"
                    " delay_until_ms = null where delay_until_ms <= ff_now_ms()"
                )
            case "old_handle" if self.claims:
                await self.attempt(self.claims[n % len(self.claims)], ("renew", "complete", "fail")[n % 3])
            case _ if claim is not None:
                await self.attempt(claim, name)

    async def take_over(self, execution_id: str) -> None:
        try:
            taken = await self.rig.engine.claim_from_resume_grant(ResumeToken(execution_id, "x", "x-1", 30_000))
        except Exception as error:
            assert getattr(error, "code", "").split(".")[0] in ("contention", "not_found")
        else:
            if taken is not None:
                self.note(taken)

    async def attempt(self, claim: Claim, name: str) -> None:
        """A call by an owner, present or past. A past one must change nothing."""
        engine = self.rig.engine
        calls: dict[str, Any] = {
            "renew": lambda: engine.renew(claim.handle),
            "progress": lambda: engine.progress(claim.handle, percent=1),
            "complete": lambda: engine.complete(claim.handle, b"r"),
            "fail": lambda: engine.fail(claim.handle, "no", FailureClass.TRANSIENT),
            "fail_for_good": lambda: engine.fail(claim.handle, "no", FailureClass.PERMANENT),
            "release": lambda: engine.release(claim.handle),
            "delay": lambda: engine.delay(claim.handle, 2**50),
        }
        if name not in calls:
            return
        is_owner = await self.owns(claim)
        before = await self.rig.fingerprint()
        try:
            await calls[name]()
        except (Contention, State):
            assert not is_owner, f"the owner's {name} was refused"
            assert await self.rig.fingerprint() == before
        else:
            # A repeat of one's own ending is answered too, but writes nothing.
            assert is_owner or await self.rig.fingerprint() == before

    async def owns(self, claim: Claim) -> bool:
        snapshot = await self.rig.engine.describe_execution(claim.execution_id)
        assert snapshot is not None
        return (
            snapshot.public_state == PublicState.RUNNING
            and snapshot.attempt_index == claim.attempt_index
            and snapshot.lease_epoch == claim.lease_epoch
            and (snapshot.lease_expires_at_ms or 0) > await self.clock.now_ms()
        )

    async def check(self) -> None:
        """I1, I2, I6, I9 on everything stored."""
        rows = await self.rig.sql.fetch(
            "select e.*, (select count(*) from ff_attempt a where a.execution_id = e.execution_id"
            "             and a.lease_expires_at_ms is not null) as leases,"
            " (select count(*) from ff_completion_event c where c.execution_id = e.execution_id) as endings,"
            " (select outcome from ff_attempt a where a.execution_id = e.execution_id"
            "             and a.attempt_index = e.attempt_index) as outcome"
            " from ff_exec_core e"
        )
        for row in rows:
            vector = tuple(
                row[column]
                for column in (
                    "lifecycle_phase",
                    "ownership_state",
                    "eligibility_state",
                    "public_state",
                    "attempt_state",
                )
            )
            assert vector in ADMITTED
            state = read_public_state(
                row["lifecycle_phase"], row["eligibility_state"], row["public_state"], row["outcome"]
            )
            assert state == row["public_state"]
            assert row["leases"] == (1 if state == PublicState.RUNNING else 0)
            assert row["endings"] == (1 if state.is_terminal else 0)
            key = f"{{fp:{row['partition_key']}}}:{row['execution_id']}"
            assert row["lease_epoch"] >= self.epochs.get(key, 0)
            assert (await self.rig.engine.explain_execution(key)).waiting_for


@given(STEPS)
@settings(
    max_examples=150 if os.environ.get("FFD_TEST_FULL") else 20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.timeout(600)
def test_no_order_of_calls_breaks_an_invariant(dsn: str, steps: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        sql = await asyncpg.connect(dsn)
        try:
            if await sql.fetchval("select to_regclass('ff_test_clock') is null"):
                await install_clock(sql)
            await sql.execute("truncate ff_exec_core, ff_attempt, ff_completion_event, ff_lease_event")
            async with Engine.connect(dsn) as engine:
                life = Life(Rig(engine, sql), Clock(sql))
                await life.step("create", 1)
                for name, n in steps:
                    await life.step(name, n)
                    await life.check()
        finally:
            await sql.close()

    asyncio.run(scenario())
