"""A TCP relay in front of PostgreSQL that can be cut: packets vanish, connections stay open, as with a dead network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Relay:
    """Bytes to and from the database, while the line is up."""

    def __init__(self, dsn: str) -> None:
        self._target = urlsplit(dsn)
        self._up = asyncio.Event()
        self._up.set()
        self._sessions: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def dsn(self) -> str:
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        login = f"{self._target.username}:{self._target.password}"
        return f"postgresql://{login}@127.0.0.1:{port}{self._target.path}?sslmode=disable"

    def cut(self) -> None:
        """From now on nothing gets through."""
        self._up.clear()

    def mend(self) -> None:
        """What was under way is lost; new connections work."""
        for session in self._sessions:
            session.cancel()
        self._up.set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for session in list(self._sessions):
            session.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        session = asyncio.current_task()
        assert session is not None
        self._sessions.add(session)
        writers = [to_client]
        try:
            await self._up.wait()
            with suppress(OSError):
                server, to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
                writers.append(to_server)
                pumps = [asyncio.ensure_future(self._pump(client, to_server))]
                pumps.append(asyncio.ensure_future(self._pump(server, to_client)))
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)
        except asyncio.CancelledError:
            pass  # the relay stops, or the line was mended
        finally:
            self._sessions.discard(session)
            for writer in writers:
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._up.wait()
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def relayed(dsn: str) -> AsyncIterator[Relay]:
    """A relay for the length of the block."""
    relay = Relay(dsn)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.stop()
