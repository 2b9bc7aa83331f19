"""`ffd status`: who is alive, who owns what, what waits and what is overdue; once, and again and again."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from ffd import Engine, FlowSpec, NewExecution
from ffd.core.errors import Unavailable
from ffd.core.limits import PARTITIONS
from ffd.core.schedule import RECONCILERS
from ffd.daemon import status
from ffd.db.statement import Planning, Statement
from tests.cli.calls import Cli, act, call, claim, create, environment, execute, running, stop_clock, suspended

NOW = 1_714_564_800_000  # 2024-05-01T12:00:00Z
MINUTE = 60_000
NO_NODE = "no node is alive: nothing is being swept; start `ffd run`"


def add_node(dsn: str, node_id: str, partitions: range, *, started_ms: int, expires_ms: int) -> None:
    """A daemon's row, its times counted from now, and what it owns."""
    execute(
        dsn,
        "insert into ff_node values ($1, $2, '0.1.0', ff_now_ms() + $3::bigint, ff_now_ms(), ff_now_ms() + $4::bigint)",
        node_id,
        node_id.partition("-")[0],
        started_ms,
        expires_ms,
    )
    execute(dsn, "update ff_partition set node_id = $1 where partition_key = any ($2)", node_id, list(partitions))


def advance(dsn: str, ms: int) -> None:
    """Move a stopped clock."""
    execute(dsn, "update ff_test_clock set now_ms = now_ms + $1", ms)


def table_of(out: str, title: str) -> list[list[str]]:
    """The rows below a title, cell by cell."""
    lines = out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(title))
    return [re.split(r"  +", line) for line in "\n".join(lines[start + 1 :]).split("\n\n")[0].splitlines()]


def reconciler(document: Any, name: str) -> Any:
    (found,) = [each for each in document["reconcilers"] if each["reconciler"] == name]
    return found


# Nodes and partitions


def test_nodes_are_shown_the_living_first_with_what_they_own(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    add_node(cli.dsn, "lost-1", range(200, 256), started_ms=-90 * MINUTE, expires_ms=-3 * MINUTE)
    add_node(cli.dsn, "gone-1", range(0), started_ms=-90 * MINUTE, expires_ms=-2 * MINUTE)
    add_node(cli.dsn, "web-2", range(100, 200), started_ms=-5 * MINUTE, expires_ms=5_000)
    add_node(cli.dsn, "web-1", range(100), started_ms=-2_000, expires_ms=5_000)
    done = cli("status")
    assert (done.code, done.err) == (0, "")
    assert table_of(done.out, "NODE") == [
        ["web", "web-1", "0.1.0", "alive", "2s ago", "100"],
        ["web", "web-2", "0.1.0", "alive", "5m ago", "100"],
        ["gone", "gone-1", "0.1.0", "dead for 2m", "1h 30m ago", "0"],
        ["lost", "lost-1", "0.1.0", "dead for 3m", "1h 30m ago", "56 left behind"],
    ]
    assert NO_NODE not in done.out


def test_a_partition_is_unowned_without_an_owner_and_with_a_dead_one(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    add_node(cli.dsn, "web-1", range(100), started_ms=0, expires_ms=1)
    add_node(cli.dsn, "lost-1", range(100, 150), started_ms=0, expires_ms=0)
    assert "partitions   100 of 256 owned, 156 unowned\n" in cli("status").out
    execute(cli.dsn, "update ff_partition set node_id = 'web-1'")
    assert "partitions   256 of 256 owned\n" in cli("status").out
    advance(cli.dsn, 1)
    assert cli("status", "--json").json["partitions"] == {"total": 256, "owned": 0, "unowned": 256}


def test_without_a_living_node_it_says_that_nothing_is_swept(cli: Cli) -> None:
    assert cli("status").out.startswith(f"{NO_NODE}\n\npartitions   0 of 256 owned, 256 unowned\n")
    add_node(cli.dsn, "lost-1", range(256), started_ms=-MINUTE, expires_ms=-1)
    dead = cli("status")
    assert dead.code == 0
    assert dead.out.startswith(f"{NO_NODE}\n\nNODE ")


def test_of_a_daemon_that_crashes_again_and_again_the_last_nodes_are_shown(cli: Cli) -> None:
    execute(
        cli.dsn,
        "insert into ff_node select 'lost-' || at, 'lost', '0', 0, 0, at from generate_series(1, 60) at returning 1",
    )
    shown = cli("status", "--json").json
    assert [node["node_id"] for node in shown["nodes"]] == [f"lost-{at}" for at in range(60, 10, -1)]
    assert shown["nodes_left_out"] == 10
    assert "\n… and 10 more\n" in cli("status").out


def test_a_running_daemon_is_seen_with_all_its_partitions(cli: Cli) -> None:
    environ = environment(cli.dsn) | {"FFD_HTTP__BIND": "", "FFD_NODE__NAME": "web-1"}
    with subprocess.Popen(
        [sys.executable, "-m", "ffd.cli.main", "run"],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as daemon:
        try:
            deadline = time.monotonic() + 30
            while (shown := cli("status", "--json").json)["partitions"]["owned"] < PARTITIONS:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (node,) = shown["nodes"]
            assert (node["name"], node["is_alive"], node["partitions"]) == ("web-1", True, PARTITIONS)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(30) == 0
        finally:
            daemon.kill()
    assert cli("status", "--json").json["nodes"] == []


# Lanes


def test_a_lane_shows_what_waits_runs_sleeps_and_is_blocked(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    suspended(cli.dsn)
    running(cli.dsn)

    async def fill(engine: Engine) -> None:
        await engine.create_execution(delay_until_ms=NOW + 60 * MINUTE)
        await engine.submit_flow(FlowSpec({"a": NewExecution(), "b": NewExecution()}, [("a", "b")]))
        done = NewExecution(lane="done")
        await engine.create_executions([done])
        await engine.complete((await claim(engine, "done")).handle)

    act(cli.dsn, fill)
    advance(cli.dsn, MINUTE)
    create(cli.dsn)
    advance(cli.dsn, MINUTE)
    assert table_of(cli("status").out, "LANE") == [["default", "2", "2m", "1", "1", "1", "1"]]
    (lane,) = cli("status", "--json").json["lanes"]
    assert lane == {
        "lane": "default",
        "waiting": 2,
        "oldest_ms": 2 * MINUTE,
        "running": 1,
        "delayed": 1,
        "suspended": 1,
        "waiting_children": 1,
    }


def test_a_resumed_execution_waits_since_it_was_resumed(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    execution_id, _, _ = suspended(cli.dsn)
    advance(cli.dsn, 10 * MINUTE)
    act(cli.dsn, lambda engine: engine.resume_execution(execution_id, reason="test"))
    advance(cli.dsn, MINUTE)
    assert table_of(cli("status").out, "LANE") == [["default", "1", "1m", "0", "0", "0", "0"]]


def test_without_claimable_work_there_is_no_oldest(cli: Cli) -> None:
    running(cli.dsn)
    assert table_of(cli("status").out, "LANE") == [["default", "0", "-", "1", "0", "0", "0"]]


def test_the_largest_lanes_are_shown_and_the_others_counted(cli: Cli) -> None:
    lanes = [f"lane-{at:02}" for at in range(25)]
    act(cli.dsn, lambda engine: engine.create_executions([NewExecution(lane=lane) for lane in [*lanes, *lanes[20:]]]))
    shown = cli("status").out
    assert [row[0] for row in table_of(shown, "LANE")][:20] == [*lanes[20:], *lanes[:15]]
    assert "\n… and 5 more; --lanes shows them\n" in shown
    few = cli("status", "--lanes", "2", "--json").json
    assert [(lane["lane"], lane["waiting"]) for lane in few["lanes"]] == [("lane-20", 2), ("lane-21", 2)]
    assert few["lanes_left_out"] == 23
    assert len(cli("status", "--lanes", "25", "--json").json["lanes"]) == 25


def test_no_open_execution_is_said_in_words(cli: Cli) -> None:
    assert "\nno executions that have not ended\n" in cli("status").out


def test_a_backlog_too_large_to_count_hides_nothing_else(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Statement("count_lanes", "select pg_sleep(60 + $1::int)", Planning.READ)
    monkeypatch.setattr(status, "COUNT_LANES", slow)
    monkeypatch.setenv("FFD_DATABASE__STATEMENT_TIMEOUT_MS", "1000")
    done = cli("status")
    assert done.code == 0
    assert "\nlanes: too much to count within database.statement_timeout_ms\n" in done.out
    assert len(table_of(done.out, "RECONCILER")) == len(RECONCILERS)


# Reconcilers


def test_every_reconciler_is_shown_and_nothing_due_is_a_dash(cli: Cli) -> None:
    assert table_of(cli("status").out, "RECONCILER") == [[name, "-", "-", "-"] for name in RECONCILERS]


def test_due_rows_are_counted_by_partition_with_the_lag_of_the_oldest(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    for at in (1, 1, 2, 3):
        create(cli.dsn, execution_id=f"{{fp:{at}}}:{uuid4()}", delay_until_ms=NOW + at * MINUTE)
    assert reconciler(cli("status", "--json").json, "delayed_promoter")["due_partitions"] == 0
    advance(cli.dsn, 2 * MINUTE)
    assert ["delayed_promoter", "2 partitions", "1m", "-"] in table_of(cli("status").out, "RECONCILER")
    assert reconciler(cli("status", "--json").json, "delayed_promoter") == {
        "reconciler": "delayed_promoter",
        "due_partitions": 2,
        "lag_ms": MINUTE,
        "quarantined": 0,
    }


def test_an_expired_lease_that_nobody_sweeps_is_overdue(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    running(cli.dsn)
    advance(cli.dsn, 30_000 + 5_000)
    assert ["lease_expiry", "1 partition", "5s", "-"] in table_of(cli("status").out, "RECONCILER")


def test_what_is_due_by_retention_follows_from_the_configuration(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_clock(cli.dsn, NOW)

    async def finish(engine: Engine) -> None:
        await engine.create_execution()
        await engine.complete((await claim(engine)).handle)

    act(cli.dsn, finish)
    advance(cli.dsn, 10_000)
    assert reconciler(cli("status", "--json").json, "retention")["due_partitions"] == 0
    monkeypatch.setenv("FFD_RETENTION__EXECUTION_MS", "3000")
    due = reconciler(cli("status", "--json").json, "retention")
    assert (due["due_partitions"], due["lag_ms"]) == (1, 7_000)


def test_rows_without_a_time_of_their_own_lag_since_they_are_as_they_are(cli: Cli) -> None:
    """Work that was granted to a worker, and of whose grant there is no trace."""
    stop_clock(cli.dsn, NOW)
    create(cli.dsn)
    execute(cli.dsn, "update ff_exec_core set eligibility_state = 'pending_claim'")
    advance(cli.dsn, 3_000)
    shown = reconciler(cli("status", "--json").json, "lease_expiry")
    assert (shown["due_partitions"], shown["lag_ms"]) == (1, 3_000)


def test_quarantined_rows_are_counted_until_their_time_comes(cli: Cli) -> None:
    stop_clock(cli.dsn, NOW)
    execute(
        cli.dsn,
        "insert into ff_quarantine select 7, n, gen_random_uuid(), 1, 'KeyError', $1::bigint, $1::bigint + at * 1000"
        " from (values ('dependency', 1), ('dependency', 2), ('retention', 3)) v(n, at)",
        NOW,
    )
    shown = cli("status").out
    assert "\nquarantined  3 rows\n" in shown
    assert ["dependency", "-", "-", "2"] in table_of(shown, "RECONCILER")
    advance(cli.dsn, 2_000)
    later = cli("status", "--json").json
    assert (later["quarantined"], reconciler(later, "retention")["quarantined"]) == (1, 1)
    assert "\nquarantined  1 row\n" in cli("status").out


# Output and usage


def test_json_is_one_object_on_the_databases_clock(dsn: str) -> None:
    stop_clock(dsn, NOW)
    add_node(dsn, "web-1", range(256), started_ms=-1, expires_ms=1)
    shown = call("status", "--json", dsn=dsn)
    assert shown.out.count("\n") == 1
    assert set(shown.json) == {
        *("now_ms", "nodes", "nodes_left_out", "partitions", "lanes", "lanes_left_out", "reconcilers", "quarantined")
    }
    assert shown.json["now_ms"] == NOW
    assert shown.json["nodes"] == [
        {
            "node_id": "web-1",
            "name": "web",
            "version": "0.1.0",
            "is_alive": True,
            "started_at_ms": NOW - 1,
            "heartbeat_at_ms": NOW,
            "expires_at_ms": NOW + 1,
            "partitions": 256,
        }
    ]


def test_looking_changes_nothing(cli: Cli) -> None:
    running(cli.dsn)
    suspended(cli.dsn)
    before = stored(cli.dsn)
    assert cli("status").code == 0
    assert stored(cli.dsn) == before


def stored(dsn: str) -> dict[str, str]:
    """A digest of every table."""
    tables = execute(dsn, "select array_agg(tablename) from pg_tables where schemaname = 'public'")
    digest = "select md5(coalesce(string_agg(t::text, '|' order by t::text), '')) from {} t"
    return {table: execute(dsn, digest.format(table)) for table in tables}


@pytest.mark.parametrize(
    "line",
    [
        ("--interval", "5"),
        ("--watch", "--interval", "0"),
        ("--watch", "--interval", "3601"),
        ("--watch", "--interval", "nan"),
        ("--lanes", "0"),
        ("--lanes", "1001"),
        ("extra",),
    ],
    ids=" ".join,
)
def test_a_wrong_option_exits_2_before_the_database_is_asked(cli_down: Cli, line: tuple[str, ...]) -> None:
    assert cli_down("status", *line).code == 2


# Watching


def heed_ctrl_c() -> None:
    """A suite that runs in the background has SIGINT ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def watching(dsn: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run `ffd status --watch`, stdout a pipe."""
    with subprocess.Popen(
        [sys.executable, "-m", "ffd.cli.main", "status", "--watch", "--interval", "1", *options],
        env=environment(dsn),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C: the watch ends well. What it said on stderr."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return err


def test_a_watch_gives_one_json_object_a_line_until_ctrl_c(dsn: str) -> None:
    with watching(dsn, "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        create(dsn, lane="mail")
        second = json.loads(process.stdout.readline())
        assert (first["lanes"], second["lanes"][0]["lane"]) == ([], "mail")
        assert 900 <= second["now_ms"] - first["now_ms"] < 20_000
        assert stop(process) == ""


def test_a_watch_in_words_starts_each_sample_with_its_time(dsn: str) -> None:
    with watching(dsn) as process:
        assert process.stdout is not None
        times = [line for line in (process.stdout.readline() for _ in range(40)) if re.match(r"\d{4}-\d\d-\d\dT", line)]
        assert len(times) >= 2
        assert stop(process) == ""


def test_a_watch_survives_that_the_database_goes_away(dsn: str) -> None:
    server, _, name = dsn.rpartition("/")
    with watching(dsn, "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        away(f"{server}/postgres", name, f"{name}_away")
        trouble = json.loads(process.stderr.readline())["error"]
        assert trouble["code"] == "unavailable"
        execute(f"{server}/postgres", f"alter database {name}_away rename to {name}")
        create(dsn, lane="back")
        while not json.loads(process.stdout.readline())["lanes"]:
            pass
        stop(process)


def away(dsn: str, old: str, new: str) -> None:
    """Take a database away from those who are connected to it, and from those who come back."""
    ended = "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity where datname = $1"
    for left in reversed(range(50)):
        execute(dsn, ended, old)
        try:
            execute(dsn, f"alter database {old} rename to {new}")
        except asyncpg.ObjectInUseError:
            assert left, "somebody is always connected"
        else:
            return


def test_a_watch_that_never_reaches_a_database_exits_4(cli_down: Cli) -> None:
    assert cli_down("status", "--watch").code == 4


class Terminal:
    """A watch on a terminal of 60 columns and 12 lines."""

    def __init__(self, dsn: str) -> None:
        self.master, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ffd.cli.main", "status", "--watch", "--interval", "1"],
            env=environment(dsn) | {"TERM": "xterm", "COLUMNS": "60", "LINES": "12"},
            stdin=end,
            stdout=end,
            stderr=end,
            preexec_fn=heed_ctrl_c,
        )
        os.close(end)
        self._seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def frame(self) -> tuple[str, list[str]]:
        """How the next frame starts, and the lines that then stand on the screen."""
        while "\x1b[J" not in self._seen:
            self._seen += os.read(self.master, 4096).decode(errors="replace")
        frame, _, self._seen = self._seen.partition("\x1b[J")
        start, _, rest = frame.partition("\x1b[H")
        return f"{start}\x1b[H", rest.replace("\x1b[K", "").splitlines()


def test_on_a_terminal_each_sample_takes_the_place_of_the_last(dsn: str) -> None:
    with Terminal(dsn) as terminal:
        first, second = terminal.frame(), terminal.frame()
        assert (first[0], second[0]) == ("\x1b[2J\x1b[H", "\x1b[H")
        for _, lines in (first, second):
            assert re.fullmatch(r"\d{4}-\S+Z  every 1s, Ctrl-C ends", lines[0])
            assert lines[2] == NO_NODE
            assert lines[-1] == "… enlarge the window to see the rest"
            assert len(lines) == 11
            assert max(map(len, lines)) <= 60
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0


def test_on_a_terminal_the_last_sample_stays_while_the_database_is_away(dsn: str) -> None:
    server, _, name = dsn.rpartition("/")
    with Terminal(dsn) as terminal:
        _, lines = terminal.frame()
        away(f"{server}/postgres", name, f"{name}_away")
        while not lines[1].startswith("the database is unavailable: "):
            _, lines = terminal.frame()
        assert lines[3] == NO_NODE
        execute(f"{server}/postgres", f"alter database {name}_away rename to {name}")
        while lines[1]:
            _, lines = terminal.frame()


def test_a_watch_in_words_says_once_that_the_database_is_away(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, Unavailable("look", "ConnectionRefusedError"), Unavailable("look", "ConnectionRefusedError")])
    real = status.read_status

    async def look(*arguments: Any) -> status.Status:
        trouble = next(looks, KeyboardInterrupt())
        if trouble is not None:
            raise trouble
        return await real(*arguments)

    monkeypatch.setattr(status, "read_status", look)
    done = cli("status", "--watch", "--interval", "1")
    assert done.code == 0
    assert done.out.count("RECONCILER") == 1
    assert done.err == "the database is unavailable: connection refused; trying again\n"
