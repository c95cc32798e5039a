"""A real runner in front of a server that does not know every path of which the box could only guess that it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web

from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.http_client import call
from tests.fakes.lab import CHAT, Lab
from tests.fakes.runners.process import run_box
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAID = {"role": "assistant", "content": "Hello"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
WHOLE = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": USAGE}
WHOLE_CHAT = {**WHOLE, "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}]}


async def answer_chat_alone(request: web.Request, _body: bytes) -> web.StreamResponse:
    """Answer as a server does that speaks chat completions and knows no other path."""
    if request.path != CHAT:
        raise web.HTTPNotFound
    return web.json_response(WHOLE_CHAT)


async def test_what_the_owner_did_not_name_and_the_server_does_not_know_is_translated_too(lab: Lab, tmp_path: Path) -> None:
    model = await lab.model()
    options = ("--models", model, "--translate", "responses")
    env = {"MUSTER_TOKEN": lab.secret}
    async with run_engine() as engine, run_box(tmp_path, lab.gateway.url, "--backend", engine.url, *options, env=env):
        engine.handler = answer_chat_alone
        body = json.dumps({"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}).encode()

        async def is_offered() -> bool:
            reply = await call("GET", lab.gateway.url + "/v1/models")
            return any(row["id"] == model for row in reply.json["data"])

        await eventually(is_offered, what="the model is offered", within_s=60)
        for asked in ([MESSAGES, CHAT], [CHAT]):
            reply = await lab.post(body, path=MESSAGES)
            assert (reply.status, reply.json["content"][0]["text"]) == (200, "Hello"), reply.body
            assert [path for path, _, _ in engine.seen] == asked
            engine.seen.clear()
        responses = json.dumps({"model": model, "input": "hi"}).encode()
        assert (await lab.post(responses, path=RESPONSES)).json["status"] == "completed"
        assert [path for path, _, _ in engine.seen] == [CHAT]
