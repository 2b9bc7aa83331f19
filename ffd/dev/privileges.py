"""Run programs that refuse to run as root, and let none outlive the process that wanted it.

The file is used twice. Imported, it chooses an identity and starts programs under it. Run as a script
(`python -I -S privileges.py ...`) it is the launcher between the two: it takes the identity, ties its life to
its parent and becomes the program through exec. A launcher instead of `preexec_fn`, because Python code
between fork and exec may deadlock in a process with threads, and because only a process without threads can
enter a user namespace. The file therefore imports nothing but the standard library.

No mode of any directory is changed and no user is created.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Final, Literal, NamedTuple

PROBE_TIMEOUT_S: Final = 30.0
OUTPUT_LINES_MAX: Final = 20

_CLONE_NEWUSER: Final = 0x10000000
_PR_SET_PDEATHSIG: Final = 1

Kind = Literal["same", "drop", "namespace"]


class Identity(NamedTuple):
    """Who runs a program.

    `same`: the caller. `drop`: root becomes `uid` and `gid`. `namespace`: root stays the owner of its files,
    but the program sees itself as `uid` and `gid` and has no capabilities; for places only root can enter.
    """

    kind: Kind
    uid: int
    gid: int

    def __str__(self) -> str:
        names = {"same": "as the caller", "namespace": "as root in a user namespace"}
        return names.get(self.kind, f"as uid {self.uid}")

    def own(self, target: int | Path) -> None:
        """Give the program a file of its own, open or by path; a symbolic link is not followed."""
        if self.kind == "drop":
            os.chown(target, self.uid, self.gid, follow_symlinks=isinstance(target, int))


def choose_identity(data_dir: Path, reach: Iterable[Path]) -> Identity:
    """Find who can work in `data_dir` with the files in `reach`; a PermissionError tells what is in the way.

    A data directory in use dictates by its owner. For a new one root prefers `nobody`, which keeps the server
    out of root's files, and falls back on the namespace. What works is found by trying, not by reading modes:
    access lists, containers and security modules have a say as well.
    """
    if os.geteuid() != 0:
        return Identity("same", os.geteuid(), os.getegid())
    nobody = _nobody()
    namespace = nobody._replace(kind="namespace")
    owner = data_dir.stat() if data_dir.exists() else None
    if owner is not None and owner.st_uid != 0:
        candidates, entrance = [Identity("drop", owner.st_uid, owner.st_gid)], data_dir
    elif owner is not None and any(data_dir.iterdir()):
        candidates, entrance = [namespace], data_dir
    else:  # Absent or empty, it will be given to whom we choose.
        candidates, entrance = [nobody, namespace], data_dir.parent
    obstacles = []
    for identity in candidates:
        obstacle = find_obstacle(identity, [entrance, *reach])
        if obstacle is None:
            return identity
        obstacles.append(f"{identity} it {obstacle}")
    raise PermissionError(
        f"PostgreSQL does not run as root, and {'; '.join(obstacles)}. Run ffd as an ordinary user, or keep "
        "the data directory and the binaries where every user may enter, or allow user namespaces"
    )


def find_obstacle(identity: Identity, paths: Iterable[Path]) -> str | None:
    """Tell what keeps `identity` from `paths`, in words that follow "it"."""
    probe = _complete("probe", identity, [path.resolve() for path in paths], PROBE_TIMEOUT_S)
    if probe.returncode != 0:
        return f"cannot start ({last_lines(probe.stderr).strip()})"
    return f"cannot enter {probe.stdout}" if probe.stdout else None


def run(identity: Identity, command: Sequence[str | Path], *, timeout_s: float) -> str:
    """Run a program to its end and return its output; ChildProcessError or TimeoutError when it fails."""
    name = Path(command[0]).name
    try:
        done = _complete("run", identity, command, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{name} did not finish in {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise ChildProcessError(f"{name} failed ({done.returncode}):\n{last_lines(done.stdout + done.stderr)}")
    return done.stdout


def spawn(identity: Identity, command: Sequence[str | Path], *, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a program that lives until it ends, is stopped, or this process ends, however it does (Linux)."""
    born: Future[subprocess.Popen[bytes]] = Future()

    def start_and_hold() -> None:
        try:
            process = subprocess.Popen(  # noqa: S603 - no shell; the command is ours
                _launcher("run", identity, command),
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in a terminal is for us; while we wind down we need the program.
                start_new_session=True,
            )
        except OSError as error:
            born.set_exception(error)
            return
        born.set_result(process)
        if sys.platform == "linux":
            # WNOWAIT leaves the child to its `Popen`, so that a later signal cannot meet a reused pid.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    # Linux sends the parent-death signal when the *thread* that forked ends. The caller's may be short-lived,
    # so the program gets a thread that lasts exactly as long as itself.
    threading.Thread(target=start_and_hold, name="ffd-embedded-postgres", daemon=True).start()
    return born.result()


def last_lines(text: str) -> str:
    """Keep the end of a program's output, where the reason stands."""
    return "\n".join(text.splitlines()[-OUTPUT_LINES_MAX:])


def _nobody() -> Identity:
    import pwd  # not on Windows

    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return Identity("drop", 65534, 65534)
    return Identity("drop", entry.pw_uid, entry.pw_gid)


def _complete(
    action: Literal["run", "probe"], identity: Identity, arguments: Sequence[str | Path], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - no shell; the command is ours
        _launcher(action, identity, arguments),
        cwd="/",
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _launcher(action: str, identity: Identity, arguments: Sequence[str | Path]) -> list[str]:
    head = (sys.executable, "-I", "-S", __file__, action, *identity, os.getpid())
    return [str(part) for part in (*head, *arguments)]


def _environment() -> dict[str, str]:
    """Keep ours, without what would change PostgreSQL's defaults or the language of its messages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C", "TZ": "UTC"}


# What follows runs in the launcher.


def _take_identity(identity: Identity) -> None:
    if identity.kind == "drop":
        os.setgroups([])
        os.setgid(identity.gid)
        os.setuid(identity.uid)
    elif identity.kind == "namespace":
        outer_uid, outer_gid = os.geteuid(), os.getegid()
        if sys.platform != "linux":
            raise OSError("user namespaces are a feature of Linux")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWUSER) != 0:
            raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
        # A group map may only be written once the right to change groups is given up.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"{identity.gid} {outer_gid} 1")
        Path("/proc/self/uid_map").write_text(f"{identity.uid} {outer_uid} 1")


def _die_with_parent(parent_pid: int) -> None:
    """Ask for SIGINT, PostgreSQL's fast shutdown, when the parent dies; taking an identity would undo it."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGINT), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl: " + os.strerror(ctypes.get_errno()))
        if os.getppid() != parent_pid:
            sys.exit("ffd launcher: the parent is gone already")


def _first_closed(paths: Iterable[str]) -> str:
    for path in map(Path, paths):
        for step in (*reversed(path.parents), path):
            if not os.access(step, os.X_OK):
                return str(step)
    return ""


def _main(action: str, kind: Kind, uid: str, gid: str, parent_pid: str) -> None:
    # Python's own handler would only take note of a SIGINT, and exec would lose the note.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Python ignores this one, and exec would hand that down.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    arguments = sys.argv[6:]
    try:
        _take_identity(Identity(kind, int(uid), int(gid)))
        if action == "probe":
            sys.stdout.write(_first_closed(arguments))
        else:
            _die_with_parent(int(parent_pid))
            os.execv(arguments[0], arguments)  # noqa: S606 - no shell is the point
    except OSError as error:
        sys.exit(f"ffd launcher: {error}")


if __name__ == "__main__":
    _main(*sys.argv[1:6])  # type: ignore[arg-type]  # written by `_launcher`
