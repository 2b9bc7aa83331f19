"""Taking work: the best claimable execution of a lane that the worker can run.

A lane is walked by requirement set (a loose scan over the distinct sets, then the best rows of the matching
ones), so that work nobody present can run neither slows nor blocks what stands behind it. One statement locks
the rows, opens or continues their attempts, raises the epoch and writes the lease events (I1, I3).

Order: exact for one claim. A batch takes whole sets by the rank of their best execution.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from ffd.core.checks import check_capabilities, check_int, check_lane, check_text
from ffd.core.errors import Unavailable
from ffd.core.events import LEASE_RINGS
from ffd.core.handles import Handle, HandleKind, Lease
from ffd.core.ids import attempt_id_text, lease_id_text
from ffd.core.limits import BATCH_MAX, LEASE_TTL_MS_MAX, WAIT_MS_MAX
from ffd.core.records import Claim
from ffd.db.database import Row
from ffd.db.statement import Planning, Statement
from ffd.db.wakeups import WaitKey
from ffd.ops.raw_fields import read_raw_fields
from ffd.ops.runtime import Runtime

# Shared by every statement that takes a lease. Each has a CTE `c` of locked executions with the columns of
# [[candidate columns]] and the time as `now`, and the parameters $3 worker_id, $4 worker_instance_id, $5 lease_ttl_ms.
CLAIM_PHRASES: Final = {
    # The lane's requirement sets that this worker may satisfy, each with the rank of its best execution: one
    # index probe per set, and one per gap of sets that it cannot (ff_next_set).
    "sets": """
      s(rc, pr, cr) as (
        (select required_capabilities, priority, created_at_ms from ff_exec_core
         where lane_id = $1 and [[claimable]]
         order by required_capabilities, priority desc, created_at_ms, execution_id limit 1)
        union all
        select n.required_capabilities, n.priority, n.created_at_ms from s cross join lateral (
          select required_capabilities, priority, created_at_ms from ff_exec_core
          where lane_id = $1 and [[claimable]] and required_capabilities >= ff_next_set(s.rc, $2)
          order by required_capabilities, priority desc, created_at_ms, execution_id limit 1) n)""",
    # An interrupted attempt goes on; whether its worker was lost decides what the new one is told.
    "candidate columns": """
      partition_key, execution_id, attempt_index, lease_epoch, policy,
      case when attempt_state <> 'attempt_interrupted' then 'fresh'
           when interruption in ('lease_expiry', 'operator')
             or (interruption is null and public_state <> 'resumable') then 'reclaimed'
           else 'resumed' end as how""",
    # The epoch grows from the counter on the locked execution. Earlier attempts' epochs are only a lower bound,
    # for those that FlowFabric workers failed without touching the counter. In key order: no deadlocks.
    "open attempts": """
      insert into ff_attempt as t (partition_key, execution_id, attempt_index, worker_id, worker_instance_id,
                                   lease_epoch, lease_expires_at_ms, started_at_ms, timeout_at_ms)
      select c.partition_key, c.execution_id, c.attempt_index, $3, $4,
             1 + greatest(c.lease_epoch, case when c.attempt_index > 0 then (
                   select max(p.lease_epoch) from ff_attempt p where p.partition_key = c.partition_key
                   and p.execution_id = c.execution_id and p.attempt_index < c.attempt_index) end),
             c.now + $5, c.now,
             c.now + case when c.policy is not null
                     then ff_policy_number(c.policy, '{timeout_policy,attempt_timeout_ms}', null)::bigint end
      from c order by c.partition_key, c.execution_id
      on conflict (partition_key, execution_id, attempt_index) do update set
        worker_id = excluded.worker_id, worker_instance_id = excluded.worker_instance_id,
        lease_epoch = greatest(t.lease_epoch + 1, excluded.lease_epoch),
        lease_expires_at_ms = excluded.lease_expires_at_ms, started_at_ms = excluded.started_at_ms,
        timeout_at_ms = excluded.timeout_at_ms, terminal_at_ms = null, outcome = null
      returning t.partition_key, t.execution_id, t.lease_epoch, t.lease_expires_at_ms, t.started_at_ms as now""",
    "set claimed": """
      set [[running]], lease_epoch = a.lease_epoch, started_at_ms = coalesce(e.started_at_ms, a.now),
          interruption = null, delay_until_ms = null, state_since_ms = a.now""",
    "claimed columns": """
      e.partition_key, e.execution_id, e.lane_id, e.attempt_index, e.payload, e.raw_fields,
      a.lease_epoch, a.lease_expires_at_ms, a.now, e.priority, e.created_at_ms""",
    "acquired event": """
      [[into lease_event]]
      select u.partition_key, u.execution_id::text,
             case u.how when 'reclaimed' then 'reclaimed' else 'acquired' end, null, u.now, u.attempt_index,
             u.lease_epoch, $3, $4, [[origin u]]
      from u""",
    "claim result": """
      select partition_key, execution_id, lane_id, attempt_index, payload, raw_fields, lease_epoch,
             lease_expires_at_ms, how""",
}

# $1 lane, $2 capabilities. The keys of the last update are scalar subqueries: always an index condition.
CLAIM: Final = Statement(
    "claim",
    """
    with recursive [[sets]],
    -- The best unlocked execution among the sets this worker satisfies. Materialized: it locks exactly one row.
    c as materialized (
      select x.* from (select rc from s where rc <@ $2 order by pr desc, cr) m
      cross join lateral (
        select [[candidate columns]], ff_now_ms() as now from ff_exec_core
        where lane_id = $1 and [[claimable]] and required_capabilities = m.rc
        order by priority desc, created_at_ms, execution_id limit 1
        for no key update skip locked) x
      limit 1),
    a as ([[open attempts]]),
    u as (
      update ff_exec_core e [[set claimed]] from a, c
      where e.partition_key = (select partition_key from c) and e.execution_id = (select execution_id from c)
      returning [[claimed columns]], c.how),
    v as ([[acquired event]])
    [[claim result]] from u
    """,
    phrases=CLAIM_PHRASES,
)

# The same for $6 executions at once. `h` holds what is not fresh, by id: joining `a` and `c`, two results without an
# index, would cost the square of the batch.
CLAIM_MANY: Final = Statement(
    "claim_many",
    """
    with recursive [[sets]],
    c as materialized (
      select x.* from (select rc from s where rc <@ $2 order by pr desc, cr) m
      cross join lateral (
        select [[candidate columns]], ff_now_ms() as now from ff_exec_core
        where lane_id = $1 and [[claimable]] and required_capabilities = m.rc
        order by priority desc, created_at_ms, execution_id limit $6
        for no key update skip locked) x
      limit $6),
    a as ([[open attempts]]),
    h as materialized (select jsonb_object_agg(c.execution_id, c.how) as how from c where c.how <> 'fresh'),
    u as (
      update ff_exec_core e [[set claimed]] from a
      where e.partition_key = a.partition_key and e.execution_id = a.execution_id
      returning [[claimed columns]],
                coalesce((select h.how from h) ->> e.execution_id::text, 'fresh') as how),
    v as ([[acquired event]])
    [[claim result]] from u order by priority desc, created_at_ms, execution_id
    """,
    Planning.CUSTOM,
    phrases=CLAIM_PHRASES,
)

_KINDS: Final = {
    "fresh": HandleKind.FRESH,
    "resumed": HandleKind.RESUMED,
    "reclaimed": HandleKind.RECLAIMED,
}


def read_claim(row: Row, lease_ttl_ms: int, worker_instance_id: str) -> Claim:
    """The claim that a claiming statement's row describes."""
    partition_key, execution_id, lane, attempt_index, payload, raw, lease_epoch, expires_at_ms, how = row
    lease = Lease(partition_key, execution_id, attempt_index, lease_epoch, lease_ttl_ms, lane, worker_instance_id)
    fields = read_raw_fields(raw)
    return Claim(
        Handle.of_lease(_KINDS[how], lease),
        f"{{fp:{partition_key}}}:{execution_id}",
        lane,
        fields.execution_kind,
        fields.namespace,
        payload or b"",
        fields.tags,
        attempt_index,
        lease_epoch,
        lease_id_text(execution_id, attempt_index, lease_epoch),
        attempt_id_text(execution_id, attempt_index),
        expires_at_ms,
    )


@lru_cache(maxsize=1024, typed=True)
def _check_worker(worker_id: object, worker_instance_id: object, lease_ttl_ms: object) -> tuple[str, str, int]:
    return (
        check_text(worker_id, "worker_id"),
        check_text(worker_instance_id, "worker_instance_id"),
        check_int(lease_ttl_ms, "lease_ttl_ms", 1, LEASE_TTL_MS_MAX),
    )


def check_worker(worker_id: object, worker_instance_id: object, lease_ttl_ms: object) -> tuple[str, str, int]:
    """Who claims, and for how long. Workers say the same every time, hence the cache."""
    try:
        return _check_worker(worker_id, worker_instance_id, lease_ttl_ms)
    except TypeError:  # unhashable, so certainly not valid: the uncached checks name the field
        return _check_worker.__wrapped__(worker_id, worker_instance_id, lease_ttl_ms)


class Wanted(NamedTuple):
    """The parameters of a claiming statement."""

    lane: str
    capabilities: list[str]
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int


def _check(
    lane: str, capabilities: Iterable[str], worker_id: str, worker_instance_id: str, lease_ttl_ms: int, wait_ms: int
) -> Wanted:
    lane = check_lane(lane)
    worker = check_worker(worker_id, worker_instance_id, lease_ttl_ms)
    check_int(wait_ms, "wait_ms", 0, WAIT_MS_MAX)
    tokens = [] if capabilities == () else check_capabilities(capabilities, "capabilities")
    return Wanted(lane, tokens, *worker)


async def claim(
    runtime: Runtime,
    lane: str,
    *,
    worker_id: str,
    worker_instance_id: str,
    capabilities: Iterable[str],
    lease_ttl_ms: int,
    wait_ms: int,
) -> Claim | None:
    """Take the best execution of the lane; None when there is none within `wait_ms`."""
    wanted = _check(lane, capabilities, worker_id, worker_instance_id, lease_ttl_ms, wait_ms)
    rows = await runtime.db.fetch(CLAIM, *wanted)
    if not rows and wait_ms:
        rows = await _wait_for_work(runtime, CLAIM, wanted, (), wait_ms)
    if not rows:
        return None
    runtime.ring(LEASE_RINGS)
    return read_claim(rows[0], lease_ttl_ms, worker_instance_id)


async def claim_many(
    runtime: Runtime,
    lane: str,
    limit: int,
    *,
    worker_id: str,
    worker_instance_id: str,
    capabilities: Iterable[str],
    lease_ttl_ms: int,
    wait_ms: int,
) -> list[Claim]:
    """Take up to `limit` executions; returns as soon as there is at least one."""
    check_int(limit, "limit", 1, BATCH_MAX)
    wanted = _check(lane, capabilities, worker_id, worker_instance_id, lease_ttl_ms, wait_ms)
    rows = await runtime.db.fetch(CLAIM_MANY, *wanted, limit)
    if not rows and wait_ms:
        rows = await _wait_for_work(runtime, CLAIM_MANY, wanted, (limit,), wait_ms)
    if rows:
        runtime.ring(LEASE_RINGS)
    return [read_claim(row, lease_ttl_ms, worker_instance_id) for row in rows]


async def _look(
    runtime: Runtime, statement: Statement, wanted: Wanted, limit: tuple[int, ...], deadline: float
) -> list[Row]:
    """One look at the lane. An outage is waited out like an empty lane, as long as there is time left."""
    try:
        return await runtime.db.fetch(statement, *wanted, *limit)
    except Unavailable:
        if runtime.is_closed or time.monotonic() >= deadline:
            raise
        return []


async def _wait_for_work(
    runtime: Runtime, statement: Statement, wanted: Wanted, limit: tuple[int, ...], wait_ms: int
) -> list[Row]:
    deadline = time.monotonic() + wait_ms / 1000
    await runtime.listener.ready(wait_ms / 1000)
    key = WaitKey(wanted.lane, tuple(wanted.capabilities))
    with runtime.wakeups.ticket(key) as ticket:
        try:
            # The ticket stands before this look, so that work arriving in between rings it.
            while not (rows := await _look(runtime, statement, wanted, limit, deadline)):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not await ticket.wait(left_s):
                    return []
        except BaseException:
            # The ring may have been for work that this waiter now leaves behind.
            runtime.wakeups.pass_on(key)
            raise
        runtime.wakeups.pass_on(key)
        return rows
