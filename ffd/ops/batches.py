"""Batches of handles: parsed, sorted into lock order, each answered in the order it was given.

A handle that cannot be parsed is answered with its error and does not disturb the others; the same fence twice is
asked once and answered twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

from ffd.core.errors import EngineError, Validation, ValidationKind
from ffd.core.handles import Fence, Handle, Lease, read_lease
from ffd.core.limits import BATCH_MAX
from ffd.db.database import Row
from ffd.db.statement import Statement
from ffd.ops.runtime import Runtime

T = TypeVar("T")

_OPEN: Final = object()


class Batch(Generic[T]):
    """The distinct leases of a batch, in lock order, and the answers so far. Positions count from 1, as in SQL."""

    def __init__(self, size: int) -> None:
        self.leases: list[Lease] = []
        self._answers: list[Any] = []
        self._errors: dict[int, EngineError] = {}
        self._position_of: dict[int, int] = {}
        self._size = size

    @classmethod
    def of(cls, handles: Sequence[Handle], field: str) -> Batch[Any]:
        """Parse and sort the handles of a call."""
        if isinstance(handles, str | bytes) or not isinstance(handles, Sequence):
            raise Validation(ValidationKind.INVALID_INPUT, "expected a sequence", field)
        if len(handles) > BATCH_MAX:
            raise Validation(
                ValidationKind.INVALID_INPUT, f"{len(handles)} items, at most {BATCH_MAX} are allowed", field
            )
        batch: Batch[Any] = cls(len(handles))
        given: dict[Fence, tuple[Lease, list[int]]] = {}
        for at, handle in enumerate(handles):
            try:
                lease = read_lease(handle)
            except Validation as error:
                batch._errors[at] = error
            else:
                given.setdefault(lease.fence, (lease, []))[1].append(at)
        for position, fence in enumerate(sorted(given)):
            lease, places = given[fence]
            batch.leases.append(lease)
            for at in places:
                batch._position_of[at] = position
        batch._answers = [_OPEN] * len(batch.leases)
        return batch

    def first_given(self, values: Sequence[Any]) -> list[Any]:
        """For each lease the value given with its first handle."""
        chosen: dict[int, Any] = {}
        for at, value in enumerate(values):
            if at in self._position_of:
                chosen.setdefault(self._position_of[at], value)
        return [chosen[position] for position in range(len(self.leases))]

    def fences(self) -> tuple[list[int], list[Any], list[int], list[int]]:
        """The four arrays of the fence, in lock order."""
        return (
            [lease.partition_key for lease in self.leases],
            [lease.execution_id for lease in self.leases],
            [lease.attempt_index for lease in self.leases],
            [lease.lease_epoch for lease in self.leases],
        )

    def answer(self, i: int, value: T | EngineError) -> None:
        """Answer the lease at position `i`."""
        self._answers[i - 1] = value

    async def unanswered(self, runtime: Runtime, statement: Statement) -> list[tuple[int, Lease, Row | None]]:
        """The leases without an answer, each with what a classifying statement now says about it."""
        positions = [i for i, answer in enumerate(self._answers, 1) if answer is _OPEN]
        if not positions:
            return []
        leases = [self.leases[i - 1] for i in positions]
        rows = await runtime.db.fetch(
            statement,
            [lease.partition_key for lease in leases],
            [lease.execution_id for lease in leases],
            [lease.attempt_index for lease in leases],
        )
        found = {row["i"]: row for row in rows}
        return [(i, lease, found.get(at)) for at, (i, lease) in enumerate(zip(positions, leases, strict=True), 1)]

    def answers(self) -> list[T | EngineError]:
        """One answer per handle given, in that order."""
        return [
            self._errors[at] if at in self._errors else self._answers[self._position_of[at]] for at in range(self._size)
        ]
