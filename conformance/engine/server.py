"""The engine's HTTP server: which path says what, and how it is sent or broken off."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any  # request bodies are JSON

from aiohttp import web

from conformance.engine.answers import (
    CREATED,
    draw,
    embed,
    fail_message,
    fail_response,
    rank,
    refuse_tools,
    render_chat,
    render_completion,
    render_message,
    render_response,
    stream_chat,
    stream_completion,
    stream_message,
    stream_response,
    transcribe,
)
from conformance.engine.script import Script, Speech, compose, find_failure, find_prompt, read_script, stream_error
from conformance.exchange import LIMITS

Json = dict[str, Any]
Whole = Callable[[Speech, Script, Mapping[str, Any]], Json]
Streamed = Callable[[Speech, Script, Mapping[str, Any]], Iterator[Json]]


@dataclass(frozen=True, slots=True)
class Voice:
    """How one path renders speech. ``failed``: the event that says an error in a stream, told how many went before.

    ``names_events``: each event has an event line with its type, and there is no [DONE].
    """

    whole: Whole
    streamed: Streamed
    failed: Callable[[int, Mapping[str, Any]], Json] = lambda number, body: stream_error()
    names_events: bool = False


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
_VOICES = {
    CHAT: Voice(render_chat, stream_chat),
    COMPLETIONS: Voice(render_completion, stream_completion),
    MESSAGES: Voice(render_message, stream_message, fail_message, names_events=True),
    RESPONSES: Voice(render_response, stream_response, fail_response, names_events=True),
}


# Paths whose answer is one function of the body.
_AT_ONCE = {"/v1/embeddings": embed, "/v1/rerank": rank, "/v1/images/generations": draw}


@dataclass
class ScriptedEngine:
    """The server's state: its models, and which endless answers are still read. ``native``: paths it speaks beside chat.

    ``is_strict``: there it refuses tools that vLLM refuses.
    """

    models: tuple[str, ...]
    native: frozenset[str] = frozenset()
    is_strict: bool = False
    endless: dict[str, str] = field(default_factory=dict)

    def application(self) -> web.Application:
        """Return the server's routes."""
        application = web.Application(client_max_size=LIMITS.engine_body_bytes)
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        for path in (CHAT, COMPLETIONS, *sorted(self.native)):
            application.router.add_post(path, self._say)
        for path in _AT_ONCE:
            application.router.add_post(path, self._answer_at_once)
        application.router.add_post("/v1/audio/transcriptions", self._transcribe)
        return application

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, _request: web.Request) -> web.Response:
        rows = [{"id": name, "object": "model", "created": CREATED, "owned_by": "scripted"} for name in self.models]
        return web.json_response({"object": "list", "data": rows})

    async def _answer_at_once(self, request: web.Request) -> web.Response:
        body, script = await self._read(request)
        if (failure := find_failure(script)) is not None:
            return web.Response(status=failure.status, body=failure.body, content_type=failure.content_type)
        return web.json_response(_AT_ONCE[request.path](body))

    async def _transcribe(self, request: web.Request) -> web.Response:
        fields = {name: value for name, value in (await request.post()).items() if isinstance(value, str)}
        content_type, body = transcribe(fields)
        return web.Response(body=body, headers={"content-type": content_type})

    async def _say(self, request: web.Request) -> web.StreamResponse:
        body, script = await self._read(request)
        if self.is_strict and request.path in self.native and (reason := refuse_tools(body)):
            return web.json_response({"error": {"message": reason, "type": "BadRequestError", "code": 400}}, status=400)
        if "endless" in script:
            return await self._go_on(request, _VOICES[request.path], script, body)
        await asyncio.sleep(script.seconds("slow"))
        failure = find_failure(script)
        if failure is not None:
            headers = {**failure.headers, "content-type": failure.content_type}
            return web.Response(status=failure.status, body=failure.body, headers=headers)
        echo = {
            "path": request.path,
            "query": request.query_string,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": body,
        }
        said = self.endless.get(script.argument("gone"), "unknown") if "gone" in script else None
        speech, voice = compose(script, body, echo, said), _VOICES[request.path]
        if body.get("stream"):
            return await self._stream(request, voice, script, body, voice.streamed(speech, script, body))
        return await self._send_whole(request, script, voice.whole(speech, script, body))

    async def _read(self, request: web.Request) -> tuple[Json, Script]:
        try:
            body = json.loads(await request.read())
            return body, read_script(find_prompt(body))
        except (ValueError, AttributeError) as error:
            text = json.dumps({"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": 400}})
            raise web.HTTPBadRequest(text=text, content_type="application/json") from None

    async def _send_whole(self, request: web.Request, script: Script, content: Json) -> web.StreamResponse:
        if "error_in_stream" in script:
            return web.json_response(stream_error(), status=500)
        data = b"{not JSON" if "garbage" in script else json.dumps(content).encode()
        if "cut" not in script:
            return web.Response(body=data, content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        _reset(request)
        return response

    async def _go_on(self, request: web.Request, voice: Voice, script: Script, body: Json) -> web.StreamResponse:
        """Answer without end and note when the client has left."""
        key = script.argument("endless")
        self.endless[key] = "here"

        chunks = voice.streamed(Speech(pieces=("on ",) * LIMITS.endless_pieces), script, body)
        try:
            await asyncio.sleep(script.seconds("slow"))
            if not body.get("stream"):
                await asyncio.get_running_loop().create_future()
            return await self._stream(request, voice, Script({**script.arguments, "pace": "20"}), body, chunks)
        # aiohttp cancels the handler when the client leaves.
        except (asyncio.CancelledError, ConnectionError):
            self.endless[key] = "left"
            raise

    async def _stream(
        self, request: web.Request, voice: Voice, script: Script, body: Json, chunks: Iterable[Json]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        pace_s = script.seconds("pace") / 1000
        for number, chunk in enumerate(chunks):
            await self._write(response, script, frame_event(chunk, script, name=chunk["type"] if voice.names_events else ""))
            if number == 0 and "pause" in script:
                await asyncio.sleep(script.seconds("pause"))
            if number + 1 == LIMITS.broken_after and script.arguments.keys() & {"cut", "error_in_stream", "garbage"}:
                return await self._break_off(request, response, voice, script, body)
            if pace_s:
                await asyncio.sleep(pace_s)
        if not voice.names_events and "no_finish" not in script:
            await self._write(response, script, frame_event("[DONE]", script))
        await response.write_eof()
        return response

    async def _break_off(
        self, request: web.Request, response: web.StreamResponse, voice: Voice, script: Script, body: Json
    ) -> web.StreamResponse:
        if "cut" in script:
            # A reset overtakes what the socket has not sent yet.
            await asyncio.sleep(0.05)
            _reset(request)
            return response
        if "garbage" in script:
            await response.write(b"data: {not JSON\n\n")
        else:
            error = voice.failed(LIMITS.broken_after, body)
            await self._write(response, script, frame_event(error, script, name=error["type"] if voice.names_events else ""))
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, script: Script, event: bytes) -> None:
        if "comments" in script:
            await response.write(b": still here\n\n")
        if "split_events" not in script:
            await response.write(event)
            return
        third = max(1, len(event) // 3)
        for start in range(0, len(event), third):
            await response.write(event[start : start + third])
            # The pieces must travel one by one.
            await asyncio.sleep(0.002)


def frame_event(content: Json | str, script: Script, *, name: str = "") -> bytes:
    """Return one event as bytes, framed as the script says."""
    data = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    end, blank = ("\r\n", "") if "crlf" in script else ("\n", " ")
    line = f"event:{blank}{name}{end}" if name else ""
    return f"{line}data:{blank}{data}{end}{end}".encode()


def _reset(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


@asynccontextmanager
async def serve_engine(
    *,
    models: Iterable[str] = ("scripted",),
    native: Iterable[str] = (),
    is_strict: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[str]:
    """Run an engine for as long as the context lasts and yield its address, up to and not including ``/v1``."""
    engine = ScriptedEngine(tuple(models), frozenset(native), is_strict)
    runner = web.AppRunner(engine.application(), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
