"""Answers of hostile upstreams: what is read without llhttp is read as llhttp reads it, however it is cut, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import limits
from nodes.links.http1 import Connection, HeadMemory
from tests.fakes.examples import examples

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH, BEHIND = OK + b"server: x\r\ncontent-length: ", b"\r\ncontent-type: application/json\r\n\r\nhello"
SIZED = LENGTH + b"5" + BEHIND.removesuffix(b"hello")
CHUNKED = OK + b"server: x\r\ntransfer-encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HOP_HEADERS = {"connection", "content-length", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}
KIB = 1024


@dataclass
class Heard:
    """What came of one answer. ``is_whole``: None = it still goes on; ``keeps``: the connection may carry another request."""

    heads: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    body: bytes = b""
    is_whole: bool | None = None
    keeps: bool = False
    said: str = ""

    def on_response_head(self, status: int, headers: dict[str, str]) -> None:
        assert self.is_whole is None
        self.heads.append((status, dict(headers)))

    def on_response_data(self, data: bytes) -> None:
        assert self.is_whole is None
        assert data
        self.body += data

    def on_response_end(self, error: str | None) -> None:
        assert self.is_whole is None, "an answer ends once"
        self.is_whole, self.said = error is None, error or ""

    def on_response_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.on_response_head(status, headers)
        if body:
            self.on_response_data(body)
        self.on_response_end(None)


class Wire(asyncio.Transport):
    """The gateway's end of a connection whose other end is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closed = self.is_paused = False

    def write(self, data: object) -> None:
        assert not self.is_closed

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Visit:
    """A connection with one request on its way; ``idle`` counts how often it was given back."""

    def __init__(self, heads: HeadMemory) -> None:
        self.idle: list[Connection] = []
        self.wire, self.heard = Wire(), Heard()
        self.connection = Connection(heads, self.idle.append, lambda connection: None, lambda call, *args: call(*args))
        self.connection.connection_made(self.wire)
        self.connection.send_request(b"POST / HTTP/1.1\r\n\r\n", self.heard)

    def take(self, reads: Sequence[bytes], *, closes: bool = True) -> Heard:
        """Have the upstream send these reads and close."""
        for read in reads:
            if not self.wire.is_closed:
                self.connection.data_received(read)
        self.heard.keeps = bool(self.idle) and not self.wire.is_closed
        assert len(self.idle) <= 1, "two requests would share the connection"
        if closes:
            self.connection.connection_lost(None)
        return self.heard


class Model(Heard):
    """The same answer read by llhttp alone, with a handler that is told nothing twice and nothing behind the end."""

    def __init__(self, reads: Sequence[bytes]) -> None:
        super().__init__()
        self._headers: dict[str, str] = {}
        self._until_close = self._is_complete = False
        self._parser = httptools.HttpResponseParser(self)
        for read in reads:
            if self.is_whole is None:
                self._feed(read)
            else:
                self.keeps = False  # nobody asked for it
        if self.is_whole is None:
            self.is_whole = self._until_close

    def _feed(self, read: bytes) -> None:
        try:
            self._parser.feed_data(read)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.keeps, self.is_whole = False, self._is_complete
        else:
            self.is_whole = True if self._is_complete else None

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise RuntimeError

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        if status < 200:
            self._headers = {}
        elif not self.heads:
            self.heads.append((status, {name: value for name, value in headers.items() if name not in HOP_HEADERS}))
            framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
            self._until_close = not framed and status not in (204, 304)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.heads:
            self._is_complete, self.keeps = True, self._parser.should_keep_alive()


def parts(heard: Heard) -> tuple[object, ...]:
    return heard.heads, heard.body, heard.is_whole, heard.keeps


def learn(*answers: bytes) -> HeadMemory:
    """Return what is remembered after these answers, the last one first."""
    heads = HeadMemory()
    for answer in answers:
        Visit(heads).take([answer])
    return heads


def remembers(heads: HeadMemory, answer: bytes) -> bool:
    return heads.find(answer) is not None


# Each said as raw bytes, what the handler hears of the body, whether it is whole, and whether the connection is kept.
WHOLE, BROKEN = True, False
CORPUS: dict[str, tuple[bytes, bytes, bool, bool]] = {
    "as usual": (SIZED + b"hello", b"hello", WHOLE, True),
    "in chunks": (CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello", WHOLE, True),
    # Two framings, and lengths that two programs read differently.
    "length and chunks": (OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"", BROKEN, False),
    "chunks and length": (OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\nhello", b"", BROKEN, False),
    "the same length twice": (OK + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello", b"", BROKEN, False),
    "two lengths": (OK + b"content-length: 5\r\ncontent-length: 50\r\n\r\nhello", b"", BROKEN, False),
    "a list of lengths": (LENGTH + b"5, 5" + BEHIND, b"", BROKEN, False),
    "a length with a sign": (LENGTH + b"+5" + BEHIND, b"", BROKEN, False),
    "a negative length": (LENGTH + b"-5" + BEHIND, b"", BROKEN, False),
    "a hexadecimal length": (LENGTH + b"0x5" + BEHIND, b"", BROKEN, False),
    "a length with a blank in it": (LENGTH + b"5 0" + BEHIND, b"", BROKEN, False),
    "an underscored length": (LENGTH + b"5_0" + BEHIND, b"", BROKEN, False),
    "no length": (LENGTH + b"" + BEHIND, b"", BROKEN, False),
    "a length over 64 bits": (LENGTH + b"18446744073709551621" + BEHIND, b"", BROKEN, False),
    "digits of another script": (LENGTH + b"\xd9\xa5" + BEHIND, b"", BROKEN, False),
    "leading zeros": (LENGTH + b"005" + BEHIND, b"hello", WHOLE, True),
    "another coding": (OK + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", b"0\r\n\r\n", BROKEN, False),
    "chunked, but not last": (OK + b"transfer-encoding: chunked, x\r\n\r\n0\r\n\r\n", b"0\r\n\r\n", BROKEN, False),
    # Lines.
    "a folded header": (OK + b"x: a\r\n content-length: 50\r\ncontent-length: 5\r\n\r\nhello", b"", BROKEN, False),
    "bare line feeds": (OK + b"content-length: 5\n\nhello", b"", BROKEN, False),
    "a bare carriage return": (OK + b"x: a\rcontent-length: 50\r\ncontent-length: 5\r\n\r\nhello", b"", BROKEN, False),
    "a blank before the colon": (OK + b"content-length : 5\r\n\r\nhello", b"", BROKEN, False),
    "a zero byte": (OK + b"x: \x00\r\ncontent-length: 5\r\n\r\nhello", b"", BROKEN, False),
    "a header without a name": (OK + b": x\r\ncontent-length: 5\r\n\r\nhello", b"", BROKEN, False),
    "another protocol": (b"SSH-2.0-OpenSSH\r\n\r\n", b"", BROKEN, False),
    # Chunks.
    "a size over 64 bits": (CHUNKED + b"10000000000000005\r\nhello\r\n0\r\n\r\n", b"", BROKEN, False),
    "a size with a prefix": (CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", b"", BROKEN, False),
    "a negative size": (CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n", b"", BROKEN, False),
    "a size and a blank": (CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n", b"", BROKEN, False),
    "a size without a carriage return": (CHUNKED + b"5\nhello\r\n0\r\n\r\n", b"", BROKEN, False),
    "no size": (CHUNKED + b"\r\nhello\r\n0\r\n\r\n", b"", BROKEN, False),
    "a chunk longer than it says": (CHUNKED + b"4\r\nhello\r\n0\r\n\r\n", b"hell", BROKEN, False),
    "a chunk shorter than it says": (CHUNKED + b"6\r\nhello\r\n0\r\n\r\n", b"hello\r", BROKEN, False),
    "an extension": (CHUNKED + b'5;a="b"\r\nhello\r\n0\r\n\r\n', b"hello", WHOLE, True),
    "a trailer": (CHUNKED + b"5\r\nhello\r\n0\r\nx: y\r\n\r\n", b"hello", WHOLE, True),
    "a length as a trailer": (CHUNKED + b"5\r\nhello\r\n0\r\ncontent-length: 50\r\n\r\n", b"hello", BROKEN, False),
    # Ends.
    "less than it says": (SIZED + b"hell", b"hell", BROKEN, False),
    "more than it says": (SIZED + b"hello!", b"hello", WHOLE, False),
    "line ends behind it": (SIZED + b"hello\r\n\r\n", b"hello", WHOLE, True),
    "a second answer": (SIZED + b"hello" + SIZED + b"forge", b"hello", WHOLE, False),
    "a second answer behind chunks": (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n" + SIZED + b"forge", b"hello", WHOLE, False),
    "chunks without an end": (CHUNKED + b"5\r\nhello\r\n", b"hello", BROKEN, False),
    "until it closes": (OK + b"\r\nhello", b"hello", WHOLE, False),
    "that it closes": (OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello", WHOLE, False),
    "an older version": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", WHOLE, False),
    "an interim answer": (INTERIM + SIZED + b"hello", b"hello", WHOLE, True),
    "an interim answer before chunks": (INTERIM + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello", WHOLE, True),
    "another protocol from here on": (
        OK.replace(b"200", b"101") + b"upgrade: x\r\nconnection: upgrade\r\n\r\nzz", b"", BROKEN, False,
    ),
    "nothing to say": (OK.replace(b"200", b"204") + b"\r\n", b"", WHOLE, True),
    "a length without a body": (OK.replace(b"200", b"304") + b"content-length: 5\r\n\r\n", b"", WHOLE, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPUS)
def test_an_answer_with_two_readings_is_none_however_it_is_cut(name: str) -> None:
    raw, body, is_whole, keeps = CORPUS[name]
    usual = (SIZED + b"hello", CHUNKED + b"0\r\n\r\n")
    for heads in (HeadMemory(), learn(*usual), learn(*usual, raw)):
        for cut in range(len(raw)):
            heard = Visit(heads).take([raw[:cut], raw[cut:]] if cut else [raw])
            assert (heard.body, heard.is_whole) == (body, is_whole)
            late = keeps and cut and not raw[cut:].strip(b"\r\n") and heard.body == body and Model([raw[:cut]]).keeps
            assert heard.keeps == (keeps and not late), "what comes by itself behind an answer ends the connection"


def test_only_heads_that_llhttp_took_are_remembered_and_few_of_them() -> None:
    bounds = limits().nodes
    heads = [raw[: raw.find(b"\r\n\r\n") + 4] for raw, *_ in CORPUS.values() if remembers(learn(raw), raw)]
    assert set(heads) == {SIZED, CHUNKED, SIZED.replace(b"5", b"005", 1)}
    answers = [OK + b"x: %d\r\ncontent-length: 0\r\n\r\n" % number for number in range(100)]
    assert [answer for answer in answers if remembers(learn(*answers), answer)] == answers[-bounds.http_kept_heads :]
    for size, kept in ((bounds.http_kept_head_bytes, True), (bounds.http_kept_head_bytes + 1, False)):
        head = OK + b"content-length: 2\r\nx: \r\n\r\n"
        answer = head.replace(b"x: ", b"x: " + b"a" * (size - len(head))) + b"ok"
        assert remembers(learn(answer), answer) is kept


def test_a_remembered_head_counts_for_any_length_and_nothing_else() -> None:
    heads = learn(SIZED + b"hello")
    for length in (0, 1, 70_000):
        body = bytes(length)
        heard = Visit(heads).take([SIZED.replace(b"5", b"%d" % length, 1) + body])
        assert parts(heard) == ([(200, {"server": "x", "content-type": "application/json"})], body, True, True)
    for changed in (SIZED.replace(b"x", b"y", 1), SIZED.lower(), SIZED.replace(b"200", b"201"), SIZED.replace(b": 5", b":5")):
        assert not remembers(heads, changed + b"hello")


def test_what_comes_while_a_connection_is_idle_closes_it_even_behind_a_paused_reader() -> None:
    visit = Visit(learn(SIZED + b"hello"))
    visit.connection.pause()
    visit.take([SIZED + b"hello"], closes=False)
    assert visit.heard.keeps
    assert not visit.wire.is_paused, "or a forged answer would wait for the next request"
    visit.connection.data_received(SIZED + b"forge")
    assert visit.wire.is_closed
    assert visit.heard.body == b"hello"


ENDLESS = {
    "header": (OK, b"x: " + b"a" * KIB, b"a" * KIB),
    "headers": (OK, b"", b"x: " + b"a" * KIB + b"\r\n"),
    "status line": (b"HTTP/1.1 200 ", b"", b"a" * KIB),
    "interim answers": (b"", b"", INTERIM * 40),
    "trailer": (CHUNKED, b"1\r\na\r\n0\r\nx: ", b"a" * KIB),
    "extension": (CHUNKED, b"1\r\na\r\n1;", b"a" * KIB),
    "zeros of a size": (CHUNKED, b"1\r\na\r\n", b"0" * KIB),
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("is_known", [False, True])
def test_what_has_no_end_is_refused_before_it_is_larger_than_a_head_may_be(name: str, *, is_known: bool) -> None:
    head, start, more = ENDLESS[name]
    visit = Visit(learn(head + b"0\r\n\r\n") if is_known else HeadMemory())
    visit.connection.data_received(head + start)
    sent = 0
    while visit.heard.is_whole is None:
        visit.connection.data_received(more)
        sent += len(more)
        assert sent <= limits().nodes.http_head_bytes + len(more)
    assert (visit.heard.is_whole, visit.wire.is_closed) == (False, True)
    assert "too large" in visit.heard.said


LINES = st.lists(
    st.sampled_from([
        b"content-length: 5", b"Content-Length: 5", b"content-length: 11", b"content-length:5", b"content-length: 5 ",
        b"transfer-encoding: chunked", b"Transfer-Encoding: Chunked", b"connection: close", b"connection: keep-alive", b"x: y",
        b"X: y", b" folded", b"x : y", b"x: \x00", b"content-type: text/event-stream", b"trailer: x", b"upgrade: x",
    ]),
    max_size=4,
)  # fmt: skip
CHUNKS = st.lists(
    st.sampled_from([
        b"5\r\nhello\r\n", b"1\r\n\n\r\n", b"5;x\r\nhello\r\n", b"5\nhello\n", b"005\r\nhello\r\n", b"5\r\nhello",
        b"A\r\n0123456789\r\n", b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"0\r\n", b"\r\n",
        b"ffffffffffffffff0\r\n", b"hello", b"HTTP/1.1 200 OK\r\n\r\n",
    ]),
    max_size=4,
).map(b"".join)  # fmt: skip
STATUS_LINES = st.sampled_from([OK, OK, OK, OK.replace(b"200", b"503"), OK.replace(b"200", b"204"), OK.replace(b"1.1", b"1.0"),
                                OK.replace(b"200", b"103"), b"HTTP/1.1 200\r\n", b"\r\n" + OK])  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Return an answer: of the usual kind, or of odd parts."""
    if draw(st.booleans()):
        usual = [SIZED + b"hello", CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"]
        return draw(st.sampled_from(usual))
    lines = b"".join(line + b"\r\n" for line in draw(LINES))
    return draw(STATUS_LINES) + lines + b"\r\n" + draw(CHUNKS | st.just(b"hello"))


@st.composite
def spoilt(draw: st.DrawFn, answer: bytes) -> bytes:
    """Return an answer, or the same with a few bytes put in, taken out or changed."""
    for _ in range(draw(st.integers(0, 2))):
        at, width = draw(st.integers(0, len(answer))), draw(st.integers(0, 2))
        put = draw(st.sampled_from([b"", b"\r\n", b"\n", b"\r", b" ", b"0", b"1", b"\x00", b":", b"\r\nx: y", b"\xff", answer]))
        answer = answer[:at] + put + answer[at + width :]
    return answer


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """Return data in reads that end at these places."""
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges) if start < stop]


@given(answer=answers(), places=st.lists(st.integers(0, 10_000), max_size=4), data=st.data())
@examples(150)
def test_any_answer_is_read_as_llhttp_reads_it_whatever_is_remembered(
    answer: bytes, places: list[int], data: st.DataObject
) -> None:
    heads = learn(SIZED + b"hello", CHUNKED + b"0\r\n\r\n", answer)
    raw = data.draw(spoilt(answer))
    reads = cut(raw, places)
    expected = parts(Model(reads))
    assert parts(Visit(heads).take(reads)) == expected
    assert parts(Visit(HeadMemory()).take(reads)) == expected
    assert parts(Visit(learn(raw)).take(reads)) == expected
