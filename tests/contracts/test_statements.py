"""Every SQL statement of the package, checked by the server: what a compiler would do (style §4)."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import defaultdict

import asyncpg
import pytest

import ffd
from ffd.config import DatabaseSettings
from ffd.db.database import open_connection
from ffd.db.statement import Statement

pytestmark = pytest.mark.anyio


def find_statements() -> dict[str, list[Statement]]:
    """Every module-level statement by its name; one that several modules import counts once."""
    found: dict[int, Statement] = {}
    for module in pkgutil.walk_packages(ffd.__path__, "ffd."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Statement):
                found[id(value)] = value
    by_name = defaultdict(list)
    for statement in found.values():
        by_name[statement.name].append(statement)
    return dict(sorted(by_name.items()))


STATEMENTS = find_statements()


def test_the_statements_are_found() -> None:
    """The walk sees the operations: without this, the other tests could pass on nothing."""
    assert {"claim", "claim_many", "complete", "fail", "renew", "create", "create_many", "ring"} <= STATEMENTS.keys()


def test_statement_names_are_unique() -> None:
    """Show: names are metric labels and comments: one name, one statement."""
    assert [name for name, statements in STATEMENTS.items() if len(statements) > 1] == []


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_is_complete_and_carries_its_name(name: str) -> None:
    """Show: nothing in double brackets is left, and pg_stat_activity shows which statement it is."""
    for statement in STATEMENTS[name]:
        assert statement.sql.startswith(f"/* ffd:{name} */ ")
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert "[[" not in statement.sql
        assert "]]" not in statement.sql


async def test_every_statement_is_prepared_by_the_server(dsn: str) -> None:
    """Show: every statement is PREPAREd on a migrated database: names, types and parameters are right."""
    wrong = {}
    for planning in {statement.planning for statements in STATEMENTS.values() for statement in statements}:
        connection = await open_connection(DatabaseSettings(dsn=dsn), planning)
        try:
            for name, statements in STATEMENTS.items():
                for statement in statements:
                    if statement.planning != planning:
                        continue
                    try:
                        prepared = await connection.prepare(statement.sql)
                    except asyncpg.PostgresError as error:
                        wrong[name] = str(error)
                    else:
                        unknown = [each.name for each in prepared.get_parameters() if each.name == "unknown"]
                        assert not unknown, name
        finally:
            await connection.close()
    assert wrong == {}


async def test_a_wrong_statement_would_be_found(dsn: str) -> None:
    """The check above can fail."""
    connection = await open_connection(DatabaseSettings(dsn=dsn))
    try:
        with pytest.raises(asyncpg.UndefinedColumnError):
            await connection.prepare(Statement("wrong", "select nothing from ff_exec_core").sql)
    finally:
        await connection.close()
