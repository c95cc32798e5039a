"""The life of a request from its bytes to its record, over nodes played by the test; bad nodes beside good ones."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from core.limits import GatewayLimits
from gateway import metrics
from gateway.canary import Canaries
from gateway.dialects.chat import Translation
from gateway.dialects.surface import SURFACES
from gateway.errors import ShuttingDown
from gateway.values import InferenceRequest
from nodes.links import EndKind
from nodes.links.ejections import Fault
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import (
    ANSWER,
    CHAT,
    MESSAGES,
    REPLY,
    RESPONSES,
    SSE,
    STREAM,
    Gateway,
    Make,
    Request,
    Rows,
    allow_keeping,
    chunk,
    end_waits,
    is_waited_for,
    last_data,
)
from tests.fakes.waiting import eventually, turns


@pytest.mark.parametrize("streams", [True, False])
async def test_the_last_bytes_wait_until_the_records_end_is_sent_and_never_long(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    link = gateway.link(slots=2)
    first, second = requests = gateway.ask(stream=streams), gateway.ask(stream=streams)
    await first.client.wait(lambda: len(link.streams) == 2)

    def list_states() -> set[object]:
        return {row[0] for row in gateway.rows.execute("SELECT state FROM gateway_requestrecord").fetchall()}

    await eventually(lambda: list_states() == {"running"})
    with psycopg.connect(gateway.rows.info.dsn, password=gateway.rows.info.password) as other:
        other.execute("SELECT 1 FROM gateway_requestrecord FOR UPDATE")
        answered_at = 0.0
        for request, stream in zip(requests, list(link.streams), strict=True):
            answered_at = time.monotonic()
            stream.answer(b"data: [DONE]\n\n" if streams else ANSWER, headers=SSE if streams else None)
            if request is first:
                await request.done()  # sent is enough: that the row is locked holds nobody up
        await second.done()  # it could not be sent meanwhile, and a slow database holds no answer for long
        assert time.monotonic() - answered_at >= 0.2
        assert first.client.is_whole
        assert second.client.is_whole
        assert list_states() == {"running"}
    await eventually(lambda: list_states() == {"completed"})


@pytest.mark.parametrize("streams", [False, True])
async def test_what_full_nodes_refuse_goes_to_another_node_then_to_a_fallback_then_back_to_the_caller(
    make_gateway: Make, *, streams: bool
) -> None:
    gateway = make_gateway(models={"m": ("other",), "other": ()})
    first, second, fallback = gateway.link("m"), gateway.link("m"), gateway.link("other")
    request = gateway.ask(stream=streams)
    (await request.on(first)).end(EndKind.BUSY, retry_after_s=7.0)
    (await request.on(second)).end(EndKind.BUSY, retry_after_s=7.0)
    stream = await request.on(fallback)
    assert stream.request.model == "other"
    stream.end(EndKind.BUSY, retry_after_s=7.0)
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "NO_AVAILABLE_NODE")
    assert request.client.headers["retry-after"] == "7"
    assert await request.record("state", "attempts") == ("failed", 3)
    assert all(link.busy_until > time.monotonic() + 1 for link in (first, second, fallback))


async def test_a_task_that_is_cancelled_as_its_slot_is_granted_gives_it_back(make_gateway: Make) -> None:
    gateway = make_gateway()
    request = gateway.ask()
    await request.client.wait(lambda: gateway.dispatcher.depth)
    link = gateway.link()
    assert link.active == 1
    request.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request.task
    assert link.active == 0


REFUSALS: list[tuple[dict[str, object], int, str]] = [
    ({"model": "nobody"}, 404, "MODEL_NOT_ALLOWED"),
    ({"model": "a\x00b"}, 400, "BAD_REQUEST"),
    ({"messages": []}, 400, "BAD_REQUEST"),
    ({"max_tokens": 10**40}, 400, "MAX_TOKENS_TOO_LARGE"),
    ({"max_tokens": 2**31}, 400, "MAX_TOKENS_TOO_LARGE"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "PROMPT_TOO_LARGE"),
]


@pytest.mark.parametrize(("fields", "status", "code"), REFUSALS, ids=lambda value: str(value)[:20])
async def test_a_refusal_is_said_and_recorded_and_harms_nobody(
    make_gateway: Make, fields: dict[str, Any], status: int, code: str
) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(**fields)
    await request.done()
    assert (request.client.status, request.error["code"]) == (status, code)
    assert await request.record("state", "status_code", "error_code") == ("rejected", status, code)
    other = gateway.ask()
    await other.served(link, ANSWER)
    assert await other.record("state") == ("completed",)
    assert gateway.records.is_healthy


Story = Callable[[Gateway], Awaitable[None]]
BODY_BYTES = 1_000_000
PIECE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


async def begin(gateway: Gateway) -> tuple[Request, FakeStream]:
    request = gateway.ask(stream=True, padding="x" * BODY_BYTES)
    return request, await request.on(gateway.link())


async def leaves_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.answer(PIECE, headers=SSE, ends=False)
    request.client.leave()
    await request.done()


async def loses_its_box_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.answer(PIECE, headers=SSE, ends=False)
    stream.end(EndKind.LINK_LOST)
    await request.done()


async def gets_a_translated_answer_that_breaks(gateway: Gateway) -> None:
    request = gateway.ask(surface=MESSAGES, max_tokens=5, stream=True, padding="x" * BODY_BYTES)
    await request.served(gateway.link(paths={"/v1/chat/completions"}), PIECE, b"data: nonsense\n\n", headers=SSE)


STORIES: list[Story] = [leaves_in_the_middle, loses_its_box_in_the_middle, gets_a_translated_answer_that_breaks]


def list_rings() -> list[str]:
    """Collect, and name the kinds of objects by which large texts or bytes were held that nobody could reach any more."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        holders = [
            type(holder).__name__
            for holder in gc.garbage
            if any(isinstance(one, bytes | str) and len(one) >= BODY_BYTES for one in gc.get_referents(holder))
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return holders


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_nothing_of_a_request_is_left_when_it(make_gateway: Make, story: Story) -> None:
    gateway = make_gateway()
    gc.collect()
    gc.disable()
    try:
        await story(gateway)
        await turns(1)
        assert list_rings() == []
    finally:
        gc.enable()


Behaviour = Callable[[FakeStream], None]
SPREAD = GatewayLimits(score_affinity=0.0)
"""One caller's requests do not stay with one node."""
GOOD: Behaviour = lambda stream: stream.answer(ANSWER)  # noqa: E731 - beside its like


def lie_about_capacity(stream: FakeStream) -> None:
    stream.end(EndKind.ENGINE_FAILED, retryable=True)


async def send(gateway: Gateway, behaviours: dict[FakeLink, Behaviour], *, streams: bool = False) -> tuple[int, FakeLink]:
    """Send one request, and have the nodes that get it answer it; return its status and who got it first."""
    request = gateway.ask(stream=streams)
    first: FakeLink | None = None
    while not request.task.done():
        await request.client.wait(lambda: request.task.done() or any(link.streams for link in behaviours))
        for link, behave in behaviours.items():
            if link.streams:
                first = first or link
                behave(link.streams[0])
    await request.done()
    assert first is not None
    return request.client.status, first


@pytest.mark.parametrize(
    ("behave", "streams"),
    [
        (lambda stream: stream.answer(b'{"error":{"message":"oom"}}', status=500), False),
        (lambda stream: stream.answer(PIECE, headers=SSE), True),
        (lie_about_capacity, False),
    ],
    ids=["errors", "cut streams", "thousand slots that all fail"],
)
async def test_a_node_that_fails_loses_its_share_and_callers_get_answers(
    make_gateway: Make, behave: Behaviour, *, streams: bool
) -> None:
    gateway = make_gateway(limits=SPREAD)
    good, bad = gateway.link(slots=4), gateway.link(slots=1000)
    whole: Behaviour = lambda stream: stream.answer(PIECE, b"data: [DONE]\n\n", headers=SSE)  # noqa: E731  # as GOOD
    behaviours = {good: whole if streams else GOOD, bad: behave}
    ends = [await send(gateway, behaviours, streams=streams) for _ in range(34)][14:]
    assert sum(first is bad for _status, first in ends) <= 3, "one probe after ten seconds, and ever fewer"
    assert {status for status, first in ends if first is good} == {200}
    assert [ejection.node_id for ejection in gateway.registry.ejections] == [bad.node_id]


async def test_one_request_that_kills_every_node_it_meets_ejects_none(make_gateway: Make) -> None:
    gateway = make_gateway(limits=SPREAD)
    links = [gateway.link(slots=4) for _ in range(4)]
    good: dict[FakeLink, Behaviour] = dict.fromkeys(links, GOOD)
    poison: dict[FakeLink, Behaviour] = dict.fromkeys(links, lie_about_capacity)
    for behaviours, count in ((good, 12), (poison, 6)):
        for _ in range(count):
            await send(gateway, behaviours)
    assert list(gateway.registry.ejections) == []
    ends = [await send(gateway, good) for _ in range(12)]
    assert ({status for status, _ in ends}, {first for _, first in ends}) == ({200}, set(links))


@pytest.mark.parametrize(("held_s", "answers"), [(20.0, "m"), (40.0, "small")])
async def test_a_wait_over_half_a_minute_goes_to_the_fallback_and_the_answer_says_so(
    make_gateway: Make, held_s: float, answers: str
) -> None:
    gateway = make_gateway(models={"m": ("small",), "small": ()}, limits=GatewayLimits(queue_s=600.0))
    links = {"m": gateway.link("m"), "small": gateway.link("small")}
    gateway.dispatcher.note_held("m", held_s)
    gateway.dispatcher.note_held("small", 1.0)
    first = gateway.ask()
    running = await first.on(links["m"])
    busy = gateway.ask(model="small")
    beside = await busy.on(links["small"])
    second = gateway.ask()
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    assert gateway.dispatcher.depths() == {answers: 1}
    for stream in (running, beside):
        stream.answer(ANSWER)
    await second.served(links[answers], ANSWER)
    assert second.client.headers["x-muster-model"] == answers
    assert await second.record("model", "asked_model") == (answers, "" if answers == "m" else "m")
    for request in (first, busy):
        await request.done()


async def test_a_record_says_why_the_request_went_to_its_node_where_there_was_a_choice(make_gateway: Make) -> None:
    gateway = make_gateway()
    alone = gateway.link(slots=4)
    request = gateway.ask()
    await request.served(alone, ANSWER)
    assert await request.record("decision") == (None,)
    links = dict.fromkeys([alone, gateway.link(slots=4)], GOOD)
    request = gateway.ask()
    await request.client.wait(lambda: any(link.streams for link in links))
    chosen = next(link for link in links if link.streams)
    await request.served(chosen, ANSWER)
    ((decision, name),) = [await request.record("decision", "node_name")]
    assert isinstance(decision, dict)
    assert decision["candidates"][decision.get("chosen", 0)][0] == name == chosen.node_name
    assert {one[0] for one in decision["candidates"]} == {link.node_name for link in links}


class Asker:
    """A gateway that asks the nodes of ``m`` what 17 times 3 is."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        entry = gateway.catalogue.models["m"]
        gateway.catalogue.apply_models([replace(entry, canary_question="What is 17 times 3?", canary_answer="51")])
        self.canaries = Canaries(
            gateway_id=gateway.gateway_id, registry=gateway.registry, dispatcher=gateway.dispatcher,
            catalogue=gateway.catalogue, records=gateway.records, interval_s=300.0,
        )  # fmt: skip

    async def ask(self, link: FakeLink) -> FakeStream:
        """Ask one node and return the question as it has it; ``told`` is done when its answer was judged."""
        self.told = asyncio.create_task(self.canaries.ask(link, self.gateway.catalogue.models["m"]))
        await eventually(lambda: link.streams)
        return link.streams[0]

    async def hear(self, link: FakeLink, text: str) -> None:
        (await self.ask(link)).answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode())
        await self.told

    @property
    def faults(self) -> list[tuple[object, Fault]]:
        return [(one.node_id, one.fault) for one in self.gateway.registry.ejections]


async def test_a_lying_node_gets_no_requests_until_it_answers_rightly_and_the_honest_one_gets_them(make_gateway: Make) -> None:
    gateway = make_gateway(limits=SPREAD)
    honest, liar = gateway.link(slots=4), gateway.link(slots=4)
    asker, both = Asker(gateway), {honest: GOOD, liar: GOOD}
    await asker.hear(honest, "17 times 3 is 51.")
    await asker.hear(liar, "I am happy to help!")
    assert asker.faults == [(liar.node_id, Fault.WRONG)]
    assert {(await send(gateway, both))[1] for _ in range(10)} == {honest}
    await asker.hear(liar, "It is 51")
    assert {(await send(gateway, both))[1] for _ in range(10)} == {honest, liar}


@pytest.mark.parametrize("end", ["refused", EndKind.ENGINE_FAILED, EndKind.BUSY, "lost"])
async def test_a_node_that_is_down_or_refuses_is_no_liar(make_gateway: Make, end: EndKind | str) -> None:
    gateway = make_gateway()
    gateway.link()
    link, asker = gateway.link(), Asker(gateway)
    stream = await asker.ask(link)
    if isinstance(end, EndKind):
        stream.end(end)
    elif end == "lost":
        gateway.registry.remove(link)
    else:
        stream.answer(b'{"error":{"message":"no"}}', status=500)
    await asker.told
    assert (asker.faults, link.active) == ([], 0)


async def test_a_question_looks_like_any_request_and_is_in_nobodys_books(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    usual = gateway.ask()
    expected = (await usual.on(link)).request
    link.streams[0].answer(b'{"choices":[]}')
    await usual.done()
    asker = Asker(gateway)
    stream = await asker.ask(link)
    said = stream.request
    assert (said.path, said.headers, said.priority) == (expected.path, expected.headers, expected.priority)
    assert (bool(said.tenant), said.tenant != expected.tenant, said.request_id[:4]) == (True, True, "req_")
    body = json.loads(said.body)
    assert (body["temperature"], body["max_tokens"]) == (0, 64)
    stream.answer(b'{"choices":[{"message":{"content":"51"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
    await asker.told
    written = "SELECT tenant, state, prompt_tokens FROM gateway_requestrecord WHERE key_name = 'canary'"
    assert await eventually(lambda: gateway.rows.execute(written).fetchall()) == [("", "completed", 7)]


async def test_only_a_node_with_a_free_slot_whose_time_has_come_is_asked(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, full = gateway.link(slots=2), gateway.link(slots=1)
    asker, now = Asker(gateway), time.monotonic()
    assert len(asker.canaries.list_due(now)) == 0, "the first question comes at random"
    full.external_load = 1
    assert [due for due, _entry in asker.canaries.list_due(now + 300)] == [link]
    await asker.hear(link, "51")
    assert asker.canaries.list_due(now + 140) == []
    gateway.catalogue.apply_models([replace(gateway.catalogue.models["m"], canary_question="")])
    assert asker.canaries.list_due(now + 1e6) == [], "off by default"


@pytest.mark.parametrize("kind", [EndKind.ENGINE_FAILED, EndKind.RECLAIMED], ids=str)
async def test_a_fallback_answers_after_the_models_only_box_did_not(make_gateway: Make, kind: EndKind) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    link, spare = gateway.link(), gateway.link("spare")
    request = gateway.ask()
    stream = await request.on(link)
    link.policy.reclaimed = kind is EndKind.RECLAIMED
    stream.end(kind, retryable=True)
    await request.served(spare, REPLY)
    assert link.streams == []
    assert await request.record("model", "asked_model", "attempts", "state") == ("spare", "m", 2, "completed")


async def test_a_fallback_answers_while_the_models_queue_is_full_or_its_provider_is_off(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()}, max_queue=0)
    link, spare = gateway.link(), gateway.link("spare")
    first = gateway.ask()
    stream = await first.on(link)
    second = gateway.ask()
    await second.served(spare, REPLY)
    assert await second.record("model", "asked_model", "state") == ("spare", "m", "completed")
    gateway.registry.remove(spare)
    for message, is_off in (("Service temporarily at capacity, please retry", False), ("Provider is currently disabled", True)):
        gateway.pipeline.dispatcher._keeper.disabled_models = frozenset({"m"} if is_off else ())
        refused = gateway.ask()
        await refused.done()
        assert (refused.client.status, refused.error["message"]) == (503, message)
        assert await refused.record("state", "model") == ("rejected", "m")
    stream.answer(REPLY)
    await first.done()


async def finish(request: Request, stream: FakeStream, *, streams: bool) -> Any:
    """Have the engine answer, and return the response that the client gets."""
    stream.answer(*(STREAM if streams else [REPLY]), headers=SSE if streams else None)
    await request.done()
    said = last_data(request.client.body)
    assert request.client.is_whole
    assert await request.record("state") == ("completed",)
    return said["response"] if streams else said


def nest(levels: int) -> Any:
    nested: Any = "deep"
    for _ in range(levels):
        nested = {"a": [nested]}
    return nested


DEEP = {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "mcp", "more": nest(220)}]}


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({"input": "hi", "x_pool_options": {}}, True),
        ({"input": "hi", "instructions": "data: x"}, False),  # its tenant is gone by then
        ({"input": [{"role": "user", "content": "hi"}, DEEP]}, False),
    ],
    ids=["kept", "gone", "nested"],
)
async def test_an_answer_is_whole_and_kept_or_says_that_it_is_not(
    make_gateway: Make, fields: dict[str, Any], *, is_kept: bool, streams: bool
) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, stream=streams, **fields)
    stream = await request.on(link)
    if "instructions" in fields:
        gateway.rows.execute("DELETE FROM gateway_tenant WHERE name = 't'")
    response = await finish(request, stream, streams=streams)
    assert (response["store"], response["status"], "x_pool_meta" in response) == (is_kept, "completed", is_kept)
    kept = gateway.rows.execute("SELECT id FROM gateway_storedresponse").fetchall()
    assert kept == ([(response["id"],)] if is_kept else [])


UNSAYABLE = [{"role": "user", "content": [{"type": "holograph", "data": "x"}]}]


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("trouble", ["whole", "empty", "large", "unknown path", "deadline", "refused"])
async def test_after_signs_of_life_every_trouble_is_one_event_and_an_end(make_gateway: Make, path: str, trouble: str) -> None:
    gateway = make_gateway(limits=GatewayLimits(stream_ping_s=0.01))
    link = gateway.link()
    request = gateway.ask(surface=SURFACES[path], stream=True, max_tokens=5, input="hi")
    stream = await request.on(link)
    await request.client.wait(lambda: b": ping" in request.client.body)
    if trouble == "whole":
        stream.answer(REPLY)
    elif trouble == "refused":
        stream.answer(b'{"error":{"message":"no memory left"}}', status=503)
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
    assert (b"no memory left" in events[-1]) is (trouble == "refused")
    assert (await request.record("state"))[0] == "failed"


DOCUMENT = [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]
"""What no chat completion can carry."""


async def test_a_request_that_was_tried_more_often_than_a_column_can_count_is_final_all_the_same(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    stream = await request.on(link)
    stream.sink._job.attempts = 40_000  # type: ignore[attr-defined]  # as after minutes of nodes that say "busy" at once
    stream.end(EndKind.BUSY)
    await request.served(link, REPLY)
    assert await request.record("state", "attempts") == ("completed", 32_767)


async def test_nothing_is_begun_for_a_request_that_was_being_accepted_as_the_gateway_stopped(
    make_gateway: Make, rows: Rows
) -> None:
    """The database was away a moment ago, so no node is asked before the row is there."""
    gateway = make_gateway()
    link = gateway.link()
    gateway.records.is_healthy = False
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_requestrecord")
        request = gateway.ask()
        await request.client.wait(lambda: is_waited_for(rows))
        gateway.pipeline.is_stopping = True
        gateway.dispatcher.fail_waiting(ShuttingDown(retry_after_s=2))
        blocker.rollback()
    await request.client.wait(lambda: link.streams or request.task.done())
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "REQUEST_INTERRUPTED")
    assert request.client.handle.closes, "asked again on its connection, it would be refused again"
    assert await request.record("state", "attempts") == ("interrupted", 0)


async def test_no_byte_reaches_a_client_before_its_request_is_durable(make_gateway: Make, rows: Rows) -> None:
    gateway = make_gateway()
    link = gateway.link()
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_requestrecord")
        request = gateway.ask(stream=True)
        stream = await request.on(link)
        stream.answer(*STREAM, headers=SSE, ends=False)
        await request.client.wait(lambda: is_waited_for(rows))
        assert not request.client.events
        stream.end(EndKind.COMPLETE)
        await turns()
        assert not request.client.events
        assert not request.task.done()
        blocker.rollback()
        await request.done()
    assert (request.client.status, request.client.body) == (200, b"".join(STREAM))
    assert await request.record("state", "completion_tokens") == ("completed", 4)


@pytest.mark.parametrize("streams", [True, False])
async def test_a_node_stops_what_could_not_be_made_durable_and_its_client_gets_nothing_of_it(
    make_gateway: Make, rows: Rows, *, streams: bool
) -> None:
    before = metrics.COUNTERS.in_flight
    gateway = make_gateway(accept_s=0.2)
    link = gateway.link()
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_requestrecord")
        request = gateway.ask(stream=streams)
        stream = await request.on(link)
        stream.answer(*STREAM[:2], headers=SSE if streams else None, ends=False)
        await request.done()
        blocker.rollback()
    assert (stream.cancelled, link.active, metrics.COUNTERS.in_flight) == ("client_disconnect", 0, before)
    assert (request.client.status, request.error["code"], request.error["retryable"]) == (503, "NO_AVAILABLE_NODE", True)
    assert "could not be recorded" in request.error["message"]
    assert await request.record("state", "error_code") == ("rejected", "NO_AVAILABLE_NODE")


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_the_row_of_a_client_that_leaves_while_it_is_written_is_closed(
    make_gateway: Make, rows: Rows, *, is_healthy: bool
) -> None:
    before = metrics.COUNTERS.in_flight
    gateway = make_gateway()
    link = gateway.link()
    gateway.records.is_healthy = is_healthy  # else no node is asked before the row is there
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_requestrecord")
        request = gateway.ask()
        await request.client.wait(lambda: is_waited_for(rows))
        assert len(link.streams) == is_healthy
        request.client.leave()
        await request.done()
        blocker.rollback()
    assert (request.client.events, link.active, metrics.COUNTERS.in_flight) == ([], 0, before)
    states = "SELECT state FROM gateway_requestrecord"
    assert await eventually(lambda: rows.execute(f"{states} WHERE finished_at IS NOT NULL").fetchall()) == [("cancelled",)]


async def test_a_bug_of_ours_is_a_failure_and_no_interruption(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()

    def translate(_request: InferenceRequest) -> Translation:
        raise RuntimeError("a bug")

    request = gateway.ask(surface=replace(MESSAGES, translate=translate), max_tokens=5)
    with pytest.raises(RuntimeError):
        await request.served(link, b"Not Found", status=404)
    row = gateway.rows.execute("SELECT id FROM gateway_requestrecord").fetchone()
    assert row is not None
    final = await request.gateway_record(uuid.UUID(str(row[0])), "state", "error_code", "status_code")
    assert final == ("failed", "INTERNAL_ERROR", 500)


def find_chats(link: FakeLink) -> list[FakeStream]:
    return [one for one in link.streams if one.request.path == CHAT]


async def test_requests_that_find_a_path_unknown_one_after_the_other_are_all_asked_again_in_chat(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(slots=2)
    requests = [gateway.ask(surface=MESSAGES, max_tokens=5) for _ in range(2)]
    await requests[0].client.wait(lambda: len(link.streams) == 2)
    for stream, request in zip(list(link.streams), requests, strict=True):
        assert stream.request.path == "/v1/messages"
        stream.answer(b"Not Found", status=404)
        await request.client.wait(lambda: find_chats(link) or request.task.done())  # noqa: B023  # awaited within the turn
        for again in find_chats(link):
            again.answer(REPLY)
        await request.done()
        assert request.client.status == 200
        assert await request.record("state", "attempts") == ("completed", 2)


@pytest.mark.parametrize("ending", ["left", "lost", "failed"])
async def test_a_stream_that_ends_in_the_middle_is_counted_as_far_as_it_came(make_gateway: Make, ending: str) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=MESSAGES, max_tokens=5, stream=True)
    stream = await request.on(link)
    stream.answer(*(chunk({"content": word}) for word in "abcde"), headers=SSE, ends=False)
    await request.client.wait(lambda: request.client.events)
    if ending == "left":
        request.client.leave()
    elif ending == "lost":
        stream.end(EndKind.LINK_LOST)
    else:
        stream.sink.on_data(b'data: {"error":{"message":"oom"}}\n\n')
    await request.done()
    state, prompt, completion, is_estimated = await request.record(
        "state", "prompt_tokens", "completion_tokens", "tokens_estimated"
    )
    assert state == {"left": "cancelled", "lost": "interrupted", "failed": "failed"}[ending]
    assert (prompt, completion, is_estimated) == (0, 4, True)


async def test_what_was_counted_is_written_down_for_a_client_that_leaves_before_the_last_bytes(
    make_gateway: Make, rows: Rows
) -> None:
    gateway, before = make_gateway(), metrics.COUNTERS.in_flight
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", stream=True)
    stream = await request.on(link)
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_storedresponse")
        stream.answer(*STREAM, headers=SSE)
        await request.client.wait(lambda: is_waited_for(rows))
        request.client.leave()
        await request.done()
        blocker.rollback()
    row = await request.record("state", "status_code", "prompt_tokens", "completion_tokens", "tokens_estimated")
    assert row == ("cancelled", 499, 3, 4, False)
    assert (request.client.is_whole, metrics.COUNTERS.in_flight) == (False, before)


async def test_text_of_earlier_turns_counts(make_gateway: Make) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="a" * 900)
    await request.served(link, REPLY)
    kept_id = json.loads(request.client.body)["id"]
    following = gateway.ask(surface=RESPONSES, input="a" * 200, previous_response_id=kept_id)
    await following.done()
    assert (following.client.status, following.error["code"]) == (400, "PROMPT_TOO_LARGE")


async def occupy(gateway: Gateway) -> Any:
    """Have the one node of ``m``, which speaks Messages itself, taken for an hour."""
    link = gateway.link(paths={"/v1/messages"})
    first = gateway.ask(surface=MESSAGES, max_tokens=5)
    stream = await first.on(link)
    gateway.dispatcher.note_held("m", 3600.0)
    return first, stream


async def test_a_fallback_that_cannot_be_told_the_request_does_not_cost_it(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    first, stream = await occupy(gateway)
    gateway.link("spare", paths={CHAT})
    second = gateway.ask(surface=MESSAGES, max_tokens=5, messages=DOCUMENT)
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    stream.answer(REPLY)
    await first.done()
    (await second.on(stream.link)).answer(REPLY)
    await second.done()
    assert second.client.status == 200
    assert await second.record("model", "asked_model", "attempts") == ("m", "", 1)


@pytest.fixture
async def gateway(rows: Rows) -> AsyncIterator[Gateway]:
    """A gateway whose queue is short and whose patience is too."""
    made = Gateway(rows, max_queue=1, limits=GatewayLimits(queue_s=0.2, no_node_wait_s=0.1, request_s=30.0))
    yield made
    await made.records.stop()


async def test_the_record_keeps_which_nodes_failed_before_another_one_answered(make_gateway: Make) -> None:
    gateway = make_gateway()
    first = gateway.link()
    request = gateway.ask()
    stream = await request.on(first)
    second = gateway.link()
    stream.end(EndKind.LINK_LOST)
    await request.served(second, REPLY)
    state, node_id, lost = await request.record("state", "node_id", "lost_attempts")
    assert (state, node_id) == ("completed", second.node_id)
    assert re.fullmatch(rf"{first.node_id.hex} m\t\d+\tlost\n", str(lost))
    plain = gateway.ask()
    (await plain.on(second)).end(EndKind.BUSY)
    await plain.served(first, REPLY)
    assert await plain.record("state", "lost_attempts") == ("completed", ""), "a node that is busy has not failed"
