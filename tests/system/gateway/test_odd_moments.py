"""Requests at their odd moments: other models, other words, kept answers, clients that leave; each ends once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from core.limits import GatewayLimits
from gateway import metrics
from gateway.catalogue import KeyEntry
from gateway.dialects import SURFACES
from gateway.dialects.translation import Translation
from gateway.values import InferenceRequest
from nodes.links import EndKind
from nodes.states import POOL_RESPONSES
from tests.system.gateway.test_client_surfaces import CHAT, MESSAGES, RESPONSES, STREAM, WHOLE, end_waits
from tests.system.gateway.test_pipeline import SSE, Gateway, Make, Rows, make_gateway

__all__ = ["make_gateway"]

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server
ANSWER = json.dumps(WHOLE).encode()


def allow_keeping(gateway: Gateway) -> None:
    """Let the tenant's answers be kept, in memory and in the database."""
    catalogue = gateway.pipeline.keys._catalogue
    keys = [
        (keyid, KeyEntry(entry.digest, replace(entry.caller, stores_responses=True), revoked=False, expires_at=None))
        for keyid, entry in catalogue.keys.items()
    ]
    catalogue.apply_keys(keys, replace=True)
    gateway.rows.execute("DELETE FROM gateway_storedresponse")
    gateway.rows.execute("DELETE FROM gateway_tenant WHERE name = 't'")
    gateway.rows.execute(
        "INSERT INTO gateway_tenant (name, is_active, stores_responses, responses_kept_days, created_at, updated_at)"
        " VALUES ('t', true, true, 30, now(), now())"
    )


# other models


async def test_a_fallback_answers_while_the_models_queue_is_full(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()}, max_queue=0)
    link, spare = gateway.link(), gateway.link("spare")
    first = gateway.ask()
    stream = await first.on(link)
    second = gateway.ask()
    (await second.on(spare)).answer(ANSWER)
    await second.done()
    assert await second.record("model", "asked_model", "state") == ("spare", "m", "completed")
    third = gateway.ask(model="spare")
    other = await third.on(spare)
    refused = gateway.ask()
    await refused.done()
    assert (refused.client.status, refused.error["message"]) == (503, "Service temporarily at capacity, please retry")
    for one, its in ((first, stream), (third, other)):
        its.answer(ANSWER)
        await one.done()


async def test_a_fallback_answers_when_the_models_providers_are_switched_off(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    gateway.pipeline.dispatcher._keeper.disabled_models = frozenset({"m"})
    request = gateway.ask()
    await request.done()
    assert (request.client.status, request.error["message"]) == (503, "Provider is currently disabled")
    spare = gateway.link("spare")
    request = gateway.ask()
    (await request.on(spare)).answer(ANSWER)
    await request.done()
    assert await request.record("model", "asked_model") == ("spare", "m")


@pytest.mark.parametrize("kind", [EndKind.ENGINE_FAILED, EndKind.BUSY], ids=["failed", "busy"])
async def test_a_fallback_answers_after_the_models_only_box_did_not(make_gateway: Make, kind: EndKind) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    link, spare = gateway.link(), gateway.link("spare")
    request = gateway.ask()
    (await request.on(link)).end(kind, retryable=True)
    await request.client.wait(lambda: spare.streams or link.streams or request.task.done())
    assert link.streams == []
    spare.streams[0].answer(ANSWER)
    await request.done()
    assert await request.record("model", "attempts", "state") == ("spare", 2, "completed")


async def test_a_fallback_answers_when_the_models_last_box_was_taken_back(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    link, spare = gateway.link(), gateway.link("spare")
    request = gateway.ask()
    stream = await request.on(link)
    link.policy.reclaimed = True
    stream.end(EndKind.RECLAIMED)
    (await request.on(spare)).answer(ANSWER)
    await request.done()
    assert await request.record("model", "state") == ("spare", "completed")


async def test_each_model_keeps_to_its_own_bound_of_waiting_requests(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()}, max_queue=1)
    entries = gateway.pipeline.admission._catalogue.models
    gateway.pipeline.admission._catalogue.apply_models([entries["m"], replace(entries["spare"], max_queue=0)])
    spare = gateway.link("spare")
    first = gateway.ask(model="spare")
    stream = await first.on(spare)
    second = gateway.ask()
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    assert gateway.dispatcher.depths() == {"m": 1}
    stream.answer(ANSWER)
    await first.done()
    second.client.leave()
    await second.done()


async def test_a_pool_shaped_request_goes_to_a_fallback_that_speaks_chat_alone(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    link, spare = gateway.link(paths={POOL_RESPONSES, CHAT}), gateway.link("spare", paths={CHAT})
    first, second = [gateway.ask(surface=RESPONSES, input="hi", decoding={"temperature": 0.5}) for _ in range(2)]
    native = await first.on(link)
    assert native.request.path == POOL_RESPONSES
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())  # it may have been accepted later
    gateway.dispatcher.note_held("m", 3600.0)
    third = gateway.ask(surface=RESPONSES, input="hi", decoding={"temperature": 0.5})
    stream = await third.on(spare)
    assert stream.request.path == CHAT
    stream.answer(ANSWER)
    await third.done()
    assert json.loads(third.client.body)["output_text"] == "Hello"
    native.answer(ANSWER)
    await first.done()
    (await second.on(link)).answer(ANSWER)
    await second.done()


# other words


async def test_a_translation_that_breaks_gives_the_slot_back(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT})

    def translate(request: InferenceRequest) -> Translation:
        if link.active:
            raise RuntimeError("a bug")
        return Translation(path=CHAT, body=request.body, open_answer=lambda context: translate(request))  # type: ignore[arg-type,return-value]

    request = gateway.ask(surface=replace(MESSAGES, translate=translate), max_tokens=5)
    with pytest.raises(RuntimeError):
        await request.done()
    assert link.active == 0


async def test_a_missing_model_does_not_make_a_path_unknown(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(surface=MESSAGES, max_tokens=5)
    body = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","code":404}}'
    (await request.on(link)).answer(body, status=404)
    await request.done()
    assert (request.client.status, request.error["message"]) == (404, "The model `m` does not exist.")
    assert link.find_path("m", "/v1/messages") == "/v1/messages"


async def test_an_error_in_a_stream_is_noticed_for_clients_that_ask_for_the_pools_numbers_too(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(stream=True, x_pool_options={})
    (await request.on(link)).answer(STREAM[0], b'data: {"error":{"message":"oom"}}\n\n', headers=SSE)
    await request.done()
    assert b"x_pool_meta" not in request.client.body
    assert await request.record("state", "error_code") == ("failed", "FORWARDED_REQUEST_FAILED")


# kept answers


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_a_kept_answer_with_the_pools_numbers_is_whole_and_durable(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", stream=streams, x_pool_options={})
    stream = await request.on(link)
    stream.answer(*(STREAM if streams else [ANSWER]), headers=SSE if streams else None)
    await request.done()
    data = request.client.body.rpartition(b"\ndata:")[2]
    response = json.loads(data)["response"] if streams else json.loads(data)
    assert (response["store"], response["x_pool_meta"]["model"]) == (True, "m")
    assert gateway.rows.execute("SELECT id FROM gateway_storedresponse").fetchall() == [(response["id"],)]
    assert await request.record("state") == ("completed",)


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_an_answer_that_cannot_be_kept_says_so_whatever_it_speaks_of(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", instructions="data: x", stream=streams)
    stream = await request.on(link)
    gateway.rows.execute("DELETE FROM gateway_tenant WHERE name = 't'")
    stream.answer(*(STREAM if streams else [ANSWER]), headers=SSE if streams else None)
    await request.done()
    data = request.client.body.rpartition(b"\ndata:")[2]
    response = json.loads(data)["response"] if streams else json.loads(data)
    assert (response["store"], response["status"]) == (False, "completed")
    assert request.client.is_whole
    assert await request.record("state") == ("completed",)


async def test_a_client_that_leaves_while_its_answer_is_written_down_is_let_go_at_once(make_gateway: Make, rows: Rows) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    before = metrics.TALLY.in_flight
    request = gateway.ask(surface=RESPONSES, input="hi", stream=True)
    stream = await request.on(link)
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_storedresponse")
        stream.answer(*STREAM, headers=SSE)
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
        await request.client.wait(lambda: rows.execute(waiting).fetchone())
        request.client.leave()
        await request.done()
        blocker.rollback()
    assert not request.client.is_whole
    assert metrics.TALLY.in_flight == before
    assert await request.record("state", "attempts") == ("cancelled", 1)


# what cannot be said in other words

UNSAYABLE = [{"role": "user", "content": [{"type": "holograph", "data": "x"}]}]


async def test_what_cannot_be_translated_waits_for_the_box_that_speaks_it(make_gateway: Make) -> None:
    gateway = make_gateway()
    native, other = gateway.link(paths={"/v1/messages", CHAT}), gateway.link(paths={CHAT})
    first = gateway.ask(surface=MESSAGES, max_tokens=5)
    stream = await first.on(native)
    second = gateway.ask(surface=MESSAGES, max_tokens=5, messages=UNSAYABLE)
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    assert other.active == 0
    stream.answer(ANSWER)
    await first.done()
    (await second.on(native)).answer(ANSWER)
    await second.done()
    assert second.client.status == 200
    assert await second.record("state", "attempts") == ("completed", 1)


async def test_what_cannot_be_translated_is_refused_by_name_once_nobody_speaks_it(make_gateway: Make) -> None:
    gateway = make_gateway()
    native, _ = gateway.link(paths={"/v1/messages", CHAT}), gateway.link(paths={CHAT})
    first = gateway.ask(surface=MESSAGES, max_tokens=5)
    await first.on(native)
    second = gateway.ask(surface=MESSAGES, max_tokens=5, messages=UNSAYABLE)
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    first.client.leave()
    gateway.registry.remove(native)
    await first.done()
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())  # it had just been given the lost slot
    end_waits(gateway)
    await second.done()
    assert second.client.status == 400
    assert second.error["param"] == "messages[0].content[0].type"
    assert await second.record("state") == ("rejected",)


# signs of life, then ...


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("trouble", ["whole", "empty", "large", "unknown path", "deadline"])
async def test_after_signs_of_life_every_trouble_is_one_event_and_an_end(make_gateway: Make, path: str, trouble: str) -> None:
    gateway = make_gateway(limits=GatewayLimits(stream_ping_s=0.01))
    link = gateway.link()
    request = gateway.ask(surface=SURFACES[path], stream=True, max_tokens=5, input="hi")
    stream = await request.on(link)
    await request.client.wait(lambda: b": ping" in request.client.body)
    if trouble == "whole":
        stream.answer(ANSWER)
    elif trouble == "empty":
        for _ in range(GatewayLimits().max_requeues):
            stream.answer(headers=SSE)
            stream = await request.on(link)
        stream.answer(headers=SSE)
    elif trouble == "large":
        stream.answer(*[b"x" * 1024 * 1024] * 17)
    elif trouble == "unknown path":
        stream.answer(b"Not Found", status=404)
        if path != CHAT:
            stream = await request.on(link)
            assert stream.request.path == CHAT
            stream.answer(b"Not Found", status=404)
    else:
        stream.sink._take_deadline()  # type: ignore[attr-defined]  # a timer that short may be up before the first sign of life
    await request.done()
    events = [event for event in request.client.body.split(b"\n\n") if event and event != b": ping"]
    said: list[dict[str, Any]] = [json.loads(event.rpartition(b"data:")[2]) for event in events]
    assert request.client.is_whole
    assert len([one for one in said if "error" in one or one.get("type") == "response.failed"]) == 1
    assert b"[DONE]" not in request.client.body
    assert (await request.record("state"))[0] == "failed"
