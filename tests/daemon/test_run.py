"""`ffd run`, as a process: start, serve, reload, drain, and what the service manager hears."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from ffd.cli.output import EXIT_USAGE
from ffd.db.migrations import migrate
from ffd.dev.postgres import EmbeddedPostgres
from tests.daemon.processes import Manager, Run, running

HIDDEN = "hunter2-is-secret"


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


def query(dsn: str, sql: str, *args: Any) -> Any:
    async def ask() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(sql, *args)
        finally:
            await connection.close()

    return asyncio.run(ask())


def ready(dsn: str, *arguments: str, **settings: str) -> Any:
    return running(*arguments, FFD_DATABASE__DSN=dsn, **settings)


def test_it_starts_serves_and_drains(dsn: str) -> None:
    """V-132: one node owns all 256, answers its three pages, and leaves nothing behind."""
    with ready(dsn) as run:
        run.wait_for("ready")
        assert run.wait_for("partitions_changed")["owned"] == 256
        assert json.loads(run.get("/livez")[1]) == {
            "status": "ok",
            "checks": {"tasks": "ok"},
            "restarted_tasks": {},
        }
        code, body = run.get("/readyz")
        assert code == 200
        assert set(json.loads(body)["checks"]) == {
            "database",
            "schema",
            "ownership",
            "listener",
            "tasks",
            "draining",
        }
        assert run.get("/nothing")[0] == 404
        assert run.metric("ffd_partitions_owned") == 256
        assert query(dsn, "select count(*) from ff_partition where node_id is not null") == 256
        assert run.end(signal.SIGTERM) == 0
        assert run.events()[-3:] == ["stopping", "left", "stopped"]
    assert query(dsn, "select count(*) from ff_partition where node_id is not null") == 0
    assert query(dsn, "select count(*) from ff_node") == 0


def test_ctrl_c_drains_too(dsn: str) -> None:
    with ready(dsn) as run:
        run.wait_for("ready")
        assert run.end(signal.SIGINT) == 0


def test_every_metric_of_the_contract_is_there_from_the_start(dsn: str) -> None:
    contract = [
        "ffd_build_info",
        "ffd_partitions_owned",
        "ffd_reconciler_ticks_total",
        "ffd_reconciler_rows_total",
        "ffd_reconciler_tick_duration_seconds",
        "ffd_reconciler_lag_seconds",
        "ffd_reconciler_last_success_timestamp_seconds",
        "ffd_operation_duration_seconds",
        "ffd_executions",
        "ffd_lane_oldest_waiting_seconds",
        "ffd_outbox_lag_seconds",
        "ffd_outbox_events_total",
        "ffd_outbox_gaps",
        "ffd_listen_connected",
        "ffd_listen_reconnects_total",
        "ffd_plugin_calls_total",
        "ffd_plugin_dead_letters_total",
        "ffd_fence_rejections_total",
        "ffd_token_rejections_total",
        "ffd_pool_connections",
        "ffd_task_restarts_total",
        "ffd_event_loop_lag_seconds",
    ]
    with ready(dsn) as run:
        run.wait_for("ready")
        _, body = run.get("/metrics")
        declared = {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")}
        assert set(contract) <= declared
        assert "_created" not in body


def test_the_bound_on_recovery_is_said_at_the_start(dsn: str) -> None:
    with ready(dsn, FFD_RECONCILERS__LEASE_EXPIRY__INTERVAL_MS="2500") as run:
        line = run.wait_for("recovery_bound")
        assert (line["killed_worker_s"], line["killed_worker_and_node_s"]) == (32.5, 42.5)
    with ready(dsn, FFD_RECONCILERS__LEASE_EXPIRY__ENABLED="false") as run:
        run.wait_for("no_recovery")


def test_a_killed_workers_work_is_offered_again_and_the_sample_shows_the_lane(dsn: str) -> None:
    """X-026: the metrics tell of queue depth, age and expiries."""

    async def lose_a_worker() -> None:
        from ffd import Engine

        async with Engine.connect(dsn) as engine:
            await engine.create_execution(lane="build")
            await engine.claim("build", worker_id="w", worker_instance_id="i", lease_ttl_ms=500)
            again = await engine.claim("build", worker_id="w", worker_instance_id="j", wait_ms=20_000)
            assert again is not None
            assert again.lease_epoch == 3
            await engine.create_execution(lane="build")

    with ready(dsn) as run:
        run.wait_for("ready")
        asyncio.run(lose_a_worker())
        swept = run.wait_for("swept", reconciler="lease_expiry")
        assert swept["reclaimed"] == 1
        assert run.metric('ffd_reconciler_rows_total{outcome="reclaimed",reconciler="lease_expiry"}') == 1
        run.send(signal.SIGTERM)
    with ready(dsn) as run:  # samples when it starts
        run.wait_for("ready")
        assert run.metric('ffd_executions{lane="build",state="waiting"}') == 1
        assert run.metric('ffd_lane_oldest_waiting_seconds{lane="build"}') >= 0


def test_it_waits_for_a_database_that_is_down(manager: Manager, tmp_path: Path) -> None:
    """Visibly: in the log, on both pages, and for the service manager, which is asked to wait as well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with EmbeddedPostgres(tmp_path / "pg", port=port) as server:
        dsn = server.dsn("ffd")
        query(server.dsn(), "create database ffd")
        asyncio.run(migrate(dsn, on_progress=lambda _: None))
        server.stop()
        with ready(dsn, NOTIFY_SOCKET=str(manager.path)) as run:
            assert "database" in run.wait_for("waiting")["reason"]
            assert run.get("/livez")[0] == 200
            code, body = run.get("/readyz")
            assert code == 503
            assert json.loads(body)["checks"]["database"].startswith("waiting for the database")
            manager.wait_for(lambda line: line.startswith("STATUS=waiting for the database"))
            manager.wait_for(lambda line: line.startswith("EXTEND_TIMEOUT_USEC="))
            assert "READY=1" not in manager.states()
            server.start()
            run.wait_for("ready")
            manager.wait_for(lambda line: line == "READY=1")
            assert run.end() == 0


def test_it_can_be_stopped_while_it_waits() -> None:
    with ready("postgresql://nobody@127.0.0.1:1/none") as run:
        run.wait_for("waiting")
        assert run.end() == 0


def test_it_waits_for_the_schema(empty_database: str) -> None:
    with ready(empty_database) as run:
        assert "ffd migrate" in run.wait_for("waiting")["reason"]
        checks = json.loads(run.get("/readyz")[1])["checks"]
        assert checks["database"] == "ok"
        assert "ffd migrate" in checks["schema"]
        asyncio.run(migrate(empty_database, on_progress=lambda _: None))
        run.wait_for("ready")
        assert run.end() == 0


def test_a_schema_of_the_next_version_is_no_reason_to_stop(dsn: str) -> None:
    """An upgrade migrates first: the old version must be able to start until the last node is replaced."""
    query(
        dsn,
        "insert into ff_schema_migration (version, name, checksum, applied_at_ms, ffd_version)"
        " select max(version) + 1, 'next', 'x', 0, '99' from ff_schema_migration returning 1",
    )
    with ready(dsn) as run:
        run.wait_for("schema_is_newer")
        run.wait_for("ready")
        assert run.end() == 0


@contextmanager
def a_sweep_that_waits(dsn: str, **settings: str) -> Iterator[Run]:
    """A daemon in the middle of a sweep: it waits for a table that somebody holds."""
    flow = "00000000-0000-7000-8000-000000000001"

    async def hold() -> asyncpg.Connection[Any]:
        connection = await asyncpg.connect(dsn)
        await connection.execute(
            "insert into ff_flow_core (partition_key, flow_id, public_flow_state, created_at_ms)"
            f" values (1, '{flow}', 'open', 0);"
            "insert into ff_cascade_owed (partition_key, flow_id, execution_id, work, enqueued_at_ms)"
            f" values (1, '{flow}', gen_random_uuid(), 'resolve', 0);"
        )
        await connection.execute("begin; lock table ff_cascade_owed in share mode")
        return connection

    with asyncio.Runner() as runner:
        connection = runner.run(hold())
        with ready(dsn, FFD_DATABASE__LOCK_TIMEOUT_MS="20000", **settings) as run:
            run.wait_for("ready")
            waits = "select exists (select from pg_stat_activity where wait_event_type = 'Lock')"
            while not query(dsn, waits):  # not the holder: a transaction sees one picture of the activity
                time.sleep(0.05)
            yield run
        runner.run(connection.close())


def test_a_second_signal_ends_it_at_once(dsn: str) -> None:
    """A sweep under way is waited for; told twice, nothing is."""
    with a_sweep_that_waits(dsn) as run:
        run.send(signal.SIGTERM)
        run.wait_for("stopping")
        time.sleep(0.3)
        assert run.process.poll() is None, "it waits for what is under way"
        assert json.loads(run.get("/readyz")[1])["checks"]["draining"] == "stopping"
        began = time.monotonic()
        assert run.end(signal.SIGTERM) == 1
        assert time.monotonic() - began < 5


def test_what_takes_longer_than_the_grace_is_cut_off(dsn: str) -> None:
    with a_sweep_that_waits(dsn, FFD_NODE__DRAIN_TIMEOUT_S="1") as run:
        assert run.end() == 0
        assert "drain_timed_out" in run.events()
        assert "left" in run.events()


def test_sighup_takes_over_what_it_can_and_names_the_rest(dsn: str, tmp_path: Path, manager: Manager) -> None:
    path = tmp_path / "ffd.toml"
    path.write_text('[log]\nlevel = "info"\n')
    with ready(dsn, "--config", str(path), NOTIFY_SOCKET=str(manager.path)) as run:
        run.wait_for("ready")
        path.write_text(
            '[log]\nlevel = "debug"\n[reconcilers.retention]\nenabled = false\n[node]\nlease_ttl_ms = 9000\n'
            "[database]\npool_max = 3\n"
        )
        run.send(signal.SIGHUP)
        assert run.wait_for("reloaded")["changed"] == ["reconcilers.retention.enabled", "log.level"]
        assert run.wait_for("restart_needed")["keys"] == ["database.pool_max", "node.lease_ttl_ms"]
        manager.wait_for(lambda line: line == "RELOADING=1")
        manager.wait_for(lambda line: line.startswith("MONOTONIC_USEC="))
        path.write_text("[log]\nlevel = 3\n")
        run.send(signal.SIGHUP)
        assert "log.level" in run.wait_for("reload_refused")["problems"][0]
        assert run.end() == 0
        assert manager.states().count("READY=1") == 3, "once at the start and once after each reload"


def test_the_service_manager_hears_of_every_stage(dsn: str, manager: Manager) -> None:
    with ready(dsn, NOTIFY_SOCKET=str(manager.path), WATCHDOG_USEC="400000") as run:
        manager.wait_for(lambda line: line == "READY=1")
        manager.wait_for(lambda line: line.startswith("STATUS=sweeps 256 of 256 partitions, lag "))
        time.sleep(1.2)
        pings = [at for at, lines in manager.messages if "WATCHDOG=1" in lines]
        assert len(pings) >= 4
        assert run.end() == 0
        manager.wait_for(lambda line: line == "STOPPING=1")
        assert manager.states()[-1].startswith(("EXTEND_TIMEOUT_USEC=40000000", "STATUS="))


def test_an_address_that_is_taken_is_a_mistake_in_the_configuration(dsn: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        ready(dsn, FFD_HTTP__BIND=f"127.0.0.1:{taken.getsockname()[1]}") as run,
    ):
        assert run.wait() == EXIT_USAGE
        assert "http.bind: cannot listen on 127.0.0.1:" in run.text


def test_variables_that_are_no_address_are_a_mistake_too() -> None:
    with running(PGHOST="127.0.0.1", PGPORT="no number") as run:
        assert run.wait() == EXIT_USAGE
        assert "PG* variables: not an address" in run.text
        assert "Traceback" not in run.text


def test_without_an_address_nothing_is_served(dsn: str) -> None:
    with ready(dsn, FFD_HTTP__BIND="") as run:
        run.wait_for("ready")
        assert run.wait_for("starting")["http"] is None
        assert run.end() == 0


def test_no_secret_is_logged(dsn: str) -> None:
    """I8: neither when all is well nor when the address is wrong."""
    parts = urlsplit(dsn)
    wrong = f"postgresql://someone:{HIDDEN}@{parts.hostname}:{parts.port}/none"
    with ready(wrong, FFD_LOG__LEVEL="debug") as run:
        run.wait_for("waiting")
        run.end()
    assert HIDDEN not in run.text
    with ready(dsn, FFD_LOG__LEVEL="debug") as run:
        run.wait_for("ready")
        run.end()
    assert parts.password is not None
    assert parts.password not in run.text


def test_the_console_form_is_for_people(dsn: str) -> None:
    run = Run(FFD_DATABASE__DSN=dsn, FFD_LOG__FORMAT="console")
    try:
        while "ready" not in run.text:
            assert run.process.poll() is None, run.text
            time.sleep(0.05)
        assert run.log == []
        assert run.end() == 0
    finally:
        run.process.kill()
        run.wait()
        for stream in (run.process.stdout, run.process.stderr):
            assert stream is not None
            stream.close()
