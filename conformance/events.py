"""Server-sent events, read as the strictest client does (WHATWG HTML 9.2.6), and where the writes of a stream end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from conformance.exchange import Answer
from conformance.fields import Field, read_json
from conformance.verdicts import Violation

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
