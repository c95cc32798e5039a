"""Load, unload and flush over HTTP, and how a load goes on. All of it is decided in ``runner.operations``."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runner.api.bodies import decode, read_object
from runner.operations.tasks import FlushBody, LoadBody, Reply, UnloadBody
from runner.parts import Parts

TOKEN_FIELD = "verifiedOpToken"  # noqa: S105  # the name of a field


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
