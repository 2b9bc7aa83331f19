"""Creating executions: one, idempotent by id and by key, in the caller's transaction if wished.

The clock that judges deadlines and delays is the database's (I7), so a deadline in the past is refused by the
statement, not before it. Bulk creation is in `create_many`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple
from uuid import UUID

import asyncpg

from ffd.core.checks import (
    check_bytes,
    check_capabilities,
    check_int,
    check_lane,
    check_tags,
    check_text,
    check_time_ms,
    clamp_priority,
)
from ffd.core.errors import Contention, ContentionKind, Validation, ValidationKind
from ffd.core.events import Channel, work_ring
from ffd.core.ids import (
    ExecutionKey,
    crc16,
    new_execution_key,
    parse_execution_id,
    parse_uuid,
    partition_of,
)
from ffd.core.limits import (
    IDEMPOTENCY_TTL_MS_MAX,
    KEY_BYTES_MAX,
    KIND_BYTES_MAX,
    PARTITIONS,
    PAYLOAD_BYTES_MAX,
)
from ffd.core.policy import encode_policy
from ffd.core.records import Created, NewExecution
from ffd.core.state import PublicState
from ffd.db.database import Row
from ffd.db.doorbell import RING
from ffd.db.errors import to_engine_error
from ffd.db.pool import check_connection
from ffd.db.statement import Planning, Statement
from ffd.ops.flow_lock import LOCK_FLOW, check_open, check_unsealed
from ffd.ops.raw_fields import encode_raw_fields
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    "now": """
      n as materialized (
        select n.now, case when $7::bigint > n.now then 'delayed_first' else 'waiting_first' end as first_row
        from (select ff_now_ms() as now) n)""",
    "insert": """
      insert into ff_exec_core (
        partition_key, execution_id, flow_id, lane_id, required_capabilities, priority, delay_until_ms,
        deadline_at_ms, payload, policy, raw_fields, created_at_ms, state_since_ms, [[columns]])
      select $1, $2, $3, $4, $5, $6, case n.first_row when 'delayed_first' then $7::bigint end,
             $8, $9, $10::text::jsonb, $11::text::jsonb, n.now, n.now,
             [[values by n.first_row: waiting_first, delayed_first]]""",
}

# $1 partition_key, $2 execution_id, $3 flow_id, $4 lane, $5 capabilities, $6 priority, $7 delay_until_ms,
# $8 deadline_at_ms, $9 payload, $10 policy, $11 raw_fields. No public_state in the answer: it existed already.
CREATE: Final = Statement(
    "create",
    """
    with [[now]],
    x as (
      [[insert]]
      from n where coalesce($8::bigint > n.now, true)
      on conflict (partition_key, execution_id) do nothing
      returning public_state)
    select n.now, $1::smallint as partition_key, $2::uuid as execution_id, x.public_state from n left join x on true
    """,
    phrases=_PHRASES,
)

# With an idempotency key: $12 partition of the key, $13 namespace, $14 key, $15 ttl_ms. The upsert always answers
# whose key it is, also when another transaction has just taken it. A deadline in the past takes no key but still
# finds who has it: the repeat of a create is a duplicate, however late it comes.
CREATE_KEYED: Final = Statement(
    "create_keyed",
    """
    with [[now]],
    d as (
      insert into ff_exec_dedup as d
        (partition_key, namespace, idempotency_key, exec_partition, execution_id, expires_at_ms)
      select $12, $13, $14, $1, $2, n.now + $15 from n where coalesce($8::bigint > n.now, true)
      on conflict (partition_key, namespace, idempotency_key) do update set
        exec_partition = case when d.expires_at_ms <= ff_now_ms() then excluded.exec_partition
                              else d.exec_partition end,
        execution_id = case when d.expires_at_ms <= ff_now_ms() then excluded.execution_id else d.execution_id end,
        expires_at_ms = case when d.expires_at_ms <= ff_now_ms() then excluded.expires_at_ms
                             else d.expires_at_ms end
      returning exec_partition, execution_id),
    x as (
      [[insert]]
      from n, d where d.exec_partition = $1 and d.execution_id = $2
      on conflict (partition_key, execution_id) do nothing
      returning public_state)
    select n.now, coalesce(d.exec_partition, o.exec_partition) as partition_key,
           coalesce(d.execution_id, o.execution_id) as execution_id, x.public_state
    from n left join d on true left join x on true
    left join lateral (
      select o.exec_partition, o.execution_id from ff_exec_dedup o
      where o.partition_key = $12 and o.namespace = $13 and o.idempotency_key = $14
        and o.expires_at_ms > n.now and d.execution_id is null) o on true
    """,
    phrases=_PHRASES,
)

EXISTING: Final = Statement(
    "existing",
    """
    select e.partition_key, e.execution_id, ff_public_state(e.lifecycle_phase, e.eligibility_state, e.public_state,
             (select t.outcome from ff_attempt t where t.partition_key = e.partition_key
              and t.execution_id = e.execution_id and t.attempt_index = e.attempt_index)) as public_state
    from unnest($1::smallint[], $2::uuid[]) k(p, e)
    cross join lateral (
      select partition_key, execution_id, attempt_index, lifecycle_phase, eligibility_state, public_state
      from ff_exec_core where partition_key = k.p and execution_id = k.e) e
    """,
    Planning.CUSTOM,
)

# A key whose execution is gone stands for nothing any more.
FORGET_KEY: Final = Statement(
    "forget_key",
    """
    delete from ff_exec_dedup
    where partition_key = $1 and namespace = $2 and idempotency_key = $3 and execution_id = $4
    """,
)

# $3 how many members joined
COUNT_MEMBERS: Final = Statement(
    "count_members",
    """
    update ff_flow_core
    set graph_revision = graph_revision + $3::int,
        raw_fields = jsonb_set(raw_fields, '{node_count}',
          to_jsonb(ff_policy_number(raw_fields, '{node_count}', 0)::bigint + $3::int))
    where partition_key = $1 and flow_id = $2
    """,
)


class Draft(NamedTuple):
    """A checked execution, ready to be written. The first eleven fields are the statement's parameters."""

    partition_key: int
    execution_id: UUID
    flow_id: UUID | None
    lane: str
    capabilities: list[str]
    priority: int
    delay_until_ms: int | None
    deadline_at_ms: int | None
    payload: bytes | None
    policy: str | None
    raw_fields: str
    key_partition: int
    idempotency_key: str | None
    idempotency_ttl_ms: int
    key: ExecutionKey


def draft(new: NewExecution, namespace: str) -> Draft:
    """Check every field of a new execution; nothing reaches the database before."""
    lane = check_lane(new.lane)
    payload = check_bytes(new.payload, "payload", PAYLOAD_BYTES_MAX)
    kind = check_text(new.kind, "kind", KIND_BYTES_MAX, may_be_empty=True)
    flow_id = None if new.flow_id is None else parse_uuid(new.flow_id, "flow_id")
    flow_partition = None if flow_id is None else partition_of(flow_id)
    if new.execution_id is None:
        key = new_execution_key(flow_partition)
    else:
        key = parse_execution_id(new.execution_id)
        if flow_partition is not None and key.partition_key != flow_partition:
            raise Validation(
                ValidationKind.INVALID_INPUT,
                f"a member of flow {flow_id} lies in its partition {flow_partition}",
                "execution_id",
            )
    for field, value in (("delay_until_ms", new.delay_until_ms), ("deadline_at_ms", new.deadline_at_ms)):
        if value is not None:
            check_time_ms(value, field)
    key_partition = 0
    if new.idempotency_key is not None:
        text = check_text(new.idempotency_key, "idempotency_key", KEY_BYTES_MAX)
        key_partition = crc16(f"{namespace}\0{text}".encode()) % PARTITIONS
    check_int(new.idempotency_ttl_ms, "idempotency_ttl_ms", 1, IDEMPOTENCY_TTL_MS_MAX)
    return Draft(
        key.partition_key,
        key.execution_id,
        flow_id,
        lane,
        check_capabilities(new.required_capabilities, "required_capabilities") if new.required_capabilities else [],
        clamp_priority(new.priority),
        new.delay_until_ms,
        new.deadline_at_ms,
        payload or None,
        encode_policy(new.policy),
        encode_raw_fields(namespace, kind, check_tags(new.tags)),
        key_partition,
        None if new.idempotency_key is None else str(new.idempotency_key),
        new.idempotency_ttl_ms,
        key,
    )


def past_deadline(field: str, deadline_at_ms: int | None, now: int) -> Validation:
    """The refusal of a deadline that has passed on the database clock."""
    return Validation(
        ValidationKind.INVALID_INPUT,
        f"{deadline_at_ms} has passed; expected a time after {now} on the database clock",
        field,
    )


class Session:
    """Where the statements of one create call run: the engine's pool, the caller's transaction, or one of ours.

    In a transaction of ours the server's errors pass as they are: `Database.transact` decides on trying again.
    """

    def __init__(self, runtime: Runtime, connection: asyncpg.Connection[Any] | None, *, is_ours: bool = False) -> None:
        if connection is not None:
            check_connection(connection)
        self._runtime = runtime
        self._connection = connection
        self._is_ours = is_ours

    async def fetch(self, statement: Statement, *args: Any) -> list[Row]:
        """Run one statement."""
        if self._connection is None:
            return await self._runtime.db.fetch(statement, *args)
        try:
            rows: list[Row] = await self._connection.fetch(statement.sql, *args)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            if self._is_ours:
                raise
            raise to_engine_error(error, statement.name) or error from error
        return rows

    async def fetchrow(self, statement: Statement, *args: Any) -> Row | None:
        """Run one statement; its first row."""
        rows = await self.fetch(statement, *args)
        return rows[0] if rows else None

    async def announce(self, lanes: set[str]) -> None:
        """Wake the lanes' workers: after the commit, or with the caller's."""
        if self._connection is None:
            self._runtime.ring(tuple(work_ring(lane) for lane in lanes))
        elif lanes:
            await self.fetch(RING, [Channel.WORK.value] * len(lanes), sorted(lanes))


async def create_execution(runtime: Runtime, new: NewExecution, connection: asyncpg.Connection[Any] | None) -> Created:
    """Create one execution, or find the one that its id or key stands for."""
    checked = draft(new, runtime.namespace)
    if checked.flow_id is None:
        created = await _insert(Session(runtime, connection), checked, runtime.namespace)
    else:
        created = await _create_member(runtime, checked, checked.flow_id, connection)
    if created.public_state == PublicState.WAITING and not created.is_duplicate:
        await Session(runtime, connection).announce({checked.lane})
    runtime.register_lanes({checked.lane})
    return created


async def _insert(session: Session, new: Draft, namespace: str) -> Created:
    """Write one execution, or answer for the one that was there before."""
    for _ in range(2):
        row = await _try_insert(session, new, namespace)
        if row["public_state"] is not None:
            return Created(str(new.key), PublicState(row["public_state"]), False)
        if row["execution_id"] is not None:
            owner = ExecutionKey(row["partition_key"], row["execution_id"])
            found = await existing(session, [owner])
            if owner in found:
                return found[owner]
            if new.idempotency_key is not None:
                await session.fetch(FORGET_KEY, new.key_partition, namespace, new.idempotency_key, owner.execution_id)
        if new.deadline_at_ms is not None and new.deadline_at_ms <= row["now"]:
            raise past_deadline("deadline_at_ms", new.deadline_at_ms, row["now"])
    raise Contention(ContentionKind.RETRY_EXHAUSTED, f"{new.key} is being created or removed; try again")


async def _try_insert(session: Session, new: Draft, namespace: str) -> Row:
    if new.idempotency_key is None:
        row = await session.fetchrow(CREATE, *new[:11])
    else:
        row = await session.fetchrow(CREATE_KEYED, *new[:12], namespace, new.idempotency_key, new.idempotency_ttl_ms)
    assert row is not None  # noqa: S101  (the statement selects from one constant row)
    return row


async def existing(session: Session, keys: Iterable[ExecutionKey]) -> dict[ExecutionKey, Created]:
    """The answers for executions that were there before; those that are gone are missing."""
    wanted = sorted(set(keys))
    rows = await session.fetch(EXISTING, [key[0] for key in wanted], [key[1] for key in wanted]) if wanted else []
    found = {ExecutionKey(p, e): PublicState(state) for p, e, state in rows}
    return {key: Created(str(key), state, True) for key, state in found.items()}


async def _create_member(
    runtime: Runtime, new: Draft, flow_id: UUID, connection: asyncpg.Connection[Any] | None
) -> Created:
    async def body(inner: asyncpg.Connection[Any]) -> Created:
        session = Session(runtime, inner, is_ours=connection is None)
        await lock_unsealed_flow(session, new.partition_key, flow_id)
        created = await _insert(session, new, runtime.namespace)
        if not created.is_duplicate:
            await session.fetch(COUNT_MEMBERS, new.partition_key, flow_id, 1)
        return created

    if connection is None:
        return await runtime.db.transact("create", body)
    check_connection(connection)
    return await body(connection)


async def lock_unsealed_flow(session: Session, partition_key: int, flow_id: UUID) -> None:
    """Take the flow row; refuse a flow that does not exist, has ended, or takes no new members."""
    check_unsealed(check_open(await session.fetchrow(LOCK_FLOW, partition_key, flow_id), flow_id), flow_id)
