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
