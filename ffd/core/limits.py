"""Every bound the engine enforces (I10), named once. Units are last in the names."""

from __future__ import annotations

from typing import Final

PARTITIONS: Final = 256

PAYLOAD_BYTES_MAX: Final = 1024 * 1024
RESULT_BYTES_MAX: Final = 1024 * 1024
REASON_BYTES_MAX: Final = 1024
MESSAGE_BYTES_MAX: Final = 1024

LANE_BYTES_MAX: Final = 64
ID_BYTES_MAX: Final = 256
KEY_BYTES_MAX: Final = 256
KIND_BYTES_MAX: Final = 256

TAGS_MAX: Final = 64
TAG_KEY_BYTES_MAX: Final = 256
TAG_VALUE_BYTES_MAX: Final = 256

CAPABILITIES_MAX: Final = 256
CAPABILITIES_BYTES_MAX: Final = 4096

PRIORITY_MIN: Final = 0
PRIORITY_MAX: Final = 9000

PAGE_MAX: Final = 1000
BULK_MAX: Final = 10_000
# All payloads or results of one bulk call; PostgreSQL's own limit for one message is 1 GiB.
BULK_BYTES_MAX: Final = 128 * 1024 * 1024
BATCH_MAX: Final = 1000

LEASE_TTL_MS_MAX: Final = 86_400_000
WAIT_MS_MAX: Final = 86_400_000
IDEMPOTENCY_TTL_MS_MAX: Final = 366 * 86_400_000

# The largest time that every consumer of JSON numbers can hold, some 285,000 years away.
TIME_MS_MAX: Final = 2**53 - 1

RETRIES_MAX: Final = 1_000_000
DURATION_MS_MAX: Final = 10 * 366 * 86_400_000
SIGNALS_MAX: Final = 1_000_000
BACKOFF_MULTIPLIER_MAX: Final = 1000.0

WAITPOINTS_MAX: Final = 256
SIGNAL_PAYLOAD_BYTES_MAX: Final = 64 * 1024
SIGNALS_BYTES_MAX: Final = 1024 * 1024
RESUME_DELAY_MS_MAX: Final = 366 * 86_400_000
WAITPOINT_TTL_MS_MAX: Final = 366 * 86_400_000
KEY_GRACE_MS_MAX: Final = 10 * 366 * 86_400_000

FLOW_EDGES_MAX: Final = 50_000
# How many executions and edges one transaction moves when a member of a flow ends; a reconciler does the rest.
CASCADE_MAX: Final = 2000

# One operation is tried this often when the database reports contention, with these pauses in between.
CONTENTION_TRIES: Final = 3
CONTENTION_PAUSES_MS: Final = (5, 10)

# How far `explain_execution` counts the queue in front of a waiting execution.
EXPLAIN_AHEAD_MAX: Final = 1000
# How many open upstreams it names.
EXPLAIN_UPSTREAMS_MAX: Final = 10
