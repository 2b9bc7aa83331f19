"""ffd: durable execution on PostgreSQL.

Everything in `__all__` is public and covered by semantic versioning; nothing else is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ffd.core.conditions import (
    AllOf,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
    all_of_waitpoints,
)
from ffd.core.control import AlreadySatisfied, Cancelled, PriorityChanged, Replayed, Revoked, SatisfiedReason
from ffd.core.errors import (
    Conflict,
    ConflictKind,
    Contention,
    ContentionKind,
    EngineError,
    NotFound,
    State,
    StateKind,
    Unavailable,
    Validation,
    ValidationKind,
)
from ffd.core.flows import (
    AllOfEdges,
    AnyOfEdges,
    CancelPolicy,
    EdgeApplied,
    EdgeSnapshot,
    EdgeStaged,
    FlowAlreadyTerminal,
    FlowCancelHeader,
    FlowCancelled,
    FlowCreated,
    FlowSnapshot,
    FlowSpec,
    FlowState,
    FlowSubmitted,
    OnSatisfied,
    QuorumEdges,
)
from ffd.core.handles import Backend, Handle, HandleKind
from ffd.core.policy import ExecutionPolicy, Exponential, FailureClass, Fixed, RetryPolicy
from ffd.core.records import (
    AttemptSnapshot,
    Claim,
    Created,
    ExecutionSnapshot,
    Explanation,
    LeaseRenewal,
    NewExecution,
    Page,
    ResumeToken,
    RetryScheduled,
    TerminalFailed,
)
from ffd.core.state import PublicState
from ffd.core.suspension import (
    Accepted,
    AlreadySeeded,
    Duplicate,
    Fresh,
    LeaseFence,
    Noop,
    OnTimeout,
    PendingWaitpoint,
    ResumeSignal,
    Rotated,
    Seeded,
    Signal,
    SignalEffect,
    Suspend,
    Suspended,
    SuspendedExecution,
    SuspensionAlreadySatisfied,
    UsePending,
    WaitpointInfo,
    WaitpointKey,
    WaitpointToken,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ffd.engine import Engine

__all__ = [
    "Accepted",
    "AllOf",
    "AllOfEdges",
    "AlreadySatisfied",
    "AlreadySeeded",
    "AnyOfEdges",
    "AttemptSnapshot",
    "Backend",
    "ByName",
    "CancelPolicy",
    "Cancelled",
    "Claim",
    "Conflict",
    "ConflictKind",
    "Contention",
    "ContentionKind",
    "Count",
    "CountKind",
    "Created",
    "Duplicate",
    "EdgeApplied",
    "EdgeSnapshot",
    "EdgeStaged",
    "Engine",
    "EngineError",
    "ExecutionPolicy",
    "ExecutionSnapshot",
    "Explanation",
    "Exponential",
    "FailureClass",
    "Fixed",
    "FlowAlreadyTerminal",
    "FlowCancelHeader",
    "FlowCancelled",
    "FlowCreated",
    "FlowSnapshot",
    "FlowSpec",
    "FlowState",
    "FlowSubmitted",
    "Fresh",
    "Handle",
    "HandleKind",
    "LeaseFence",
    "LeaseRenewal",
    "NewExecution",
    "Noop",
    "NotFound",
    "OnSatisfied",
    "OnTimeout",
    "OperatorOnly",
    "Page",
    "PendingWaitpoint",
    "PriorityChanged",
    "PublicState",
    "QuorumEdges",
    "Replayed",
    "ResumeSignal",
    "ResumeToken",
    "RetryPolicy",
    "RetryScheduled",
    "Revoked",
    "Rotated",
    "SatisfiedReason",
    "Seeded",
    "Signal",
    "SignalEffect",
    "Single",
    "State",
    "StateKind",
    "Suspend",
    "Suspended",
    "SuspendedExecution",
    "SuspensionAlreadySatisfied",
    "TerminalFailed",
    "TimeoutOnly",
    "Unavailable",
    "UsePending",
    "Validation",
    "ValidationKind",
    "WaitpointInfo",
    "WaitpointKey",
    "WaitpointToken",
    "Wildcard",
    "__version__",
    "all_of_waitpoints",
]


def __getattr__(name: str) -> Any:
    """The engine, and the database driver with it, when it is first asked for: `ffd --help` needs neither."""
    if name == "Engine":
        from ffd.engine import Engine

        return Engine
    raise AttributeError(f"module 'ffd' has no attribute {name!r}")
