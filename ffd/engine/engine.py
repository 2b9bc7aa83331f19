"""The engine, put together from its groups of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ffd.config import DatabaseSettings, OutboxSettings, dsn_problem
from ffd.core.checks import check_int, check_text
from ffd.core.errors import Validation, ValidationKind
from ffd.engine.control import ControlCalls
from ffd.engine.executions import ExecutionCalls
from ffd.engine.flows import FlowCalls
from ffd.engine.leases import LeaseCalls
from ffd.engine.suspension import SuspensionCalls
from ffd.ops.runtime import open_runtime


class Engine(ExecutionCalls, LeaseCalls, SuspensionCalls, ControlCalls, FlowCalls):
    """One process's access to the engine. Safe to share between tasks of one event loop; make it once.

    Use `Engine.connect`. Operations raise `EngineError`s only (see `ffd.core.errors`): `Validation` for bad
    input, before anything changed; `NotFound`; `Contention` and `State` for a lost race or a wrong state;
    `Unavailable` when the database cannot be reached.
    """

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
