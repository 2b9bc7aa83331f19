"""The alert rules: accepted by promtool, tested each, explained each, and about metrics that exist."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from ffd.telemetry import metrics
from tests.deploy.tools import CHECKOUT, DEPLOY, require_tool

RULES = DEPLOY / "prometheus" / "ffd.rules.yaml"
RULE_TESTS = DEPLOY / "prometheus" / "ffd.rules.test.yaml"
RUNBOOK = CHECKOUT / "docs" / "runbook.md"

ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
]
EACH = pytest.mark.parametrize("alert", ALERTS, ids=[alert["alert"] for alert in ALERTS])


def _declared() -> dict[str, set[str]]:
    """The name of every sample that a daemon exports, with the labels of its metric."""
    found: dict[str, set[str]] = {}
    for value in vars(metrics).values():
        if isinstance(value, MetricWrapperBase):
            (family,) = value.describe()
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            for suffix in suffixes:
                found[family.name + suffix] = set(value._labelnames)
    return found


def _promtool(*arguments: str) -> None:
    program = require_tool("promtool", "prometheus")
    done = subprocess.run(
        [program, *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    _promtool("check", "rules", RULES.name)


def test_the_rules_fire_and_stay_silent_as_their_tests_say() -> None:
    _promtool("test", "rules", RULE_TESTS.name)


@EACH
def test_every_alert_is_tested_firing_and_silent(alert: dict[str, Any]) -> None:
    tests = yaml.safe_load(RULE_TESTS.read_text())["tests"]
    fires = {
        bool(each.get("exp_alerts"))
        for test in tests
        for each in test["alert_rule_test"]
        if each["alertname"] == alert["alert"]
    }
    assert fires == {True, False}


@EACH
def test_every_alert_says_how_bad_it_is_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert CHECKOUT / page == RUNBOOK
    assert anchor == alert["alert"].lower()
    assert f"\n## {alert['alert']}\n" in RUNBOOK.read_text()


@EACH
def test_every_metric_of_a_rule_is_one_that_ffd_exports(alert: dict[str, Any]) -> None:
    named = set(re.findall(r"\bffd_\w+", alert["expr"]))
    assert named
    assert named <= set(_declared())


@EACH
def test_rules_add_up_by_labels_that_their_metrics_have(alert: dict[str, Any]) -> None:
    given_by_prometheus = {"job", "instance"}
    (labels,) = {frozenset(_declared()[name]) for name in re.findall(r"\bffd_\w+", alert["expr"])}
    grouped = {name.strip() for names in re.findall(r"\bby \(([^)]*)\)", alert["expr"]) for name in names.split(",")}
    shown = set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"])))
    assert grouped | shown <= labels | given_by_prometheus
    if grouped:
        assert shown <= grouped


@EACH
def test_the_rules_own_tests_use_the_labels_of_the_metrics(alert: dict[str, Any]) -> None:
    declared = _declared()
    for name, given in re.findall(r"series: (ffd_\w+)\{([^}]*)\}", RULE_TESTS.read_text()):
        if name in alert["expr"]:
            labels = set(re.findall(r"(\w+)=", given)) - {"job", "instance"}
            assert labels == declared[name], name
