"""Bodies that nobody means well with: whatever they hold, a 4xx names the field, and the event loop goes on at once."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from gateway.dialects import SURFACES
from gateway.dialects.body import read_fields
from gateway.dialects.crowding import MAX_MARKS, is_crowded
from gateway.errors import BadRequest, BodyTooLarge, GatewayError
from gateway.values import InferenceRequest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HELLO = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'


def parse(path: str, body: bytes) -> InferenceRequest:
    """Read a body as the pipeline does, and translate it where there is something to translate."""
    surface = SURFACES[path]
    request = surface.parse(body, {"content-type": "application/json"})
    if surface.translate is not None:
        surface.translate(request)
    return surface.rename(request, "other")


def refuse(path: str, body: bytes) -> GatewayError:
    """Return the refusal of a body."""
    with pytest.raises(GatewayError) as caught:
        parse(path, body)
    assert 400 <= caught.value.status < 500
    assert len(caught.value.message) < 600
    assert len(caught.value.param or "") < 200
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(HELLO + b',"\xff":1}', id="in a key"),
        pytest.param(HELLO + b',"a":"\xff"}', id="in a field we do not read"),
        pytest.param(b'{"model":"m","messages":[{"role":"user","content":"\xed\xa0\x80"}]}', id="a surrogate in a text"),
        pytest.param(HELLO + b',"a":1, "a":2, "n":"\xff"}', id="beside a key that is given twice"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_bytes_that_are_not_utf8_are_refused(path: str, body: bytes) -> None:
    assert "not UTF-8" in refuse(path, body).message


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(b'"n":' + b"9" * 5000, id="a number of 5000 digits"),
        pytest.param(b'"n":' + b"[" * 900 + b"]" * 900, id="nearly as deep as a parser goes"),
        pytest.param(b'"n":1e999', id="a number out of range"),
    ],
)
def test_a_key_in_another_spelling_is_compared_whatever_stands_beside_it(rest: bytes) -> None:
    assert "n" in read_fields(HELLO + b',"\\u0061":1,' + rest + b"}")
    with pytest.raises(BadRequest) as caught:
        read_fields(HELLO + b',"\\u0061":1,"a":2,' + rest + b"}")
    assert caught.value.param == "a"


@pytest.mark.parametrize("levels", [900, 985, 990, 995, 1000, 100_000])
@pytest.mark.parametrize("field", ["messages", "input", "tools", "system", "metadata", "text", "x_pool_options", "anything"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_no_depth_makes_a_surface_raise_anything_but_a_refusal(path: str, field: str, levels: int) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "input": "a"}
    body.pop(field, None)
    for opening, middle, closing in (("[", "", "]"), ('{"a":', "1", "}")):
        value = opening * levels + middle + closing * levels
        error = find_refusal(path, f'{json.dumps(body)[:-1]},"{field}":{value}}}'.encode())
        assert error is None or error.status == 400


def find_refusal(path: str, body: bytes) -> GatewayError | None:
    """Return how a body is refused; whatever else it makes a surface raise is raised."""
    try:
        parse(path, body)
    except GatewayError as error:
        return error
    return None


def crowd(before: bytes, piece: bytes, after: bytes, *, size_bytes: int = 8_000_000) -> bytes:
    """Return a body of about that size that is nearly all ``piece``."""
    return before + piece * (size_bytes // len(piece)) + after


CROWDS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "lists among the tools": lambda: (CHAT, crowd(HELLO + b',"tools":[', b"[],", b"1]}")),
    "lists of lists": lambda: (CHAT, crowd(HELLO + b',"tools":[', b"[[[[[]]]]],", b"1]}")),
    "messages": lambda: (CHAT, crowd(b'{"model":"m","messages":[', b'{"role":"a"},', b"{}]}")),
    "blocks": lambda: (
        MESSAGES,
        crowd(
            b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[',
            b'{"type":"text","text":""},',
            b'{"type":"a"}]}]}',
        ),
    ),
    "items": lambda: (RESPONSES, crowd(b'{"model":"m","input":[', b'{"role":"user","content":""},', b"{}]}")),
    "fields": lambda: (CHAT, HELLO + b"".join(b',"k%d":1' % n for n in range(700_000)) + b"}"),
    "texts": lambda: (RESPONSES, crowd(b'{"model":"m","input":[', b'"",', b"1]}")),
    "a key in another spelling": lambda: (CHAT, crowd(HELLO + b',"\\u0061":[', b"[],", b"1]}")),
}  # fmt: skip


@pytest.mark.parametrize("name", CROWDS)
def test_a_body_with_millions_of_values_is_refused_before_they_are_built(name: str) -> None:
    path, body = CROWDS[name]()
    assert isinstance(refuse(path, body), BodyTooLarge)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            crowd(b'{"model":"m","messages":[{"role":"user","content":"', b'1,2,[{ \\"', b'"}]}'), id="a text full of commas"
        ),
        pytest.param(crowd(b'{"model":"m","prompt":"x","messages":[{"a":"', b"A", b'"}]}'), id="a picture"),
        pytest.param(
            crowd(b'{"model":"m","messages":[{}],"input":[', b"1234,", b"1]}", size_bytes=1_500_000), id="300,000 tokens"
        ),
    ],
)  # fmt: skip
def test_a_large_body_of_few_values_passes(body: bytes) -> None:
    assert not is_crowded(body)
    assert parse(CHAT, body).model == "other"


def test_the_bound_is_counted_outside_of_strings_only() -> None:
    marks = b"[" + b"0," * MAX_MARKS + b"0]"
    assert not is_crowded(b"[" + marks[7:])
    assert is_crowded(marks)
    assert is_crowded(b'["\\\\",' + marks + b"]")
    assert not is_crowded(b'["' + marks + b'"]')
    assert not is_crowded(b'["\\"' + marks)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, HELLO + b',"x_pool_options":{"priority":"at `$.evil`%b"}}' % (b"z" * 2000), "x_pool_options.priority"),
        (CHAT, HELLO + b',"x_pool_options":{"fallback_models":["%b"]}}' % (b"z" * 2000), "x_pool_options.fallback_models"),
        (CHAT, HELLO + b',"x_pool_options":{"fallback_models":["a\\nb"]}}', "x_pool_options.fallback_models"),
        (RESPONSES, b'{"model":"m","input":"x","decoding":{"%b":1}}' % (b"k" * 2000), None),
        (RESPONSES, b'{"model":"m","input":"x","decoding":{" - at `$.evil`":1}}', "decoding. - at `$.evil`"),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"a"}],"max_tokens":' + b"9" * 5000 + b"}", "max_tokens"),
    ],
)
def test_what_a_client_wrote_is_not_said_back_at_length(path: str, body: bytes, param: str | None) -> None:
    error = refuse(path, body)
    if param is not None:
        assert error.param == param
