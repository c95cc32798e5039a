"""The official Node SDKs against the gateway, in front of a node that speaks their surface and one that speaks chat alone.

Each script in ``node/`` runs its cases and prints what every one of them returned or threw; here that is compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # what the scripts print is JSON

import pytest
import pytest_asyncio

from conformance.engine import script as speech
from tests.fakes.lab import CHAT, MESSAGES, RESPONSES, Lab, engine_box

pytestmark = pytest.mark.asyncio

FOLDER = Path(__file__).parent / "node"
ENDS_WITHIN_S = 60.0
AFTER_TOOLS = "The tool has answered."
FIRST_CALL = [speech.CALL_ID, speech.TOOL, "".join(speech.ARGUMENTS)]
BOTH_CALLS = [FIRST_CALL, [speech.OTHER_CALL_ID, speech.OTHER_TOOL, "".join(speech.OTHER_ARGUMENTS)]]
CHAT_ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"now"},"finish_reason":"stop"}]}'
)
MESSAGES_ANSWER = (
    b'{"id":"msg_1","type":"message","role":"assistant","model":"m","content":[{"type":"text","text":"now"}],'
    b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":1}}'
)


@dataclass(frozen=True)
class Script:
    """How to run a script of ``node/`` against a model."""

    lab: Lab
    model: str

    async def run(self, name: str, case: str = "") -> dict[str, Any]:
        """Return what the cases printed: name to result."""
        settings = {
            "MUSTER_URL": self.lab.gateway.url,
            "MUSTER_KEY": self.lab.stack.ready.api_key,
            "MUSTER_MODEL": self.model,
        }
        process = await asyncio.create_subprocess_exec(
            "node", *(word for word in (f"{name}.mjs", case) if word),
            cwd=FOLDER, env={**os.environ, **settings}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                said, complaints = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, complaints.decode()
        results: dict[str, Any] = json.loads(said)
        return results


@pytest_asyncio.fixture(params=["native", "translated"])
async def script(lab: Lab, request: pytest.FixtureRequest) -> AsyncIterator[Script]:
    """A model of a node that answers Messages and Responses itself, and of one that the gateway translates for."""
    model = await lab.model()
    async with engine_box(lab, model, native=[MESSAGES, RESPONSES] if request.param == "native" else []):
        yield Script(lab, model)


def error_of(result: dict[str, Any]) -> tuple[str, int | None]:
    return result["error"], result["status"]


async def test_the_openai_package_gets_everything_it_enforces(script: Script) -> None:
    results = await script.run("openai")
    assert results["models"] == {"listed": True, "retrieved": script.model}
    tokens = speech.PROMPT_TOKENS + len(speech.TEXT_PIECES)
    assert results["chat"] == {"text": speech.TEXT, "finish_reason": "stop", "total_tokens": tokens}
    for case in ("tools", "interleaved"):
        assert results[case] == {"calls": BOTH_CALLS, "results": 2, "text": AFTER_TOOLS}
    assert results["image"] == {"arrived": True}
    assert results["response"] == {
        "deltas": speech.TEXT,
        "text": speech.TEXT,
        "status": "completed",
        "items": ["reasoning", "message"],
        "input_tokens": speech.PROMPT_TOKENS,
    }
    for case in ("response_tools", "response_interleaved"):
        assert results[case] == {"calls": BOTH_CALLS, "text": AFTER_TOOLS}
    check_openai_errors(results)


def check_openai_errors(results: dict[str, Any]) -> None:
    assert error_of(results["wrong_key"]) == ("AuthenticationError", 401)
    assert error_of(results["unknown_model"]) == ("NotFoundError", 404)
    assert results["unknown_model"]["code"] == "MODEL_NOT_ALLOWED"
    assert error_of(results["too_long"]) == ("BadRequestError", 400)
    assert results["too_long"]["code"] == "context_length_exceeded"
    assert error_of(results["busy"]) == ("RateLimitError", 429)
    assert error_of(results["failing"]) == ("InternalServerError", 500)
    assert "the engine's own words" in results["failing"]["message"]
    assert results["cut"]["error"] == "APIError"
    assert all(results[case]["request_id"] for case in ("wrong_key", "unknown_model", "too_long", "busy", "failing"))


async def test_the_anthropic_package_gets_everything_it_enforces(script: Script) -> None:
    results = await script.run("anthropic")
    assert results["models"] == {"listed": True, "retrieved": "model"}
    counts = {"input_tokens": speech.PROMPT_TOKENS, "output_tokens": len(speech.TEXT_PIECES)}
    assert results["message"] == {"text": speech.TEXT, "stop_reason": "end_turn", **counts}
    counts["output_tokens"] += len(speech.THOUGHT_PIECES)
    assert results["stream"] == {
        "deltas": speech.TEXT, "blocks": ["thinking", "text"], "stop_reason": "end_turn", **counts,
    }  # fmt: skip
    calls = [[ident, name, json.loads(arguments)] for ident, name, arguments in BOTH_CALLS]
    assert results["tools"] == {"calls": calls, "stop_reason": "tool_use", "text": AFTER_TOOLS}
    assert results["image"] == {"arrived": True}
    assert results["tokens"] == {"counted": True, "grows": True}
    errors = {
        "wrong_key": ("AuthenticationError", 401, "authentication_error"),
        "unknown_model": ("NotFoundError", 404, "not_found_error"),
        "too_long": ("BadRequestError", 400, "invalid_request_error"),
        "busy": ("RateLimitError", 429, "rate_limit_error"),
        "failing": ("InternalServerError", 500, "api_error"),
    }
    assert {case: (*error_of(results[case]), results[case]["type"]) for case in errors} == errors
    assert "prompt is too long: 5312 tokens > 4096 maximum" in results["too_long"]["message"]
    assert "Error" in results["cut"]["error"]


@pytest.mark.parametrize("provider", ["chat", "messages", "responses"])
async def test_the_vercel_ai_sdk_streams_and_runs_tools_to_the_end(script: Script, provider: str) -> None:
    answer = (await script.run("ai_sdk", provider))[provider]
    counts = {"inputTokens": speech.PROMPT_TOKENS, "outputTokens": len(speech.TEXT_PIECES)}
    assert answer == {"text": speech.TEXT, "finish_reason": "stop", **counts}
    looped = (await script.run("ai_sdk", f"{provider}_tools"))[f"{provider}_tools"]
    ident, name, arguments = FIRST_CALL
    assert looped == {"text": AFTER_TOOLS, "calls": [[ident, name, json.loads(arguments)]]}
    busy = (await script.run("ai_sdk", f"{provider}_busy"))[f"{provider}_busy"]
    assert error_of(busy) == ("APICallError", 429)
    assert busy["message"] == "the engine's own words"


@pytest.mark.parametrize(
    ("name", "path", "answer"),
    [("openai", CHAT, CHAT_ANSWER), ("anthropic", MESSAGES, MESSAGES_ANSWER)],
    ids=["openai", "anthropic"],
)
async def test_a_package_waits_as_long_as_the_gateway_says(lab: Lab, name: str, path: str, answer: bytes) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=[path])
    running = asyncio.create_task(Script(lab, model).run(name, "retry"))
    busy = await box.stream()
    await box.head(busy, status=429, headers={"retry-after": "1"})
    refused_at = time.monotonic()
    await box.data(busy, b'{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":null}}')
    await box.end(busy)
    again = await box.stream()
    assert time.monotonic() - refused_at >= 1, "without Retry-After they wait half a second"
    await box.answer(again, answer)
    assert await running == {"retry": {"text": "now"}}
