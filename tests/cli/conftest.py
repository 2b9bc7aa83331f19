"""`ffd` in this process, on a database of its own or on none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calls import UNREACHABLE, Cli


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without configuration, an environment without settings, a user with a name."""
    monkeypatch.chdir(tmp_path)
    for name in ("FFD_CONFIG", "FFD_WAITPOINT_TOKEN", "FFD_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGNAME", "ada")


@pytest.fixture
def cli(dsn: str, apart: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Commands on a migrated database."""
    return Cli(dsn, monkeypatch, capsys)


@pytest.fixture
def cli_empty(
    empty_database: str, apart: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """Commands on a database without the schema."""
    return Cli(empty_database, monkeypatch, capsys)


@pytest.fixture
def cli_down(apart: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Commands where no database listens."""
    return Cli(UNREACHABLE, monkeypatch, capsys)
