"""Event streams as engines send them, by dialect: shapes recorded from vLLM, llama.cpp, TabbyAPI, SGLang and TGI, made short.

Each is a list of events; the first one of those in ``closing`` is where its answer is whole. Several say in a text, in a tool's
arguments or in an echo what a closing event says: that closes nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any  # of JSON

from conformance.exchange import Stream

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
POOL_RESPONSES = "/v1/pool/responses"
DONE = b"data: [DONE]\n\n"
HEAD = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
SPOOF = '"finish_reason":"stop"}]} data: [DONE] {"type":"message_stop"} {"type":"response.completed"} {"error":"x"}'
"""Said by a model in its answer."""


@dataclass(frozen=True)
class RecordedStream:
    """One stream. ``closing``: the number of the event with which the answer is whole."""

    name: str
    path: str
    events: tuple[bytes, ...]
    closing: int

    @property
    def data(self) -> bytes:
        return b"".join(self.events)

    @property
    def whole_at(self) -> int:
        """How many bytes it takes until the closing event is there, its blank line not counted."""
        return sum(map(len, self.events[: self.closing])) + len(self.events[self.closing].rstrip(b"\r\n"))


def event(value: object, *, name: str = "", end: str = "\n", spaced: bool = False) -> bytes:
    """Return an event; ``spaced``: JSON as Python writes it."""
    separators = None if spaced else (",", ":")
    said = f"event: {name}{end}" if name else ""
    return f"{said}data: {json.dumps(value, separators=separators)}{end}{end}".encode()


def choice(text: str = "", finish: str | None = None, index: int = 0, **more: object) -> dict[str, object]:
    return {"index": index, "delta": {"content": text, **more}, "logprobs": None, "finish_reason": finish}


def chunk(*choices: dict[str, object], spaced: bool = False, end: str = "\n", **more: object) -> bytes:
    return event({**HEAD, "choices": list(choices), **more}, spaced=spaced, end=end)


def typed(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, name=kind)


USAGE: dict[str, Any] = {"usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}
_RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [], "error": None,
    "metadata": {"type": "response.completed"},
}  # fmt: skip
_LLAMA = {"created": 1, "id": "c-1", "model": "m", "object": "chat.completion.chunk"}
_OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": SPOOF}]}]


def _list_llama(text: str, finish: str | None) -> bytes:
    delta = {"content": text} if text else {}
    return event({"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], **_LLAMA})


STREAMS = (
    RecordedStream(
        "vLLM", CHAT,
        (
            chunk(choice(role="assistant")), chunk(choice(SPOOF)), chunk(choice("h\u00e9")),
            chunk(choice(finish="stop")), chunk(**USAGE), DONE,
        ), closing=3,
    ),
    RecordedStream(
        "llama.cpp", CHAT,
        (
            _list_llama("hi", None), b": ping\n\n", _list_llama("finish_reason", None), _list_llama("", "length"),
            event({"choices": [], **_LLAMA, **USAGE, "timings": {"prompt_ms": 1.5}}), DONE,
        ), closing=3,
    ),
    RecordedStream(
        "TabbyAPI, lines end in CRLF", CHAT,
        (
            chunk(choice("hi"), end="\r\n"), b": ping - 2026\r\n\r\n", chunk(choice(finish="stop"), end="\r\n"),
            b"data: [DONE]\r\n\r\n",
        ), closing=2,
    ),
    RecordedStream(
        "spaced, without [DONE]", CHAT,
        (chunk(choice("hi"), spaced=True), chunk(choice(finish="stop"), spaced=True)), closing=1,
    ),
    RecordedStream(
        "[DONE] alone", CHAT, (event({"choices": [{"delta": {"content": "hi"}}]}), chunk(choice("x"), **USAGE), DONE), 2
    ),
    RecordedStream(
        "a tool's arguments as an object", CHAT,
        (
            chunk(choice(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": {"finish_reason": "stop"}}}])),
            chunk(choice(finish="tool_calls")), DONE,
        ), closing=1,
    ),
    RecordedStream(
        "several answers", CHAT,
        (
            chunk(choice("a"), choice("b", index=1)), chunk(choice(finish="stop"), choice("c", index=1)),
            chunk(choice("d", index=1)),
        ),
        closing=1,
    ),
    RecordedStream(
        "vLLM", COMPLETIONS,
        (
            event({"object": "text_completion", "choices": [{"index": 0, "text": SPOOF, "finish_reason": None}]}),
            event({"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}), DONE,
        ), closing=1,
    ),
    RecordedStream(
        "vLLM", MESSAGES,
        (
            typed("message_start", message={"id": "msg_1", "role": "assistant", "content": [], "usage": {"input_tokens": 3}}),
            typed("content_block_start", index=0, content_block={"type": "text", "text": ""}), typed("ping"),
            typed("content_block_delta", index=0, delta={"type": "text_delta", "text": SPOOF}),
            typed("content_block_stop", index=0), typed("message_delta", delta={"stop_reason": "end_turn"}),
            typed("message_stop"),
        ), closing=6,
    ),
    *(
        RecordedStream(
            kind, RESPONSES,
            (
                typed("response.created", sequence_number=0, response={**_RESPONSE, "status": "in_progress"}),
                typed("response.output_text.delta", sequence_number=1, delta=SPOOF),
                typed("response.output_text.delta", sequence_number=2, delta="response.completed"),
                typed(kind, sequence_number=3, response={**_RESPONSE, "output": _OUTPUT}),
            ), closing=3,
        )
        for kind in ("response.completed", "response.incomplete")
    ),
    RecordedStream(
        "llm-pool", POOL_RESPONSES,
        (
            typed("response.created", response={"id": "resp_1", "object": "response", "output": []}),
            typed("response.output_text.delta", id="resp_1", delta="hi"),
            typed("response.completed", response={"id": "resp_1", "output_text": SPOOF}),
        ), closing=2,
    ),
)  # fmt: skip
"""Every dialect, whole. What is cut from them, and where, is up to the tests."""

FAILURES = {
    CHAT: (
        event({"error": {"message": "boom", "type": "x", "code": 500}}), event({"error": {"message": "boom"}}, spaced=True),
        event({"object": "error", "message": "boom", "code": 500}), event({"message": "boom"}, name="error"),
        event({**HEAD, "error": {"message": "boom"}, "choices": [choice(finish="error")]}), chunk(choice(finish="abort")),
    ),
    MESSAGES: (
        typed("error", error={"type": "api_error", "message": "boom"}),
        event({"type": "error", "error": {"type": "api_error", "message": "boom"}}),
    ),
    RESPONSES: (typed("response.failed", sequence_number=3, response={**_RESPONSE, "error": {"message": "boom"}}),),
    POOL_RESPONSES: (typed("error", id="resp_1", error={"code": "x", "message": "boom"}),),
}  # fmt: skip
"""Events with which engines say that an answer failed. FAILURES[CHAT] counts for completions too."""
BARE_ERRORS = (
    typed("error", code="server_error", message="boom", param=None, sequence_number=2),
    event({"error": {"message": "boom", "type": "x", "code": 500}}),
)
"""Of native Responses: no ending yet."""


def list_errors(path: str, said: Stream) -> list[int]:
    """Return the places of the events that tell a client of this dialect that its answer failed."""
    names = {MESSAGES: "error", RESPONSES: "response.failed", POOL_RESPONSES: "error"}
    found = []
    for event in said.events:
        body = {} if event.data == "[DONE]" else json.loads(event.data)
        if body["type"] in {"response.failed", "error"} if path in {RESPONSES, POOL_RESPONSES} else "error" in body:
            assert event.name == names.get(path, "")
            found.append(event.number)
    return found
