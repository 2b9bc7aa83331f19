"""What tests of `deploy/` share: where it is, and tools of the distribution that a machine may lack."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

CHECKOUT: Final = Path(__file__).parents[2]
DEPLOY: Final = CHECKOUT / "deploy"

# A daemon that has drained still gives its partitions back and closes its connections; whoever stops it must wait for
# that as well.
AFTER_DRAIN_S: Final = 10


def require_tool(name: str, package: str) -> str:
    """The path of a program. Where it is absent the test is skipped; in CI, which installs it, the test fails."""
    program = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed; .ci/run installs it")
        pytest.skip(f"{name} is not installed (apt-get install {package})")
    return program
