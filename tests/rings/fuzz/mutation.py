"""Spoiling what was good: values of a JSON tree, and bytes of any text. All chance comes from a generator that is handed in."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any  # JSON trees

VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 2**200, 0.5, -0.0, 1e308, "", "x", "\x00", "\ud800", "é" * 3, "a" * 5000,
    "data:x", "\r\nx: y", [], {}, [[]], [None], [1, "a", {}], {"": {}}, {"type": "text"}, {"type": None}, {"type": 5},
    {"text": "x"}, "text", "user", "assistant", "tool_use", "{", "[", "json_schema", "message", "function_call",
    "item_reference", "reasoning", "custom", "namespace", "stop", "error",
)  # fmt: skip
_KEYS = ("type", "role", "content", "id", "name", "tools", "text", "source", "input", "call_id", "", "\x00", "k" * 3000)
_BYTES = (
    b"",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b'"',
    b"\\",
    b"{",
    b"[",
    b"]",
    b"}",
    b",",
    b":",
    b"9" * 400,
    b"NaN",
    b"\r\n",
    b"//",
)


def list_places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from list_places(inner)


def spoil_tree(rng: random.Random, tree: object, *, values: Sequence[object] = VALUES, most: int = 3) -> None:
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
    """Return a request body that was good once, as bytes."""
    body = copy.deepcopy(body)
    if rng.random() < 0.8:
        spoil_tree(rng, body)
    layout = rng.choice([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
    data = json.dumps(body, separators=layout, ensure_ascii=True).encode()
    return spoil_bytes(rng, data) if rng.random() < 0.3 else data
