"""A TCP proxy in front of PostgreSQL that understands the framing of the protocol.

It counts the messages of every session, by the session's application_name, and can keep the end of a session to
itself, as a network does that loses the last packets.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

STARTUP = 196608
CLOSED = (OSError, asyncio.IncompleteReadError)


class Proxy:
    """Sessions through this proxy, what they said, and what the server answered, by application_name."""

    def __init__(self, dsn: str) -> None:
        self._target = urlsplit(dsn)
        self._server: asyncio.Server | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        # While set, the server's FATAL farewell reaches the client, but the end of the connection does not.
        self.keeps_ends = False
        self.sent: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.received: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @property
    def dsn(self) -> str:
        """The database, through this proxy."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        login = f"{self._target.username}:{self._target.password}"
        return f"postgresql://{login}@127.0.0.1:{port}{self._target.path}?sslmode=disable"

    def round_trips(self, application_name: str = "ffd") -> int:
        """How often the server said ReadyForQuery to the sessions of this name."""
        return self.received[application_name]["Z"]

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
            with suppress(*CLOSED):
                server, to_server = await asyncio.open_connection(self._target.hostname, self._target.port)
                writers.append(to_server)
                await self._serve(client, to_client, server, to_server)
        except asyncio.CancelledError:
            pass  # the proxy stops
        finally:
            self._sessions.discard(session)
            for writer in writers:
                writer.close()
            for writer in writers:
                with suppress(OSError):
                    await writer.wait_closed()

    async def _serve(
        self,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        length, code = struct.unpack("!II", await client.readexactly(8))
        body = await client.readexactly(length - 8)
        to_server.write(struct.pack("!II", length, code) + body)
        if code != STARTUP:
            # A request to cancel: nothing comes back but the end.
            await to_server.drain()
            await server.read()
            return
        fields = body.rstrip(b"\0").split(b"\0")
        settings = dict(zip(fields[::2], fields[1::2], strict=True))
        name = settings.get(b"application_name", b"").decode()
        forth = asyncio.ensure_future(pump(client, to_server, self.sent[name]))
        back = asyncio.ensure_future(pump(server, to_client, self.received[name]))
        try:
            await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
            if back.done() and self.keeps_ends:
                await asyncio.wait({forth})
        finally:
            forth.cancel()
            back.cancel()
            await asyncio.gather(forth, back, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: Counter[str]) -> None:
    """Pass on whole messages until either side ends."""
    with suppress(*CLOSED):
        while True:
            header = await reader.readexactly(5)
            kind, length = struct.unpack("!cI", header)
            body = await reader.readexactly(length - 4)
            counts[kind.decode()] += 1
            writer.write(header + body)
            await writer.drain()
            if kind == b"X":
                return  # the client said goodbye


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the database for the length of the block."""
    proxy = Proxy(dsn)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
