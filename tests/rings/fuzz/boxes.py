"""Boxes for the fuzzer: one whose engine always answers well, and one whose engine says whatever it is handed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from conformance.engine import media
from conformance.engine.chat import render_chat, render_completion, stream_chat, stream_completion
from conformance.engine.native import render_message, render_response, stream_message, stream_response
from conformance.engine.script import Script
from conformance.engine.server import frame_event
from conformance.engine.speech import TEXT_PIECES, Speech
from tests.rings.contract.lab import Lab
from tests.rings.contract.scripted_box import ScriptedBox, Stream
from tests.rings.contract.stack import Gateway
from tests.rings.fuzz.bodies import CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, MESSAGES, RERANK, RESPONSES

STREAM = "text/event-stream"
_CONCURRENT, _REMEMBERED = 64, 500
_FRAME_BYTES = 64 * 1024
_YIELD_EVERY = 50
_CREDIT_WITHIN_S, _IDLE_S = 30.0, 3600.0
_SPEECH, _SCRIPT = Speech(pieces=TEXT_PIECES), Script({})
_ASKED = {"model": "m", "prompt": "hi", "input": ["hi"], "documents": ["a"], "stream_options": {"include_usage": True}}
_WHOLE = {CHAT: render_chat, COMPLETIONS: render_completion, MESSAGES: render_message, RESPONSES: render_response}
_STREAMED = {CHAT: stream_chat, COMPLETIONS: stream_completion, MESSAGES: stream_message, RESPONSES: stream_response}
_AT_ONCE = {EMBEDDINGS: media.embed, RERANK: media.rank, IMAGES: media.draw}


def _may_send(stream: Stream, size: int) -> bool:
    return stream.window >= size or stream.cancelled is not None


def _say(path: str, *, is_streaming: bool) -> tuple[str, bytes]:
    """Return type and bytes of a good answer; the request is not looked at."""
    if path in _STREAMED and is_streaming:
        is_named = path in {MESSAGES, RESPONSES}
        events = [
            frame_event(content, _SCRIPT, name=content["type"] if is_named else "")
            for content in _STREAMED[path](_SPEECH, _SCRIPT, _ASKED)
        ]
        return STREAM, b"".join(events) + (b"" if is_named else b"data: [DONE]\n\n")
    if path in _WHOLE:
        content = _WHOLE[path](_SPEECH, _SCRIPT, _ASKED)
    else:
        content = _AT_ONCE[path](_ASKED) if path in _AT_ONCE else {"text": media.TRANSCRIPT}
    return "application/json", json.dumps(content).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answers."""

    content_type: str
    pieces: Iterable[bytes]
    status: int = 200


@asynccontextmanager
async def good_box(lab: Lab, gateway: Gateway, model: str, endpoints: Sequence[str]) -> AsyncIterator[ScriptedBox]:
    """Connect a box that answers ``model`` well on these paths, whatever it is asked."""
    answers = {(path, streamed): _say(path, is_streaming=streamed) for path in endpoints for streamed in (True, False)}

    async def serve(box: ScriptedBox, stream: Stream) -> None:
        content_type, body = answers[stream.meta.path, stream.meta.is_streaming]
        await box.head(stream, content_type=content_type)
        await box.data(stream, body)
        await box.end(stream)

    async with _serving(lab, gateway, model, endpoints, serve) as box:
        yield box


@asynccontextmanager
async def hostile_box(lab: Lab, gateway: Gateway, model: str, choose: Callable[[], Answer]) -> AsyncIterator[ScriptedBox]:
    """Connect a box that answers chat completions with what ``choose`` returns."""

    async def serve(box: ScriptedBox, stream: Stream) -> None:
        said = choose()
        await box.head(stream, status=said.status, content_type=said.content_type)
        for number, piece in enumerate(said.pieces):
            if number % _YIELD_EVERY == 0:
                await asyncio.sleep(0)  # a send that need not wait lets nobody else have a turn, pongs included
            for start in range(0, len(piece), _FRAME_BYTES):
                part = piece[start : start + _FRAME_BYTES]
                await box._wait(partial(_may_send, stream, len(part)), _CREDIT_WITHIN_S, "credit, or a cancel")
                if stream.cancelled is not None:
                    return
                await box.data(stream, part)
        await box.end(stream)

    async with _serving(lab, gateway, model, [CHAT], serve) as box:
        yield box


@asynccontextmanager
async def _serving(
    lab: Lab,
    gateway: Gateway,
    model: str,
    endpoints: Sequence[str],
    serve: Callable[[ScriptedBox, Stream], Coroutine[None, None, None]],
) -> AsyncIterator[ScriptedBox]:
    box = await lab.box(model, endpoints=endpoints, max_concurrent=_CONCURRENT, gateway=gateway)

    async def serve_all() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(serve(box, await box.stream(within_s=_IDLE_S)))
                if box._taken > 2 * _REMEMBERED:  # late frames speak of the last few streams at most
                    del box.streams[:_REMEMBERED]
                    box._taken -= _REMEMBERED

    serving = asyncio.create_task(serve_all())
    try:
        yield box
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
