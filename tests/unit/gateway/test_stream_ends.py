"""Streams that engines end early: the client is told once, in its dialect, and the request does not count as completed."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.exchange import read_stream
from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES
from gateway.errors import EngineRefused, RequestInterrupted
from gateway.request.attempt import Exchange
from gateway.request.dispatch import Dispatcher, Lease
from gateway.request.outcomes import Broken, Outcome, Retry, RetryReason, Served
from nodes.links import EndKind, LinkRegistry
from nodes.links.http import PeerReader
from nodes.links.keeper import LinkKeeper
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.clock import install_virtual_clock
from tests.fakes.examples import TIMES
from tests.fakes.links import FakeLink
from tests.fakes.pipeline import make_job
from tests.fakes.recorded_streams import (
    BARE_ERRORS,
    CHAT,
    COMPLETIONS,
    FAILURES,
    MESSAGES,
    POOL_RESPONSES,
    RESPONSES,
    STREAMS,
    RecordedStream,
    choice,
    chunk,
    list_errors,
)
from wire.contract import RequestState
from wire.limits import WIRE

SSE = {"content-type": "text/event-stream"}
_TURNS = [{"role": "user", "content": "x"}]
ASKED: dict[str, dict[str, object]] = {
    CHAT: {"messages": _TURNS},
    COMPLETIONS: {"prompt": "x"},
    MESSAGES: {"messages": _TURNS, "max_tokens": 9},
    RESPONSES: {"input": "x"},
}


class Passage(NamedTuple):
    """One way from an engine's stream to a client: what it asked for, and in which dialect the engine answers."""

    asked: str
    stream: RecordedStream

    @property
    def is_translated(self) -> bool:
        return self.asked != self.stream.path and self.stream.path != POOL_RESPONSES

    def __str__(self) -> str:
        way = f"{self.stream.path} as {self.asked}" if self.is_translated else self.stream.path
        return f"{way} {self.stream.name}"


def list_passages() -> Iterator[Passage]:
    """Yield every way that there is. Translations ask for one answer, so no stream with several comes through one."""
    for stream in STREAMS:
        yield Passage(RESPONSES if stream.path == POOL_RESPONSES else stream.path, stream)
        if stream.path == CHAT and stream.name != "several answers":
            yield from (Passage(asked, stream) for asked in (MESSAGES, RESPONSES))


PASSAGES = tuple(list_passages())
every_passage = pytest.mark.parametrize("passage", PASSAGES, ids=str)


class Serving:
    """The attempts of one gateway at one request; the engine and the clients are the test's."""

    def __init__(self, passage: Passage, *, for_peer: bool = False, measures: bool = False) -> None:
        registry = LinkRegistry()
        keeper = LinkKeeper(registry, gateway_id=uuid.UUID(int=9), connect_s=1.0)
        self.dispatcher = Dispatcher(registry, keeper, GatewayLimits())
        self.link = FakeLink()
        self.link.endpoints = {"m": frozenset(stream.path for stream in STREAMS)}
        registry.add(self.link)
        surface = SURFACES[passage.asked]
        asked = {"model": "m", "stream": True, **ASKED[passage.asked], **({"x_pool_options": {}} if measures else {})}
        request = surface.parse(json.dumps(asked).encode(), {"content-type": "application/json"})
        is_pools = passage.stream.path == POOL_RESPONSES
        self.request = msgspec.structs.replace(request, paths=(POOL_RESPONSES,)) if is_pools else request
        self.translation = surface.translate(request) if passage.is_translated and surface.translate is not None else None
        self.surface = None if for_peer else surface

    async def serve(self, *pieces: bytes, end: EndKind | None = EndKind.COMPLETE) -> tuple[Outcome, MemoryClient]:
        """Have the engine send these pieces and end its stream (None: it leaves it open).

        Return how the attempt ended and what the client got.
        """
        job = make_job(self.dispatcher, self.request)
        lease = self.dispatcher.acquire(job)
        assert isinstance(lease, Lease)
        client = MemoryClient()
        exchange = Exchange(
            job=job, lease=lease, client=client.connection, surface=self.surface, limits=GatewayLimits(), extra=[],
            translation=self.translation,
        )  # fmt: skip
        running = asyncio.create_task(exchange.run())
        await client.wait(lambda: self.link.streams)
        (stream,) = self.link.streams
        stream.answer(*pieces, headers=SSE, ends=False)
        if end is not None:
            stream.end(end)
        outcome = await running
        assert (self.link.active, self.link.streams) == (0, [])
        return outcome, client


@cache
def list_data(stream: RecordedStream) -> list[str]:
    """Return the data of a recorded stream's events."""
    return [event.data for event in read_stream(stream.data).events]


def check(passage: Passage, length: int, outcome: Outcome, client: MemoryClient) -> None:
    """Hold the end of a stream of which so many bytes came to what its client heard and to what is recorded of it."""
    if not length:
        assert isinstance(outcome, Retry)
        assert (outcome.reason, client.events) == (RetryReason.ENGINE, [])
        return
    said = read_stream(client.body)
    errors = list_errors(passage.asked, said)
    assert client.is_whole
    if length >= passage.stream.whole_at:
        assert (errors, outcome) == ([], Served(200, outcome.usage if isinstance(outcome, Served) else None))
        return
    assert isinstance(outcome, Broken)
    assert (outcome.told, outcome.error.state, type(outcome.error)) == (True, RequestState.INTERRUPTED, RequestInterrupted)
    assert errors == [said.events[-1].number]
    assert client.handle.closes
    if not passage.is_translated:
        whole = list_data(passage.stream)
        passed = [event.data for event in said.events[:-1] if length >= len(passage.stream.events[0]) - 2]
        assert passed == whole[: len(passed)]  # what passed are events of the engine, and no part of one


async def test_every_recorded_stream_cut_at_every_byte_is_whole_or_said_to_be_interrupted() -> None:
    """At every byte in the rings; in the gate at some, and at every one around the closing event."""
    for passage in PASSAGES:
        serving, data, whole_at = Serving(passage), passage.stream.data, passage.stream.whole_at
        step = max(1, 20 // TIMES) if TIMES < 10 else 1
        for length in sorted({*range(0, len(data) + 1, step), *range(max(0, whole_at - 3), min(whole_at + 4, len(data) + 1))}):
            check(passage, length, *await serving.serve(data[:length]))


@given(data=st.data(), passage=st.sampled_from(PASSAGES), measures=st.booleans())
def test_frames_of_any_size_make_no_difference(data: st.DataObject, passage: Passage, *, measures: bool) -> None:
    length = data.draw(st.integers(1, len(passage.stream.data)), label="length")
    cuts = sorted(data.draw(st.lists(st.integers(0, length)), label="cuts"))
    pieces = [passage.stream.data[start:end] for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
    outcome, client = asyncio.run(Serving(passage, measures=measures).serve(*pieces))
    if not measures:
        check(passage, length, outcome, client)
    assert isinstance(outcome, Served if length >= passage.stream.whole_at else Broken)


@every_passage
async def test_a_stream_that_another_gateway_passes_on_is_judged_where_its_client_is(passage: Passage) -> None:
    if passage.is_translated:
        return
    stream, peer, home = passage.stream, Serving(passage, for_peer=True), Serving(passage)
    for length in (1, len(stream.events[0]), stream.whole_at - 1, stream.whole_at, len(stream.data)):
        outcome, between = await peer.serve(stream.data[:length])
        assert isinstance(outcome, Served)
        reader = PeerReader()
        passed = reader.feed(between.body) + reader.finish()
        outcome, client = await home.serve(passed)
        assert isinstance(outcome, Served if length >= stream.whole_at else Broken if passed else Retry)
        assert len(list_errors(passage.asked, read_stream(client.body))) == isinstance(outcome, Broken)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
async def test_what_an_engine_said_of_its_failure_is_not_said_twice(path: str) -> None:
    passage = next(passage for passage in PASSAGES if (passage.asked, passage.stream.path) == (path, path))
    word = passage.stream.events[0]
    for said in FAILURES[CHAT if path == COMPLETIONS else path]:
        for frames in ([word, said], [word + said], [word + said + word], [word + said[:9], said[9:]]):
            outcome, client = await Serving(passage).serve(*frames)
            assert isinstance(outcome, Served)
            assert (outcome.has_failed, client.body) == (True, b"".join(frames))


@pytest.mark.parametrize("error", BARE_ERRORS)
async def test_a_native_response_never_ends_with_a_bare_error(error: bytes) -> None:
    passage = next(passage for passage in PASSAGES if passage.stream.path == RESPONSES)
    began, word = passage.stream.events[:2]
    outcome, client = await Serving(passage).serve(began, word + error)
    assert isinstance(outcome, Broken)
    assert isinstance(outcome.error, EngineRefused)
    last = json.loads(read_stream(client.body).events[-1].data)
    assert (last["type"], last["response"]["id"], last["response"]["error"]["message"]) == ("response.failed", "resp_1", "boom")
    assert outcome.error.state is RequestState.FAILED


@pytest.mark.parametrize(
    "frames",
    [
        (b": hello\n\n", 0, 1),
        (0, b": hello\n\n", 1),
        (b": hello\n\n",),
        (b'data: {"type":"response.output_text.delta","delta":"x"}\n\n',),
        (b": hello\n\n", b"event: response.created\nda"),
    ],
    ids=str,
)
async def test_a_native_response_fails_as_one_wherever_its_beginning_stands(frames: tuple[bytes | int, ...]) -> None:
    passage = next(passage for passage in PASSAGES if passage.stream.path == RESPONSES)
    pieces = [passage.stream.events[frame] if isinstance(frame, int) else frame for frame in frames]
    _, client = await Serving(passage).serve(*pieces)
    events = [json.loads(event.data) for event in read_stream(client.body).events]
    assert [event["type"] for event in events].count("response.failed") == 1
    assert events[-1]["type"] == "response.failed"
    if 1 in frames:
        assert (events[-1]["sequence_number"], events[-1]["response"]["id"]) == (2, "resp_1")


@pytest.mark.parametrize("cut", [9, 1], ids=["within a line", "behind a line"])
async def test_an_error_does_not_run_into_the_part_of_an_event_that_was_too_large_to_hold(cut: int) -> None:
    passage = PASSAGES[0]
    outcome, client = await Serving(passage).serve(*[chunk(choice("x" * 3 * WIRE.event_held_bytes))[:-cut]])
    assert isinstance(outcome, Broken)
    assert client.body.rpartition(b"\n\ndata: ")[2].startswith(b'{"error":')


@every_passage
@pytest.mark.parametrize("end", [EndKind.LINK_LOST, EndKind.ENGINE_FAILED, EndKind.TIMEOUT])
async def test_a_node_that_is_lost_behind_its_closing_event_has_answered(passage: Passage, end: EndKind) -> None:
    install_virtual_clock()  # both answers say when they were made
    serving, data = Serving(passage), passage.stream.data
    whole, client = await serving.serve(data)
    lost, other = await serving.serve(data, end=end)
    if passage.stream.name in {"spaced, without [DONE]", "several answers"}:
        assert isinstance(lost, Broken)  # its client waits for a closing event, so it is told
        return
    assert isinstance(whole, Served)
    assert isinstance(lost, Served)
    assert (lost.status, lost.has_failed) == (200, False)
    assert other.is_whole
    assert list_errors(passage.asked, read_stream(other.body)) == []
    assert read_stream(other.body).events[-1] == read_stream(client.body).events[-1]
    if b'"completion_tokens"' in data:
        assert lost.usage == whole.usage is not None


async def test_an_engine_that_lingers_behind_its_closing_event_keeps_no_client_waiting() -> None:
    passage = PASSAGES[0]
    serving = Serving(passage)
    outcome, client = await serving.serve(passage.stream.data, end=None)
    assert isinstance(outcome, Served)
    assert client.body == passage.stream.data
