"""Server-sent events as bytes: cutting at event boundaries, and whether an engine's stream of them is whole. Pure.

Source: WHATWG HTML, section 9.2.6; OpenAI API reference, "Chat streaming" and "Responses streaming"; Anthropic API
reference, "Streaming messages".
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from wire.limits import WIRE
from wire.unreadable import UNREADABLE

BLANK_LINES = (b"\n\n", b"\r\n\r\n")
"""Ends of an event, as nearly every engine writes them."""
_DONE = b"[DONE]"
_BLANK_LINE = re.compile(rb"\n\r?\n|\r\r")
_FINISHED = re.compile(rb'(?<!\\)"finish_reason"\s*:\s*"[^"]')
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')
# Finish reasons with which an engine says that it did not finish (vLLM, OpenRouter).
_GIVEN_UP = frozenset({"abort", "error"})


def find_boundary(data: bytes, limit: int | None = None) -> int:
    """Return the index just behind the last blank line within ``data[:limit]``, or 0 when there is none.

    Lines end with LF, CRLF or CR; a blank line is two line ends in a row.
    """
    end = len(data) if limit is None else limit
    at = data.rfind(b"\n\n", 0, end)
    best = at + 2 if at >= 0 else 0
    if b"\r" in data:
        for blank in (b"\n\r\n", b"\r\r"):
            at = data.rfind(blank, 0, end)
            best = max(best, at + len(blank)) if at >= 0 else best
    return best


class EventCutter:
    """Passes whole events on as soon as they are complete and holds the rest."""

    __slots__ = ("_end", "_held_bytes", "held", "is_inside_event")

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self._held_bytes = 0
        self._end = b""
        """The last bytes of what is held: a blank line may begin there."""
        self.is_inside_event = False
        """Whether what was passed on last ended in the middle of an (oversized) event."""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine; return everything up to the last event boundary, which may be nothing."""
        if not self.held and chunk.endswith(BLANK_LINES):
            self.is_inside_event = False
            return chunk
        # What is held has no boundary in it, so one that is found ends in the chunk.
        cut = find_boundary(self._end + chunk) - len(self._end) if self.held else find_boundary(chunk)
        if cut > 0:
            whole = self._take_held() + chunk[:cut] if self.held else chunk[:cut]
            if cut < len(chunk):
                self._hold(chunk[cut:])
            self.is_inside_event = False
            return whole
        self._hold(chunk)
        if self._held_bytes > WIRE.event_held_bytes:
            self.is_inside_event = True
            return self._take_held()
        return b""

    def finish(self) -> bytes:
        """Return what is left when the engine closed the stream."""
        return self._take_held()

    def _hold(self, piece: bytes) -> None:
        # What is held stays in the pieces it came in, so an event that comes byte by byte costs no more than its bytes.
        self.held.append(piece)
        self._held_bytes += len(piece)
        # Two bytes of a blank line may lie before the piece that completes it.
        self._end = piece[-2:] if len(piece) >= 2 else (self._end + piece)[-2:]

    def _take_held(self) -> bytes:
        held = b"".join(self.held)
        self.held.clear()
        self._held_bytes, self._end = 0, b""
        return held


class StreamEnd(StrEnum):
    """What an engine's event stream came to. FAILED: the engine said so itself, in an event. CUT: it just stopped."""

    WHOLE = "whole"
    FAILED = "failed"
    CUT = "cut"


class _Rules(msgspec.Struct, frozen=True):
    """How a dialect ends. ``marks``: an event without any of them ends nothing. ``ends``: types of closing events.

    ``fails``: the closing event that says the answer failed. ``has_finish``: choices have a ``finish_reason``. ``error_ends``:
    an error event is an end too; native Responses end with ``response.failed`` behind it. ``closes``: the event behind which
    a client expects nothing more has one of them.
    """

    marks: tuple[bytes, ...]
    ends: frozenset[str] = frozenset()
    fails: str = ""
    has_finish: bool = False
    error_ends: bool = True
    closes: tuple[bytes, ...] = (_DONE,)


_CHAT = _Rules((b'"finish_reason"', b"error"), has_finish=True)
_RESPONSES = _Rules(
    (b"response.completed", b"response.incomplete", b"response.failed", b"error"),
    frozenset({"response.completed", "response.incomplete", "response.failed"}),
    fails="response.failed",
    error_ends=False,
    closes=(b"response.completed", b"response.incomplete", b"response.failed"),
)
# By API path. Streams of other paths (speech, transcriptions) have no closing event and are not judged.
_RULES = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _CHAT,
    "/v1/messages": _Rules((b"message_stop", b"error"), frozenset({"message_stop"}), closes=(b"message_stop",)),
    "/v1/responses": _RESPONSES,
    "/v1/pool/continuations": _CHAT,
    "/v1/pool/responses": msgspec.structs.replace(_RESPONSES, error_ends=True),
}


class _Choice(msgspec.Struct):
    finish_reason: object = None


class _Event(msgspec.Struct):
    """What of an event tells of the end. ``named``: older vLLM's errors are an ``object`` called ``error``."""

    type: object = None
    named: object = msgspec.field(default=None, name="object")
    error: msgspec.Raw = msgspec.Raw(b"null")
    choices: list[_Choice] | None = None


class _Created(msgspec.Struct):
    type: str
    response: dict[str, object]


_event_decoder = msgspec.json.Decoder(_Event)
_created_decoder = msgspec.json.Decoder(_Created)


class EndReader:
    """Passes whole events of an engine's stream on and tells in the end whether its closing event was among them.

    A frame costs no search: the last ones are remembered and read once the stream is over. ``error`` is then what the
    engine said in an error event (JSON), ``first`` the frames up to the first one with data. A part of an event at the end
    is never passed on, unless it belongs to one larger than ``event_held_bytes``.

    ``holds``: the closing event stays here until ``finish``, for a client that has it believes its answer recorded. Either way
    it is ``closing``, with what came behind it.
    """

    __slots__ = (
        "_closes",
        "_cutter",
        "_has_data",
        "_has_middle",
        "_holds",
        "_kept",
        "_rules",
        "_was_inside",
        "closing",
        "error",
        "first",
    )

    def __init__(self, rules: _Rules, *, holds: bool) -> None:
        self._rules = rules
        self._holds = holds
        self._closes = rules.closes
        self.closing = b""
        self._cutter = EventCutter()
        self._kept: deque[bytes] = deque(maxlen=WIRE.stream_end_frames)
        self._was_inside = self._has_middle = self._has_data = False
        self.first = b""
        self.error = b""

    @property
    def recent(self) -> bytes:
        """The last events that passed."""
        return b"".join(self._kept)

    @property
    def is_closed(self) -> bool:
        """Whether the closing event came: held here, or passed on because it is larger than the cutter holds."""
        return bool(self.closing) or (not self._rules.has_finish and self.judge() is not StreamEnd.CUT)

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the stream, cut anywhere; return whole events, or nothing."""
        cutter, is_usual = self._cutter, self._has_data and not self._was_inside
        # Nearly every time whole events come, and asking the cutter costs as much as all the rest.
        is_whole = is_usual and not cutter.held and not cutter.is_inside_event and data.endswith(BLANK_LINES)
        out = data if is_whole else cutter.feed(data)
        if out:
            if is_usual and len(out) <= WIRE.stream_end_bytes:
                self._kept.append(out)
            else:
                self._keep(out)
            for mark in self._closes:
                # ``find`` and not ``in``, which would first raise, and drop, an error that the mark is no number.
                if out.find(mark) >= 0 or self.closing:
                    return self._hold_closing(out)
        return out

    def finish(self) -> bytes:
        """Return the closing event, and what the engine left behind its last blank line.

        Of that only an event that lacks nothing but its own blank line, which is added.
        """
        rest, closing = self._cutter.finish(), self.closing if self._holds else b""
        if not any(_is_whole(payload) for _, payload in _list_events(rest)):
            return closing
        rest = rest.rstrip(b"\r\n") + b"\n\n"
        self._keep(rest)
        return closing + rest

    def judge(self) -> StreamEnd:
        """Return what the stream came to, by its last events. Call it once nothing more is fed."""
        rules, is_ended, has_failed, said = self._rules, False, False, self.recent
        if self._was_inside:
            # Of the last event only a part came.
            said = said[: find_boundary(said)]
        may_fail = b"error" in said or b"abort" in said or (bool(rules.fails) and rules.fails.encode() in said)
        for name, payload in _list_events(said, is_backwards=True):
            if is_ended and not may_fail:
                break
            if payload == _DONE:
                is_ended = is_ended or rules.has_finish
            elif name == b"error" or any(mark in payload for mark in rules.marks):
                ends, fails = self._read(name, payload)
                is_ended, has_failed = is_ended or ends, has_failed or fails
        if has_failed and (is_ended or rules.error_ends):
            return StreamEnd.FAILED
        return StreamEnd.WHOLE if is_ended else StreamEnd.CUT

    def _hold_closing(self, out: bytes) -> bytes:
        """Return the events before the closing one, which is held with whatever an engine still says behind it."""
        start = 0
        if not self.closing:
            for blank in _BLANK_LINE.finditer(out):
                if any(self._is_closing(payload) for _, payload in _list_events(out[start : blank.end()])):
                    break
                start = blank.end()
            else:
                return out
        if len(self.closing) < WIRE.event_held_bytes:
            self.closing += out[start:]
        return out[:start] if self._holds else out

    def _is_closing(self, payload: bytes) -> bool:
        if payload == _DONE or self._rules.has_finish:
            return payload == _DONE and self._rules.has_finish
        try:
            return _event_decoder.decode(payload).type in self._rules.ends
        except UNREADABLE:
            return False

    def _read(self, name: bytes, payload: bytes) -> tuple[bool, bool]:
        """Return whether an event closes the answer, and whether it says that the answer failed."""
        rules = self._rules
        try:
            event = _event_decoder.decode(payload)
        except UNREADABLE:
            if len(payload) <= WIRE.event_held_bytes:
                return False, False
            # Too large to be remembered as a whole; its beginning and its end are here.
            kind = name.decode("latin-1")
            return kind in rules.ends or (rules.has_finish and bool(_FINISHED.search(payload))), kind == rules.fails != ""
        kind = event.type if isinstance(event.type, str) else ""
        reasons = [choice.finish_reason for choice in event.choices or () if choice.finish_reason] if rules.has_finish else []
        is_error = bytes(event.error) != b"null" or name == b"error" or kind == "error" or event.named == "error"
        if is_error:
            self.error = self.error or (bytes(event.error) if bytes(event.error) != b"null" else payload)
        has_failed = is_error or (kind == rules.fails != "") or any(reason in _GIVEN_UP for reason in reasons)
        return kind in rules.ends or bool(reasons), has_failed

    def _keep(self, out: bytes) -> None:
        """Remember a frame at the beginning, a long one, or a piece of an event that is larger than the cutter holds."""
        was_inside, self._was_inside = self._was_inside, self._cutter.is_inside_event
        if not self._has_data:
            self._has_data = b"data:" in out
            self.first = self.first[-WIRE.stream_end_bytes :] + out
        if was_inside and self._was_inside:
            if self._has_middle:
                # The end of a large event may begin in the last of its middle pieces, no earlier.
                self._kept.pop()
            self._has_middle = True
        elif not was_inside and not self._was_inside:
            out = out[find_boundary(out, max(0, len(out) - WIRE.stream_end_bytes)) :]
        if not self._was_inside:
            self._has_middle = False
        self._kept.append(out)


def open_end_reader(path: str, *, holds: bool = True) -> EndReader | None:
    """Return a reader for an engine's stream on an API path; None where streams have no closing event to look for."""
    rules = _RULES.get(path)
    return EndReader(rules, holds=holds) if rules is not None else None


def fail_response(error: bytes, *, first: bytes, last: bytes) -> bytes:
    """Return ``response.failed`` for a Responses stream that began with the events ``first`` and ended with ``last``.

    ``error``: its member as JSON. The event keeps the response's id and counts on from the last event. Nothing when the
    beginning is not ``response.created``.
    """
    response = _find_response(first)
    if response is None:
        return b""
    numbers = _SEQUENCE_NUMBER.findall(last) or _SEQUENCE_NUMBER.findall(first)
    fields = response | {"status": "failed", "error": msgspec.Raw(error)}
    number = int(numbers[-1]) + 1 if numbers else 0
    event = {"type": "response.failed", "sequence_number": number, "response": fields}
    return b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _find_response(first: bytes) -> dict[str, object] | None:
    for _, payload in _list_events(first):
        try:
            event = _created_decoder.decode(payload)
        except UNREADABLE:
            return None
        if event.type in {"response.created", "response.in_progress"}:
            return event.response
    return None


def _is_whole(payload: bytes) -> bool:
    """Whether a payload is all of an event: ``[DONE]``, or a JSON object to its end."""
    try:
        return payload == _DONE or isinstance(msgspec.json.decode(payload), dict)
    except UNREADABLE:
        return False


def _list_events(data: bytes, *, is_backwards: bool = False) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the data of events, comments and events without data left out. ``is_backwards``: the last first."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events = data.split(b"\n\n")
    for event in reversed(events) if is_backwards else events:
        name, lines = b"", []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                lines.append(line[5:])
            elif line.startswith(b"event:"):
                name = line[6:].strip()
        if lines:
            yield name, b"\n".join(lines).strip()
