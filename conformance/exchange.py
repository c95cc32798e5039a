"""Exchange with a server: bounds of the suite, a request and its answer, events of a stream, fields of a body."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any  # JSON of the server under test
from urllib.parse import urlsplit

import h11


class Violation(Exception):
    """The server does not do what clients require; the words say what it did instead."""


class NotApplicable(Exception):
    """The requirement cannot be checked here; the words say why."""


class Verdict(StrEnum):
    """One row's outcome."""

    OK = "ok"
    FAIL = "FAIL"
    ENGINE = "engine"
    """Not fulfilled, and the engine itself, asked without the server between, does not fulfil it either."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one row. ``detail``: the violation or the reason, empty when it is fulfilled; a violation of the engine's
    begins with ``engine:``.
    """

    row_id: str
    verdict: Verdict
    detail: str
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The comment above a field says what happens at it; ``_s`` are seconds."""

    # More rows wait their turn, unless ``--jobs`` says another number.
    simultaneous: int = 4
    # A row may ask several times; it fails after so many times the time-out of one answer.
    row_answers: int = 3
    # A row fails: nothing takes its connection. The official SDKs wait as long.
    connect_s: float = 5.0
    # A row fails: a request that is to be refused was not.
    refused_s: float = 30.0
    # A row fails: the connection was not closed.
    close_s: float = 30.0
    # A row fails: the engine still works for a client that has left.
    heard_s: float = 30.0
    # A row fails: a stream was silent for longer.
    keep_alive_s: float = 10.0
    # A row fails: every piece came later. A delayed ACK takes 40 ms; the engine says something every 5.
    gap_s: float = 0.030
    # A row fails that found such gaps so often.
    gap_tries: int = 3
    # Answers are read in pieces of this size.
    read_bytes: int = 64 * 1024

    # Enough for an answer, few enough for a slow machine.
    answer_tokens: int = 24
    # Enough for a call of a tool.
    call_tokens: int = 200
    # The largest image that a client sends.
    image_bytes: int = 6 * 1024 * 1024
    # The longest instruction that a client sends.
    text_chars: int = 60_000
    # The body that a server is to refuse by its head.
    claimed_bytes: int = 300 * 1024 * 1024
    # Two embeddings that differ by less are one.
    tolerance: float = 1e-5
    # What a finding quotes is cut.
    shown_chars: int = 160
    # The report breaks a line.
    line_chars: int = 130

    # The scripted engine refuses a longer body.
    engine_body_bytes: int = 256 * 1024 * 1024
    # Pieces of a stream of the scripted engine before what breaks it.
    broken_after: int = 2
    # An endless stream of it ends, at 20 ms a piece later than anybody waits for.
    endless_pieces: int = 10_000
    # Its embeddings have so many numbers, unless the request says another number.
    dimensions: int = 8


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; equal ones may share an answer. ``headers`` without host and content-length."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that the server sent at once (an HTTP chunk, or what one read found), and when, in seconds after the request."""

    at_s: float
    data: bytes


@dataclass(slots=True)
class Answer:
    """A response. ``whole``: it ended as HTTP says; ``closed``: the server closed the connection after it or said so."""

    ask: Ask
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    whole: bool = False
    closed: bool = False

    @property
    def body(self) -> bytes:
        """All bytes of the body."""
        return b"".join(write.data for write in self.writes)

    @property
    def what(self) -> str:
        """The answer in a few words, for violations."""
        return f"{self.ask.method} {self.ask.path.partition('?')[0]}"

    def json(self) -> Field:
        """Return the body as JSON. Raises Violation."""
        return read_json(self.body, "reply")

    def header(self, name: str) -> str:
        """Return a header, empty when it is not there."""
        return self.headers.get(name, "")


class Connection:
    """A connection for one request after the other. ``keeps_acks_back``: ask the kernel to delay ACKs, where it can."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self.host = host
        self._http = h11.Connection(h11.CLIENT)
        self.keeps_acks_back = False

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, base_url: str) -> AsyncIterator[Connection]:
        """Yield a connection to the server at ``base_url`` and close it afterwards. Raises Violation."""
        parts = urlsplit(base_url)
        is_tls = parts.scheme == "https"
        try:
            async with asyncio.timeout(LIMITS.connect_s):
                reader, writer = await asyncio.open_connection(
                    parts.hostname, parts.port or (443 if is_tls else 80), ssl=ssl.create_default_context() if is_tls else None
                )
        except OSError as error:
            raise Violation(f"cannot connect: {str(error) or type(error).__name__}") from None
        connected: socket.socket = writer.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield cls(reader, writer, parts.netloc)
        finally:
            # The answer may still be under way: the server must hear of a client that leaves.
            writer.close()
            with contextlib.suppress(OSError):
                async with asyncio.timeout(LIMITS.connect_s):
                    await writer.wait_closed()

    async def exchange(self, ask: Ask, *, leave: Callable[[Answer], bool] | None = None, claimed_bytes: int = 0) -> Answer:
        """Send a request and record its answer, until ``leave`` says to stop after a write. Raises OSError.

        ``claimed_bytes``: the head says that the body is so long, and the body does not end.
        """
        headers = [("host", self.host), *ask.headers]
        is_chunked = any(name == "transfer-encoding" for name, _ in ask.headers)
        if not is_chunked and (ask.body or ask.method not in {"GET", "HEAD", "DELETE"}):
            headers.append(("content-length", str(claimed_bytes or len(ask.body))))
        data = self._http.send(h11.Request(method=ask.method, target=ask.path, headers=headers)) or b""
        data += (self._http.send(h11.Data(data=ask.body)) or b"") if ask.body else b""
        data += b"" if claimed_bytes else self._http.send(h11.EndOfMessage()) or b""
        began = asyncio.get_running_loop().time()
        self._writer.write(data)
        answer = Answer(ask)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        await self._record(answer, began, leave)
        return answer

    async def _record(self, answer: Answer, began: float, leave: Callable[[Answer], bool] | None) -> None:
        pending = bytearray()
        while True:
            event = await self._next_event()
            now = asyncio.get_running_loop().time() - began
            if event is None:
                answer.closed = True
                break
            if isinstance(event, h11.Response):
                answer.status = event.status_code
                answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                pending += event.data
                if event.chunk_end or "chunked" not in answer.header("transfer-encoding").lower():
                    answer.writes.append(Write(now, bytes(pending)))
                    pending.clear()
                    if leave is not None and leave(answer):
                        return
            elif isinstance(event, h11.EndOfMessage):
                answer.whole = True
                answer.closed = "close" in answer.header("connection").lower()
                break
        if pending:
            answer.writes.append(Write(asyncio.get_running_loop().time() - began, bytes(pending)))

    async def _next_event(self) -> h11.Event | None:
        """Return the next event of the answer, None when the connection ended before it or says what is not HTTP."""
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._keep_acks_back()
                    self._http.receive_data(await self._reader.read(LIMITS.read_bytes))
                    continue
            except (h11.RemoteProtocolError, ConnectionError, ssl.SSLError):
                return None
            if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                return None
            if isinstance(event, h11.InformationalResponse):
                continue
            assert isinstance(event, h11.Event)
            return event

    def _keep_acks_back(self) -> None:
        if self.keeps_acks_back and hasattr(socket, "TCP_QUICKACK"):
            connected: socket.socket = self._writer.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)

    def reuse(self) -> None:
        """Make ready for the next request. Raises Violation when the server does not want one."""
        try:
            self._http.start_next_cycle()
        except h11.ProtocolError:
            raise Violation("the connection cannot be used again after the answer") from None

    async def sees_close(self) -> bool:
        """Return whether the server closes the connection now."""
        try:
            async with asyncio.timeout(LIMITS.close_s):
                return await self._reader.read(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True


DONE = "[DONE]"
_LINE_END = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Event:
    """One event. ``name``: of its event line, empty without one; ``number``: its place in the stream, from 0."""

    name: str
    data: str
    number: int

    def json(self) -> Field:
        """Return its data as JSON. Raises Violation."""
        return read_json(self.data, f"event {self.number}")


@dataclass(frozen=True, slots=True)
class Stream:
    """All that a stream holds. ``comments``: lines that begin with a colon, without it."""

    events: tuple[Event, ...]
    comments: tuple[str, ...]


def read_stream(body: bytes) -> Stream:
    """Split a whole body. Raises Violation for bytes that are not UTF-8, unknown lines and an event that does not end."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise Violation(f"the stream is not UTF-8: {error}") from None
    lines = _LINE_END.split(text)
    if lines.pop() != "":
        raise Violation("the last line of the stream does not end")
    events: list[Event] = []
    comments: list[str] = []
    name, data, is_open = "", list[str](), False
    for line in lines:
        if not line:
            if is_open:
                events.append(Event(name, "\n".join(data), len(events)))
            name, data, is_open = "", [], False
            continue
        if line.startswith(":"):
            comments.append(line[1:].strip())
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        is_open = True
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field not in {"id", "retry"}:
            raise Violation(f"the line {line[:80]!r} is none of an event stream")
    if is_open:
        raise Violation("the stream ends inside an event: the blank line is missing, so every client drops it")
    return Stream(tuple(events), tuple(comments))


def check_event_data(stream: Stream) -> None:
    """Check that every event has data that is JSON; only ``[DONE]`` is none. Raises Violation."""
    for event in stream.events:
        if not event.data.strip():
            raise Violation(f"event {event.number} ({event.name or 'unnamed'}) has no data: every SDK parses it as JSON")
        if event.data != DONE:
            event.json().members()


def check_whole_writes(answer: Answer) -> None:
    """Check that no write ends inside an event. Raises Violation."""
    for number, write in enumerate(answer.writes):
        if write.data and not re.search(rb"(\r\n|\n|\r)(\r\n|\n|\r)\Z", write.data):
            raise Violation(f"write {number} ends inside an event: …{write.data[-60:]!r}")


def list_payloads(events: Iterable[Event]) -> list[Field]:
    """Return the JSON of every event, ``[DONE]`` left out. Raises Violation."""
    return [event.json() for event in events if event.data != DONE]


@dataclass(frozen=True, slots=True)
class Field:
    """A JSON value and its path in the answer. All checks raise Violation."""

    value: Any
    path: str

    def __getitem__(self, key: str | int) -> Field:
        """Return a member, which must be there."""
        if isinstance(key, int):
            items = self.items()
            if not -len(items) <= key < len(items):
                raise Violation(f"{self.path} has {len(items)} entries, number {key} is asked for")
            return items[key]
        self.members()
        if key not in self.value:
            raise Violation(f"{self.path}.{key} is missing ({self.shown})")
        return Field(self.value[key], f"{self.path}.{key}")

    def __contains__(self, key: str) -> bool:
        """Whether the member is there, null or not."""
        return isinstance(self.value, dict) and key in self.value

    @property
    def shown(self) -> str:
        """The value as short JSON for a person."""
        text = json.dumps(self.value, ensure_ascii=False)
        return text if len(text) <= LIMITS.shown_chars else text[: LIMITS.shown_chars - 1] + "…"

    @property
    def is_null(self) -> bool:
        """Whether it is null."""
        return self.value is None

    def get(self, key: str) -> Field | None:
        """Return a member, or None when it is absent or null."""
        self.members()
        return None if self.value.get(key) is None else Field(self.value[key], f"{self.path}.{key}")

    def at(self, place: str) -> Field:
        """Return the member at a place such as ``choices.0.message``, which must be there."""
        found = self
        for step in place.split("."):
            found = found[int(step) if step.isdigit() else step]
        return found

    def members(self) -> dict[str, Any]:
        """Return the members of an object."""
        if not isinstance(self.value, dict):
            raise Violation(f"{self.path} must be an object and is {self.shown}")
        return self.value

    def items(self) -> list[Field]:
        """Return the entries of a list."""
        if not isinstance(self.value, list):
            raise Violation(f"{self.path} must be a list and is {self.shown}")
        return [Field(item, f"{self.path}[{index}]") for index, item in enumerate(self.value)]

    def text(self) -> str:
        """Return a string, empty or not."""
        if not isinstance(self.value, str):
            raise Violation(f"{self.path} must be a string and is {self.shown}")
        return self.value

    def word(self) -> str:
        """Return a string that is not empty."""
        if not self.text():
            raise Violation(f"{self.path} is empty")
        return str(self.value)

    def count(self) -> int:
        """Return an integer that is not negative."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise Violation(f"{self.path} must be an integer of at least 0 and is {self.shown}")
        return self.value

    def number(self) -> float:
        """Return a number."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise Violation(f"{self.path} must be a number and is {self.shown}")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise Violation(f"{self.path} must be true or false and is {self.shown}")
        return self.value

    def must_be(self, *expected: object) -> None:
        """Check that it is one of the values given."""
        if not any(type(self.value) is type(one) and self.value == one for one in expected):
            words = " or ".join(json.dumps(one, ensure_ascii=False) for one in expected)
            raise Violation(f"{self.path} must be {words[:300]} and is {self.shown}")

    def must_fit(self, places: Mapping[str, object]) -> None:
        """Check what stands at each place below: a value, one of a tuple, or what a function that is given the field takes."""
        for place, expected in places.items():
            if callable(expected):
                expected(self.at(place))
            else:
                self.at(place).must_be(*(expected if isinstance(expected, tuple) else (expected,)))

    def must_have(self, names: Iterable[str]) -> None:
        """Check that all these members are there, null or not."""
        missing = [name for name in names if name not in self.members()]
        if missing:
            raise Violation(f"{self.path} lacks {', '.join(missing)}")


def read_json(data: bytes | str, what: str) -> Field:
    """Parse JSON strictly: NaN and Infinity are no JSON. Raises Violation."""
    try:
        return Field(json.loads(data, parse_constant=_refuse_constant), what)
    except ValueError as error:
        shown = data[: LIMITS.shown_chars]
        raise Violation(f"{what} is not JSON: {shown!r} ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
