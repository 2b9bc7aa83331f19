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
    examples = {path.name for path in (project_root / "examples").glob("*.py")}
    assert examples == {"build_pipeline.py", "deploy_approval.py", "provider_race.py"}


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


@pytest.mark.parametrize("variable", ["DSN", "FFD_DATABASE__DSN"])
async def test_a_build_publishes_what_test_and_lint_have_passed(project_root: Path, dsn: str, variable: str) -> None:
    for _ in range(2):
        told = run(project_root, "build_pipeline.py", **{variable: dsn})
        assert told[:2] == [
            "the build is submitted, publish is waiting_children",
            "checkout starts, given nothing",
        ]
        # Side by side: either may be first.
        assert sorted(told[2:4]) == ["lint starts, given commit 4f2a", "test starts, given commit 4f2a"]
        assert told[4:] == [
            "publish starts, given 212 tests passed and no complaints",
            "the build is completed: web v42",
        ]
    sql = await asyncpg.connect(dsn)
    try:
        outcomes = await sql.fetch("select outcome from ff_completion_event")
        assert [row["outcome"] for row in outcomes] == ["success"] * 8
        assert await sql.fetchval("select count(*) from ff_edge where resolution = 'satisfied'") == 8
    finally:
        await sql.close()


@pytest.mark.parametrize("variable", ["DSN", "FFD_DATABASE__DSN"])
async def test_the_first_of_three_providers_wins(project_root: Path, dsn: str, variable: str) -> None:
    told = [
        "three workers ask three providers",
        "swift answers first",
        "steady may stop, its renewal is refused: lease_conflict",
        "silent is too late, its answer is refused: lease_conflict",
        "swift is completed: 42 EUR",
        "steady is cancelled: no answer",
        "silent is cancelled: no answer",
        "the race is completed",
    ]
    assert run(project_root, "provider_race.py", **{variable: dsn}) == told
    assert run(project_root, "provider_race.py", **{variable: dsn}) == told
    sql = await asyncpg.connect(dsn)
    try:
        lost = await sql.fetch(
            "select distinct cancelled_by, cancellation_reason, result from ff_exec_core where cancelled_by is not null"
        )
        assert [tuple(row.values()) for row in lost] == [("flow_cascade", "sibling_quorum_satisfied", None)]
        assert await sql.fetchval("select count(*) from ff_cascade_owed") == 0
    finally:
        await sql.close()
