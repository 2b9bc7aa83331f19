"""Reading executions: one, its attempts, its result, and pages of many. Stored literals are normalised here."""

from __future__ import annotations

from typing import Final

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
      coalesce(e.failure_message, e.raw_fields ->> 'last_failure_message') as failure_message,
      e.cancellation_reason, e.raw_fields, octet_length(e.result) as result_size,
      t.lease_epoch as attempt_epoch, t.worker_id, t.worker_instance_id, t.lease_expires_at_ms, t.outcome,
      t.progress_percent, t.progress_message""",
    "filters": """
      ($5::text is null or e.lane_id = $5)
      and ($6::text is null or e.raw_fields ->> 'namespace' = $6)
      and ($7::text is null or e.raw_fields #>> array['tags', $7] = $8)
      and ($9::text is null or $9 = ff_public_state(
        e.lifecycle_phase, e.eligibility_state, e.public_state,
        case when e.lifecycle_phase = 'terminal' and e.public_state <> $9 then (
          select t.outcome from ff_attempt t where t.partition_key = e.partition_key
          and t.execution_id = e.execution_id and t.attempt_index = e.attempt_index) end))""",
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

# Newest ids first. The index is keyed by the stored state, so every one that may hold what is asked for is walked
# from the cursor and the heads are merged. FlowFabric leaves `running` behind in most of its paths, so the state is
# worked out for each row. $1 stored states, $2 and $3 cursor, $4 limit, $5 lane, $6 namespace, $7 tag key, $8 tag
# value, $9 public state.
LIST: Final = Statement(
    "list",
    """
    with p as materialized (
      select x.partition_key, x.execution_id from unnest($1::text[]) s(state) cross join lateral (
        select e.partition_key, e.execution_id from ff_exec_core e
        where e.public_state = s.state
          and ($2::uuid is null or (e.execution_id, e.partition_key) < ($2, $3::smallint)) and [[filters]]
        order by e.execution_id desc, e.partition_key desc limit $4) x
      order by x.execution_id desc, x.partition_key desc limit $4)
    select [[snapshot columns]]
    from p join ff_exec_core e on e.partition_key = p.partition_key and e.execution_id = p.execution_id
    [[current attempt]]
    order by e.execution_id desc, e.partition_key desc
    """,
    Planning.READ,
    phrases=SNAPSHOT_PHRASES,
)

# The members of one flow: $1 partition_key, $10 flow_id.
LIST_FLOW: Final = Statement(
    "list_flow",
    """
    with p as materialized (
      select e.partition_key, e.execution_id from ff_exec_core e
      where e.partition_key = $1::smallint and e.flow_id = $10
        and ($2::uuid is null or (e.execution_id, e.partition_key) < ($2, $3::smallint)) and [[filters]]
      order by e.execution_id desc limit $4)
    select [[snapshot columns]]
    from p join ff_exec_core e on e.partition_key = p.partition_key and e.execution_id = p.execution_id
    [[current attempt]]
    order by e.execution_id desc
    """,
    Planning.READ,
    phrases=SNAPSHOT_PHRASES,
)

_ALL_STORED: Final = [*(state.value for state in PublicState), "active"]


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


def _check_state(public_state: object) -> PublicState | None:
    if public_state is None:
        return None
    try:
        return PublicState(str(public_state))
    except ValueError:
        raise Validation(
            ValidationKind.INVALID_INPUT, f"expected one of {', '.join(PublicState)}", "public_state"
        ) from None


def check_tag(tag: object) -> tuple[str | None, str | None]:
    """A filter by tag: `"key=value"` or a pair; (None, None) for no filter."""
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
    state = _check_state(public_state)
    cursor = (None, None) if after is None else parse_execution_id(after, "after")[::-1]
    if lane is not None:
        check_lane(lane)
    if namespace is not None:
        check_text(namespace, "namespace")
    filters = (*cursor, limit + 1, lane, namespace, *check_tag(tag), state)
    if limit == 0:
        return Page([], None)
    if flow_id is None:
        stored = _ALL_STORED if state is None else sorted({state.value, "running", "active"})
        rows = await runtime.db.fetch(LIST, stored, *filters)
    else:
        flow = parse_uuid(flow_id, "flow_id")
        rows = await runtime.db.fetch(LIST_FLOW, partition_of(flow), *filters, flow)
    items = [read_snapshot(row) for row in rows[:limit]]
    return Page(items, items[-1].execution_id if len(rows) > limit else None)
