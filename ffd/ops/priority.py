"""Moving claimable work up or down its lane."""

from __future__ import annotations

from typing import Final

from ffd.core.checks import clamp_priority
from ffd.core.control import PriorityChanged
from ffd.core.errors import Contention, ContentionKind, NotFound, Validation
from ffd.core.events import Channel
from ffd.core.ids import parse_execution_id
from ffd.core.state import read_public_state
from ffd.db.statement import Statement
from ffd.ops.cancel import check_operator
from ffd.ops.runtime import Runtime
from ffd.ops.take_over import STATE_OF

# $1 partition_key, $2 execution_id, $3 priority, $4 reason, $5 actor. Looked up by the key alone and judged after the
# lock, on the row's newest version.
CHANGE_PRIORITY: Final = Statement(
    "change_priority",
    """
    with k as materialized (
      select priority, lifecycle_phase, eligibility_state from ff_exec_core
      where partition_key = $1 and execution_id = $2 for no key update),
    n as materialized (select k.priority, ff_now_ms() as now from k where [[claimable]]),
    x as (
      update ff_exec_core e set priority = $3 from n where e.partition_key = $1 and e.execution_id = $2
      returning e.partition_key, e.execution_id, e.raw_fields, n.priority as old_priority, n.now),
    o as ([[into operator_event]]
      select x.partition_key, x.execution_id::text, 'priority_changed',
             jsonb_build_object('old_priority', x.old_priority, 'new_priority', $3::int), x.now, $5, $4, [[origin x]]
      from x)
    select old_priority from x
    """,
)


async def change_priority(
    runtime: Runtime, execution_id: str, new_priority: int, *, reason: str, actor: str
) -> PriorityChanged:
    """Set the priority of claimable work."""
    key = parse_execution_id(execution_id)
    reason, actor = check_operator(reason, actor)
    try:
        priority = clamp_priority(new_priority)
    except Validation as error:
        raise Validation(error.kind, error.detail, "new_priority") from None
    row = await runtime.db.fetchrow(CHANGE_PRIORITY, *key, priority, reason, actor)
    if row is None:
        state = await runtime.db.fetchrow(STATE_OF, *key)
        if state is None:
            raise NotFound("execution", str(key))
        public = read_public_state(
            state["lifecycle_phase"], state["eligibility_state"], state["public_state"], state["outcome"]
        )
        raise Contention(
            ContentionKind.EXECUTION_NOT_ELIGIBLE,
            f"{key}: only claimable work has a place in the queue; this is {public}",
            execution_id=str(key),
            public_state=str(public),
        )
    runtime.ring(((Channel.OPERATOR.value, ""),))
    return PriorityChanged(row["old_priority"], priority)
