"""The schema: small, complete, and strict about states."""

from __future__ import annotations

import itertools
import random
from typing import Any

import asyncpg
import pytest

from ffd import PublicState
from ffd.core.state import ROWS, read_public_state

pytestmark = pytest.mark.anyio


TABLES = {
    "ff_attempt",
    "ff_cancel_backlog",
    "ff_cascade_owed",
    "ff_cancel_backlog_member",
    "ff_claim_grant",
    "ff_completion_event",
    "ff_edge",
    "ff_edge_group",
    "ff_exec_core",
    "ff_exec_dedup",
    "ff_event_trim",
    "ff_flow_core",
    "ff_lane_registry",
    "ff_lease_event",
    "ff_node",
    "ff_operator_event",
    "ff_partition",
    "ff_pending_cancel_groups",
    "ff_quarantine",
    "ff_schema_migration",
    "ff_signal_dedup",
    "ff_signal_event",
    "ff_suspend_dedup",
    "ff_suspension_current",
    "ff_waitpoint_hmac",
    "ff_waitpoint_pending",
}


async def test_the_schema_is_small_and_plain(sql: asyncpg.Connection[Any]) -> None:
    """X-025: a handful of plain tables, no triggers, no foreign keys, no extension."""
    rows = await sql.fetch("select relname, relkind::text from pg_class where relnamespace = 'public'::regnamespace")
    kinds = {row["relname"]: row["relkind"] for row in rows}
    assert {name for name, kind in kinds.items() if kind in ("r", "p")} == TABLES
    assert "p" not in kinds.values()
    assert len([name for name, kind in kinds.items() if kind == "i"]) < 70
    assert await sql.fetchval("select count(*) from pg_trigger") == 0
    assert await sql.fetchval("select count(*) from pg_constraint where contype = 'f'") == 0
    assert await sql.fetchval("select count(*) from pg_extension where extname <> 'plpgsql'") == 0


COLUMNS = ("lifecycle_phase", "ownership_state", "eligibility_state", "public_state", "attempt_state")

# What the reference writes and ffd does not.
REFERENCE = [
    ("submitted", "unowned", "eligible_now", "waiting", "pending"),
    ("runnable", "unowned", "pending_claim", "waiting", "pending"),
    ("active", "leased", "not_applicable", "active", "running_attempt"),
    ("active", "leased", "not_applicable", "resumable", "running_attempt"),
    ("runnable", "unowned", "eligible_now", "running", "pending_retry_attempt"),
    ("runnable", "unowned", "eligible_now", "running", "attempt_interrupted"),
    ("runnable", "unowned", "not_eligible_until_time", "running", "attempt_interrupted"),
    ("runnable", "unowned", "blocked_by_dependencies", "running", "attempt_interrupted"),
    ("runnable", "released", "eligible_now", "resumable", "attempt_interrupted"),
    ("terminal", "unowned", "not_applicable", "running", "attempt_terminal"),
    ("terminal", "unowned", "not_applicable", "suspended", "attempt_terminal"),
    ("terminal", "unowned", "not_applicable", "cancelled", "cancelled"),
    ("terminal", "unowned", "not_applicable", "failed", "terminal_failed"),
    ("cancelled", "unowned", "not_applicable", "cancelled", "cancelled"),
    ("cancelled", "leased", "cancelled", "cancelled", "running_attempt"),
    ("cancelled", "released", "cancelled", "cancelled", "attempt_interrupted"),
    ("cancelled", "unowned", "cancelled", "cancelled", "terminal_failed"),
    ("active", "leased", "eligible_now", "running", "running_attempt"),
    ("suspended", "released", "eligible_now", "suspended", "attempt_interrupted"),
    ("terminal", "unowned", "blocked_by_dependencies", "skipped", "attempt_terminal"),
    ("terminal", "leased", "eligible_now", "skipped", "attempt_terminal"),
]
NONSENSE = [
    ("active", "unowned", "not_applicable", "running", "running_attempt"),
    ("active", "leased", "not_applicable", "completed", "running_attempt"),
    ("active", "leased", "not_applicable", "suspended", "running_attempt"),
    ("runnable", "leased", "eligible_now", "waiting", "pending_first_attempt"),
    ("runnable", "unowned", "not_applicable", "waiting", "pending_first_attempt"),
    ("runnable", "unowned", "eligible_now", "completed", "pending_first_attempt"),
    ("runnable", "unowned", "eligible_now", "waiting", "running_attempt"),
    ("runnable", "unowned", "eligible_now", "waiting", "cancelled"),
    ("suspended", "leased", "not_applicable", "suspended", "attempt_interrupted"),
    ("suspended", "released", "not_applicable", "running", "attempt_interrupted"),
    ("terminal", "leased", "not_applicable", "completed", "attempt_terminal"),
    ("terminal", "unowned", "eligible_now", "completed", "attempt_terminal"),
    ("active", "leased", "blocked_by_dependencies", "running", "running_attempt"),
    ("terminal", "unowned", "not_applicable", "nonsense", "attempt_terminal"),
    ("nonsense", "unowned", "eligible_now", "waiting", "pending_first_attempt"),
]


async def _insert(sql: asyncpg.Connection[Any], state: tuple[str, ...]) -> None:
    await sql.execute(
        "insert into ff_exec_core (partition_key, execution_id, lane_id, created_at_ms, lifecycle_phase,"
        " ownership_state, eligibility_state, public_state, attempt_state)"
        " values (1, gen_random_uuid(), 'l', 1, $1, $2, $3, $4, $5)",
        *state,
    )


async def test_every_row_of_the_state_vector_is_admitted(sql: asyncpg.Connection[Any]) -> None:
    """I9."""
    for row in ROWS.values():
        await _insert(sql, tuple(str(getattr(row, column)) for column in COLUMNS))


@pytest.mark.parametrize("state", REFERENCE)
async def test_what_the_reference_writes_is_admitted(sql: asyncpg.Connection[Any], state: tuple[str, ...]) -> None:
    await _insert(sql, state)


@pytest.mark.parametrize("state", NONSENSE)
async def test_nothing_else_is(sql: asyncpg.Connection[Any], state: tuple[str, ...]) -> None:
    """I9; no resurrection of what has ended, whoever tries."""
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await _insert(sql, state)
    assert refused.value.constraint_name == "ff_exec_core_state"


@pytest.mark.parametrize("partition_key", [-1, 256, 300])
async def test_a_partition_that_nobody_sweeps_is_refused(sql: asyncpg.Connection[Any], partition_key: int) -> None:
    await _insert(sql, REFERENCE[0])
    with pytest.raises(asyncpg.CheckViolationError):
        await sql.execute("update ff_exec_core set partition_key = $1", partition_key)


async def test_sql_and_python_read_states_alike(sql: asyncpg.Connection[Any]) -> None:
    phases = ("submitted", "runnable", "active", "suspended", "terminal", "cancelled")
    eligibles = ("eligible_now", "not_eligible_until_time", "blocked_by_dependencies", "pending_claim", "cancelled")
    publics = [*PublicState, "active"]
    outcomes = (None, "success", "failed", "failure", "retry", "interrupted", "cancelled", "expired", "skipped", "?")
    cases = list(itertools.product(phases, eligibles, publics, outcomes))
    rows = await sql.fetch(
        "select ff_public_state(a, b, c, d) from unnest($1::text[], $2::text[], $3::text[], $4::text[]) k(a, b, c, d)",
        *zip(*cases, strict=True),
    )
    assert [row[0] for row in rows] == [read_public_state(*case) for case in cases]


async def test_the_next_set_never_skips_one_that_fits(sql: asyncpg.Connection[Any]) -> None:
    """Walking any lane by ff_next_set finds every set that a plain filter finds."""
    rng = random.Random(7)
    tokens = ["a", "b", "B", "c", "é", "z9", "_x"]
    for _ in range(60):
        sets = {tuple(rng.choices(tokens, k=rng.randint(0, 4))) for _ in range(rng.randint(0, 25))}
        has = rng.sample(tokens, rng.randint(0, 5))
        await sql.execute("create temp table s (rc text[])")
        await sql.executemany("insert into s values ($1)", [(list(one),) for one in sets])
        walked = await sql.fetch(
            "with recursive w(rc) as ((select rc from s order by rc limit 1) union all"
            " select n.rc from w cross join lateral (select rc from s where rc >= ff_next_set(w.rc, $1)"
            " order by rc limit 1) n) select rc from w where rc <@ $1",
            has,
        )
        fits = await sql.fetch("select rc from s where rc <@ $1 order by rc", has)
        assert [row["rc"] for row in walked] == [row["rc"] for row in fits]
        await sql.execute("drop table s")


async def test_the_clock_is_the_servers_and_cannot_be_set(sql: asyncpg.Connection[Any]) -> None:
    """I7: the test clock replaces the function; the real one reads no setting."""
    source = await sql.fetchval("select prosrc from pg_proc where proname = 'ff_now_ms'")
    assert "current_setting" not in source
    drift = await sql.fetchval("select abs(ff_now_ms() - extract(epoch from clock_timestamp()) * 1000)")
    assert drift < 1000


async def test_operator_events_have_known_types(sql: asyncpg.Connection[Any]) -> None:
    """C-055."""
    insert = (
        "insert into ff_operator_event (execution_id, event_type, occurred_at_ms, partition_key) values ('x', $1, 1, 1)"
    )
    for known in ("priority_changed", "replayed", "flow_cancel_requested", "cancelled", "escalated"):
        await sql.execute(insert, known)
    with pytest.raises(asyncpg.CheckViolationError):
        await sql.execute(insert, "nonsense")
