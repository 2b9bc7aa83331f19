"""What event ids and the fence rely on: the xid before the id, pinned sessions, ordered inserts (traps B and J)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from ffd import Contention, ContentionKind, Engine, ExecutionPolicy, NewExecution, ResumeToken
from ffd.core.ids import parse_execution_id
from ffd.db.pool import Connection
from ffd.db.statement import Planning
from ffd.dev.postgres import EmbeddedPostgres
from tests.support import WORKER, Clock, Rig

pytestmark = pytest.mark.anyio

EVENT_TABLES = ("ff_completion_event", "ff_lease_event", "ff_signal_event", "ff_operator_event")
A_ROW = {
    "ff_completion_event": "(partition_key, execution_id, outcome, occurred_at_ms)"
    " values (0, gen_random_uuid(), 'success', 1)",
    "ff_lease_event": "(partition_key, execution_id, event_type, occurred_at_ms) values (0, 'x', 'acquired', 1)",
    "ff_signal_event": "(partition_key, execution_id, signal_id, delivered_at_ms) values (0, 'x', 'x', 1)",
    "ff_operator_event": "(partition_key, execution_id, event_type, occurred_at_ms) values (0, 'x', 'resumed', 1)",
}


@pytest.mark.parametrize("table", EVENT_TABLES)
async def test_an_event_id_is_drawn_after_the_transaction_id(sql: Connection, table: str) -> None:
    """Show: trap B. The default takes the xid first, in a CASE, which no planner can reorder or inline away."""
    default = await sql.fetchval(
        "select pg_get_expr(d.adbin, d.adrelid) from pg_attrdef d"
        " join pg_attribute a on a.attrelid = d.adrelid and a.attnum = d.adnum"
        " where d.adrelid = $1::regclass and a.attname = 'event_id'",
        table,
    )
    words = " ".join(default.split())
    assert words == (
        f"CASE WHEN (pg_current_xact_id() IS NOT NULL) THEN nextval('{table}_id_seq'::regclass) ELSE NULL::bigint END"
    )


@pytest.mark.parametrize("table", EVENT_TABLES)
async def test_the_plan_of_an_insert_still_takes_the_transaction_id_first(sql: Connection, table: str) -> None:
    """Show: trap B, in the plan itself: what the executor evaluates is the CASE, not a bare nextval."""
    plan = await sql.fetch(f"explain (verbose, costs off) insert into {table} {A_ROW[table]}")
    text = "\n".join(row[0] for row in plan)
    assert f"CASE WHEN (pg_current_xact_id() IS NOT NULL) THEN nextval('{table}_id_seq'::regclass)" in text


async def test_sequences_hand_out_ids_one_by_one_and_for_ever(sql: Connection) -> None:
    """Show: cache 1, increment 1, no cycle, bigint: the proof that a gap can be closed needs all of them."""
    rows = await sql.fetch(
        "select sequencename::text, data_type::text, cache_size, increment_by, cycle, max_value from pg_sequences"
        " where schemaname = current_schema() and sequencename like 'ff\\_%event\\_id\\_seq' order by 1"
    )
    assert [row["sequencename"] for row in rows] == sorted(f"{table}_id_seq" for table in EVENT_TABLES)
    for row in rows:
        assert tuple(row)[1:5] == ("bigint", 1, 1, False)
        assert row["max_value"] == 2**63 - 1


async def test_a_take_over_writes_expired_before_reclaimed(rig: Rig, clock: Clock) -> None:
    """Show: two events of one execution in one statement: their ids follow their order."""
    for _ in range(20):
        claim = await rig.running()
        await clock.advance(30_001)
        taken = await rig.engine.claim_from_resume_grant(ResumeToken(claim.execution_id, "other", "other-1"))
        assert taken is not None
        rows = await rig.sql.fetch(
            "select event_id, event_type, lease_epoch from ff_lease_event where execution_id = $1 order by event_id",
            str(parse_execution_id(claim.execution_id).execution_id),
        )
        assert [row["event_type"] for row in rows] == ["acquired", "expired", "reclaimed"]
        assert rows[1]["event_id"] < rows[2]["event_id"]
        epochs = [row["lease_epoch"] for row in rows]
        assert epochs[0] <= epochs[1] < epochs[2] == taken.lease_epoch
        await rig.engine.complete(taken.handle)


async def test_a_spent_take_over_writes_one_event_of_each_stream(rig: Rig, clock: Clock) -> None:
    """Show: a reclaim too many ends the execution: `expired` and one completion event, no `reclaimed`."""
    claim = await rig.running(policy=ExecutionPolicy(max_reclaim_count=0))
    await clock.advance(30_001)
    token = ResumeToken(claim.execution_id, "other", "other-1")
    with pytest.raises(Contention) as refused:
        await rig.engine.claim_from_resume_grant(token)
    assert refused.value.kind == ContentionKind.EXECUTION_NOT_ACTIVE
    assert [event for event, _ in await rig.lease_events(claim.execution_id)] == ["acquired", "expired"]
    assert await rig.completions(claim.execution_id) == ["failed"]


PINNED = {
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "synchronous_commit": "on",
    "lock_timeout": "5s",
    "statement_timeout": "30s",
    "idle_in_transaction_session_timeout": "30s",
    "jit": "off",
}
# What a careless administrator may have set for the database.
HOSTILE = {
    "default_transaction_isolation": "'repeatable read'",
    "default_transaction_read_only": "on",
    "synchronous_commit": "off",
    "lock_timeout": "0",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "enable_seqscan": "on",
    "jit": "on",
    "plan_cache_mode": "force_custom_plan",
}

RECORD_SETTINGS = """
create table ff_test_settings (session text, name text, setting text);
create or replace function ff_now_ms() returns bigint language plpgsql volatile as $$
begin
  insert into ff_test_settings
  select current_setting('application_name'), s.name, current_setting(s.name)
  from unnest(string_to_array('default_transaction_isolation,transaction_isolation,default_transaction_read_only,'
    || 'synchronous_commit,lock_timeout,statement_timeout,idle_in_transaction_session_timeout,jit,plan_cache_mode,'
    || 'enable_seqscan', ',')) s(name);
  return floor(extract(epoch from clock_timestamp()) * 1000)::bigint;
end $$;
"""


async def exercise(engine: Engine) -> None:
    """Use every pool: single operations, batches, reads."""
    await engine.create_execution()
    await engine.create_executions([NewExecution(), NewExecution(idempotency_key="k")])
    claims = await engine.claim_many("default", 2, **WORKER)
    one = await engine.claim("default", **WORKER)
    assert one is not None
    await engine.renew(one.handle)
    await engine.complete(one.handle)
    await engine.complete_many([(claim.handle, None) for claim in claims])
    await engine.explain_execution(one.execution_id)
    await engine.list_executions()


@pytest.fixture
async def hostile(pg: EmbeddedPostgres, dsn: str) -> str:
    """A database whose defaults break every rule."""
    name = dsn.rpartition("/")[2]
    connection = await asyncpg.connect(pg.dsn())
    try:
        for setting, value in HOSTILE.items():
            await connection.execute(f"alter database {name} set {setting} = {value}")
    finally:
        await connection.close()
    return dsn


async def test_every_session_is_pinned_whatever_the_database_says(hostile: str) -> None:
    """Show: trap J. isolation, synchronous_commit and timeouts hold although the database's defaults differ."""
    connection = await asyncpg.connect(hostile)
    try:
        assert await connection.fetchval("show default_transaction_isolation") == "repeatable read"
        assert await connection.fetchval("show synchronous_commit") == "off"
        # The settings as the engine's own statements see them: this clock writes them down.
        await connection.execute("set default_transaction_read_only = off")
        await connection.execute(RECORD_SETTINGS)
        async with Engine.connect(hostile) as engine:
            await exercise(engine)
        rows = await connection.fetch("select distinct session, name, setting from ff_test_settings")
        seen: dict[str, set[str]] = {}
        for row in rows:
            assert row["session"] == "ffd"
            seen.setdefault(row["name"], set()).add(row["setting"])
        for name, value in PINNED.items():
            assert seen[name] == {value}, name
        assert seen["transaction_isolation"] == {"read committed"}
        assert seen["plan_cache_mode"] == {"force_generic_plan", "force_custom_plan"}
        assert "off" in seen["enable_seqscan"]
    finally:
        await connection.close()


async def test_the_engine_works_on_a_database_with_hostile_defaults(hostile: str) -> None:
    """Show: trap J. A repeatable read default would break fences and contention; ffd does not inherit it."""
    async with Engine.connect(hostile) as engine:
        await exercise(engine)


@pytest.mark.usefixtures("hostile")
async def test_the_doorbell_and_the_listener_are_pinned_too(open_engine: Callable[..., Any]) -> None:
    """Show: all sessions of the engine have a lock_timeout and a statement_timeout, also those beside the pools."""
    async with open_engine() as engine:
        runtime = engine._runtime
        for name, connect in (("doorbell", runtime._doorbell._connect), ("listener", runtime.listener._connect)):
            session = await connect()
            try:
                assert await session.fetchval("show application_name") == f"ffd {name}"
                for setting, value in PINNED.items():
                    assert await session.fetchval(f"show {setting}") == value, (name, setting)
            finally:
                await session.close()


async def test_timeouts_follow_the_settings(open_engine: Callable[..., Any]) -> None:
    """Show: the configured timeouts reach the sessions."""
    async with open_engine(lock_timeout_ms=1_234, statement_timeout_ms=2_345) as engine:
        for planning in Planning:
            pool = engine._runtime.db.pool(planning)
            connection = await pool.acquire()
            assert await connection.fetchval("show lock_timeout") == "1234ms"
            assert await connection.fetchval("show statement_timeout") == "2345ms"
            pool.release(connection)
