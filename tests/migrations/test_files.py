"""Migration files: which are accepted, in which order, and where their statements end."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from ffd.db.migration_files import MigrationFailed, MigrationKind, discover, split_statements
from tests.migrations.runs import CREATE_A, CREATE_B, WriteFiles


def test_files_are_found_in_order_with_their_checksums(files: WriteFiles) -> None:
    directory = files(m0002_b=CREATE_B, m0001_a=CREATE_A)
    (directory / "README.md").write_text("not a migration")
    first, second = discover(directory)
    assert (first.version, first.name, first.label) == (1, "a", "0001_a")
    assert second.label == "0002_b"
    assert first.checksum == hashlib.sha256(CREATE_A.encode()).hexdigest()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), "no migration files"),
        (("1_a",), "must be like"),
        (("0001_A",), "must be like"),
        (("0002_a",), "0002_a.sql follows a gap"),
        (("0001_a", "0003_c"), "0003_c.sql follows a gap"),
        (("0001_a", "0001_b"), "0001_b.sql is a second file"),
    ],
)
def test_a_wrong_set_of_files_is_refused_by_name(tmp_path: Path, names: tuple[str, ...], text: str) -> None:
    for name in names:
        (tmp_path / f"{name}.sql").write_text("select 1")
    with pytest.raises(MigrationFailed, match=text) as caught:
        discover(tmp_path)
    assert caught.value.kind is MigrationKind.INVALID_FILES


def test_a_file_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / "0001_a.sql").write_bytes(b"select '\xff'")
    with pytest.raises(MigrationFailed, match=r"0001_a\.sql: not UTF-8"):
        discover(tmp_path)


@pytest.mark.parametrize("statement", ["BEGIN", "commit;", "start  transaction", "rollback"])
def test_a_file_must_not_end_the_transaction_it_runs_in(files: WriteFiles, statement: str) -> None:
    with pytest.raises(MigrationFailed, match=r"0001_a\.sql: line 4"):
        discover(files(m0001_a=f"-- begin\nselect 'commit; x';\n\n{statement}"))


@pytest.mark.parametrize(
    ("sql", "statements"),
    [
        ("", []),
        (" ; -- a;\n /* b; /* c; */ d; */ ;", []),
        ("select 1;select 2", ["select 1", "select 2"]),
        ("select ';''' , \";\" ; x", ["select ';''' , \";\" ", "x"]),
        (r"select e'\';' ; x", [r"select e'\';' ", "x"]),
        (r"select E'a''\';' ; x", [r"select E'a''\';' ", "x"]),
        (r"select '\'; x", [r"select '\'", "x"]),
        ("do $$ a; $x$ b; $$; x", ["do $$ a; $x$ b; $$", "x"]),
        ("do $é1$ a; $$ ; $é1$; x", ["do $é1$ a; $$ ; $é1$", "x"]),
        ("select $1; x", ["select $1", "x"]),
        ("select a$b$; select c$b$", ["select a$b$", "select c$b$"]),
        ("$$ never closed; x", ["$$ never closed; x"]),
        ("a -- it's;\n b; c /* ' */; d", ["a -- it's;\n b", "c /* ' */", "d"]),
    ],
)
def test_statements_end_at_semicolons_that_are_not_quoted(sql: str, statements: list[str]) -> None:
    assert [statement.text for statement in split_statements(sql)] == statements
    assert all(sql.startswith(text, offset) for offset, text in split_statements(sql))
