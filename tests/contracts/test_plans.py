"""Plan guards: hot statements find their rows by their keys, however the tables looked when they were planned.

Three conditions: fresh (never analysed), analysed while empty, and loaded. Sessions are set up as the engine's
own. A guard looks at the plan's shape, never at costs: no table is read as a whole, primary keys are entered with
the execution's id, the backlog is walked in index order and never sorted (postgres.md §8.1-3).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ffd.config import DatabaseSettings
from ffd.db.database import open_connection
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.cancel_flow import OPEN_MEMBERS
from ffd.ops.cancel_set import CANCEL_LOCKED, LOCK_FREE, STILL_OPEN
from ffd.ops.cascade import DECIDE_CHILDREN, END_FLOW, LOSERS, RESOLVE_EDGES
from ffd.ops.claim import CLAIM, CLAIM_MANY
from ffd.ops.complete import COMPLETE, COMPLETE_MANY, COMPLETE_MEMBERS
from ffd.ops.create import CREATE, CREATE_KEYED
from ffd.ops.create_many import CREATE_MANY
from ffd.ops.describe import DESCRIBE
from ffd.ops.edges import MEMBERS as EDGE_MEMBERS
from ffd.ops.fail import FAIL, FAIL_MEMBER
from ffd.ops.fence import CLASSIFY, CLASSIFY_MANY
from ffd.ops.give_back import DELAY, RELEASE
from ffd.ops.priority import CHANGE_PRIORITY
from ffd.ops.renew import PROGRESS, RENEW, RENEW_MANY, RENEW_WITH_EVENT
from ffd.ops.revoke import REVOKE_LEASE
from ffd.ops.take_over import CLAIM_RESUMED, CLAIM_STARTED, TAKE_EXPIRED
from ffd.reconcilers import (
    attempt_timeout,
    delayed_promoter,
    execution_deadline,
    lease_expiry,
    retention,
    suspension_timeout,
    waitpoint_expiry,
)
from ffd.reconcilers.registry import load_reconcilers

pytestmark = pytest.mark.anyio

Node = dict[str, Any]

ID = "'00000000-0000-7000-8000-000000000001'"
WORKER = "'w', 'w-1', 30000"
# Running ones of the load below, in key order.
KEYS = sorted((at % 256, f"00000000-0000-7000-8000-{at:012}") for at in range(12, 2012, 20))
PARTITIONS = "'{" + ",".join(str(partition) for partition, _ in KEYS) + "}'::smallint[]"
IDS = "'{" + ",".join(execution for _, execution in KEYS) + "}'::uuid[]"


def hundred(value: str) -> str:
    """SQL for an array of 100 equal values."""
    return f"array_fill({value}, array[{len(KEYS)}])"


ZEROES = hundred("0")
ONES = hundred("1::bigint")
FENCES = f"{PARTITIONS}, {IDS}, {ZEROES}, {ONES}"
# The first of the flows below, and the executions of the batches as its members.
FLOW = "'00000000-0000-7000-8000-0000000f0001'"
MEMBERS = f"1::smallint, {FLOW}, {IDS}"
NEW = f"1::smallint, {ID}, null, 'a', '{{}}', 0, null, null, null, null, '{{}}'"

EVERYWHERE = "'{" + ",".join(str(partition) for partition in range(256)) + "}'::smallint[]"
# Without cancel_backlog, whose table holds a row per flow that is being cancelled and is sorted.
LOADED = load_reconcilers()
# Every sweep, with what it takes besides the partition, the limit and the entities.
SWEEPS: dict[Statement, str] = {
    lease_expiry.EXPIRE_LEASES: "",
    lease_expiry.CLEAR_LEASES: "",
    lease_expiry.RETURN_GRANTED: "",
    attempt_timeout.TIME_OUT_ATTEMPTS: "",
    attempt_timeout.CLEAR_TIMEOUTS: "",
    suspension_timeout.TIME_OUT_SUSPENSIONS: "",
    suspension_timeout.CLEAR_SUSPENSION_TIMEOUTS: "",
    delayed_promoter.PROMOTE: "",
    execution_deadline.EXPIRE_EXECUTIONS: "",
    waitpoint_expiry.EXPIRE_WAITPOINTS: "",
    retention.DELETE_ENDED: ", 0",
    retention.DELETE_ENDED_BY_POLICY: "",
}

# Each statement with arguments, as text for EXECUTE.
GUARDED: dict[str, tuple[Statement, str]] = {
    statement.name: (statement, arguments)
    for statement, arguments in (
        (CLAIM, f"'a', '{{x,y}}', {WORKER}"),
        (CLAIM_MANY, f"'a', '{{x,y}}', {WORKER}, 100"),
        (CLAIM_RESUMED, f"1::smallint, {ID}, {WORKER}"),
        (CLAIM_STARTED, f"1::smallint, {ID}, {WORKER}"),
        (TAKE_EXPIRED, f"1::smallint, {ID}, {WORKER}"),
        (RENEW, f"1::smallint, {ID}, 0, 1, 30000"),
        (RENEW_WITH_EVENT, f"1::smallint, {ID}, 0, 1, 30000"),
        (RENEW_MANY, f"{FENCES}, {ONES}, true"),
        (PROGRESS, f"1::smallint, {ID}, 0, 1, 50::smallint, null"),
        (COMPLETE, f"1::smallint, {ID}, 0, 1, null"),
        (COMPLETE_MANY, f"{FENCES}, {hundred('null::bytea')}"),
        (FAIL, f"1::smallint, {ID}, 0, 1, 'transient', 'x'"),
        (RELEASE, f"1::smallint, {ID}, 0, 1"),
        (DELAY, f"1::smallint, {ID}, 0, 1, 1"),
        (CLASSIFY, f"1::smallint, {ID}, 0"),
        (CLASSIFY_MANY, f"{PARTITIONS}, {IDS}, {ZEROES}"),
        (CREATE, NEW),
        (CREATE_KEYED, f"{NEW}, 1::smallint, 'default', 'key', 1000"),
        (
            CREATE_MANY,
            ", ".join(
                [PARTITIONS, IDS]
                + [hundred(value) for value in ("null::uuid", "'a'::text", "''::text", "0", "null::bigint")]
                + [hundred(value) for value in ("null::bigint", "null::bytea", "null::text", "'{}'::text")]
            ),
        ),
        (DESCRIBE, f"1::smallint, {ID}"),
        (FAIL_MEMBER, f"1::smallint, {ID}, 0, 1, 'transient', 'x', {ID}"),
        (REVOKE_LEASE, f"1::smallint, {ID}, 0, 1, 'x', 'x', 'w', 'w-1', 'x'"),
        (CHANGE_PRIORITY, f"1::smallint, {ID}, 5, 'x', 'x'"),
        (COMPLETE_MEMBERS, f"{FENCES}, {hundred('null::bytea')}, {ID}"),
        (RESOLVE_EDGES, f"{MEMBERS}, 100"),
        (DECIDE_CHILDREN, f"{MEMBERS}, true"),
        (LOSERS, MEMBERS),
        (LOCK_FREE, f"1::smallint, {IDS}"),
        (STILL_OPEN, f"1::smallint, {IDS}"),
        (EDGE_MEMBERS, MEMBERS),
        (CANCEL_LOCKED, f"1::smallint, {IDS}, {hundred('null::text')}, 'x'"),
        (END_FLOW, f"1::smallint, {FLOW}"),
        (OPEN_MEMBERS, f"1::smallint, {FLOW}, false"),
        *((statement, f"1::smallint, 100, null{more}") for statement, more in SWEEPS.items()),
        *(
            (each.probe, f"{EVERYWHERE}, 1{', 0, 0, 0' * (name == 'retention')}")
            for name, each in LOADED.items()
            if name != "cancel_backlog"
        ),
    )
}

# 20,000 executions over five lanes and five requirement sets: waiting, running, completed and delayed ones.
LOAD = """
insert into ff_exec_core (
  partition_key, execution_id, lane_id, required_capabilities, priority, created_at_ms, lifecycle_phase,
  ownership_state, eligibility_state, public_state, attempt_state, lease_epoch, terminal_at_ms, delay_until_ms)
select at % 256, ('00000000-0000-7000-8000-' || lpad(at::text, 12, '0'))::uuid,
       (array['a', 'b', 'c', 'd', 'e'])[1 + at % 5],
       (array['{}', '{x}', '{y}', '{x,y}', '{z}'])[1 + (at / 7) % 5]::text[], at % 10, at,
       (array['runnable', 'active', 'terminal', 'runnable'])[s.state],
       (array['unowned', 'leased', 'unowned', 'unowned'])[s.state],
       (array['eligible_now', 'not_applicable', 'not_applicable', 'not_eligible_until_time'])[s.state],
       (array['waiting', 'running', 'completed', 'delayed'])[s.state],
       (array['pending_first_attempt', 'running_attempt', 'attempt_terminal', 'pending_first_attempt'])[s.state],
       case when s.state in (2, 3) then 1 else 0 end,
       case when s.state = 3 then at end, case when s.state = 4 then at end
from generate_series(1, 20000) at
cross join lateral (select case when at % 20 < 12 then 1 when at % 20 < 16 then 2 when at % 20 < 19 then 3 else 4 end
                    as state) s;
insert into ff_attempt (partition_key, execution_id, attempt_index, worker_id, worker_instance_id, lease_epoch,
                        lease_expires_at_ms, started_at_ms, outcome)
select partition_key, execution_id, 0, 'w', 'w-1', 1,
       case when lifecycle_phase = 'active' then ff_now_ms() + 3600000 end, 1,
       case when lifecycle_phase = 'terminal' then 'success' end
from ff_exec_core where lifecycle_phase in ('active', 'terminal');
insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)
select 1, ('00000000-0000-7000-8000-0000000f' || lpad(at::text, 4, '0'))::uuid, 'open', 1
from generate_series(1, 100) at;
insert into ff_edge (partition_key, flow_id, edge_id, upstream_eid, downstream_eid, policy)
select f.partition_key, f.flow_id, gen_random_uuid(),
       ('00000000-0000-7000-8000-' || lpad((at * 20)::text, 12, '0'))::uuid,
       ('00000000-0000-7000-8000-' || lpad((at * 20 + 12)::text, 12, '0'))::uuid, '{"edge_state": "applied"}'
from ff_flow_core f, generate_series(1, 100) at;
insert into ff_edge_group (partition_key, flow_id, downstream_eid, policy)
select partition_key, flow_id, downstream_eid, '{"kind": "all_of"}' from ff_edge;
"""


@asynccontextmanager
async def session(dsn: str, planning: Planning) -> AsyncIterator[Connection]:
    """A session set up as the engine's own."""
    connection = await open_connection(DatabaseSettings(dsn=dsn), planning)
    try:
        yield connection
    finally:
        await connection.close()


async def prepare(connection: Connection, statement: Statement) -> None:
    await connection.execute(f'prepare "{statement.name}" as {statement.sql}')


async def explain(connection: Connection, name: str, options: str = "") -> Node:
    """The plan of a prepared statement, as the engine's sessions would run it."""
    arguments = GUARDED[name][1]
    found = await connection.fetchval(f'explain (format json{options}) execute "{name}"({arguments})')
    document: Node = json.loads(found)[0]
    return document


def nodes(plan: Node) -> Iterator[Node]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def own_input(plan: Node) -> Iterator[Node]:
    """What feeds a node directly: not the CTEs and subplans that hang off it, nothing beneath a LIMIT."""
    for child in plan.get("Plans", ()):
        if child["Parent Relationship"] in ("InitPlan", "SubPlan") or child["Node Type"] == "Limit":
            continue
        yield child
        yield from own_input(child)


def is_ffs(node: Node) -> bool:
    return str(node.get("Relation Name", "")).startswith("ff_")


def faults(plan: Node, *, is_replanned_later: bool = False) -> list[str]:
    """What is wrong with a plan; nothing, if it is good.

    `is_replanned_later`: the tables are empty and the plan is made anew for every call, so walking the whole of an
    empty index is no fault.
    """
    found = []
    for node in nodes(plan):
        kind, index, condition = node["Node Type"], node.get("Index Name", ""), node.get("Index Cond", "")
        if kind in ("Seq Scan", "Bitmap Heap Scan") and is_ffs(node):
            found.append(f"{kind} on {node['Relation Name']}")
        if is_replanned_later:
            continue
        if index in ("ff_exec_core_pkey", "ff_attempt_pkey") and "execution_id" not in condition:
            found.append(f"{index} entered without an execution: {condition or 'no condition'}")
        if index.startswith("ff_edge") and "stream_eid" not in condition:
            found.append(f"{index} entered without an execution: {condition or 'no condition'}")
        if index == "ff_exec_core_claim" and "lane_id" not in condition:
            found.append(f"{index} walked without a lane: {condition or 'no condition'}")
        if kind in ("Sort", "Incremental Sort"):
            found += [f"{kind} over {below['Relation Name']}" for below in own_input(node) if is_ffs(below)]
        if kind in ("Hash Join", "Merge Join"):
            found.append(kind)
    return found


async def load(sql: Connection) -> None:
    await sql.execute(LOAD)


async def fresh(sql: Connection) -> None:
    """Nothing was ever analysed, and nothing will be behind the test's back."""


async def empty_analysed(sql: Connection) -> None:
    await sql.execute("vacuum analyze")


async def loaded(sql: Connection) -> None:
    await load(sql)
    await sql.execute("vacuum analyze")


async def loaded_not_analysed(sql: Connection) -> None:
    await load(sql)


async def loaded_after_analyse(sql: Connection) -> None:
    """The statistics say empty, the tables are not: a burst before autoanalyze comes by."""
    await sql.execute("vacuum analyze")
    await load(sql)


CONDITIONS: dict[str, Callable[[Connection], Any]] = {
    "fresh": fresh,
    "empty_analysed": empty_analysed,
    "loaded": loaded,
    "loaded_not_analysed": loaded_not_analysed,
    "loaded_after_analyse": loaded_after_analyse,
}


async def keep_statistics(sql: Connection) -> None:
    """Autovacuum must not come by while a test looks."""
    for table in ("ff_exec_core", "ff_attempt", "ff_exec_dedup", "ff_flow_core", "ff_edge", "ff_edge_group"):
        await sql.execute(f"alter table {table} set (autovacuum_enabled = off)")


@pytest.mark.parametrize("condition", CONDITIONS)
async def test_hot_statements_find_their_rows_by_key(dsn: str, sql: Connection, condition: str) -> None:
    """Show: plan guards on fresh, empty-analysed and loaded tables, for claim, renew, complete, fail, take-overs."""
    await keep_statistics(sql)
    await CONDITIONS[condition](sql)
    is_empty = await sql.fetchval("select count(*) from ff_exec_core") == 0
    wrong = {}
    for planning in (Planning.GENERIC, Planning.CUSTOM):
        async with session(dsn, planning) as connection:
            for name, (statement, _) in GUARDED.items():
                if statement.planning == planning:
                    await prepare(connection, statement)
                    plan = (await explain(connection, name))["Plan"]
                    is_replanned_later = is_empty and planning == Planning.CUSTOM
                    if found := faults(plan, is_replanned_later=is_replanned_later):
                        wrong[name] = found
    assert wrong == {}


async def test_plans_cached_while_empty_are_still_good_after_a_burst(dsn: str, sql: Connection) -> None:
    """Show: a plan cached on the empty tables, used on 20,000 executions: it reads a few pages, not a table."""
    await keep_statistics(sql)
    await sql.execute("vacuum analyze")
    wrong = {}
    for planning in (Planning.GENERIC, Planning.CUSTOM):
        await sql.execute("truncate ff_exec_core, ff_attempt, ff_flow_core, ff_edge, ff_edge_group")
        async with session(dsn, planning) as connection:
            names = [name for name, (statement, _) in GUARDED.items() if statement.planning == planning]
            for name in names:
                await prepare(connection, GUARDED[name][0])
                await explain(connection, name)
            await load(sql)
            for name in names:
                if found := faults((await explain(connection, name))["Plan"]):
                    wrong[name] = found
                await connection.execute("begin")
                ran = (await explain(connection, name, ", analyze, buffers"))["Plan"]
                await connection.execute("rollback")
                if (read := pages(ran)) > budget(name):
                    wrong.setdefault(name, []).append(f"{read} pages, expected at most {budget(name)}")
    assert wrong == {}


def pages(plan: Node) -> int:
    """Pages that a statement touched, all in all."""
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def budget(name: str) -> int:
    """A generous bound that a scan of 20,000 rows or index entries breaks at least for the single operations."""
    is_batch = ("'{" in GUARDED[name][1] and name != "claim") or GUARDED[name][0] in SWEEPS
    return 5_000 if is_batch else 150


async def test_a_claim_walks_the_claim_index_by_lane_and_requirement_set(dsn: str, sql: Connection) -> None:
    """Show: the candidate of a claim comes from its index, entered by lane and set, in the index's own order."""
    await keep_statistics(sql)
    for condition in (fresh, loaded):
        await condition(sql)
        for statement in (CLAIM, CLAIM_MANY):
            async with session(dsn, statement.planning) as connection:
                await prepare(connection, statement)
                plan = (await explain(connection, statement.name))["Plan"]
            scans = [node for node in nodes(plan) if node.get("Index Name") == "ff_exec_core_claim"]
            conditions = [node["Index Cond"] for node in scans]
            assert len(scans) == 3, conditions
            assert all("lane_id = " in condition for condition in conditions)
            assert sum("required_capabilities = " in condition for condition in conditions) == 1
            assert sum("required_capabilities >" in condition for condition in conditions) == 1
            # A LockRows beneath its own Limit: what is not taken is not locked.
            locks = [node for node in nodes(plan) if node["Node Type"] == "LockRows"]
            limits = [node for node in nodes(plan) if node["Node Type"] == "Limit" and node["Plans"][0] in locks]
            assert len(locks) == len(limits) == 1


async def test_the_guard_finds_what_unpinned_sessions_would_do(dsn: str, sql: Connection) -> None:
    """The guards can fail: the same statements, planned on empty tables without the pinned settings, have faults."""
    await keep_statistics(sql)
    await sql.execute("vacuum analyze")
    names = ("claim_many", "complete_many", "renew_many")
    bad = {}
    async with session(dsn, Planning.READ) as connection:
        await connection.execute("set plan_cache_mode = force_generic_plan")
        for name in names:
            await prepare(connection, GUARDED[name][0])
            await explain(connection, name)
        await load(sql)
        for name in names:
            bad[name] = faults((await explain(connection, name))["Plan"])
    assert all(bad.values()), bad


async def test_the_guard_finds_a_sorted_backlog(dsn: str, sql: Connection) -> None:
    """The guards can fail: a claim in another order than its index has to sort the lane."""
    await load(sql)
    sorting = Statement(
        "sorting",
        "select execution_id from ff_exec_core where lane_id = 'a' and [[claimable]]"
        " order by created_at_ms desc, priority limit 1 for no key update skip locked",
    )
    async with session(dsn, Planning.GENERIC) as connection:
        await prepare(connection, sorting)
        plan = json.loads(await connection.fetchval('explain (format json) execute "sorting"'))[0]["Plan"]
    assert faults(plan) == ["Sort over ff_exec_core"]
