"""ffd: durable execution on PostgreSQL.

Everything in `__all__` is public and covered by semantic versioning; nothing else is.
"""

from __future__ import annotations

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
from ffd.engine import Engine

__version__ = "0.1.0"

__all__ = [
    "AttemptSnapshot",
    "Backend",
    "Claim",
    "Conflict",
    "ConflictKind",
    "Contention",
    "ContentionKind",
    "Created",
    "Engine",
    "EngineError",
    "ExecutionPolicy",
    "ExecutionSnapshot",
    "Explanation",
    "Exponential",
    "FailureClass",
    "Fixed",
    "Handle",
    "HandleKind",
    "LeaseRenewal",
    "NewExecution",
    "NotFound",
    "Page",
    "PublicState",
    "ResumeToken",
    "RetryPolicy",
    "RetryScheduled",
    "State",
    "StateKind",
    "TerminalFailed",
    "Unavailable",
    "Validation",
    "ValidationKind",
    "__version__",
]
