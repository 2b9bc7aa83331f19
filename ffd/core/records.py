"""What the engine takes and returns: frozen typed structs. Times are milliseconds on the database clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ffd.core.handles import Handle
from ffd.core.limits import LEASE_TTL_MS_MAX as LEASE_TTL_MS_MAX
from ffd.core.policy import ExecutionPolicy
from ffd.core.state import PublicState

T = TypeVar("T")

DAY_MS = 86_400_000


class NewExecution(msgspec.Struct, frozen=True, kw_only=True):
    """One execution to create; the fields are the keywords of `Engine.create_execution`."""

    lane: str = "default"
    payload: bytes = b""
    kind: str = ""
    priority: int = 0
    required_capabilities: Sequence[str] = ()
    policy: ExecutionPolicy | None = None
    delay_until_ms: int | None = None
    deadline_at_ms: int | None = None
    flow_id: str | None = None
    execution_id: str | None = None
    idempotency_key: str | None = None
    idempotency_ttl_ms: int = DAY_MS
    tags: Mapping[str, str] | None = None


class Created(msgspec.Struct, frozen=True):
    """The answer to a create. `is_duplicate`: the execution existed, by its id or its idempotency key."""

    execution_id: str
    public_state: PublicState
    is_duplicate: bool


class Claim(msgspec.Struct, frozen=True):
    """Work taken by a worker, leased until `lease_expires_at_ms`."""

    handle: Handle
    execution_id: str
    lane: str
    kind: str
    namespace: str
    payload: bytes
    tags: dict[str, str]
    attempt_index: int
    lease_epoch: int
    lease_id: str
    attempt_id: str
    lease_expires_at_ms: int


class ResumeToken(msgspec.Struct, frozen=True):
    """Who wants to take over one execution, for `claim_from_resume_grant`."""

    execution_id: str
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int = 30_000


class LeaseRenewal(msgspec.Struct, frozen=True):
    """A renewed lease: its new expiry and its unchanged epoch."""

    expires_at_ms: int
    lease_epoch: int


class RetryScheduled(msgspec.Struct, frozen=True):
    """The attempt failed and another one is due at `delay_until_ms`."""

    delay_until_ms: int
    next_attempt_index: int


class TerminalFailed(msgspec.Struct, frozen=True):
    """The attempt failed and so did the execution."""


class ExecutionSnapshot(msgspec.Struct, frozen=True):
    """Everything worth knowing about an execution at one moment, except its payload and result."""

    execution_id: str
    flow_id: str | None
    lane: str
    kind: str
    namespace: str
    public_state: PublicState
    attempt_index: int
    lease_epoch: int
    worker_id: str | None
    worker_instance_id: str | None
    lease_expires_at_ms: int | None
    priority: int
    tags: dict[str, str]
    required_capabilities: list[str]
    created_at_ms: int
    started_at_ms: int | None
    terminal_at_ms: int | None
    delay_until_ms: int | None
    deadline_at_ms: int | None
    retry_count: int
    reclaim_count: int
    replay_count: int
    progress_percent: int | None
    progress_message: str | None
    failure_message: str | None
    cancellation_reason: str | None
    result_size: int | None


class AttemptSnapshot(msgspec.Struct, frozen=True):
    """One attempt of an execution. `outcome` is None while it runs."""

    attempt_index: int
    attempt_id: str
    lease_epoch: int
    worker_id: str | None
    worker_instance_id: str | None
    lease_expires_at_ms: int | None
    timeout_at_ms: int | None
    started_at_ms: int | None
    terminal_at_ms: int | None
    outcome: str | None
    failure_category: str | None
    failure_message: str | None
    progress_percent: int | None
    progress_message: str | None


class Page(msgspec.Struct, Generic[T], frozen=True):
    """One page of a listing. Pass `next` as `after` for the following one; None means there is none."""

    items: list[T]
    next: str | None


class Explanation(msgspec.Struct, frozen=True):
    """Why an execution is where it is.

    `waiting_for` names the one thing that moves it on (`worker`, `delay`, `retry_backoff`, `resume_delay`,
    `dependencies`, `owner`, `lease_expiry`, `signal`, `operator`, or `nothing` once it ended), `since_ms` when
    that began, `details` the figures behind it, and `next_step` what a person can do.
    """

    state: PublicState
    waiting_for: str
    since_ms: int
    details: dict[str, Any]
    next_step: str
