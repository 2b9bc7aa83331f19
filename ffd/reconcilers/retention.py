"""What has ended and been kept long enough goes, with everything that hangs on it: nothing grows without bound.

An execution outside of flows goes `retention.execution_ms` after its end, or when its policy's `retention_ms` says. A
member goes with its flow, that long after the flow's end, and later when a member's policy asks for more. Idempotency
keys go when they have run out.

What belongs to no partition, above all the streams of events, is trimmed by whoever sweeps partition 0
(`ffd.reconcilers.trimming`).
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.isolation import FORGET_QUARANTINE
from ffd.reconcilers.report import Report
from ffd.reconcilers.trimming import CHORES_PARTITION, TRIM_SOURCES, trim

_MEMBER_IS_KEPT: Final = (
    "exists (select 1 from ff_exec_core m where m.partition_key = q.partition_key"
    " and m.flow_id = q.flow_id and m.flow_id is not null"
    " and (m.lifecycle_phase not in ('terminal', 'cancelled') or coalesce(m.terminal_at_ms, 0)"
    " + ff_policy_number(m.policy, '{{retention_ms}}', {}::bigint::double precision)::bigint > ff_now_ms()) offset 0)"
)
_PHRASES: Final = {
    # The predicates of the indexes, word for word.
    "kept by default": "terminal_at_ms is not null and flow_id is null"
    " and ff_policy_number(policy, '{retention_ms}', -1) < 0",
    "kept by policy": "terminal_at_ms is not null and flow_id is null"
    " and ff_policy_number(policy, '{retention_ms}', -1) >= 0",
    "until": "terminal_at_ms + ff_policy_number(policy, '{retention_ms}', 0)::bigint",
    # Members that keep their flow `q`: those that have not ended (a cancelled flow may leave them running), and those
    # that have not been over for long enough, by their own policy or by the default.
    "a member is kept $3": _MEMBER_IS_KEPT.format("$3"),
    "a member is kept $4": _MEMBER_IS_KEPT.format("$4"),
    # Everything of the executions in `d`. An attempt that the snapshot does not show cannot be there: the execution was
    # still over when its row was locked.
    "and all that is theirs": """
    a as (delete from ff_attempt t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id),
    s as (delete from ff_suspension_current t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id),
    w as (delete from ff_waitpoint_pending t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id),
    g as (delete from ff_claim_grant t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id),
    p as (delete from ff_suspend_dedup t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id),
    n as (delete from ff_signal_dedup t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id),
    x as (delete from ff_exec_core t using d
      where t.partition_key = d.partition_key and t.execution_id = d.execution_id returning 1)""",
}

# $3 execution_ms, $4 event_ms, $5 renewal_ms.
PROBE, CANDIDATES = due_statements(
    "retention",
    """
    select q.execution_id as entity_id, q.terminal_at_ms + $3::bigint as due_at_ms from ff_exec_core q
    where q.partition_key = p.partition_key and [[kept by default]] and [[not quarantined retention q.execution_id]]
    order by q.terminal_at_ms
    """,
    """
    select q.execution_id as entity_id, [[until]] as due_at_ms from ff_exec_core q
    where q.partition_key = p.partition_key and [[kept by policy]] and [[not quarantined retention q.execution_id]]
    order by [[until]]
    """,
    """
    select q.flow_id as entity_id, q.terminal_at_ms + $3::bigint as due_at_ms from ff_flow_core q
    where q.partition_key = p.partition_key and q.terminal_at_ms is not null
      and (q.terminal_at_ms + $3::bigint > ff_now_ms() or not [[a member is kept $3]])
      and [[not quarantined retention q.flow_id]]
    order by q.terminal_at_ms
    """,
    """
    select null::uuid as entity_id, q.expires_at_ms as due_at_ms from ff_exec_dedup q
    where q.partition_key = p.partition_key order by q.expires_at_ms
    """,
    """
    select null::uuid as entity_id, q.expires_at_ms as due_at_ms from ff_signal_dedup q
    where q.partition_key = p.partition_key order by q.expires_at_ms
    """,
    *TRIM_SOURCES,
    phrases=_PHRASES,
)

# $1 partition_key, $2 limit, $3 only these, $4 execution_ms. Judged on the newest version: it may have
# been replayed or become a member.
DELETE_ENDED: Final = Statement(
    "delete_ended",
    """
    with d as materialized (
      select q.partition_key, q.execution_id
      from (select z.partition_key, z.execution_id from ff_exec_core z
            where z.partition_key = $1 and [[kept by default]] and z.terminal_at_ms <= ff_now_ms() - $4::bigint
              and [[wanted retention z.execution_id]]
            order by z.terminal_at_ms) q
      cross join lateral (
        select 1 from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id and flow_id is null
          and coalesce(terminal_at_ms, 9e18::bigint) <= ff_now_ms() - $4::bigint
        for update skip locked) e
      limit $2),
    [[and all that is theirs]]
    select 'deleted', null::text, false from x
    """,
    Planning.CUSTOM,
    _PHRASES,
)
# $1 partition_key, $2 limit, $3 only these.
DELETE_ENDED_BY_POLICY: Final = Statement(
    "delete_ended_by_policy",
    """
    with d as materialized (
      select q.partition_key, q.execution_id
      from (select z.partition_key, z.execution_id from ff_exec_core z
            where z.partition_key = $1 and [[kept by policy]] and [[until]] <= ff_now_ms()
              and [[wanted retention z.execution_id]]
            order by [[until]]) q
      cross join lateral (
        select 1 from ff_exec_core
        where partition_key = q.partition_key and execution_id = q.execution_id and flow_id is null
          and coalesce([[until]], 9e18::bigint) <= ff_now_ms()
        for update skip locked) e
      limit $2),
    [[and all that is theirs]]
    select 'deleted', null::text, false from x
    """,
    Planning.CUSTOM,
    _PHRASES,
)
# $1 partition_key, $2 limit, $3 only these, $4 execution_ms. A replay takes the flow's row before it reopens the flow.
# Members and edges first, a batch at a time; the flow itself when a statement finds none of either.
DELETE_FLOWS: Final = Statement(
    "delete_flows",
    """
    with f as materialized (
      select q.partition_key, q.flow_id
      from (select z.partition_key, z.flow_id from ff_flow_core z
            where z.partition_key = $1 and z.terminal_at_ms is not null
              and z.terminal_at_ms <= ff_now_ms() - $4::bigint and [[wanted retention z.flow_id]]
            order by z.terminal_at_ms) q
      cross join lateral (
        select 1 from ff_flow_core
        where partition_key = q.partition_key and flow_id = q.flow_id
          and coalesce(terminal_at_ms, 9e18::bigint) <= ff_now_ms() - $4::bigint
        for update skip locked) l
      where not [[a member is kept $4]]
      limit $2),
    d as materialized (
      select m.partition_key, m.execution_id from f cross join lateral (
        select partition_key, execution_id from ff_exec_core
        where partition_key = f.partition_key and flow_id = f.flow_id and flow_id is not null
          and lifecycle_phase in ('terminal', 'cancelled') limit $2) m
      limit $2),
    [[and all that is theirs]],
    r as materialized (
      select e.partition_key, e.flow_id, e.edge_id from f cross join lateral (
        select partition_key, flow_id, edge_id from ff_edge
        where partition_key = f.partition_key and flow_id = f.flow_id limit $2) e
      limit $2),
    e as (delete from ff_edge t using r
      where t.partition_key = r.partition_key and t.flow_id = r.flow_id and t.edge_id = r.edge_id returning 1),
    z as materialized (
      select f.partition_key, f.flow_id from f
      where not exists (select 1 from ff_exec_core m
                        where m.partition_key = f.partition_key and m.flow_id = f.flow_id and m.flow_id is not null)
        and not exists (select 1 from ff_edge m where m.partition_key = f.partition_key and m.flow_id = f.flow_id)),
    z1 as (delete from ff_edge_group t using z where t.partition_key = z.partition_key and t.flow_id = z.flow_id),
    z2 as (delete from ff_pending_cancel_groups t using z
      where t.partition_key = z.partition_key and t.flow_id = z.flow_id),
    z3 as (delete from ff_cancel_backlog_member t using z
      where t.partition_key = z.partition_key and t.flow_id = z.flow_id),
    z4 as (delete from ff_cancel_backlog t using z where t.partition_key = z.partition_key and t.flow_id = z.flow_id),
    z5 as (delete from ff_cascade_owed t using z where t.partition_key = z.partition_key and t.flow_id = z.flow_id),
    z6 as (delete from ff_flow_core t using z
      where t.partition_key = z.partition_key and t.flow_id = z.flow_id returning 1)
    select 'deleted', null::text, false from (
      select 1 from x union all select 1 from e union all select 1 from z6) gone
    """,
    Planning.CUSTOM,
    _PHRASES,
)
# $1 partition_key, $2 limit. A key that is being used again at this moment is left to whoever uses it.
DELETE_EXEC_DEDUP: Final = Statement(
    "delete_exec_dedup",
    """
    with d as materialized (
      select partition_key, namespace, idempotency_key from ff_exec_dedup
      where partition_key = $1 and expires_at_ms <= ff_now_ms() order by expires_at_ms limit $2 for update skip locked)
    delete from ff_exec_dedup t using d
    where t.partition_key = d.partition_key and t.namespace = d.namespace and t.idempotency_key = d.idempotency_key
    returning 'deleted', null::text, false
    """,
    Planning.CUSTOM,
)
DELETE_SIGNAL_DEDUP: Final = Statement(
    "delete_signal_dedup",
    """
    with d as materialized (
      select partition_key, waitpoint_id, idempotency_key from ff_signal_dedup
      where partition_key = $1 and expires_at_ms <= ff_now_ms() order by expires_at_ms limit $2 for update skip locked)
    delete from ff_signal_dedup t using d
    where t.partition_key = d.partition_key and t.waitpoint_id = d.waitpoint_id
      and t.idempotency_key = d.idempotency_key
    returning 'deleted', null::text, false
    """,
    Planning.CUSTOM,
)


def arguments(runtime: Runtime) -> tuple[int, int, int]:
    """What the probe is told besides the partitions."""
    return (runtime.retention.execution_ms, runtime.retention.event_ms, runtime.retention.renewal_ms)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Delete a batch of what has been kept long enough."""
    fetch, keep_ms = runtime.db.fetch, runtime.retention.execution_ms
    report = Report()
    report.add(await fetch(DELETE_ENDED, partition_key, limit, only, keep_ms))
    report.add(await fetch(DELETE_ENDED_BY_POLICY, partition_key, limit, only))
    report.add(await fetch(DELETE_FLOWS, partition_key, limit, only, keep_ms))
    if only is None:
        report.add(await fetch(DELETE_EXEC_DEDUP, partition_key, limit))
        report.add(await fetch(DELETE_SIGNAL_DEDUP, partition_key, limit))
        await fetch(FORGET_QUARANTINE, partition_key)
        if partition_key == CHORES_PARTITION:
            report.add(await trim(runtime, limit))
    return report
