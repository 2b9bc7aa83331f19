"""What every group of calls shares: the runtime, and the time each call takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from ffd.core.errors import ContentionKind, EngineError, StateKind
from ffd.ops.runtime import Runtime
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


class Calls:
    """Calls on one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._timers: dict[str, Callable[[float], None]] = {}

    def _timed(self, operation: str) -> _Timed:
        timed = self._timers.get(operation)
        if timed is None:
            timed = self._timers[operation] = OPERATION_DURATION_SECONDS.labels(operation, "ok").observe
        return _Timed(operation, timed)
