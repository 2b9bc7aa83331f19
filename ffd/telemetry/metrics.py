"""Every metric, declared once. Names are part of the contract; base units, `ffd_` in front."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

OPERATION_DURATION_SECONDS: Final = Histogram(
    "ffd_operation_duration_seconds",
    "Duration of engine operations as their callers see them.",
    ("operation", "result"),
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
FENCE_REJECTIONS: Final = Counter(
    "ffd_fence_rejections_total",
    "Owners' writes refused because the lease had moved, ended or expired.",
    ("operation",),
)
CONTENTION_RETRIES: Final = Counter(
    "ffd_contention_retries_total",
    "Statements tried again after a serialization failure, a deadlock or a lock timeout.",
    ("statement",),
)
POOL_CONNECTIONS: Final = Gauge(
    "ffd_pool_connections",
    "Connections of this process by state.",
    ("state",),
)
LISTEN_CONNECTED: Final = Gauge(
    "ffd_listen_connected",
    "1 while the LISTEN connection is up, 0 while waiters rely on polling.",
)
LISTEN_RECONNECTS: Final = Counter(
    "ffd_listen_reconnects_total",
    "Times the LISTEN connection was lost and made again.",
)
DOORBELL_FAILURES: Final = Counter(
    "ffd_doorbell_failures_total",
    "Notifications that could not be sent; each costs its readers at most one poll interval.",
)
TOKEN_REJECTIONS: Final = Counter(
    "ffd_token_rejections_total",
    "Signals refused because their token did not hold.",
)
CASCADE_EXECUTIONS: Final = Counter(
    "ffd_cascade_executions_total",
    "Members of flows moved because others ended, by what became of them: released, skipped, cancelled.",
    ("outcome",),
)
CASCADE_OWED: Final = Counter(
    "ffd_cascade_owed_total",
    "Members of flows left to the dependency reconciler by an ending that had moved enough.",
)

# The daemon's. Declared here like all others, so that a scrape names them from the start.
BUILD_INFO: Final = Gauge("ffd_build_info", "Always 1; the version is in the label.", ("version",))
PARTITIONS_OWNED: Final = Gauge("ffd_partitions_owned", "Partitions that this node sweeps, of 256.")
RECONCILER_TICKS: Final = Counter(
    "ffd_reconciler_ticks_total",
    "Sweeps of one partition by result: ok, idle (due but nothing could be moved), error.",
    ("reconciler", "result"),
)
RECONCILER_ROWS: Final = Counter(
    "ffd_reconciler_rows_total",
    "Rows that sweeps moved, by what became of them.",
    ("reconciler", "outcome"),
)
RECONCILER_TICK_DURATION_SECONDS: Final = Histogram(
    "ffd_reconciler_tick_duration_seconds",
    "Duration of one sweep of one partition.",
    ("reconciler",),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
RECONCILER_LAG_SECONDS: Final = Gauge(
    "ffd_reconciler_lag_seconds",
    "Age of the oldest due row in the partitions of this node, at the last look.",
    ("reconciler",),
)
RECONCILER_LAST_SUCCESS: Final = Gauge(
    "ffd_reconciler_last_success_timestamp_seconds",
    "When this node last looked for due rows without an error, on the database clock.",
    ("reconciler",),
)
RECLAIM_PACED: Final = Gauge(
    "ffd_reclaim_paced",
    "1 while leases that expired during an outage are given back at a bounded pace.",
)
QUARANTINED_ROWS: Final = Gauge(
    "ffd_quarantined_rows",
    "Rows in the partitions of this node that a reconciler could not move and will try again later.",
)
EXECUTIONS: Final = Gauge(
    "ffd_executions",
    "Executions that have not ended, sampled by the node that owns partition 0.",
    ("lane", "state"),
)
LANE_OLDEST_WAITING_SECONDS: Final = Gauge(
    "ffd_lane_oldest_waiting_seconds",
    "How long the oldest claimable execution of a lane has been waiting, sampled with ffd_executions.",
    ("lane",),
)
TASK_RESTARTS: Final = Counter(
    "ffd_task_restarts_total", "Tasks of the daemon that failed and were started again.", ("task",)
)
EVENT_LOOP_LAG_SECONDS: Final = Gauge(
    "ffd_event_loop_lag_seconds", "How late the event loop woke up, at the last look."
)
OUTBOX_LAG_SECONDS: Final = Gauge(
    "ffd_outbox_lag_seconds", "Age of the oldest event that a subscription has not handled.", ("subscription",)
)
OUTBOX_EVENTS: Final = Counter("ffd_outbox_events_total", "Events read for subscriptions.", ("stream",))
OUTBOX_GAPS: Final = Gauge("ffd_outbox_gaps", "Ids that may still appear below what was read.", ("stream",))
PLUGIN_CALLS: Final = Counter("ffd_plugin_calls_total", "Calls of plugin hooks.", ("plugin", "hook", "result"))
PLUGIN_DEAD_LETTERS: Final = Counter(
    "ffd_plugin_dead_letters_total", "Events that a plugin could not handle and that were set aside.", ("plugin",)
)
LOG_LINES_LOST: Final = Counter("ffd_log_lines_lost_total", "Log lines that could not be written.")
