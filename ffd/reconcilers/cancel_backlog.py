"""Members of cancelled flows that were not cancelled with them, and acknowledgements that never came.

A caller of `cancel_flow_header` acknowledges its members itself and gets a head start.
"""

from __future__ import annotations

from typing import Final

from ffd.db.statement import Planning, Statement
from ffd.ops.cancel_flow import drain_backlog
from ffd.ops.flow_lock import FlowKey
from ffd.ops.runtime import Runtime
from ffd.reconcilers.report import Report

GRACE_MS: Final = 30_000

# $1 partition_key, $2 limit, $3 grace_ms. Members that have not ended need no grace: somebody must cancel them.
BACKLOGS: Final = Statement(
    "backlogs",
    """
    select b.flow_id from ff_cancel_backlog b
    where b.partition_key = $1 and (b.requested_at_ms <= ff_now_ms() - $3::bigint or exists (
      select 1 from ff_exec_core m
      where m.partition_key = $1 and m.flow_id = b.flow_id and m.flow_id is not null
        and m.lifecycle_phase not in ('terminal', 'cancelled')))
    order by b.requested_at_ms limit $2
    """,
    Planning.CUSTOM,
)


async def tick(runtime: Runtime, partition_key: int, limit: int) -> Report:
    """Cancel and acknowledge what stands in the backlog, one transaction per flow."""
    report = Report()
    for row in await runtime.db.fetch(BACKLOGS, partition_key, limit, GRACE_MS):
        report.outcomes["acknowledged"] += await drain_backlog(runtime, FlowKey(partition_key, row["flow_id"]))
    return report
