"""The examples run as they are, with nothing but a database, and say what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

pytestmark = pytest.mark.anyio


def run(project_root: Path, name: str, **environment: str) -> list[str]:
    """An example's output, line by line. Every warning is an error."""
    kept = {key: value for key, value in os.environ.items() if key not in ("DSN", "FFD_DATABASE__DSN")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(project_root / "examples" / name)],
        env={**kept, **environment},
        cwd=project_root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_every_example_is_run(project_root: Path) -> None:
    assert {path.name for path in (project_root / "examples").glob("*.py")} == {"deploy_approval.py"}


@pytest.mark.parametrize("variable", ["DSN", "FFD_DATABASE__DSN"])
async def test_two_different_people_approve_a_deploy(project_root: Path, dsn: str, variable: str) -> None:
    """Show 3; run twice: the key of the first run is used by the second."""
    told = [
        "deploy of web v42 waits for two people, for an hour at most; no worker is held",
        "alice approves: appended_to_waitpoint",
        "alice approves: counted already",
        "the deploy is still suspended: one person is not enough",
        "bob approves: resume_condition_satisfied",
        "a worker goes on: approved by alice and bob",
        "done: deployed",
    ]
    assert run(project_root, "deploy_approval.py", **{variable: dsn}) == told
    assert run(project_root, "deploy_approval.py", **{variable: dsn}) == told
    sql = await asyncpg.connect(dsn)
    try:
        outcomes = await sql.fetch("select outcome from ff_completion_event order by event_id")
        assert [row["outcome"] for row in outcomes] == ["resumable", "success"] * 2
        assert await sql.fetchval("select count(*) from ff_waitpoint_hmac") == 1
        assert await sql.fetchval("select count(*) from ff_waitpoint_pending") == 0
        waited = await sql.fetchrow("select timeout_behavior, reason_code from ff_suspension_current limit 1")
        assert waited is not None
        assert tuple(waited.values()) == ("cancel", "waiting_for_approval")
    finally:
        await sql.close()
