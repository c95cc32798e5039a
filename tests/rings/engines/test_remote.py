"""Remote models: what leaves the box, what comes back, when it is tried again, and what an owner is told."""

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

import aiohttp
import pytest
from aiohttp import web

from runner.config import read_config
from runner.engines.port import CHAT, EMBEDDINGS, Call, Health
from runner.engines.remote import RemoteEngine
from runner.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModalityUnsupported,
    RemoteNotAllowed,
    RemoteRefused,
    RequestRefused,
    SpendingCapReached,
)
from runner.ledger import CostState
from runner.parts import Parts, assemble
from runner.serving.request import Inference
from tests.fakes.engines.provider import (
    KEY,
    KEY_NAME,
    NAME,
    Mood,
    ProviderContract,
    drop,
    key_in_environment,
    refuse,
    remote_plan,
)
from tests.fakes.engines.suite import chat_call
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import run_gateway
from tests.fakes.waiting import eventually
from wire import bridge

CALL = chat_call("cloud-large", "Hello")


@asynccontextmanager
async def prepared(
    provider: ProviderContract | None = None, *, key: str = KEY, **options: object
) -> AsyncIterator[tuple[RemoteEngine, ProviderContract]]:
    """Yield an adapter that is not loaded, and its provider."""
    async with (provider or ProviderContract()).serve() as served, aiohttp.ClientSession() as client:
        engine = RemoteEngine(remote_plan(served.url, **options), client)
        with key_in_environment(key):
            try:
                yield engine, served
            finally:
                await engine.unload(gently=False)


@asynccontextmanager
async def loaded(
    provider: ProviderContract | None = None, **options: object
) -> AsyncIterator[tuple[RemoteEngine, ProviderContract]]:
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


async def ask(engine: RemoteEngine, call: Call = CALL) -> Got:
    async with asyncio.timeout(30), engine.stream(call) as response:
        headers = {name.lower(): text for name, text in response.headers.items()}
        return Got(response.status, headers, await response.read(), response.content_length)


# ---- what leaves the box ----


async def test_the_provider_gets_its_own_name_and_nothing_that_only_the_box_reads() -> None:
    async with loaded(remote_thinking="disabled") as (engine, provider):
        call = chat_call(
            "cloud-large", "Hello", allow_remote=True, beam_size=2, source_lang_code="de", decoding={}, top_p=0.5,
            thinking={"type": "enabled"},
        )  # fmt: skip
        headers = {**call.headers, "x-secret-of-client": "1", "authorization": "Bearer of-the-client", "cookie": "a=b"}
        await ask(engine, dataclasses.replace(call, headers=headers, path=call.path + "?tenant=acme", tenant="acme"))
        (asked,), (seen,) = provider.asked, provider.seen_headers
        assert asked == {
            "model": NAME, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "top_p": 0.5,
            "thinking": {"type": "disabled"},
        }  # fmt: skip
        assert seen["authorization"] == f"Bearer {KEY}"
        assert set(seen) == {
            "host", "accept", "accept-encoding", "user-agent", "content-type", "content-length", "authorization",
        }  # fmt: skip


async def test_thinking_is_the_clients_where_the_owner_says_nothing() -> None:
    async with loaded() as (engine, provider):
        await ask(engine, chat_call("cloud-large", "Hello", thinking={"type": "enabled"}))
        await ask(engine)
        assert [asked.get("thinking") for asked in provider.asked] == [{"type": "enabled"}, None]


async def test_a_large_body_arrives_whole() -> None:
    async with loaded() as (engine, provider):
        await ask(engine, chat_call("cloud-large", "x" * 2_000_000))
        assert len(json.dumps(provider.asked)) > 2_000_000


@pytest.mark.parametrize("body", [b"", b"[]", b"not json", b"\xff"])
async def test_a_body_that_is_no_object_goes_nowhere(body: bytes) -> None:
    async with loaded() as (engine, provider):
        with pytest.raises(InvalidRequest):
            await ask(engine, dataclasses.replace(CALL, body=body))
        assert provider.tries == 0


async def test_other_endpoints_are_not_served() -> None:
    async with loaded() as (engine, provider):
        for call in (dataclasses.replace(CALL, path=EMBEDDINGS), dataclasses.replace(CALL, method="GET", path="/v1/models")):
            with pytest.raises(ModalityUnsupported):
                await ask(engine, call)
        assert (provider.tries, provider.lists) == (0, 0)
        assert engine.capabilities.is_remote


# ---- what comes back ----


@pytest.mark.parametrize("compresses", [False, True])
async def test_an_answer_comes_back_under_our_name_and_without_the_owners_account(compresses: bool) -> None:
    headers = {
        "openai-organization": "acme-corp",
        "x-ratelimit-remaining-tokens": "7",
        "x-request-id": "r1",
        "set-cookie": "a=b",
    }
    async with loaded(ProviderContract(headers=headers, compresses=compresses)) as (engine, _):
        got = await ask(engine)
        answer = json.loads(got.body)
        assert (answer["model"], answer["usage"]["total_tokens"]) == ("cloud-large", 21)
        assert got.length == len(got.body)
        assert set(got.headers) == {"content-type", "content-length", "x-request-id"}


async def test_a_stream_comes_as_the_provider_sends_it() -> None:
    async with loaded(ProviderContract(headers={"openai-organization": "acme-corp"})) as (engine, _):
        got = await ask(engine, chat_call("cloud-large", "Hello", stream=True, stream_options={"include_usage": True}))
        assert got.body.count(b"data: ") == 10
        assert b'"total_tokens": 28' in got.body
        assert set(got.headers) == {"content-type"}


async def test_an_answer_without_usage_is_passed_on() -> None:
    async with loaded(ProviderContract(tells_usage=False)) as (engine, _):
        assert "usage" not in json.loads((await ask(engine)).body)


async def test_a_stream_that_breaks_off_is_an_error_and_is_not_begun_again() -> None:
    async with loaded(ProviderContract(breaks_after=3), remote_max_retries=5) as (engine, provider):
        async with engine.stream(chat_call("cloud-large", "Hello", stream=True)) as response:
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        assert provider.tries == 1


async def test_silence_ends_after_the_timeout_and_is_not_tried_again() -> None:
    async with loaded(ProviderContract(pause_s=3600), remote_timeout_s=1, remote_max_retries=3) as (engine, provider):
        with pytest.raises(aiohttp.ServerTimeoutError):
            await ask(engine)
        assert provider.tries <= 1, "0 when the time was over before it was there: that is not tried again either"


async def test_silence_in_the_middle_of_a_stream_ends_after_the_timeout() -> None:
    call = chat_call("cloud-large", "Hello", stream=True)
    async with loaded(ProviderContract(token_s=3600), remote_timeout_s=1) as (engine, _):
        # Around the whole: on a machine that stands still, that second can be over before the answer begins.
        with pytest.raises(aiohttp.ServerTimeoutError):
            async with engine.stream(call) as response:
                await response.read()


# ---- trying again ----


@pytest.mark.parametrize("mood", [refuse(429, "slow down"), refuse(502, "x"), refuse(503, "x"), refuse(504, "x"), drop])
async def test_what_may_pass_is_tried_again(mood: Mood) -> None:
    async with loaded(ProviderContract(moods=[mood]), remote_max_retries=1) as (engine, provider):
        assert (await ask(engine)).status == 200
        assert provider.tries == 2


async def test_tries_end_and_the_last_answer_counts() -> None:
    moods = [
        refuse(429, "slow down", Retry_After="0"),
        refuse(503, "busy", Retry_After="0"),
        refuse(429, "no", Retry_After="77"),
    ]
    async with loaded(ProviderContract(moods=moods), remote_max_retries=2) as (engine, provider):
        got = await ask(engine)
        assert (got.status, got.headers["retry-after"], provider.tries) == (429, "77", 3)
        assert json.loads(got.body)["error"]["message"] == "no"


@pytest.mark.parametrize("status", [400, 404, 422, 500])
async def test_what_will_not_pass_is_not_tried_again(status: int) -> None:
    async with loaded(ProviderContract(moods=[refuse(status, "because")]), remote_max_retries=3) as (engine, provider):
        got = await ask(engine)
        assert (got.status, provider.tries) == (status, 1)
        assert json.loads(got.body)["error"]["message"] == "because"


async def test_retry_after_is_waited_for() -> None:
    async with loaded(ProviderContract(moods=[refuse(429, "x", Retry_After="1")]), remote_max_retries=1) as (engine, _):
        began = time.monotonic()
        assert (await ask(engine)).status == 200
        assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize(
    "after", [pytest.param("3600", id="seconds"), pytest.param(formatdate(time.time() + 3600, usegmt=True), id="a date")]
)
async def test_nobody_waits_longer_than_half_a_minute(after: str, caplog: pytest.LogCaptureFixture) -> None:
    async with loaded(ProviderContract(moods=[refuse(429, "x", Retry_After=after)]), remote_max_retries=1) as (
        engine,
        provider,
    ):
        with caplog.at_level(logging.INFO, logger="runner.engines.remote"):
            asking = asyncio.create_task(ask(engine))

            await eventually(lambda: "asked again" in caplog.text)
        assert "in_s=30.0" in caplog.text
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert provider.tries == 1
        assert (await engine.stats()).running == 0


async def test_a_provider_that_is_not_there_is_a_connection_error() -> None:
    async with loaded(remote_max_retries=1, remote_base_url="http://127.0.0.1:9/v1") as (engine, provider):
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(engine)
        assert provider.tries == 0


# ---- the key, and answers that are none ----


async def test_a_key_that_the_provider_refuses_is_the_boxs_fault_and_stays_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="runner")
    async with loaded(ProviderContract(key="another"), remote_max_retries=3) as (engine, provider):
        with pytest.raises(RemoteRefused) as caught:
            await ask(engine)
        assert (caught.value.status, caught.value.retryable, provider.tries) == (502, False, 1)
        assert "sk-" not in str(caught.value) + caplog.text


async def test_an_error_that_repeats_the_key_loses_it() -> None:
    async with loaded(ProviderContract(moods=[refuse(400, f"key {KEY} is odd")])) as (engine, _):
        got = await ask(engine)
        assert json.loads(got.body)["error"]["message"] == "key (key) is odd"
        assert got.length == len(got.body)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with loaded() as (engine, provider):
        provider.moods.append(refuse(status, "over there", Location=f"{provider.url}/models"))
        with pytest.raises(RemoteRefused, match="not followed"):
            await ask(engine)
        assert provider.lists == 0


async def test_a_page_instead_of_an_answer_is_an_error() -> None:
    def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="<h1>Log in</h1>", content_type="text/html")

    async with loaded(ProviderContract(moods=[page])) as (engine, _):
        with pytest.raises(EngineUnavailable, match="as an API does"):
            await ask(engine)


async def test_an_error_page_becomes_an_error_object() -> None:
    def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="<h1>Bad gateway</h1>", status=502, content_type="text/html", headers={"Retry-After": "5"})

    async with loaded(ProviderContract(moods=[page])) as (engine, _):
        got = await ask(engine)
        assert (got.status, got.headers["content-type"], got.headers["retry-after"]) == (502, "application/json", "5")
        assert json.loads(got.body)["error"]["message"] == "The provider answers HTTP 502 and does not say why."
        assert got.length == len(got.body)


# ---- loading ----


@pytest.mark.parametrize("key", ["", "  ", "two words", "snow\u2603man"])
async def test_a_key_that_cannot_be_one_fails_the_load_and_names_the_variable(key: str) -> None:
    async with prepared(key=key) as (engine, _):
        with pytest.raises(EngineError, match=KEY_NAME) as caught:
            await engine.load(lambda _progress: None)
        assert not key.strip() or key not in str(caught.value)
        assert await engine.health() is Health.UNREACHABLE


async def test_a_provider_without_a_key_is_asked_without_one() -> None:
    async with loaded(ProviderContract(key=""), remote_api_key_env=None) as (engine, provider):
        assert (await ask(engine)).status == 200
        assert "authorization" not in provider.seen_headers[0]


@pytest.mark.parametrize("url", ["", "ftp://x/v1", "https://user:word@x/v1", "https://x/v1?a=b", "x/v1"])
async def test_an_address_that_is_none_fails_the_load(url: str) -> None:
    async with prepared(remote_base_url=url) as (engine, _):
        with pytest.raises(EngineError, match="remote_base_url"):
            await engine.load(lambda _progress: None)


async def test_by_default_a_load_asks_the_provider_nothing() -> None:
    async with loaded() as (engine, provider):
        assert await engine.health() is Health.OK
        assert (provider.tries, provider.lists) == (0, 0)


@pytest.mark.parametrize("check", ["models", "completion"])
async def test_a_check_fails_the_load_on_a_wrong_key(check: str) -> None:
    async with prepared(ProviderContract(key="another"), remote_health_check=check) as (engine, _):
        with pytest.raises(EngineError, match=f"does not accept the key in {KEY_NAME}"):
            await engine.load(lambda _progress: None)


async def test_a_completion_check_pays_for_one_token_at_each_load_and_for_none_later() -> None:
    async with loaded(remote_health_check="completion", remote_thinking="disabled") as (engine, provider):
        (asked,) = provider.asked
        assert (asked["model"], asked["max_tokens"], asked["thinking"]) == (NAME, 1, {"type": "disabled"})
        assert await engine.health() is Health.OK
        assert provider.tries == 1


async def test_a_completion_check_fails_the_load_when_the_provider_does() -> None:
    async with prepared(ProviderContract(moods=[refuse(404, "no such model")]), remote_health_check="completion") as (
        engine,
        _,
    ):
        with pytest.raises(EngineError, match=r"chat/completions answers HTTP 404.*remote_model"):
            await engine.load(lambda _progress: None)


async def test_a_list_of_models_that_fails_later_is_silence() -> None:
    async with loaded(remote_health_check="models") as (engine, provider):
        assert await engine.health() is Health.OK
        provider.key = "changed"
        assert await engine.health() is Health.SILENT


async def test_nothing_is_served_after_unload() -> None:
    async with loaded() as (engine, provider):
        await engine.unload(gently=True)
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(engine)
        assert provider.tries == 0


pytestmark = pytest.mark.timeout(120)

COST = 20 * 2 + 1 * 10
"""Of an answer of the provider that is not streamed: 20 tokens in, 1 out."""
STREAM_COST = 20 * 2 + 8 * 10


def write_settings(folder: Path, url: str, *, cap: float | None = None) -> None:
    """Have a box with this data folder load the model of the provider at ``url``."""
    model = {
        "backend": "openai_compatible", "remote_base_url": url, "remote_api_key_env": KEY_NAME,
        "remote_model": NAME, "enabled": True, "target_inflight": 2,
    }  # fmt: skip
    remote = {
        "currency": "EUR",
        "monthly_cap": {"default": cap},
        "prices": {"cloud-large": {"input_per_million": 2, "output_per_million": 10}},
    }
    (folder / "settings.json").write_text(json.dumps({"engine": {"models": {"cloud-large": model}, "remote": remote}}))


@asynccontextmanager
async def a_box(folder: Path, provider: ProviderContract, *, cap: float | None = None) -> AsyncIterator[Parts]:
    """Yield a box that has loaded the provider's model."""
    async with provider.serve() as served, aiohttp.ClientSession(auto_decompress=False) as client:
        write_settings(folder, served.url, cap=cap)
        config = read_config(["--standalone", "--data", str(folder)], {})
        with key_in_environment():
            async with assemble(config, client, on_change=lambda: None, on_load=lambda: None) as box:
                await box.start_models()

                await eventually(lambda: box.pool.registry.find("cloud-large").is_ready)
                yield box


async def ask_node(box: Parts, **fields: object) -> tuple[int, bytes]:
    """Send a request as tenant acme; return status and everything that came."""
    body = {"model": "cloud-large", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}
    request = Inference(
        "POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode(), "cloud-large", "acme",
        allow_remote=fields.get("allow_remote", True) is True, is_streaming=fields.get("stream") is True,
    )  # fmt: skip
    async with asyncio.timeout(30), box.door.open(request) as answer:
        if answer.body is not None:
            return answer.status, answer.body
        assert answer.chunks is not None
        return answer.status, b"".join([chunk async for chunk in answer.chunks])


async def endings(box: Parts) -> list[tuple[CostState, int]]:
    """Return how requests ended and what they count, oldest first."""
    return [(row.state, row.counted_micros) for row in reversed(await box.ledger.cost_rows(100))]


async def test_answers_are_paid_by_their_usage_streamed_or_not(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract()) as box:
        status, body = await ask_node(box)
        assert (status, json.loads(body)["model"]) == (200, "cloud-large")
        status, events = await ask_node(box, stream=True)
        assert (status, b"usage" in events) == (200, False)
        assert await endings(box) == [(CostState.SETTLED, COST), (CostState.SETTLED, STREAM_COST)]
        summary = await box.costs.summary()
        assert [(spent.tenant, spent.spent_micros) for spent in summary.spendings] == [("acme", COST + STREAM_COST)]


async def test_an_answer_without_usage_costs_what_was_set_aside(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract(tells_usage=False)) as box:
        await ask_node(box)
        ((state, counted),) = await endings(box)
        assert (state, counted > COST) == (CostState.FAILED_USAGE_UNKNOWN, True)


async def test_a_refusal_of_the_provider_costs_nothing(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract(moods=[refuse(400, "no"), refuse(429, "slow down")])) as box:
        assert [(await ask_node(box))[0] for _ in range(2)] == [400, 429]
        assert await endings(box) == [(CostState.RELEASED, 0)] * 2


async def test_a_stream_that_breaks_off_costs_what_was_set_aside(tmp_path: Path) -> None:
    async with a_box(tmp_path, ProviderContract(breaks_after=2)) as box:
        with pytest.raises(RequestRefused):
            await ask_node(box, stream=True)
        ((state, counted),) = await endings(box)
        assert (state, counted > 0) == (CostState.FAILED_USAGE_UNKNOWN, True)


async def test_a_client_that_leaves_is_charged_once_the_provider_has_its_request(tmp_path: Path) -> None:
    provider = ProviderContract(pause_s=30)
    async with a_box(tmp_path, provider) as box:
        asking = asyncio.create_task(ask_node(box))

        await eventually(lambda: provider.running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        ((state, counted),) = await endings(box)
        assert (state, counted > COST) == (CostState.FAILED_AFTER_SUBMIT, True)


async def test_nothing_leaves_the_box_without_consent_or_beyond_the_cap(tmp_path: Path) -> None:
    provider = ProviderContract()
    async with a_box(tmp_path, provider, cap=0.0002) as box:
        with pytest.raises(RemoteNotAllowed):
            await ask_node(box, allow_remote=False)
        assert await endings(box) == []
        await ask_node(box)
        with pytest.raises(SpendingCapReached) as caught:
            await ask_node(box, max_tokens=100)
        assert caught.value.details["spent"] == COST / 1e6
        assert provider.tries == 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_what_was_paid_for_still_reaches_its_gateway_when_the_box_is_told_to_leave(
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
