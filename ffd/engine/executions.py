"""Creating executions and looking at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from ffd.core.policy import ExecutionPolicy
from ffd.core.records import (
    DAY_MS,
    AttemptSnapshot,
    Created,
    ExecutionSnapshot,
    Explanation,
    NewExecution,
    Page,
)
from ffd.core.state import PublicState
from ffd.engine.calls import Calls
from ffd.ops import create as create_op
from ffd.ops import create_many as create_many_op
from ffd.ops import describe as describe_op
from ffd.ops import explain as explain_op
from ffd.ops import wait as wait_op


class ExecutionCalls(Calls):
    """Create, describe, list, wait, explain."""

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
