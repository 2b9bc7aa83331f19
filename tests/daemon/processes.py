"""`ffd run` as a process: its log as records, its HTTP side, the socket on which it tells systemd."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUIET = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("FFD_", "PG", "NOTIFY_", "WATCHDOG_")) or name == "FFD_PG_BIN"
}


class Run:
    """One daemon."""

    def __init__(self, *arguments: str, **settings: str) -> None:
        environ = {"FFD_HTTP__BIND": "127.0.0.1:0", "FFD_LOG__FORMAT": "json", **settings}
        self.log: list[dict[str, Any]] = []
        self.text = ""
        self._read = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ffd.cli.main", "run", *arguments],
            env={**QUIET, **environ},
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._read:
                self.text += line
                if line.startswith("{"):
                    self.log.append(json.loads(line))
                self._read.notify_all()

    def events(self) -> list[str]:
        """The names of what happened, in order."""
        return [line["event"] for line in self.log]

    def wait_for(self, event: str, timeout_s: float = 30, **fields: Any) -> dict[str, Any]:
        """The first line of that name with these fields."""
        deadline = time.monotonic() + timeout_s
        with self._read:
            while True:
                for line in self.log:
                    if line["event"] == event and all(line.get(key) == value for key, value in fields.items()):
                        return line
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {event} in the log:\n{self.text}"
                self._read.wait(left_s)

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        address = self.wait_for("starting")["http"]
        try:
            with urllib.request.urlopen(f"{address}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, series: str, timeout_s: float = 20) -> float:
        """The value of a series, as soon as it is there."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self.get("/metrics")[1].splitlines():
                if line.startswith(f"{series} "):
                    return float(line.rpartition(" ")[2])
            time.sleep(0.05)
        raise AssertionError(f"no {series}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 40) -> int:
        """Signal and wait; the exit code."""
        self.send(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 40) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code


@contextmanager
def running(*arguments: str, **settings: str) -> Iterator[Run]:
    """A daemon for the length of the block; killed at its end if it still lives."""
    run = Run(*arguments, **settings)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
        run.wait()
        assert run.process.stdout is not None
        assert run.process.stderr is not None
        run.process.stdout.close()
        run.process.stderr.close()


class Manager:
    """The receiving end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[tuple[float, list[str]]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while message := self._socket.recv(4096):
            self.messages.append((time.monotonic(), message.decode().split("\n")))

    def states(self) -> list[str]:
        """Every line so far."""
        return [line for _, lines in self.messages for line in lines]

    def wait_for(self, is_it: Callable[[str], bool], timeout_s: float = 30) -> str:
        """The first line for which it is so."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = next((line for line in self.states() if is_it(line)), None)
            if found is not None:
                return found
            time.sleep(0.01)
        raise AssertionError(f"not among {self.states()}")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", str(self.path))
        self._thread.join(10)
        self._socket.close()
