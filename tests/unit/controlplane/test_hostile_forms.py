"""What a hostile form, or a page whose script does not run, must not bring about."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from controlplane.playground.asks import build_body, read_ask
from controlplane.playground.errors import AskRefused
from controlplane.playground.snippets import write_code

URL = "http://127.0.0.1:8080"


def form(**fields: Any) -> bytes:
    return json.dumps({"surface": "chat", "model": "m", "prompt": "Hello", **fields}).encode()


@pytest.mark.parametrize("surface", ["chat", "messages", "responses"])
@pytest.mark.parametrize("kind", [[], {}, 1, None], ids=["list", "object", "number", "null"])
def test_a_tool_whose_type_is_no_text_stays_as_it_was_written(surface: str, kind: object) -> None:
    tool = {"name": "look_up", "type": kind, "parameters": {"type": "object"}}
    assert build_body(read_ask(form(surface=surface, tools=json.dumps([tool]))))["tools"] == [tool]


@pytest.mark.parametrize("depth", [70, 400, 900])
def test_tools_that_are_nested_too_deep_to_print_are_refused_by_name(depth: int) -> None:
    with pytest.raises(AskRefused) as refused:
        read_ask(form(tools='[{"a":' * depth + "1" + "}]" * depth))
    assert refused.value.param == "tools"


def test_tools_nested_as_deep_as_schemas_are_can_be_printed() -> None:
    ask = read_ask(form(tools='{"a":[' * 30 + "1" + "]}" * 30))
    assert all((write_code(ask, base_url=URL).curl, write_code(ask, base_url=URL).python, write_code(ask, base_url=URL).node))


@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\u200b", "\u2028", "\x9b", "\x7f", "\ufeff"], ids=ascii)
def test_letters_that_hide_or_turn_round_what_stands_there_are_written_out(letter: str) -> None:
    code = write_code(read_ask(form(prompt=f"a{letter}b")), base_url=URL)
    escape = f"a\\u{ord(letter):04x}b"
    for text in (code.curl, code.python, code.node):
        assert escape in text
        assert letter not in text
    body = re.search(r"<<'JSON'\n(.*)\nJSON\n", code.curl, re.DOTALL)
    assert body is not None
    assert json.loads(body[1])["messages"][0]["content"] == f"a{letter}b"


def test_without_its_script_the_page_puts_neither_key_nor_prompt_into_an_address() -> None:
    """A form that says no method is sent by GET: what was typed would stand in the history and in the log of every proxy."""
    page = Path(settings.BASE_DIR, "templates/admin/muster/playground_form.html").read_text()
    opening = re.search(r"<form[^>]*>", page)
    assert opening is not None
    assert 'method="post"' in opening[0]
