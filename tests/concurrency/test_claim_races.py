"""Who gets the work: each execution has one owner, however many ask at once (I1)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio
import pytest

from ffd import Claim, Engine, NewExecution, ResumeToken
from ffd.db.pool import Connection
from tests.concurrency.sessions import assert_invariants, both_ways, race
from tests.support import OTHER, WORKER, Clock, Rig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

WORKERS = 32
EXECUTIONS = 2_000
CAPABILITY_SETS: tuple[tuple[str, ...], ...] = ((), ("a",), ("b",), ("a", "b"), ("c",))

Take = Callable[[Engine], Awaitable[list[Claim]]]


async def take_one(engine: Engine) -> list[Claim]:
    claim = await engine.claim("drain", capabilities=("a", "b", "c"), **WORKER)
    return [] if claim is None else [claim]


async def take_some(engine: Engine) -> list[Claim]:
    return await engine.claim_many("drain", 7, capabilities=("a", "b", "c"), **WORKER)


async def drain(engines: list[Engine], take: Take) -> list[Claim]:
    """Let 32 workers take until there is nothing left."""
    taken: list[Claim] = []

    async def worker(engine: Engine) -> None:
        while claims := await take(engine):
            taken.extend(claims)

    async with anyio.create_task_group() as group:
        for at in range(WORKERS):
            group.start_soon(worker, engines[at % len(engines)])
    return taken


async def assert_each_once(taken: list[Claim], created: list[str], sql: Connection) -> None:
    counts = Counter(claim.execution_id for claim in taken)
    assert counts == Counter(created)
    assert {claim.lease_epoch for claim in taken} == {1}
    assert await sql.fetchval("select count(*) from ff_attempt") == len(created)
    assert await sql.fetchval("select count(*) from ff_lease_event where event_type = 'acquired'") == len(created)
    await assert_invariants(sql)


async def create(engine: Engine, sets: tuple[tuple[str, ...], ...], count: int = EXECUTIONS) -> list[str]:
    new = [
        NewExecution(lane="drain", priority=at % 3, required_capabilities=sets[at % len(sets)]) for at in range(count)
    ]
    return [created.execution_id for created in await engine.create_executions(new)]


@pytest.mark.parametrize(
    ("take", "sets"),
    [(take_one, ((),)), (take_one, CAPABILITY_SETS), (take_some, CAPABILITY_SETS)],
    ids=["claim", "claim_over_five_sets", "claim_many_over_five_sets"],
)
async def test_32_workers_draining_2000_executions_claim_each_exactly_once(
    open_engine: Callable[..., Any], sql: Connection, take: Take, sets: tuple[tuple[str, ...], ...]
) -> None:
    """Show: 32 workers draining 2,000 executions claim each exactly once; also in batches and over five sets."""
    async with open_engine(pool_max=WORKERS) as engine:
        created = await create(engine, sets)
        taken = await drain([engine], take)
    await assert_each_once(taken, created, sql)


async def test_32_workers_with_engines_of_their_own_claim_each_exactly_once(
    open_engine: Callable[..., Any], sql: Connection
) -> None:
    """Show: 32 workers claim each exactly once; with nothing shared between them, as 32 processes would."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(open_engine(pool_max=1)) for _ in range(WORKERS)]
        created = await create(engines[0], CAPABILITY_SETS, 500)
        taken = await drain(engines, take_one)
    await assert_each_once(taken, created, sql)


async def test_one_execution_wanted_by_16_workers_goes_to_one(
    open_engine: Callable[..., Any], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: a claim race has exactly one winner."""
    async with open_engine(pool_max=16) as engine:
        for _ in range(rounds):
            await engine.create_execution()
            claims = await race(rng, *[lambda: engine.claim("default", **WORKER)] * 16)
            assert sum(claim is not None for claim in claims) == 1
    await assert_invariants(sql)


def grant(execution_id: str) -> ResumeToken:
    return ResumeToken(execution_id, OTHER["worker_id"], OTHER["worker_instance_id"])


async def owners(rig: Rig, execution_id: str) -> list[int]:
    """The epoch of every owner, in the order of their events."""
    rows = await rig.sql.fetch(
        "select lease_epoch from ff_lease_event where execution_id = $1"
        " and event_type in ('acquired', 'reclaimed') order by event_id",
        execution_id.partition(":")[2].partition(":")[2],
    )
    return [row["lease_epoch"] for row in rows]


async def test_two_take_overs_of_one_expired_lease_give_one_owner(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: two concurrent claim_from_resume_grant: exactly one owner, epoch strictly increasing, no lost event."""
    for _ in range(rounds):
        first = await rig.running()
        await clock.advance(30_001)
        token = grant(first.execution_id)
        claims = await race(rng, *[partial(rig.engine.claim_from_resume_grant, token)] * 2)
        (owner,) = [claim for claim in claims if claim is not None]
        assert isinstance(owner, Claim)
        assert owner.lease_epoch > first.lease_epoch
        assert await owners(rig, first.execution_id) == [first.lease_epoch, owner.lease_epoch]
        events = [event for event, _ in await rig.lease_events(first.execution_id)]
        assert events == ["acquired", "expired", "reclaimed"]
        assert (await rig.core(first.execution_id))["lease_reclaim_count"] == 1
        await rig.engine.complete(owner.handle)
    await assert_invariants(rig.sql)


async def test_claim_against_take_over_of_an_interrupted_execution_gives_one_owner(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: claim against claim_from_resume_grant: exactly one owner, epoch strictly increasing, no lost event."""
    winners: Counter[int] = Counter()
    while both_ways(winners, rounds):
        first = await rig.running()
        if rng.random() < 0.5:
            await rig.engine.release(first.handle)
        else:
            await clock.advance(30_001)
            assert await rig.expire() == 1
        token = grant(first.execution_id)
        claims = await race(
            rng,
            lambda: rig.engine.claim("default", **WORKER),
            partial(rig.engine.claim_from_resume_grant, token),
        )
        (owner,) = [claim for claim in claims if isinstance(claim, Claim)]
        winners[claims.index(owner)] += 1
        assert owner.lease_epoch > first.lease_epoch
        assert await owners(rig, first.execution_id) == [first.lease_epoch, owner.lease_epoch]
        await rig.engine.complete(owner.handle)
        await rig.engine.complete(owner.handle)
        assert await rig.completions(first.execution_id) == ["success"]
    await assert_invariants(rig.sql)


async def test_take_over_against_the_sweep_expires_a_lease_once(
    rig: Rig, clock: Clock, rng: random.Random, rounds: int
) -> None:
    """Show: claim_from_resume_grant against lease expiry: one `expired` event, one reclaim counted, one owner."""
    for _ in range(rounds):
        first = await rig.running()
        await clock.advance(30_001)
        token = grant(first.execution_id)
        claim, swept = await race(rng, partial(rig.engine.claim_from_resume_grant, token), rig.expire)
        assert swept in (0, 1)
        if not isinstance(claim, Claim):
            # The sweep held the row just then; the grant is still good.
            claim = await rig.engine.claim_from_resume_grant(token)
        assert isinstance(claim, Claim)
        events = [event for event, _ in await rig.lease_events(first.execution_id)]
        assert events == ["acquired", "expired", "reclaimed"]
        row = await rig.core(first.execution_id)
        assert (row["lease_reclaim_count"], row["public_state"]) == (1, "running")
        await rig.engine.complete(claim.handle)
    await assert_invariants(rig.sql)
