"""Keeping a lease: renewals and progress touch the attempt row alone, so they never wait for an execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ffd.core.checks import check_int, check_text
from ffd.core.errors import EngineError
from ffd.core.events import LEASE_RINGS
from ffd.core.handles import Handle, Lease, read_lease
from ffd.core.limits import MESSAGE_BYTES_MAX
from ffd.core.records import LeaseRenewal
from ffd.db.statement import Planning, Statement
from ffd.ops.batches import Batch
from ffd.ops.fence import CLASSIFY, CLASSIFY_MANY, inconclusive, refusal
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    # The attempt is locked, then the clock is read: waiting must not revive a lease that ran out meanwhile. The
    # execution is only looked at, never locked: an ending that FlowFabric wrote without touching the lease ends
    # renewals too, and a look that is a moment old does no harm, because the epoch fences.
    "still owned": """
      k as materialized (
        select 1 from ff_attempt
        where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lease_epoch = $4
        for no key update),
      l as materialized (
        select ff_now_ms() as now, e.raw_fields from k cross join lateral (
          select raw_fields from ff_exec_core
          where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active') e)""",
    # coalesce keeps the planner from looking the row up by its expiry.
    "fence": """
      t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
        and coalesce(t.lease_expires_at_ms, 0) > l.now""",
}

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 lease_epoch, $5 lease_ttl_ms. A renewal never shortens.
RENEW: Final = Statement(
    "renew",
    """
    with [[still owned]]
    update ff_attempt t
    set lease_expires_at_ms = greatest(t.lease_expires_at_ms, l.now + $5)
    from l where [[fence]]
    returning t.lease_expires_at_ms
    """,
    phrases=_PHRASES,
)

RENEW_WITH_EVENT: Final = Statement(
    "renew_with_event",
    """
    with [[still owned]],
    a as (
      update ff_attempt t
      set lease_expires_at_ms = greatest(t.lease_expires_at_ms, l.now + $5)
      from l where [[fence]]
      returning t.lease_expires_at_ms, t.worker_id, t.worker_instance_id, l.now, l.raw_fields),
    v as ([[into lease_event]]
      select $1, $2::text, 'renewed', null, a.now, $3, $4, a.worker_id, a.worker_instance_id, [[origin a]]
      from a)
    select lease_expires_at_ms from a
    """,
    phrases=_PHRASES,
)

# Arrays sorted by key; locked in that order before any row is written.
RENEW_MANY: Final = Statement(
    "renew_many",
    """
    with k as materialized (
      select * from unnest($1::smallint[], $2::uuid[], $3::int[], $4::bigint[], $5::bigint[])
        with ordinality k(p, e, a, epoch, ttl, i)),
    h as materialized (
      select k.p, k.e, k.a, k.ttl, k.epoch, k.i from k cross join lateral (
        select 1 from ff_attempt t
        where t.partition_key = k.p and t.execution_id = k.e and t.attempt_index = k.a and t.lease_epoch = k.epoch
        for no key update) t),
    l as materialized (
      select h.p, h.e, h.a, h.ttl, h.epoch, h.i, x.raw_fields, ff_now_ms() as now from h cross join lateral (
        select raw_fields from ff_exec_core x
        where x.partition_key = h.p and x.execution_id = h.e and x.attempt_index = h.a
          and x.lifecycle_phase = 'active') x),
    a as (
      update ff_attempt t
      set lease_expires_at_ms = greatest(t.lease_expires_at_ms, l.now + l.ttl)
      from l
      where t.partition_key = l.p and t.execution_id = l.e and t.attempt_index = l.a and t.lease_epoch = l.epoch
        and coalesce(t.lease_expires_at_ms, 0) > l.now
      returning l.i, l.p, l.e, l.a, l.epoch, l.now, l.raw_fields, t.lease_expires_at_ms, t.worker_id,
                t.worker_instance_id),
    v as ([[into lease_event]]
      select a.p, a.e::text, 'renewed', null, a.now, a.a, a.epoch, a.worker_id, a.worker_instance_id, [[origin a]]
      from a where $6::boolean)
    select i, lease_expires_at_ms from a
    """,
    Planning.CUSTOM,
)

PROGRESS: Final = Statement(
    "progress",
    """
    with [[still owned]]
    update ff_attempt t
    set progress_percent = coalesce($5, t.progress_percent), progress_message = coalesce($6, t.progress_message)
    from l where [[fence]]
    returning 1
    """,
    phrases=_PHRASES,
)


async def renew(runtime: Runtime, handle: Handle) -> LeaseRenewal:
    """Extend a live lease by the ttl it was claimed with."""
    lease = read_lease(handle)
    has_event = runtime.outbox.lease_renewed
    row = await runtime.db.fetchrow(
        RENEW_WITH_EVENT if has_event else RENEW,
        lease.partition_key,
        lease.execution_id,
        lease.attempt_index,
        lease.lease_epoch,
        lease.lease_ttl_ms,
    )
    if row is None:
        raise await _refused(runtime, "renew", lease)
    if has_event:
        runtime.ring(LEASE_RINGS)
    return LeaseRenewal(row[0], lease.lease_epoch)


async def renew_many(runtime: Runtime, handles: Sequence[Handle]) -> list[LeaseRenewal | EngineError]:
    """Renew many leases in one statement; one answer per handle, in the order given."""
    batch = Batch.of(handles, "handles")
    if batch.leases:
        ttls = [lease.lease_ttl_ms for lease in batch.leases]
        rows = await runtime.db.fetch(RENEW_MANY, *batch.fences(), ttls, runtime.outbox.lease_renewed)
        for i, expires_at_ms in rows:
            batch.answer(i, LeaseRenewal(expires_at_ms, batch.leases[i - 1].lease_epoch))
        if rows and runtime.outbox.lease_renewed:
            runtime.ring(LEASE_RINGS)
        for i, lease, row in await batch.unanswered(runtime, CLASSIFY_MANY):
            batch.answer(i, refusal(row, lease) or inconclusive("renew_many", lease))
    return batch.answers()


async def progress(runtime: Runtime, handle: Handle, *, percent: int | None, message: str | None) -> None:
    """Report how far the work is; what is None stays as it was. Both None only checks the handle."""
    lease = read_lease(handle)
    if percent is not None:
        check_int(percent, "percent", 0, 100)
    if message is not None:
        check_text(message, "message", MESSAGE_BYTES_MAX, may_be_empty=True)
    row = await runtime.db.fetchrow(
        PROGRESS,
        lease.partition_key,
        lease.execution_id,
        lease.attempt_index,
        lease.lease_epoch,
        percent,
        message,
    )
    if row is None:
        raise await _refused(runtime, "progress", lease)


async def _refused(runtime: Runtime, op: str, lease: Lease) -> EngineError:
    row = await runtime.db.fetchrow(CLASSIFY, lease.partition_key, lease.execution_id, lease.attempt_index)
    return refusal(row, lease) or inconclusive(op, lease)
