"""The client's side of one exchange: how bodies and forms are read, signs of life, who may call, and noticing that it left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pytest_django import Settings

from core.limits import GatewayLimits
from gateway.apps import check_settings
from gateway.dialects.body import is_crowded, read_fields, read_options, read_usual_chat
from gateway.dialects.surface import SURFACES
from gateway.errors import BadRequest, BodyTooLarge, ClientLeft, GatewayError, InvalidApiKey
from gateway.request.attempt import KeepAlive
from gateway.request.client import came_directly
from gateway.request.identity import Keyless, KeyRing
from gateway.request.models import Catalogue, KeyEntry
from gateway.request.response import admit_origin, is_preflight
from gateway.values import Caller, HeaderView, InferenceRequest
from nodes.states import BINARY_ENDPOINTS
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.examples import examples
from wire.limits import WIRE

SMALL = GatewayLimits(max_body_bytes=10, max_buffer_bytes=100)


async def test_a_body_over_the_limit_or_that_does_not_come_is_refused() -> None:
    pieces = [[b"x" * 11], [b"x" * 10, b"x"], [b"x" * 4, b"x" * 4, b"x" * 4, b"never read"]]
    declared = MemoryClient(body=[], headers={"content-length": "11"}, limits=SMALL)  # refused before any of it comes
    for client in (declared, *(MemoryClient(body=body, limits=SMALL) for body in pieces)):
        with pytest.raises(BodyTooLarge):
            await client.connection.read_body()
    assert declared.handle.closes
    assert await MemoryClient(body=[b"x" * 6, b"", b"y" * 4], limits=SMALL).connection.read_body() == b"xxxxxxyyyy"
    client = MemoryClient(body=[])
    client.leave()
    with pytest.raises(ClientLeft):
        await client.connection.read_body()


async def test_after_unwatch_nobody_is_told() -> None:
    client = MemoryClient()
    await client.connection.read_body()
    client.connection.watch()
    client.connection.unwatch()
    client.leave()
    assert not client.connection.is_gone


PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def start(client: MemoryClient) -> KeepAlive:
    keepalive = KeepAlive(client.connection, extra=[(b"x-request-id", b"req_1")], every_s=0.01)
    keepalive.start()
    return keepalive


PAGE = "https://chat.example.com"


def test_an_origin_is_let_in_by_its_whole_name_or_by_a_star() -> None:
    assert admit_origin({"origin": PAGE}, ()) == ()
    for headers in ({}, {"origin": PAGE}):
        said = dict(admit_origin(headers, ["*"]))
        assert (said[b"access-control-allow-origin"], b"vary" in said) == (b"*", False)
    assert dict(admit_origin({"origin": PAGE}, [PAGE]))[b"access-control-allow-origin"] == PAGE.encode()
    for other in ("", "null", PAGE + ":8443", PAGE + ".evil.test", "http://chat.example.com", PAGE.upper()):
        assert admit_origin({"origin": other}, [PAGE]) == ((b"vary", b"Origin"),)
    asking = {"origin": PAGE, "access-control-request-method": "POST"}
    assert is_preflight("OPTIONS", asking)
    assert not is_preflight("POST", asking)
    assert not is_preflight("OPTIONS", {"origin": PAGE})


def test_an_origin_that_no_browser_sends_and_tokenizers_that_are_not_there_are_errors_at_start(
    settings: Settings, tmp_path: Path
) -> None:
    for wrong in ("chat.example.com", PAGE + "/", "https://*.example.com", "https://Chat.example.com", "null"):
        settings.CORS_ORIGINS = ["http://localhost:3000", wrong]
        (error,) = check_settings(None)
        assert (error.id, wrong in error.msg) == ("gateway.E002", True)
    for right in ([], ["*"], [PAGE, "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md"]):
        settings.CORS_ORIGINS = right
        assert check_settings(None) == []
    (tmp_path / "file").touch()
    for place, found in ((tmp_path, []), (tmp_path / "absent", ["gateway.E001"]), (tmp_path / "file", ["gateway.E001"])):
        settings.TOKENIZERS_DIR = str(place)
        assert [message.id for message in check_settings(None)] == found


def is_direct(address: str | None = "127.0.0.1", version: str = "1.1", **headers: str) -> bool:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return came_directly({"client": (address, 5) if address else None, "http_version": version}, named)


HERE = ("127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "")
ELSEWHERE = ("muster.example", "muster.example:443", "10.0.0.7", "localhost.evil.example", "[::1", "a@b:x")
PASSED_ON = ("x_forwarded_for", "forwarded", "via", "x_real_ip", "x_forwarded_proto", "x_forwarded_host", "cf_connecting_ip")


def test_only_a_program_on_this_machine_that_asks_for_it_and_was_not_passed_on_is_direct() -> None:
    for address in ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", None):
        for host in HERE:
            assert is_direct(address, host=host), (address, host)
    for address in ("10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "nonsense"):
        assert not is_direct(address, host=HERE[0]), address
    for name in PASSED_ON:  # even when it says nothing of whom
        assert not is_direct(host=HERE[0], **{name: ""}), name
    for host in ELSEWHERE:
        assert not is_direct(host=host), host
    assert not is_direct(version="1.0", host=HERE[0]), "as a proxy speaks to its upstream"


DIRECT = {"client": ("127.0.0.1", 5), "http_version": "1.1"}
AFAR = {"client": ("10.0.0.7", 5), "http_version": "1.1"}
PAGE = "https://app.example"


@pytest.mark.parametrize(
    ("mode", "scope", "headers", "is_in"),
    [
        (Keyless.REFUSED, DIRECT, {}, False),
        (Keyless.NEAR, DIRECT, {}, True),
        (Keyless.NEAR, AFAR, {}, False),
        (Keyless.NEAR, None, {}, False),
        (Keyless.NEAR, DIRECT, {"x-forwarded-for": "10.0.0.7"}, False),
        (Keyless.NEAR, DIRECT, {"host": "rebound.example"}, False),
        (Keyless.NEAR, DIRECT, {"origin": "https://other.example"}, False),
        (Keyless.NEAR, DIRECT, {"origin": PAGE}, True),
        (Keyless.ADMITTED, AFAR, {}, True),
        (Keyless.ADMITTED, AFAR, {"x-forwarded-for": "10.0.0.7"}, True),
        (Keyless.ADMITTED, AFAR, {"origin": "https://other.example"}, False),
        (Keyless.ADMITTED, DIRECT, {"authorization": "Bearer wrong"}, False),
        (Keyless.ADMITTED, DIRECT, {"authorization": ""}, False),
        (Keyless.ADMITTED, DIRECT, {"x-api-key": "sk-none"}, False),
    ],
)
async def test_a_request_without_a_key_comes_in_only_where_that_was_said_and_a_wrong_key_never_does(
    settings: Settings, mode: Keyless, scope: dict[str, Any] | None, headers: dict[str, str], *, is_in: bool
) -> None:
    settings.CORS_ORIGINS = [PAGE]
    catalogue = Catalogue(GatewayLimits())
    ring, caller = KeyRing(catalogue), make_caller()
    ring.keyless = mode

    async def ask() -> Caller:
        return await ring.identify(HeaderView([(k.encode(), v.encode()) for k, v in headers.items()]), scope=scope)

    def apply(*, revoked: bool = False, replace: bool = False, is_keyless: bool = True) -> None:
        entry = KeyEntry(b"", caller, revoked=revoked, expires_at=None, is_keyless=is_keyless)
        catalogue.apply_keys([("k", entry)], replace=replace)

    with pytest.raises(InvalidApiKey):
        await ask()
    apply()
    if is_in:
        assert await ask() is caller
        apply(revoked=True)
    with pytest.raises(InvalidApiKey):
        await ask()
    held = []
    for step in (
        partial(apply, is_keyless=False),
        partial(apply, replace=True),
        partial(catalogue.apply_keys, [], replace=True),
    ):
        step()
        held.append(catalogue.keyless is not None)
    assert held == [False, True, False]


def make_caller() -> Caller:
    return Caller(key_id=uuid.uuid4(), key_name="k", tenant="keyless", requests_per_minute=9, allowed_models=frozenset())


CHAT, MESSAGES, RESPONSES, AUDIO = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/audio/transcriptions"
JSON = {"content-type": "application/json"}
HELLO = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'
MEGABYTE = 1024 * 1024


def parse(path: str, body: bytes) -> InferenceRequest:
    """Read a body as the pipeline does, and translate it where there is something to translate."""
    surface = SURFACES[path]
    request = surface.parse(body, JSON)
    if surface.translate is not None:
        surface.translate(request)
    return surface.rename(request, "other")


def find_refusal(path: str, body: bytes) -> GatewayError | None:
    """Return how a body is refused, if it is; whatever else it makes a surface raise is raised."""
    try:
        parse(path, body)
    except GatewayError as error:
        return error
    return None


def test_a_32_mb_body_costs_a_few_calls_for_each_part_of_it() -> None:
    parts = 20_000
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 24 * MEGABYTE}}
    content = [image, *[{"type": "text", "text": "abc"}] * parts]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        SURFACES[CHAT].parse(body, JSON)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 20 * parts, "reading must stay linear in the parts, and never walk the bytes of an image in Python"


KEYS = st.text(st.sampled_from('ab"\\é\n😀'), max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
LAYOUTS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t"), (",  ", ":")])


def lay_out(pairs: list[tuple[str, object]], layout: tuple[str, str], *, ascii_only: bool) -> bytes:
    comma, colon = layout
    parts = [
        json.dumps(key, ensure_ascii=ascii_only) + colon + json.dumps(value, separators=layout, ensure_ascii=ascii_only)
        for key, value in pairs
    ]
    return ("{" + comma.join(parts) + "}").encode()


@examples(60)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), LAYOUTS, st.booleans())
@example([("a", 1), ("b", 2), ("c", 3), ("d", 4), ("a", 12)], (",", ":"), False)
@example([("model", "a"), ("model", "a")], (", ", ": "), True)
def test_a_key_is_refused_exactly_when_it_is_given_twice(
    pairs: list[tuple[str, object]], layout: tuple[str, str], ascii_only: bool
) -> None:
    body = lay_out(pairs, layout, ascii_only=ascii_only)
    names = [key for key, _value in pairs]
    if len(set(names)) == len(names):
        assert {key: json.loads(bytes(raw)) for key, raw in read_fields(body).items()} == dict(pairs)
        return
    with pytest.raises(BadRequest, match="given twice") as caught:
        read_fields(body)
    assert caught.value.param in {name for name in names if names.count(name) > 1}


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


SPELLED = {
    "model": ['"m"', '"a\\":b"', '""', '"\\u0000"', "5", "null"],
    "messages": [
        '[{"role":"user","content":"hi"}]', '[{"role":"user","content":"h\\"i\\":"},{"role":"x","content":"\\u0022:é"}]', "[]",
        '[{"role":"user","content":"a","content":"b"}]', '[{"role":"user","content":[{"type":"text","text":"hi"}]}]',
        '[{"content":"hi"}]',
        '[{"role":"user","content":null,"tool_calls":[{"id":"1"}]}]', '"hi"', '[{"role":1,"content":"a"}]',
    ],
    "stream": ["true", "false", "null", "1"],
    "stream_options": ['{"include_usage":true}', "{}", '{"include_usage":null}', '{"include_usage":true,"a":1}', "[]"],
    "max_tokens": ["5", "5.0", "0", "-1", "null", '"5"', "9" * 25],
    "max_completion_tokens": ["9", "1e1", "0"],
    "temperature": ["0.7", "1", "2.1", "null", "true", '"hot"', "1e400"],
    "top_p": ["1", "1.5"],
    "n": ["1", "129", "1.5"],
    "stop": ['["a\\":"]', '{"a":1}', "null", "01"],
    "seed": ["1", '{"seed":1}'],
    "user": ['"u"', '"\\ud800"', '{"a":{"a":1}}'],
    "store": ["true", "5"],
}  # fmt: skip
MEMBERS = [(name, value) for name, values in SPELLED.items() for value in values]
BASE = [("model", '"m"'), ("messages", SPELLED["messages"][0])]


def read(body: bytes) -> InferenceRequest | tuple[str, str | None]:
    try:
        return msgspec.structs.replace(SURFACES[CHAT].parse(body, JSON), body=b"")
    except BadRequest as error:
        return error.message.partition("JSON")[0], error.param  # behind it stands what comes next in the body


def list_bodies() -> Iterator[str]:
    """Yield bodies without the brace at their end: usual ones, with one or two more members, and in other layouts."""
    for model, messages in itertools.product(SPELLED["model"], SPELLED["messages"]):
        yield f'{{"model":{model},"messages":{messages}'
    for members in itertools.chain(itertools.combinations(MEMBERS, 1), itertools.product(MEMBERS, repeat=2)):
        parts = [f'"{name}":{value}' for name, value in (*BASE, *members)]
        yield "{" + ",".join(parts)
        yield "{" + ",".join([parts[-1], *parts[:-1]])
        yield "{" + ",".join([*parts[:-1], parts[-1].replace(":", " :", 1)])
        yield "{" + ",".join(parts).replace('"model"', '"mod\\u0065l"', 1)


def test_a_usual_body_is_read_at_once_as_it_is_read_in_parts() -> None:
    known = 0
    for body in list_bodies():
        assert read(body.encode() + b"}") == read(body.encode() + b',"nobody reads this":0}'), body
        known += read_usual_chat(body.encode() + b"}") is not None if body.isascii() else 0
    assert known > 300


@pytest.mark.parametrize("field", ["messages", "input", "tools", "system", "metadata", "text", "x_pool_options", "anything"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_no_depth_makes_a_surface_raise_anything_but_a_refusal(path: str, field: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "input": "a"}
    body.pop(field, None)
    for levels in (900, 985, 990, 995, 1000, 100_000):
        for opening, middle, closing in (("[", "", "]"), ('{"a":', "1", "}")):
            value = opening * levels + middle + closing * levels
            error = find_refusal(path, f'{json.dumps(body)[:-1]},"{field}":{value}}}'.encode())
            assert error is None or error.status == 400, levels


def crowd(before: bytes, piece: bytes, after: bytes, *, size_bytes: int = 8_000_000) -> bytes:
    """Return a body of about that size that is nearly all ``piece``."""
    return before + piece * (size_bytes // len(piece)) + after


CROWDS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "lists among the tools": lambda: (CHAT, crowd(HELLO + b',"tools":[', b"[],", b"1]}")),
    "blocks": lambda: (MESSAGES, crowd(b'{"model":"m","max_tokens":1,"messages":[{"content":[', b'{"type":"text"},', b"1]}]}")),
    "items": lambda: (RESPONSES, crowd(b'{"model":"m","input":[', b'{"role":"user","content":""},', b"{}]}")),
    "fields": lambda: (CHAT, HELLO + b"".join(b',"k%d":1' % n for n in range(700_000)) + b"}"),
    "texts": lambda: (RESPONSES, crowd(b'{"model":"m","input":[', b'"",', b"1]}")),
    "a key in another spelling": lambda: (CHAT, crowd(HELLO + b',"\\u0061":[', b"[],", b"1]}")),
}  # fmt: skip


@pytest.mark.parametrize("name", CROWDS)
def test_a_body_with_millions_of_values_is_refused_before_they_are_built(name: str) -> None:
    path, body = CROWDS[name]()
    assert isinstance(find_refusal(path, body), BodyTooLarge)


def test_the_bound_is_counted_outside_of_strings_only() -> None:
    for body in (
        crowd(b'{"model":"m","messages":[{"role":"user","content":"', b'1,2,[{ \\"', b'"}]}'),  # a text full of commas
        crowd(b'{"model":"m","messages":[{}],"input":[', b"1234,", b"1]}", size_bytes=1_500_000),  # 300,000 tokens
    ):
        assert not is_crowded(body)
        assert parse(CHAT, body).model == "other"
    marks = b"[" + b"0," * WIRE.body_marks + b"0]"
    assert not is_crowded(b"[" + marks[7:])
    assert is_crowded(marks)
    assert is_crowded(b'["\\\\",' + marks + b"]")
    assert not is_crowded(b'["' + marks + b'"]')
    assert not is_crowded(b'["\\"' + marks)


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v1/images/generations": {"prompt": "p"},
}
LIMITS = [
    *[(path, field) for path in ASKED for field in ("max_tokens", "max_completion_tokens", "max_output_tokens")],
    ("/v1/responses", "decoding.max_tokens"),
]
WRITTEN = {"5": 5, "5.0": 5, "5e0": 5, "0.5e1": 5, "50E-1": 5, "1e3": 1000, "4294967296.0": 2**32}
NOT_WHOLE = ["1.5", "1e-3", '"5"', "true", "[]", "1e400", "9" * 5000]


def write(path: str, field: str, number: str) -> bytes:
    """Return a body in which the field stands as it is written here."""
    body = {name: value for name, value in ASKED[path].items() if name != field}
    outer, _, inner = field.partition(".")
    value = f'{{"{inner}":{number}}}' if inner else number
    return json.dumps({"model": "m", **body}).encode()[:-1] + f',"{outer}":{value}}}'.encode()


@pytest.mark.parametrize(("path", "field"), LIMITS)
def test_a_limit_counts_as_the_number_it_is_and_what_is_none_is_refused(path: str, field: str) -> None:
    for number, value in WRITTEN.items():
        request = SURFACES[path].parse(write(path, field, number), {})
        assert request.max_tokens == (value if path != "/v1/messages" or field == "max_tokens" else max(9, value))
        assert type(request.max_tokens) is int
        assert request.body == write(path, field, number), "the bytes stay as they came"
    noise = ("NaN", "Infinity", "-Infinity", "05", "5.", ".5", "0x5", "-1.0")
    for number in (*NOT_WHOLE, *(noise if field == "max_tokens" else ())):
        with pytest.raises(BadRequest) as caught:
            SURFACES[path].parse(write(path, field, number), {})
        if number in NOT_WHOLE:
            assert caught.value.param == (field if len(number) < 100 else field.partition(".")[0])
        assert len(caught.value.message) < 300


def test_options_of_the_pool_count_so_too_and_forms_are_what_text_links_cannot_carry() -> None:
    assert read_options(msgspec.Raw(b'{"max_latency_ms":3e3}')).max_latency_ms == 3000
    with pytest.raises(BadRequest) as caught:
        read_options(msgspec.Raw(b'{"max_latency_ms":0.5}'))
    assert caught.value.param == "x_pool_options.max_latency_ms"
    assert {path for path, surface in SURFACES.items() if surface.is_form} == BINARY_ENDPOINTS


EDGE = "----edge"
Part = tuple[str, bytes]


def field(name: str, value: str | bytes) -> Part:
    return f'form-data; name="{name}"', value if isinstance(value, bytes) else value.encode()


def file(data: bytes = b"RIFF", name: str = "file") -> Part:
    return f'form-data; name="{name}"; filename="a.wav"', data


def form(*parts: Part) -> bytes:
    pieces = [f"--{EDGE}\r\nContent-Disposition: {head}\r\n\r\n".encode() + data + b"\r\n" for head, data in parts]
    return b"".join(pieces) + f"--{EDGE}--\r\n".encode()


def parse_form(body: bytes) -> InferenceRequest:
    return SURFACES[AUDIO].parse(body, {"content-type": f"multipart/form-data; boundary={EDGE}"})


GOOD = form(file(b"x" * 100), field("model", "m"))


@examples(50)
@given(st.binary(max_size=300).filter(lambda noise: EDGE.encode() not in noise), st.integers(0, 300))
def test_any_bytes_are_read_or_refused_and_any_file_travels(noise: bytes, at: int) -> None:
    assert parse_form(form(file(noise), field("model", "m"))).model == "m"
    for body in (noise, GOOD[:at] + noise + GOOD[at:], GOOD[:at] + noise):
        with contextlib.suppress(BadRequest):
            assert parse_form(body).model


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
    ids=range(9),
)
def test_no_form_keeps_the_gateway_busy(body: bytes) -> None:
    began = time.process_time()
    with contextlib.suppress(BadRequest):
        parse_form(body)
    assert time.process_time() - began < 20.0  # a reader that looks at every byte a few times takes hundredths of a second


def test_another_model_stands_in_the_form_and_the_file_stays_as_it_is() -> None:
    sound = bytes(range(256)) * 700  # over the size of one piece of the parser
    body = form(file(sound), field("model", "whisper-1"), field("language", "whisper-1"))
    renamed = SURFACES[AUDIO].rename(parse_form(body), "tiny-whisper")
    assert renamed.body == body.replace(b"\r\n\r\nwhisper-1", b"\r\n\r\ntiny-whisper", 1)
    assert SURFACES[AUDIO].parse(renamed.body, renamed.headers).model == "tiny-whisper"


@pytest.mark.parametrize(("part", "rest"), [(b'data: {"half', b'":1}\n\n'), (b"event: message\n", b"data: 1\n\n")])
async def test_silence_is_filled_between_events_and_never_inside_one(part: bytes, rest: bytes) -> None:
    client = MemoryClient()
    keepalive = start(client)
    keepalive.event = PING
    client.connection.start(200, [(b"content-type", b"text/event-stream")])
    client.connection.write(b"data: 1\n\n")
    await client.wait(lambda: PING in client.body)
    client.connection.write(part)
    ticks = asyncio.get_running_loop().time() + 0.05
    await client.wait(lambda: asyncio.get_running_loop().time() > ticks)
    assert client.body.endswith(part)
    client.connection.write(rest)
    length = len(client.body)
    await client.wait(lambda: len(client.body) > length)
    keepalive.stop()
    assert client.body[length:].startswith(PING)
