"""What a number in a request may be, by endpoint, and how much a value may hold: beyond it gateway and node refuse. Pure.

An engine would serve the request with some other number, or with noise, and nobody would be told. A number that an original
takes stands here with the original's bound; where an original names none, neither does this table.

Sources: OpenAI API reference, "Create chat completion", "Create completion", "Create a model response"; Anthropic API
reference, "Create a Message".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from wire.limits import WIRE
from wire.unreadable import UNREADABLE

Bound = tuple[float, float | None]
"""Lowest and highest value, both allowed; None = no highest one that we know of, a model's own cap aside."""

_SAMPLING: dict[str, Bound] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}

BOUNDS: Mapping[str, Mapping[str, Bound]] = MappingProxyType({
    "/v1/chat/completions": {
        **_SAMPLING, "max_tokens": (1, None), "max_completion_tokens": (1, None), "n": (1, 128), "top_logprobs": (0, 20),
    },
    # Zero tokens are a question here: with ``echo`` the answer is how likely the prompt is.
    "/v1/completions": {**_SAMPLING, "max_tokens": (0, None), "n": (1, 128)},
    # OpenAI's least is 16; one token is what tests of clients ask local engines for, and it can be given.
    "/v1/responses": {**_SAMPLING, "max_output_tokens": (1, None), "top_logprobs": (0, 20)},
    # Anthropic takes 0 to warm its cache, which no engine here can do without making a token.
    "/v1/messages": {"temperature": (0, 1), "top_p": (0, 1), "top_k": (0, None), "max_tokens": (1, None)},
})  # fmt: skip


def find_out_of_bounds(endpoint: str, fields: Mapping[str, object]) -> tuple[str, str] | None:
    """Return the first field whose number the endpoint does not take, and the sentence that says so; None when all are fine.

    ``fields``: decoded JSON values by name; what is no number is somebody else's to refuse.
    """
    bounds = BOUNDS.get(endpoint, {})
    for name in fields:
        if name not in bounds:
            continue
        (lowest, highest), value = bounds[name], fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < lowest or (highest is not None and value > highest):
            wanted = f"at least {lowest:g}" if highest is None else f"between {lowest:g} and {highest:g}"
            return name, f"The field '{name}' must be {wanted}; it is {str(value)[:20]}."
    return None


_TURNS = ("messages", "input")
_Within = tuple[tuple[bytes, int], ...]
_OF_SHAPES: _Within = ((b":", WIRE.shape_members), (b",", WIRE.shape_choices))
_SHAPES = ("response_format", "json_schema", "text", "output_config", "output_format", "guided_json", "structured_outputs")
# How many entries any object (``:``) or list (``,``) may have within a field.
_BOUNDS_WITHIN: dict[str, _Within] = {
    "logit_bias": ((b":", WIRE.body_biases), (b",", WIRE.body_biases)),
    "dry_sequence_breakers": ((b",", WIRE.body_breakers),),
    "tools": ((b",", WIRE.shape_choices),),
    **dict.fromkeys(_SHAPES, _OF_SHAPES),
}
_PATTERN = re.compile(rb'"pattern"[ \t\r\n]*+:[ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_LITERAL = r"\\.|\(\?|\[[^\]\\]*+(?:\\.[^\]\\]*+)*+\]?+"
_NOT_REPEATED = re.compile(_LITERAL, re.DOTALL)
_NOT_REPEATED_IN_GRAMMAR = re.compile(_LITERAL + r'|"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|#[^\n]*+', re.DOTALL)
# What may repeat, each of them perhaps escaped.
_REPEATS = (b"*", b"+", b"?", b"{", b"\\")
_DULL = bytes(set(range(256)) - set(b'":,*+?{\\'))
_QUIET = bytes(set(range(256)) - set(b",*+?{\\"))
# A body with fewer commas and repetitions together has fewer of both than is refused.
_LEAST = min(WIRE.body_breakers - 1, WIRE.shape_repeats)
_OBJECT = re.compile(rb"[ \t\r\n]*+\{")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_LONG_NUMBER = re.compile(rb"(?:[:\[,][ \t\r\n]*+|\A[ \t\r\n]*+)([-0-9][-+.0-9eE]{%d,})" % WIRE.body_number_chars)
_SAMPLE = slice(None, None, 25)
# Of a sample of the bytes: a long number is at least so many of them in a row, and next to no text is.
_LONG_RUN = re.compile(rb"[-+.0-9eE]{%d}" % (WIRE.body_number_chars // _SAMPLE.step))
_BLANK_COLON = re.compile(rb'"[ \t\r\n]++:')
_COLON, _OPENING = ord(":"), b"{["
_NO_MARKS = bytes(set(range(256)) - set(b"{}[]:"))
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def find_crowd(body: bytes) -> tuple[str | None, str] | None:
    """Return the first field (None = the body itself) that holds more than an engine reads in time, and the sentence about it.

    Time is linear in the size of the body; nothing is built but its fields and those whose lists are bounded. What is no JSON
    object passes: its reader says why. Each bound stands where the cost of llama.cpp was measured to grow faster than the body.
    """
    has_long = (
        len(body) > WIRE.body_number_chars
        and _LONG_RUN.search(body[_SAMPLE]) is not None
        and _LONG_NUMBER.search(body) is not None
    )
    if (not has_long and len(body.translate(None, _QUIET)) <= _LEAST) or _OBJECT.match(body) is None:
        return None  # short requests end here
    marks = body.translate(None, _DULL)
    if not has_long and marks.count(b",") < WIRE.body_breakers and sum(map(marks.count, _REPEATS)) <= WIRE.shape_repeats:
        return None  # the least of the bounds
    try:
        # The decoder goes first: it refuses what is nested deeper than anybody reads, before a scan looks at it.
        fields = _fields_decoder.decode(body)
        has_many = marks.count(b'":') > WIRE.body_members < _count_names(body)
        if has_many:
            top, most = _count_members(body)
            if top > WIRE.body_members:
                return None, f"The request body has {top} fields; send at most {WIRE.body_members}."
            has_many = most > WIRE.body_members
        for name, raw in fields.items():
            sentence = _find_fault(name, bytes(raw), has_many=has_many, has_long=has_long)
            if sentence:
                return name[:80], f"The field '{name[:80]}' {sentence}."
    except UNREADABLE:
        return None
    return None


def _find_fault(name: str, raw: bytes, *, has_many: bool, has_long: bool) -> str:
    """Return the end of the sentence about a field with too much in it, nothing where all is fine. Raises DecodeError."""
    if has_long and (long := _LONG_NUMBER.search(_STRING.sub(b'""', raw))) is not None:
        return f"holds a number of {len(long[1])} characters; a number may have at most {WIRE.body_number_chars}"
    if name in _TURNS and raw.startswith(b"[") and raw.count(b"{") > WIRE.body_turns:
        items = _items_decoder.decode(raw)
        # A list of texts or of tokens is no list of turns: engines read those one by one.
        if len(items) > WIRE.body_turns and bytes(items[0]).startswith(b"{"):
            return f"has {len(items)} entries; send at most {WIRE.body_turns}, and sum up what came before"
    if (most := _count_repeats(name, raw)) > WIRE.shape_repeats:
        what = "rule" if name == "grammar" else "pattern"
        return f"holds a {what} with {most} repetitions (*, +, ? or {{}}); one {what} may have at most {WIRE.shape_repeats}"
    for between, highest in _BOUNDS_WITHIN.get(name, ()):
        if raw.count(between) < highest:
            continue
        is_list = between == b","
        if (most := _find_longest(raw) if is_list else _count_members(raw)[1]) > highest:
            what = "a list of" if is_list else "an object with"
            return f"holds {what} {most} entries; it may have at most {highest}"
    if has_many and (most := _count_members(raw)[1]) > WIRE.body_members:
        return f"holds an object with {most} members; one object may have at most {WIRE.body_members}"
    return ""


def _count_repeats(name: str, raw: bytes) -> int:
    """Return the most repetitions that one rule of a grammar or one pattern of a shape has. Raises DecodeError."""
    if name == "grammar":
        texts = (
            _NOT_REPEATED_IN_GRAMMAR.sub("", msgspec.json.decode(raw, type=str)).split("::=") if raw.startswith(b'"') else []
        )
    elif name in _SHAPES or name == "tools":
        texts = [_NOT_REPEATED.sub("", msgspec.json.decode(found, type=str)) for found in _PATTERN.findall(raw)]
    else:
        return 0
    return max((sum(map(text.count, "*+?{")) for text in texts), default=0)


def _count_names(body: bytes) -> int:
    """Return how many names of members there are at most: what texts quote counts in part, so that no text has to be read."""
    # A name ends with a quote, and blanks perhaps, before its colon. A quote within a text has a backslash before it, which
    # two backslashes at the end of a name look like.
    within = body.count(b'\\":') - body.count(b'\\\\":')
    return body.count(b'":') - within + len(_BLANK_COLON.findall(body))


def _find_longest(raw: bytes) -> int:
    """Return how many entries the longest list in a value has. Raises DecodeError."""
    longest, left = 0, [msgspec.json.decode(raw)]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            longest = max(longest, len(value))
            left += value
    return longest


def _count_members(text: bytes) -> tuple[int, int]:
    """Return how many members the outermost value has, and the most of any object in it. A name that is given twice is two."""
    top = most = count = 0
    waiting: list[int] = []
    for mark in _STRING.sub(b"", text).translate(None, _NO_MARKS):
        if mark == _COLON:
            count += 1
        elif mark in _OPENING:
            waiting.append(count)
            count = 0
        else:
            most = max(most, count)
            top = count if len(waiting) == 1 else top
            count = waiting.pop() if waiting else 0
    return top, most
