"""Streams of Messages (Anthropic API reference, "Streaming messages"; strict as the Python and Node SDKs and Claude Code)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from conformance.exchange import DONE, Event, Field, Stream, Violation

STOP_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "pause_turn", "model_context_window_exceeded")
ERROR_TYPES = (
    "invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large",
    "rate_limit_error", "api_error", "overloaded_error", "timeout_error", "billing_error",
)  # fmt: skip
# The kind of block that a delta belongs to, and the member that carries it.
_DELTAS = {
    "text_delta": ("text", "text"),
    "input_json_delta": ("tool_use", "partial_json"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "citations_delta": ("text", "citation"),
}


# What a block has before its first delta, by its kind.
_STARTS: dict[str, dict[str, object]] = {
    "text": {"text": ""},
    "tool_use": {"id": Field.word, "name": Field.word, "input": {}},
    "thinking": {"thinking": ""},
}


@dataclass(slots=True)
class Block:
    """A content block as its deltas add up. ``text``: its text, thought or JSON."""

    kind: str
    start: Field
    text: str = ""
    deltas: int = 0

    def arguments(self) -> object:
        """Return a tool's input. Raises Violation when the deltas add up to no JSON object."""
        try:
            value = json.loads(self.text or "{}")
        except ValueError as error:
            raise Violation(f"the pieces of a tool's input are no JSON: {self.text[:120]!r} ({error})") from None
        if not isinstance(value, dict):
            raise Violation(f"a tool's input must be an object and is {self.text[:120]!r}")
        return value


@dataclass(slots=True)
class MessageStream:
    """What a stream said. ``delta``: the message_delta; ``failure``: the error object."""

    message: Field | None = None
    blocks: list[Block] = field(default_factory=list)
    delta: Field | None = None
    failure: Field | None = None
    stopped: bool = False

    def texts(self, kind: str) -> list[str]:
        """Return what the blocks of one kind say."""
        return [block.text for block in self.blocks if block.kind == kind]


class _Reader:
    """The order of events: start, blocks one after the other, delta, stop."""

    def __init__(self) -> None:
        self.said = MessageStream()
        self._is_open = False

    def take(self, event: Event) -> None:
        if event.data == DONE:
            raise Violation("a Messages stream has no [DONE]")
        body = event.json()
        kind = body["type"].word()
        if event.name != kind:
            raise Violation(f"event {event.number}: the event line says {event.name!r}, its data {kind!r}")
        if self.said.stopped or self.said.failure is not None:
            raise Violation(f"event {event.number} ({kind}) follows the end of the message")
        if kind == "error":
            check_error(body)
            self.said.failure = body["error"]
            return
        if kind == "ping":
            self._take_ping(body)
            return
        steps = {
            "message_start": self._start,
            "content_block_start": self._start_block,
            "content_block_delta": self._take_delta,
            "content_block_stop": self._stop_block,
            "message_delta": self._take_message_delta,
            "message_stop": self._stop,
        }
        if kind not in steps:
            raise Violation(f"event {event.number}: {kind!r} is no event of Messages")
        if kind != "message_start" and self.said.message is None:
            raise Violation(f"event {event.number}: {kind} before message_start")
        steps[kind](body)

    def _take_ping(self, body: Field) -> None:
        if self.said.message is None:
            raise Violation("a ping before message_start: the SDKs fail at once")
        if body.value != {"type": "ping"}:
            raise Violation(f'a ping is {{"type": "ping"}} and nothing more, not {body.shown}')

    def _start(self, body: Field) -> None:
        if self.said.message is not None:
            raise Violation("a second message_start")
        message = body["message"]
        check_message_head(message)
        if message["content"].items():
            raise Violation("message_start has content already")
        message.must_fit({"stop_reason": None, "stop_sequence": None, "usage": check_usage})
        self.said.message = message

    def _start_block(self, body: Field) -> None:
        if self._is_open:
            raise Violation(f"{body.path}: a block starts while the one before it is open")
        if self.said.delta is not None:
            raise Violation(f"{body.path}: a block after message_delta")
        if body["index"].count() != len(self.said.blocks):
            raise Violation(f"{body.path}.index is {body['index'].value}, {len(self.said.blocks)} is due")
        block = body["content_block"]
        kind = block["type"].word()
        block.must_fit(_STARTS.get(kind, {}))
        self.said.blocks.append(Block(kind, block))
        self._is_open = True

    def _take_delta(self, body: Field) -> None:
        block = self._open_block(body)
        delta = body["delta"]
        kind = delta["type"].word()
        if kind not in _DELTAS:
            raise Violation(f"{delta.path}.type {kind!r} is no delta of Messages")
        owner, member = _DELTAS[kind]
        if owner != block.kind:
            raise Violation(f"{delta.path}: a {kind} inside a block of kind {block.kind}")
        if kind == "citations_delta":
            return
        piece = delta[member].text()
        block.text += piece if kind != "signature_delta" else ""
        block.deltas += 1

    def _stop_block(self, body: Field) -> None:
        self._open_block(body)
        self._is_open = False

    def _open_block(self, body: Field) -> Block:
        if not self._is_open or body["index"].count() != len(self.said.blocks) - 1:
            raise Violation(f"{body.path}: block {body['index'].value} is not open")
        return self.said.blocks[-1]

    def _take_message_delta(self, body: Field) -> None:
        if self._is_open:
            raise Violation("message_delta while a block is open: its content_block_stop is missing")
        if self.said.delta is not None:
            raise Violation("a second message_delta")
        body["delta"]["stop_reason"].must_be(*STOP_REASONS)
        if (sequence := body["delta"]["stop_sequence"]).value is not None:
            sequence.text()
        body["usage"]["output_tokens"].count()
        # The last block of an answer that was cut off may end anywhere.
        whole = self.said.blocks[:-1] if body["delta"]["stop_reason"].value == "max_tokens" else self.said.blocks
        for block in whole:
            if block.kind == "tool_use":
                block.arguments()
        self.said.delta = body

    def _stop(self, body: Field) -> None:
        del body
        if self.said.delta is None:
            raise Violation("message_stop without a message_delta before it")
        self.said.stopped = True


def read_messages(stream: Stream) -> MessageStream:
    """Accumulate a stream. Raises Violation at the first event that breaks a client."""
    reader = _Reader()
    for event in stream.events:
        reader.take(event)
    return reader.said


def require_end(said: MessageStream) -> MessageStream:
    """Check that a stream ended as a good one does. Raises Violation."""
    if said.failure is not None:
        raise Violation(f"the stream says an error: {said.failure.shown}")
    if said.message is None:
        raise Violation("the stream has no message_start")
    if said.delta is None:
        raise Violation("the stream has no message_delta")
    if not said.stopped:
        raise Violation("the stream has no message_stop")
    return said


def check_message_head(message: Field) -> None:
    """Check the members that a whole message and a message_start share. Raises Violation."""
    message.must_fit({"type": "message", "role": "assistant", "model": Field.word, "id": Field.word})


def check_usage(usage: Field) -> None:
    """Check token counts of Messages. Raises Violation."""
    usage["input_tokens"].count()
    usage["output_tokens"].count()
    for name in ("cache_creation_input_tokens", "cache_read_input_tokens"):
        if (count := usage.get(name)) is not None:
            count.count()


def check_error(body: Field) -> None:
    """Check an error object of Messages. Raises Violation."""
    body.must_fit({"type": "error", "error.type": ERROR_TYPES, "error.message": Field.word})
