"""Migration files of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.migrations.runs import WriteFiles


@pytest.fixture
def files(tmp_path: Path) -> WriteFiles:
    """Write migration files: the key is the file name without its ending."""
    directory = tmp_path / "sql"
    directory.mkdir()

    def write(**content: str) -> Path:
        for name, sql in content.items():
            (directory / f"{name.removeprefix('m')}.sql").write_text(sql)
        return directory

    return write
