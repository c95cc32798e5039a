"""How long a prompt is, over the gateway's own routes: what SDKs get and what is refused."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import httpx
import httpx2
import openai
import pytest

from gateway.catalogue import AliasEntry, KeyEntry, ModelEntry
from gateway.routing import Alias, Target
from gateway.runtime import GatewayRuntime
from gateway.urls import make_application
from gateway.values import Caller
from nodes.states import TOKENIZE
from tests.fakes.limits import set_limits
from tests.fakes.links import FakeLink
from wire.credentials import CredentialKind, mint_credential

MESSAGES, RESPONSES = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
TOOL = {"name": "look_up", "description": "Find a word", "input_schema": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "What is a λ?"}]}  # JSON


class Setting:
    """A gateway that was not started: no database, no background, boxes played by the test."""

    def __init__(self, *, per_minute: int = 100) -> None:
        self.runtime = GatewayRuntime()
        minted = mint_credential(CredentialKind.CLIENT)
        self.key = minted.text
        caller = Caller(
            key_id=uuid.uuid4(), key_name="k", tenant="t", requests_per_minute=per_minute, allowed_models=frozenset()
        )
        catalogue = self.runtime.catalogue
        catalogue.apply_keys([(minted.keyid, KeyEntry(minted.digest, caller, revoked=False, expires_at=None))], replace=True)
        catalogue.apply_models([self.entry("m"), self.entry("other", allowed=False), self.entry("tiny", tokenizer="tiny")])
        catalogue.apply_aliases([AliasEntry(None, Alias("claude", (Target("m"),)))])
        self.link = FakeLink("m")
        self.link.endpoints = {"m": frozenset({TOKENIZE})}
        self.application = make_application(self.runtime)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(self.application), base_url="http://gateway")

    @staticmethod
    def entry(name: str, *, allowed: bool = True, tokenizer: str = "") -> ModelEntry:
        return ModelEntry(
            name=name, allowed=allowed, owned_by="x", max_tokens=10, max_prompt_chars=10, max_queue=1, created=0,
            tokenizer=tokenizer,
        )  # fmt: skip

    def sdk_client(self) -> httpx2.AsyncClient:
        """A client that leads to this gateway, for the SDKs."""
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(self.application))

    async def ask(self, body: object = ASKED, *, path: str = MESSAGES, key: str = "", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(path, content=content, headers={"x-api-key": key or self.key, **headers})

    async def ask_box(self, body: object = ASKED, answer: bytes = b'{"count": 42}', *, path: str = MESSAGES) -> httpx.Response:
        """Ask, and have the box answer that. What it was asked is the last of ``self.asked``."""
        self.runtime.registry.add(self.link)
        asking = asyncio.create_task(self.ask(body, path=path))
        async with asyncio.timeout(30):
            while not self.link.streams and not asking.done():
                await asyncio.sleep(0)
        stream = self.link.streams[0]
        self.asked: dict[str, Any] = json.loads(stream.request.body)
        assert self.link.active == 0
        stream.answer(answer)
        return await asking


@pytest.fixture(autouse=True)
def patience() -> None:
    """Let a machine that stands still count all the same. That who takes too long is left out is tested elsewhere."""
    set_limits(gateway={"count_node_ms": 30_000, "count_thread_s": 30.0, "template_s": 30.0})


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_a_box_counts_system_and_tools_too_and_no_limit_of_an_answer_is_needed(setting: Setting) -> None:
    body = {**ASKED, "system": "Be brief.", "tools": [TOOL]}
    answer = await setting.ask_box(body, path=MESSAGES + "?beta=true")
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 42})
    assert answer.headers["x-muster-token-count"] == "engine"
    assert (answer.headers["x-muster-model"], answer.headers["x-muster-node"]) == ("m", setting.link.node_name)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["anthropic-ratelimit-requests-remaining"] == "99"
    assert [message["role"] for message in setting.asked["messages"]] == ["system", "user"]
    assert setting.asked["tools"][0]["function"]["name"] == "look_up"
    assert setting.asked["model"] == "m"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"", 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b"[]", 400, "invalid_request_error"),
        ({"messages": ASKED["messages"]}, 400, "invalid_request_error"),
        ({"model": "m"}, 400, "invalid_request_error"),
        ({"model": "m", "messages": []}, 400, "invalid_request_error"),
        ({"model": "m", "messages": "hello"}, 400, "invalid_request_error"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        (b'{"model":"m","model":"other","messages":[{"role":"user","content":"x"}]}', 400, "invalid_request_error"),
        ({**ASKED, "model": "absent"}, 404, "not_found_error"),
        ({**ASKED, "model": "other"}, 400, "invalid_request_error"),
    ],
    ids=["empty", "cut", "list", "no-model", "no-messages", "none", "text", "picture", "twice", "unknown", "not-allowed"],
)  # fmt: skip
async def test_refusals_have_the_shape_of_anthropic(setting: Setting, body: object, status: int, kind: str) -> None:
    answer = await setting.ask(body)
    said = answer.json()
    assert (answer.status_code, said["type"], said["error"]["type"]) == (status, "error", kind)
    assert said["request_id"] == answer.headers["request-id"]


async def test_a_key_is_needed_and_its_rate_holds_over_both_apis() -> None:
    setting = Setting(per_minute=2)
    refused = await setting.ask(key="mst_wrong")
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert (await setting.ask()).status_code == 200
    assert (await setting.ask({"model": "m", "input": "x"}, path=RESPONSES)).status_code == 200
    limited = await setting.ask()
    assert (limited.status_code, limited.json()["error"]["type"]) == (429, "rate_limit_error")
    assert limited.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert int(limited.headers["retry-after"]) > 0


async def test_other_methods_large_bodies_and_a_gateway_that_stops_are_refused(setting: Setting) -> None:
    wrong = await setting.client.get(MESSAGES)
    assert (wrong.status_code, wrong.headers["allow"], wrong.json()["type"]) == (405, "POST", "error")
    large = await setting.ask(b" " * (setting.runtime.limits.max_body_bytes + 1))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    setting.runtime.pipeline.is_stopping = True
    assert (await setting.ask()).status_code == 503


async def test_the_sdk_of_openai_reads_a_count(setting: Setting) -> None:
    sdk = openai.AsyncOpenAI(api_key=setting.key, base_url="http://gateway/v1", http_client=setting.sdk_client(), max_retries=0)
    found = await sdk.responses.input_tokens.count(model="m", input="What is a λ?", instructions="Be brief.")
    assert (found.object, found.input_tokens > 0) == ("response.input_tokens", True)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.input_tokens.count(model="m", input="x", previous_response_id="resp_1")


async def test_input_of_responses_is_counted_as_the_conversation_it_is(setting: Setting) -> None:
    body = {"model": "claude", "instructions": "Be brief.", "input": [{"role": "user", "content": "Hi"}]}
    answer = await setting.ask_box(body, path=RESPONSES)
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 42}
    assert [message["role"] for message in setting.asked["messages"]] == ["system", "user"]
    refused = await setting.ask({"model": "m"}, path=RESPONSES)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
