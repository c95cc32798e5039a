"""Nodes that are called over HTTP: on loopback servers that behave and misbehave; and which URLs may be called.

The URLs are a table of tricky ones, and a resolver that lies.
"""

from __future__ import annotations

import asyncio
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from nodes.addresses import parse_direct_url, parse_policy, parse_rule, resolve_direct_target
from nodes.errors import AddressRefused, AddressUnresolvable
from nodes.links.http import END_HEADER, HttpLink, HttpStream, HttpTarget
from nodes.links.port import EndKind, LinkEnd
from nodes.session import OpenRequest
from tests.fakes.closed_port import closed_port
from tests.fakes.direct_node import Answer, Visit, run_upstream
from tests.fakes.links import RequestSink, open_request
from tests.fakes.waiting import eventually, turns
from wire.bridge import TokenCounts

OK = b"HTTP/1.1 200 OK\r\n"
EARLY = b"HTTP/1.1 103 Early\r\nx: y\r\n\r\n"


def make_link(port: int, *, is_peer: bool = False, **headers: str) -> HttpLink:
    target = HttpTarget(scheme="http", host="localhost", address="127.0.0.1", port=port, base_path="/base", headers=headers)
    return HttpLink(
        node_id=uuid.UUID(int=1), node_name="n", models=frozenset({"m"}), max_concurrent=4, target=target, connect_s=30.0,
        is_peer=is_peer,
    )  # fmt: skip


def a_request(**changes: object) -> OpenRequest:
    given = {"attempt": 2, "body": b'{"a":1}', "headers": {"content-type": "application/json"}, "deadline_ms": 900}
    return open_request(**{**given, "priority": "high", **changes})


def always(*writes: bytes, close: bool = False) -> Answer:
    """Answer each request of a connection with the same bytes."""

    async def answer(visit: Visit) -> None:
        while True:
            await visit.read_request()
            for data in writes:
                await visit.write(data)
            if close:
                return

    return answer


async def ask(link: HttpLink, **changes: object) -> tuple[RequestSink, LinkEnd]:
    sink = RequestSink()
    link.open_stream(a_request(**changes), sink)
    return sink, await sink.ended()


async def fetch(port: int, *, is_peer: bool = False) -> tuple[RequestSink, HttpLink, LinkEnd]:
    link = make_link(port, is_peer=is_peer)
    sink, end = await ask(link)
    return sink, link, end


async def test_the_request_on_the_wire_carries_body_and_id_and_no_surprises() -> None:
    async with run_upstream(always(OK + b"content-length: 2\r\n\r\nok")) as upstream:
        await fetch(upstream.port)
        await fetch(upstream.port, is_peer=True)
        (request,), (of_peer,) = (visit.requests for visit in upstream.visits)
    head, body = request.split(b"\r\n\r\n")
    assert head.decode().split("\r\n") == [
        "POST /base/v1/chat/completions HTTP/1.1", f"host: localhost:{upstream.port}", "content-type: application/json",
        "x-tenant-id: t", "x-priority: high", "x-request-id: req_1", "content-length: 7",
    ]  # fmt: skip
    assert body == b'{"a":1}'
    lines = of_peer.split(b"\r\n")
    assert lines[0] == b"POST /base/00000000000000000000000000000001/v1/chat/completions HTTP/1.1"
    told = (b"attempt: 2", b"deadline-ms: 900", b"tenant: t", b"priority: high", b"streaming: 1")
    assert {b"x-muster-" + word for word in told} <= set(lines)


async def test_a_node_is_told_tenant_and_priority_in_words_that_fit_a_header_and_gets_its_key_as_given_last() -> None:
    told = [
        ("t", "", [b"x-tenant-id: t", b"x-priority: normal"]),
        ("community x", "low", [b"x-tenant-id: community x", b"x-priority: low"]),
        ("café 100%", "low", [b"x-tenant-id: caf%C3%A9 100%25", b"x-priority: low"]),
        ("a\r\nx-priority: high", "low", [b"x-tenant-id: a%0D%0Ax-priority: high", b"x-priority: low"]),
        ("", "low", []),
    ]
    async with run_upstream(always(OK + b"content-length: 0\r\n\r\n")) as upstream:
        link = make_link(upstream.port, authorization="Bearer old")
        for tenant, priority, _ in told:
            await ask(link, tenant=tenant, priority=priority)
        link.take_headers(replace(link.target, headers={"authorization": "Bearer new"}))
        for end in "ab":
            await ask(link, tenant="é" * 79 + end)
        requests = [request.split(b"\r\n") for request in upstream.visits[0].requests]
    keys = [[line for line in lines if line.startswith(b"authorization")] for lines in requests]
    assert keys == [[b"authorization: Bearer old"]] * 5 + [[b"authorization: Bearer new"]] * 2
    said = [[line for line in lines if line.startswith((b"x-tenant-id", b"x-priority"))] for lines in requests]
    assert said[:-2] == [lines for _, _, lines in told]
    (first, _), (second, _) = said[-2:]
    assert (first != second, len(first), len(second)) == (True, 141, 141), "long names stay different and fit"


@pytest.mark.parametrize(
    ("writes", "close", "reused"),
    [
        ([OK + b"content-length: 5\r\n\r\nhe", b"llo"], False, True),
        ([OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n", b"3\r\nllo\r\n", b"0\r\n\r\n"], False, True),
        ([OK + b"\r\nhe", b"llo"], True, False),
        ([OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello"], True, False),
        ([b"HTTP/1.0 200 OK\r\n\r\nhello"], True, False),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", EARLY + OK + b"content-length: 5\r\n\r\nhello"], False, True),
    ],
    ids=["sized", "chunked", "until close", "connection close", "http 1.0", "interim responses"],
)
async def test_an_answer_is_read_to_its_end(writes: list[bytes], *, close: bool, reused: bool) -> None:
    async with run_upstream(always(*writes, close=close)) as upstream:
        sink, link, end = await fetch(upstream.port)
        assert end == LinkEnd(kind=EndKind.COMPLETE)
        assert sink.body == b"hello"
        ((status, headers),) = sink.heads
        assert status == 200
        assert not headers.keys() & {"connection", "transfer-encoding", "x"}
        assert (await ask(link))[1].kind is EndKind.COMPLETE
        assert len(upstream.visits) == (1 if reused else 2)
        link.close("done")


async def test_an_answer_without_a_body_ends_at_its_head_whose_headers_are_joined_and_lowered() -> None:
    for status in (204, 304):
        async with run_upstream(always(b"HTTP/1.1 %d X\r\nX-A: 1\r\nx-a: 2\r\n\r\n" % status)) as upstream:
            sink, _, end = await fetch(upstream.port)
        ((found, headers),) = sink.heads
        assert (found, headers["x-a"], sink.body, end.kind) == (status, "1, 2", b"", EndKind.COMPLETE)


BROKEN = {
    "garbage": [b"SSH-2.0-OpenSSH\r\n\r\n"],
    "both framings": [OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n"],
    "switching protocols": [b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nzz"],
    "huge header": [OK + b"x: " + b"a" * 70_000 + b"\r\n\r\n"],
    "endless headers": [OK + b"x: " + b"a" * 200_000],
    "silence": [b""],
    "half a head": [OK + b"content-le"],
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_head_or_no_connection_is_the_engines_failure_and_retryable(name: str) -> None:
    async with run_upstream(always(*BROKEN[name], close=True)) as upstream:
        sink, _, end = await fetch(upstream.port)
    assert (end.kind, end.retryable, sink.heads) == (EndKind.ENGINE_FAILED, True, [])
    assert len(upstream.visits) == 1, "a new connection that dies is not tried again"
    with closed_port() as port:
        _, _, end = await fetch(port)
    assert (end.kind, end.retryable, "cannot connect" in end.message) == (EndKind.ENGINE_FAILED, True, True)


@pytest.mark.parametrize(
    "writes",
    [
        [OK + b"content-length: 50\r\n\r\nhe"],
        [OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n"],
        [OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\nzz\r\n"],
    ],
    ids=["sized", "chunked", "malformed chunk"],
)
async def test_an_answer_that_breaks_off_is_not_complete_and_not_retryable(writes: list[bytes]) -> None:
    async with run_upstream(always(*writes, close=True)) as upstream:
        sink, _, end = await fetch(upstream.port)
        _, _, of_peer = await fetch(upstream.port, is_peer=True)
    assert (end.kind, end.retryable, sink.body) == (EndKind.ENGINE_FAILED, False, b"he")
    assert of_peer.kind is EndKind.LINK_LOST


async def test_a_kept_connection_that_turns_out_dead_is_tried_once_on_a_new_one() -> None:
    async def answer(visit: Visit) -> None:
        await visit.read_request()
        await visit.write(OK + b"content-length: 2\r\n\r\nok")
        if len(visits) == 1:
            await visit.read_request()  # swallows the second request, and dies

    async with run_upstream(answer) as upstream:
        visits = upstream.visits
        _, link, first = await fetch(upstream.port)
        _, end = await ask(link)
        link.close("done")
    assert first.kind is end.kind is EndKind.COMPLETE
    assert len(visits) == 2
    assert [len(visit.requests) for visit in visits] == [2, 1]


async def test_a_kept_connection_that_talks_out_of_turn_is_not_used_again() -> None:
    async def answer(visit: Visit) -> None:
        await visit.read_request()
        await visit.write(OK + b"content-length: 2\r\n\r\nok")
        await spoke.wait()
        await visit.write(OK + b"content-length: 6\r\n\r\nforged")
        await visit.wait_closed()
        closed.set()

    spoke, closed = asyncio.Event(), asyncio.Event()
    async with run_upstream(answer) as upstream:
        _, link, _ = await fetch(upstream.port)
        spoke.set()
        async with asyncio.timeout(30):
            await closed.wait()
        assert (await ask(link))[0].body == b"ok"
        assert len(upstream.visits) == 2
        link.close("done")


async def test_reading_stops_at_the_window_and_goes_on_with_credit() -> None:
    total = 8 * 1024 * 1024
    sent: list[int] = []

    async def answer(visit: Visit) -> None:
        await visit.read_request()
        await visit.write(OK + b"content-length: %d\r\n\r\n" % total)
        for _ in range(total // 65536):
            await visit.write(b"x" * 65536)
            sent.append(65536)

    async with run_upstream(answer) as upstream:
        link, sink = make_link(upstream.port), RequestSink()
        stream = link.open_stream(a_request(), sink)
        await sink.wait(lambda: len(sink.body) >= link.window_bytes)
        held = len(sink.body)
        await turns(50)
        assert len(sink.body) == held < link.window_bytes + 512 * 1024
        while not sink.ends:
            seen = len(sink.body)
            stream.grant(256 * 1024)
            await sink.wait(lambda seen=seen: len(sink.body) > seen or sink.ends)  # type: ignore[misc]
        assert len(sink.body) == total == sum(sent)
        link.close("done")


async def test_an_answer_that_ends_while_its_reader_is_paused_leaves_a_usable_connection() -> None:
    answer = OK + b"content-length: %d\r\n\r\n" % (64 * 1024) + bytes(64 * 1024)
    async with run_upstream(always(answer)) as upstream:
        link = make_link(upstream.port)
        link.window_bytes = 1  # every read exhausts it, the last one too
        for _ in range(3):
            sink = RequestSink()
            stream = link.open_stream(a_request(), sink)
            while not sink.ends:
                seen = len(sink.body)
                stream.grant(1)
                await sink.wait(lambda seen=seen, sink=sink: len(sink.body) > seen or sink.ends)  # type: ignore[misc]
                stream.grant(len(sink.body) - seen)
            assert len(sink.body) == 64 * 1024
        link.close("done")


@pytest.mark.parametrize("moment", ["dialling", "waiting", "reading"])
async def test_cancel_closes_the_connection_and_silences_the_sink(moment: str) -> None:
    gone = asyncio.Event()

    async def answer(visit: Visit) -> None:
        await visit.read_request()
        if moment == "reading":
            await visit.write(OK + b"\r\nabc")
        await visit.wait_closed()
        gone.set()

    async with run_upstream(answer) as upstream:
        link, sink = make_link(upstream.port), RequestSink()
        stream = link.open_stream(a_request(), sink)
        if moment == "reading":
            await sink.wait(lambda: sink.parts)
        elif moment == "waiting":
            await eventually(lambda: upstream.visits and upstream.visits[0].requests)
        heard = (len(sink.heads), len(sink.parts))
        stream.cancel("client_disconnect")
        stream.cancel("client_disconnect")
        if moment != "dialling":
            async with asyncio.timeout(30):
                await gone.wait()
        await turns(10)
        assert (len(sink.heads), len(sink.parts), sink.ends) == (*heard, [])


async def test_ending_the_streams_of_a_link_is_heard_once_by_each() -> None:
    async def answer(visit: Visit) -> None:
        await visit.read_request()
        await visit.write(OK + b"\r\nabc")
        await visit.wait_closed()

    async with run_upstream(answer) as upstream:
        link, sinks = make_link(upstream.port), [RequestSink() for _ in range(3)]
        for sink in sinks:
            link.open_stream(a_request(), sink)
        assert link.list_sinks() == sinks
        for sink in sinks:
            await sink.wait(lambda sink=sink: sink.parts)  # type: ignore[misc]
        link.end_streams(EndKind.RECLAIMED, "reclaimed")
        link.end_streams(EndKind.LINK_LOST, "again")
        link.close("done")
        await turns(10)
        assert [sink.kinds for sink in sinks] == [[EndKind.RECLAIMED]] * 3
        assert not link.list_sinks()


@pytest.mark.parametrize(("word", "kind"), [("busy", EndKind.BUSY), ("gone", EndKind.LINK_LOST)])
async def test_a_peers_refusal_is_said_in_a_header(word: str, kind: EndKind) -> None:
    refusal = b"HTTP/1.1 503 X\r\n%s: %s\r\ncontent-length: 0\r\n\r\n" % (END_HEADER.encode(), word.encode())
    async with run_upstream(always(refusal)) as upstream:
        sink, _, end = await fetch(upstream.port, is_peer=True)
        assert (end.kind, end.retryable, sink.heads) == (kind, True, [])
        plain, _, end = await fetch(upstream.port)
        assert (end.kind, plain.heads[0][0]) == (EndKind.COMPLETE, 503)


FULL = b'{"error":{"code":"queue_full","message":"Queue depth 16/16, retry in 5 seconds","queueDepth":16,"avgWaitMs":2000}}'
LOADING = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\n"


@pytest.mark.parametrize(
    ("said", "retry_after", "retry_after_s"),
    [(FULL, b"retry-after: 7\r\n", 7.0), (FULL, b"", 5.0), (FULL, b"retry-after: 0\r\n", 1.0),
     (FULL, b"retry-after: 999999999\r\n", 60.0), (LOADING, b"retry-after: Wed, 21 Oct 2026 07:28:00 GMT\r\n", 5.0),
     (b"busy", b"retry-after: -1\r\n", 5.0), (LOADING, b"retry-after: 3\r\n", 3.0), (b"", b"retry-after: 3\r\n", 3.0)],
)  # fmt: skip
@pytest.mark.parametrize("framing", [b"content-length: %d\r\n\r\n", b"\r\n"])
async def test_a_node_that_says_when_to_come_again_is_busy_and_nothing_of_its_answer_is_passed_on(
    framing: bytes, said: bytes, retry_after: bytes, retry_after_s: float
) -> None:
    framing = (framing % len(said) if b"%d" in framing else framing) + said
    answer = UNAVAILABLE + b"content-type: application/json\r\n" + retry_after + framing
    async with run_upstream(always(answer[:90], answer[90:], close=b"length" not in framing)) as upstream:
        sink, _, end = await fetch(upstream.port)
    assert (end.kind, end.retryable, end.retry_after_s) == (EndKind.BUSY, True, retry_after_s)
    assert (sink.heads, sink.parts) == ([], [])


async def test_a_503_for_another_reason_is_passed_on_as_far_as_it_came() -> None:
    others = (b"", b"down", b'{"error":"queue_full"}', b'{"error":{"code":"unavailable"}}', FULL + b" " * 20_000, b"{" * 20_000)
    for body in others:
        answer = UNAVAILABLE + b"x-a: 2\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        async with run_upstream(always(answer)) as upstream:
            sink, _, end = await fetch(upstream.port)
        assert end == LinkEnd(kind=EndKind.COMPLETE)
        ((status, headers),) = sink.heads
        assert (status, headers["x-a"], sink.body) == (503, "2", body)
    async with run_upstream(always(UNAVAILABLE + b"content-length: 999\r\n\r\n" + FULL, close=True)) as upstream:
        sink, _, end = await fetch(upstream.port)
    assert (end.kind, end.retryable, sink.heads[0][0], sink.body) == (EndKind.ENGINE_FAILED, False, 503, FULL)


USAGE = b': muster-usage {"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}\n\n'
SAID = b'data: {"text":"it writes : muster-usage {} into its streams"}\n\n'


@pytest.mark.parametrize(
    "pieces",
    [(SAID, SAID + USAGE), (SAID, SAID, USAGE[:9], USAGE[9:]), (SAID + SAID[:-2], b"\n\n" + USAGE), (SAID, SAID, USAGE[:-2])],
    ids=["together", "in pieces", "apart", "without an end"],
)
def test_the_counts_of_a_peer_are_taken_out_however_they_come_and_whatever_a_model_says(pieces: tuple[bytes, ...]) -> None:
    sink = RequestSink()
    stream = HttpStream(make_link(1, is_peer=True), b"", sink, asked=False)
    stream.on_response_head(200, {"content-type": "text/event-stream"})
    for piece in pieces:
        stream.on_response_data(piece)
    stream.on_response_end(None)
    (end,) = sink.ends
    assert sink.body == SAID * 2
    assert end.detail is not None
    assert end.detail.usage == TokenCounts(prompt_tokens=3, completion_tokens=4, total_tokens=7)
    plain = RequestSink()
    whole = HttpStream(make_link(1, is_peer=True), b"", plain, asked=False)
    whole.on_response_head(200, {"content-type": "application/json"})
    whole.on_response_data(b"one\n" + USAGE + b"two")
    whole.on_response_end(None)
    assert plain.body == b"one\n" + USAGE + b"two", "what is no stream passes as it is"


# Which URLs may be called

EVERYTHING = parse_policy(["0.0.0.0/0", "::/0", ".lan", "box.example"], allow_loopback=False)
"""Lists the whole internet, so that what is refused is refused for its own sake."""
TENS = parse_policy(["10.0.0.0/8", "fd00:1::/32", "gpu1.lan", "gpu2.lan:8000"], allow_loopback=False)
LOOPBACK = parse_policy([], allow_loopback=True)
NOTHING = parse_policy([], allow_loopback=False)

TRICKY = [
    # Other schemes, and what is none.
    "ftp://10.0.0.5/", "file:///etc/passwd", "gopher://10.0.0.5:6379/_INFO", "ws://10.0.0.5/", "javascript:alert(1)",
    "//10.0.0.5/", "10.0.0.5:8000", "http:/10.0.0.5/", "http:10.0.0.5", "http://", "http:///path", "", " http://10.0.0.5/",
    # User names and passwords.
    "http://user@10.0.0.5/", "http://user:pass@10.0.0.5/", "http://@10.0.0.5/", "http://10.0.0.5@169.254.169.254/",
    "http://10.0.0.5:80@169.254.169.254/", "http://10.0.0.5%40169.254.169.254/",
    # What two parsers read in two ways.
    "http://10.0.0.5\\@169.254.169.254/", "http://10.0.0.5#@169.254.169.254/", "http://10.0.0.5?@169.254.169.254/",
    "http://10.0.0.5;169.254.169.254/", "http://10.0.0.5,169.254.169.254/", "http://10.0.0.5 169.254.169.254/",
    "http://10.0.0.5\t/", "http://10.0.0.5\r\nHost: evil/", "http://10.0.0.5\n/", "http://10.0.0.5/\r\nX: y",
    "http://10.0.0.5/\x00", "http://10.0.0.5/a b", "http://10.0.0.5/../admin", "http://10.0.0.5/./v1",
    "http://10.0.0.5/%2e%2e/admin", "http://10.0.0.5/?key=1", "http://10.0.0.5/#part", "http://10.0.0.5:/",
    "http://10.0.0.5:0/", "http://10.0.0.5:65536/", "http://10.0.0.5:999999/", "http://10.0.0.5:80:81/",
    "http://10.0.0.5:-1/", "http://10.0.0.5:8o/",
    # Numbers that are addresses to some.
    "http://2130706433/", "http://2852039166/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0x7f.1/",
    "http://0177.0.0.1/", "http://017700000001/", "http://127.1/", "http://127.0.1/", "http://10.0.0.05/",
    "http://10.0.0.256/", "http://1.2.3.4.5/", "http://10.0.0.0x5/", "http://evil.0x/", "http://127.0.0.1./",
    "http://169.254.169.254./",
    # Names that are no names.
    "http://box..lan/", "http://.lan/", "http://-box.lan/", "http://box.lan./", "http://b%6fx.lan/", "http://bøx.lan/",
    "http://①②⑦.⓪.⓪.①/", "http://１２７.0.0.1/", "http://169。254。169。254/", "http://" + "a" * 64 + ".lan/",
    "http://box.lan/" + "a" * 300,
    # Addresses that are never called, also when everything is listed.
    "http://0.0.0.0/", "http://0.1.2.3/", "http://127.0.0.1/", "http://127.9.9.9:8000/",
    "http://169.254.169.254/latest/meta-data/", "http://169.254.0.1/", "http://100.100.100.200/", "http://168.63.129.16/",
    "http://192.0.0.192/", "http://224.0.0.1/", "http://239.255.255.250/", "http://240.0.0.1/", "http://255.255.255.255/",
    "http://[::]/", "http://[::1]/", "http://[::1]:8000/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/",
    "http://[::ffff:169.254.169.254]/", "http://[::ffff:10.0.0.5]/", "http://[0:0:0:0:0:ffff:a00:5]/",
    "http://[::127.0.0.1]/", "http://[::ffff:0:127.0.0.1]/", "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::169.254.169.254]/", "http://[64:ff9b:1::1]/", "http://[2002:7f00:1::]/", "http://[2002:a9fe:a9fe::1]/",
    "http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "http://[fd00:ec2::254]/", "http://[fd20:ce::254]/",
    "http://[fe80::1]/", "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[febf::1]/", "http://[fec0::1]/",
    "http://[ff02::1]/", "http://[100::1]/", "http://[]/", "http://[10.0.0.5]/", "http://[fd00::5/", "http://fd00::5/",
    "http://[v1.fe80]/", "http://[::1]evil.lan/",
]  # fmt: skip


def never(host: str, port: int) -> Sequence[str]:
    """A resolver for URLs that must not get as far as a look-up."""
    raise AssertionError(f"looked up {host!r}")


def knows(*addresses: str) -> Callable[[str, int], Sequence[str]]:
    """Return a resolver that knows one answer."""
    return lambda host, port: addresses


@pytest.mark.parametrize("url", TRICKY)
def test_a_tricky_url_is_refused_before_any_name_is_looked_up(url: str) -> None:
    with pytest.raises(AddressRefused) as caught:
        resolve_direct_target(url, policy=EVERYTHING, resolver=never)
    assert caught.value.param == "public_base_url"
    assert caught.value.message.startswith("public_base_url")


def test_a_name_server_that_changes_its_mind_moves_nothing_and_one_that_knows_none_may_be_asked_again() -> None:
    answers = iter([["10.0.0.5"], ["169.254.169.254"]])
    target = resolve_direct_target("http://gpu1.lan/", policy=TENS, resolver=lambda host, port: next(answers))
    assert (target.address, next(answers)) == ("10.0.0.5", ["169.254.169.254"]), "it was asked once"

    def unknown(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    for resolver in (unknown, knows()):
        with pytest.raises(AddressUnresolvable) as caught:
            resolve_direct_target("http://gpu1.lan/", policy=TENS, resolver=resolver)
        assert caught.value.retryable
    assert resolve_direct_target("http://localhost:9/", policy=LOOPBACK).address in {"127.0.0.1", "::1"}


def test_loopback_needs_its_own_switch_which_opens_nothing_else_and_an_empty_list_opens_nothing() -> None:
    both = knows("127.0.0.1", "::1")
    for url in ("http://127.0.0.1:8000/", "http://[::1]:8000/", "http://localhost:8000/"):
        assert resolve_direct_target(url, policy=LOOPBACK, resolver=both).port == 8000
        with pytest.raises(AddressRefused, match="MUSTER_DIRECT_ALLOW_LOOPBACK"):
            resolve_direct_target(url, policy=parse_policy(["localhost"], allow_loopback=False), resolver=both)
    for url in ("http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://10.0.0.5/", "http://0.0.0.0/"):
        with pytest.raises(AddressRefused):
            resolve_direct_target(url, policy=LOOPBACK, resolver=never)
    with pytest.raises(AddressRefused, match="MUSTER_DIRECT_HOSTS"):
        resolve_direct_target("http://10.0.0.5/", policy=NOTHING, resolver=never)


LISTS: list[tuple[str, str, str, bool]] = [
    ("tens", "http://10.1.2.3:8000/", "", True), ("tens", "http://[fd00:1::7]/", "", True),
    ("tens", "http://gpu1.lan/", "100.64.0.9 192.168.1.9", True), ("tens", "http://gpu2.lan:8000/", "8.8.8.8", True),
    ("tens", "http://other.lan/", "10.9.9.9", True), ("tens", "http://11.0.0.1/", "", False),
    ("tens", "http://other.lan/", "192.168.1.9", False), ("tens", "http://gpu2.lan:8001/", "8.8.8.8", False),
    ("tens", "http://gpu1.lan.evil.example/", "8.8.8.8", False), ("tens", "http://evilgpu1.lan/", "8.8.8.8", False),
    # A listed name or network does not open what is never called.
    ("tens", "http://gpu1.lan/", "127.0.0.1", False), ("tens", "http://gpu1.lan/", "169.254.169.254", False),
    ("tens", "http://gpu1.lan/", "::ffff:10.0.0.5", False), ("tens", "http://gpu1.lan/", "fe80::1%eth0", False),
    # One bad address among good ones: the next connection might take it.
    ("tens", "http://gpu1.lan/", "10.0.0.5 127.0.0.1", False), ("tens", "http://other.lan/", "10.0.0.5 192.168.1.9", False),
    ("tens", "http://gpu1.lan/", "10.0.0.5 10.0.0.6 169.254.169.254", False),
    (".lan", "http://a.b.lan/", "203.0.113.7", True), (".lan", "http://lan/", "203.0.113.7", False),
    (".lan", "http://evillan/", "203.0.113.7", False), ("GPU1.lan", "http://gpu1.lan/", "203.0.113.7", True),
    ("10.0.0.5", "http://10.0.0.5:9/", "", True), ("10.0.0.5:8000", "http://10.0.0.5:8000/", "", True),
    ("10.0.0.5:8000", "http://10.0.0.5:8001/", "", False), ("fd00:1::5", "http://[fd00:1::5]:80/", "", True),
    ("[fd00:1::5]:8000", "http://[fd00:1::5]:8000/", "", True), ("[fd00:1::5]:8000", "http://[fd00:1::5]:80/", "", False),
    ("private", "http://a.lan/", "10.1.2.3", True), ("private", "http://172.31.0.9/", "", True),
    ("private", "http://192.168.7.7/", "", True), ("private", "http://a.lan/", "fd12::5", True),
    ("private", "http://8.8.8.8/", "", False), ("private", "http://a.lan/", "fd00:ec2::254", False),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "url", "answer", "allowed"), LISTS)
def test_what_is_listed_is_allowed_at_the_address_it_had_and_what_leads_astray_is_refused(
    entry: str, url: str, answer: str, allowed: bool
) -> None:
    policy = TENS if entry == "tens" else parse_policy([entry], allow_loopback=False)
    resolver, parts = knows(*answer.split()) if answer else never, parse_direct_url(url)
    if allowed:
        target = resolve_direct_target(url, policy=policy, resolver=resolver)
        assert (target.address, target.host, target.port) == (
            answer.split(maxsplit=1)[0] if answer else parts.host,
            parts.host,
            parts.port,
        )
        return
    with pytest.raises(AddressRefused):
        resolve_direct_target(url, policy=policy, resolver=resolver)


def test_an_allow_list_entry_that_means_nothing_is_an_error() -> None:
    for entry in ("", "10.0.0.1/8", "a b", "http://gpu1.lan", "gpu1..lan", "gpu1.lan:port", "300.1.1.1", "*"):
        with pytest.raises(ValueError, match=r"\S"):
            parse_rule(entry)
