"""The good ending: result, state, completion event and lease event in one statement (I2, I3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ffd.core.checks import check_bytes
from ffd.core.errors import EngineError, Validation, ValidationKind
from ffd.core.events import ENDED_RINGS
from ffd.core.handles import Handle, Lease, read_lease
from ffd.core.limits import BATCH_MAX, BULK_BYTES_MAX, RESULT_BYTES_MAX
from ffd.db.database import Row
from ffd.db.pool import Connection
from ffd.db.statement import Planning, Statement
from ffd.ops.batches import Batch
from ffd.ops.cascade import Moved, cascade
from ffd.ops.fence import CLASSIFY, CLASSIFY_MANY, inconclusive, is_own_ending, refusal
from ffd.ops.flow_lock import FlowKey, is_sealed, lock_flow
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    # The execution is locked; then the clock is read, because the lock may have taken its time; the attempt's own
    # update carries the fence; the execution's update is fed by it.
    "end attempt": """
      l as materialized (select ff_now_ms() as now from k),
      a as (
        update ff_attempt t
        set outcome = 'success', terminal_at_ms = l.now, lease_expires_at_ms = null, timeout_at_ms = null
        from l
        where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
          and coalesce(t.lease_expires_at_ms, 0) > l.now
        returning l.now, t.lease_epoch, t.worker_id, t.worker_instance_id),
      x as (
        update ff_exec_core e
        set [[completed]], terminal_at_ms = a.now, state_since_ms = a.now, result = $5,
            lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
        from a where e.partition_key = $1 and e.execution_id = $2
        returning e.partition_key, e.execution_id, e.flow_id, e.attempt_index, e.raw_fields,
                  a.now, a.lease_epoch, a.worker_id, a.worker_instance_id)""",
    "write events": """
      c as ([[into completion_event]]
        select x.partition_key, x.execution_id, x.flow_id, 'success', x.now, x.now, [[origin x]] from x),
      v as ([[into lease_event]]
        select x.partition_key, x.execution_id::text, 'revoked', 'completed', x.now, x.attempt_index, x.lease_epoch,
               x.worker_id, x.worker_instance_id, [[origin x]]
        from x)""",
}

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 lease_epoch, $5 result
COMPLETE: Final = Statement(
    "complete",
    """
    with k as materialized (
      select 1 from ff_exec_core
      where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active'
        and flow_id is null
      for no key update),
    [[end attempt]], [[write events]]
    select 1 from x
    """,
    phrases=_PHRASES,
)

# Arrays sorted by key: rows are locked in that order. A position that is missing from the result was refused.
_MANY: Final = {
    "given": """
      k as materialized (
        select * from unnest($1::smallint[], $2::uuid[], $3::int[], $4::bigint[], $5::bytea[])
          with ordinality k(p, e, a, epoch, result, i))""",
    "end attempts": """
    l as materialized (select h.p, h.e, h.a, h.epoch, h.result, h.i, ff_now_ms() as now from h),
    a as (
      update ff_attempt t
      set outcome = 'success', terminal_at_ms = l.now, lease_expires_at_ms = null, timeout_at_ms = null
      from l
      where t.partition_key = l.p and t.execution_id = l.e and t.attempt_index = l.a and t.lease_epoch = l.epoch
        and coalesce(t.lease_expires_at_ms, 0) > l.now
      returning l.i, l.p, l.e, l.result, l.now, t.lease_epoch, t.worker_id, t.worker_instance_id),
    x as (
      update ff_exec_core e
      set [[completed]], terminal_at_ms = a.now, state_since_ms = a.now, result = a.result,
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = a.p and e.execution_id = a.e
      returning e.partition_key, e.execution_id, e.flow_id, e.attempt_index, e.raw_fields,
                a.i, a.now, a.lease_epoch, a.worker_id, a.worker_instance_id)""",
    **_PHRASES,
}

COMPLETE_MANY: Final = Statement(
    "complete_many",
    """
    with [[given]],
    h as materialized (
      select k.p, k.e, k.a, k.epoch, k.result, k.i from k cross join lateral (
        select 1 from ff_exec_core x
        where x.partition_key = k.p and x.execution_id = k.e and x.attempt_index = k.a
          and x.lifecycle_phase = 'active' and x.flow_id is null
        for no key update) x),
    [[end attempts]],
    [[write events]]
    select i from x
    """,
    Planning.CUSTOM,
    phrases=_MANY,
)

# The same for members of the flow $6, whose row the transaction holds.
COMPLETE_MEMBERS: Final = Statement(
    "complete_members",
    """
    with [[given]],
    h as materialized (
      select k.p, k.e, k.a, k.epoch, k.result, k.i from k cross join lateral (
        select 1 from ff_exec_core x
        where x.partition_key = k.p and x.execution_id = k.e and x.attempt_index = k.a
          and x.lifecycle_phase = 'active' and x.flow_id = $6
        for no key update) x),
    [[end attempts]],
    [[write events]]
    select i, execution_id from x
    """,
    Planning.CUSTOM,
    phrases=_MANY,
)


def _check_result(result: object) -> bytes | None:
    return None if result is None else check_bytes(result, "result", RESULT_BYTES_MAX)


async def complete(runtime: Runtime, handle: Handle, result: bytes | None) -> None:
    """End the execution with success. A repeat by the same owner returns too; the first result stays."""
    lease = read_lease(handle)
    result = _check_result(result)
    if await runtime.db.fetchrow(COMPLETE, *lease.fence, result) is None:
        row = await runtime.db.fetchrow(CLASSIFY, *lease.fence[:3])
        flow = _member_of(row, lease)
        if flow is not None:
            (error,) = await _complete_members(runtime, flow, [lease], [result])
            if error is not None:
                raise error
    runtime.ring(ENDED_RINGS)


def _member_of(row: Row | None, lease: Lease) -> FlowKey | None:
    """What the first statement left over: a repeat (None), a member of a flow, or a refusal, which is raised."""
    if is_own_ending(row, lease, "success"):
        return None
    error = refusal(row, lease)
    if error is not None:
        raise error
    if row is None or row["flow_id"] is None:
        raise inconclusive("complete", lease)
    return FlowKey(lease.partition_key, row["flow_id"])


async def _complete_members(
    runtime: Runtime, flow: FlowKey, leases: Sequence[Lease], results: Sequence[bytes | None]
) -> list[EngineError | None]:
    """Complete members of one flow, given in lock order, and carry their endings through it."""
    columns = [list(column) for column in zip(*(lease.fence for lease in leases), strict=True)]

    async def body(connection: Connection) -> tuple[set[int], Moved]:
        moved = Moved()
        row = await lock_flow(connection, flow)
        rows = await connection.fetch(COMPLETE_MEMBERS.sql, *columns, results, flow.flow_id)
        if rows:
            await cascade(connection, flow, [one["execution_id"] for one in rows], moved, sealed=is_sealed(row))
        return {one["i"] for one in rows}, moved

    done, moved = await runtime.db.transact("complete", body, Planning.CUSTOM)
    moved.announce(runtime)
    answers: list[EngineError | None] = []
    for i, lease in enumerate(leases, 1):
        error = None
        if i not in done:
            row = await runtime.db.fetchrow(CLASSIFY, *lease.fence[:3])
            if not is_own_ending(row, lease, "success"):
                error = refusal(row, lease) or inconclusive("complete", lease)
        answers.append(error)
    return answers


async def complete_many(runtime: Runtime, items: Sequence[tuple[Handle, bytes | None]]) -> list[EngineError | None]:
    """Complete many executions in one statement; one answer per item, None for success, in the order given."""
    if not isinstance(items, Sequence) or len(items) > BATCH_MAX:
        raise Validation(
            ValidationKind.INVALID_INPUT, f"expected a list of at most {BATCH_MAX} (handle, result) pairs", "items"
        )
    try:
        pairs = [(handle, result) for handle, result in items]
    except (TypeError, ValueError):
        raise Validation(ValidationKind.INVALID_INPUT, "expected (handle, result) pairs", "items") from None
    results = [_check_result(result) for _, result in pairs]
    if sum(len(result or b"") for result in results) > BULK_BYTES_MAX:
        raise Validation(
            ValidationKind.PAYLOAD_TOO_LARGE, f"more than {BULK_BYTES_MAX} bytes of results in one call", "items"
        )
    batch = Batch.of([handle for handle, _ in pairs], "items")
    if batch.leases:
        chosen = batch.first_given(results)
        rows = await runtime.db.fetch(COMPLETE_MANY, *batch.fences(), chosen)
        for (i,) in rows:
            batch.answer(i, None)
        members: dict[FlowKey, list[int]] = {}
        for i, lease, row in await batch.unanswered(runtime, CLASSIFY_MANY):
            try:
                flow = _member_of(row, lease)
            except EngineError as error:
                batch.answer(i, error)
            else:
                if flow is None:
                    batch.answer(i, None)
                else:
                    members.setdefault(flow, []).append(i)
        for flow, places in sorted(members.items()):
            await _answer_members(runtime, batch, flow, places, chosen)
        runtime.ring(ENDED_RINGS)
    return batch.answers()


async def _answer_members(
    runtime: Runtime, batch: Batch[None], flow: FlowKey, places: list[int], results: Sequence[bytes | None]
) -> None:
    """Complete the batch's members of one flow in a transaction of their own; its failure is theirs alone."""
    leases = [batch.leases[i - 1] for i in places]
    try:
        answers = await _complete_members(runtime, flow, leases, [results[i - 1] for i in places])
    except EngineError as error:
        answers = [error] * len(places)
    for i, answer in zip(places, answers, strict=True):
        batch.answer(i, answer)
