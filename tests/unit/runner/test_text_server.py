"""Our own engine servers: fields, pieces of text, templates, and the answers of transcriptions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.plan import LoadPlan
from runner.engines.children.textserver.fields import ChatFields, parse_chat, parse_completion
from runner.engines.children.textserver.pieces import Detokeniser, StopStrings
from runner.engines.children.textserver.templates import ChatTemplate, read_template, special_tokens
from runner.engines.children.web import Refusal
from runner.engines.children.whisper_answer import (
    Outcome,
    Segment,
    as_json,
    as_srt,
    as_verbose_json,
    as_vtt,
    delta_event,
    text_of,
)
from runner.engines.elsewhere import set_thinking
from tests.fakes.examples import examples

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]


def chat_body(**fields: object) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse_chat(body)
    return caught.value


def test_defaults_are_those_of_openai_and_more_tokens_than_fit_are_cut() -> None:
    for nulls in ((), ("temperature", "stop", "max_tokens", "stream", "n")):
        fields = parse_chat(chat_body(**dict.fromkeys(nulls)))
        sampling = fields.sampling(limit=100, asked=fields.most_tokens, scope="")
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 100)
        assert (bool(fields.stream), fields.stops) == (False, [])
    fields = parse_chat(chat_body(max_completion_tokens=5000, presence_penalty=0, frequency_penalty=0.0, logit_bias={}))
    assert fields.sampling(limit=100, asked=fields.most_tokens, scope="").max_tokens == 100
    assert parse_completion(b'{"prompt": "a"}').most_tokens == 16
    assert parse_completion(b'{"prompt": ["a"], "max_tokens": 3}').most_tokens == 3
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert parse_chat(chat_body(messages=[{"role": "user", "content": parts}])).messages[0]["content"] == "one two"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("max_tokens", 0),
        ("repetition_penalty", 0), ("beam_size", 17), ("n", 2), ("stop", ""), ("stop", ["x"] * 17), ("seed", "one"),
        ("presence_penalty", 0.5), ("logit_bias", {"5": 1}), ("logprobs", True), ("response_format", {"type": "json_object"}),
        ("messages", []), ("messages", "Hi"), ("tool_choice", "required"), ("stream", "yes"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_do_is_refused_by_name(field: str, value: object) -> None:
    refusal = refused(chat_body(**{field: value}))
    assert (refusal.status, refusal.param) == (400, field)
    assert "hot" not in refusal.message, "values of clients do not come back"


def test_a_message_that_no_text_model_takes_is_refused_by_place_and_what_is_no_json_as_such() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "x"}}]
    for message, place in (({"role": "user", "content": picture}, "content"), ({"role": "user", "content": 5}, "content"),
                           ({"content": "Hi"}, "role")):  # fmt: skip
        assert refused(chat_body(messages=[message])).param == f"messages[0].{place}"
    assert refused(b"{}").param == "messages"
    for body in (b"", b"{", b"\xff\xfe", b'{"messages": [{"a":' + b"[" * 100_000):
        assert refused(body).code == "invalid_json"


def bytes_as_tokens(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are single bytes."""
    return bytes(ids).decode("utf-8", "replace")


@examples(25)
@given(st.text(max_size=40))
def test_every_text_comes_back_and_no_piece_has_half_a_character(text: str) -> None:
    pieces = Detokeniser(bytes_as_tokens)
    parts = [pieces.add(byte) for byte in text.encode()]
    assert "".join(parts) + pieces.finish() == text.rstrip("\ufffd") or "\ufffd" in text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_a_character_cut_off_at_the_end_is_left_out_and_no_byte_is_held_back_for_ever() -> None:
    pieces = Detokeniser(bytes_as_tokens)
    sent = "".join(pieces.add(byte) for byte in "good €".encode()[:-1])
    assert sent + pieces.finish() == "good "
    pieces = Detokeniser(bytes_as_tokens)
    assert "\ufffd" in "".join(pieces.add(0x80) for _ in range(64))


def run(stops: list[str], parts: list[str]) -> tuple[list[str], bool]:
    watch = StopStrings(stops)
    sent = [watch.add(part) for part in parts]
    return [*sent, watch.finish()], watch.hit


def test_a_stop_string_ends_the_text_across_borders_and_nothing_of_it_is_sent_early() -> None:
    cases: list[tuple[list[str], str, bool]] = [
        (["one S", "T", "OP two"], "one ", True), (["one ST", "ART two"], "one START two", False),
        (["one STO"], "one STO", False),
        (["S", "S", "STOP", "more"], "SS", True), (["a", "b"], "ab", False),
    ]  # fmt: skip
    for parts, text, hit in cases:
        sent, was_hit = run(["STOP"], parts)
        assert ("".join(sent), was_hit) == (text, hit)
    assert run(["</end>"], ["text</", "en", "x"])[0] == ["text", "", "</enx", ""]
    assert "".join(run(["two", "one"], ["zero one two"])[0]) == "zero ", "the first in the text"


@examples(25)
@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.integers(1, 5))
def test_pieces_make_no_difference_to_what_is_sent(text: str, stop: str, size: int) -> None:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    sent, _hit = run([stop], parts)
    assert "".join(sent) == text.partition(stop)[0]


def asked(text: str = "Hi", **fields: object) -> ChatFields:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode())


def test_messages_specials_and_the_prompt_for_an_answer_reach_the_template() -> None:
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    source = "{{ bos_token }}" + turns + "{% if add_generation_prompt %}>{% endif %}"
    specials = special_tokens({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    assert specials == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate(source, specials).render(asked()) == "<s>[user]Hi>"
    with pytest.raises(Refusal, match="roles must alternate") as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(asked())
    assert caught.value.param == "messages"
    with pytest.raises(ValueError, match="line 1"):  # a fault of the model
        ChatTemplate("{% for %}", {})


def test_a_template_cannot_leave_the_sandbox_change_what_it_is_given_or_tell_of_the_conversation() -> None:
    for source in (
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].content + 1 }}",
    ):  # fmt: skip
        with pytest.raises(Refusal) as caught:
            ChatTemplate(source, {}).render(asked("a secret"))
        assert "secret" not in caught.value.message


def test_tools_go_to_a_template_that_takes_them_and_are_refused_by_one_that_does_not() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    taking = ChatTemplate("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", {})
    assert "look_up" in taking.render(asked(tools=tools))
    assert taking.render(asked(tools=tools, tool_choice="none")) == ""
    with pytest.raises(Refusal) as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render(asked(tools=tools))
    assert caught.value.param == "tools"


def test_the_template_file_goes_before_the_one_in_the_tokenizer_settings(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert read_template(tmp_path) == "D"
    (tmp_path / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert read_template(tmp_path) == "F"


@pytest.mark.parametrize(
    ("default", "kwargs", "rendered"),
    [(None, None, "unset"), (False, None, "False"), (True, {"other": 1}, "True"), (False, {"enable_thinking": True}, "True")],
)
def test_thinking_is_as_the_settings_say_unless_the_request_does(
    default: bool | None, kwargs: dict[str, object] | None, rendered: str
) -> None:
    template = ChatTemplate("{{ enable_thinking if enable_thinking is defined else 'unset' }}", {}, default)
    fields = asked()
    fields.chat_template_kwargs = kwargs
    assert template.render(fields) == rendered


def test_the_settings_hold_where_the_client_says_nothing_and_a_body_that_cannot_be_read_passes() -> None:
    cases: list[tuple[bool | None, dict[str, object], dict[str, object]]] = [
        (None, {}, {}), (False, {}, {"enable_thinking": False}),
        (True, {"chat_template_kwargs": None}, {"enable_thinking": True}),
        (False, {"chat_template_kwargs": {"a": [1]}}, {"a": [1], "enable_thinking": False}),
        (False, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ]  # fmt: skip
    for wanted, given_, sent in cases:
        plan = LoadPlan("m", "tabbyapi", options={} if wanted is None else {"enable_thinking": wanted})
        changed = json.loads(set_thinking(plan, json.dumps({"model": "m", "temperature": 0.10, **given_}).encode()))
        assert (changed.pop("chat_template_kwargs", None) or {}) == sent
        assert changed == {"model": "m", "temperature": 0.1}
    for body in (b"", b"[]", b"{", b'{"chat_template_kwargs": 7}', b"\xff"):
        assert set_thinking(LoadPlan("m", "tabbyapi", options={"enable_thinking": True}), body) == body


def segment(text: str, start: float, end: float) -> Segment:
    words = [{"word": word, "start": start, "end": end} for word in text.split()]
    return {"id": 0, "start": start, "end": end, "text": text, "words": words}


SEGMENTS = [segment(" One two.", 0.0, 1.5), segment(" Three.", 3599.9996, 3723.25)]
OUTCOME = Outcome("transcribe", "en", audio_ms=3_723_250, speech_ms=3000, inference_ms=12.3456)


def test_a_transcription_comes_in_the_form_that_was_asked_for() -> None:
    assert as_srt(SEGMENTS) == "1\n00:00:00,000 --> 00:00:01,500\nOne two.\n\n2\n01:00:00,000 --> 01:02:03,250\nThree.\n\n"
    assert as_vtt(SEGMENTS).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne two.\n\n")
    assert as_json(SEGMENTS, OUTCOME)["usage"] == {"type": "duration", "seconds": 3724}, "rounded up"
    both = as_verbose_json(SEGMENTS, OUTCOME, {"word", "segment"})
    assert [word["word"] for word in both["words"]] == ["One", "two.", "Three."]  # type: ignore[attr-defined]  # JSON
    assert all("words" not in found for found in both["segments"])  # type: ignore[attr-defined]  # JSON
    assert "words" not in as_verbose_json(SEGMENTS, OUTCOME, {"segment"})
    assert "segments" not in as_verbose_json(SEGMENTS, OUTCOME, {"word"})
    deltas = [str(delta_event(found, first=number == 0)["delta"]) for number, found in enumerate(SEGMENTS)]
    assert "".join(deltas) == text_of(SEGMENTS) == "One two. Three."
