"""The playground: what its form becomes on each surface, in code, and what passes between gateway and browser."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.playground.asks import SURFACES, Ask, build_body, read_ask
from controlplane.playground.checks import is_gateway_url
from controlplane.playground.errors import AskRefused
from controlplane.playground.literals import JSON, PYTHON, expanding_json, print_literal
from controlplane.playground.passage import choose_headers
from controlplane.playground.snippets import write_code

BASE = "http://gateway.test:8080"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
IMAGE = {"name": "cat.png", "type": "image/png", "data": "aGVsbG8="}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def ask(surface: str = "chat", *, is_draft: bool = False, **fields: Any) -> Ask:
    form = {"surface": surface, "model": "tiny", "prompt": "Hello", **fields}
    return read_ask(json.dumps(form).encode(), is_draft=is_draft)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
HELLO = {"role": "user", "content": "Hello"}
LIMITED = {"model": "tiny", "temperature": 0.5, "max_tokens": 20}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {**LIMITED, "messages": [{"role": "system", "content": "Be brief."}, HELLO], **USAGE},
    "messages": {**LIMITED, "system": "Be brief.", "messages": [HELLO], "stream": True},
    "responses": {
        "model": "tiny", "instructions": "Be brief.", "input": "Hello", "temperature": 0.5, "max_output_tokens": 20,
        "stream": True,
    },
    "completions": {**LIMITED, "prompt": "Hello", **USAGE}, "embeddings": {"model": "tiny", "input": "Hello"},
}  # fmt: skip


@pytest.mark.parametrize("surface", BODIES)
def test_one_form_is_said_in_the_words_of_each_surface(surface: str) -> None:
    filled = ask(surface, system="Be brief.", temperature="0.5", max_tokens="20", stream=True)
    assert build_body(filled) == BODIES[surface]


def test_a_picture_goes_where_each_surface_looks_for_it() -> None:
    url = "data:image/png;base64,aGVsbG8="
    assert build_body(ask(image=IMAGE))["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    assert build_body(ask("messages", image=IMAGE))["messages"][0]["content"][0] == {"type": "image", "source": source}
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    assert build_body(ask("responses", image=IMAGE))["input"][0]["content"][1] == part
    assert build_body(ask("completions", image=IMAGE))["prompt"] == "Hello"


FUNCTION = {"name": "weather", "description": "of a city"}
SAID = {
    "chat": {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}},
    "messages": {**FUNCTION, "input_schema": SCHEMA},
    "responses": {"type": "function", **FUNCTION, "parameters": SCHEMA},
}


@pytest.mark.parametrize("surface", list(SAID))
@pytest.mark.parametrize("written", list(SAID))
def test_a_function_written_for_one_surface_is_said_on_every_other(written: str, surface: str) -> None:
    assert build_body(ask(surface, tools=json.dumps([SAID[written]])))["tools"] == [SAID[surface]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"surface": "speech"}, "surface"),
        ({"model": " "}, "model"),
        ({"prompt": "\n"}, "prompt"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "2.1"}, "temperature"),
        ({"max_tokens": "0"}, "max_tokens"),
        ({"max_tokens": "1e3"}, "max_tokens"),
        ({"max_latency_ms": "-1"}, "max_latency_ms"),
        ({"priority": "first"}, "priority"),
        ({"tools": "[{]"}, "tools"),
        ({"tools": "[1]"}, "tools"),
        ({"image": {**IMAGE, "type": "image/svg+xml"}}, "image"),
        ({"image": {**IMAGE, "data": ""}}, "image"),
        ({"image": {**IMAGE, "data": "not base64"}}, "image"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(next(iter(value.items())))[:40],
)
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(AskRefused) as caught:
        ask(**{"surface": "chat", **fields})
    assert caught.value.param == param
    assert "not base64" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"surface": 1}', b'{"image": "x"}', b"\xff"])
def test_what_no_page_sends_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(AskRefused, match="cannot be read"):
        read_ask(data)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_literals_are_read_back_as_the_value(value: Any) -> None:
    assert ast.literal_eval(print_literal(value, PYTHON)) == value
    assert json.loads(print_literal(value, JSON)) == value
    # What a shell takes out of a here-document that it expands: these three, each behind its backslash.
    expanded = re.sub(r"\\([\\$`])", r"\1", print_literal(value, expanding_json("cat.png")))
    assert json.loads(expanded) == value


@pytest.mark.parametrize("surface", list(SURFACES))
def test_code_reads_the_key_from_the_environment_and_never_holds_one(surface: str) -> None:
    code = write_code(ask(surface, key="mst_typed_by_somebody", stream=True), base_url=BASE)
    assert "$MUSTER_API_KEY" in code.curl
    assert 'os.environ["MUSTER_API_KEY"]' in code.python
    assert "process.env.MUSTER_API_KEY" in code.node
    assert "mst_" not in code.curl + code.python + code.node
    assert f"{BASE}{SURFACES[surface].path}" in code.curl  # type: ignore[index]  # a StrEnum is found by its text
    ast.parse(code.python)


@pytest.mark.parametrize("name", ["$(rm -rf ~).png", "a b.png", '"; import os', "-rf", "ä.png", "../up.png", "x" * 80])
def test_the_name_of_a_file_never_becomes_code(name: str) -> None:
    code = write_code(ask(image={**IMAGE, "name": name}), base_url=BASE)
    assert "base64 < image.png |" in code.curl
    assert 'Path("image.png")' in code.python
    assert 'readFile("image.png"' in code.node
    assert name not in code.curl + code.python + code.node


def test_an_ask_is_never_printed_with_what_is_private() -> None:
    printed = repr(ask(key="mst_secret", prompt="my prompt", system="my system", image=IMAGE))
    assert not [word for word in ("mst_secret", "my prompt", "my system", "aGVsbG8=") if word in printed]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gateway:8080",
        "ftp://gateway",
        "http://",
        "http://gateway/v1",
        "http://gateway?x=1",
        "http://gateway#x",
        "http://me:secret@gateway",
        "http://gateway:port",
        "http://gateway:0",
        "http://[::1",
    ],
)
def test_anything_else_is_none(url: str) -> None:
    assert not is_gateway_url(url)


def test_only_named_headers_reach_a_browser() -> None:
    named = {"x-request-id": "req_1", "x-muster-node": "attic", "retry-after": "3"}
    others = {"set-cookie": "a=1", "location": "http://evil.test", "access-control-allow-origin": "*", "server": "muster"}
    shown = choose_headers({**named, **others, "content-type": "application/json; charset=utf-8"})
    assert shown == {**named, "content-type": "application/json"}


@pytest.mark.parametrize("surface", ["chat", "messages", "responses"])
@pytest.mark.parametrize("kind", [[], {}, 1, None], ids=["list", "object", "number", "null"])
def test_a_tool_whose_type_is_no_text_stays_as_it_was_written(surface: str, kind: object) -> None:
    tool = {"name": "look_up", "type": kind, "parameters": {"type": "object"}}
    assert build_body(ask(surface, tools=json.dumps([tool])))["tools"] == [tool]


@pytest.mark.parametrize("depth", [70, 400, 900])
def test_tools_that_are_nested_too_deep_to_print_are_refused_by_name(depth: int) -> None:
    with pytest.raises(AskRefused) as refused:
        ask(tools='[{"a":' * depth + "1" + "}]" * depth)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\u200b", "\u2028", "\x9b", "\x7f", "\ufeff"], ids=ascii)
def test_letters_that_hide_or_turn_round_what_stands_there_are_written_out(letter: str) -> None:
    code = write_code(ask(prompt=f"a{letter}b"), base_url=BASE)
    escape = f"a\\u{ord(letter):04x}b"
    for text in (code.curl, code.python, code.node):
        assert escape in text
        assert letter not in text
    body = re.search(r"<<'JSON'\n(.*)\nJSON\n", code.curl, re.DOTALL)
    assert body is not None
    assert json.loads(body[1])["messages"][0]["content"] == f"a{letter}b"
