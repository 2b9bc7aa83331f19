"""Why an execution is where it is, and what moves it on (I6). One entry per public state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from ffd.core.errors import NotFound
from ffd.core.ids import parse_execution_id
from ffd.core.limits import EXPLAIN_AHEAD_MAX, EXPLAIN_UPSTREAMS_MAX
from ffd.core.records import ExecutionSnapshot, Explanation
from ffd.core.state import PublicState
from ffd.db.database import Row
from ffd.db.statement import Planning, Statement
from ffd.ops.describe import SNAPSHOT_PHRASES, read_snapshot
from ffd.ops.runtime import Runtime

# $1 partition_key, $2 execution_id, $3 how far to count the queue, $4 how many upstreams to name. Only executions with
# the same needs are counted, in two ranges of the claim index, so that the count reads no more rows than it reports.
EXPLAIN: Final = Statement(
    "explain",
    """
    select [[snapshot columns]], e.blocking_reason, e.interruption, ff_now_ms() as now,
           coalesce(e.state_since_ms, e.terminal_at_ms, t.started_at_ms, e.created_at_ms) as since_ms,
           s.timeout_at_ms as suspension_timeout_at_ms, s.reason_code,
           (select count(*) from ff_edge g
            where (g.partition_key = e.partition_key and g.flow_id = e.flow_id) is true
              and g.downstream_eid = e.execution_id and g.resolution is null) as open_edges,
           (select jsonb_agg(jsonb_build_object('execution_id', format('{fp:%s}:%s', u.partition_key, u.execution_id),
                                                'state', u.state)) from (
              select x.partition_key, x.execution_id,
                     ff_public_state(x.lifecycle_phase, x.eligibility_state, x.public_state, (
                       select a.outcome from ff_attempt a where a.partition_key = x.partition_key
                       and a.execution_id = x.execution_id and a.attempt_index = x.attempt_index)) as state
              from (select upstream_eid from ff_edge g
                    where (g.partition_key = e.partition_key and g.flow_id = e.flow_id) is true
                      and g.downstream_eid = e.execution_id and g.resolution is null limit $4) g
              cross join lateral (
                select partition_key, execution_id, lifecycle_phase, eligibility_state, public_state, attempt_index
                from ff_exec_core where partition_key = e.partition_key and execution_id = g.upstream_eid) x) u)
             as open_upstreams,
           case when e.lifecycle_phase in ('runnable', 'submitted') and e.eligibility_state = 'eligible_now' then (
             select count(*) from (
               (select 1 from ff_exec_core
                where lane_id = e.lane_id and [[claimable]] and required_capabilities = e.required_capabilities
                  and priority > e.priority limit $3)
               union all
               (select 1 from ff_exec_core
                where lane_id = e.lane_id and [[claimable]] and required_capabilities = e.required_capabilities
                  and priority = e.priority and created_at_ms < e.created_at_ms limit $3)) q) end as ahead
    from ff_exec_core e
    left join lateral (
      select lease_epoch, worker_id, worker_instance_id, lease_expires_at_ms, outcome, progress_percent,
             progress_message, started_at_ms
      from ff_attempt
      where partition_key = e.partition_key and execution_id = e.execution_id and attempt_index = e.attempt_index)
      t on true
    left join ff_suspension_current s on s.partition_key = e.partition_key and s.execution_id = e.execution_id
    where e.partition_key = $1 and e.execution_id = $2
    """,
    Planning.READ,
    phrases=SNAPSHOT_PHRASES,
)

Told = tuple[str, dict[str, Any], str]


def _waiting(snapshot: ExecutionSnapshot, row: Row) -> Told:
    needs = snapshot.required_capabilities
    details = {
        "lane": snapshot.lane,
        "required_capabilities": needs,
        "priority": snapshot.priority,
        "ahead": min(row["ahead"] or 0, EXPLAIN_AHEAD_MAX),
        "is_ahead_capped": (row["ahead"] or 0) >= EXPLAIN_AHEAD_MAX,
    }
    if row["eligibility_state"] == "pending_claim":
        return (
            "worker",
            details,
            "A FlowFabric scheduler has granted it to a worker; it returns when the grant runs out.",
        )
    having = f" with the capabilities {', '.join(needs)}" if needs else ""
    return "worker", details, f"Run a worker on lane {snapshot.lane!r}{having}."


_DELAYS: Final = {
    "waiting_for_retry_backoff": "retry_backoff",
    "waiting_for_resume_delay": "resume_delay",
}


def _delayed(snapshot: ExecutionSnapshot, row: Row) -> Told:
    # FlowFabric keeps a delay in the deadline column.
    due_at_ms = snapshot.delay_until_ms if snapshot.delay_until_ms is not None else snapshot.deadline_at_ms
    details = {"due_at_ms": due_at_ms, "due_in_ms": None if due_at_ms is None else due_at_ms - row["now"]}
    if snapshot.failure_message is not None:
        details["failure_message"] = snapshot.failure_message
    step = "Nothing to do: the daemon makes it claimable when it is due. Is `ffd run` running?"
    return _DELAYS.get(row["blocking_reason"] or "", "delay"), details, step


def _blocked(snapshot: ExecutionSnapshot, row: Row) -> Told:
    upstreams: list[dict[str, str]] = msgspec.json.decode(row["open_upstreams"]) if row["open_upstreams"] else []
    details = {"flow_id": snapshot.flow_id, "open_edges": row["open_edges"], "open_upstreams": upstreams}
    ended = [each for each in upstreams if PublicState(each["state"]).is_terminal]
    if ended:
        # It was replayed after that ending, and waits for another one.
        first = ended[0]
        return (
            "dependencies",
            details,
            f"Replay {first['execution_id']}, which it depends on and which {first['state']}.",
        )
    return "dependencies", details, "It goes on when the executions upstream of it end; look at those."


def _running(snapshot: ExecutionSnapshot, row: Row) -> Told:
    expires = snapshot.lease_expires_at_ms
    details = {
        "worker_id": snapshot.worker_id,
        "worker_instance_id": snapshot.worker_instance_id,
        "lease_expires_at_ms": expires,
        "progress_percent": snapshot.progress_percent,
        "progress_message": snapshot.progress_message,
    }
    if expires is not None and expires > row["now"]:
        step = "Nothing to do while its worker renews the lease; revoke the lease to take it away."
        return "owner", details, step
    step = "Its worker is gone. The daemon offers it to another worker. Is `ffd run` running?"
    return "lease_expiry", details, step


def _suspended(_snapshot: ExecutionSnapshot, row: Row) -> Told:
    details = {"reason": row["reason_code"], "timeout_at_ms": row["suspension_timeout_at_ms"]}
    if row["blocking_reason"] == "paused_by_operator":
        return "operator", details, "An operator resumes or cancels it."
    return "signal", details, "Deliver the signals it waits for, or resume or cancel it as an operator."


def _ended(snapshot: ExecutionSnapshot, _row: Row) -> Told:
    details: dict[str, Any] = {"terminal_at_ms": snapshot.terminal_at_ms, "retry_count": snapshot.retry_count}
    if snapshot.public_state == PublicState.COMPLETED:
        details["result_size"] = snapshot.result_size
        return "nothing", details, "It is done; read its result."
    details["failure_message"] = snapshot.failure_message
    details["cancellation_reason"] = snapshot.cancellation_reason
    return "nothing", details, "It has ended. Find the cause, then replay it if it should run again."


_TELL: Final[dict[PublicState, Callable[[ExecutionSnapshot, Row], Told]]] = {
    PublicState.WAITING: _waiting,
    PublicState.RESUMABLE: _waiting,
    PublicState.DELAYED: _delayed,
    PublicState.WAITING_CHILDREN: _blocked,
    PublicState.RUNNING: _running,
    PublicState.SUSPENDED: _suspended,
    PublicState.COMPLETED: _ended,
    PublicState.FAILED: _ended,
    PublicState.EXPIRED: _ended,
    PublicState.SKIPPED: _ended,
    PublicState.CANCELLED: _ended,
}


async def explain_execution(runtime: Runtime, execution_id: str) -> Explanation:
    """What the execution waits for, since when, and the next step."""
    key = parse_execution_id(execution_id)
    row = await runtime.db.fetchrow(EXPLAIN, *key, EXPLAIN_AHEAD_MAX, EXPLAIN_UPSTREAMS_MAX)
    if row is None:
        raise NotFound("execution", str(key))
    snapshot = read_snapshot(row)
    waiting_for, details, next_step = _TELL[snapshot.public_state](snapshot, row)
    return Explanation(snapshot.public_state, waiting_for, row["since_ms"], details, next_step)
