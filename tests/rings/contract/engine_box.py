"""A box in front of the scripted engine of the conformance suite: what official clients need is a model that says something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from conformance.engine.server import serve_engine
from tests.rings.contract.lab import CHAT, Lab
from tests.rings.contract.scripted_box import ScriptedBox, Stream
from wire.frames import End

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_CONCURRENT = 8
_PASSED = ("retry-after", "x-should-retry")


@asynccontextmanager
async def engine_box(lab: Lab, model: str, *, native: Sequence[str] = ()) -> AsyncIterator[ScriptedBox]:
    """Connect a box that answers ``model`` on chat completions and, byte for byte, on the ``native`` paths."""
    async with serve_engine(models=[model], native=native) as url, aiohttp.ClientSession() as session:
        box = await lab.box(model, endpoints=[CHAT, *native], max_concurrent=_CONCURRENT)
        forwarding = asyncio.create_task(_forward_all(box, url, session))
        try:
            yield box
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)


async def _forward_all(box: ScriptedBox, url: str, session: aiohttp.ClientSession) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            stream = await box.stream(within_s=60)
            group.create_task(_forward(box, stream, url, session))


async def _forward(box: ScriptedBox, stream: Stream, url: str, session: aiohttp.ClientSession) -> None:
    headers = {"content-type": stream.meta.headers.get("content-type", "application/json")}
    try:
        async with session.post(url + stream.meta.path, data=bytes(stream.body), headers=headers) as answer:
            passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
            await box.head(stream, status=answer.status, content_type=answer.headers["content-type"], headers=passed)
            async for piece in answer.content.iter_any():
                await box.data(stream, piece)
    except aiohttp.ClientError as error:
        await box.end(stream, End(error="engine_failed", message=type(error).__name__))
    else:
        await box.end(stream)
