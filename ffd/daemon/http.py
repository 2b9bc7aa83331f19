"""The HTTP side of the daemon: `/livez`, `/readyz`, `/metrics` on one port."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ffd.config import ConfigError
from ffd.daemon.health import Health, Verdict

BACKLOG: Final = 128
# Open requests of a stopping server; a scrape takes milliseconds.
SHUTDOWN_TIMEOUT_S: Final = 2


def listen(bind: str) -> socket.socket:
    """Take the address before anything else starts: one that is taken is a mistake to hear of at once."""
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise ConfigError(f"http.bind: cannot listen on {bind}: {getattr(error, 'strerror', None) or error}") from None
    return sock


def address_of(sock: socket.socket) -> str:
    """Where a socket listens, as the front of a URL."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the supervisor."""
        yield


class HttpServer:
    """Serves a socket until told to stop."""

    def __init__(self, sock: socket.socket, health: Health) -> None:
        self._socket = sock
        # A second series per counter that says when it began is of no use here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        config = uvicorn.Config(
            _app(health),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serve."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Answer what is under way, then end."""
        self._server.should_exit = True


def _answer(health: Health, verdict: Verdict) -> Response:
    return JSONResponse(
        {
            "status": "ok" if verdict.is_ok else "failing",
            "checks": verdict.checks,
            "restarted_tasks": health.tasks.restarted(),
        },
        status_code=200 if verdict.is_ok else 503,
        headers={"cache-control": "no-store"},
    )


def _app(health: Health) -> Starlette:
    async def livez(_request: Request) -> Response:
        return _answer(health, health.live())

    async def readyz(_request: Request) -> Response:
        return _answer(health, health.ready())

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY), headers={"content-type": content_type})

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
        ]
    )
