"""What an engine says when it refuses: whose fault that is, and its words without those of the request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.examples import examples
from wire.engine_errors import Blame, correct_status, judge_error, quote_message, read_message
from wire.limits import WIRE

HINT = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"


@pytest.mark.parametrize(
    ("status", "blame"),
    [
        (400, Blame.CALLER), (401, Blame.INSTALLATION), (402, Blame.INSTALLATION), (403, Blame.INSTALLATION),
        (404, Blame.INSTALLATION), (405, Blame.INSTALLATION), (408, Blame.INSTALLATION), (409, Blame.INSTALLATION),
        (410, Blame.INSTALLATION), (413, Blame.CALLER), (415, Blame.CALLER), (418, Blame.INSTALLATION), (422, Blame.CALLER),
        (424, Blame.INSTALLATION), (429, Blame.CAPACITY), (500, Blame.INSTALLATION), (501, Blame.INSTALLATION),
        (502, Blame.INSTALLATION), (503, Blame.CAPACITY), (504, Blame.INSTALLATION), (529, Blame.CAPACITY),
    ],
)  # fmt: skip
def test_a_status_of_an_engine_says_whose_fault_it_is(status: int, blame: Blame) -> None:
    assert judge_error(status) is blame


@pytest.mark.parametrize(
    ("status", "code", "blame"),
    [
        (403, "remote_not_allowed", Blame.CALLER), (429, "spending_cap_reached", Blame.CALLER),
        (429, "rate_limit_exceeded", Blame.CAPACITY), (400, "invalid_request", Blame.CALLER), (403, 403, Blame.INSTALLATION),
        (403, None, Blame.INSTALLATION),
    ],
)  # fmt: skip
def test_a_runner_says_by_its_code_that_the_caller_has_to_change_something(status: int, code: object, blame: Blame) -> None:
    assert judge_error(status, code) is blame


@pytest.mark.parametrize(
    ("status", "message", "corrected"),
    [
        (500, HINT, 400),  # llama.cpp
        (500, "image input is not supported by this server", 400),  # llama.cpp in May 2025
        (500, "audio input is not supported - hint: if this is unexpected, you may need to provide the mmproj", 400),
        (500, 'Failed to parse messages: Unsupported content part type: "image_url"; messages = [', 400),  # older llama.cpp
        (501, "unsupported content[].type", 400),
        (500, 'Failed to parse tools: Unsupported tool type: {"type":"nonsense"}; tools = [', 400),
        (500, "Failed to parse tool call arguments as JSON", 400),
        (500, "Failed to parse input at pos 0: <|tool", 500),  # of what the model generated
        (500, "this model is missing data required for image input", 400),  # Ollama
        (500, "this model does not support image input", 400),
        (500, "llama3 is not a multimodal model", 400),  # vLLM says so with 400 by itself
        (500, "At most 0 image(s) may be provided in one prompt.", 400),
        (400, "llama3 is not a multimodal model", 400),
        (422, HINT, 422),
        (503, HINT, 503),
        (401, HINT, 401),
        (500, "CUDA error: out of memory", 500),
        (500, "failed to process image: out of memory", 500),
        (500, "", 500),
    ],
)
def test_what_no_node_could_take_is_the_callers_mistake_whatever_the_engine_calls_it(
    status: int, message: str, corrected: int
) -> None:
    assert correct_status(status, message) == corrected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no", "type": "t", "code": 400}}, "no"), ({"object": "error", "message": "no"}, "no"),
        ({"detail": "no"}, "no"), ({"error": "no"}, "no"), ({"error": {"message": ""}}, ""), ([], ""),
    ],
)  # fmt: skip
def test_the_message_is_found_in_whatever_shape_an_engine_says_it(body: object, message: str) -> None:
    assert read_message(json.dumps(body).encode()) == message


SECRET = "the merger with Initech closes on the first of March"


def ask(text: str = SECRET, **more: object) -> bytes:
    return json.dumps(
        {"model": "org/a-model-with-a-long-name", "messages": [{"role": "user", "content": text}], **more}
    ).encode()


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        ("max_tokens must be at least 1, got 0.", "max_tokens must be at least 1, got 0."),
        (
            "The model `org/a-model-with-a-long-name` does not exist.",
            "The model `org/a-model-with-a-long-name` does not exist.",
        ),
        ("two\n lines\x1b[31m of\ttext", "two lines [31m of text"),
        (f"Field required [type=missing, input_value={SECRET!r}, input_type=str]", "Field required [type=missing,…"),
        (
            f"[{{'type': 'missing', 'msg': 'Field required', 'input': {{'a': {SECRET!r}}}}}]",
            "[{'type': 'missing', 'msg': 'Field required',…",
        ),
        (f'[{{"msg":"Field required","input":"{SECRET}"}}]', '[{"msg":"Field required",…'),
        (f'Unsupported content part type: "image_url"; messages = [ {SECRET}', 'Unsupported content part type: "image_url";…'),
        ('Failed to parse tools: no; tools = [ { "a": 1 } ]', "Failed to parse tools: no;…"),
        (f"cannot parse: {SECRET}", "cannot parse:…"),
        (f"cannot parse: {SECRET[:20]}", "cannot parse:…"),
        (f"cannot parse: {SECRET[:19]}", f"cannot parse: {SECRET[:19]}"),
        (f"cannot parse: {SECRET.replace(' ', chr(92) + 'n')}", "cannot parse:…"),
        (f"bad key sk-proj-{'a1' * 12} for it", "bad key … for it"),
        (SECRET, "…"),
        ("", ""),
    ],
)
def test_the_words_of_an_engine_are_quoted_without_those_of_the_request(message: str, quoted: str) -> None:
    assert quote_message(message, ask()) == quoted


def test_an_echo_is_found_however_it_was_escaped() -> None:
    text = "Der Größenänderungsvorschlag für Käthe über hundert"
    assert quote_message("bad: " + json.dumps(text), ask(text)).startswith("bad: ")
    assert "Größe" not in quote_message("bad: " + json.dumps(text), ask(text))
    assert "Gr" not in quote_message("bad: " + json.dumps(text), ask(text))
    assert quote_message(f"bad: {text}", ask(text)) == "bad:…"
    assert (
        quote_message("bad: " + repr("line one is here\nline two is here"), ask("line one is here\nline two is here"))
        == "bad: '…"
    )


def test_long_words_are_cut_and_a_cut_never_hides_an_echo() -> None:
    assert quote_message("x " * 400, ask()) == ("x " * 400)[: WIRE.error_quote_chars - 1].rstrip() + "…"
    assert len(quote_message("y" * 290 + SECRET, ask())) <= WIRE.error_quote_chars
    assert SECRET[:10] not in quote_message("y " * 130 + SECRET, ask())


def test_a_form_is_searched_for_echoes_as_it_was_sent() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + SECRET.encode() + b"\r\n--x--\r\n"
    assert quote_message(f"bad prompt: {SECRET}", form) == "bad prompt:…"
    assert quote_message("bad prompt", form) == "bad prompt"


@examples(25)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=200),
    before=st.text(max_size=60),
    after=st.text(max_size=60),
    start=st.integers(0, 200),
    size=st.integers(20, 200),
    how=st.sampled_from([str, json.dumps, repr]),
)
def test_no_run_of_twenty_characters_of_a_request_is_ever_quoted(
    text: str, before: str, after: str, start: int, size: int, how: type[str]
) -> None:
    quoted = quote_message(before + how(text[start : start + size]) + after, ask(text))
    plain = " ".join(text.split())
    assert len(quoted) <= WIRE.error_quote_chars
    assert not any(plain[at : at + 20] in quoted for at in range(len(plain) - 19))
