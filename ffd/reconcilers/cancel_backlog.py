"""Members of cancelled flows that were not cancelled with them, and acknowledgements that never came.

A caller of `cancel_flow_header` acknowledges its members itself and gets a head start of half a minute.
"""

from __future__ import annotations

from ffd.ops.cancel_flow import drain_backlog
from ffd.ops.runtime import Runtime
from ffd.reconcilers.by_flow import each_flow
from ffd.reconcilers.due import Only, due_statements
from ffd.reconcilers.report import Report

# Members that have not ended need no grace: somebody must cancel them.
PROBE, CANDIDATES = due_statements(
    "cancel_backlog",
    """
    select q.flow_id as entity_id,
           case when exists (
             select 1 from ff_exec_core m
             where m.partition_key = q.partition_key and m.flow_id = q.flow_id and m.flow_id is not null
               and m.lifecycle_phase not in ('terminal', 'cancelled'))
           then q.requested_at_ms else q.requested_at_ms + 30000 end as due_at_ms
    from ff_cancel_backlog q
    where q.partition_key = p.partition_key and [[not quarantined cancel_backlog q.flow_id]]
    order by 2
    """,
)


async def tick(runtime: Runtime, partition_key: int, limit: int, only: Only = None) -> Report:
    """Cancel and acknowledge what stands in the backlog, one transaction per flow."""
    report = Report()
    report.outcomes["acknowledged"] += await each_flow(runtime, CANDIDATES, partition_key, limit, only, drain_backlog)
    return report
