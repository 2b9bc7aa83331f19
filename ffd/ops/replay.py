"""Running an ended execution again, in place: same attempt row, larger epoch, a clean slate otherwise.

What is overwritten stays in the operator event. A member of a flow opens its flow again; what its first ending did
to other members stays done, because an edge is resolved once. A skipped member goes back to its edges: those that
were satisfied stay so; the others wait for their upstreams to end again, or count at once if those have been replayed
to success meanwhile.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ffd.core.control import Replayed
from ffd.core.errors import State, StateKind
from ffd.core.events import Channel, work_ring
from ffd.core.flows import FlowState
from ffd.core.ids import ExecutionKey, parse_execution_id
from ffd.core.state import PublicState, read_public_state
from ffd.db.database import Row, fetch_one
from ffd.db.statement import Statement
from ffd.ops.cancel import CURRENT_ATTEMPT, check_operator, record
from ffd.ops.cascade import decide_one
from ffd.ops.flow_lock import FlowKey, is_sealed
from ffd.ops.member import Held, with_member
from ffd.ops.runtime import Runtime

DEFAULT_REPLAYS_MAX: Final = 10
_AFTER: Final = {"released": PublicState.WAITING, "skipped": PublicState.SKIPPED}

# $1 partition_key, $2 execution_id, $3 attempt_index, $4 the row. The execution is locked.
REPLAY: Final = Statement(
    "replay",
    """
    with b as materialized (
      select terminal_at_ms, result, cancellation_reason, cancelled_by, failure_message, deadline_at_ms, retry_count,
             lease_reclaim_count, ff_now_ms() as now, $4::text as next_row
      from ff_exec_core where partition_key = $1 and execution_id = $2),
    a as (
      update ff_attempt t
      set outcome = null, terminal_at_ms = null, worker_id = null, worker_instance_id = null,
          lease_expires_at_ms = null, timeout_at_ms = null, retry_at_ms = null, failure_category = null,
          failure_message = null, progress_percent = null, progress_message = null, lease_epoch = t.lease_epoch + 1
      where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3
      returning t.lease_epoch),
    x as (
      update ff_exec_core e
      set [[by b.next_row: waiting_replay, blocked_replay]], terminal_at_ms = null, result = null,
          cancellation_reason = null, cancelled_by = null, failure_message = null, deadline_at_ms = null,
          delay_until_ms = null, interruption = null, retry_count = 0, lease_reclaim_count = 0, signal_count = 0,
          replay_count = e.replay_count + 1, state_since_ms = b.now,
          lease_epoch = greatest(e.lease_epoch + 1, (select lease_epoch from a)),
          raw_fields = jsonb_set(e.raw_fields - 'last_failure_message', '{replay_count}',
                                 to_jsonb(e.replay_count + 1))
      from b where e.partition_key = $1 and e.execution_id = $2
      returning e.flow_id, e.lane_id, e.replay_count, e.lease_epoch),
    -- Nothing of the earlier life answers for the new one: not its signals, not its suspensions' outcomes, not a race
    -- that it lost.
    r as (
      delete from ff_cascade_owed t using x
      where t.partition_key = $1 and t.flow_id = x.flow_id and t.execution_id = $2 and t.work = 'cancel'),
    s as (delete from ff_suspension_current t using x where t.partition_key = $1 and t.execution_id = $2),
    d as (delete from ff_suspend_dedup t using x where t.partition_key = $1 and t.execution_id = $2)
    select x.lane_id, x.replay_count, x.lease_epoch, b.terminal_at_ms, octet_length(b.result) as result_size,
           b.cancellation_reason, b.cancelled_by, b.failure_message, b.deadline_at_ms, b.retry_count,
           b.lease_reclaim_count, b.now
    from x, b
    """,
)

# $1 partition_key, $2 flow_id, $3 execution_id. Edges that made the child impossible are open again: at once satisfied
# if the upstream has succeeded since, else for an ending of its that is yet to come.
REOPEN_EDGES: Final = Statement(
    "reopen_edges",
    """
    with u as materialized (
      select g.partition_key, g.flow_id, g.downstream_eid, g.edge_id, e.replay_count,
             e.lifecycle_phase in ('terminal', 'cancelled') as has_ended,
             e.lifecycle_phase = 'terminal' and e.public_state = 'completed' as has_succeeded
      from ff_edge g left join lateral (
        select replay_count, lifecycle_phase, public_state from ff_exec_core
        where partition_key = $1 and execution_id = g.upstream_eid) e on true
      where (g.partition_key = $1 and g.flow_id = $2) is true and g.downstream_eid = $3
        and g.resolution = 'impossible'),
    r as (
      update ff_edge t
      set resolution = case when u.has_succeeded then 'satisfied' end,
          upstream_replay = case when u.has_succeeded then t.upstream_replay
                                 when u.has_ended then u.replay_count + 1 else coalesce(u.replay_count, 0) end
      from u where t.downstream_eid = u.downstream_eid and t.edge_id = u.edge_id
        and (t.partition_key = u.partition_key and t.flow_id = u.flow_id) is true
      returning t.resolution)
    update ff_edge_group set skip_count = 0, fail_count = 0, running_count = 0,
           success_count = success_count + (select count(*) from r where resolution = 'satisfied')::int
    where partition_key = $1 and flow_id = $2 and downstream_eid = $3
    returning 1
    """,
)

REOPEN_FLOW: Final = Statement(
    "reopen_flow",
    """
    update ff_flow_core set public_flow_state = 'open', terminal_at_ms = null
    where partition_key = $1 and flow_id = $2 and public_flow_state in ('completed', 'failed')
    """,
)


async def replay_execution(runtime: Runtime, execution_id: str, *, reason: str, actor: str) -> Replayed:
    """Start an ended execution again."""
    key = parse_execution_id(execution_id)
    reason, actor = check_operator(reason, actor)

    async def work(held: Held) -> tuple[PublicState, str]:
        core = held.core
        attempt: Row | None = await held.connection.fetchrow(CURRENT_ATTEMPT.sql, *key, core["attempt_index"])
        state = _check(key, held, attempt)
        is_skipped_member = state == PublicState.SKIPPED and held.flow is not None
        next_row = "blocked_replay" if is_skipped_member else "waiting_replay"
        was = await fetch_one(held.connection, REPLAY, *key, core["attempt_index"], next_row)
        details = _before(state, was, attempt)
        details["branch"] = "normal"
        after = PublicState.WAITING
        if held.flow is not None:
            await held.connection.execute(REOPEN_FLOW.sql, *held.flow)
        if is_skipped_member and held.flow is not None:
            details["branch"] = "skipped_flow_member"
            groups = await held.connection.fetch(REOPEN_EDGES.sql, *held.flow, key.execution_id)
            details["groups_reset"] = len(groups)
            after = await _decide_again(held, held.flow, key)
        await record(held, key, "replayed", details, was["now"], actor, reason)
        return after, was["lane_id"]

    state, lane = await with_member(runtime, "replay_execution", key, work)
    runtime.ring(((Channel.OPERATOR.value, ""),))
    if state == PublicState.WAITING:
        runtime.ring((work_ring(lane),))
    return Replayed(state)


def _check(key: ExecutionKey, held: Held, attempt: Row | None) -> PublicState:
    """The state it ended in; refuse what has not ended, was replayed too often, or lies in a cancelled flow."""
    core = held.core
    outcome = None if attempt is None else attempt["outcome"]
    state = read_public_state(core["lifecycle_phase"], core["eligibility_state"], core["public_state"], outcome)
    if not state.is_terminal:
        raise State(
            StateKind.EXECUTION_NOT_TERMINAL,
            f"{key}: only an ended execution is replayed; this is {state}",
            execution_id=str(key),
            public_state=str(state),
        )
    limit = _replays_max(core["policy"])
    if core["replay_count"] >= limit:
        raise State(
            StateKind.MAX_REPLAYS_EXHAUSTED,
            f"{key}: replayed {core['replay_count']} times, its policy allows {limit}",
            execution_id=str(key),
            replay_count=core["replay_count"],
        )
    if held.flow_row is not None and held.flow_row["public_flow_state"] == FlowState.CANCELLED:
        raise State(
            StateKind.REPLAY_NOT_ALLOWED,
            f"{key}: its flow {core['flow_id']} is cancelled",
            execution_id=str(key),
            flow_id=str(core["flow_id"]),
        )
    return state


def _replays_max(policy: str | None) -> int:
    """The limit in a stored policy, which may come from another writer."""
    document = msgspec.json.decode(policy) if policy else None
    value = document.get("max_replay_count") if isinstance(document, dict) else None
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return int(value) if value is not None and is_count else DEFAULT_REPLAYS_MAX


def _before(state: PublicState, was: Row, attempt: Row | None) -> dict[str, Any]:
    """What the replay overwrites."""
    details: dict[str, Any] = {
        "previous_state": str(state),
        "replay_count": was["replay_count"],
        "lease_epoch": was["lease_epoch"],
        "terminal_at_ms": was["terminal_at_ms"],
        "result_size": was["result_size"],
        "failure_message": was["failure_message"],
        "cancellation_reason": was["cancellation_reason"],
        "cancelled_by": was["cancelled_by"],
        "deadline_at_ms": was["deadline_at_ms"],
        "retry_count": was["retry_count"],
        "reclaim_count": was["lease_reclaim_count"],
    }
    if attempt is not None:
        details["outcome"] = attempt["outcome"]
        details["worker_id"] = attempt["worker_id"]
        details["worker_instance_id"] = attempt["worker_instance_id"]
        details["started_at_ms"] = attempt["started_at_ms"]
    return details


async def _decide_again(held: Held, flow: FlowKey, key: ExecutionKey) -> PublicState:
    """Let the child's group look at its edges again: it may be ready, or impossible as before."""
    verdict = await decide_one(held.connection, flow, key.execution_id, held.moved, sealed=is_sealed(held.flow_row))
    return _AFTER.get(verdict or "", PublicState.WAITING_CHILDREN)
