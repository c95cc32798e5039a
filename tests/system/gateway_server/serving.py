"""A uvicorn server inside the test's own event loop, on a port the kernel chose."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn


@asynccontextmanager
async def run_server(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port. Signals stay with the test runner."""
    task = asyncio.create_task(server._serve(sockets))
    try:
        async with asyncio.timeout(30):
            while not server.started:
                if task.done():
                    await task
                await asyncio.sleep(0.001)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        async with asyncio.timeout(30):
            await task
