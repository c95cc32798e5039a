"""What a strict client makes of a Messages stream, written from the API reference and knowing nothing of the gateway.

``read_events`` cuts an event stream by the rules of WHATWG HTML 9.2.6; ``read_message`` holds it to the grammar that the SDKs
enforce and puts the message together. Both raise AssertionError naming what is wrong.
"""

from __future__ import annotations

import json
from typing import Any

Event = tuple[str, dict[str, Any]]  # Any: JSON

_STARTS: dict[str, dict[str, object]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_FILLS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("thinking", "signature"),
    "input_json_delta": ("tool_use", "partial_json"),
}
_STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"}


def read_events(data: bytes) -> list[Event]:
    """Return name and data of every event; each must be whole, named, and of the type that it is named for."""
    found: list[Event] = []
    assert data == b"" or data.endswith(b"\n\n"), f"the stream ends within an event: {data[-60:]!r}"
    for event in data.split(b"\n\n")[:-1]:
        lines = event.split(b"\n")
        assert len(lines) == 2, f"not one event and one data line: {event!r}"
        assert lines[0].startswith(b"event: "), f"an event without its name: {event!r}"
        assert lines[1].startswith(b"data: "), f"an event without data: {event!r}"
        name, value = lines[0][7:].decode(), json.loads(lines[1][6:])
        assert value["type"] == name, f"{name} carries {value['type']}"
        found.append((name, value))
    return found


def read_message(data: bytes, *, is_whole: bool = True) -> dict[str, Any]:
    """Return the message of a stream: with ``is_whole`` up to ``message_stop``, else as far as it came.

    Inputs of tools are parsed where their text is whole JSON, else they stay text.
    """
    events = read_events(data)
    assert events, "no events"
    message = _read_start(events[0])
    is_open = False
    names = [name for name, _ in events]
    for position, (name, value) in enumerate(events[1:], 1):
        match name:
            case "content_block_start":
                assert not is_open, "a block within a block"
                assert value["index"] == len(message["content"]), "the index of a block does not count up"
                message["content"].append(_read_block_start(value["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open, "a delta outside of a block"
                assert value["index"] == len(message["content"]) - 1, "a delta of another block"
                _fill(message["content"][-1], value["delta"])
            case "content_block_stop":
                assert is_open, "the end of a block that is not open"
                assert value["index"] == len(message["content"]) - 1, "the end of another block"
                _close(message["content"][-1])
                is_open = False
            case "message_delta":
                assert not is_open, "the end of a message within a block"
                assert names[position + 1 :] == ["message_stop"], "message_delta is not followed by message_stop alone"
                _read_end(message, value)
            case "message_stop":
                assert position == len(events) - 1, "events after message_stop"
                assert message["stop_reason"] in _STOP_REASONS, "message_stop without a reason"
            case _:
                raise AssertionError(f"an event of another surface: {name}")
    assert names[-1] == "message_stop" if is_whole else "message_stop" not in names
    return message


def _read_start(event: Event) -> dict[str, Any]:
    name, value = event
    assert name == "message_start", f"the first event is {name}"
    message: dict[str, Any] = value["message"]
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    assert isinstance(message["model"], str)
    _check_usage(message["usage"])
    return message


def _read_block_start(block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] == "tool_use":
        assert block["input"] == {}
        assert isinstance(block["id"], str)
        assert block["id"]
        assert isinstance(block["name"], str)
        assert block["name"]
        return {**block, "input": ""}
    assert block == _STARTS[block["type"]]
    return dict(block)


def _fill(block: dict[str, Any], delta: dict[str, Any]) -> None:
    kind, key = _FILLS[delta["type"]]
    assert block["type"] == kind, f"a {delta['type']} in a block of {block['type']}"
    assert set(delta) == {"type", key}
    block["input" if kind == "tool_use" else key] += delta[key]


def _close(block: dict[str, Any]) -> None:
    if block["type"] == "tool_use":
        try:
            block["input"] = json.loads(block["input"])
        except json.JSONDecodeError:
            return
        assert isinstance(block["input"], dict), "the input of a tool is no object"
    if block["type"] == "thinking":
        assert block["signature"], "a thinking block without a signature"


def _read_end(message: dict[str, Any], value: dict[str, Any]) -> None:
    assert set(value["delta"]) == {"stop_reason", "stop_sequence"}
    _check_usage(value["usage"])
    message |= value["delta"]
    message["usage"] |= value["usage"]


def _check_usage(usage: dict[str, Any]) -> None:
    for name in ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"):
        assert type(usage[name]) is int, f"usage.{name} is no number"
        assert usage[name] >= 0
