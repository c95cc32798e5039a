"""Streams whose node dies, in the pipeline: who goes on with them, what the client reads, what the record says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gateway import metrics
from gateway.dialects.surface import SURFACES, Surface
from nodes.links import EndKind
from nodes.states import CONTINUATIONS
from tests.fakes.chat_engine import read_said
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import CHAT, MESSAGES, RESPONSES, SSE, Gateway, Make, Request, allow_keeping, chunk, end_waits
from tests.fakes.waiting import turns
from wire.contract import ErrorCode

RESUME = {"resume": True}
PATHS = {CHAT, CONTINUATIONS}
BEGUN = (chunk({"role": "assistant", "content": "Once"}), chunk({"content": " there"}), chunk({"content": "\n"}))
REST = (
    chunk({"role": "assistant", "content": None}), chunk({"content": "\n"}), chunk({"content": "was"}), chunk({}, "stop"),
    b'data: {"id":"chatcmpl-2","choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\n', b"data: [DONE]\n\n",
)  # fmt: skip


async def begin(request: Request, link: FakeLink, *parts: bytes) -> FakeStream:
    """Have a node begin to answer and the client read that much."""
    stream = await request.on(link)
    stream.answer(*parts or BEGUN, headers=SSE, ends=False)
    await request.client.wait(lambda: b"there" in request.client.body or parts)
    return stream


def lose(gateway: Gateway, link: FakeLink) -> None:
    gateway.registry.remove(link)


def read_text(request: Request) -> str:
    chunks = [json.loads(event[6:]) for event in request.client.body.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for one in chunks for choice in one.get("choices", ()))


def read_meta(request: Request) -> dict[str, Any]:
    found = [line for line in request.client.body.split(b"\n\n") if b"x_pool_meta" in line]
    meta: dict[str, Any] = json.loads(found[0][6:])["x_pool_meta"]
    return meta


async def test_another_node_goes_on_with_a_stream_whose_node_was_lost(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, other = gateway.link(paths=PATHS), gateway.link(paths=PATHS)
    resumed = metrics.CONTINUED.labels("resumed")._value.get()
    request = gateway.ask(stream=True, max_tokens=10, x_pool_options=RESUME)
    await begin(request, link)
    lose(gateway, link)
    stream = await request.on(other)
    asked = json.loads(stream.request.body)
    assert stream.request.path == CONTINUATIONS
    assert asked["messages"] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once there"}]
    assert asked["max_tokens"] == 8
    stream.answer(*REST, headers=SSE)
    await request.done()
    assert metrics.CONTINUED.labels("resumed")._value.get() == resumed + 1
    assert read_text(request) == "Once there\nwas"
    assert request.client.body.endswith(b"data: [DONE]\n\n")
    assert request.client.body.count(b'"role"') == 1
    assert b"chatcmpl-2" not in request.client.body
    assert b'"prompt_tokens":3,"completion_tokens":5,"total_tokens":8' in request.client.body
    meta = read_meta(request)
    assert [one["node"] for one in meta["resumed"]] == [other.node_name]
    assert (meta["node"], meta["attempts"], meta["unmatched"]) == (other.node_name, 2, None)
    columns = ("state", "attempts", "node_name", "prompt_tokens", "completion_tokens", "status_code", "lost_attempts")
    *ended, lost = await request.record(*columns)
    assert ended == ["completed", 2, other.node_name, 3, 5, 200]
    assert re.fullmatch(rf"{link.node_id.hex} m\t\d+\tbroken\n", str(lost))


@pytest.mark.parametrize("surface", [MESSAGES, RESPONSES])
async def test_it_goes_on_in_the_dialect_of_its_client(make_gateway: Make, surface: Surface) -> None:
    gateway = make_gateway()
    paths = {*PATHS, surface.path}  # it is asked for chat all the same: nobody goes on with an engine's own events
    link, other = gateway.link(paths=paths), gateway.link(paths=paths)
    if surface is RESPONSES:
        fields: dict[str, object] = {"input": "hi", "messages": None}
    else:
        fields = {"max_tokens": 10}
    request = gateway.ask(surface=surface, stream=True, x_pool_options=RESUME, **fields)
    stream = await begin(request, link)
    assert stream.request.path == CHAT
    stream.end(EndKind.ENGINE_FAILED)
    (await request.on(other)).answer(*REST, headers=SSE)
    await request.done()
    body = b"\n\n".join(event for event in request.client.body.split(b"\n\n") if b"event: x_pool_meta" not in event)
    assert read_said(surface.path, body).text == "Once there\nwas"
    assert b'"resumed":[{' in request.client.body


async def test_an_answer_that_is_kept_is_kept_as_one(make_gateway: Make) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link, other = gateway.link(paths=PATHS), gateway.link(paths=PATHS)
    request = gateway.ask(surface=RESPONSES, stream=True, input="hi", messages=None, store=True, x_pool_options=RESUME)
    await begin(request, link)
    lose(gateway, link)
    (await request.on(other)).answer(*REST, headers=SSE)
    await request.done()
    (kept,) = gateway.rows.execute("SELECT body FROM gateway_storedresponse").fetchone() or ("",)
    assert "Once there\\nwas" in json.dumps(json.loads(bytes(kept)) if isinstance(kept, bytes | memoryview) else kept)


async def test_a_completion_goes_on_behind_its_prompt_at_any_node(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, other = gateway.link(), gateway.link()
    surface = SURFACES["/v1/completions"]
    request = gateway.ask(surface=surface, stream=True, prompt="Say: ", messages=None, x_pool_options=RESUME)
    await begin(request, link, b'data: {"id":"a","choices":[{"index":0,"text":"Once"}]}\n\n')
    lose(gateway, link)
    stream = await request.on(other)
    assert (stream.request.path, json.loads(stream.request.body)["prompt"]) == ("/v1/completions", "Say: Once")
    stream.answer(b'data: {"id":"b","choices":[{"index":0,"text":" more","finish_reason":"stop"}]}\n\n', headers=SSE)
    await request.done()
    assert request.client.body.count(b'"id":"a"') == 2


async def test_a_client_that_did_not_ask_is_told_and_its_model_may_ask_for_it(make_gateway: Make) -> None:
    gateway = make_gateway()
    for resumes, options, goes_on in (
        (False, None, False), (False, {}, False), (True, None, True), (True, {"resume": False}, False), (True, {}, True),
    ):  # fmt: skip
        gateway.catalogue.apply_models([
            replace(entry, resumes=resumes) for entry in gateway.catalogue.models.values()
        ])  # fmt: skip
        link, other = gateway.link(paths=PATHS), gateway.link(paths=PATHS)
        request = gateway.ask(stream=True, x_pool_options=options)
        await begin(request, link)
        lose(gateway, link)
        if goes_on:
            (await request.on(other)).answer(*REST, headers=SSE)
        await request.done()
        assert read_text(request).endswith("was") == goes_on
        assert (ErrorCode.REQUEST_INTERRUPTED.encode() in request.client.body) != goes_on
        assert (b"x_pool_meta" in request.client.body) == (goes_on and options is not None)
        lose(gateway, other)


@pytest.mark.parametrize("others", ["none", "old"])
async def test_where_no_node_can_go_on_the_client_is_told_at_once(make_gateway: Make, others: str) -> None:
    gateway = make_gateway()
    link = gateway.link(paths=PATHS)
    if others == "old":
        gateway.link(paths={CHAT})
        gateway.link()  # says nothing of its paths: it may be anything
    request = gateway.ask(stream=True, x_pool_options=RESUME, prefer_gpu=link.node_name)
    for one in list(gateway.registry):
        if one is not link:
            one.active = 1
    await begin(request, link)
    for one in list(gateway.registry):
        one.active = int(one is link)
    lose(gateway, link)
    await request.done()
    assert ErrorCode.REQUEST_INTERRUPTED.encode() in request.client.body
    assert b"Once" in request.client.body
    assert await request.record("state") == ("interrupted",)


async def test_a_node_that_refuses_to_go_on_or_dies_too_is_followed_by_another(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, refusing, dying, last = (gateway.link(paths=PATHS) for _ in range(4))
    request = gateway.ask(stream=True, x_pool_options=RESUME)
    await begin(request, link)
    lose(gateway, link)
    (await request.on(refusing)).answer(b'{"error":{"message":"thinking"}}', status=400)
    stream = await request.on(dying)
    stream.answer(REST[0], REST[1], chunk({"content": "wa"}), headers=SSE, ends=False)
    lose(gateway, dying)
    stream = await request.on(last)
    assert json.loads(stream.request.body)["messages"][-1]["content"] == "Once there\nwa"
    stream.answer(chunk({"content": "s"}), *REST[3:], headers=SSE)
    await request.done()
    assert read_text(request) == "Once there\nwas"
    assert [one["node"] for one in read_meta(request)["resumed"]] == [dying.node_name, last.node_name]


async def test_after_so_many_nodes_nobody_else_is_asked(make_gateway: Make) -> None:
    gateway = make_gateway()
    links = [gateway.link(paths=PATHS) for _ in range(gateway.limits.max_requeues + 2)]
    given_up = metrics.CONTINUED.labels("given_up")._value.get()
    request = gateway.ask(stream=True, x_pool_options=RESUME)
    await begin(request, links[0])
    for link, following in pairwise(links[:-1]):
        lose(gateway, link)
        (await request.on(following)).answer(chunk({"content": "x"}), headers=SSE, ends=False)
    lose(gateway, links[-2])
    await request.done()
    assert not links[-1].streams
    assert ErrorCode.REQUEST_INTERRUPTED.encode() in request.client.body
    assert metrics.CONTINUED.labels("given_up")._value.get() == given_up + 1


async def test_an_answer_that_lacks_only_its_end_is_ended_without_a_node(make_gateway: Make) -> None:
    gateway = make_gateway()
    for most, parts in ((4, (*BEGUN, chunk({}, "stop"))), (3, BEGUN)):
        link = gateway.link(paths=PATHS)
        request = gateway.ask(stream=True, x_pool_options=RESUME, max_tokens=most)
        await begin(request, link, *parts)
        lose(gateway, link)
        await request.done()
        assert read_text(request) == "Once there\n"
        assert request.client.body.endswith(b"data: [DONE]\n\n")
        assert (b'"length"' in request.client.body) == (most == 3)
        assert await request.record("state", "attempts", "tokens_estimated") == ("completed", 1, True)


async def test_it_waits_for_a_slot_with_signs_of_life_and_its_client_may_leave(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, other = gateway.link(paths=PATHS), gateway.link(paths=PATHS)
    requests = [gateway.ask(stream=True, x_pool_options=RESUME) for _ in range(2)]
    await requests[1].on(other)
    await begin(requests[0], link)
    lose(gateway, link)
    await turns()
    assert not requests[0].task.done()
    other.streams[0].answer(*BEGUN, chunk({}, "stop"), b"data: [DONE]\n\n", headers=SSE)
    await requests[1].done()
    (await requests[0].on(other)).answer(*REST, headers=SSE)
    await requests[0].done()
    assert read_text(requests[0]) == "Once there\nwas"
    leaving = gateway.ask(stream=True, x_pool_options=RESUME)
    await begin(leaving, other)
    link = gateway.link(paths=PATHS)
    link.active = 1
    lose(gateway, other)
    await turns()
    leaving.client.leave()
    await leaving.done()
    assert await leaving.record("state") == ("cancelled",)
    link.active = 0


async def test_a_slot_that_comes_too_late_is_told_as_what_broke_the_stream(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, other = gateway.link(paths=PATHS), gateway.link(paths=PATHS)
    request = gateway.ask(stream=True, x_pool_options=RESUME)
    await begin(request, link)
    other.active = 1
    lose(gateway, link)
    await turns()
    end_waits(gateway)
    await request.done()
    assert ErrorCode.REQUEST_INTERRUPTED.encode() in request.client.body
    other.active = 0


async def test_what_cannot_go_on_says_why_and_ends_with_an_error_as_ever(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, other = gateway.link(paths=PATHS), gateway.link(paths=PATHS)
    request = gateway.ask(stream=True, logprobs=True, x_pool_options=RESUME)
    await begin(request, link)
    lose(gateway, link)
    await request.done()
    assert not other.streams
    assert ErrorCode.REQUEST_INTERRUPTED.encode() in request.client.body
    whole = gateway.ask(stream=True, n=2, x_pool_options=RESUME)
    await whole.served(other, *BEGUN, chunk({}, "stop"), b"data: [DONE]\n\n", headers=SSE)
    assert read_meta(whole)["unmatched"] == {"resume": "'n' may not mean the same for the rest of an answer"}
    calling = gateway.ask(stream=True, x_pool_options=RESUME)
    part = chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]})
    await begin(calling, other, *BEGUN, part)
    third = gateway.link(paths=PATHS)
    lose(gateway, other)
    await calling.done()
    assert not third.streams
    assert ErrorCode.REQUEST_INTERRUPTED.encode() in calling.client.body
