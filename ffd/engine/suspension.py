"""Suspending, signalling, resuming, and the keys that sign."""

from __future__ import annotations

from ffd.core.handles import Handle
from ffd.core.records import (
    DAY_MS,
    Page,
)
from ffd.core.suspension import (
    Accepted,
    AlreadySeeded,
    Duplicate,
    LeaseFence,
    Noop,
    PendingWaitpoint,
    ResumeSignal,
    Rotated,
    Seeded,
    Signal,
    Suspend,
    Suspended,
    SuspendedExecution,
    SuspensionAlreadySatisfied,
    WaitpointInfo,
    WaitpointKey,
)
from ffd.engine.calls import Calls
from ffd.ops import keys as keys_op
from ffd.ops import resume as resume_op
from ffd.ops import signals as signals_op
from ffd.ops import suspend as suspend_op
from ffd.ops import waitpoints as waitpoints_op


class SuspensionCalls(Calls):
    """Suspension, signals and signing keys."""

    async def suspend(
        self, handle: Handle, suspend: Suspend, *, idempotency_key: str | None = None
    ) -> Suspended | SuspensionAlreadySatisfied:
        """Let go of the execution until its condition is met, its timeout comes or an operator steps in.

        The lease ends here; hand the returned tokens to whoever shall decide. When buffered signals meet the
        condition already, the answer is `SuspensionAlreadySatisfied`: nothing was let go, the worker goes on. The same
        `idempotency_key` for the same execution returns the first outcome, tokens included.
        """
        with self._timed("suspend"):
            return await suspend_op.suspend(self._runtime, handle, suspend, idempotency_key)

    async def suspend_by_triple(
        self, execution_id: str, fence: LeaseFence, suspend: Suspend, *, idempotency_key: str | None = None
    ) -> Suspended | SuspensionAlreadySatisfied:
        """`suspend` for callers that have a lease's parts instead of its handle; the epoch alone is fenced."""
        with self._timed("suspend_by_triple"):
            return await suspend_op.suspend_by_triple(self._runtime, execution_id, fence, suspend, idempotency_key)

    async def create_waitpoint(self, handle: Handle, key: str, *, expires_in_ms: int) -> PendingWaitpoint:
        """Make a waitpoint before suspending, so that its token can be handed out first; signals are buffered."""
        with self._timed("create_waitpoint"):
            return await waitpoints_op.create_waitpoint(self._runtime, handle, key, expires_in_ms=expires_in_ms)

    async def deliver_signal(
        self, signal: Signal, *, idempotency_key: str | None = None, idempotency_ttl_ms: int = DAY_MS
    ) -> Accepted | Duplicate:
        """Deliver a signal to a waitpoint, authorised by the waitpoint's token.

        A token that does not hold gets `Validation(INVALID_TOKEN)`, whatever exists behind it. With a good one: the
        execution gone → `NotFound`; ended → `State(TARGET_NOT_SIGNALABLE)`; a waitpoint that is closed →
        `State(WAITPOINT_CLOSED)`. A repeated `signal_id`, or `idempotency_key` at the same waitpoint within its ttl,
        is a `Duplicate`.
        """
        with self._timed("deliver_signal"):
            return await signals_op.deliver_signal(self._runtime, signal, idempotency_key, idempotency_ttl_ms)

    async def deliver_approval_signal(
        self, execution_id: str, waitpoint_id: str, name: str, *, actor: str, idempotency_suffix: str = ""
    ) -> Accepted | Duplicate:
        """Deliver an operator's decision; the engine finds the token. The same by the same actor counts once."""
        with self._timed("deliver_approval_signal"):
            return await signals_op.deliver_approval_signal(
                self._runtime, execution_id, waitpoint_id, name, actor=actor, idempotency_suffix=idempotency_suffix
            )

    async def observe_signals(self, handle: Handle) -> list[ResumeSignal]:
        """Every signal of the execution's latest suspension in the order of arrival; needs no live lease."""
        with self._timed("observe_signals"):
            return await signals_op.observe_signals(self._runtime, handle)

    async def read_waitpoint_token(self, execution_id: str, waitpoint_id: str) -> str | None:
        """For operators: the token of an open waitpoint, to hand it out again; None when there is none."""
        with self._timed("read_waitpoint_token"):
            return await waitpoints_op.read_waitpoint_token(self._runtime, execution_id, waitpoint_id)

    async def list_pending_waitpoints(
        self, execution_id: str, *, after: str | None = None, limit: int = 100
    ) -> Page[WaitpointInfo]:
        """The open waitpoints of an execution: key id and fingerprint, never a token."""
        with self._timed("list_pending_waitpoints"):
            return await waitpoints_op.list_pending_waitpoints(self._runtime, execution_id, after=after, limit=limit)

    async def list_suspended(
        self, *, lane: str | None = None, after: str | None = None, limit: int = 100
    ) -> Page[SuspendedExecution]:
        """A page of suspended executions, newest ids first."""
        with self._timed("list_suspended"):
            return await waitpoints_op.list_suspended(self._runtime, lane=lane, after=after, limit=limit)

    async def resume_execution(
        self, execution_id: str, *, reason: str, actor: str = "", resume_delay_ms: int = 0
    ) -> None:
        """For operators: resume a suspended execution whatever its condition says; closes its waitpoints."""
        with self._timed("resume_execution"):
            await resume_op.resume_execution(
                self._runtime, execution_id, reason=reason, actor=actor, resume_delay_ms=resume_delay_ms
            )

    async def seed_waitpoint_hmac_secret(self, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Store the first signing key: 64 hex digits under a name of 1..64 characters without a colon."""
        with self._timed("seed_waitpoint_hmac_secret"):
            return await keys_op.seed_waitpoint_hmac_secret(self._runtime, kid, secret_hex)

    async def rotate_waitpoint_hmac_secret_all(
        self, new_kid: str, new_secret_hex: str, grace_ms: int
    ) -> Rotated | Noop:
        """Sign with a new key from now on; tokens of the present one hold for `grace_ms` more."""
        with self._timed("rotate_waitpoint_hmac_secret_all"):
            return await keys_op.rotate_waitpoint_hmac_secret_all(self._runtime, new_kid, new_secret_hex, grace_ms)

    async def list_waitpoint_keys(self) -> list[WaitpointKey]:
        """The signing key first, then those that still verify; never a secret."""
        with self._timed("list_waitpoint_keys"):
            return await keys_op.list_waitpoint_keys(self._runtime)
