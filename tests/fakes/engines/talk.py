"""Talking to a loaded engine in tests: answers as JSON, streams as lists of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.port import CHAT, Call, Engine, Progress

Answer = tuple[int, dict[str, Any]]  # JSON
AnyEngine = TypeVar("AnyEngine", bound=Engine)


@contextlib.asynccontextmanager
async def client_session() -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session without a time limit, as the runner has one."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
        yield client


@contextlib.asynccontextmanager
async def loaded(engine: Engine) -> AsyncIterator[list[Progress]]:
    """Load an engine, yield what it reported, and unload it at the end."""
    reported: list[Progress] = []
    try:
        await asyncio.wait_for(engine.load(reported.append), 30)
        yield reported
    finally:
        await engine.unload(gently=False)


@contextlib.asynccontextmanager
async def served(kind: Callable[[LoadPlan, aiohttp.ClientSession], AnyEngine], plan: LoadPlan) -> AsyncIterator[AnyEngine]:
    async with client_session() as client:
        engine = kind(plan, client)
        async with loaded(engine):
            yield engine


def json_call(path: str, **fields: object) -> Call:
    return Call("POST", path, {"content-type": "application/json"}, json.dumps(fields).encode())


async def ask_json(engine: Engine, call: Call) -> Answer:
    async with asyncio.timeout(30), engine.stream(call) as response:
        return response.status, json.loads(await response.read())


async def ask_chat(engine: Engine, text: str, **fields: object) -> Answer:
    messages = [{"role": "user", "content": text}]
    return await ask_json(engine, json_call(CHAT, **{"messages": messages, "temperature": 0, **fields}))


async def read_events(engine: Engine, call: Call) -> list[str]:
    """Return the data of every event of a stream that is answered with 200."""
    async with asyncio.timeout(30), engine.stream(call) as response:
        body = (await response.read()).decode()
        assert response.status == 200, body
        assert response.headers["Content-Type"].startswith("text/event-stream")
    return [event.removeprefix("data: ") for event in body.split("\n\n") if event]


def text_of_chat(answer: Answer) -> str:
    """Return the text of a whole chat answer that is expected to be good."""
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])
