"""Multipart forms: what is read of them, what is refused, and that no form takes long."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import SURFACES
from gateway.errors import BadRequest
from gateway.values import InferenceRequest
from nodes.states import BINARY_ENDPOINTS

AUDIO = "/v1/audio/transcriptions"
EDGE = "----edge"
MEGABYTE = 1024 * 1024
Part = tuple[str, bytes]


def field(name: str, value: str | bytes) -> Part:
    return f'form-data; name="{name}"', value if isinstance(value, bytes) else value.encode()


def file(data: bytes = b"RIFF", name: str = "file") -> Part:
    return f'form-data; name="{name}"; filename="a.wav"', data


def form(*parts: Part, edge: str = EDGE, headers: str = "") -> bytes:
    pieces = [f"--{edge}\r\nContent-Disposition: {head}\r\n{headers}\r\n".encode() + data + b"\r\n" for head, data in parts]
    return b"".join(pieces) + f"--{edge}--\r\n".encode()


def parse(body: bytes, content_type: str = f"multipart/form-data; boundary={EDGE}", path: str = AUDIO) -> InferenceRequest:
    return SURFACES[path].parse(body, {"content-type": content_type})


def refuse(body: bytes, content_type: str = f"multipart/form-data; boundary={EDGE}") -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(body, content_type)
    assert (caught.value.status, caught.value.code) == (400, "BAD_REQUEST")
    return caught.value


def test_the_forms_are_exactly_what_text_links_cannot_carry() -> None:
    assert {path for path, surface in SURFACES.items() if surface.is_form} == BINARY_ENDPOINTS


@pytest.mark.parametrize("path", sorted(BINARY_ENDPOINTS))
def test_what_policy_needs_is_read_and_the_bytes_stay_as_they_are(path: str) -> None:
    body = form(file(bytes(range(256)) * 9), field("model", "whisper"), field("language", "de"))
    request = parse(body, path=path)
    assert request.body is body
    assert (request.model, request.is_streaming, request.prompt_chars, request.max_tokens) == ("whisper", False, 0, None)
    assert (request.endpoint, request.headers) == (path, {"content-type": f"multipart/form-data; boundary={EDGE}"})


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_fields_come_in_any_order(order: Sequence[int]) -> None:
    parts = [file(), field("model", "m"), field("stream", "true")]
    request = parse(form(*(parts[index] for index in order)))
    assert (request.model, request.is_streaming) == ("m", True)


@pytest.mark.parametrize(
    ("text", "streams"), [("true", True), ("True", True), ("1", True), ("false", False), ("0", False), ("", False)]
)
def test_stream_is_read_as_forms_write_it(text: str, streams: bool) -> None:
    assert parse(form(file(), field("model", "m"), field("stream", text))).is_streaming is streams


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([file()], "model"),
        ([file(), field("model", "")], "model"),
        ([file(), field("model", "x" * 201)], "model"),
        ([file(), field("model", "x" * 5000)], "model"),
        ([file(), field("model", "a\x00b")], "model"),
        ([file(), field("model", b"\xff\xfe")], "model"),
        ([file(), field("model", "a"), field("model", "b")], "model"),
        ([file(), field("model", "a"), file(name="model")], "model"),
        ([file(), ('form-data; name="model"; filename=""', b"m")], "model"),
        ([file(), field("model", "m"), field("stream", "maybe")], "stream"),
        ([file(), field("model", "m"), field("stream", "true"), field("stream", "false")], "stream"),
        ([field("model", "m")], "file"),
        ([field("model", "m"), field("file", "not a file")], "file"),
    ],
)
def test_a_bad_form_names_the_field(parts: list[Part], param: str) -> None:
    assert refuse(form(*parts)).param == param


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/mixed; boundary=x",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 300,
        "x" * 9000,
    ],
)
def test_a_body_that_is_no_form_is_refused(content_type: str) -> None:
    assert "multipart/form-data" in refuse(form(file(), field("model", "m")), content_type).message


GOOD = form(file(b"x" * 100), field("model", "m"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b'{"model":"m"}',
        GOOD[:-6],
        GOOD[: len(GOOD) // 2],
        GOOD.replace(b"--" + EDGE.encode(), b"--other", 1),
        GOOD.replace(b"form-data; name=", b"form-data; nam="),
        GOOD.replace(b"form-data", b"attachment"),
        GOOD.replace(b"Content-Disposition", b"Content Disposition"),
        form(file(), field("model", "m"), headers='Content-Disposition: form-data; name="x"\r\n'),
        form(file(), field("model", "m"), headers="X-Long: " + "x" * 10_000 + "\r\n"),
        form(file(), field("model", "m"), headers="X: y\r\n" * 50),
        form(*[field(f"f{number}", "x") for number in range(500)], field("model", "m"), file()),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_malformed_form_is_refused(body: bytes) -> None:
    refuse(body)


def test_a_quoted_boundary_and_an_epilogue_are_fine() -> None:
    body = form(file(), field("model", "m"), edge="a b:c") + b"epilogue\r\n"
    assert parse(body, 'multipart/form-data; charset=utf-8; boundary="a b:c"').model == "m"


def test_what_looks_like_a_form_inside_of_a_file_is_not_read() -> None:
    inner = form(field("model", "smuggled"), edge="inner")
    assert parse(form(file(inner), field("model", "real"))).model == "real"


@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_are_read_or_refused(noise: bytes, at: int) -> None:
    for body in (noise, GOOD[:at] + noise + GOOD[at:], GOOD[:at] + noise):
        try:
            assert parse(body).model
        except BadRequest:
            pass


@given(st.binary(max_size=2000).filter(lambda data: EDGE.encode() not in data))
def test_any_file_travels(data: bytes) -> None:
    assert parse(form(file(data), field("model", "m"))).model == "m"


@pytest.mark.parametrize(
    "body",
    [
        form(file(b"\r\n--" * (4 * MEGABYTE)), field("model", "m")),
        form(file(b"\r" * (16 * MEGABYTE)), field("model", "m")),
        form(file((b"\r\n--" + EDGE.encode() + b"x") * MEGABYTE), field("model", "m")),
        GOOD[:-4] + b" " * (16 * MEGABYTE),
        f"--{EDGE}".encode() + b" " * (16 * MEGABYTE),
        b"\r\n" * (8 * MEGABYTE) + GOOD,
        b"-" * (16 * MEGABYTE),
        f"--{EDGE}\r\n".encode() + b"x" * (16 * MEGABYTE),
        f"--{EDGE}\r\nX:".encode() + b" " * (16 * MEGABYTE),
    ],
    ids=["dashes", "returns", "near misses", "padding", "first padding", "blank lines", "no start", "header", "value"],
)
def test_no_form_keeps_the_gateway_busy(body: bytes) -> None:
    began = time.process_time()
    try:
        parse(body)
    except BadRequest:
        pass
    assert time.process_time() - began < 20.0  # a reader that looks at every byte a few times takes hundredths of a second
