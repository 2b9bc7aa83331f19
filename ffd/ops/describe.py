"""Reading executions: one, its attempts, its result, and pages of many. Stored literals are normalised here."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from ffd.core.checks import check_int, check_lane, check_tag_key, check_text
from ffd.core.errors import NotFound, Validation, ValidationKind
from ffd.core.ids import ExecutionKey, attempt_id_text, parse_execution_id, parse_uuid, partition_of
from ffd.core.limits import PAGE_MAX, TAG_VALUE_BYTES_MAX
from ffd.core.records import AttemptSnapshot, ExecutionSnapshot, Page
from ffd.core.state import PublicState, read_public_state
from ffd.db.database import Row
from ffd.db.statement import Planning, Statement
from ffd.ops.raw_fields import read_raw_fields
from ffd.ops.runtime import Runtime

SNAPSHOT_PHRASES: Final = {
    "snapshot columns": """
      e.partition_key, e.execution_id, e.flow_id, e.lane_id, e.lifecycle_phase, e.eligibility_state, e.public_state,
      e.attempt_index, e.lease_epoch, e.priority, e.required_capabilities, e.created_at_ms, e.started_at_ms,
      e.terminal_at_ms, e.delay_until_ms, e.deadline_at_ms, e.retry_count, e.lease_reclaim_count, e.replay_count,
      e.failure_message, e.cancellation_reason, e.raw_fields, octet_length(e.result) as result_size,
      t.lease_epoch as attempt_epoch, t.worker_id, t.worker_instance_id, t.lease_expires_at_ms, t.outcome,
      t.progress_percent, t.progress_message""",
    "current attempt": """
      left join lateral (
        select lease_epoch, worker_id, worker_instance_id, lease_expires_at_ms, outcome, progress_percent,
               progress_message
        from ff_attempt
        where partition_key = e.partition_key and execution_id = e.execution_id
          and attempt_index = e.attempt_index) t on true""",
}

DESCRIBE: Final = Statement(
    "describe",
    """
    select [[snapshot columns]] from ff_exec_core e [[current attempt]]
    where e.partition_key = $1 and e.execution_id = $2
    """,
    phrases=SNAPSHOT_PHRASES,
)

ATTEMPTS: Final = Statement(
    "attempts",
    """
    select attempt_index, lease_epoch, worker_id, worker_instance_id, lease_expires_at_ms, timeout_at_ms,
           started_at_ms, terminal_at_ms, outcome, failure_category, failure_message, progress_percent,
           progress_message
    from ff_attempt where partition_key = $1 and execution_id = $2 order by attempt_index
    """,
    Planning.READ,
)

RESULT: Final = Statement(
    "result",
    "select result from ff_exec_core where partition_key = $1 and execution_id = $2 and lifecycle_phase = 'terminal'",
)

EXISTS: Final = Statement(
    "exists",
    "select 1 from ff_exec_core where partition_key = $1 and execution_id = $2",
)

# Newest ids first. The index is keyed by state, so every state asked for is walked from the cursor and the heads
# are merged: $1 states, $2 cursor, $3 limit, $4 lane, $5 namespace, $6 tag key, $7 tag value.
LIST: Final = Statement(
    "list",
    """
    with p as materialized (
      select x.partition_key, x.execution_id from unnest($1::text[]) s(state) cross join lateral (
        select partition_key, execution_id from ff_exec_core
        where public_state = s.state and ($2::uuid is null or execution_id < $2)
          and ($4::text is null or lane_id = $4)
          and ($5::text is null or raw_fields ->> 'namespace' = $5)
          and ($6::text is null or raw_fields #>> array['tags', $6] = $7)
        order by execution_id desc limit $3) x
      order by x.execution_id desc limit $3)
    select [[snapshot columns]]
    from p join ff_exec_core e on e.partition_key = p.partition_key and e.execution_id = p.execution_id
    [[current attempt]]
    order by e.execution_id desc
    """,
    Planning.CUSTOM,
    phrases=SNAPSHOT_PHRASES,
)

# The members of one flow: $8 partition_key, $9 flow_id.
LIST_FLOW: Final = Statement(
    "list_flow",
    """
    with p as materialized (
      select partition_key, execution_id from ff_exec_core
      where partition_key = $8 and flow_id = $9 and ($2::uuid is null or execution_id < $2)
        and public_state = any($1::text[])
        and ($4::text is null or lane_id = $4)
        and ($5::text is null or raw_fields ->> 'namespace' = $5)
        and ($6::text is null or raw_fields #>> array['tags', $6] = $7)
      order by execution_id desc limit $3)
    select [[snapshot columns]]
    from p join ff_exec_core e on e.partition_key = p.partition_key and e.execution_id = p.execution_id
    [[current attempt]]
    order by e.execution_id desc
    """,
    Planning.CUSTOM,
    phrases=SNAPSHOT_PHRASES,
)

# What is stored for a public state: FlowFabric says `active` where ffd says `running`.
_STORED: Final = {state: [state.value] for state in PublicState} | {PublicState.RUNNING: ["running", "active"]}
_ALL_STORED: Final = [literal for literals in _STORED.values() for literal in literals]


def read_snapshot(row: Row) -> ExecutionSnapshot:
    """The snapshot in a row with the snapshot columns."""
    fields = read_raw_fields(row["raw_fields"])
    state = read_public_state(row["lifecycle_phase"], row["eligibility_state"], row["public_state"], row["outcome"])
    is_running = state == PublicState.RUNNING
    return ExecutionSnapshot(
        execution_id=str(ExecutionKey(row["partition_key"], row["execution_id"])),
        flow_id=None if row["flow_id"] is None else str(row["flow_id"]),
        lane=row["lane_id"],
        kind=fields.execution_kind,
        namespace=fields.namespace,
        public_state=state,
        attempt_index=row["attempt_index"],
        lease_epoch=max(row["lease_epoch"], row["attempt_epoch"] or 0),
        worker_id=row["worker_id"] if is_running else None,
        worker_instance_id=row["worker_instance_id"] if is_running else None,
        lease_expires_at_ms=row["lease_expires_at_ms"] if is_running else None,
        priority=row["priority"],
        tags=fields.tags,
        required_capabilities=row["required_capabilities"],
        created_at_ms=row["created_at_ms"],
        started_at_ms=row["started_at_ms"],
        terminal_at_ms=row["terminal_at_ms"],
        delay_until_ms=row["delay_until_ms"],
        deadline_at_ms=row["deadline_at_ms"],
        retry_count=row["retry_count"],
        reclaim_count=row["lease_reclaim_count"],
        replay_count=row["replay_count"],
        progress_percent=row["progress_percent"],
        progress_message=row["progress_message"],
        failure_message=row["failure_message"],
        cancellation_reason=row["cancellation_reason"],
        result_size=row["result_size"],
    )


async def describe_execution(runtime: Runtime, execution_id: str) -> ExecutionSnapshot | None:
    """The execution now; None when there is none."""
    row = await runtime.db.fetchrow(DESCRIBE, *parse_execution_id(execution_id))
    return None if row is None else read_snapshot(row)


async def list_attempts(runtime: Runtime, execution_id: str) -> list[AttemptSnapshot]:
    """Every attempt, the first one first."""
    key = parse_execution_id(execution_id)
    rows = await runtime.db.fetch(ATTEMPTS, *key)
    if not rows and await runtime.db.fetchrow(EXISTS, *key) is None:
        raise NotFound("execution", str(key))
    return [AttemptSnapshot(attempt_id=attempt_id_text(key.execution_id, row["attempt_index"]), **row) for row in rows]


async def get_execution_result(runtime: Runtime, execution_id: str) -> bytes | None:
    """The bytes the execution was completed with; None before that, and without a result."""
    row = await runtime.db.fetchrow(RESULT, *parse_execution_id(execution_id))
    return None if row is None else row["result"]


def _check_states(public_state: object) -> list[str]:
    if public_state is None:
        return _ALL_STORED
    try:
        return _STORED[PublicState(str(public_state))]
    except ValueError:
        raise Validation(
            ValidationKind.INVALID_INPUT, f"expected one of {', '.join(PublicState)}", "public_state"
        ) from None


def _check_tag(tag: object) -> tuple[str | None, str | None]:
    if tag is None:
        return None, None
    if isinstance(tag, str) and "=" in tag:
        tag = tag.split("=", 1)
    if not isinstance(tag, tuple | list) or len(tag) != 2:
        raise Validation(ValidationKind.INVALID_INPUT, 'expected "key=value" or a pair (key, value)', "tag")
    return check_tag_key(tag[0], "tag"), check_text(tag[1], "tag", TAG_VALUE_BYTES_MAX, may_be_empty=True)


async def list_executions(
    runtime: Runtime,
    *,
    lane: str | None,
    public_state: PublicState | str | None,
    flow_id: str | None,
    namespace: str | None,
    tag: str | tuple[str, str] | None,
    after: str | None,
    limit: int,
) -> Page[ExecutionSnapshot]:
    """A page of executions, newest ids first."""
    check_int(limit, "limit", 0, PAGE_MAX)
    states = _check_states(public_state)
    cursor: UUID | None = None if after is None else parse_execution_id(after, "after").execution_id
    if lane is not None:
        check_lane(lane)
    if namespace is not None:
        check_text(namespace, "namespace")
    filters = (lane, namespace, *_check_tag(tag))
    if limit == 0:
        return Page([], None)
    if flow_id is None:
        rows = await runtime.db.fetch(LIST, states, cursor, limit + 1, *filters)
    else:
        flow = parse_uuid(flow_id, "flow_id")
        rows = await runtime.db.fetch(LIST_FLOW, states, cursor, limit + 1, *filters, partition_of(flow), flow)
    items = [read_snapshot(row) for row in rows[:limit]]
    return Page(items, items[-1].execution_id if len(rows) > limit else None)
