"""A loopback HTTP server that answers exactly the bytes a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[["Visit"], Awaitable[None]]


@dataclass
class Visit:
    """One connection from the gateway."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    requests: list[bytes] = field(default_factory=list)

    async def read_request(self) -> bytes:
        """Return the next request, head and body. Raises asyncio.IncompleteReadError when the gateway closed."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        request = head + await self.reader.readexactly(length)
        self.requests.append(request)
        return request

    async def write(self, data: bytes) -> None:
        """Send bytes and wait until the kernel has them."""
        self.writer.write(data)
        await self.writer.drain()

    async def wait_closed(self) -> None:
        """Wait until the gateway has closed the connection."""
        async with asyncio.timeout(30):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionResetError:
                pass


@dataclass
class Upstream:
    """The server: its port, and every connection it had."""

    port: int
    visits: list[Visit]


@asynccontextmanager
async def run_upstream(answer: Answer) -> AsyncIterator[Upstream]:
    """Serve connections with ``answer`` until the block ends."""
    visits: list[Visit] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = Visit(reader, writer)
        visits.append(visit)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await answer(visit)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Upstream(server.sockets[0].getsockname()[1], visits)
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
