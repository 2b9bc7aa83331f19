"""The wheel carries the migrations and uses its own, wherever it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

# Says where the code under test comes from, then does what the console script does.
PROGRAM = "import ffd; print(ffd.__file__, flush=True); from ffd.cli.main import main; main()"


def call(*command: str | Path, cwd: Path, **environ: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_installed_wheel_migrates_from_outside_the_checkout(empty_database: str, tmp_path: Path) -> None:
    dist, installed, elsewhere = tmp_path / "dist", tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    python = sys.executable
    call(python, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, CHECKOUT, cwd=elsewhere)
    (wheel,) = dist.glob("*.whl")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index")
    call(python, "-m", "pip", "install", *quiet, "--no-deps", "--target", installed, wheel, cwd=elsewhere)

    origin, result = call(
        python,
        "-c",
        PROGRAM,
        "migrate",
        "--json",
        cwd=elsewhere,
        PYTHONPATH=str(installed),
        FFD_DATABASE__DSN=empty_database,
    ).splitlines()
    assert Path(origin).is_relative_to(installed)
    files = sorted(path.stem for path in (CHECKOUT / "migrations").glob("*.sql"))
    assert sorted(path.stem for path in (installed / "ffd" / "_migrations").glob("*.sql")) == files
    assert [step["name"] for step in json.loads(result)["applied"]] == files
