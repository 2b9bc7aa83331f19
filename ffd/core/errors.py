"""Every error the engine raises, in one hierarchy.

The class says what went wrong, `kind` says which case of it, and the kind decides whether trying again can
help. Callers match on the class and the kind or on the dotted `code`; texts are for people and may change.
No error text ever holds a secret or a waitpoint token (I8).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class ValidationKind(StrEnum):
    """What is wrong with the caller's input."""

    INVALID_INPUT = "invalid_input"
    CAPABILITY_MISMATCH = "capability_mismatch"
    INVALID_CAPABILITIES = "invalid_capabilities"
    INVALID_POLICY_JSON = "invalid_policy_json"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    SIGNAL_LIMIT_EXCEEDED = "signal_limit_exceeded"
    INVALID_WAITPOINT_KEY = "invalid_waitpoint_key"
    INVALID_TOKEN = "invalid_token"  # noqa: S105  (the name of an error, not a secret)
    INVALID_LEASE_FOR_SUSPEND = "invalid_lease_for_suspend"
    INVALID_DEPENDENCY = "invalid_dependency"
    INVALID_WAITPOINT_FOR_EXECUTION = "invalid_waitpoint_for_execution"
    INVALID_KID = "invalid_kid"
    INVALID_SECRET_HEX = "invalid_secret_hex"  # noqa: S105  (the name of an error, not a secret)
    INVALID_GRACE_MS = "invalid_grace_ms"
    INVALID_TAG_KEY = "invalid_tag_key"
    CORRUPTION = "corruption"
    HANDLE_FROM_OTHER_BACKEND = "handle_from_other_backend"


class ContentionKind(StrEnum):
    """Somebody else got there first, or the call took the wrong door."""

    USE_CLAIM_RESUMED_EXECUTION = "use_claim_resumed_execution"
    NOT_A_RESUMED_EXECUTION = "not_a_resumed_execution"
    EXECUTION_NOT_LEASEABLE = "execution_not_leaseable"
    LEASE_CONFLICT = "lease_conflict"
    WAITPOINT_NOT_FOUND = "waitpoint_not_found"
    STALE_GRAPH_REVISION = "stale_graph_revision"
    EXECUTION_NOT_ACTIVE = "execution_not_active"
    EXECUTION_NOT_ELIGIBLE = "execution_not_eligible"
    EXECUTION_NOT_RECLAIMABLE = "execution_not_reclaimable"
    NO_ACTIVE_LEASE = "no_active_lease"
    RETRY_EXHAUSTED = "retry_exhausted"


class ConflictKind(StrEnum):
    """The request contradicts something that already stands."""

    DEPENDENCY_ALREADY_EXISTS = "dependency_already_exists"
    CYCLE_DETECTED = "cycle_detected"
    SELF_REFERENCING_EDGE = "self_referencing_edge"
    EXECUTION_ALREADY_IN_FLOW = "execution_already_in_flow"
    WAITPOINT_ALREADY_EXISTS = "waitpoint_already_exists"
    ROTATION_CONFLICT = "rotation_conflict"
    ACTIVE_ATTEMPT_EXISTS = "active_attempt_exists"


class StateKind(StrEnum):
    """The target is in a state that does not admit the request."""

    STALE_LEASE = "stale_lease"
    LEASE_EXPIRED = "lease_expired"
    LEASE_REVOKED = "lease_revoked"
    TARGET_NOT_SIGNALABLE = "target_not_signalable"
    EXECUTION_NOT_TERMINAL = "execution_not_terminal"
    MAX_REPLAYS_EXHAUSTED = "max_replays_exhausted"
    EXECUTION_NOT_IN_FLOW = "execution_not_in_flow"
    FLOW_ALREADY_TERMINAL = "flow_already_terminal"
    NOT_RUNNABLE = "not_runnable"
    REPLAY_NOT_ALLOWED = "replay_not_allowed"
    EXECUTION_NOT_SUSPENDED = "execution_not_suspended"
    ALREADY_SUSPENDED = "already_suspended"
    ALREADY_SATISFIED = "already_satisfied"
    WAITPOINT_CLOSED = "waitpoint_closed"
    WAITPOINT_NOT_PENDING = "waitpoint_not_pending"
    PENDING_WAITPOINT_EXPIRED = "pending_waitpoint_expired"


# The kinds a caller may meet again with a different answer. All others are final.
_RETRYABLE_KINDS: frozenset[StrEnum] = frozenset(
    {
        ContentionKind.RETRY_EXHAUSTED,
        ContentionKind.STALE_GRAPH_REVISION,
        ContentionKind.WAITPOINT_NOT_FOUND,
    }
)


class EngineError(Exception):
    """The base of everything the engine raises on purpose.

    `code` is dotted text such as ``contention.lease_conflict``; `is_retryable` says whether the same call can
    succeed later without anything else changing.
    """

    family: ClassVar[str] = "engine"
    kind: StrEnum | None = None

    @property
    def code(self) -> str:
        """The stable name of this error, for logs, metrics and programs."""
        return self.family if self.kind is None else f"{self.family}.{self.kind}"

    @property
    def is_retryable(self) -> bool:
        """Whether trying the same call again can help."""
        return self.kind in _RETRYABLE_KINDS


class NotFound(EngineError):
    """The named thing does not exist."""

    family = "not_found"

    def __init__(self, entity: str, id: str) -> None:
        super().__init__(f"{entity} not found: {id}")
        self.entity = entity
        self.id = id


class Validation(EngineError):
    """The input breaks a rule; nothing was changed. `field` names the input, `detail` the rule and its bound."""

    family = "validation"
    kind: ValidationKind

    def __init__(self, kind: ValidationKind, detail: str, field: str | None = None) -> None:
        super().__init__(detail if field is None else f"{field}: {detail}")
        self.kind = kind
        self.detail = detail
        self.field = field


class Contention(EngineError):
    """Another party holds what the call needs. `detail` carries ids and the present state, for recognition."""

    family = "contention"
    kind: ContentionKind

    def __init__(self, kind: ContentionKind, detail: str = "", **context: str | int | None) -> None:
        super().__init__(detail or str(kind))
        self.kind = kind
        self.detail = detail
        self.context = context


class Conflict(EngineError):
    """The request contradicts stored facts."""

    family = "conflict"
    kind: ConflictKind

    def __init__(self, kind: ConflictKind, detail: str = "", **context: str | int | None) -> None:
        super().__init__(detail or str(kind))
        self.kind = kind
        self.detail = detail
        self.context = context


class State(EngineError):
    """The target's state does not admit the request."""

    family = "state"
    kind: StateKind

    def __init__(self, kind: StateKind, detail: str = "", **context: str | int | None) -> None:
        super().__init__(detail or str(kind))
        self.kind = kind
        self.detail = detail
        self.context = context


class Unavailable(EngineError):
    """The database cannot be reached, is shutting down or failing over. Nothing is known of the call's effect.

    Every operation of the engine may be repeated after it: owners' endings recognise their repeat, creation
    does through its idempotency key, and a claim that got lost returns to the queue when its lease expires.
    """

    family = "unavailable"

    def __init__(self, op: str, detail: str = "") -> None:
        super().__init__(f"{op}: database unavailable" + (f": {detail}" if detail else ""))
        self.op = op
        self.detail = detail

    @property
    def is_retryable(self) -> bool:
        """Always: the database may be back."""
        return True
