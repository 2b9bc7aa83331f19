"""Log lines: one form or the other, and never a secret (I8)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Literal

import anyio
import asyncpg
import pytest
import structlog

from ffd.config import LogSettings
from ffd.daemon import tasks as tasks_module
from ffd.daemon.tasks import Task, Tasks
from ffd.telemetry.logging import configure, get_logger

pytestmark = pytest.mark.anyio

HIDDEN = "hunter2"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


async def fail_once(error: Exception) -> None:
    tasks = Tasks()
    has_failed = False

    async def body(_task: Task) -> None:
        nonlocal has_failed
        dsn = f"postgresql://u:{HIDDEN}@h/d"
        if not has_failed:
            has_failed = True
            raise error
        assert dsn

    await tasks.run("t", body)


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("error", [ZeroDivisionError("x"), asyncpg.DataError(f"DETAIL: row contains {HIDDEN}")])
async def test_what_a_failed_task_held_in_its_hands_is_not_logged(
    form: Literal["json", "console"],
    error: Exception,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks_module, "BACKOFF_S", (0.001,))
    configure(LogSettings(format=form))
    await fail_once(error)
    shown = capsys.readouterr().err
    assert "task_failed" in shown
    assert type(error).__name__ in shown
    assert HIDDEN not in shown


async def test_a_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, _text: str) -> None:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return False

    configure(LogSettings())
    monkeypatch.setattr(sys, "stderr", Gone())
    get_logger("test").warning("lost")
    await anyio.lowlevel.checkpoint()


async def test_the_level_is_heeded(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(level="warning", format="json"))
    get_logger("test").info("quiet")
    get_logger("test").warning("loud", id="7")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line) | {"timestamp": ""} == {
        "event": "loud",
        "id": "7",
        "component": "test",
        "level": "warning",
        "timestamp": "",
    }
