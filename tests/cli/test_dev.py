"""`ffd dev` as a process: it prints a DSN that works, keeps its data and stops when told."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import asyncpg
import pytest

from ffd.db.migration_files import discover

STOP_WITHIN_S = 10.0


@contextmanager
def dev(data_dir: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `ffd dev` from the directory that holds its data; stdout is a pipe, as for a program."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("FFD_DATABASE__")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ffd.cli.main", "dev", *options],
        cwd=data_dir.parent,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def out(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def err(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stderr is not None
    return process.stderr


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    started = time.monotonic()
    process.send_signal(number)
    assert process.wait(60) == 0, err(process).read()
    assert time.monotonic() - started < STOP_WITHIN_S
    assert err(process).read() == ""
    return out(process).read()


def execute(dsn: str, query: str) -> Any:
    async def go() -> Any:
        conn = await asyncpg.connect(dsn)
        try:
            return await conn.fetchval(query)
        finally:
            await conn.close()

    return asyncio.run(go())


def test_dev_prints_a_dsn_keeps_its_data_and_stops_on_signals(tmp_path: Path) -> None:
    data_dir = tmp_path / ".ffd"
    count = "select count(*) from ff_schema_migration"
    with dev(data_dir) as process:
        lines = []
        while "Ctrl-C stops it" not in lines:
            lines.append(out(process).readline().rstrip("\n"))
            assert lines[-1], err(process).read()
        (dsn,) = [line.removeprefix("DSN  ") for line in lines if line.startswith("DSN  ")]
        assert re.fullmatch(r"postgresql://\S+/ffd", dsn)
        assert execute(dsn, "select current_database()") == "ffd"
        assert execute(dsn, count) == len(discover())
        execute(dsn, "create table kept as select 42 as answer")
        stop(process, signal.SIGINT)
    assert data_dir.is_dir()
    with dev(data_dir, "--json") as process:
        ready = json.loads(out(process).readline())
        assert ready["data_dir"] == str(data_dir.resolve())
        assert execute(ready["dsn"], "select answer from kept") == 42
        assert stop(process, signal.SIGTERM) == ""


def test_a_second_dev_on_the_same_data_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with dev(data_dir, "--json", "--data-dir", "data") as first:
        dsn = json.loads(out(first).readline())["dsn"]
        with dev(data_dir, "--json", "--data-dir", "data") as second:
            assert second.wait(60) == 1
            error = json.loads(err(second).read())["error"]
        assert error["code"] == "embedded_postgres"
        assert "already runs" in error["message"]
        assert execute(dsn, "select 1") == 1
        stop(first, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dev_can_be_stopped_while_it_starts(tmp_path: Path, number: signal.Signals) -> None:
    data_dir = tmp_path / ".ffd"
    with dev(data_dir) as process:
        assert out(process).readline().startswith("starting PostgreSQL")
        time.sleep(0.2)
        assert "DSN" not in stop(process, number)
    # What the interrupted start left does not hinder the next one.
    with dev(data_dir, "--json") as process:
        assert execute(json.loads(out(process).readline())["dsn"], "select 1") == 1
        stop(process, number)


def test_dev_ends_when_its_database_does(tmp_path: Path) -> None:
    data_dir = tmp_path / ".ffd"
    with dev(data_dir, "--json") as process:
        out(process).readline()
        pid = int((data_dir / "cluster" / "postmaster.pid").read_text().splitlines()[0])
        os.kill(pid, signal.SIGKILL)
        assert process.wait(60) == 1
        assert "ended by itself" in json.loads(err(process).read())["error"]["message"]


def test_dev_refuses_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "ffd.toml").write_text("[database]\npool_max = 0")
    with dev(tmp_path / ".ffd") as process:
        assert process.wait(60) == 2
        assert "database.pool_max" in err(process).read()
    assert not (tmp_path / ".ffd").exists()
