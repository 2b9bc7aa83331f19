"""What the operator's pictures show: how much waits, runs and sleeps, by lane; and how punctual the event loop is.

Counting is done by one node, the owner of partition 0, and never takes more than a small share of the time, however
large the tables are: the pause follows from how long the last count took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import anyio

from ffd.core.errors import EngineError
from ffd.daemon.sweeping import Sweeping
from ffd.daemon.tasks import Task
from ffd.db.database import Row
from ffd.db.statement import Planning, Statement
from ffd.ops.runtime import Runtime
from ffd.reconcilers.dependency import FIRST, find_missed
from ffd.reconcilers.isolation import COUNT_QUARANTINE
from ffd.reconcilers.trimming import CHORES_PARTITION
from ffd.telemetry.logging import get_logger
from ffd.telemetry.metrics import EVENT_LOOP_LAG_SECONDS, EXECUTIONS, LANE_OLDEST_WAITING_SECONDS, QUARANTINED_ROWS

SAMPLE_EVERY_S: Final = 15.0
# Counting takes at most one part in this many of the time.
DUTY: Final = 50
LANES_MAX: Final = 100
OTHER_LANES: Final = "_other"
MISSED_EVERY_S: Final = 60.0
LOOP_EVERY_S: Final = 1.0

# $1 how many lanes; the rest is one. By what is stored: a FlowFabric worker leaves other words in public_state.
SAMPLE: Final = Statement(
    "sample_executions",
    """
    with n as materialized (
      select lane_id, ff_public_state(lifecycle_phase, eligibility_state, public_state, null) as state,
             count(*) as executions,
             min(coalesce(state_since_ms, created_at_ms)) filter (where [[claimable]]) as waiting_since_ms
      from ff_exec_core
      where public_state in ('waiting', 'resumable', 'delayed', 'waiting_children', 'running', 'active', 'suspended')
        and lifecycle_phase not in ('terminal', 'cancelled')
      group by 1, 2),
    l as (select lane_id, row_number() over (order by sum(executions) desc, lane_id) as place from n group by lane_id)
    select case when l.place <= $1 then n.lane_id else '_other' end as lane, n.state,
           sum(n.executions)::bigint as executions, ff_now_ms() - min(n.waiting_since_ms) as waiting_ms
    from n join l on l.lane_id = n.lane_id group by 1, 2 order by 1, 2
    """,
    Planning.READ,
)

_log = get_logger("sampling")


def show_executions(rows: list[Row]) -> None:
    """Put a sample in the place of the last one."""
    EXECUTIONS.clear()
    LANE_OLDEST_WAITING_SECONDS.clear()
    oldest: dict[str, float] = {}
    for row in rows:
        EXECUTIONS.labels(row["lane"], row["state"]).set(row["executions"])
        if row["waiting_ms"] is not None:
            oldest[row["lane"]] = max(oldest.get(row["lane"], 0.0), row["waiting_ms"] / 1000)
    for lane, seconds in oldest.items():
        LANE_OLDEST_WAITING_SECONDS.labels(lane).set(seconds)


async def sample(runtime: Runtime, partitions: Callable[[], list[int]], task: Task) -> None:
    """Count now and then."""
    while True:
        task.progress()
        began, owned = time.monotonic(), partitions()
        if not owned:
            show_executions([])
            await anyio.sleep(LOOP_EVERY_S)
            continue
        try:
            (row,) = await runtime.db.fetch(COUNT_QUARANTINE, owned)
            QUARANTINED_ROWS.set(row["count"])
            show_executions(await runtime.db.fetch(SAMPLE, LANES_MAX) if CHORES_PARTITION in owned else [])
        except EngineError as error:
            _log.warning("sample_failed", error=error.code)
        pause_s = max(SAMPLE_EVERY_S, DUTY * (time.monotonic() - began))
        task.rest()
        await anyio.sleep(pause_s)


async def look_for_missed(runtime: Runtime, sweeping: Sweeping, task: Task) -> None:
    """Page by page, look for endings that another writer did not carry through its flow."""
    after = FIRST
    while True:
        task.rest()
        await anyio.sleep(MISSED_EVERY_S)
        task.progress()
        if not sweeping.partitions or not sweeping.settings["dependency"].is_on:
            continue
        try:
            found, after = await find_missed(runtime, sweeping.partitions, after)
        except EngineError as error:
            _log.warning("look_for_missed_failed", error=error.code)
            continue
        if found:
            _log.info("missed_cascades_found", partitions=len(found))
            sweeping.poke("dependency")


async def measure_loop(task: Task) -> None:
    """How late a short sleep ends."""
    while True:
        task.progress()
        began = time.monotonic()
        await anyio.sleep(LOOP_EVERY_S)
        EVENT_LOOP_LAG_SECONDS.set(max(0.0, time.monotonic() - began - LOOP_EVERY_S))
