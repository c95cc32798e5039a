"""A third-party model runner, as its public contract says: a Starlette server on a loopback port that a test scripts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from tests.fakes.waiting import wait_until


@dataclass
class BoxContract:
    """``answers``: what each path answers, (status, JSON members); ``seen``: method, path and body of every request."""

    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    bearers: list[str] = field(default_factory=list)
    """The ``Authorization`` of every request, empty = none."""
    port: int = 0

    @property
    def url(self) -> str:
        """What the box registered."""
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        """What was asked for, in order."""
        return [f"{method} {path}" for method, path, _ in self.seen]

    async def answer(self, request: Request) -> Response:
        """Answer as the script says."""
        body = await request.json() if request.method == "POST" else {}
        self.bearers.append(request.headers.get("authorization", ""))
        self.seen.append((request.method, request.url.path, body))
        status, members = self.answers.get(request.url.path, (404, {"error": {"code": "not_found", "message": "no"}}))
        if status == 302:
            return RedirectResponse(str(members), status_code=302)
        return members if isinstance(members, Response) else JSONResponse(members, status)


@contextmanager
def run_box_contract() -> Iterator[BoxContract]:
    """Serve until the block ends."""
    contract = BoxContract()
    app = Starlette(routes=[Route("/{path:path}", contract.answer, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        contract.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            wait_until(lambda: server.started, what="the server listens")
            yield contract
        finally:
            server.should_exit = True
            thread.join(timeout=30)
