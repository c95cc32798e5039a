"""Translated and kept requests over two gateways, and what is left of them when a process dies in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any  # bodies are JSON

import psycopg
import pytest

from tests.fakes.http_client import Exchange, Reply, call
from tests.fakes.lab import CHAT, Lab, bearer, unique
from tests.fakes.scripted_box import ScriptedBox, Stream
from tests.fakes.stack import Gateway
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
DEAD_AFTER_S = 4.0
"""Less than the reconciler's own patience; a living gateway writes its heartbeat about every two seconds."""


def piece(text: str, finish: str | None = None) -> bytes:
    """Return one chunk of a chat stream."""
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "c", "created": 1, "model": "x", "choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"id":"c","created":1,"model":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
END = piece("", "stop") + USAGE + b"data: [DONE]\n\n"


async def begin(
    lab: Lab, path: str, model: str, box: ScriptedBox, *, key: str = "", gateway: Gateway | None = None, **more: Any
) -> tuple[Exchange, Stream]:
    """Ask for a stream, and have the box begin its answer with "Hel"."""
    said: dict[str, Any] = {"input": "hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hi"}]}
    field = "max_output_tokens" if path == RESPONSES else "max_tokens"
    exchange = await Exchange.open(
        (gateway or lab.gateway).url + path,
        headers=lab.headers(bearer(key) if key else None),
        body=json.dumps({"model": model, field: 9, "stream": True, **said, **more}).encode(),
    )
    lab.exchanges.append(exchange)
    stream = await box.stream()
    assert (stream.meta.path, stream.meta.is_streaming) == (CHAT, True)
    await box.head(stream, content_type="text/event-stream")
    await box.data(stream, piece("Hel"))
    await exchange.until(b"Hel")
    return exchange, stream


async def end(box: ScriptedBox, stream: Stream) -> None:
    """Have the box end its answer as an engine does."""
    await box.data(stream, piece("lo") + END)
    await box.end(stream)


def read(reply: Reply) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(data) for data in reply.events]


def make_key(lab: Lab) -> tuple[str, str]:
    """Return the name of a tenant whose answers are kept, and a key of it."""
    tenant = unique("keeper")
    lab.operate("gateway.services.create_tenant", name=tenant)
    lab.operate("gateway.services.change_response_policy", name=tenant, stores_responses=True, responses_kept_days=3)
    _, text = lab.operate("gateway.services.create_api_key", name=tenant, tenant_name=tenant)
    return tenant, str(text)


async def knows(lab: Lab, here: Gateway, model: str) -> None:
    """Wait until a gateway knows of the box at another one that has the model."""

    async def is_listed() -> bool:
        reply = await call("GET", here.url + "/v1/models", headers=lab.headers())
        return model in {row["id"] for row in reply.json["data"]}

    await eventually(is_listed, what=f"{here.name} knows the box of {model}")


async def test_a_translated_stream_crosses_gateways_under_any_name(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    model = await lab.model(here, there, prefix="модель")
    box = await lab.box(model, gateway=there)
    await knows(lab, here, model)
    tenant = unique("арендатор")
    lab.operate("gateway.services.create_tenant", name=tenant)
    _, key = lab.operate("gateway.services.create_api_key", name=tenant, tenant_name=tenant, priority="low")
    exchange, stream = await begin(lab, MESSAGES, model, box, key=str(key), gateway=here)
    await end(box, stream)
    reply = await exchange.finish()
    assert (read(reply)[-1]["type"], reply.whole) == ("message_stop", True)
    assert (stream.meta.request_id, stream.meta.model) == (reply.request_id, model)
    assert (stream.meta.tenant, stream.meta.priority) == (tenant, "low")
    (record,) = await lab.final(model)
    assert (record["status"], record["endpoint"], record["attempts"]) == ("completed", MESSAGES, 1)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (3, 4)


async def test_a_conversation_that_is_kept_at_one_gateway_goes_on_at_the_other(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    (_, key), (_, foreign) = make_key(lab), make_key(lab)
    model = await lab.model(here, there)
    box = await lab.box(model, gateway=there)
    await knows(lab, here, model)
    exchange, stream = await begin(lab, RESPONSES, model, box, key=key, gateway=here)
    await end(box, stream)
    kept = read(await exchange.finish())[-1]["response"]
    assert (kept["status"], kept["store"], kept["model"]) == ("completed", True, model)
    url = f"{there.url}{RESPONSES}/{kept['id']}"
    assert (await call("GET", url, headers=bearer(key))).json == kept
    for method in ("GET", "DELETE"):
        assert (await call(method, url, headers=bearer(foreign))).status == 404
    exchange, stream = await begin(lab, RESPONSES, model, box, key=key, gateway=there, previous_response_id=kept["id"])
    said = [message["content"] for message in json.loads(bytes(stream.body))["messages"]]
    assert said == ["hi", "Hello", "hi"]
    await end(box, stream)
    assert read(await exchange.finish())[-1]["response"]["previous_response_id"] == kept["id"]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_box_that_dies_in_a_translated_stream_is_one_error_of_its_dialect(lab: Lab, path: str) -> None:
    model = await lab.model()
    box = await lab.box(model)
    exchange, _ = await begin(lab, path, model, box)
    box.die()
    reply = await exchange.finish()
    last, failure = read(reply)[-1], {MESSAGES: "error", RESPONSES: "response.failed"}[path]
    assert reply.whole
    assert [event["type"] for event in read(reply)].count(failure) == 1
    said = last["error"] if path == MESSAGES else last["response"]["error"]
    assert (last["type"], said["message"].startswith("The request was interrupted")) == (failure, True)
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"], record["attempts"]) == ("interrupted", "REQUEST_INTERRUPTED", 1)


async def test_a_gateway_that_is_killed_leaves_each_request_in_one_state_and_keeps_nothing_by_halves(lab: Lab) -> None:
    doomed = lab.stack.gateway(unique("killed"), {})
    tenant, key = make_key(lab)
    model = await lab.model(doomed)
    box = await lab.box(model, gateway=doomed, max_concurrent=2)
    streamed, _ = await begin(lab, MESSAGES, model, box, gateway=doomed)
    kept, stream = await begin(lab, RESPONSES, model, box, key=key, gateway=doomed)
    with psycopg.connect(lab.stack.ready.database_url) as database:
        database.execute("LOCK TABLE gateway_storedresponse IN EXCLUSIVE MODE")
        await end(box, stream)
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'gateway_storedresponse'::regclass"
        await eventually(lambda: database.execute(waiting).fetchone(), what="the answer is being written down")
        assert doomed.process is not None
        os.kill(doomed.process.pid, signal.SIGKILL)
        doomed.process.wait()
    for exchange in (streamed, kept):
        reply = await exchange.finish()
        assert not reply.whole
        assert not {"message_stop", "response.completed"} & {event["type"] for event in read(reply)}
    close = "gateway.reconciler.close_orphaned_requests"

    async def both_closed() -> bool:
        await asyncio.to_thread(lab.stack.backstage.call, close, dead_after_s=DEAD_AFTER_S, confirm_s=0.5)
        return [row["status"] for row in await lab.records(model)] == ["interrupted"] * 2

    await eventually(both_closed, what="both requests are closed", within_s=60, pause_s=0.2)
    with psycopg.connect(lab.stack.ready.database_url) as database:
        query = "SELECT count(*) FROM gateway_storedresponse r JOIN gateway_tenant t ON t.id = r.tenant_id WHERE t.name = %s"
        assert database.execute(query, (tenant,)).fetchone() == (0,)
