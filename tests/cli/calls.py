"""Ways to call `ffd`: as a process, in this process, and the engine beside it to prepare and to look."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import asyncpg
import pytest

from ffd import ByName, Claim, Engine, Fresh, Single, Suspend, Suspended
from ffd.cli.main import run
from tests.support import WORKER, install_clock

T = TypeVar("T")

UNREACHABLE = "postgresql://bob:hunter2@127.0.0.1:1/app"
NOBODY = "{fp:7}:01900000-0000-7000-8000-000000000000"
NO_UUID = "01900000-0000-7000-8000-000000000000"
SECRET = "ab" * 32


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout; nothing may stand beside it."""
        assert self.err == ""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The error object on stderr; stdout is empty then."""
        assert self.out == ""
        return json.loads(self.err)["error"]


def environment(dsn: str | None) -> dict[str, str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("FFD_", "PG"))}
    return environ | ({} if dsn is None else {"FFD_DATABASE__DSN": dsn})


def call(
    *arguments: str, dsn: str | None, cwd: Path | None = None, stdin: str = "", environ: dict[str, str] | None = None
) -> Done:
    """Run `ffd` as a process, stdin a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "ffd.cli.main", *arguments],
        env=environment(dsn) | (environ or {}),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Cli:
    """Runs `ffd` in this process; a fifth of the time, all but the interpreter's start and end."""

    def __init__(self, dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("FFD_DATABASE__DSN", dsn)
        self.dsn = dsn
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, stdin: str = "", is_terminal: bool = False) -> Done:
        """Run one command line; with `is_terminal` its stdin counts as one."""
        stream = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        if is_terminal:
            self._monkeypatch.setattr(stream, "isatty", lambda: True)
        self._monkeypatch.setattr(sys, "stdin", stream)
        code = run(arguments)
        captured = self._capsys.readouterr()
        return Done(code, captured.out, captured.err)


def act(dsn: str, work: Callable[[Engine], Awaitable[T]]) -> T:
    """Do something with an engine."""

    async def go() -> T:
        async with Engine.connect(dsn) as engine:
            return await work(engine)

    return asyncio.run(go())


def execute(dsn: str, query: str, *args: Any) -> Any:
    """Look behind the engine's back."""

    async def go() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(query, *args)
        finally:
            await connection.close()

    return asyncio.run(go())


def stop_clock(dsn: str, now_ms: int) -> None:
    """Let the time on the database clock be `now_ms` from now on."""

    async def go() -> None:
        connection = await asyncpg.connect(dsn)
        try:
            await install_clock(connection)
            await connection.execute("update ff_test_clock set now_ms = $1", now_ms)
        finally:
            await connection.close()

    asyncio.run(go())


def create(dsn: str, **fields: Any) -> str:
    """A new execution's id."""
    return act(dsn, lambda engine: engine.create_execution(**fields)).execution_id


async def claim(engine: Engine, lane: str = "default") -> Claim:
    """A claim that must succeed."""
    claimed = await engine.claim(lane, **WORKER)
    assert claimed is not None
    return claimed


def running(dsn: str, **fields: Any) -> Claim:
    """A new execution, claimed."""

    async def work(engine: Engine) -> Claim:
        await engine.create_execution(**fields)
        return await claim(engine, fields.get("lane", "default"))

    return act(dsn, work)


def completed(dsn: str, result: bytes | None, **fields: Any) -> str:
    """A new execution, completed."""

    async def work(engine: Engine) -> str:
        await engine.create_execution(**fields)
        claimed = await claim(engine, fields.get("lane", "default"))
        await engine.complete(claimed.handle, result)
        return claimed.execution_id

    return act(dsn, work)


def suspended(dsn: str, **options: Any) -> tuple[str, str, str]:
    """A new execution that waits for `approve`: its id, the waitpoint's and the token."""

    async def work(engine: Engine) -> tuple[str, str, str]:
        await engine.seed_waitpoint_hmac_secret("k1", SECRET)
        await engine.create_execution()
        claimed = await claim(engine)
        waits = Suspend([Fresh("approval")], Single("approval", ByName("approve")), **options)
        answer = await engine.suspend(claimed.handle, waits)
        assert isinstance(answer, Suspended)
        (waitpoint,) = answer.waitpoints
        return claimed.execution_id, waitpoint.waitpoint_id, waitpoint.token

    return act(dsn, work)
