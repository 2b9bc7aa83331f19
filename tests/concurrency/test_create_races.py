"""Creating the same thing from many places: one execution, and everybody is told which."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from ffd import Created, Engine, NewExecution
from ffd.core.ids import new_execution_key, new_uuid, partition_of
from ffd.db.pool import Connection
from tests.concurrency.sessions import assert_invariants, race

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

CONNECTIONS = 16


@pytest.fixture
async def engines(open_engine: Callable[..., Any]) -> AsyncIterator[list[Engine]]:
    """16 engines with one connection of each kind."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(open_engine(pool_max=1)) for _ in range(CONNECTIONS)]


def assert_one_and_duplicates(answers: list[Any]) -> str:
    """One was new, the others found it; its id."""
    assert all(isinstance(answer, Created) for answer in answers), answers
    assert Counter(answer.is_duplicate for answer in answers) == {False: 1, True: len(answers) - 1}
    (execution_id,) = {answer.execution_id for answer in answers}
    return str(execution_id)


async def test_one_idempotency_key_from_16_connections_makes_one_execution(
    engines: list[Engine], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: create with the same idempotency key from 16 connections: one execution, 15 duplicates."""
    for at in range(rounds):
        calls = [partial(e.create_execution, idempotency_key=f"key-{at}") for e in engines]
        assert_one_and_duplicates(await race(rng, *calls))
        assert await sql.fetchval("select count(*) from ff_exec_core") == at + 1
        assert await sql.fetchval("select count(*) from ff_exec_dedup") == at + 1
    await assert_invariants(sql)


async def test_an_expired_idempotency_key_wanted_by_16_makes_one_new_execution(
    engines: list[Engine], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: the same when the key's window has just ended: again one execution, the key stands for it."""
    before = (await engines[0].create_execution(idempotency_key="key")).execution_id
    for at in range(rounds):
        await sql.execute("update ff_exec_dedup set expires_at_ms = 1")
        calls = [partial(e.create_execution, idempotency_key="key") for e in engines]
        now = assert_one_and_duplicates(await race(rng, *calls))
        assert now != before
        before = now
        assert await sql.fetchval("select count(*) from ff_exec_core") == at + 2


async def test_one_execution_id_from_16_connections_makes_one_execution(
    engines: list[Engine], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: create with the same execution_id from 16 connections: one execution, 15 duplicates."""
    for at in range(rounds):
        execution_id = str(new_execution_key())
        calls = [partial(e.create_execution, execution_id=execution_id) for e in engines]
        assert assert_one_and_duplicates(await race(rng, *calls)) == execution_id
        assert await sql.fetchval("select count(*) from ff_exec_core") == at + 1


async def test_one_execution_id_created_singly_and_in_bulk_makes_one_execution(
    engines: list[Engine], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: single and bulk creates of the same executions: each is made once."""
    for _ in range(rounds):
        ids = [str(new_execution_key()) for _ in range(5)]
        new = [NewExecution(execution_id=execution_id) for execution_id in ids]
        bulk = [partial(e.create_executions, new) for e in engines[:4]]
        single = [
            partial(e.create_execution, execution_id=execution_id)
            for e, execution_id in zip(engines[4:9], ids, strict=True)
        ]
        answers = await race(rng, *bulk, *single)
        created = [one for many in answers[:4] for one in many] + answers[4:]
        assert Counter(one.execution_id for one in created if not one.is_duplicate) == Counter(ids)
        assert len(created) == 25


@pytest.mark.parametrize("by", ["idempotency_key", "execution_id", "both"])
async def test_bulk_creates_of_the_same_executions_in_opposite_order_do_not_deadlock(
    engines: list[Engine], sql: Connection, rng: random.Random, rounds: int, by: str
) -> None:
    """Show: bulk create with overlapping keys in opposite order: no deadlock, each made once."""
    for at in range(rounds // 4):
        ids = [str(new_execution_key()) for _ in range(20)]
        new = [
            NewExecution(
                execution_id=None if by == "idempotency_key" else execution_id,
                idempotency_key=None if by == "execution_id" else f"{at}-{position}",
            )
            for position, execution_id in enumerate(ids)
        ]
        orders = [new, new[::-1], new[:15], new[:4:-1], rng.sample(new, 20), rng.sample(new, 10)]
        answers = await race(
            rng,
            *[partial(e.create_executions, order) for e, order in zip(engines, orders, strict=False)],
        )
        assert all(isinstance(many, list) for many in answers), answers
        created = [one for many in answers for one in many]
        assert sum(not one.is_duplicate for one in created) == 20
        assert len({one.execution_id for one in created}) == 20
        assert await sql.fetchval("select count(*) from ff_exec_core") == 20 * (at + 1)


async def test_bulk_creates_into_several_flows_in_opposite_order_do_not_deadlock(
    engines: list[Engine], sql: Connection, rng: random.Random, rounds: int
) -> None:
    """Show: bulk create of flow members: flow rows are taken in order, every member is counted once."""
    flows = [new_uuid() for _ in range(4)]
    await sql.executemany(
        "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
        " values ($1, $2, 'open', 1)",
        [(partition_of(flow), flow) for flow in flows],
    )
    for _ in range(rounds // 2):
        orders = [flows, flows[::-1], rng.sample(flows, 4), rng.sample(flows, 2)]
        answers = await race(
            rng,
            *[
                partial(e.create_executions, [NewExecution(flow_id=str(flow)) for flow in order])
                for e, order in zip(engines, orders, strict=False)
            ],
        )
        assert all(isinstance(many, list) for many in answers), answers
    counted = await sql.fetchval("select sum((raw_fields ->> 'node_count')::int) from ff_flow_core")
    assert counted == await sql.fetchval("select count(*) from ff_exec_core") == 14 * (rounds // 2)
