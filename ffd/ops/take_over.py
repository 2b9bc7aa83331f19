"""Taking one named execution: after a resume, or from a worker that has gone.

`claim_resumed_execution` continues what a met condition made resumable. `claim_from_resume_grant` also takes an
execution whose lease has run out but was not swept yet: expiry and claim are then one statement, with the same
effects as the sweep and a claim after it.
"""

from __future__ import annotations

from typing import Final

from ffd.core.errors import Contention, ContentionKind, NotFound, Validation, ValidationKind
from ffd.core.events import ENDED_RINGS, LEASE_RINGS
from ffd.core.ids import ExecutionKey, parse_execution_id
from ffd.core.records import Claim, ResumeToken
from ffd.core.state import read_public_state
from ffd.db.statement import Statement
from ffd.ops.cascade import settle_owed
from ffd.ops.claim import CLAIM_PHRASES, check_worker, read_claim
from ffd.ops.flow_lock import FlowKey
from ffd.ops.member import FLOW_OF
from ffd.ops.runtime import Runtime

_PHRASES: Final = {
    # By its key and nothing else: with the predicate of the claim index here, the planner would walk that index.
    "locked": """
      k as materialized (
        select [[candidate columns]], lifecycle_phase, eligibility_state, public_state, attempt_state
        from ff_exec_core where partition_key = $1 and execution_id = $2 for no key update)""",
    **CLAIM_PHRASES,
}

# $1 partition_key, $2 execution_id. Waits for the row, looks at its newest version, then at the clock.
CLAIM_RESUMED: Final = Statement(
    "claim_resumed",
    """
    with [[locked]],
    c as materialized (
      select k.*, ff_now_ms() as now from k where [[claimable]] and public_state = 'resumable'),
    a as ([[open attempts]]),
    u as (
      update ff_exec_core e [[set claimed]] from a, c
      where e.partition_key = $1 and e.execution_id = $2
      returning [[claimed columns]], c.how),
    v as ([[acquired event]])
    [[claim result]] from u
    """,
    phrases=_PHRASES,
)

# Any claimable execution that had an attempt before.
CLAIM_STARTED: Final = Statement(
    "claim_started",
    """
    with [[locked]],
    c as materialized (
      select k.*, ff_now_ms() as now from k
      where [[claimable]] and attempt_state not in ('pending_first_attempt', 'pending')),
    a as ([[open attempts]]),
    u as (
      update ff_exec_core e [[set claimed]] from a, c
      where e.partition_key = $1 and e.execution_id = $2
      returning [[claimed columns]], c.how),
    v as ([[acquired event]])
    [[claim result]] from u
    """,
    phrases=_PHRASES,
)

# Expiry and claim in one. The execution is locked first, then the attempt with its own condition, so that a
# renewal that came first is seen. An active execution without an expiry belongs to nobody. `d.is_spent`: one
# reclaim more than the policy allows ends the execution.
TAKE_EXPIRED: Final = Statement(
    "take_expired",
    """
    with c as materialized (
      select [[candidate columns]], lease_reclaim_count, raw_fields, flow_id from ff_exec_core
      where partition_key = $1 and execution_id = $2 and lifecycle_phase = 'active'
      for no key update),
    d as materialized (
      select c.attempt_index, ff_now_ms() as now, t.lease_epoch, t.worker_id, t.worker_instance_id, c.raw_fields,
             c.flow_id,
             c.lease_reclaim_count + 1 > ff_policy_number(c.policy, '{max_reclaim_count}', 100) as is_spent,
             case when c.policy is not null
               then ff_policy_number(c.policy, '{timeout_policy,attempt_timeout_ms}', null)::bigint end as timeout_ms
      from c cross join lateral (
        select lease_epoch, worker_id, worker_instance_id from ff_attempt
        where partition_key = $1 and execution_id = $2 and attempt_index = c.attempt_index
          and coalesce(lease_expires_at_ms, 0) <= ff_now_ms()
        for no key update) t),
    -- The epoch rises twice: once for the loss, once for the new owner.
    a as (
      update ff_attempt t
      set lease_epoch = greatest(t.lease_epoch, (select lease_epoch from c))
                        + case when d.is_spent then 1 else 2 end,
          worker_id = case when d.is_spent then t.worker_id else $3 end,
          worker_instance_id = case when d.is_spent then t.worker_instance_id else $4 end,
          lease_expires_at_ms = case when d.is_spent then null else d.now + $5 end,
          timeout_at_ms = case when d.is_spent then null else d.now + d.timeout_ms end,
          started_at_ms = case when d.is_spent then t.started_at_ms else d.now end,
          outcome = case when d.is_spent then 'failed' end,
          terminal_at_ms = case when d.is_spent then d.now end,
          failure_message = case when d.is_spent then 'max_reclaims_exceeded' else t.failure_message end
      from d
      where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = d.attempt_index
      returning t.lease_epoch, t.lease_expires_at_ms,
                case when d.is_spent then 'failed' else 'running' end as next_row),
    u as (
      update ff_exec_core e
      set [[by a.next_row: running, failed]], lease_epoch = a.lease_epoch, interruption = null,
          lease_reclaim_count = e.lease_reclaim_count + 1, state_since_ms = d.now,
          terminal_at_ms = case when d.is_spent then d.now end,
          failure_message = case when d.is_spent then 'max_reclaims_exceeded' else e.failure_message end
      from a, d
      where e.partition_key = $1 and e.execution_id = $2
      returning e.partition_key, e.execution_id, e.lane_id, e.attempt_index, e.payload, e.raw_fields, e.flow_id,
                a.lease_epoch, a.lease_expires_at_ms, d.now, d.is_spent,
                d.lease_epoch as lost_epoch, d.worker_id, d.worker_instance_id),
    -- Both events of this execution come from one insert: their ids must follow their order.
    v as ([[into lease_event]]
      select u.partition_key, u.execution_id::text, w.event_type, w.cause, u.now, u.attempt_index, w.lease_epoch,
             w.worker_id, w.worker_instance_id, [[origin u]]
      from u cross join lateral (values
        (1, 'expired', 'lease_expiry', u.lost_epoch, u.worker_id, u.worker_instance_id),
        (2, 'reclaimed', null, u.lease_epoch, $3::text, $4::text)
      ) w(position, event_type, cause, lease_epoch, worker_id, worker_instance_id)
      where w.position = 1 or not u.is_spent
      order by w.position),
    f as ([[into completion_event]]
      select u.partition_key, u.execution_id, u.flow_id, 'failed', u.now, u.now, [[origin u]] from u where u.is_spent),
    -- No flow lock here: what the end of a member means for its flow is owed.
    o as ([[into cascade_owed]]
      select u.partition_key, u.flow_id, u.execution_id, 'resolve', '', u.now
      from u where u.is_spent and u.flow_id is not null
      on conflict (partition_key, flow_id, execution_id, work) do nothing)
    select partition_key, execution_id, lane_id, attempt_index, payload, raw_fields, lease_epoch,
           lease_expires_at_ms, case when is_spent then 'spent' else 'reclaimed' end as how
    from u
    """,
    phrases=CLAIM_PHRASES,
)

STATE_OF: Final = Statement(
    "state_of",
    """
    select e.lifecycle_phase, e.eligibility_state, e.public_state, e.attempt_state, t.outcome,
           t.attempt_index is not null as has_attempt
    from (select lifecycle_phase, eligibility_state, public_state, attempt_state, attempt_index
          from ff_exec_core where partition_key = $1 and execution_id = $2) e
    left join lateral (select outcome, attempt_index from ff_attempt
          where partition_key = $1 and execution_id = $2 and attempt_index = e.attempt_index) t on true
    """,
)


async def claim_resumed_execution(
    runtime: Runtime, execution_id: str, *, worker_id: str, worker_instance_id: str, lease_ttl_ms: int
) -> Claim:
    """Continue a resumable execution."""
    key = parse_execution_id(execution_id)
    check_worker(worker_id, worker_instance_id, lease_ttl_ms)
    row = await runtime.db.fetchrow(CLAIM_RESUMED, *key, worker_id, worker_instance_id, lease_ttl_ms)
    if row is None:
        state = await runtime.db.fetchrow(STATE_OF, *key)
        if state is None:
            raise NotFound("execution", str(key))
        raise Contention(
            ContentionKind.NOT_A_RESUMED_EXECUTION,
            f"{key}: not resumable but {state['public_state']}",
            execution_id=str(key),
            public_state=state["public_state"],
        )
    runtime.ring(LEASE_RINGS)
    return read_claim(row, lease_ttl_ms, worker_instance_id)


async def claim_from_resume_grant(runtime: Runtime, token: ResumeToken) -> Claim | None:
    """Take over one execution; None while its present lease lives."""
    if not isinstance(token, ResumeToken):
        raise Validation(ValidationKind.INVALID_INPUT, "expected a ResumeToken", "token")
    key = parse_execution_id(token.execution_id)
    check_worker(token.worker_id, token.worker_instance_id, token.lease_ttl_ms)
    worker = (token.worker_id, token.worker_instance_id, token.lease_ttl_ms)
    for statement in (TAKE_EXPIRED, CLAIM_STARTED):
        row = await runtime.db.fetchrow(statement, *key, *worker)
        if row is not None and row["how"] == "spent":
            runtime.ring(ENDED_RINGS)
            member = await runtime.db.fetchrow(FLOW_OF, *key)
            if member is not None and member["flow_id"] is not None:
                await settle_owed(runtime, FlowKey(key.partition_key, member["flow_id"]))
            break
        if row is not None:
            runtime.ring(LEASE_RINGS)
            return read_claim(row, token.lease_ttl_ms, token.worker_instance_id)
    await _check_live(runtime, key)
    return None


async def _check_live(runtime: Runtime, key: ExecutionKey) -> None:
    """Return when somebody else's lease lives; else raise what stands in the way."""
    row = await runtime.db.fetchrow(STATE_OF, *key)
    if row is None:
        raise NotFound("execution", str(key))
    if row["lifecycle_phase"] == "active":
        if row["has_attempt"]:
            return
        raise NotFound("attempt", f"{key} runs without an attempt of its own")
    state = read_public_state(row["lifecycle_phase"], row["eligibility_state"], row["public_state"], row["outcome"])
    if not state.is_terminal and row["attempt_state"] in ("pending_first_attempt", "pending"):
        raise NotFound("attempt", f"{key} was never claimed")
    if row["eligibility_state"] == "eligible_now":
        raise Contention(ContentionKind.RETRY_EXHAUSTED, f"{key} changed meanwhile; try again")
    raise Contention(
        ContentionKind.EXECUTION_NOT_ACTIVE,
        f"{key}: nothing to take over, it is {state}",
        execution_id=str(key),
        public_state=str(state),
    )
