"""Remote models: what leaves the node, what comes back, when it is tried again, what it costs, and what an owner is told."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from runner import errors
from runner.config import read_config
from runner.engines.http_engine import HttpEngine
from runner.engines.port import CHAT, EMBEDDINGS, Call, Health
from runner.engines.remote import make_remote
from runner.ledger.costs import CostState
from runner.parts import Parts, assemble
from runner.serving.request import Inference
from tests.fakes.engines.provider import (
    KEY,
    KEY_NAME,
    NAME,
    Mood,
    ProviderContract,
    key_in_environment,
    refuse,
    remote_plan,
)
from tests.fakes.engines.scripted_server import drop
from tests.fakes.engines.suite import chat_call
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import run_gateway
from tests.fakes.waiting import eventually
from wire import bridge

pytestmark = pytest.mark.timeout(120)
CALL = chat_call("cloud-large", "Hello")


@asynccontextmanager
async def prepared(
    provider: ProviderContract | None = None, *, key: str = KEY, **options: object
) -> AsyncIterator[tuple[HttpEngine, ProviderContract]]:
    """Yield an adapter that is not loaded, and its provider."""
    async with (provider or ProviderContract()).serve() as served, aiohttp.ClientSession() as client:
        engine = make_remote(remote_plan(served.url, **options), client)
        with key_in_environment(key):
            try:
                yield engine, served
            finally:
                await engine.unload(gently=False)


@asynccontextmanager
async def loaded(
    provider: ProviderContract | None = None, **options: object
) -> AsyncIterator[tuple[HttpEngine, ProviderContract]]:
    """Yield a loaded adapter and its provider."""
    async with prepared(provider, key=KEY, **options) as (engine, served):
        await engine.load(lambda _progress: None)
        yield engine, served


@dataclasses.dataclass
class Got:
    status: int
    headers: dict[str, str]
    body: bytes
    length: int | None

    @property
    def message(self) -> object:
        return json.loads(self.body)["error"]["message"]


async def ask(engine: HttpEngine, call: Call = CALL) -> Got:
    async with asyncio.timeout(30), engine.stream(call) as response:
        headers = {name.lower(): text for name, text in response.headers.items()}
        return Got(response.status, headers, await response.read(), response.content_length)


# what leaves the node, and what comes back


async def test_the_provider_gets_its_own_name_and_nothing_that_only_the_box_reads() -> None:
    fields = {"allow_remote": True, "beam_size": 2, "source_lang_code": "de", "decoding": {}, "top_p": 0.5}
    call = chat_call("cloud-large", "Hello", thinking={"type": "enabled"}, **fields)
    headers = {**call.headers, "x-secret-of-client": "1", "authorization": "Bearer of-the-client", "cookie": "a=b"}
    sent = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "top_p": 0.5}
    for told, thinking in (("disabled", "disabled"), (None, "enabled")):
        async with loaded(remote_thinking=told) as (engine, provider):
            assert (provider.tries, provider.lists, await engine.health()) == (0, 0, Health.OK), "a load asks nothing"
            await ask(engine, dataclasses.replace(call, headers=headers, path=call.path + "?tenant=acme", tenant="acme"))
            assert provider.asked == [{**sent, "thinking": {"type": thinking}}]
            (seen,) = provider.seen_headers
            assert seen.pop("authorization") == f"Bearer {KEY}"
            assert set(seen) == {"host", "accept", "accept-encoding", "user-agent", "content-type", "content-length"}


async def test_what_is_no_chat_request_goes_nowhere() -> None:
    async with loaded() as (engine, provider):
        for body in (b"", b"[]", b"not json", b"\xff"):
            with pytest.raises(errors.InvalidRequest):
                await ask(engine, dataclasses.replace(CALL, body=body))
        for call in (dataclasses.replace(CALL, path=EMBEDDINGS), dataclasses.replace(CALL, method="GET", path="/v1/models")):
            with pytest.raises(errors.ModalityUnsupported):
                await ask(engine, call)
        assert (provider.tries, provider.lists, engine.capabilities.is_remote) == (0, 0, True)


@pytest.mark.parametrize("compresses", [False, True])
async def test_an_answer_comes_back_under_our_name_and_without_the_owners_account(compresses: bool) -> None:
    headers = {"openai-organization": "acme", "x-ratelimit-remaining-tokens": "7", "x-request-id": "r1", "set-cookie": "a=b"}
    async with loaded(ProviderContract(headers=headers, compresses=compresses)) as (engine, _):
        got = await ask(engine)
        answer = json.loads(got.body)
        assert (answer["model"], answer["usage"]["total_tokens"], got.length) == ("cloud-large", 21, len(got.body))
        assert set(got.headers) == {"content-type", "content-length", "x-request-id"}
        streamed = await ask(engine, chat_call("cloud-large", "Hello", stream=True, stream_options={"include_usage": True}))
        assert (streamed.body.count(b"data: "), b'"total_tokens": 28' in streamed.body) == (10, True)
        assert set(streamed.headers) == {"content-type", "x-request-id"}


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_a_provider_that_answers_a_streamed_request_in_one_piece_is_heard_as_a_stream(wants_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    async with loaded(ProviderContract(streams=False)) as (engine, _):
        got = await ask(engine, chat_call("cloud-large", "Hello", stream=True, **options))
    events = got.body.decode().removesuffix("\n\n").split("\n\n")
    assert (got.headers["content-type"], events.pop()) == ("text/event-stream", "data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {(chunk["model"], chunk["object"]) for chunk in chunks} == {("cloud-large", "chat.completion.chunk")}
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas == [{"role": "assistant", "content": "word"}, {}]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == [None, "stop"]
    assert [chunk["usage"]["total_tokens"] for chunk in chunks if "usage" in chunk] == ([21] if wants_usage else [])


@pytest.mark.parametrize(
    ("provider", "error"),
    [
        (ProviderContract(breaks_after=3), aiohttp.ClientError),
        (ProviderContract(pause_s=3600), aiohttp.ServerTimeoutError),
        (ProviderContract(token_s=3600), aiohttp.ServerTimeoutError),
    ],
    ids=["breaks off", "silent", "silent in the middle"],
)
async def test_a_stream_that_breaks_or_falls_silent_is_not_begun_again(
    provider: ProviderContract, error: type[Exception]
) -> None:
    async with loaded(provider, remote_max_retries=5, remote_timeout_s=1) as (engine, served):
        with pytest.raises(error):
            await ask(engine, chat_call("cloud-large", "Hello", stream=True))
        assert served.tries <= 1, "0 when the time was over before it was there: that is not tried again either"


# trying again


@pytest.mark.parametrize("mood", [refuse(429, "slow down"), refuse(502, "x"), refuse(503, "x"), refuse(504, "x"), drop])
async def test_what_may_pass_is_tried_again(mood: Mood) -> None:
    async with loaded(ProviderContract(moods=[mood]), remote_max_retries=1) as (engine, provider):
        assert ((await ask(engine)).status, provider.tries) == (200, 2)


async def test_tries_end_and_the_last_answer_counts_and_what_will_not_pass_is_not_tried_again() -> None:
    moods = [refuse(429, "a", Retry_After="0"), refuse(503, "b", Retry_After="0"), refuse(429, "no", Retry_After="77")]
    async with loaded(ProviderContract(moods=moods), remote_max_retries=2) as (engine, provider):
        got = await ask(engine)
        assert (got.status, got.headers["retry-after"], got.message, provider.tries) == (429, "77", "no", 3)
        for tries, status in enumerate((400, 404, 422, 500), start=4):
            provider.moods = [refuse(status, f"key {KEY} is odd")]
            got = await ask(engine)
            assert (got.status, provider.tries, got.length) == (status, tries, len(got.body))
            assert got.message == "key (key) is odd", "an error that repeats the key loses it"


@pytest.mark.parametrize("is_date", [False, True])
async def test_nobody_waits_longer_than_half_a_minute(is_date: bool, caplog: pytest.LogCaptureFixture) -> None:
    after = formatdate(time.time() + 3600, usegmt=True) if is_date else "3600"
    moods = [refuse(429, "x", Retry_After=after)]
    async with loaded(ProviderContract(moods=moods), remote_max_retries=1) as (engine, provider):
        with caplog.at_level(logging.INFO, logger="runner.engines.remote"):
            asking = asyncio.create_task(ask(engine))
            await eventually(lambda: "asked again" in caplog.text)
        assert "in_s=30.0" in caplog.text
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (provider.tries, (await engine.stats()).running) == (1, 0)


# the key, and answers that are none


async def test_a_key_that_the_provider_refuses_is_the_boxs_fault_and_stays_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="runner")
    async with loaded(ProviderContract(key="another"), remote_max_retries=3) as (engine, provider):
        with pytest.raises(errors.RemoteRefused) as caught:
            await ask(engine)
        assert (caught.value.status, caught.value.retryable, provider.tries) == (502, False, 1)
        assert "sk-" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with loaded() as (engine, provider):
        provider.moods.append(refuse(status, "over there", Location=f"{provider.url}/models"))
        with pytest.raises(errors.RemoteRefused, match="not followed"):
            await ask(engine)
        assert provider.lists == 0


async def test_a_page_instead_of_an_answer_is_an_error_and_one_instead_of_an_error_becomes_an_error_object() -> None:
    def page(status: int) -> Mood:
        return lambda _: web.Response(text="<h1>Hi</h1>", status=status, content_type="text/html", headers={"Retry-After": "5"})

    async with loaded(ProviderContract(moods=[page(200), page(502)])) as (engine, _):
        with pytest.raises(errors.EngineUnavailable, match="as an API does"):
            await ask(engine)
        got = await ask(engine)
        assert (got.status, got.headers["content-type"], got.headers["retry-after"]) == (502, "application/json", "5")
        assert (got.message, got.length) == ("The provider answers HTTP 502 and does not say why.", len(got.body))


# loading


@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        *((key, {}, KEY_NAME) for key in ("", "  ", "two words", "snow\u2603man")),
        *((KEY, {"remote_base_url": url}, "remote_base_url") for url in ("", "ftp://x/v1", "https://user:word@x/v1", "https://x/v1?a=b")),
        *(("sk-no", {"remote_health_check": check}, f"not accept the key in {KEY_NAME}") for check in ("models", "completion")),
    ],
)  # fmt: skip
async def test_a_load_that_cannot_be_names_what_to_set_and_not_the_key(key: str, options: dict[str, Any], words: str) -> None:
    async with prepared(key=key, **options) as (engine, _):
        with pytest.raises(errors.EngineError, match=words) as caught:
            await engine.load(lambda _progress: None)
        assert not key.strip() or key not in str(caught.value)
        assert await engine.health() is Health.UNREACHABLE


async def test_a_check_asks_once_at_a_load_and_a_list_of_models_that_fails_later_is_silence() -> None:
    async with loaded(remote_health_check="completion", remote_thinking="disabled") as (engine, provider):
        (asked,) = provider.asked
        assert (asked["model"], asked["max_tokens"], asked["thinking"]) == (NAME, 1, {"type": "disabled"})
        assert (await engine.health(), provider.tries) == (Health.OK, 1)
    async with loaded(remote_health_check="models") as (engine, provider):
        assert await engine.health() is Health.OK
        provider.key = "changed"
        assert await engine.health() is Health.SILENT
    async with loaded(ProviderContract(key=""), remote_api_key_env=None) as (engine, provider):
        assert ((await ask(engine)).status, "authorization" in provider.seen_headers[0]) == (200, False)


# what it costs

COST = 20 * 2 + 1 * 10
"""Of an answer of the provider that is not streamed: 20 tokens in, 1 out."""
STREAM_COST = 20 * 2 + 8 * 10


def write_settings(folder: Path, url: str) -> None:
    """Have a node with this data folder load the model of the provider at ``url``."""
    model = {
        "backend": "openai_compatible", "remote_base_url": url, "remote_api_key_env": KEY_NAME,
        "remote_model": NAME, "enabled": True, "target_inflight": 2,
    }  # fmt: skip
    prices = {"cloud-large": {"input_per_million": 2, "output_per_million": 10}}
    remote = {"currency": "EUR", "prices": prices}
    (folder / "settings.json").write_text(json.dumps({"engine": {"models": {"cloud-large": model}, "remote": remote}}))


@asynccontextmanager
async def a_box(folder: Path, provider: ProviderContract) -> AsyncIterator[Parts]:
    """Yield a node that has loaded the provider's model."""
    async with provider.serve() as served, aiohttp.ClientSession(auto_decompress=False) as client:
        write_settings(folder, served.url)
        config = read_config(["--standalone", "--data", str(folder)], {})
        with key_in_environment():
            async with assemble(config, client, on_change=lambda: None, wakes=()) as box:
                await box.start_models()
                await eventually(lambda: box.pool.registry.find("cloud-large").is_ready)
                yield box


async def ask_node(box: Parts, **fields: object) -> tuple[int, bytes]:
    """Send a request as tenant acme; return status and everything that came."""
    body = {"model": "cloud-large", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
    request = Inference(
        "POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode(), "cloud-large", "acme",
        allow_remote=True, is_streaming=fields.get("stream") is True,
    )  # fmt: skip
    async with asyncio.timeout(30), box.serving.open(request) as answer:
        if answer.body is not None:
            return answer.status, answer.body
        assert answer.chunks is not None
        return answer.status, b"".join([chunk async for chunk in answer.chunks])


async def endings(box: Parts) -> list[tuple[CostState, int]]:
    """Return how requests ended and what they count, oldest first."""
    return [(row.state, row.counted_micros) for row in reversed(await box.ledger.cost_rows(100))]


async def test_answers_are_paid_by_their_usage_streamed_or_not_and_a_refusal_costs_nothing(tmp_path: Path) -> None:
    provider = ProviderContract()
    async with a_box(tmp_path, provider) as box:
        status, body = await ask_node(box)
        assert (status, json.loads(body)["model"]) == (200, "cloud-large")
        status, events = await ask_node(box, stream=True)
        assert (status, b"usage" in events) == (200, False)
        provider.moods = [refuse(400, "no"), refuse(429, "slow down")]
        assert [(await ask_node(box))[0] for _ in range(2)] == [400, 429]
        paid = [(CostState.SETTLED, COST), (CostState.SETTLED, STREAM_COST)]
        assert await endings(box) == [*paid, *[(CostState.RELEASED, 0)] * 2]
        summary = await box.costs.summary()
        assert [(spent.tenant, spent.spent_micros) for spent in summary.spendings] == [("acme", COST + STREAM_COST)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_what_was_paid_for_reaches_its_gateway_when_the_box_is_told_to_leave(
    tmp_path: Path, *, is_streamed: bool
) -> None:
    provider = ProviderContract()
    provider.may_answer.clear()
    async with run_gateway() as gateway, provider.serve() as served:
        write_settings(tmp_path, served.url)
        env = {KEY_NAME: KEY, "MODEL_BASE_PATH": str(tmp_path)}
        async with run_box(tmp_path, gateway.url, "--data", str(tmp_path), env=env) as process:
            box = await gateway.accept()
            await eventually(lambda: "cloud-large" in box.models(), "the model is declared")
            body = {"model": "cloud-large", "messages": [], "stream": is_streamed, "allow_remote": True, "max_tokens": 4}
            stream = await box.open(body, model="cloud-large")
            await eventually(lambda: provider.running == 1, "the provider has the request")
            process.signal(signal.SIGTERM)
            await box.expect(bridge.Draining)
            provider.may_answer.set()
            answer = await stream.finish()
            assert (answer.status, answer.end.error) == (200, "")
            assert await process.exit_status() == 0
