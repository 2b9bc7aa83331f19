"""Creating many executions atomically: set-based, one statement for plain ones.

With idempotency keys or flows there are more statements, all in one transaction, and every set of locks is taken
in sorted order: flows, keys, executions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import asyncpg

from ffd.core.errors import Contention, ContentionKind, Validation, ValidationKind
from ffd.core.ids import ExecutionKey
from ffd.core.limits import BULK_BYTES_MAX, BULK_MAX
from ffd.core.records import Created, NewExecution
from ffd.core.state import PublicState
from ffd.db.pool import check_connection
from ffd.db.statement import Planning, Statement
from ffd.ops.create import (
    COUNT_MEMBERS,
    FORGET_KEY,
    Draft,
    Session,
    draft,
    existing,
    lock_unsealed_flow,
    past_deadline,
)
from ffd.ops.runtime import Runtime

# Arrays in key order. Capabilities travel as comma-joined text: PostgreSQL has no ragged arrays, and a token has
# no comma. One row answers for all; which ones were new is told only when some were not. Nothing is written
# when the deadline of any new one has passed.
CREATE_MANY: Final = Statement(
    "create_many",
    """
    with n as materialized (select ff_now_ms() as now),
    k as materialized (
      select k.*, case when k.delay_until_ms > n.now then 'delayed_first' else 'waiting_first' end as first_row, n.now
      from n, unnest($1::smallint[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::int[], $7::bigint[],
                     $8::bigint[], $9::bytea[], $10::text[], $11::text[])
        k(p, e, flow_id, lane, capabilities, priority, delay_until_ms, deadline_at_ms, payload, policy, raw_fields)),
    late as materialized (
      select exists (
        select 1 from k where k.deadline_at_ms <= k.now and not exists (
          select 1 from ff_exec_core o where o.partition_key = k.p and o.execution_id = k.e)) as is_late),
    x as (
      insert into ff_exec_core (
        partition_key, execution_id, flow_id, lane_id, required_capabilities, priority, delay_until_ms,
        deadline_at_ms, payload, policy, raw_fields, created_at_ms, state_since_ms, [[columns]])
      select k.p, k.e, k.flow_id, k.lane, string_to_array(k.capabilities, ','), k.priority,
             case k.first_row when 'delayed_first' then k.delay_until_ms end, k.deadline_at_ms, k.payload,
             k.policy::jsonb, k.raw_fields::jsonb, k.now, k.now,
             [[values by k.first_row: waiting_first, delayed_first]]
      from k where not (select is_late from late)
      on conflict (partition_key, execution_id) do nothing
      returning partition_key, execution_id)
    select n.now, late.is_late, m.written, m.partitions, m.ids from n, late, (
      select count(*) as written,
             case when count(*) < cardinality($1) then array_agg(x.partition_key) end as partitions,
             case when count(*) < cardinality($1) then array_agg(x.execution_id) end as ids from x) m
    """,
    Planning.CUSTOM,
)

# $1 partitions of the keys, $2 namespace, $3 keys, $4 and $5 the executions to stand for, $6 ttls. Sorted by key.
TAKE_KEYS: Final = Statement(
    "take_keys",
    """
    insert into ff_exec_dedup as d
      (partition_key, namespace, idempotency_key, exec_partition, execution_id, expires_at_ms)
    select k.p, $2, k.key, k.ep, k.e, ff_now_ms() + k.ttl
    from unnest($1::smallint[], $3::text[], $4::smallint[], $5::uuid[], $6::bigint[]) k(p, key, ep, e, ttl)
    on conflict (partition_key, namespace, idempotency_key) do update set
      exec_partition = case when d.expires_at_ms <= ff_now_ms() then excluded.exec_partition else d.exec_partition end,
      execution_id = case when d.expires_at_ms <= ff_now_ms() then excluded.execution_id else d.execution_id end,
      expires_at_ms = case when d.expires_at_ms <= ff_now_ms() then excluded.expires_at_ms else d.expires_at_ms end
    returning idempotency_key, exec_partition, execution_id
    """,
    Planning.CUSTOM,
)


def _drafts(executions: Sequence[NewExecution], namespace: str) -> list[Draft]:
    if isinstance(executions, str | bytes) or not isinstance(executions, Sequence):
        raise Validation(ValidationKind.INVALID_INPUT, "expected a list of NewExecution", "executions")
    if len(executions) > BULK_MAX:
        raise Validation(
            ValidationKind.INVALID_INPUT,
            f"{len(executions)} items, at most {BULK_MAX} are allowed",
            "executions",
        )
    drafts: list[Draft] = []
    payload_bytes = 0
    for at, new in enumerate(executions):
        if not isinstance(new, NewExecution):
            raise Validation(ValidationKind.INVALID_INPUT, "expected a NewExecution", f"executions[{at}]")
        try:
            drafts.append(draft(new, namespace))
            payload_bytes += len(drafts[-1].payload or b"")
        except Validation as error:
            raise Validation(error.kind, error.detail, f"executions[{at}].{error.field}") from None
    if payload_bytes > BULK_BYTES_MAX:
        raise Validation(
            ValidationKind.PAYLOAD_TOO_LARGE,
            f"{payload_bytes} bytes of payload in one call, at most {BULK_BYTES_MAX} are allowed",
            "executions",
        )
    return drafts


async def create_executions(
    runtime: Runtime, executions: Sequence[NewExecution], connection: asyncpg.Connection[Any] | None
) -> list[Created]:
    """Create all of them or none; one answer per item, in the order given."""
    if connection is not None:
        check_connection(connection)
    drafts = _drafts(executions, runtime.namespace)
    if not drafts:
        return []
    is_plain = all(new.idempotency_key is None and new.flow_id is None for new in drafts)

    async def body(inner: asyncpg.Connection[Any]) -> list[Created]:
        session = Session(runtime, inner, is_ours=connection is None)
        return await _create_all(session, drafts, runtime.namespace)

    if is_plain:
        created = await _create_all(Session(runtime, connection), drafts, runtime.namespace)
    elif connection is None:
        created = await runtime.db.transact("create_many", body, Planning.CUSTOM)
    else:
        # A refusal half-way must leave nothing behind in a transaction that the caller may still commit.
        async with connection.transaction():
            created = await body(connection)
    lanes = {
        new.lane
        for new, one in zip(drafts, created, strict=True)
        if one.public_state == PublicState.WAITING and not one.is_duplicate
    }
    await Session(runtime, connection).announce(lanes)
    runtime.register_lanes({new.lane for new in drafts})
    return created


def _lock_order(new: Draft) -> tuple[int, int]:
    return (new.partition_key, new.execution_id.int)


async def _create_all(session: Session, drafts: list[Draft], namespace: str) -> list[Created]:
    flows = sorted({(new.partition_key, new.flow_id) for new in drafts if new.flow_id is not None})
    for partition_key, flow_id in flows:
        await lock_unsealed_flow(session, partition_key, flow_id)
    owners = await _take_keys(session, [new for new in drafts if new.idempotency_key is not None], namespace)
    wanted: dict[ExecutionKey, Draft] = {}
    for new in drafts:
        if not owners or owners.get(new.idempotency_key, new.key) == new.key:
            wanted.setdefault(new.key, new)
    states = await _insert(session, drafts, sorted(wanted.values(), key=_lock_order))
    joined = Counter((new.partition_key, new.flow_id) for key, new in wanted.items() if new.flow_id and key in states)
    for (partition_key, joined_flow), count in joined.items():
        await session.fetch(COUNT_MEMBERS, partition_key, joined_flow, count)
    if not owners and len(states) == len(drafts):
        return [Created(str(new.key), states[new.key], False) for new in drafts]
    keys = [ExecutionKey(*owners.get(new.idempotency_key, new.key)) for new in drafts]
    before = await existing(session, (key for key in keys if key not in states))
    answers = []
    for new, key in zip(drafts, keys, strict=True):
        if key in states:
            # The first draft that names an execution made it; whoever else names it finds it.
            answers.append(Created(str(key), states[key], wanted.get(key) is not new))
        elif key in before:
            answers.append(before[key])
        else:
            raise Contention(ContentionKind.RETRY_EXHAUSTED, f"{key} is being removed; try again")
    return answers


async def _take_keys(session: Session, keyed: list[Draft], namespace: str) -> dict[str | None, tuple[int, UUID]]:
    """Which execution each idempotency key stands for, taking the free ones for ours."""
    first: dict[str, Draft] = {}
    for new in keyed:
        first.setdefault(str(new.idempotency_key), new)
    if not first:
        return {}
    for _ in range(2):
        ordered = sorted(first.values(), key=lambda new: (new.key_partition, str(new.idempotency_key)))
        rows = await session.fetch(
            TAKE_KEYS,
            [new.key_partition for new in ordered],
            namespace,
            [new.idempotency_key for new in ordered],
            [new.partition_key for new in ordered],
            [new.execution_id for new in ordered],
            [new.idempotency_ttl_ms for new in ordered],
        )
        owners: dict[str | None, tuple[int, UUID]] = {key: (p, e) for key, p, e in rows}
        others = {key: ExecutionKey(*owner) for key, owner in owners.items() if owner != first[str(key)].key}
        found = await existing(session, others.values())
        gone = {key: owner for key, owner in others.items() if owner not in found}
        if not gone:
            break
        for key, (_, execution_id) in gone.items():
            await session.fetch(FORGET_KEY, first[str(key)].key_partition, namespace, key, execution_id)
    return owners


async def _insert(session: Session, given: list[Draft], ordered: list[Draft]) -> dict[ExecutionKey, PublicState]:
    """Write the rows; the state of each that was new."""
    if not ordered:
        return {}
    columns: list[Any] = [list(column) for column in zip(*(new[:11] for new in ordered), strict=True)]
    columns[4] = [",".join(tokens) for tokens in columns[4]]
    row = await session.fetchrow(CREATE_MANY, *columns)
    assert row is not None  # noqa: S101  (the statement selects from one constant row)
    now = row["now"]
    if row["is_late"]:
        late = [new for new in ordered if new.deadline_at_ms is not None and new.deadline_at_ms <= now]
        found = await existing(session, (new.key for new in late))
        first = next(new for new in given if new in late and new.key not in found)
        raise past_deadline(f"executions[{given.index(first)}].deadline_at_ms", first.deadline_at_ms, now)
    if row["written"] == len(ordered):
        return {new.key: _first_state(new, now) for new in ordered}
    written = set(zip(row["partitions"] or (), row["ids"] or (), strict=True))
    return {new.key: _first_state(new, now) for new in ordered if new[:2] in written}


def _first_state(new: Draft, now: int) -> PublicState:
    """What the statement has written for it."""
    is_delayed = new.delay_until_ms is not None and new.delay_until_ms > now
    return PublicState.DELAYED if is_delayed else PublicState.WAITING
