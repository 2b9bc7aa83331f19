"""Where log lines come from. The library logs little and configures nothing; programs choose the format."""

from __future__ import annotations

from typing import Any

import structlog


def get_logger(component: str) -> Any:
    """A structlog logger with the component bound; every other fact is a field of the event.

    Bound when it is first used, so that a program which configures structlog after its imports is heard.
    """
    return structlog.get_logger("ffd", component=component)
