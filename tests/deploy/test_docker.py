"""The Dockerfile, as far as it can be judged without a builder: its rules, and a wheel from exactly what it copies."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from ffd.cli.main import run
from ffd.config import load
from tests.deploy.tools import CHECKOUT, DEPLOY

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
IGNORED = DEPLOY / "docker" / "Dockerfile.dockerignore"


class Instruction(NamedTuple):
    """One instruction and the stage it stands in."""

    stage: int
    name: str
    value: str


def _instructions() -> list[Instruction]:
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: list[Instruction] = []
    stage = -1
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, value = line.strip().partition(" ")
            stage += name == "FROM"
            found.append(Instruction(stage, name, value.strip()))
    return found


def _values(name: str, *, stage: int | None = None) -> list[str]:
    return [each.value for each in _instructions() if each.name == name and stage in (None, each.stage)]


def _last_stage() -> int:
    return _instructions()[-1].stage


def _only(name: str) -> str:
    (value,) = _values(name, stage=_last_stage())
    return value


def _copied() -> list[str]:
    """What is copied out of the checkout."""
    found: list[str] = []
    for value in _values("COPY"):
        words = shlex.split(value)
        if not any(word.startswith("--from=") for word in words):
            found += words[:-1]
    return found


def _image_environ() -> dict[str, str]:
    pairs = (word.partition("=") for value in _values("ENV", stage=_last_stage()) for word in shlex.split(value))
    return {name: value for name, _, value in pairs}


def test_the_tools_of_the_build_stay_out_of_the_image() -> None:
    assert len(_values("FROM")) == 2
    assert not _values("RUN", stage=_last_stage())
    assert all("--from=build" in value for value in _values("COPY", stage=_last_stage()))


def test_the_base_is_one_python_named_by_a_version_that_ffd_supports() -> None:
    images = {value.split()[0] for value in _values("FROM")}
    assert len(images) == 1, "a virtual environment needs the interpreter that it was made with"
    found = re.fullmatch(r"python:(\d+\.\d+)(\.\d+)?-slim(-\w+)?", images.pop())
    assert found is not None
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {found[1]}" in project["classifiers"]


def test_the_user_is_a_number_and_not_root() -> None:
    found = re.fullmatch(r"(\d+):(\d+)", _only("USER"))
    assert found is not None
    assert "0" not in found.groups()


def test_nothing_is_fetched_but_packages() -> None:
    assert not _values("ADD")
    assert not [value for value in _values("RUN") if re.search(r"\b(curl|wget|git)\b|https?://", value)]


def test_packages_have_the_versions_that_were_tested() -> None:
    installs = [
        step for value in _values("RUN") for step in value.split("&&") if re.search(r"\bpip\b.* install ", step)
    ]
    assert installs
    assert all("--constraint constraints.txt" in step for step in installs)


def test_the_image_holds_no_secret() -> None:
    assert not _values("ARG")
    assert not [name for name in _image_environ() if re.search("DSN|PASSWORD|SECRET|TOKEN", name)]


def test_the_settings_of_the_image_are_settings_of_ffd(tmp_path: Path) -> None:
    empty = tmp_path / "ffd.toml"
    empty.touch()
    host, _, port = load(empty, _image_environ()).http.bind.rpartition(":")
    assert host == "0.0.0.0", "loopback cannot be reached from outside of the container"
    assert port == _only("EXPOSE")


def test_the_image_runs_the_daemon_and_passes_signals_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    # A list, not a line: a shell in between would swallow SIGTERM.
    assert json.loads(_only("ENTRYPOINT")) == ["ffd"]
    assert run([*json.loads(_only("CMD")), "--help"]) == 0, capsys.readouterr().err
    assert _only("STOPSIGNAL") == "SIGTERM"


def test_the_build_sees_what_it_copies_and_nothing_else() -> None:
    lines = [line for line in IGNORED.read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert sorted(line.removeprefix("!") for line in lines if line.startswith("!")) == sorted(_copied())


def test_what_is_copied_is_enough_to_build_the_wheel(tmp_path: Path) -> None:
    context, dist = tmp_path / "src", tmp_path / "dist"
    context.mkdir()
    for name in _copied():
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, context / name)
    (step,) = [value for value in _values("RUN") if value.startswith("python -m build")]
    arguments = shlex.split(step.replace("/wheels", str(dist)))[1:]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=context, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "ffd/cli/main.py" in names
    assert {f"ffd/_migrations/{path.name}" for path in (CHECKOUT / "migrations").glob("*.sql")} <= names
