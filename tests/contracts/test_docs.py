"""What the documents say is so."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase

import ffd
from ffd.telemetry import metrics

ROOT = Path(__file__).parent.parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
OUTPUTS = [r"b'HELLO'\n", r"Run a worker on lane 'billing'\.\n"]


def test_every_example_of_the_readme_is_known() -> None:
    assert len(BLOCKS) == len(OUTPUTS)


@pytest.mark.parametrize("at", range(len(OUTPUTS)))
def test_the_readmes_examples_run_as_they_stand(at: int, dsn: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[at])
    done = subprocess.run(
        [sys.executable, "-W", "error", script],
        env={**os.environ, "DSN": dsn},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(OUTPUTS[at], done.stdout)


def test_every_relative_link_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_documented_metrics_are_the_declared_ones() -> None:
    documented = set(re.findall(r"^\| `(ffd_\w+)", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE))
    declared = set()
    for value in vars(metrics).values():
        if isinstance(value, MetricWrapperBase):
            (family,) = value.describe()
            declared.add(family.name + ("_total" if family.type == "counter" else ""))
    assert documented == declared


def _public_members(thing: Any) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for name, member in inspect.getmembers(thing)
        if not name.startswith("_") and (inspect.isfunction(member) or inspect.ismethod(member))
    ]


@pytest.mark.parametrize("name", [name for name in ffd.__all__ if name != "__version__"])
def test_every_public_name_is_documented_and_typed(name: str) -> None:
    thing = getattr(ffd, name)
    assert inspect.getdoc(thing), name
    for member_name, member in _public_members(thing):
        if (member.__module__ or "").startswith("ffd"):
            assert inspect.getdoc(member), f"{name}.{member_name}"
            assert "return" in member.__annotations__, f"{name}.{member_name}"


def test_the_version_is_said_once() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{ffd.__version__}"' in pyproject
