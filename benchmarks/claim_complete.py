"""Claim and complete, one execution per call: what the engine adds to its own two statements.

Eight workers share one event loop. `asyncpg` sends the engine's statements from a bare loop with a connection per
worker and the same session settings: no pool, no checks, no handles, no metrics, no doorbell. pgbench does the
same without Python, which shows how much of the time is the server's.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg

from benchmarks.bench import Bench, Spent, settle
from benchmarks.report import Bound, Figure, Finding, compare
from benchmarks.workload import LEASE_TTL_MS, RESULT, WORKERS, fill, one_at_a_time, side_by_side
from ffd import Engine
from ffd.config import DatabaseSettings
from ffd.db.database import open_connection, session_settings
from ffd.db.statement import Planning, Statement
from ffd.dev.postgres import find_binaries
from ffd.ops.claim import CLAIM
from ffd.ops.complete import COMPLETE

BOUND: Final = Bound("at least", 0.75)
_ENGINE, _ASYNCPG, _PGBENCH = "engine", "asyncpg", "pgbench"


async def run(bench: Bench) -> list[Finding]:
    """Measure the three in turns, each slice on a lane of its own."""
    slices = bench.size(5, 1)
    count = bench.size(800, 240)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(bench.database())
        engine = await stack.enter_async_context(Engine.connect(dsn, pool_max=WORKERS))
        settings = DatabaseSettings(dsn=dsn)
        connections = [await open_connection(settings, Planning.GENERIC) for _ in range(WORKERS)]
        for connection in connections:
            stack.push_async_callback(connection.close)
        pgbench = _Pgbench(settings, stack.enter_context(tempfile.TemporaryDirectory(prefix="ffd-bench-")))

        async def through_engine(part: str) -> Spent:
            return await one_at_a_time(engine, f"{_ENGINE}-{part}", count)

        async def through_asyncpg(part: str) -> Spent:
            return await bare_loop(connections, f"{_ASYNCPG}-{part}", count)

        async def through_pgbench(part: str) -> Spent:
            return await pgbench.run(f"{_PGBENCH}-{part}", count)

        async def prepare(parts: list[str]) -> None:
            for name in variants:
                for part in parts:
                    await fill(engine, f"{name}-{part}", count)
            await settle(dsn)

        variants = {_ENGINE: through_engine, _ASYNCPG: through_asyncpg}
        if pgbench.is_available:
            variants[_PGBENCH] = through_pgbench
        await prepare(["warm-up"])
        for variant in variants.values():
            await variant("warm-up")
        return _findings(count * slices, await bench.in_slices("claim_complete", variants, slices, prepare))


def _findings(count: int, spent: dict[str, list[Spent]]) -> list[Finding]:
    rates = {name: [Figure(count / each.wall_s, "/s", name) for each in rounds] for name, rounds in spent.items()}
    cpu = {name: [Figure(each.cpu_s / count * 1e6, "µs", name) for each in rounds] for name, rounds in spent.items()}
    what = f"claim+complete, {WORKERS} workers"
    findings = [compare(what, rates[_ENGINE], rates[_ASYNCPG], BOUND)]
    if _PGBENCH in rates:
        findings.append(compare(what, rates[_ENGINE], rates[_PGBENCH]))
    else:
        findings.append(Finding(what, findings[0].measured, against_text="pgbench: not available"))
    findings.append(compare("client CPU per claim+complete", cpu[_ENGINE], cpu[_ASYNCPG]))
    return findings


async def bare_loop(connections: list[asyncpg.Connection[Any]], lane: str, count: int) -> Spent:
    """The engine's statements and nothing around them."""

    async def worker(number: int) -> None:
        connection = connections[number]
        for _ in range(count // WORKERS):
            (row,) = await connection.fetch(CLAIM.sql, lane, [], "bench", f"bench-{number}", LEASE_TTL_MS)
            partition_key, execution_id, _, attempt_index, _, _, lease_epoch, _, _ = row
            done = await connection.fetch(COMPLETE.sql, partition_key, execution_id, attempt_index, lease_epoch, RESULT)
            if not done:
                raise RuntimeError("a completion was refused")

    return await side_by_side(worker)


class _Pgbench:
    """The same two statements from pgbench, prepared, with the same session settings."""

    def __init__(self, settings: DatabaseSettings, directory: str) -> None:
        self._settings = settings
        self._script = Path(directory, "claim_complete.sql")
        self._program = find_binaries() / "pgbench"
        self._script.write_text(
            f"{_with_variables(CLAIM, _CLAIM_VARIABLES)} \\gset\n{_with_variables(COMPLETE, _COMPLETE_VARIABLES)};\n"
        )

    @property
    def is_available(self) -> bool:
        """Not every packaging of the server brings it."""
        return self._program.is_file()

    async def run(self, lane: str, count: int) -> Spent:
        """Claim and complete `count` executions of a lane. pgbench counts its own time, from connected on."""
        each = count // WORKERS
        options = ["--no-vacuum", "--protocol=prepared", f"--client={WORKERS}", f"--transactions={each}"]
        variables = {"lane": lane, "capabilities": "{}", "worker": "bench", "ttl": LEASE_TTL_MS, "result": "done"}
        defines = [f"--define={name}={value}" for name, value in variables.items()]
        process = await asyncio.create_subprocess_exec(
            self._program,
            *options,
            *defines,
            f"--file={self._script}",
            env=self._environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode()
        rate = re.search(r"tps = ([\d.]+) \(without initial connection time\)", output)
        if process.returncode != 0 or rate is None or f"{count}/{count}" not in output:
            raise RuntimeError(f"pgbench did not do its work:\n{output}")
        return Spent(count / float(rate[1]), 0.0)

    def _environment(self) -> dict[str, str]:
        address = urlsplit(str(self._settings.dsn))
        pinned = session_settings(self._settings, Planning.GENERIC)
        return {
            **os.environ,
            "PGHOST": str(address.hostname),
            "PGPORT": str(address.port),
            "PGUSER": str(address.username),
            "PGPASSWORD": str(address.password),
            "PGDATABASE": address.path.lstrip("/"),
            "PGOPTIONS": " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in pinned.items()),
        }


# What each parameter is called in the script. \gset names the claim's columns after themselves.
_CLAIM_VARIABLES: Final = ("lane", "capabilities", "worker", "worker", "ttl")
_COMPLETE_VARIABLES: Final = ("partition_key", "execution_id", "attempt_index", "lease_epoch", "result")


def _with_variables(statement: Statement, names: tuple[str, ...]) -> str:
    """The statement in pgbench's notation, without comments: a colon in one would read as a variable."""
    sql = re.sub(r"/\*.*?\*/|--[^\n]*", "", statement.sql, flags=re.DOTALL)
    return re.sub(r"\$(\d+)", lambda match: f":{names[int(match[1]) - 1]}", sql).strip()
