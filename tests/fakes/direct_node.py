"""Somebody else's model runner, called over HTTP as its public contract says: on a loopback port, scripted by a test."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.fakes.waiting import wait_until

CAPABILITIES = """{
  "runnerType": "vllm-0.6.0", "runnerId": "node-1",
  "models": {
    "loaded": [{"id": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "awq-4bit", "contextLength": 32768,
      "loadedAt": 1745880000, "gpuMemoryMB": 24000}],
    "loading": [{"id": "mistralai/Mistral-7B-Instruct-v0.3", "progress": 0.45, "eta": 180}],
    "available": ["meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/deepseek-r1-distill-llama-70b"]
  },
  "resources": {"gpuIds": [0], "gpuMemoryTotalMB": 81920, "gpuMemoryUsedMB": 58000, "gpuMemoryFreeMB": 23920,
    "gpuUtilization": 0.67, "kvCacheSizeMB": 12000, "kvCacheUtilization": 0.45},
  "queue": {"depth": 3, "maxDepth": 16, "avgWaitMs": 150, "p95WaitMs": 450},
  "capabilities": {"streaming": true, "prefixCaching": true},
  "health": "healthy"
}"""
"""What one tells of itself: the example of the contract."""
NOT_FOUND = (404, {"error": {"code": "not_found", "message": "no"}})


@dataclass
class DirectNode:
    """``answers``: what each path answers below any base: (status, JSON members, bytes, where a redirect leads, or a response).

    ``seen``: method, path and body of every request; ``hosts`` and ``bearers``: its headers, empty = none.
    ``api_key``: the only one that it accepts; empty = it asks for none.
    """

    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    bearers: list[str] = field(default_factory=list)
    api_key: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.seen]

    def forget(self) -> None:
        for kept in (self.answers, self.seen, self.hosts, self.bearers):
            kept.clear()
        self.api_key = ""

    async def answer(self, request: Request) -> Response:
        body = await request.json() if request.method == "POST" else {}
        bearer = request.headers.get("authorization", "")
        self.hosts.append(request.headers["host"])
        self.bearers.append(bearer)
        self.seen.append((request.method, request.url.path, body))
        if self.api_key and bearer != f"Bearer {self.api_key}":
            return Response(status_code=401)
        found = (answer for path, answer in self.answers.items() if request.url.path.endswith(path))
        status, said = next(found, NOT_FOUND)
        if isinstance(said, Response):
            return said
        if 300 <= status < 400:
            return RedirectResponse(str(said), status_code=status)
        return Response(said, status) if isinstance(said, bytes) else JSONResponse(said, status)


@contextmanager
def run_direct_node() -> Iterator[DirectNode]:
    node = DirectNode()
    app = Starlette(routes=[Route("/{path:path}", node.answer, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started, "the node listens")
            yield node
        finally:
            server.should_exit = True
            thread.join(timeout=30)


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
        self.writer.write(data)
        await self.writer.drain()

    async def wait_closed(self) -> None:
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
