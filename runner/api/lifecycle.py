"""Load, unload and flush over HTTP, and how a load goes on. All of it is decided in ``runner.operations``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runner.api.bodies import decode, read_object
from runner.errors import Unavailable
from runner.operations.bodies import FlushBody, LoadBody, Reply, UnloadBody
from runner.parts import Parts

Handler = Callable[[Request], Coroutine[None, None, Response]]
TOKEN_FIELD = "verifiedOpToken"  # noqa: S105  # the name of a field


class Interruptible:
    """Handlers that may wait for minutes, and that are told when the box stops meanwhile."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Response]] = set()

    def wrap(self, handler: Handler) -> Handler:
        """Return the same handler, which raises Unavailable when ``close`` is called before it has answered."""

        async def wrapped(request: Request) -> Response:
            task = asyncio.create_task(handler(request))
            self._running.add(task)
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self._running.discard(task)
            if task.cancelled():
                raise Unavailable("The box is shutting down.", retry_after_s=5)
            return task.result()

        return wrapped

    def close(self) -> None:
        """Interrupt what waits; operations themselves are ended by those who carry them out."""
        for task in self._running:
            task.cancel()


class Lifecycle:
    """Endpoints of the model-runner specification."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._operations = parts.operations

    async def load(self, request: Request) -> Response:
        """``POST /v1/models/load``."""
        fields = await read_object(request)
        body = decode(fields, LoadBody)
        await self._parts.seek(body.modelId)
        return answer(await self._operations.load(body, without_token(fields)))

    async def unload(self, request: Request) -> Response:
        """``POST /v1/models/unload``."""
        fields = await read_object(request)
        return answer(await self._operations.unload(decode(fields, UnloadBody), without_token(fields)))

    async def flush(self, request: Request) -> Response:
        """``POST /v1/cache/flush``."""
        fields = await read_object(request)
        return answer(await self._operations.flush(decode(fields, FlushBody), without_token(fields)))

    async def read_task(self, request: Request) -> Response:
        """``GET /v1/models/load/{taskId}``."""
        return answer(Reply(200, await self._operations.read_task(request.path_params["task_id"])))


def without_token(fields: dict[str, object]) -> dict[str, object]:
    """Return what an operation token may bind: every member of the body but itself."""
    return {name: value for name, value in fields.items() if name != TOKEN_FIELD}


def answer(reply: Reply) -> Response:
    """Return the reply of an operation as JSON."""
    return Response(
        msgspec.json.encode(reply.body), reply.status, {"content-type": "application/json", "cache-control": "no-store"}
    )
