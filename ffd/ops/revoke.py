"""Taking a lease away from a worker that holds on to it: the lease that stands now, or the one that is named."""

from __future__ import annotations

from typing import Final

from ffd.core.checks import check_text
from ffd.core.control import AlreadySatisfied, Revoked, SatisfiedReason
from ffd.core.errors import NotFound
from ffd.core.events import LEASE_RINGS, Channel, work_ring
from ffd.core.ids import lease_id_text, parse_execution_id
from ffd.core.limits import ID_BYTES_MAX
from ffd.db.statement import Statement
from ffd.ops.cancel import check_operator
from ffd.ops.runtime import Runtime

READ_LEASE: Final = Statement(
    "read_lease",
    """
    select e.lifecycle_phase, e.attempt_index, t.lease_epoch, t.worker_id, t.worker_instance_id
    from (select lifecycle_phase, attempt_index from ff_exec_core where partition_key = $1 and execution_id = $2) e
    left join lateral (
      select lease_epoch, worker_id, worker_instance_id from ff_attempt
      where partition_key = $1 and execution_id = $2 and attempt_index = e.attempt_index) t on true
    """,
)

# $3 attempt_index, $4 lease_epoch, $5 reason, $6 actor, $7 worker_id, $8 worker_instance_id, $9 lease id. Revokes the
# lease that was read, no later one: the attempt's own update carries its epoch.
REVOKE_LEASE: Final = Statement(
    "revoke_lease",
    """
    with k as materialized (
      select 1 from ff_exec_core
      where partition_key = $1 and execution_id = $2 and attempt_index = $3 and lifecycle_phase = 'active'
      for no key update),
    l as materialized (select ff_now_ms() as now from k),
    a as (
      update ff_attempt t
      set lease_epoch = t.lease_epoch + 1, lease_expires_at_ms = null, timeout_at_ms = null, worker_instance_id = null,
          outcome = 'interrupted'
      from l
      where t.partition_key = $1 and t.execution_id = $2 and t.attempt_index = $3 and t.lease_epoch = $4
      returning l.now, t.lease_epoch),
    x as (
      update ff_exec_core e
      set [[waiting_interrupted]], interruption = 'operator', state_since_ms = a.now,
          lease_epoch = greatest(e.lease_epoch, a.lease_epoch)
      from a where e.partition_key = $1 and e.execution_id = $2
      returning e.partition_key, e.execution_id, e.lane_id, e.raw_fields, a.now, a.lease_epoch),
    v as ([[into lease_event]]
      select x.partition_key, x.execution_id::text, 'revoked', 'operator', x.now, $3, $4, $7, $8, [[origin x]] from x),
    o as ([[into operator_event]]
      select x.partition_key, x.execution_id::text, 'lease_revoked',
             jsonb_build_object('previous_state', 'running', 'lease_id', $9::text, 'attempt_index', $3::int,
                                'lease_epoch', x.lease_epoch, 'worker_id', $7::text, 'worker_instance_id', $8::text),
             x.now, $6, $5, [[origin x]]
      from x)
    select lane_id, lease_epoch from x
    """,
)


async def revoke_lease(
    runtime: Runtime,
    execution_id: str,
    *,
    reason: str,
    actor: str,
    worker_instance_id: str,
    expected_lease_id: str | None,
) -> Revoked | AlreadySatisfied:
    """Take the lease away; its work is claimable at once."""
    key = parse_execution_id(execution_id)
    reason, actor = check_operator(reason, actor)
    wanted = check_text(worker_instance_id, "worker_instance_id", ID_BYTES_MAX, may_be_empty=True)
    expected = "" if expected_lease_id is None else expected_lease_id
    expected = check_text(expected, "expected_lease_id", ID_BYTES_MAX, may_be_empty=True)
    seen = await runtime.db.fetchrow(READ_LEASE, *key)
    if seen is None:
        raise NotFound("execution", str(key))
    if seen["lifecycle_phase"] != "active" or seen["lease_epoch"] is None:
        return AlreadySatisfied(SatisfiedReason.NO_ACTIVE_LEASE)
    if wanted and wanted != seen["worker_instance_id"]:
        return AlreadySatisfied(SatisfiedReason.DIFFERENT_WORKER_INSTANCE_ID)
    lease_id = lease_id_text(key.execution_id, seen["attempt_index"], seen["lease_epoch"])
    if expected and expected != lease_id:
        return AlreadySatisfied(SatisfiedReason.LEASE_ID_MISMATCH)
    owner = (seen["worker_id"], seen["worker_instance_id"])
    fence = (seen["attempt_index"], seen["lease_epoch"])
    row = await runtime.db.fetchrow(REVOKE_LEASE, *key, *fence, reason, actor, *owner, lease_id)
    if row is None:
        return AlreadySatisfied(SatisfiedReason.EPOCH_MOVED)
    runtime.ring((*LEASE_RINGS, (Channel.OPERATOR.value, ""), work_ring(row["lane_id"])))
    return Revoked(lease_id, row["lease_epoch"])
