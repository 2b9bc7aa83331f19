"""The runbook can be followed: its queries run, and what it names exists."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import msgspec
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from ffd.config import DEFAULTS
from ffd.telemetry import metrics
from tests.deploy.tools import CHECKOUT, DEPLOY

TEXT = (CHECKOUT / "docs" / "runbook.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
QUERIES = re.findall(r"```sql\n(.*?)```", TEXT, re.DOTALL)


def test_there_is_a_section_for_each_alert_and_no_other() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "ffd.rules.yaml").read_text())["groups"]
    assert sorted(SECTIONS) == sorted(rule["alert"] for group in groups for rule in group["rules"])


@pytest.mark.parametrize("alert", SECTIONS)
def test_every_section_answers_the_same_four_questions(alert: str) -> None:
    assert re.findall(r"^\*\*(.+?)\.\*\*", SECTIONS[alert], re.MULTILINE) == ["Meaning", "At risk", "Look at", "Do"]


@pytest.mark.anyio
@pytest.mark.parametrize("query", QUERIES)
async def test_every_query_fits_the_schema(query: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.prepare(query)


def test_every_metric_is_one_that_ffd_exports() -> None:
    declared = set()
    for value in vars(metrics).values():
        if isinstance(value, MetricWrapperBase):
            (family,) = value.describe()
            declared.add(family.name + ("_total" if family.type == "counter" else ""))
    named = set(re.findall(r"\bffd_\w+", TEXT))
    assert named
    assert named <= declared


def test_every_log_event_is_one_that_ffd_writes() -> None:
    source = "\n".join(path.read_text() for path in (CHECKOUT / "ffd").rglob("*.py"))
    named = set(re.findall(r"\blog\s+`(\w+)`", TEXT, re.IGNORECASE))
    assert named
    assert {name for name in named if f'"{name}"' not in source} == set()


def test_every_setting_is_one_that_can_be_set() -> None:
    named = re.findall(rf"`({'|'.join(map(re.escape, DEFAULTS))})\.(\w+)`", TEXT)
    assert named
    for table, key in named:
        assert key in {field.name for field in msgspec.structs.fields(DEFAULTS[table])}, f"{table}.{key}"
