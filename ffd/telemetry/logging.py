"""Where log lines come from. The library logs little and configures nothing; programs choose the format."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from ffd.config import LogSettings
from ffd.telemetry.metrics import LOG_LINES_LOST


def get_logger(component: str) -> Any:
    """A structlog logger with the component bound; every other fact is a field of the event.

    Bound when it is first used, so that a program which configures structlog after its imports is heard.
    """
    return structlog.get_logger("ffd", component=component)


class _Stderr:
    """Writes lines to standard error. A line that cannot be written is counted: logging must never end a task."""

    def __init__(self, *_: object) -> None:
        pass

    def msg(self, message: str) -> None:
        try:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            LOG_LINES_LOST.inc()

    debug = info = warning = error = critical = exception = msg


class _Foreign(logging.Handler):
    """Lines of other libraries, in the same form."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger("ffd", component=record.name)
        log.log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def configure(settings: LogSettings) -> None:
    """One line per thing that happened, on standard error, for this whole process."""
    level = getattr(logging, settings.level.upper())
    if settings.format == "json":
        # Without local variables, which may hold anything: payloads, addresses, tokens.
        exceptions = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        last: list[Any] = [structlog.processors.ExceptionRenderer(exceptions), structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Foreign()], level=max(level, logging.WARNING), force=True)
