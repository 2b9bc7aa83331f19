"""What workers call: claim, renew, and every way to give a lease back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import asyncpg

from ffd.core.errors import EngineError
from ffd.core.handles import Handle
from ffd.core.policy import FailureClass
from ffd.core.records import (
    Claim,
    LeaseRenewal,
    ResumeToken,
    RetryScheduled,
    TerminalFailed,
)
from ffd.engine.calls import Calls
from ffd.ops import assert_lease as assert_lease_op
from ffd.ops import claim as claim_op
from ffd.ops import complete as complete_op
from ffd.ops import fail as fail_op
from ffd.ops import give_back as give_back_op
from ffd.ops import renew as renew_op
from ffd.ops import take_over as take_over_op


class LeaseCalls(Calls):
    """Claims and the calls of a lease's owner."""

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
