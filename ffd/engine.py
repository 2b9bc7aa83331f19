"""The engine: what applications call. Every method is one short transaction.

Terminology:

* An *execution* is a unit of work on a *lane*. A *worker* claims it, which opens or continues an *attempt* and
  gives the worker a *lease*: the sole right to write to it, until a time on the database clock.
* The *lease epoch* counts owners over the execution's whole life. Every owner's write names its epoch and is
  refused once it has moved (I1), so a worker that was paused, cut off or declared dead can do no harm.
* An *ending* (completed, failed, cancelled, expired, skipped) happens once, and its event commits with it (I2, I3).

After `Unavailable` nothing is known about the call; every call may be repeated. A repeated `complete` or `fail` by
the same owner is answered like the first, a repeated create finds the first by its id or idempotency key.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from ffd.config import DatabaseSettings, OutboxSettings, dsn_problem
from ffd.core.checks import check_int, check_text
from ffd.core.errors import ContentionKind, EngineError, StateKind, Validation, ValidationKind
from ffd.core.handles import Handle
from ffd.core.policy import ExecutionPolicy, FailureClass
from ffd.core.records import (
    DAY_MS,
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
from ffd.ops import assert_lease as assert_lease_op
from ffd.ops import claim as claim_op
from ffd.ops import complete as complete_op
from ffd.ops import create as create_op
from ffd.ops import create_many as create_many_op
from ffd.ops import describe as describe_op
from ffd.ops import explain as explain_op
from ffd.ops import fail as fail_op
from ffd.ops import give_back as give_back_op
from ffd.ops import keys as keys_op
from ffd.ops import renew as renew_op
from ffd.ops import resume as resume_op
from ffd.ops import signals as signals_op
from ffd.ops import suspend as suspend_op
from ffd.ops import take_over as take_over_op
from ffd.ops import wait as wait_op
from ffd.ops import waitpoints as waitpoints_op
from ffd.ops.runtime import Runtime, open_runtime
from ffd.telemetry.metrics import FENCE_REJECTIONS, OPERATION_DURATION_SECONDS

_FENCE_KINDS = frozenset({ContentionKind.LEASE_CONFLICT, ContentionKind.EXECUTION_NOT_ACTIVE, StateKind.LEASE_EXPIRED})


class _Timed:
    """Measures one call: a context, not a coroutine around it, because this is on every path."""

    __slots__ = ("_observe_ok", "_operation", "_started")

    def __init__(self, operation: str, observe_ok: Callable[[float], None]) -> None:
        self._operation = operation
        self._observe_ok = observe_ok

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        elapsed_s = time.perf_counter() - self._started
        if error is None:
            self._observe_ok(elapsed_s)
        elif isinstance(error, EngineError):
            if error.kind in _FENCE_KINDS:
                FENCE_REJECTIONS.labels(self._operation).inc()
            OPERATION_DURATION_SECONDS.labels(self._operation, error.code).observe(elapsed_s)


class Engine:
    """One process's access to the engine. Safe to share between tasks of one event loop; make it once.

    Use `Engine.connect`. Operations raise `EngineError`s only (see `ffd.core.errors`): `Validation` for bad
    input, before anything changed; `NotFound`; `Contention` and `State` for a lost race or a wrong state;
    `Unavailable` when the database cannot be reached.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._timers: dict[str, Callable[[float], None]] = {}

    @classmethod
    @asynccontextmanager
    async def connect(
        cls, dsn: str | None, *, namespace: str = "default", pool_min: int = 1, pool_max: int = 10
    ) -> AsyncIterator[Engine]:
        """Open an engine for the length of an ``async with`` block.

        `namespace` marks what this engine creates; claims serve every namespace of their lane. Single
        operations and batches use up to `pool_max` connections each, reads up to four, the doorbell and the
        listener one each; all are made when first needed.
        """
        if dsn is not None:
            problem = dsn_problem(dsn) if isinstance(dsn, str) else "expected text"
            if problem is not None:
                raise Validation(ValidationKind.INVALID_INPUT, problem, "dsn")
        check_int(pool_max, "pool_max", 1, 1000)
        check_int(pool_min, "pool_min", 0, pool_max)
        database = DatabaseSettings(dsn=dsn, pool_min=pool_min, pool_max=pool_max)
        async with cls.open(database, OutboxSettings(), namespace=namespace) as engine:
            yield engine

    @classmethod
    @asynccontextmanager
    async def open(
        cls, database: DatabaseSettings, outbox: OutboxSettings, *, namespace: str = "default"
    ) -> AsyncIterator[Engine]:
        """Open an engine from settings, as the daemon does."""
        check_text(namespace, "namespace")
        async with open_runtime(database, outbox, namespace) as runtime:
            yield cls(runtime)

    def _timed(self, operation: str) -> _Timed:
        timed = self._timers.get(operation)
        if timed is None:
            timed = self._timers[operation] = OPERATION_DURATION_SECONDS.labels(operation, "ok").observe
        return _Timed(operation, timed)

    # Executions

    async def create_execution(
        self,
        *,
        lane: str = "default",
        payload: bytes = b"",
        kind: str = "",
        priority: int = 0,
        required_capabilities: Sequence[str] = (),
        policy: ExecutionPolicy | None = None,
        delay_until_ms: int | None = None,
        deadline_at_ms: int | None = None,
        flow_id: str | None = None,
        execution_id: str | None = None,
        idempotency_key: str | None = None,
        idempotency_ttl_ms: int = DAY_MS,
        tags: Mapping[str, str] | None = None,
        connection: asyncpg.Connection[Any] | None = None,
    ) -> Created:
        """Create an execution.

        The same `execution_id`, or the same `idempotency_key` in this namespace within its ttl, gives the first
        execution with ``is_duplicate=True``. With `connection` the execution is created in the caller's own
        transaction, and idle workers hear of it when that commits. `priority` is clamped to 0..9000, higher
        first. A `delay_until_ms` that has passed counts as none; a `deadline_at_ms` that has passed is refused.
        """
        new = NewExecution(
            lane=lane,
            payload=payload,
            kind=kind,
            priority=priority,
            required_capabilities=required_capabilities,
            policy=policy,
            delay_until_ms=delay_until_ms,
            deadline_at_ms=deadline_at_ms,
            flow_id=flow_id,
            execution_id=execution_id,
            idempotency_key=idempotency_key,
            idempotency_ttl_ms=idempotency_ttl_ms,
            tags=tags,
        )
        with self._timed("create_execution"):
            return await create_op.create_execution(self._runtime, new, connection)

    async def create_executions(
        self, executions: Sequence[NewExecution], *, connection: asyncpg.Connection[Any] | None = None
    ) -> list[Created]:
        """Create up to 10,000 executions, all or none; one answer per item, in the order given."""
        with self._timed("create_executions"):
            return await create_many_op.create_executions(self._runtime, executions, connection)

    async def describe_execution(self, execution_id: str) -> ExecutionSnapshot | None:
        """The execution as it is now; None when there is none."""
        with self._timed("describe_execution"):
            return await describe_op.describe_execution(self._runtime, execution_id)

    async def list_executions(
        self,
        *,
        lane: str | None = None,
        public_state: PublicState | str | None = None,
        flow_id: str | None = None,
        namespace: str | None = None,
        tag: str | tuple[str, str] | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page[ExecutionSnapshot]:
        """A page of executions, newest ids first; pass a page's `next` as `after` for the following one.

        `tag` is ``"key=value"`` or a pair. Filters other than `public_state` and `flow_id` are applied while
        walking the index; a rare combination over many executions takes time.
        """
        page = describe_op.list_executions(
            self._runtime,
            lane=lane,
            public_state=public_state,
            flow_id=flow_id,
            namespace=namespace,
            tag=tag,
            after=after,
            limit=limit,
        )
        with self._timed("list_executions"):
            return await page

    async def list_attempts(self, execution_id: str) -> list[AttemptSnapshot]:
        """Every attempt of an execution, the first one first. `NotFound` for an unknown execution."""
        with self._timed("list_attempts"):
            return await describe_op.list_attempts(self._runtime, execution_id)

    async def get_execution_result(self, execution_id: str) -> bytes | None:
        """The bytes the execution was completed with; None when unknown, not completed, or without a result."""
        with self._timed("get_execution_result"):
            return await describe_op.get_execution_result(self._runtime, execution_id)

    async def wait_for_result(self, execution_id: str, *, timeout_ms: int) -> ExecutionSnapshot:
        """Wait until the execution has ended, woken by its completion. `TimeoutError` when the time is up."""
        return await wait_op.wait_for_result(self._runtime, execution_id, timeout_ms=timeout_ms)

    async def explain_execution(self, execution_id: str) -> Explanation:
        """Why the execution is where it is: what it waits for, since when, and the next step."""
        with self._timed("explain_execution"):
            return await explain_op.explain_execution(self._runtime, execution_id)

    # Claims and leases

    async def claim(
        self,
        lane: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 30_000,
        wait_ms: int = 0,
    ) -> Claim | None:
        """Take the best execution of a lane whose required capabilities this worker has.

        Highest priority first, then the oldest. With `wait_ms` the call waits for work to appear, woken by its
        creation; None when there was none. The lease must be renewed before `lease_ttl_ms` has passed.
        """
        call = claim_op.claim(
            self._runtime,
            lane,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            wait_ms=wait_ms,
        )
        # A call that waits for work says nothing about the database's speed.
        with self._timed("claim_wait" if wait_ms else "claim"):
            return await call

    async def claim_many(
        self,
        lane: str,
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 30_000,
        wait_ms: int = 0,
    ) -> list[Claim]:
        """Take up to `limit` executions (1..1,000) at once; with `wait_ms`, as soon as there is at least one.

        A batch takes whole requirement sets by the rank of their best execution, so its order is exact only
        among executions with equal requirements.
        """
        call = claim_op.claim_many(
            self._runtime,
            lane,
            limit,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            wait_ms=wait_ms,
        )
        with self._timed("claim_many_wait" if wait_ms else "claim_many"):
            return await call

    async def claim_resumed_execution(
        self, execution_id: str, *, worker_id: str, worker_instance_id: str, lease_ttl_ms: int = 30_000
    ) -> Claim:
        """Continue one execution that is `resumable`; `Contention(NOT_A_RESUMED_EXECUTION)` in any other state."""
        call = take_over_op.claim_resumed_execution(
            self._runtime,
            execution_id,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lease_ttl_ms=lease_ttl_ms,
        )
        with self._timed("claim_resumed_execution"):
            return await call

    async def claim_from_resume_grant(self, token: ResumeToken) -> Claim | None:
        """Take over one execution whose lease has run out, or that was interrupted; None while its lease lives."""
        with self._timed("claim_from_resume_grant"):
            return await take_over_op.claim_from_resume_grant(self._runtime, token)

    async def renew(self, handle: Handle) -> LeaseRenewal:
        """Extend a live lease by the ttl it was claimed with. An expired lease cannot be renewed."""
        with self._timed("renew"):
            return await renew_op.renew(self._runtime, handle)

    async def renew_many(self, handles: Sequence[Handle]) -> list[LeaseRenewal | EngineError]:
        """Renew up to 1,000 leases in one statement; one answer per handle, errors returned, not raised."""
        with self._timed("renew_many"):
            return await renew_op.renew_many(self._runtime, handles)

    async def release(self, handle: Handle) -> None:
        """Give the work back at once, for anybody; the attempt goes on and no reclaim is counted."""
        with self._timed("release"):
            await give_back_op.release(self._runtime, handle)

    async def progress(self, handle: Handle, *, percent: int | None = None, message: str | None = None) -> None:
        """Report progress (percent 0..100, message up to 1 KiB); what is None stays as it was."""
        with self._timed("progress"):
            await renew_op.progress(self._runtime, handle, percent=percent, message=message)

    async def complete(self, handle: Handle, result: bytes | None = None) -> None:
        """End the execution with success. A repeat by the same owner returns; the first result stays."""
        with self._timed("complete"):
            await complete_op.complete(self._runtime, handle, result)

    async def complete_many(self, items: Sequence[tuple[Handle, bytes | None]]) -> list[EngineError | None]:
        """Complete up to 1,000 executions; one answer per item, None for success, errors returned, not raised."""
        with self._timed("complete_many"):
            return await complete_op.complete_many(self._runtime, items)

    async def fail(self, handle: Handle, reason: str, classification: FailureClass) -> RetryScheduled | TerminalFailed:
        """End the attempt with a failure: a retry as the stored policy says, or the end of the execution."""
        with self._timed("fail"):
            return await fail_op.fail(self._runtime, handle, reason, classification)

    async def delay(self, handle: Handle, until_ms: int) -> None:
        """Give the work back until a time on the database clock; then the same attempt goes on."""
        with self._timed("delay"):
            await give_back_op.delay(self._runtime, handle, until_ms)

    async def wait_children(self, handle: Handle) -> None:
        """Give a flow member back until every edge into it is resolved; at once when none is open."""
        with self._timed("wait_children"):
            await give_back_op.wait_children(self._runtime, handle)

    async def assert_lease(self, handle: Handle, *, connection: asyncpg.Connection[Any]) -> None:
        """Raise unless the lease lives, and keep it from being taken until the caller's transaction ends.

        Do not await `complete` of the same execution inside that transaction: it waits for the commit.
        """
        with self._timed("assert_lease"):
            await assert_lease_op.assert_lease(handle, connection)

    # Suspension and signals

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

    # Signing keys

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
