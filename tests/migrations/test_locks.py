"""Runners among others: the lock between them, table locks in their way, and poolers."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from ffd.core.errors import Unavailable
from ffd.db.migration_files import Migration, MigrationFailed, MigrationKind
from ffd.db.migrations import LOCK_KEY, Progress, ProgressStep, migrate
from tests.migrations.runs import CREATE_A, CREATE_B, WriteFiles, connected, has_table, ledger, other_role, run, value

pytestmark = pytest.mark.anyio


# Several runners


@pytest.mark.parametrize("round_", range(5))
async def test_two_runners_at_once_apply_each_file_once(empty_database: str, files: WriteFiles, round_: int) -> None:
    directory = files(
        m0001_a="create table a (id serial);\nselect pg_sleep(0.1);\ninsert into a default values;\n",
        m0002_index="-- ffd: no-transaction\ncreate index concurrently a_id on a (id);\n",
        m0003_b=CREATE_B,
    )
    results: list[list[Migration]] = []

    async def one_runner() -> None:
        results.append((await run(empty_database, directory))[0])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one_runner)
        tasks.start_soon(one_runner)
    # Which of the two applied a file does not matter; nothing was applied twice and both saw the end.
    assert sorted(migration.version for applied in results for migration in applied) == [1, 2, 3]
    assert await value(empty_database, "select count(*) from a") == 1
    assert await ledger(empty_database) == [1, 2, 3]


async def test_a_held_lock_is_reported_with_its_holder(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A)
    async with connected(empty_database, "deploy job 7") as holder:
        await holder.fetchval("select pg_advisory_lock($1)", LOCK_KEY)
        pid = holder.get_server_pid()
        started = time.monotonic()
        steps: list[Progress] = []
        with pytest.raises(MigrationFailed) as caught:
            await migrate(empty_database, on_progress=steps.append, directory=directory, lock_wait_s=0.5)
    assert 0.5 <= time.monotonic() - started < 5
    text = str(caught.value)
    assert caught.value.kind is MigrationKind.LOCK_HELD
    assert caught.value.is_retryable
    assert f"pid {pid} (deploy job 7) from 127.0.0.1:" in text
    assert "connected for" in text
    assert [step.step for step in steps] == [ProgressStep.WAITING]
    assert not await has_table(empty_database, "a")


async def test_a_holder_of_another_role_is_named_as_far_as_it_can_be_seen(
    empty_database: str, files: WriteFiles
) -> None:
    directory = files(m0001_a=CREATE_A)
    async with connected(empty_database, "deploy job 7") as holder, other_role(empty_database) as dsn:
        await holder.fetchval("select pg_advisory_lock($1)", LOCK_KEY)
        with pytest.raises(MigrationFailed, match=rf"pid {holder.get_server_pid()} \(deploy job 7\); waited 0 s"):
            await run(dsn, directory, lock_wait_s=0)


async def test_a_runner_that_waits_goes_on_when_the_lock_is_free(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A)
    async with connected(empty_database) as holder:
        await holder.fetchval("select pg_advisory_lock($1)", LOCK_KEY)

        async def release() -> None:
            await holder.fetchval("select pg_advisory_unlock($1)", LOCK_KEY)

        def on_progress(step: Progress) -> None:
            steps.append(step.step)
            if step.step is ProgressStep.WAITING:
                tasks.start_soon(release)

        steps: list[ProgressStep] = []
        async with anyio.create_task_group() as tasks:
            await migrate(empty_database, on_progress=on_progress, directory=directory)
    assert steps == [ProgressStep.WAITING, ProgressStep.APPLIED]


async def test_a_waiting_runner_does_not_block_an_index_built_concurrently(
    empty_database: str, files: WriteFiles
) -> None:
    """A session inside pg_advisory_lock() would: the server ends one of the two for a deadlock."""
    directory = files(m0001_a=CREATE_A)
    async with connected(empty_database) as holder:
        await holder.execute("create table t (id int)")
        await holder.fetchval("select pg_advisory_lock($1)", LOCK_KEY)
        waiting = anyio.Event()

        async def wait_for_lock() -> None:
            await migrate(empty_database, on_progress=lambda _: waiting.set(), directory=directory)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_lock)
            await waiting.wait()
            await holder.execute("create index concurrently t_id on t (id)")
            await holder.fetchval("select pg_advisory_unlock($1)", LOCK_KEY)
    assert await ledger(empty_database) == [1]


async def test_nothing_to_do_needs_no_lock(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A)
    await run(empty_database, directory)
    async with connected(empty_database) as holder:
        await holder.fetchval("select pg_advisory_lock($1)", LOCK_KEY)
        assert await run(empty_database, directory, lock_wait_s=0) == ([], [])


async def test_the_lock_is_free_after_success_failure_and_cancellation(empty_database: str, files: WriteFiles) -> None:
    async def assert_lock_is_free() -> None:
        async with connected(empty_database) as conn:
            assert await conn.fetchval("select pg_try_advisory_lock($1)", LOCK_KEY)

    await run(empty_database, files(m0001_a=CREATE_A))
    await assert_lock_is_free()
    directory = files(m0002_bad="select nonsense")
    with pytest.raises(MigrationFailed):
        await run(empty_database, directory)
    await assert_lock_is_free()
    directory = files(m0002_bad="create table slow (id int); select pg_sleep(60);")
    with anyio.move_on_after(0.5) as scope:
        await run(empty_database, directory)
    assert scope.cancelled_caught
    await assert_lock_is_free()
    assert not await has_table(empty_database, "slow")
    assert await ledger(empty_database) == [1]


# Table locks


async def test_a_table_lock_that_is_not_granted_is_given_up_with_a_name(empty_database: str, files: WriteFiles) -> None:
    await run(empty_database, files(m0001_a=CREATE_A))
    directory = files(m0002_alter="alter table a add column x int;\n")
    async with connected(empty_database, "long report") as reader:
        pid = reader.get_server_pid()
        async with reader.transaction():
            await reader.fetch("select * from a")
            steps: list[Progress] = []
            with pytest.raises(MigrationFailed) as caught:
                await migrate(
                    empty_database,
                    on_progress=steps.append,
                    directory=directory,
                    lock_timeout_ms=100,
                    lock_attempts=2,
                )
    text = str(caught.value)
    assert "0002_alter.sql" in text
    assert "attempt 2 of 2" in text
    assert f"pid {pid} (long report)" in text
    assert [step.step for step in steps] == [ProgressStep.RETRYING]
    assert await ledger(empty_database) == [1]


async def test_others_get_through_between_attempts_and_the_file_comes_back(
    empty_database: str, files: WriteFiles
) -> None:
    await run(empty_database, files(m0001_a=CREATE_A))
    directory = files(m0002_alter="alter table a add column x int;\n")
    async with connected(empty_database) as reader, connected(empty_database) as other:
        transaction = reader.transaction()
        await transaction.start()
        await reader.fetch("select * from a")

        async def use_the_table() -> None:
            # Were the ALTER still queued, this would wait behind it.
            with anyio.fail_after(0.9):
                await other.fetch("select * from a")
            await transaction.rollback()

        def on_progress(step: Progress) -> None:
            steps.append(step.step)
            if step.step is ProgressStep.RETRYING:
                tasks.start_soon(use_the_table)

        steps: list[ProgressStep] = []
        async with anyio.create_task_group() as tasks:
            await migrate(empty_database, on_progress=on_progress, directory=directory, lock_timeout_ms=100)
    assert steps == [ProgressStep.RETRYING, ProgressStep.APPLIED]


async def test_concurrently_waits_longer_than_other_statements(empty_database: str, files: WriteFiles) -> None:
    await run(empty_database, files(m0001_a=CREATE_A))
    directory = files(m0002_i="-- ffd: no-transaction\ncreate index concurrently a_i on a (id);\n")
    async with connected(empty_database) as reader:
        transaction = reader.transaction(isolation="repeatable_read")
        await transaction.start()
        await reader.fetch("select * from a")

        async def finish() -> None:
            await anyio.sleep(0.5)
            await transaction.rollback()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish)
            _, steps = await run(empty_database, directory, lock_timeout_ms=100, lock_attempts=1)
    assert [step.step for step in steps] == [ProgressStep.APPLIED]


# Poolers


@contextmanager
def pgbouncer(dsn: str, directory: Path) -> Iterator[str]:
    """Run PgBouncer in front of the server, as an unprivileged user also under root."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("pgbouncer is not installed; .ci/run installs it")
        pytest.skip("pgbouncer is not installed (apt-get install pgbouncer)")
    parts = urlsplit(dsn)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = directory / "pgbouncer.ini"
    config.write_text(
        f"[databases]\napp = host=127.0.0.1 port={parts.port} dbname={parts.path[1:]} "
        f"user={parts.username} password={parts.password}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        "auth_type = any\npool_mode = transaction\n"
        + (f"user = {pwd.getpwnam('nobody').pw_name}\n" if os.geteuid() == 0 else "")
    )
    process = subprocess.Popen([program, "-q", config])
    try:
        yield f"postgresql://anyone@127.0.0.1:{port}/app"
    finally:
        process.terminate()
        process.wait(10)


async def test_a_pooler_is_refused_because_the_lock_would_not_hold(
    empty_database: str, files: WriteFiles, tmp_path: Path
) -> None:
    directory = files(m0001_a=CREATE_A)
    with pgbouncer(empty_database, tmp_path) as dsn:
        deadline = time.monotonic() + 10
        while True:
            try:
                with pytest.raises(MigrationFailed, match="PgBouncer") as caught:
                    await run(dsn, directory)
                break
            except Unavailable:
                assert time.monotonic() < deadline
                await anyio.sleep(0.1)
    assert caught.value.kind is MigrationKind.POOLED_CONNECTION
    assert not await has_table(empty_database, "a")
