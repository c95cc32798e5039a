"""A paid provider of OpenAI's Chat Completions, as its documentation describes it, with the moods of a real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from runner.definitions.plan import LoadPlan
from runner.engines.port import FlushResult
from runner.engines.remote import make_remote
from tests.fakes.engines.scripted_server import listening, stream_words
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chatting, environment
from tests.fakes.waiting import takes

KEY = "sk-a-key-that-must-not-leak"
NAME = "provider-large"
Mood = Callable[[web.Request], web.StreamResponse]


def refuse(status: int, message: str, **headers: str) -> Mood:
    def answer(_request: web.Request) -> web.StreamResponse:
        body = {"error": {"message": message, "type": "provider_error", "param": None, "code": "nope"}}
        return web.json_response(body, status=status, headers={name.replace("_", "-"): text for name, text in headers.items()})

    return answer


@dataclass
class ProviderContract:
    """``moods`` are what the next requests meet, first one first; without any they are answered, once ``may_answer`` is set."""

    key: str = KEY
    names: tuple[str, ...] = (NAME, "provider-small")
    moods: list[Mood] = field(default_factory=list)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    pause_s: float = 0.0
    token_s: float = 0.0
    breaks_after: int | None = None
    tells_usage: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    compresses: bool = False
    streams: bool = True
    """Whether it answers a streamed request with a stream."""
    asked: list[dict[str, object]] = field(default_factory=list)
    seen_headers: list[dict[str, str]] = field(default_factory=list)
    tries: int = 0
    lists: int = 0
    running: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.may_answer.set()

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ProviderContract]:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        async with listening(app) as (url,):
            self.url = url + "/v1"
            yield self

    def _check(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if given != self.key:
            body = {"error": {"message": f"Incorrect API key provided: {given[:7]}***", "code": "invalid_api_key"}}
            raise web.HTTPUnauthorized(text=json.dumps(body), content_type="application/json")

    async def _models(self, request: web.Request) -> web.Response:
        self._check(request)
        self.lists += 1
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.tries += 1
        if self.moods:
            return self.moods.pop(0)(request)
        self._check(request)
        body = await request.json()
        self.asked.append(body)
        self.seen_headers.append({name.lower(): text for name, text in request.headers.items()})
        self.running += 1
        try:
            await self.may_answer.wait()
            await takes(self.pause_s)
            return await (self._stream(request, body) if body.get("stream") and self.streams else self._whole(body))
        finally:
            self.running -= 1

    async def _whole(self, body: dict[str, object]) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
        answer: dict[str, object] = {"id": "x", "object": "chat.completion", "model": body["model"], "choices": [choice]}
        if self.tells_usage:
            answer["usage"] = {"prompt_tokens": 20, "completion_tokens": 1, "total_tokens": 21}
        response = web.json_response(answer, headers=self.headers)
        if self.compresses:
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def _stream(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        asked, options = body.get("max_tokens"), body.get("stream_options")
        tells_usage = self.tells_usage and isinstance(options, dict) and options.get("include_usage")
        return await stream_words(
            request, asked if isinstance(asked, int) else 8, self.token_s, is_served=lambda number: number != self.breaks_after,
            headers=self.headers, model=body["model"],
            usage={"prompt_tokens": 20, "completion_tokens": 8, "total_tokens": 28} if tells_usage else None,
        )  # fmt: skip


KEY_NAME = "TEST_PROVIDER_KEY"


def key_in_environment(key: str = KEY) -> contextlib.AbstractContextManager[None]:
    return environment(**{KEY_NAME: key})


def remote_plan(url: str, **options: object) -> LoadPlan:
    named = {"remote_base_url": url, "remote_api_key_env": KEY_NAME, "remote_model": NAME, "remote_timeout_s": 10, **options}
    return LoadPlan(model_id="cloud-large", backend="openai_compatible", slots=4, options=named)


@contextlib.asynccontextmanager
async def open_remote(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    async with ProviderContract(token_s=0.005).serve() as provider:
        plan, broken = (remote_plan(provider.url, remote_health_check="models", remote_model=name) for name in (NAME, "gone"))
        with key_in_environment():
            yield chatting(
                make_remote, client, plan, broken, f"does not list gone.*{NAME}", text="Explain lambda.", model="cloud-large",
                running=lambda: provider.running, flushes=frozenset({FlushResult.NOT_SUPPORTED}),
            )  # fmt: skip


CASES = [EngineCase("remote", open_remote)]
