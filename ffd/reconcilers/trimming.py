"""The part of retention that belongs to no partition: old events, grants and nodes that are gone.

A stream is trimmed from its oldest end, by id, up to the first event that is too young: an event that took its id early
and committed late waits with those behind it. How far is recorded in the statement that deletes. Renewals go earlier,
so a second mark tells how far they have been looked through.
"""

from __future__ import annotations

from typing import Final

from ffd.db.database import Row
from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime

CHORES_PARTITION: Final = 0
# Renewals are looked for among all events: this many per row that may be deleted.
LOOKED_THROUGH: Final = 10

# Sources of retention's probe; $4 event_ms, $5 renewal_ms.
_HEAD: Final = """
    select null::uuid as entity_id, q.{time} + $4::bigint as due_at_ms from ff_{stream}_event q
    where p.partition_key = 0 order by q.event_id
"""
_RENEWAL: Final = """
    select null::uuid as entity_id, q.occurred_at_ms + $5::bigint as due_at_ms from ff_lease_event q
    where p.partition_key = 0 and q.event_id > (select renewals_through from ff_event_trim where stream = 'lease')
    order by q.event_id
"""
TRIM_SOURCES: Final = (
    _HEAD.format(stream="completion", time="occurred_at_ms"),
    _HEAD.format(stream="lease", time="occurred_at_ms"),
    _HEAD.format(stream="signal", time="delivered_at_ms"),
    _HEAD.format(stream="operator", time="occurred_at_ms"),
    _RENEWAL,
)

_TRIM: Final = """
    with o as materialized (
      select event_id, partition_key, {time} <= ff_now_ms() - $2::bigint as is_old
      from ff_{stream}_event order by event_id limit $1),
    d as materialized (
      select event_id, partition_key from o
      where event_id < coalesce((select min(event_id) from o where not is_old), 9e18::bigint)),
    u as (
      update ff_event_trim set trimmed_through = greatest(trimmed_through, (select max(event_id) from d))
      where stream = '{stream}' and exists (select 1 from d))
    delete from ff_{stream}_event t using d where t.event_id = d.event_id and t.partition_key = d.partition_key
    returning 'trimmed', null::text, false
"""


def _trim(stream: str, time: str) -> Statement:
    return Statement(f"trim_{stream}_events", _TRIM.format(stream=stream, time=time), Planning.CUSTOM)


TRIM_COMPLETION_EVENTS: Final = _trim("completion", "occurred_at_ms")
TRIM_LEASE_EVENTS: Final = _trim("lease", "occurred_at_ms")
TRIM_SIGNAL_EVENTS: Final = _trim("signal", "delivered_at_ms")
TRIM_OPERATOR_EVENTS: Final = _trim("operator", "occurred_at_ms")

# $1 how many events to look through, $2 renewal_ms.
TRIM_RENEWALS: Final = Statement(
    "trim_renewals",
    """
    with o as materialized (
      select event_id, partition_key, event_type, occurred_at_ms <= ff_now_ms() - $2::bigint as is_old
      from ff_lease_event
      where event_id > (select renewals_through from ff_event_trim where stream = 'lease')
      order by event_id limit $1),
    d as materialized (
      select event_id, partition_key, event_type from o
      where event_id < coalesce((select min(event_id) from o where not is_old), 9e18::bigint)),
    u as (
      update ff_event_trim set renewals_through = greatest(renewals_through, (select max(event_id) from d))
      where stream = 'lease' and exists (select 1 from d)),
    x as (
      delete from ff_lease_event t using d
      where d.event_type = 'renewed' and t.event_id = d.event_id and t.partition_key = d.partition_key)
    select 'trimmed', null::text, false from d
    """,
    Planning.CUSTOM,
)
DELETE_GRANTS: Final = Statement(
    "delete_grants",
    """
    with d as materialized (
      select partition_key, grant_id from ff_claim_grant
      where expires_at_ms <= ff_now_ms() - 86400000 order by expires_at_ms limit $1 for update skip locked)
    delete from ff_claim_grant t using d where t.partition_key = d.partition_key and t.grant_id = d.grant_id
    returning 'deleted', null::text, false
    """,
    Planning.CUSTOM,
)
DELETE_NODES: Final = Statement(
    "delete_nodes",
    "delete from ff_node where expires_at_ms <= ff_now_ms() - 3600000 returning 'deleted', null::text, false",
    Planning.CUSTOM,
)


async def trim(runtime: Runtime, limit: int) -> list[Row]:
    """A batch of each stream, oldest first, and of what else has gone stale."""
    fetch, keep = runtime.db.fetch, runtime.retention
    rows: list[Row] = []
    for statement in (TRIM_COMPLETION_EVENTS, TRIM_LEASE_EVENTS, TRIM_SIGNAL_EVENTS, TRIM_OPERATOR_EVENTS):
        rows += await fetch(statement, limit, keep.event_ms)
    rows += await fetch(TRIM_RENEWALS, limit * LOOKED_THROUGH, keep.renewal_ms)
    rows += await fetch(DELETE_GRANTS, limit)
    rows += await fetch(DELETE_NODES)
    return rows
