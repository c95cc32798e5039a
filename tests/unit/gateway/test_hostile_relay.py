"""Hostile bytes and odd moments on both sides of the relay: bodies, refusals, closing events, unknown paths."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from gateway.client import ClientConnection
from gateway.dialects import SURFACES
from gateway.dialects.pool_meta import MetaStream, PoolMeta
from gateway.dialects.refusal import MAX_WORDS_CHARS, read_refusal
from gateway.errors import BadRequest, ClientLeft, ContextTooLong
from gateway.heads import render_head
from gateway.keeping import mark_unkept
from gateway.peer import serve_peer
from gateway.values import Limits
from nodes.states import POOL_RESPONSES
from tests.fakes.asgi_client import MemoryClient
from tests.unit.gateway.test_dispatch import CHAT, Floor

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
JSON = {"content-type": "application/json"}
BODY = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"input":"hi","max_tokens":5'
META = PoolMeta(gpu_id="n", node="b", model="m", asked_model="m", queue_ms=1, inference_ms=2, ttfb_ms=None, attempts=1)

# request bodies


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "more",
    [
        b',"x_pool_options":{"prefer_gpu":"\xff"}}',
        b',"\xff":1}',
        b',"\\u0061":"\xff"}',
    ],
    ids=["option not UTF-8", "key not UTF-8", "value not UTF-8 behind an escaped key"],
)
def test_a_body_that_one_reader_takes_and_another_does_not_is_the_clients_fault(path: str, more: bytes) -> None:
    with pytest.raises(BadRequest):
        SURFACES[path].parse(BODY + more, JSON)


def test_nesting_at_the_edge_of_what_can_be_read_is_the_clients_fault() -> None:
    for depth in range(900, 1100):
        body = BODY + b',"\\u0061":' + b"[" * depth + b"]" * depth + b"}"
        try:
            SURFACES[CHAT].parse(body, JSON)
        except BadRequest:
            return
    pytest.fail("no depth was too deep")


# refusals


@pytest.mark.parametrize(
    "rest",
    [b'"\xff"', b"1" * 5000, b"1e999"],
    ids=["not UTF-8", "endless number", "number out of range"],
)
def test_an_error_body_that_cannot_be_read_as_a_whole_is_still_passed_on_with_a_text_code(rest: bytes) -> None:
    body = b'{"error":{"message":"out of memory","code":400,"detail":' + rest + b"}}"
    said = SURFACES[CHAT].render_refusal(400, body, "req_1")
    assert b'"code":"BAD_REQUEST"' in said
    assert b"out of memory" in said


def test_numbers_are_looked_for_only_in_as_many_words_as_are_passed_on() -> None:
    words = "maximum context length is 8 tokens, " + "." * MAX_WORDS_CHARS + " you asked for 9"
    error = read_refusal(400, json.dumps({"error": {"message": words}}).encode())
    assert isinstance(error, ContextTooLong)
    assert (error.prompt_tokens, error.context_tokens) == (0, 0)


def test_headers_that_describe_the_engines_bytes_do_not_describe_ours() -> None:
    headers = {"content-type": "text/html", "content-encoding": "gzip", "etag": "x", "x-engine": "yes"}
    head = dict(render_head(headers, queue_ms=0, is_event_stream=False, content_type="application/json"))
    assert head[b"content-type"] == b"application/json"
    assert head[b"x-engine"] == b"yes"
    assert not {b"content-encoding", b"etag"} & set(head)
    assert dict(render_head(headers, queue_ms=0, is_event_stream=False))[b"content-encoding"] == b"gzip"


# closing events


def feed_all(stream: bytes) -> bytes:
    meta = MetaStream(lambda: META)
    return meta.feed(stream) + meta.finish()


def test_text_that_looks_like_the_end_of_a_stream_is_text() -> None:
    first = b'data: {"id":"c","choices":[{"delta":{"content":"it ends with data: [DONE] always"}}]}\n\n'
    out = feed_all(first + b"data: [DONE]\n\n")
    assert out.startswith(first)
    assert out.count(b"x_pool_meta") == 1
    assert out.endswith(b"}\n\ndata: [DONE]\n\n")


def test_an_echo_that_looks_like_the_closing_event_is_an_echo() -> None:
    first = (
        b'event: response.created\ndata: {"type":"response.created","response":{"metadata":{"type":"response.completed"}}}\n\n'
    )
    last = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n'
    out = feed_all(first + last)
    assert out.startswith(first)
    assert out.count(b"x_pool_meta") == 1


@pytest.mark.parametrize("blanks", [b"", b" "], ids=["tight", "spaced"])
def test_an_unkept_answer_may_speak_of_data(blanks: bytes) -> None:
    response = {"id": "r", "store": True, "output": [{"text": "event: x\ndata: y"}], "ratio": 1.5}
    event = json.dumps({"type": "response.completed", "response": response}).encode()
    before = b'event: a\ndata: {"type":"a","text":"data: z"}\n\n'
    out = mark_unkept(before + b"event: response.completed\ndata:" + blanks + event + b"\n\n")
    assert out.startswith(before + b"event: response.completed\ndata: {")
    assert out.endswith(b"}\n\n")
    assert json.loads(out.rpartition(b"\ndata:")[2])["response"] == {**response, "store": False}
    assert json.loads(mark_unkept(json.dumps(response).encode())) == {**response, "store": False}


# clients that leave


async def test_a_client_that_leaves_ends_a_wait_for_work_and_the_work() -> None:
    client = MemoryClient()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    client.connection.watch()
    waiting = asyncio.create_task(client.connection.wait_for_work(work()))
    await asyncio.sleep(0)
    client.leave()
    with pytest.raises(ClientLeft):
        await waiting
    async with asyncio.timeout(30):
        await ended.wait()


async def test_work_gives_its_result_and_its_error() -> None:
    connection: ClientConnection = MemoryClient().connection

    async def give(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 7

    assert await connection.wait_for_work(give(None)) == 7
    with pytest.raises(BadRequest):
        await connection.wait_for_work(give(BadRequest()))


# paths


async def test_a_box_that_declares_nothing_is_not_asked_for_what_only_boxes_of_ours_answer() -> None:
    floor = Floor()
    link = floor.link("m")
    assert link.find_path("m", POOL_RESPONSES) is None


async def test_a_path_a_box_did_not_know_is_tried_again_after_a_while_and_when_the_box_changes() -> None:
    floor = Floor()
    link = floor.link("m")
    floor.dispatcher.note_unspoken(link, "m", MESSAGES)
    assert link.find_path("m", MESSAGES) == CHAT
    floor.registry.update_models(link, frozenset({"m", "n"}))
    assert link.find_path("m", MESSAGES) == MESSAGES
    floor.dispatcher.note_unspoken(link, "m", MESSAGES)
    link.unspoken["m", MESSAGES] = time.monotonic() - 1
    assert link.find_path("m", MESSAGES) == MESSAGES


async def test_a_peer_may_ask_a_box_for_what_only_boxes_of_ours_answer() -> None:
    floor = Floor()
    link = floor.link("m", m={POOL_RESPONSES})
    client = MemoryClient(headers={"x-muster-model": "m", "x-muster-deadline-ms": "30000"})
    serving = asyncio.create_task(
        serve_peer(
            dispatcher=floor.dispatcher,
            limits=Limits(),
            client=client.connection,
            link=link,
            surface=SURFACES[RESPONSES],
            lane=POOL_RESPONSES,
        )
    )
    await client.wait(lambda: link.streams or serving.done())
    assert link.streams[0].request.path == POOL_RESPONSES
    link.streams[0].answer(b"{}")
    await serving
    assert (client.status, client.body, link.active) == (200, b"{}", 0)
