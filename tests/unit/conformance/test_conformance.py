"""The conformance suite: its table, its report, and readers that stop at each fault which breaks a client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any  # events are JSON

import pytest

from conformance.__main__ import main
from conformance.dialects import DIALECTS
from conformance.engine import script
from conformance.engine.answers import stream_chat, stream_message, stream_response
from conformance.engine.script import DIRECTIVES, NASTY, TEXT, THOUGHT, TOOL, compose, find_prompt, read_script
from conformance.engine.server import frame_event
from conformance.exchange import (
    Answer,
    Ask,
    Field,
    Violation,
    Write,
    check_event_data,
    check_whole_writes,
    read_json,
    read_stream,
)
from conformance.readers import chat, messages, responses
from conformance.table import Surface, list_rows


def test_every_surface_has_rows_chosen_by_their_ids_and_each_row_says_whom_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list_rows()
    assert {row.surface for row in rows} == set(Surface)
    assert len(rows) == len({(row.surface, row.requirement) for row in rows}) > 300
    assert all(row.requirement and row.clients for row in rows)
    assert {row.surface for row in list_rows(["chat.tools", "models"])} == {Surface.CHAT, Surface.MODELS}
    assert main(["--list", "--only", "images"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["images.reply", "images.no_nulls", "images.n"]


def test_directives_are_explained_found_in_the_last_message_of_the_user_and_refused_when_misspelt() -> None:
    assert set(DIRECTIVES) <= {word.strip(",").partition(":")[0] for word in (script.__doc__ or "").split()}
    assert read_script("[[slow:0.5]] [[tools]]").seconds("slow") == 0.5
    for text in ("[[tolls]]", "[[slow:soon]]"):
        with pytest.raises(ValueError, match=r"tolls|soon"):
            read_script(text)
    parts = [{"type": "input_text", "text": "[[tools]]"}, {"type": "input_image"}]
    turns = [
        {"role": "user", "content": "[[refusal]]"}, {"role": "user", "content": parts}, {"role": "tool", "content": "[[cut]]"},
    ]  # fmt: skip
    asked: list[dict[str, Any]] = [{"messages": turns}, {"input": turns}, {"prompt": ["[[length]]"]}, {"input": "[[cached]]"}]
    assert [find_prompt(body) for body in asked] == ["[[tools]]", "[[tools]]", "[[length]]", "[[cached]]"]


def test_what_does_not_fit_is_named_with_its_place() -> None:
    reply = read_json('{"choices": [{"index": "0"}], "none": null}', "reply")
    reads: list[tuple[Callable[[], object], str]] = [
        (reply["choices"][0]["index"].count, r'reply.choices\[0\].index must be an integer of at least 0 and is "0"'),
        (partial(reply["choices"].__getitem__, 1), "has 1 entries, number 1 is asked for"),
        (partial(reply.__getitem__, "usage"), "reply.usage is missing"), (reply["none"].text, "must be a string and is null"),
        (partial(Field(True, "x").must_be, 1), "x must be 1 and is true"), (partial(read_json, "[NaN]", "y"), "y is not JSON"),
    ]  # fmt: skip
    for read, words in reads:
        with pytest.raises(Violation, match=words):
            read()


@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_without_a_text_is_a_finding(path: str) -> None:
    reply = Field({"choices": [], "content": [], "output": []}, "reply")
    with pytest.raises(Violation):
        DIALECTS[path].text(reply).must_be(TEXT)


def test_nothing_checked_is_neither_success_nor_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = ["--base-url", "http://127.0.0.1:9", "--api-key", "k"]
    for more, words in (
        (["--model", "m"], "cannot connect"),
        (["--model", "m", "--only", "chta"], "no requirement begins with 'chta'"),
        ([], "--model are needed"),
    ):
        assert main([*server, *more, "--json", str(tmp_path / "out.json")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


Events = list[Any]
Change = Callable[[Events], object]
PLAIN = read_script("")


def make_events(voice: Callable[..., Any], prompt: str, **body: Any) -> Events:
    script = read_script(prompt)
    return copy.deepcopy(list(voice(compose(script, body, {}, None), script, {"model": "m", **body})))


def frame(events: Events, *, named: bool) -> bytes:
    """Return events as bytes; a text stands for itself, ``{"!": name, ...}`` has an event line of its own."""
    framed = []
    for event in events:
        if isinstance(event, str):
            framed.append(frame_event(event, PLAIN))
            continue
        content = {name: value for name, value in event.items() if name != "!"}
        framed.append(frame_event(content, PLAIN, name=event.get("!", content.get("type", "") if named else "")))
    return b"".join(framed)


def read_chat(events: Events) -> chat.ChatStream:
    return chat.require_end(chat.read_chat(read_stream(frame(events, named=False))))


def read_messages(events: Events) -> messages.MessageStream:
    return messages.require_end(messages.read_messages(read_stream(frame(events, named=True))))


def read_responses(events: Events) -> responses.ResponseStream:
    said = responses.read_responses(read_stream(frame(events, named=True)))
    responses.require_end(said)
    return said


def delta(event: Any) -> Any:
    return event["choices"][0]["delta"]


def call(event: Any) -> Any:
    return delta(event)["tool_calls"][0]


CHAT_FAULTS: dict[str, tuple[Change, str]] = {
    "no role": (lambda e: delta(e[0]).pop("role"), "role is missing"),
    "an event line": (lambda e: e[0].update({"!": "chunk"}), "event line"),
    "another id": (lambda e: e[2].update(id="chatcmpl-other"), "id changes"),
    "another model": (lambda e: e[2].update(model="other"), "model changes"),
    "another object": (lambda e: e[1].update(object="chat.completion"), "object must be"),
    "no choices": (lambda e: e[-2].pop("choices"), "choices is missing"),
    "no index in a delta": (lambda e: call(e[2]).pop("index"), "index is missing"),
    "no id in the first delta": (lambda e: call(e[1]).pop("id"), "id is missing"),
    "no type in the first delta": (lambda e: call(e[1]).pop("type"), "type is missing"),
    "null as the first arguments": (lambda e: call(e[1])["function"].update(arguments=None), "must be a string and is null"),
    "a later id that is null": (lambda e: call(e[2]).update(id=None), "id comes again"),
    "a later name that is empty": (lambda e: call(e[2])["function"].update(name=""), "name comes again"),
    "arguments as an object": (lambda e: call(e[2])["function"].update(arguments={"a": 1}), "must be a string"),
    "an index that jumps": (lambda e: call(e[1]).update(index=3), "jumps to 3"),
    "no finish_reason": (lambda e: e[-3]["choices"][0].update(finish_reason=None), "no finish_reason"),
    "two finish_reasons": (lambda e: e.insert(-2, copy.deepcopy(e[-3])), "after finish_reason"),
    "usage beside choices": (lambda e: e[-3].update(usage=e[-2]["usage"]), "has choices and usage"),
    "an empty chunk": (lambda e: e[-2].pop("usage"), "neither choices nor usage"),
    "a wrong total": (lambda e: e[-2]["usage"].update(total_tokens=1), "not the sum"),
    "no end": (lambda e: e.pop(), r"does not end with \[DONE\]"),
    "something after the end": (lambda e: e.append(copy.deepcopy(e[0])), r"follows \[DONE\]"),
    "an end after an error": (lambda e: e.insert(1, {"error": {"message": "x"}}), "follows an error"),
    "a ping event": (lambda e: e.insert(1, {"!": "ping", "type": "ping"}), "event line"),
}


MESSAGE_FAULTS: dict[str, tuple[Change, str]] = {
    "no event line": (lambda e: e[2].update({"!": ""}), "event line says ''"),
    "another event line": (lambda e: e[2].update({"!": "message"}), "event line says 'message'"),
    "no message_start": (lambda e: e.pop(0), "before message_start"),
    "two message_start": (lambda e: e.insert(1, copy.deepcopy(e[0])), "second message_start"),
    "no usage at the start": (lambda e: e[0]["message"].pop("usage"), "usage is missing"),
    "half a usage at the start": (lambda e: e[0]["message"]["usage"].pop("output_tokens"), "output_tokens is missing"),
    "content at the start": (lambda e: e[0]["message"].update(content=[{"type": "text", "text": ""}]), "content already"),
    "a ping too early": (lambda e: e.insert(0, {"type": "ping"}), "ping before message_start"),
    "a ping with data": (lambda e: e.insert(2, {"type": "ping", "data": {}}), "nothing more"),
    "an index that is used": (lambda e: e[7].update(index=0), "index is 0, 1 is due"),
    "a thought in a text": (
        lambda e: e[8].update(delta={"type": "thinking_delta", "thinking": "x"}), "inside a block of kind text",
    ),
    "a text in a thought": (
        lambda e: e[2].update(delta={"type": "text_delta", "text": "x"}), "inside a block of kind thinking",
    ),
    "a delta for no block": (lambda e: e[8].update(index=5), "block 5 is not open"),
    "no content_block_stop": (lambda e: e.remove({"type": "content_block_stop", "index": 0}), "is open"),
    "no last content_block_stop": (
        lambda e: e.remove({"type": "content_block_stop", "index": 2}), "content_block_stop is missing",
    ),
    "input that is no JSON": (lambda e: e[-4]["delta"].update(partial_json="}"), "no JSON"),
    "input at the start": (lambda e: e[-7]["content_block"].update(input={"a": 1}), "must be {}"),
    "no usage at the end": (lambda e: e[-2].pop("usage"), "usage is missing"),
    "no stop_reason": (lambda e: e[-2]["delta"].update(stop_reason=None), "stop_reason must be"),
    "no message_stop": (lambda e: e.pop(), "no message_stop"),
    "no message_delta": (lambda e: e.pop(-2), "without a message_delta"),
    "a [DONE]": (lambda e: e.append("[DONE]"), "has no"),
    "an end after an error": (
        lambda e: e.insert(2, {"type": "error", "error": {"type": "api_error", "message": "x"}}), "follows the end",
    ),
    "an error of another type": (
        lambda e: e.insert(2, {"type": "error", "error": {"type": "server_error", "message": "x"}}), "type must be",
    ),
    "an unknown event": (lambda e: e.insert(1, {"type": "message_pause"}), "no event of Messages"),
}  # fmt: skip


def find(events: Events, kind: str, number: int = 0) -> Any:
    return [event for event in events if event["type"] == kind][number]


def drop(events: Events, kind: str, number: int = 0) -> None:
    """Take an event out and close the gap in the numbers."""
    events.remove(find(events, kind, number))
    for position, event in enumerate(events):
        event["sequence_number"] = position


RESPONSE_FAULTS: dict[str, tuple[Change, str]] = {
    "no created": (lambda e: drop(e, "response.created"), "response.created is due"),
    "a gap in the numbers": (lambda e: e[3].update(sequence_number=9), "sequence_number is 9"),
    "another event line": (lambda e: e[3].update({"!": "message"}), "event line says"),
    "usage at the start": (lambda e: e[0]["response"].update(usage={}), "has usage already"),
    "another response id": (lambda e: e[-1]["response"].update(id="resp_other"), "response.id must be"),
    "no item added": (lambda e: drop(e, "response.output_item.added"), "item 0 is not open"),
    "no part added": (lambda e: drop(e, "response.content_part.added"), "was never added"),
    "no text done": (lambda e: drop(e, "response.output_text.done"), "before its text is done"),
    "another text done": (lambda e: find(e, "response.output_text.done").update(text="x"), "text must be"),
    "no part done": (lambda e: drop(e, "response.content_part.done", 1), "before its part 0 is done"),
    "no item done": (lambda e: drop(e, "response.output_item.done", 1), "before output_item.done of item 1"),
    "an item that changes its id": (
        lambda e: find(e, "response.output_item.done").__getitem__("item").update(id="x"), "id must be",
    ),
    "an index that is used": (lambda e: find(e, "response.output_item.added", 1).update(output_index=0), "output_index is 0"),
    "no arguments done": (lambda e: drop(e, "response.function_call_arguments.done"), "arguments.done is missing"),
    "arguments done without name": (lambda e: find(e, "response.function_call_arguments.done").pop("name"), "name is missing"),
    "a call that changes its call_id": (
        lambda e: find(e, "response.output_item.done", 2)["item"].update(call_id="x"), "call_id must be",
    ),
    "an empty output at the end": (lambda e: e[-1]["response"].update(output=[]), "output has 0 items"),
    "another output at the end": (
        lambda e: e[-1]["response"].update(
            output=[*e[-1]["response"]["output"][:2], {**e[-1]["response"]["output"][2], "name": "x"}]
        ),
        "differs from its output_item.done",
    ),
    "no usage at the end": (lambda e: e[-1]["response"].update(usage=None), "must be an object"),
    "no end": (lambda e: e.pop(), "ends without response.completed"),
    "a bare error event": (lambda e: e.insert(2, {"type": "error", "message": "x"}), "bare error event"),
    "[DONE] too early": (lambda e: e.insert(2, "[DONE]"), "before the response has ended"),
    "something after the end": (lambda e: e.append({**e[2], "sequence_number": len(e)}), "follows the end"),
    "an unknown event": (lambda e: e[1].update(type="response.pondering"), "no event of Responses"),
}  # fmt: skip


SPOKEN: dict[str, tuple[dict[str, tuple[Change, str]], Callable[[], Events], Callable[[Events], Any]]] = {
    "chat": (
        CHAT_FAULTS,
        lambda: [*make_events(stream_chat, "[[tools]]", stream_options={"include_usage": True}), "[DONE]"],
        read_chat,
    ),
    "messages": (MESSAGE_FAULTS, lambda: make_events(stream_message, "[[thinking]] [[text_then_tools]]"), read_messages),
    "responses": (RESPONSE_FAULTS, lambda: make_events(stream_response, "[[thinking]] [[text_then_tools]]"), read_responses),
}  # fmt: skip


@pytest.mark.parametrize(("surface", "fault"), [(surface, fault) for surface in SPOKEN for fault in SPOKEN[surface][0]])
def test_a_fault_in_a_stream_is_found(surface: str, fault: str) -> None:
    faults, make, read = SPOKEN[surface]
    change, words = faults[fault]
    events = make()
    change(events)
    with pytest.raises(Violation, match=words):
        read(events)


def test_what_is_said_adds_up_in_every_dialect() -> None:
    assert read_chat(SPOKEN["chat"][1]()).first.calls[0].name == TOOL
    message, response = read_messages(SPOKEN["messages"][1]()), read_responses(SPOKEN["responses"][1]())
    assert (message.texts("thinking"), message.texts("text")) == ([THOUGHT], [TEXT])
    assert (response.texts("reasoning_text"), response.texts("output_text")) == ([THOUGHT], [TEXT])
    assert read_chat([*make_events(stream_chat, "[[nasty_arguments]]"), "[DONE]"]).first.calls[0].arguments == NASTY
    assert read_messages(make_events(stream_message, "[[nasty_arguments]]")).texts("tool_use") == [NASTY]
    assert read_responses(make_events(stream_response, "[[nasty_arguments]]")).items[0].arguments == NASTY


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"data: {}\n\ndata: {}\n", "inside an event"), (b"data: {}\n\ndata: {", "last line"),
        (b'{"error": "x"}\n\n', "none of an event stream"), (b"data: \xff\n\n", "UTF-8"),
        *((body, ".") for body in (b"event: ping\n\n", b"data: {\n\n", b"data: [1]\n\n", b'data: {"a": NaN}\n\n')),
    ],
)  # fmt: skip
def test_a_stream_that_is_none_and_an_event_without_json_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(Violation, match=words):
        check_event_data(read_stream(body))


def test_events_are_read_however_they_are_framed() -> None:
    stream = read_stream(b': ping\r\n\r\nevent:a\r\ndata:{"x":\r\ndata: 1}\r\n\r\n:\n\nid: 7\rdata: [DONE]\r\r')
    assert [(event.name, event.data) for event in stream.events] == [("a", '{"x":\n1}'), ("", "[DONE]")]
    assert stream.comments == ("ping", "")
    check_event_data(stream)


def test_a_write_that_ends_inside_an_event_is_found() -> None:
    whole = Answer(Ask("POST", "/"), writes=[Write(0, b"data: {}\n\ndata: 1\r\n\r\n"), Write(0, b": ping\n\n")])
    check_whole_writes(whole)
    whole.writes.append(Write(0, b"data: {}\n"))
    with pytest.raises(Violation, match="write 2 ends inside an event"):
        check_whole_writes(whole)
