"""Whose fault the end of a request is, and what of the engine's words is kept."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from prometheus_client import REGISTRY

from core.limits import GatewayLimits
from gateway.dialects import SURFACES, Surface
from gateway.errors import GatewayError, InvalidApiKey, NoAvailableNode, QueueFull, RateLimited
from gateway.records import Record, RecordWriter
from gateway.values import RequestOutcome, judge_outcome
from tests.system.gateway.test_pipeline import Make, make_gateway
from wire.contract import RequestState

__all__ = ["make_gateway"]

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server
CHAT, MESSAGES, RESPONSES = (SURFACES[path] for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"))
HINT = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
TOO_LONG = "This model's maximum context length is 4096 tokens. However, you requested 5120 tokens in the messages."


def fail(message: str, code: object = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("status", "body", "said", "state", "error_code"),
    [
        (400, fail("temperature must be at least 0"), 400, "rejected", "BAD_REQUEST"),
        (400, fail(TOO_LONG), 400, "rejected", "context_length_exceeded"),
        (413, fail("too large"), 413, "rejected", "BAD_REQUEST"),
        (422, fail("max_tokens"), 422, "rejected", "BAD_REQUEST"),
        (403, fail("say so", "remote_not_allowed"), 403, "rejected", "BAD_REQUEST"),
        (500, fail(HINT, 500), 400, "rejected", "BAD_REQUEST"),
        (401, fail("wrong key"), 401, "failed", "FORWARDED_REQUEST_FAILED"),
        (403, fail("no"), 403, "failed", "FORWARDED_REQUEST_FAILED"),
        (404, fail("no such model"), 404, "failed", "FORWARDED_REQUEST_FAILED"),
        (429, fail("busy"), 429, "failed", "FORWARDED_REQUEST_FAILED"),
        (500, fail("out of memory"), 500, "failed", "FORWARDED_REQUEST_FAILED"),
        (503, fail("loading"), 503, "failed", "FORWARDED_REQUEST_FAILED"),
    ],
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_what_the_caller_did_wrong_is_refused_and_everything_else_failed(
    make_gateway: Make, *, status: int, body: bytes, said: int, state: str, error_code: str, streams: bool
) -> None:
    outcome = "refused" if state == "rejected" else "failed"
    before = count("muster_request_outcomes_total", outcome=outcome)
    errors = count("muster_request_errors_total", code=error_code)
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(stream=streams)
    (await request.on(link)).answer(body, status=status)
    await request.done()
    assert request.client.status == said
    assert await request.record("state", "status_code", "error_code") == (state, said, error_code)
    assert count("muster_request_outcomes_total", outcome=outcome) == before + 1
    assert count("muster_request_errors_total", code=error_code) == errors + (state == "failed")


@pytest.mark.parametrize("paths", [None, {CHAT.path}], ids=["as it is", "translated"])
@pytest.mark.parametrize("surface", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
async def test_a_picture_for_a_model_that_cannot_see_is_a_bad_request_in_each_dialect(
    make_gateway: Make, surface: Surface, paths: set[str] | None
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths=paths)
    fields: dict[str, Any] = {"input": "hi"} if surface is RESPONSES else {"max_tokens": 5}
    request = gateway.ask(surface=surface, **fields)
    (await request.on(link)).answer(fail(HINT, 500), status=500)
    await request.done()
    assert request.client.status == 400
    said = request.error
    assert (said["type"], said["retryable"], said["code"]) == ("invalid_request_error", False, "BAD_REQUEST")
    assert HINT in said["message"]
    assert await request.record("state", "status_code", "engine_error") == ("rejected", 400, HINT)


async def test_the_words_of_an_engine_are_kept_and_logged_without_those_of_the_prompt(
    make_gateway: Make, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "the merger with Initech closes on the first of March"
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(messages=[{"role": "user", "content": prompt}])
    with caplog.at_level(logging.WARNING, logger="muster.gateway"):
        (await request.on(link)).answer(fail(f"No template takes this: {prompt}"), status=500)
        await request.done()
    assert await request.record("engine_error") == ("No template takes this:…",)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert request.client.headers["x-request-id"] in line
    assert "status=500" in line
    assert "No template takes this:" in line
    assert prompt not in caplog.text


async def test_nothing_of_what_engines_say_is_kept_where_that_is_switched_off(
    make_gateway: Make, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = make_gateway()
    gateway.pipeline.limits = GatewayLimits(max_engine_error_chars=0)
    link = gateway.link()
    request = gateway.ask()
    (await request.on(link)).answer(fail("out of memory"), status=500)
    await request.done()
    assert await request.record("state", "engine_error") == ("failed", "")
    assert "out of memory" not in caplog.text
    assert request.client.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("surface", [CHAT, MESSAGES], ids=["as it is", "translated"])
async def test_an_error_inside_a_stream_is_kept_too(make_gateway: Make, surface: Surface) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT.path})
    request = gateway.ask(surface=surface, max_tokens=5, stream=True)
    oom = b'data: {"error":{"message":"CUDA out of memory","code":500}}\n\n'
    (await request.on(link)).answer(oom, headers={"content-type": "text/event-stream"})
    await request.done()
    assert await request.record("state", "engine_error") == ("failed", "CUDA out of memory")


async def test_what_the_caller_did_wrong_is_refused_in_a_stream_too(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(stream=True)
    event = b'data: {"error":{"message":"max_tokens is too large","code":400}}\n\n'
    (await request.on(link)).answer(event, headers={"content-type": "text/event-stream"})
    await request.done()
    assert await request.record("state", "status_code", "engine_error") == ("rejected", 400, "max_tokens is too large")


class NotingWriter(RecordWriter):
    """Notes the states that it is given to write."""

    def __init__(self) -> None:
        super().__init__(accept_s=30.0, max_pending=1000)
        self.states: list[RequestState] = []

    def touch(self, record: Record) -> None:
        self.states.append(record.state)
        super().touch(record)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_every_request_is_assigned_before_it_runs(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    await gateway.records.stop()
    gateway.records = gateway.pipeline.records = gateway.pipeline.books.records = writer = NotingWriter()
    writer.start()
    link = gateway.link()
    request = gateway.ask(stream=streams)
    stream = await request.on(link)
    assert writer.states == [RequestState.ASSIGNED, RequestState.RUNNING]
    while gateway.rows.execute("SELECT state FROM gateway_requestrecord WHERE finished_at IS NULL").fetchall() != [
        ("running",)
    ]:
        await asyncio.sleep(0.005)
    stream.answer(b'{"choices":[]}')
    await request.done()
    assert writer.states[2:] == [RequestState.COMPLETED]


@pytest.mark.parametrize(
    ("state", "status", "outcome"),
    [
        *((state, None, None) for state in ("queued", "assigned", "running")),
        ("completed", 200, RequestOutcome.SERVED),
        ("failed", 500, RequestOutcome.FAILED),
        ("failed", 401, RequestOutcome.FAILED),
        ("interrupted", 503, RequestOutcome.FAILED),
        ("cancelled", 499, RequestOutcome.CANCELLED),
        ("rejected", 400, RequestOutcome.REFUSED),
        ("rejected", 404, RequestOutcome.REFUSED),
        ("rejected", 429, RequestOutcome.REFUSED),
        ("rejected", 503, RequestOutcome.FAILED),
        ("rejected", None, RequestOutcome.FAILED),
    ],
)
def test_a_state_and_a_status_say_what_became_of_a_request(
    state: str, status: int | None, outcome: RequestOutcome | None
) -> None:
    assert judge_outcome(RequestState(state), status) is outcome


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidApiKey(), RequestOutcome.REFUSED),
        (RateLimited(), RequestOutcome.REFUSED),
        (QueueFull(), RequestOutcome.FAILED),
        (NoAvailableNode(), RequestOutcome.FAILED),
    ],
)
def test_our_own_refusals_are_the_callers_mistake_or_a_lack_of_capacity(error: GatewayError, outcome: RequestOutcome) -> None:
    assert judge_outcome(error.state, error.status) is outcome


async def test_a_request_without_a_key_counts_as_refused(make_gateway: Make) -> None:
    before = count("muster_request_outcomes_total", outcome="refused")
    request = make_gateway().ask("mst_wrong")
    await request.done()
    assert request.client.status == 401
    assert count("muster_request_outcomes_total", outcome="refused") == before + 1
