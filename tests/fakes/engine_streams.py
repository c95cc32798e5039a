"""Chat streams of engines that have lost their way: good chunks spoilt, cut anywhere, repeated, and answers without end."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any  # chunks are JSON

_JSON_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 2**200, 0.5, -0.0, 1e308, "", "x", "\x00", "\ud800", "é" * 3, "a" * 5000,
    "data:x", "\r\nx: y", [], {}, [[]], [None], [1, "a", {}], {"": {}}, {"type": "text"}, {"type": None}, {"type": 5},
    {"text": "x"}, "text", "user", "assistant", "tool_use", "{", "[", "json_schema", "message", "function_call",
    "item_reference", "reasoning", "custom", "namespace", "stop", "error",
)  # fmt: skip
_KEYS = ("type", "role", "content", "id", "name", "tools", "text", "source", "input", "call_id", "", "\x00", "k" * 3000)
_BYTES = (
    b"", b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"\\", b"{", b"[", b"]", b"}", b",", b":", b"9" * 400, b"NaN", b"\r\n", b"//",
)  # fmt: skip


def list_places(value: object) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from list_places(inner)


def spoil_tree(rng: random.Random, tree: object, *, values: Sequence[object] = _JSON_VALUES, most: int = 3) -> None:
    """Change up to ``most`` places of a tree: a value of another type, one from elsewhere, twice, or not at all."""
    for _ in range(rng.randint(1, most)):
        places = list(list_places(tree))
        if not places:
            return
        holder, key = rng.choice(places)
        action = rng.random()
        if action < 0.15:
            del holder[key]
        elif action < 0.25 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif action < 0.35:
            other, place = rng.choice(places)
            if isinstance(other, list | dict):
                holder[key] = copy.deepcopy(other[place])
        elif action < 0.45 and isinstance(holder, dict):
            holder[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(values))
        else:
            holder[key] = copy.deepcopy(rng.choice(values))


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return a text with a few bytes put in, taken out, doubled, or cut off."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        action = rng.random()
        if action < 0.5:
            data = data[:at] + rng.choice(_BYTES) + data[at + rng.choice([0, 1]) :]
        elif action < 0.7:
            data = data[:at] + data[at + rng.randrange(1, 40) :]
        elif action < 0.85:
            data = data[:at] + data[max(0, at - rng.randrange(1, 60)) :]
        else:
            data = data[:at]
    return data


def spoil_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    body = copy.deepcopy(body)
    if rng.random() < 0.8:
        spoil_tree(rng, body)
    layout = rng.choice([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
    data = json.dumps(body, separators=layout, ensure_ascii=True).encode()
    return spoil_bytes(rng, data) if rng.random() < 0.3 else data


Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more})


def call(index: int | None, **function: str) -> Json:
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]}


def _continue(arguments: str) -> Json:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}]}


GOOD: list[Json] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "hello"}, "logprobs": {"content": [{"token": "hello", "logprob": -1}]}}]},
    {"choices": [{"index": 0, "delta": call(0, name="f", arguments="")}]},
    _continue('{"a":'),
    _continue("1}"),
    {"choices": [{"index": 0, "delta": call(1, name="g", arguments='{"input":"x"}')}]},
    {"choices": [{"index": 0, "delta": {"refusal": "no"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": "END"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
]
VALUES: tuple[object, ...] = (
    None, True, 0, -1, 2**31, 2**60, 2**63, 2**70, 10**400, 0.5, "", "x", "\x00", "\x7f\u2028", "data: [DONE]", '"}', "{",
    "é" * 400, [], [[]], [None], {}, {"": {}}, {"type": "text"}, "stop", "length", "error", "abort", "assistant",
)  # fmt: skip
_LINES = [
    b"\n", b"\n\n", b"\r", b"\r\n\r\n", b": ping\n\n", b"event: error\n", b"id: 1\n", b"data:\n\n", b"data: {}\n\n", b"\xff",
    DONE, b"data: null\n\n", b"data: [1]\n\n", b'data: {"error":null}\n\n', b'data: {"error":{"code":2e9}}\n\n',
    b'data: {"object":"error","message":"no"}\n\n', b"<html>busy</html>",
]  # fmt: skip


def spoil_stream(rng: random.Random) -> list[bytes]:
    chunks = copy.deepcopy(GOOD)
    if rng.random() < 0.8:
        spoil_tree(rng, chunks, values=VALUES)
    events = [event(content) for content in chunks] + [DONE] * rng.randint(0, 2)
    for _ in range(rng.choice([0, 0, 1, 2])):
        events.insert(rng.randrange(len(events) + 1), rng.choice(_LINES))
    if rng.random() < 0.2:
        rng.shuffle(events)
    stream = b"".join(events)
    if rng.random() < 0.3:
        stream = stream[: rng.randrange(len(stream) + 1)]
    if rng.random() < 0.2:
        stream = stream.replace(b"\n", rng.choice([b"\r\n", b"\r"]))
    if rng.random() < 0.2 and stream:
        at = rng.randrange(len(stream))
        stream = stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 1, 5, 40])))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if start < end]


def spoil_answer(rng: random.Random) -> tuple[int, str, list[bytes]]:
    """Return status, type and pieces of an answer that is no stream, and was good or an honest error once."""
    message = {"role": "assistant", "content": "hi", "reasoning": "hm", **call(0, name="f", arguments="{}")}
    answer: Json = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": GOOD[-1]["usage"]}
    status = rng.choice([200] * 6 + [201, 204, 302, 400, 404, 418, 422, 429, 500, 503, 599])
    if status >= 400:
        error = {
            "message": "This model's maximum context length is 5 tokens, not 9", "type": "x", "code": status, "param": None,
        }  # fmt: skip
        answer = rng.choice([{"error": error}, {"object": "error", **error}, {"detail": [error]}, {"error": "no"}])
    if rng.random() < 0.8:
        spoil_tree(rng, answer, values=VALUES)
    data = json.dumps(answer).encode()
    if rng.random() < 0.3:
        data = rng.choice([b"", b"\xff" * 9, b"<html><script>x</html>", b"null", data[: rng.randrange(len(data))], data + data])
    half = rng.randrange(len(data) + 1)
    content_type = "application/json" if rng.random() < 0.8 else rng.choice(["", "text/html", "text/event-stream", "a/b\x00"])
    return status, content_type, [piece for piece in (data[:half], data[half:]) if piece]


def _one_by_one(stream: bytes) -> Iterator[bytes]:
    return (stream[at : at + 1] for at in range(len(stream)))


def _in_one_event(count: int) -> bytes:
    return chunk({"tool_calls": [call(n, name="f", arguments="{}")["tool_calls"][0] for n in range(count)]})


FLOODS: dict[str, Callable[[], Iterable[bytes]]] = {
    "an event without an end, byte by byte": lambda: _one_by_one(b"data: " + b"x" * 260_000),
    "a comment without an end, byte by byte": lambda: _one_by_one(b":" * 260_000),
    "line ends": lambda: [b"\r" * 1_000_000, b"\n" * 1_000_000] * 4,
    "data lines of one event": lambda: [b"data: {}\n" * 50_000] * 10,
    "an event larger than any": lambda: [b'data: {"choices":[{"delta":{"content":"', *[b"a" * 65_536] * 600],
    "calls, one an event": lambda: (chunk(call(n, name="f", arguments="{}")) for n in range(30_000)),
    "calls that wait for the first": lambda: (chunk(call(n, name="f")) for n in range(30_000)),
    "calls in one event": lambda: [_in_one_event(40_000)],
    "pieces of calls that never get a name": lambda: (chunk(call(n, arguments="{")) for n in range(30_000)),
    "a million empty calls": lambda: [b'data: {"choices":[{"delta":{"tool_calls":[' + b"{}," * 1_000_000 + b"{}]}}]}\n\n"],
    "a million empty choices": lambda: [b'data: {"choices":[' + b"{}," * 1_000_000 + b"{}]}\n\n"],
    "a million lists": lambda: [b'data: {"choices":[{"delta":{},"logprobs":[' + b"[]," * 1_000_000 + b"[]]}]}\n\n"],
}
"""Streams that no answer comes of, and that may cost no more than their bytes."""
