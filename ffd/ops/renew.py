"""Keeping a lease: renewals and progress touch the attempt row alone, so they never wait for an execution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ffd.core.checks import check_int, check_text
from ffd.core.errors import EngineError, Validation, ValidationKind
from ffd.core.events import LEASE_RINGS
from ffd.core.handles import Handle, Lease, read_lease
from ffd.core.limits import MESSAGE_BYTES_MAX
from ffd.core.records import LeaseRenewal
from ffd.db.statement import Planning, Statement
from ffd.ops.batches import Batch
from ffd.ops.fence import CLASSIFY, CLASSIFY_MANY, inconclusive, refusal
from ffd.ops.runtime import Runtime

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 lease_epoch, $5 lease_ttl_ms. coalesce keeps the planner
# from looking the row up by its expiry; greatest keeps a renewal from shortening a lease.
RENEW: Final = Statement(
    "renew",
    """
    update ff_attempt t
    set lease_expires_at_ms = greatest(t.lease_expires_at_ms, ff_now_ms() + $5)
    where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
      and coalesce(t.lease_expires_at_ms, 0) > ff_now_ms()
    returning t.lease_expires_at_ms
    """,
)

# The same with its event. The execution is only read: namespace and tags never change.
RENEW_WITH_EVENT: Final = Statement(
    "renew_with_event",
    """
    with a as (
      update ff_attempt t
      set lease_expires_at_ms = greatest(t.lease_expires_at_ms, ff_now_ms() + $5)
      where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
        and coalesce(t.lease_expires_at_ms, 0) > ff_now_ms()
      returning t.lease_expires_at_ms, t.worker_id, t.worker_instance_id),
    v as ([[into lease_event]]
      select $1, $2::text, 'renewed', null, ff_now_ms(), $3, $4, a.worker_id, a.worker_instance_id, [[origin e]]
      from a cross join lateral (
        select raw_fields from ff_exec_core where partition_key = $1 and execution_id = $2) e)
    select lease_expires_at_ms from a
    """,
)

# Arrays sorted by key; locked in that order before any row is written.
RENEW_MANY: Final = Statement(
    "renew_many",
    """
    with k as materialized (
      select * from unnest($1::smallint[], $2::uuid[], $3::int[], $4::bigint[], $5::bigint[])
        with ordinality k(p, e, a, epoch, ttl, i)),
    l as materialized (
      select k.p, k.e, k.a, k.ttl, k.epoch, k.i from k cross join lateral (
        select 1 from ff_attempt t
        where t.partition_key = k.p and t.execution_id = k.e and t.attempt_index = k.a and t.lease_epoch = k.epoch
          and coalesce(t.lease_expires_at_ms, 0) > ff_now_ms()
        for no key update) t),
    a as (
      update ff_attempt t
      set lease_expires_at_ms = greatest(t.lease_expires_at_ms, ff_now_ms() + l.ttl)
      from l where t.partition_key = l.p and t.execution_id = l.e and t.attempt_index = l.a
      returning l.i, l.p, l.e, l.a, l.epoch, t.lease_expires_at_ms, t.worker_id, t.worker_instance_id),
    v as ([[into lease_event]]
      select a.p, a.e::text, 'renewed', null, ff_now_ms(), a.a, a.epoch, a.worker_id, a.worker_instance_id,
             [[origin x]]
      from a cross join lateral (
        select raw_fields from ff_exec_core where partition_key = a.p and execution_id = a.e) x
      where $6::boolean)
    select i, lease_expires_at_ms from a
    """,
    Planning.CUSTOM,
)

PROGRESS: Final = Statement(
    "progress",
    """
    update ff_attempt t
    set progress_percent = coalesce($5, t.progress_percent), progress_message = coalesce($6, t.progress_message)
    where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
      and coalesce(t.lease_expires_at_ms, 0) > ff_now_ms()
    returning 1
    """,
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


def require_handle(handle: object) -> Handle:
    """Refuse what is not a handle before it is taken apart."""
    if not isinstance(handle, Handle):
        raise Validation(ValidationKind.CORRUPTION, "expected a Handle", "handle")
    return handle
