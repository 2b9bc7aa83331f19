"""What systemd is told, over the socket it names; without one, nothing happens."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from ffd.telemetry.logging import get_logger

_log = get_logger("sd_notify")


class Notifier:
    """Sends states to the service manager. A datagram that cannot be sent is logged and forgotten."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        self.watchdog_s = _watchdog_s(environ)
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, *states: str) -> None:
        """Send lines such as `READY=1` in one message."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(states).encode(), self._address)
        except OSError as error:
            _log.warning("notify_failed", error=type(error).__name__)

    def ready(self, status: str) -> None:
        """The service does its work."""
        self.send("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self.send(f"STATUS={text}")

    def reloading(self) -> None:
        """The configuration is being read again; `ready` ends it."""
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, grace_s: float) -> None:
        """The service drains, for up to `grace_s`, and then has to take leave and close its connections."""
        self.send("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={int((grace_s + 15) * 1_000_000)}")

    def extend(self, seconds: float) -> None:
        """Starting takes longer: the manager shall wait at least this much more."""
        self.send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")

    def ping(self, status: str) -> None:
        """Everything makes progress."""
        self.send("WATCHDOG=1", f"STATUS={status}")

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """How often the manager wants to hear a ping at the latest; None when it does not ask this process."""
    pid, usec = environ.get("WATCHDOG_PID", ""), environ.get("WATCHDOG_USEC", "")
    if not usec.isdecimal() or int(usec) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 1_000_000
