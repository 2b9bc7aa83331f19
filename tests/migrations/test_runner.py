"""The migration runner against real databases: order, ledger, what is refused and what fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ffd.core.errors import Unavailable
from ffd.db import migrations
from ffd.db.migration_files import MigrationFailed, MigrationKind, discover
from ffd.db.migrations import ProgressStep, SchemaKind, SchemaMismatch, SchemaStatus, check_schema, status
from tests.migrations.runs import CREATE_A, CREATE_B, WriteFiles, connected, has_table, ledger, other_role, run, value

pytestmark = pytest.mark.anyio


# Applying


async def test_pending_files_are_applied_in_order_and_recorded(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A, m0002_b="insert into a values (2);\n" + CREATE_B)
    applied, steps = await run(empty_database, directory)
    assert [migration.label for migration in applied] == ["0001_a", "0002_b"]
    assert [step.step for step in steps] == [ProgressStep.APPLIED] * 2
    async with connected(empty_database) as conn:
        found = await status(conn, directory)
        await check_schema(conn, directory)
        rows = await conn.fetch(
            "select version, name, checksum, ffd_version, extract(epoch from clock_timestamp()) * 1000 - applied_at_ms"
            " as age_ms from ff_schema_migration order by version"
        )
    assert found == SchemaStatus(version=2, target_version=2, pending=[])
    for row, migration in zip(rows, applied, strict=True):
        assert tuple(row[:3]) == (migration.version, migration.name, migration.checksum)
        assert row["ffd_version"] == migrations.ffd_version()
        assert -1 <= row["age_ms"] < 60_000


async def test_a_second_run_does_nothing_and_a_new_file_is_picked_up(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A)
    await run(empty_database, directory)
    assert await run(empty_database, directory) == ([], [])
    applied, _ = await run(empty_database, files(m0002_b=CREATE_B))
    assert [migration.label for migration in applied] == ["0002_b"]


async def test_reading_the_status_changes_nothing(empty_database: str, files: WriteFiles) -> None:
    async with connected(empty_database) as conn:
        found = await status(conn, files(m0001_a=CREATE_A))
    assert [migration.label for migration in found.pending] == ["0001_a"]
    assert (found.version, found.target_version) == (0, 1)
    assert not await has_table(empty_database, "ff_schema_migration")


async def test_the_session_is_named_and_bounds_only_its_locks(empty_database: str, files: WriteFiles) -> None:
    async with connected(empty_database) as conn:
        database = await conn.fetchval("select current_database()")
        await conn.execute(f"alter database {database} set statement_timeout = '3s'")
        await conn.execute(f"alter database {database} set default_transaction_isolation = 'serializable'")
    names = "application_name", "lock_timeout", "statement_timeout", "transaction_isolation"
    columns = ", ".join(f"current_setting('{name}') as {name}" for name in names)
    await run(empty_database, files(m0001_a=f"create table seen as select {columns};"))
    async with connected(empty_database) as conn:
        seen = dict(await conn.fetchrow("select * from seen"))
    assert seen == {
        "application_name": "ffd migrate",
        "lock_timeout": "5s",
        "statement_timeout": "0",
        "transaction_isolation": "read committed",
    }


async def test_the_files_of_this_checkout_apply(empty_database: str) -> None:
    applied, _ = await run(empty_database, None)
    assert applied == discover()
    async with connected(empty_database) as conn:
        await check_schema(conn)


# What is refused


async def test_a_file_that_changed_after_it_was_applied_is_refused(empty_database: str, files: WriteFiles) -> None:
    await run(empty_database, files(m0001_a=CREATE_A, m0002_b=CREATE_B))
    directory = files(m0002_b=CREATE_B + "-- a remark", m0003_c="create table c (id int)")
    with pytest.raises(SchemaMismatch, match=r"0002_b\.sql was changed") as caught:
        await run(empty_database, directory)
    assert caught.value.kind is SchemaKind.CHANGED
    assert not await has_table(empty_database, "c")
    async with connected(empty_database) as conn:
        with pytest.raises(SchemaMismatch, match=r"0002_b\.sql was changed"):
            await check_schema(conn, directory)


async def test_a_database_newer_than_the_code_is_refused(
    empty_database: str, files: WriteFiles, tmp_path: Path
) -> None:
    newer = files(m0001_a=CREATE_A, m0002_future=CREATE_B)
    older = tmp_path / "older"
    older.mkdir()
    (older / "0001_a.sql").write_text(CREATE_A)
    await run(empty_database, newer)
    with pytest.raises(SchemaMismatch, match=r"newer than this ffd .* 0002_future") as caught:
        await run(empty_database, older)
    assert caught.value.kind is SchemaKind.AHEAD
    assert caught.value.code == "schema.ahead"
    async with connected(empty_database) as conn:
        with pytest.raises(SchemaMismatch, match="upgrade ffd"):
            await check_schema(conn, older)


async def test_a_database_that_is_behind_fails_the_check(empty_database: str, files: WriteFiles) -> None:
    async with connected(empty_database) as conn:
        with pytest.raises(SchemaMismatch, match=r"0001_a, 0002_b.*run `ffd migrate`") as caught:
            await check_schema(conn, files(m0001_a=CREATE_A, m0002_b=CREATE_B))
    assert caught.value.kind is SchemaKind.BEHIND


async def test_a_hole_in_the_ledger_is_refused(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A, m0002_b=CREATE_B)
    await run(empty_database, directory)
    await value(empty_database, "delete from ff_schema_migration where version = 1 returning 1")
    with pytest.raises(SchemaMismatch, match="0001_a is not in the ledger") as caught:
        await run(empty_database, directory)
    assert caught.value.kind is SchemaKind.OUT_OF_ORDER


async def test_a_server_that_is_too_old_is_refused(
    empty_database: str, files: WriteFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "SERVER_MAJOR_MIN", 99)
    with pytest.raises(MigrationFailed, match=r"PostgreSQL \d+\.\d+ is too old, ffd needs 99") as caught:
        await run(empty_database, files(m0001_a=CREATE_A))
    assert caught.value.kind is MigrationKind.SERVER_TOO_OLD
    async with connected(empty_database) as conn:
        with pytest.raises(MigrationFailed, match="too old"):
            await check_schema(conn, files(m0001_a=CREATE_A))


async def test_a_database_that_does_not_answer_is_unavailable(files: WriteFiles) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        with pytest.raises(Unavailable) as caught:
            await run(f"postgresql://bob:hunter2@127.0.0.1:{port}/app", files(m0001_a=CREATE_A))
    assert f"127.0.0.1:{port} (database app, user bob): connection refused" in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_a_connection_lost_on_the_way_is_unavailable(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A + "select pg_terminate_backend(pg_backend_pid());")
    with pytest.raises(Unavailable):
        await run(empty_database, directory)
    assert not await has_table(empty_database, "a")


async def test_what_the_role_may_not_do_is_told_in_the_servers_words(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A)
    await run(empty_database, directory)
    async with other_role(empty_database) as dsn:
        with pytest.raises(MigrationFailed, match="permission denied for table") as caught:
            await run(dsn, directory)
    assert caught.value.kind is MigrationKind.REFUSED


# Files that fail


async def test_a_failing_file_is_rolled_back_and_named_with_its_line(empty_database: str, files: WriteFiles) -> None:
    directory = files(m0001_a=CREATE_A, m0002_bad="create table gone (id int);\n\ninsert into nowhere values (1);\n")
    with pytest.raises(MigrationFailed) as caught:
        await run(empty_database, directory)
    assert caught.value.kind is MigrationKind.FILE_FAILED
    assert str(caught.value) == ('0002_bad.sql line 3: relation "nowhere" does not exist [42P01] (rolled back)')
    assert not await has_table(empty_database, "gone")
    assert await ledger(empty_database) == [1]


@pytest.mark.parametrize("head", ["", "-- ffd: no-transaction\n"])
async def test_the_line_is_that_of_the_offending_word(empty_database: str, files: WriteFiles, head: str) -> None:
    directory = files(m0001_bad=f"{head}-- é\nselect 'é';\nselect (\n)\n;\n")
    with pytest.raises(MigrationFailed, match=rf"0001_bad\.sql line {4 + bool(head)}: syntax error"):
        await run(empty_database, directory)


async def test_a_first_file_that_fails_leaves_the_database_empty(empty_database: str, files: WriteFiles) -> None:
    with pytest.raises(MigrationFailed, match=r"0001_bad\.sql: division by zero"):
        await run(empty_database, files(m0001_bad="create table gone (id int); select 1 / count(*) from gone"))
    assert await value(empty_database, "select count(*) from pg_class where relnamespace = 'public'::regnamespace") == 0


async def test_a_file_that_fails_at_its_commit_is_named(empty_database: str, files: WriteFiles) -> None:
    sql = """
    create table p (id int primary key);
    create table c (p int references p deferrable initially deferred);
    insert into c values (1);
    """
    with pytest.raises(MigrationFailed, match=r"0001_late\.sql: .*foreign key") as caught:
        await run(empty_database, files(m0001_late=sql))
    assert caught.value.kind is MigrationKind.FILE_FAILED
    assert not await has_table(empty_database, "c")


async def test_a_file_without_transaction_builds_an_index_concurrently(empty_database: str, files: WriteFiles) -> None:
    directory = files(
        m0001_a=CREATE_A,
        m0002_index="-- ffd: no-transaction\n"
        "drop index concurrently if exists a_twice;\n"
        "create index concurrently a_twice on a ((id * 2));\n",
    )
    await run(empty_database, directory)
    assert await ledger(empty_database) == [1, 2]
    assert await value(empty_database, "select indisvalid from pg_index where indexrelid = 'a_twice'::regclass")


async def test_a_file_without_transaction_that_failed_runs_again_from_its_start(
    empty_database: str, files: WriteFiles
) -> None:
    head = "-- ffd: no-transaction\ncreate table if not exists t (id int);\n"
    directory = files(m0001_t=head + "\ninsert into t\nvalues (nonsense);\n")
    with pytest.raises(MigrationFailed, match=r"0001_t\.sql line 5: .*nonsense.*earlier statements stay"):
        await run(empty_database, directory)
    assert await has_table(empty_database, "t")
    assert await ledger(empty_database) == []
    await run(empty_database, files(m0001_t=head + "insert into t values (1);\n"))
    assert await ledger(empty_database) == [1]
    # A failure without a position is placed at its statement.
    with pytest.raises(MigrationFailed, match=r"0002_z\.sql line 4: division by zero"):
        await run(
            empty_database,
            files(m0002_z="-- ffd: no-transaction\nselect 1;\n\nselect 1 / id - id from (values (0)) v (id);"),
        )
