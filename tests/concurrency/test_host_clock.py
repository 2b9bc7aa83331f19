"""One clock: a worker whose host clock is a minute off, either way, is served like any other (I7)."""

from __future__ import annotations

import ast
import datetime
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest

from ffd import Contention, Engine, PublicState, ResumeToken, State, StateKind, Validation
from ffd.core import ids
from tests.support import OTHER, Clock, Rig

pytestmark = pytest.mark.anyio

TTL_MS = 30_000
TOLERANCE_MS = 20_000

# A worker process on a host whose clock is off by argv[2] seconds: claims one execution, keeps it, completes it.
WORKER_PROCESS = """
import sys, time
offset_s = float(sys.argv[2])
real_time, real_time_ns = time.time, time.time_ns
time.time = lambda: real_time() + offset_s
time.time_ns = lambda: real_time_ns() + int(offset_s * 1e9)
import anyio
from ffd import Engine
async def main():
    async with Engine.connect(sys.argv[1]) as engine:
        claim = await engine.claim("skewed", worker_id="w", worker_instance_id="w", lease_ttl_ms=30000)
        renewal = await engine.renew(claim.handle)
        await engine.progress(claim.handle, percent=50)
        await engine.complete(claim.handle, b"done")
        print(claim.execution_id, claim.lease_expires_at_ms, renewal.expires_at_ms)
anyio.run(main)
"""


def uuid_of(at_s: float) -> UUID:
    """A version 7 uuid as a host makes it whose clock says `at_s`."""
    return UUID(int=int(at_s * 1000) << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62))


@pytest.fixture(params=[-60, 60], ids=["a_minute_behind", "a_minute_ahead"])
def offset_s(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch, offset_s: int) -> None:
    """This process's wall clock is off; ids, which carry the time of their host, are too."""
    real_time, real_time_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real_time() + offset_s)
    monkeypatch.setattr(time, "time_ns", lambda: real_time_ns() + offset_s * 10**9)
    monkeypatch.setattr(ids, "uuid7", lambda: uuid_of(time.time()))

    class Skewed(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=offset_s)

    monkeypatch.setattr(datetime, "datetime", Skewed)


@pytest.mark.usefixtures("skewed")
async def test_leases_are_judged_by_the_database_clock(rig: Rig, clock: Clock) -> None:
    """Show I7: a host clock 60 s off changes nothing about a lease of 30 s."""
    await rig.create()
    claim = await rig.claim(lease_ttl_ms=TTL_MS)
    now = await clock.now_ms()
    assert now + TTL_MS - TOLERANCE_MS < claim.lease_expires_at_ms <= now + TTL_MS
    assert await rig.expire() == 0
    token = ResumeToken(claim.execution_id, "other", "other-1")
    assert await rig.engine.claim_from_resume_grant(token) is None
    assert await rig.engine.claim("default", **OTHER) is None
    renewal = await rig.engine.renew(claim.handle)
    assert claim.lease_expires_at_ms <= renewal.expires_at_ms <= await clock.now_ms() + TTL_MS

    # The database's time passes: now, and only now, the lease is over.
    await clock.advance(TTL_MS)
    with pytest.raises(State) as refused:
        await rig.engine.complete(claim.handle)
    assert refused.value.kind == StateKind.LEASE_EXPIRED
    taken = await rig.engine.claim_from_resume_grant(token)
    assert taken is not None
    with pytest.raises(Contention):
        await rig.engine.complete(claim.handle)
    await rig.engine.complete(taken.handle)


@pytest.mark.usefixtures("skewed")
async def test_delays_and_deadlines_are_judged_by_the_database_clock(rig: Rig, clock: Clock) -> None:
    """Show I7: a host clock 60 s off changes nothing about delays, deadlines and idempotency windows of 30 s."""
    engine = rig.engine
    now = await clock.now_ms()
    delayed = await engine.create_execution(delay_until_ms=now + TTL_MS)
    assert delayed.public_state == PublicState.DELAYED
    due = await engine.create_execution(lane="due", delay_until_ms=now - TTL_MS)
    assert due.public_state == PublicState.WAITING
    await engine.create_execution(lane="due", deadline_at_ms=now + TTL_MS)
    with pytest.raises(Validation):
        await engine.create_execution(lane="due", deadline_at_ms=now - TTL_MS)

    claim = await rig.claim("due")
    await engine.delay(claim.handle, now + TTL_MS)
    assert (await rig.core(claim.execution_id))["public_state"] == "delayed"
    other = await rig.claim("due")
    await engine.delay(other.handle, now - TTL_MS)
    assert (await rig.core(other.execution_id))["public_state"] == "waiting"

    first = await engine.create_execution(idempotency_key="k", idempotency_ttl_ms=TTL_MS)
    assert (await engine.create_execution(idempotency_key="k", idempotency_ttl_ms=TTL_MS)).is_duplicate
    await clock.advance(TTL_MS + 1)
    again = await engine.create_execution(idempotency_key="k", idempotency_ttl_ms=TTL_MS)
    assert (again.is_duplicate, again.execution_id == first.execution_id) == (False, False)


async def test_claims_are_in_the_order_of_the_database_clock(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Show I7: work created on a host whose clock is ahead, or behind, is served in the order of its creation."""
    created = []
    for offset_s in (60, -60, 0, 45, -45):
        at_s = time.time() + offset_s
        with monkeypatch.context() as skew:
            skew.setattr(ids, "uuid7", lambda at_s=at_s: uuid_of(at_s))
            created.append(await rig.create())
        await clock.advance(10)
    assert [(await rig.claim()).execution_id for _ in created] == created


async def test_a_worker_process_with_a_skewed_clock_keeps_and_ends_its_work(
    dsn: str, engine: Engine, clock: Clock, offset_s: int
) -> None:
    """Show I7: the same in a process of its own, beside one with the right time."""
    created = await engine.create_execution(lane="skewed")
    before = await clock.now_ms()
    finished = await anyio.run_process(
        [sys.executable, "-c", WORKER_PROCESS, dsn, str(offset_s)], stdout=subprocess.PIPE, stderr=None
    )
    after = await clock.now_ms()
    execution_id, claimed_until, renewed_until = finished.stdout.decode().split()
    assert execution_id == created.execution_id
    assert before + TTL_MS <= int(claimed_until) <= int(renewed_until) <= after + TTL_MS
    snapshot = await engine.describe_execution(created.execution_id)
    assert snapshot is not None
    assert snapshot.public_state == PublicState.COMPLETED
    assert before <= (snapshot.terminal_at_ms or 0) <= after


def wall_clock_reads(path: Path) -> list[str]:
    """Calls in a module that read the host's wall clock."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "date.today"}:
                found.append(f"{path.name}:{node.lineno} {name}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"{path.name}:{node.lineno} from time import {alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("package", ["core", "db", "ops", "engine", "reconcilers"])
def test_the_engine_never_reads_the_host_clock(project_root: Path, package: str) -> None:
    """Show I7: host clocks only pace loops, and those are monotonic."""
    modules = sorted((project_root / "ffd" / package).rglob("*.py"))
    assert modules
    assert [read for module in modules for read in wall_clock_reads(module)] == []
