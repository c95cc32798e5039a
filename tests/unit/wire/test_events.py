"""What engines say: where events end, what usage they tell, how an answer ends, and whose fault an error is."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.chat import ChatUsage
from gateway.request.attempt import find_usage, read_usage
from runner.serving.request import Numbers
from tests.fakes.examples import examples
from tests.fakes.recorded_streams import (
    BARE_ERRORS,
    CHAT,
    COMPLETIONS,
    DONE,
    FAILURES,
    MESSAGES,
    RESPONSES,
    STREAMS,
    RecordedStream,
    choice,
    chunk,
    event,
    typed,
)
from wire.bridge import TokenCounts
from wire.engine_errors import Blame, correct_status, judge_error, quote_message, read_message
from wire.events import EndReader, EventCutter, StreamEnd, find_boundary, open_end_reader
from wire.limits import WIRE
from wire.tidy import ChatTidier
from wire.usage import BodyReader, StreamReader, ask_for_usage, read_body_usage


def open_reader(path: str) -> EndReader:
    reader = open_end_reader(path)
    assert reader is not None
    return reader


def read_end(path: str, *pieces: bytes) -> tuple[bytes, StreamEnd]:
    """Feed a whole stream; return what may reach a client, and the verdict."""
    reader = open_reader(path)
    out = b"".join([reader.feed(piece) for piece in pieces]) + reader.finish()
    return out, reader.judge()


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.path} {stream.name}")
def test_a_stream_cut_anywhere_is_whole_once_its_closing_event_is_there(stream: RecordedStream) -> None:
    data = stream.data
    for cut in range(len(data) + 1):
        out, end = read_end(stream.path, data[:cut])
        assert end is (StreamEnd.WHOLE if cut >= stream.whole_at else StreamEnd.CUT), data[:cut]
        assert out.rstrip(b"\r\n") == data[: len(out.rstrip(b"\r\n"))]


@examples(25)
@given(data=st.data(), stream=st.sampled_from(STREAMS))
def test_how_a_stream_is_cut_into_pieces_changes_nothing(data: st.DataObject, stream: RecordedStream) -> None:
    length = data.draw(st.integers(0, len(stream.data)), label="length")
    cuts = sorted(data.draw(st.lists(st.integers(0, length)), label="cuts"))
    pieces = [stream.data[start:end] for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
    assert read_end(stream.path, *pieces) == read_end(stream.path, stream.data[:length])


@pytest.mark.parametrize("done", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n", b'data: {"error":"boom"}'])
def test_an_event_that_lacks_only_its_blank_line_is_given_one(done: bytes) -> None:
    word = chunk(choice("a"))
    out, end = read_end(CHAT, word, done)
    assert out == word + done.rstrip() + b"\n\n"
    assert end is (StreamEnd.FAILED if b"error" in done else StreamEnd.WHOLE)


LAYOUTS = {
    "alone": lambda word, said: [said], "after a text": lambda word, said: [word, said],
    "in a frame behind a text": lambda word, said: [word + said], "in a frame before a text": lambda word, said: [said + word],
    "in a frame between texts": lambda word, said: [word + word + said + word],
    "cut within its name": lambda word, said: [word + said[:9], said[9:]],
    "byte by byte": lambda word, said: [(word + said)[at : at + 1] for at in range(len(word + said))],
    "before the end": lambda word, said: [word + said + DONE], "before frames of text": lambda word, said: [said, *[word] * 16],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_an_engines_own_error_is_seen_wherever_in_a_frame_it_stands(path: str, layout: str) -> None:
    for said in FAILURES[CHAT if path == COMPLETIONS else path]:
        assert read_end(path, *LAYOUTS[layout](chunk(choice("a")), said))[1] is StreamEnd.FAILED, said


@pytest.mark.parametrize("said", BARE_ERRORS)
def test_a_bare_error_is_no_end_of_a_native_response(said: bytes) -> None:
    reader = open_reader(RESPONSES)
    reader.feed(said)
    assert reader.judge() is StreamEnd.CUT
    assert b"boom" in reader.error
    reader.feed(typed("response.failed", response={}))
    assert reader.judge() is StreamEnd.FAILED


@pytest.mark.parametrize(
    "said",
    [chunk(choice('{"finish_reason":"stop"}')),
        chunk(choice(tool_calls=[{"function": {"arguments": '{"finish_reason":"stop","x":"[DONE]"}'}}])), event({"choices": [],
            "echo": {"choices": [{"finish_reason": "stop"}]}}), event({"choices": [{"finish_reason": ""}], "error": None}),
        event({"choices": "finish_reason"}), event("[DONE]"), b'data: {"choices":[{"finish_reason":"stop"}]\n\n',
        b": [DONE]\n\n", b"x: [DONE]\n\n"],
)  # fmt: skip
def test_words_of_an_ending_that_are_no_ending_end_nothing(said: bytes) -> None:
    assert read_end(CHAT, said)[1] is StreamEnd.CUT


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(
    ("path", "said"),
    [(CHAT, chunk(choice("x" * 5 * WIRE.event_held_bytes, finish="stop"))), (CHAT, event({"choices": [{"finish_reason": "stop",
            "delta": {"content": "x" * 5 * WIRE.event_held_bytes}}]})), (RESPONSES, typed("response.completed",
            response={"output": "x" * 5 * WIRE.event_held_bytes}))],
)  # fmt: skip
def test_a_closing_event_that_is_too_large_to_be_held_closes_once_it_is_whole(
    path: str, said: bytes, pieces: int, *, is_closed: bool
) -> None:
    size = -(-len(said) // pieces)
    frames = [said[at : at + size] for at in range(0, len(said), size)]
    if not is_closed:
        frames[-1] = frames[-1][:-9]
    out, end = read_end(path, *frames)
    assert end is (StreamEnd.WHOLE if is_closed else StreamEnd.CUT)
    assert out == said if is_closed else said.startswith(out)


def test_what_is_remembered_of_an_endless_stream_is_bounded() -> None:
    reader = open_reader(CHAT)
    for _ in range(200):
        reader.feed(chunk(choice("x" * 100)) * 300)
    assert len(reader.recent) < 200_000


NOISE = st.lists(
    st.sampled_from([b"data: x", b"event: e", b": ping", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"\xe2\x82\xac", b""])
).map(b"".join)


def chunk_of(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


USAGE_EVENT = b'data: {"choices": [], "usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}\n\n'


def cut_up(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return ``data`` in pieces that end at ``cuts``."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    starts = [0, *places[:-1]]
    return [data[start:end] for start, end in zip(starts, places, strict=True)]


@examples(25)
@given(NOISE, st.lists(st.integers(0, 80)))
def test_the_cutter_keeps_every_byte_in_order_and_cuts_behind_blank_lines(data: bytes, cuts: list[int]) -> None:
    cutter = EventCutter()
    outs = [cutter.feed(piece) for piece in cut_up(data, cuts) if piece]
    assert b"".join([*outs, cutter.finish()]) == data
    sent = b""
    for out in outs:
        sent += out
        if out:
            assert find_boundary(sent) == len(sent)


def test_an_endless_event_is_passed_on_instead_of_being_held() -> None:
    cutter = EventCutter()
    big = b"data: " + b"x" * WIRE.event_held_bytes
    assert cutter.feed(big) == big
    inside = [cutter.is_inside_event]
    assert cutter.feed(b"end\n\ndata: ") == b"end\n\n"
    inside.append(cutter.is_inside_event)
    assert inside == [True, False]
    assert cutter.finish() == b"data: "


@examples(25)
@given(st.lists(st.integers(0, 400)), st.booleans(), st.booleans())
def test_the_usage_chunk_is_read_and_dropped_only_when_the_box_asked_for_it(cuts: list[int], drops: bool, crlf: bool) -> None:
    talk = chunk_of("a") + chunk_of('say \\"usage\\" and \\"choices\\":[]')
    data, kept = talk + USAGE_EVENT + DONE, talk + DONE
    if crlf:
        data, kept = data.replace(b"\n", b"\r\n"), kept.replace(b"\n", b"\r\n")
    reader = StreamReader(drops_usage=drops)
    out = b"".join([*(reader.feed(piece) for piece in cut_up(data, cuts) if piece), reader.finish()])
    assert out == (kept if drops else data)
    assert reader.usage() == count(3, 4, 7)


def count(prompt: int, completion: int, total: int) -> TokenCounts:
    return TokenCounts(prompt_tokens=prompt, completion_tokens=completion, total_tokens=total)


def read_body(*pieces: bytes) -> tuple[bytes, TokenCounts | None]:
    reader = BodyReader(is_readable=True)
    return b"".join([*map(reader.feed, pieces), reader.finish()]), reader.usage()


def test_usage_is_understood_in_every_shape_and_up_to_a_size() -> None:
    first = b'data: {"choices":[],"usage":null,"prompt_filter_results":[]}\n\n'
    for events, counts in (
        ([first], None),
        ([b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n',
          b'event: message_delta\ndata: {"delta":{},"usage":{"output_tokens":5}}\n\n'], (9, 5, 14)),
        ([typed("response.completed", response={"usage": {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}})],
          (1, 2, 3)),
    ):  # fmt: skip
        reader = StreamReader(drops_usage=counts is None)
        assert b"".join(map(reader.feed, events)) == b"".join(events)
        assert reader.usage() == (counts and count(*counts))
    answer = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    assert read_body(answer[:20], answer[20:]) == (answer, count(1, 2, 3))
    assert read_body(b" " * (WIRE.usage_body_bytes + 1), answer)[1] is None
    assert BodyReader(is_readable=False).usage() is None
    for nonsense in (b"", b"not json", b"[]", b'{"usage":"much"}', b'{"usage":{"prompt_tokens":-1}}'):
        assert read_body(nonsense)[1] is None


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 2, 4)),
        ({"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, (9, 2, 4)),
        ({"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2, "output_tokens": 2}, (9, 2, 4)),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 40}}, (9, 2, 9)),
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}, (9, 2, 0)),
        ({"prompt_tokens": 9, "total_tokens": 9}, (9, 0, 0)),
        ({"completion_tokens": 2, "total_tokens": 11}, None),
    ],
    ids=["chat", "responses", "messages", "more than there are", "unsaid", "embeddings", "no prompt"],
)
def test_every_reader_of_usage_says_the_same(usage: dict[str, Any], counts: tuple[int, int, int] | None) -> None:
    """On the node, at the gateway, and where an answer is translated; without the prompt nobody can say."""
    body = json.dumps({"usage": usage, "choices": []}).encode()
    stream, numbers = StreamReader(drops_usage=False), Numbers()
    stream.feed(b"data: " + body + b"\n\n")
    found = [read_body_usage(body), stream.usage(), read_usage(body), find_usage(b"data: " + body), numbers.take(body)]
    if "input_tokens" not in usage:
        found.append(msgspec.convert(usage, ChatUsage).to_counts())
    shown = [None if one is None else (one.prompt_tokens, one.completion_tokens, one.cached_tokens) for one in found]
    assert shown == [counts] * len(found)


def test_llamacpp_says_in_its_timings_what_it_had_cached() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    counts = Numbers().take(json.dumps({"usage": usage, "timings": {"cache_n": 5, "prompt_n": 4}}).encode())
    assert counts is not None
    assert counts.cached_tokens == 5


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, b'{"model": "m"}'), (CHAT, b'{"stream": false}'), (CHAT,
            b'{"stream": true, "stream_options": {"include_usage": true}}'), (CHAT, b"not json"), (CHAT, b'[{"stream": true}]'),
        (CHAT, b'{"stream": "yes"}'), (CHAT, b"\xff"), ("/v1/messages", b'{"stream": true}')],
)  # fmt: skip
def test_a_body_is_left_alone_unless_it_is_a_stream_without_usage(path: str, body: bytes) -> None:
    assert ask_for_usage(path, body) == (body, False)


@pytest.mark.parametrize(
    "body",
    [b' {"model":"m","stream":true,"x":1e2}', b'{"stream":true,"stream_options":null}',
        b'{"stream":true,"stream_options":{"include_usage":false,"other":1}}',
        b'{"stream":true,"messages":[{"content":"\\"stream_options\\": hello"}]}'],
)  # fmt: skip
def test_usage_is_asked_for_and_everything_else_stays(body: bytes) -> None:
    changed, drops = ask_for_usage(CHAT, body)
    assert drops
    before, after = json.loads(body), json.loads(changed)
    wanted = {**(before.pop("stream_options", None) or {}), "include_usage": True}
    assert after.pop("stream_options") == wanted
    assert after == before


def tidy_chunk(delta: dict[str, Any] | None = None, *, finish: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def call(arguments: object, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{**more, "function": {**more.get("function", {}), "arguments": arguments}}]}


GOOD = [
    tidy_chunk({"role": "assistant", "content": None}),
    tidy_chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look",
            "arguments": ""}}]}), tidy_chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
    tidy_chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}), tidy_chunk(finish="tool_calls"),
]  # fmt: skip
LOOK = {"name": "look"}
TGI = {"index": 0, "id": "", "type": "function"}
SLOPPY: dict[str, list[bytes]] = {
    "null ids and names behind": [tidy_chunk({"content": ""}), tidy_chunk(call("", index=0, id="call_1", type="function",
        function=LOOK)), tidy_chunk(call('{"a"', index=0, id=None, type=None, function={"name": None})),
        tidy_chunk(call(":1}", index=0, id="", type="function", function={"name": ""})), tidy_chunk(finish="tool_calls")],
    "the id again and again": [tidy_chunk({"role": "assistant"}), tidy_chunk(call('{"a"', index=0, id="call_1",
        type="function", function=LOOK)), tidy_chunk(call(":1}", index=0, id="call_1", type="function", function=LOOK)),
        tidy_chunk(finish="tool_calls")],
    "no index": [tidy_chunk(call('{"a"', id="call_1", type="function", function=LOOK)), tidy_chunk(call(":1}", id=None)),
        tidy_chunk({"tool_calls": None}, finish="tool_calls")],
    "no id at all": [tidy_chunk(call('{"a"', index=0, id="", function=LOOK)), tidy_chunk(call(":1}", index=0, id="")),
        tidy_chunk({"tool_calls": []}, finish="tool_calls")],
    "no list (TGI)": [tidy_chunk({"role": "assistant", "tool_calls": {**TGI, "function": {"name": "look",
        "arguments": '{"a"'}}}), tidy_chunk({"role": "assistant", "tool_calls": {**TGI, "function": {"name": None,
        "arguments": ":1}"}}}), tidy_chunk(finish="tool_calls")],
    "an object": [tidy_chunk({"role": None, **call({"a": 1}, index=0, id="call_1", function=LOOK)}),
        tidy_chunk(finish="tool_calls")],
}  # fmt: skip


def tidy(stream: bytes, size: int = 1 << 20) -> bytes:
    tidier = ChatTidier()
    return b"".join(tidier.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + tidier.finish()


def join_stream(stream: bytes) -> Any:
    """Return what OpenAI's stream helper makes of a stream, which raises for what it cannot join."""
    reply = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    transport = httpx2.MockTransport(lambda _request: reply)
    with (
        openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=transport)) as client,
        client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}]) as events,
    ):
        return events.get_final_completion().choices[0].message


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("chunks", SLOPPY.values(), ids=SLOPPY)
def test_the_sdk_reads_one_whole_call_out_of_sloppy_chunks(chunks: list[bytes], size: int) -> None:
    out = tidy(b"".join([*chunks, DONE]), size)
    message = join_stream(out)
    (found,) = message.tool_calls
    assert (message.role, found.type, found.function.name) == ("assistant", "function", "look")
    assert json.loads(found.function.arguments) == {"a": 1}
    assert found.id
    assert out.count(b'"id":"call_') == 1
    assert out.endswith(DONE)


@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_what_is_in_order_goes_out_byte_for_byte(size: int) -> None:
    usage = b'data: {"id":"c", "choices":[],  "usage":{"prompt_tokens":1}}\n\n'
    stream = b"".join([b": ping\n\n", *GOOD, usage, b'data: {"error":{"message":"no"}}\n\n', b"data: {broken\n\n", DONE])
    assert tidy(stream, size) == stream


def test_two_calls_on_one_index_become_two() -> None:
    first, second = (call("{}", index=0, id=f"call_{n}", type="function", function={"name": f"f{n}"}) for n in (1, 2))
    message = join_stream(
        tidy(b"".join([tidy_chunk({"role": "assistant"}), tidy_chunk(first), tidy_chunk(second),
                tidy_chunk(finish="tool_calls"), DONE])),
    )  # fmt: skip
    assert [(one.id, one.function.name) for one in message.tool_calls] == [("call_1", "f1"), ("call_2", "f2")]


def test_usage_without_choices_gets_them() -> None:
    out = tidy(b'data: {"id":"c","usage":{"prompt_tokens":1}}\n\n')
    assert json.loads(out[6:]) == {"id": "c", "usage": {"prompt_tokens": 1}, "choices": []}


HINT = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"


@pytest.mark.parametrize(
    ("blame", "statuses", "codes"),
    [
        (Blame.CALLER, (400, 413, 415, 422),
         [(403, "remote_not_allowed"), (429, "spending_cap_reached"), (400, "invalid_request")]),
        (Blame.CAPACITY, (429, 503, 529), [(429, "rate_limit_exceeded")]),
        (Blame.INSTALLATION, (401, 402, 403, 404, 405, 408, 409, 410, 418, 424, 500, 501, 502, 504), [(403, 403), (403, None)]),
    ],
)  # fmt: skip
def test_status_and_code_of_an_engine_say_whose_fault_it_is(
    blame: Blame, statuses: tuple[int, ...], codes: list[tuple[int, object]]
) -> None:
    assert {judge_error(status) for status in statuses} | {judge_error(*each) for each in codes} == {blame}


AUDIO = "audio input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
OLDER_LLAMA = 'Failed to parse messages: Unsupported content part type: "image_url"; messages = ['
CORRECTED: list[tuple[int, str, int]] = [  # what llama.cpp, Ollama and vLLM say; of what a model generated, and of faults, last
    (500, HINT, 400), (500, "image input is not supported by this server", 400), (500, AUDIO, 400), (500, OLDER_LLAMA, 400),
    (501, "unsupported content[].type", 400), (500, "Failed to parse tool call arguments as JSON", 400),
    (500, 'Failed to parse tools: Unsupported tool type: {"type":"nonsense"}; tools = [', 400),
    (500, "this model is missing data required for image input", 400), (500, "this model does not support image input", 400),
    (500, "llama3 is not a multimodal model", 400), (500, "At most 0 image(s) may be provided in one prompt.", 400),
    (400, "llama3 is not a multimodal model", 400), (422, HINT, 422), (503, HINT, 503), (401, HINT, 401),
    (500, "Failed to parse input at pos 0: <|tool", 500), (500, "CUDA error: out of memory", 500),
    (500, "failed to process image: out of memory", 500), (500, "", 500),
]  # fmt: skip


@pytest.mark.parametrize(("status", "message", "corrected"), CORRECTED)
def test_what_no_node_could_take_is_the_callers_mistake_whatever_the_engine_calls_it(
    status: int, message: str, corrected: int
) -> None:
    assert correct_status(status, message) == corrected


@pytest.mark.parametrize(
    ("body", "message"),
    [({"error": {"message": "no", "type": "t", "code": 400}}, "no"), ({"object": "error", "message": "no"}, "no"),
        ({"detail": "no"}, "no"), ({"error": "no"}, "no"), ({"error": {"message": ""}}, ""), ([], "")],
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
    [("max_tokens must be at least 1, got 0.", "max_tokens must be at least 1, got 0."),
        ("The model `org/a-model-with-a-long-name` does not exist.",
            "The model `org/a-model-with-a-long-name` does not exist."), ("two\n lines\x1b[31m of\ttext",
            "two lines [31m of text"), (f"Field required [type=missing, input_value={SECRET!r}, input_type=str]",
            "Field required [type=missing,…"),
        (f"[{{'type': 'missing', 'msg': 'Field required', 'input': {{'a': {SECRET!r}}}}}]",
            "[{'type': 'missing', 'msg': 'Field required',…"), (f'[{{"msg":"Field required","input":"{SECRET}"}}]',
            '[{"msg":"Field required",…'), (f'Unsupported content part type: "image_url"; messages = [ {SECRET}',
            'Unsupported content part type: "image_url";…'), ('Failed to parse tools: no; tools = [ { "a": 1 } ]',
            "Failed to parse tools: no;…"), (f"cannot parse: {SECRET}", "cannot parse:…"), (f"cannot parse: {SECRET[:20]}",
            "cannot parse:…"), (f"cannot parse: {SECRET[:19]}", f"cannot parse: {SECRET[:19]}"),
        (f"cannot parse: {SECRET.replace(' ', chr(92) + 'n')}", "cannot parse:…"), (f"bad key sk-proj-{'a1' * 12} for it",
            "bad key … for it"), (SECRET, "…"), ("", "")],
)  # fmt: skip
def test_the_words_of_an_engine_are_quoted_without_those_of_the_request(message: str, quoted: str) -> None:
    assert quote_message(message, ask()) == quoted


def test_a_form_is_searched_for_echoes_as_it_was_sent() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n' + SECRET.encode() + b"\r\n--x--\r\n"
    assert quote_message(f"bad prompt: {SECRET}", form) == "bad prompt:…"
    assert quote_message("bad prompt", form) == "bad prompt"


@examples(25)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=200), before=st.text(max_size=60), after=st.text(max_size=60),
    start=st.integers(0, 200), size=st.integers(20, 200), how=st.sampled_from([str, json.dumps, repr]),
)  # fmt: skip
def test_no_run_of_twenty_characters_of_a_request_is_ever_quoted(
    text: str, before: str, after: str, start: int, size: int, how: type[str]
) -> None:
    quoted = quote_message(before + how(text[start : start + size]) + after, ask(text))
    plain = " ".join(text.split())
    assert len(quoted) <= WIRE.error_quote_chars
    assert not any(plain[at : at + 20] in quoted for at in range(len(plain) - 19))
