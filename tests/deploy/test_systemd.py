"""The systemd unit is one that systemd accepts, that keeps the daemon small, and that fits the daemon."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ffd.cli.main import run
from ffd.cli.output import EXIT_USAGE
from ffd.config import NodeSettings, load
from tests.deploy.tools import AFTER_DRAIN_S, DEPLOY, require_tool

UNIT = DEPLOY / "systemd" / "ffd.service"
EXPOSURE_MAX = 2.0

Analyze = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def analyze() -> Analyze:
    program = require_tool("systemd-analyze", "systemd")

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "--no-pager", *arguments], capture_output=True, text=True, timeout=60, check=False
        )

    return call


def _settings() -> dict[str, list[str]]:
    """Each key with its values in order; a key may stand more than once."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def _seconds(key: str) -> int:
    (value,) = _settings()[key]
    return int(value)


def _installed(directory: Path, extra: str = "") -> Path:
    """The unit as it would be where ffd is installed: its program exists."""
    program = shlex.split(_settings()["ExecStart"][0])[0]
    unit = directory / UNIT.name
    unit.write_text(UNIT.read_text().replace(f"ExecStart={program} ", "ExecStart=/bin/true ") + extra)
    return unit


def test_systemd_accepts_every_line_of_the_unit(analyze: Analyze, tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", _installed(tmp_path))
    assert done.returncode == 0, done.stderr
    assert UNIT.name not in done.stderr


def test_a_line_that_systemd_does_not_know_would_be_noticed(analyze: Analyze, tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", _installed(tmp_path, "\n[Service]\nProtectEverything=yes\n"))
    assert "ProtectEverything" in done.stderr


def test_the_daemon_is_exposed_to_little(analyze: Analyze) -> None:
    done = analyze("security", "--offline=true", UNIT)
    found = re.search(r"exposure level for ffd\.service: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= EXPOSURE_MAX, done.stdout


def test_a_stop_leaves_time_to_drain() -> None:
    assert _seconds("TimeoutStopSec") >= NodeSettings().drain_timeout_s + AFTER_DRAIN_S


def test_readiness_is_told_in_the_way_that_systemd_252_knows() -> None:
    settings = _settings()
    assert settings["Type"] == ["notify"]
    assert settings["NotifyAccess"] == ["main"]
    assert settings["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert _seconds("WatchdogSec") > 0


def test_a_broken_configuration_is_not_started_again_and_again() -> None:
    settings = _settings()
    assert settings["Restart"] == ["on-failure"]
    assert settings["RestartPreventExitStatus"] == [str(EXIT_USAGE)]


def test_the_command_line_of_the_unit_is_one_that_ffd_knows(capsys: pytest.CaptureFixture[str]) -> None:
    _, *arguments = shlex.split(_settings()["ExecStart"][0])
    assert run([*arguments, "--help"]) == 0, capsys.readouterr().err


def test_the_dsn_arrives_through_the_credential_and_nowhere_else(tmp_path: Path) -> None:
    settings = _settings()
    (credential,) = settings["LoadCredential"]
    name, _, _ = credential.partition(":")
    (tmp_path / name).write_text("postgresql://ffd_app:secret@db/ffd\n")
    (variable,) = settings["Environment"]
    key, _, value = variable.replace("%d", str(tmp_path)).partition("=")
    empty = tmp_path / "ffd.toml"
    empty.touch()
    assert load(empty, {key: value}).database.dsn == "postgresql://ffd_app:secret@db/ffd"
