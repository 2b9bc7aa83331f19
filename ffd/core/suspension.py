"""What suspending, signalling and resuming takes and returns. Structs that hold a token show none of it (I8)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from ffd.core.conditions import Condition
from ffd.core.handles import Handle


class OnTimeout(StrEnum):
    """What happens to a suspension whose time is up."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    ESCALATE = "escalate"
    AUTO_RESUME_WITH_TIMEOUT_SIGNAL = "auto_resume_with_timeout_signal"


class SignalEffect(StrEnum):
    """What an accepted signal did."""

    APPENDED_TO_WAITPOINT = "appended_to_waitpoint"
    RESUME_CONDITION_SATISFIED = "resume_condition_satisfied"
    BUFFERED_FOR_PENDING_WAITPOINT = "buffered_for_pending_waitpoint"


# Why an execution is suspended, and the blocking reason that follows.
REASONS: Final = {
    "waiting_for_signal": "waiting_for_signal",
    "waiting_for_approval": "waiting_for_approval",
    "waiting_for_callback": "waiting_for_callback",
    "waiting_for_tool_result": "waiting_for_tool_result",
    "waiting_for_operator_review": "paused_by_operator",
    "manual_pause": "paused_by_operator",
    "paused_by_policy": "paused_by_policy",
    "paused_by_budget": "waiting_for_budget",
    "step_boundary": "waiting_for_signal",
}


class _Redacted:
    """Leaves `token` out of whatever prints the struct."""

    __slots__ = ()
    __struct_fields__: tuple[str, ...]

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({', '.join(shown)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, "…" if name == "token" else getattr(self, name)) for name in self.__struct_fields__]


class Fresh(msgspec.Struct, frozen=True):
    """A new waitpoint under `key`."""

    key: str
    waitpoint_id: str | None = None


class UsePending(msgspec.Struct, frozen=True):
    """A waitpoint made before by `create_waitpoint`; it keeps its token and its buffered signals."""

    waitpoint_id: str


class _WaitFor(msgspec.Struct, frozen=True):
    waitpoints: Sequence[Fresh | UsePending]
    condition: Condition


class Suspend(_WaitFor, frozen=True, kw_only=True):
    """What to wait for, until when, and what then."""

    reason: str = "waiting_for_signal"
    timeout_at_ms: int | None = None
    on_timeout: OnTimeout | str = OnTimeout.FAIL
    resume_delay_ms: int = 0
    suspension_id: str | None = None


class LeaseFence(msgspec.Struct, frozen=True):
    """A lease by its parts, for callers without a handle; the epoch is what fences."""

    lease_id: str
    lease_epoch: int
    attempt_id: str


class WaitpointToken(_Redacted, msgspec.Struct, frozen=True):
    """A waitpoint and the token that lets its holder signal it. Hand the token to whoever shall decide."""

    waitpoint_id: str
    key: str
    token: str


class PendingWaitpoint(_Redacted, msgspec.Struct, frozen=True):
    """A waitpoint made ahead of its suspension."""

    waitpoint_id: str
    key: str
    token: str


class Suspended(msgspec.Struct, frozen=True):
    """The execution waits and the lease is gone; `handle` only reads."""

    suspension_id: str
    waitpoints: list[WaitpointToken]
    handle: Handle


class SuspensionAlreadySatisfied(msgspec.Struct, frozen=True):
    """Buffered signals met the condition already: the lease lives and the worker goes on with `handle`."""

    suspension_id: str
    waitpoints: list[WaitpointToken]
    handle: Handle


class _SignalTo(_Redacted, msgspec.Struct, frozen=True):
    execution_id: str
    waitpoint_id: str
    name: str
    token: str


class Signal(_SignalTo, frozen=True, kw_only=True):
    """A signal for one waitpoint, with the token that proves the right to send it."""

    source_type: str
    source_identity: str
    category: str = "external"
    payload: bytes | None = None
    correlation_id: str | None = None
    signal_id: str | None = None


class Accepted(msgspec.Struct, frozen=True):
    """The signal is stored and counted."""

    signal_id: str
    effect: SignalEffect


class Duplicate(msgspec.Struct, frozen=True):
    """The signal was accepted before, as `signal_id`; nothing changed."""

    signal_id: str


class ResumeSignal(msgspec.Struct, frozen=True):
    """A signal of the latest suspension, as the resumed worker sees it."""

    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str | None
    accepted_at_ms: int
    payload: bytes | None


class WaitpointInfo(msgspec.Struct, frozen=True):
    """An open waitpoint in a listing: the key id and a fingerprint stand for its token, which is never listed."""

    waitpoint_id: str
    key: str
    state: str
    required_signal_names: list[str]
    created_at_ms: int
    activated_at_ms: int | None
    expires_at_ms: int | None
    execution_id: str
    token_kid: str
    token_fingerprint: str


class SuspendedExecution(msgspec.Struct, frozen=True):
    """A suspended execution in a listing."""

    execution_id: str
    lane: str
    suspension_id: str
    suspended_at_ms: int
    timeout_at_ms: int | None
    reason: str | None


class Seeded(msgspec.Struct, frozen=True):
    """The key was stored and signs from now on."""

    kid: str


class AlreadySeeded(msgspec.Struct, frozen=True):
    """A key of this name was there before."""

    kid: str
    same_secret: bool


class Rotated(msgspec.Struct, frozen=True):
    """The new key signs; the previous one verifies until its grace ends. `gc_count` keys were past theirs."""

    previous_kid: str | None
    new_kid: str
    gc_count: int


class Noop(msgspec.Struct, frozen=True):
    """The key was there already, with the same secret."""

    kid: str


class WaitpointKey(msgspec.Struct, frozen=True):
    """A signing key without its secret."""

    kid: str
    is_active: bool
    rotated_at_ms: int
    verifies_until_ms: int | None
