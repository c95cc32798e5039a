"""What the playground's form becomes: the body of each surface, and the same as curl, Python and Node."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.playground.asks import SURFACES, Ask, build_body, read_ask
from controlplane.playground.errors import AskRefused
from controlplane.playground.literals import JAVASCRIPT, JSON, PYTHON, WIDTH, expanding_json, print_literal
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


@pytest.mark.parametrize(
    ("surface", "body"),
    [
        (
            "chat",
            {
                "model": "tiny",
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
                "temperature": 0.5,
                "max_tokens": 20,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            "messages",
            {
                "model": "tiny",
                "max_tokens": 20,
                "system": "Be brief.",
                "messages": [{"role": "user", "content": "Hello"}],
                "temperature": 0.5,
                "stream": True,
            },
        ),
        (
            "responses",
            {
                "model": "tiny",
                "instructions": "Be brief.",
                "input": "Hello",
                "temperature": 0.5,
                "max_output_tokens": 20,
                "stream": True,
            },
        ),
        (
            "completions",
            {
                "model": "tiny",
                "prompt": "Hello",
                "temperature": 0.5,
                "max_tokens": 20,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        ("embeddings", {"model": "tiny", "input": "Hello"}),
    ],
)
def test_one_form_is_said_in_the_words_of_each_surface(surface: str, body: dict[str, Any]) -> None:
    filled = ask(surface, system="Be brief.", temperature="0.5", max_tokens="20", stream=True)
    assert build_body(filled) == body


def test_an_empty_form_asks_for_nothing_that_was_not_written() -> None:
    assert build_body(ask()) == {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def test_messages_gets_the_limit_that_it_insists_on() -> None:
    assert build_body(ask("messages"))["max_tokens"] == 1024


def test_pool_options_hold_what_was_filled_in() -> None:
    options = build_body(ask(fallback_models=" a, ,b ", max_latency_ms="0", priority="low"))["x_pool_options"]
    assert options == {"max_latency_ms": 0, "fallback_models": ["a", "b"], "priority": "low"}


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


def test_tools_of_another_kind_stay_as_they_were_written() -> None:
    tools = [{"type": "web_search"}, {"name": "no schema"}, {"type": "web_search_20250305", "name": "s", "parameters": {}}]
    for surface in SAID:
        assert build_body(ask(surface, tools=json.dumps(tools)))["tools"] == tools


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


def test_a_half_filled_form_has_code_already() -> None:
    draft = ask(is_draft=True, prompt="", image={**IMAGE, "data": ""})
    assert '"role": "user"' in write_code(draft, base_url=BASE).curl


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_literals_are_read_back_as_the_value(value: Any) -> None:
    assert ast.literal_eval(print_literal(value, PYTHON)) == value
    assert json.loads(print_literal(value, JSON)) == value
    # What a shell takes out of a here-document that it expands: these three, each behind its backslash.
    expanded = re.sub(r"\\([\\$`])", r"\1", print_literal(value, expanding_json("cat.png")))
    assert json.loads(expanded) == value


def test_a_long_literal_has_one_member_to_a_line() -> None:
    value = {"messages": [{"role": "user", "content": "x" * 40}, {"role": "user", "content": "y" * 40}]}
    lines = print_literal(value, JAVASCRIPT).splitlines()
    assert lines == [
        "{",
        "  messages: [",
        f'    {{ role: "user", content: "{"x" * 40}" }},',
        f'    {{ role: "user", content: "{"y" * 40}" }},',
        "  ],",
        "}",
    ]
    assert max(map(len, lines)) <= WIDTH


def test_javascript_keys_never_set_a_prototype() -> None:
    assert print_literal({"__proto__": 1, "a-b": 2, "c": 3}, JAVASCRIPT) == '{ ["__proto__"]: 1, "a-b": 2, c: 3 }'


@pytest.mark.parametrize("surface", list(SURFACES))
def test_code_reads_the_key_from_the_environment_and_never_holds_one(surface: str) -> None:
    code = write_code(ask(surface, key="mst_typed_by_somebody", stream=True), base_url=BASE)
    assert "$MUSTER_API_KEY" in code.curl
    assert 'os.environ["MUSTER_API_KEY"]' in code.python
    assert "process.env.MUSTER_API_KEY" in code.node
    assert "mst_" not in code.curl + code.python + code.node
    assert f"{BASE}{SURFACES[surface].path}" in code.curl  # type: ignore[index]  # a StrEnum is found by its text
    ast.parse(code.python)


def test_what_a_sdk_does_not_know_goes_beside_its_arguments() -> None:
    chat = write_code(ask(priority="low", temperature="0"), base_url=BASE).python
    messages = write_code(ask("messages", priority="low", temperature="0"), base_url=BASE).python
    assert 'extra_body={"x_pool_options": {"priority": "low"}}' in chat
    assert "temperature=0.0," in chat
    assert 'extra_body={"temperature": 0.0, "x_pool_options": {"priority": "low"}}' in messages


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
