"""Streams whose node dies: whatever is cut wherever, the answers of all nodes together read as one, or it is said why not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.exchange import read_stream
from gateway.dialects.continuation import (
    COMPLETIONS_PATH,
    Ask,
    Continuation,
    JoinedStream,
    JoinedTranslator,
    find_ineligibility,
)
from gateway.values import CHAT_PATH
from nodes.states import CONTINUATIONS
from tests.fakes.chat_engine import CONTEXT, MESSAGES, RESPONSES, cut, open_answer, read_said, say_request
from tests.fakes.examples import examples
from wire.bridge import TokenCounts
from wire.limits import WIRE
from wire.tidy import ChatTidier

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(' \n\t\u00a0\u2028 \n\\"😀é'), max_size=40)
CHAT_BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
COMPLETION_BODY = b'{"model":"m","stream":true,"prompt":"Say: "}'
PROMPT_TOKENS = 7


class Engine:
    """Says one text, whatever was said of it before, a token a piece; its tokens have so many characters, in turn."""

    def __init__(self, text: str, lengths: list[int], number: int) -> None:
        self._text = text
        self._lengths = lengths
        self._number = number

    def answer(self, ask: Ask, *, blank: bytes = b"\n\n") -> bytes:
        body = json.loads(ask.body)
        begun = ""
        if ask.path == CONTINUATIONS:
            assert body["messages"][-1]["role"] == "assistant"
            begun = body["messages"][-1]["content"]
        elif ask.path == COMPLETIONS_PATH:
            begun = body["prompt"].removeprefix("Say: ")
        assert self._text.startswith(begun)
        assert begun == begun.rstrip()
        prompt = PROMPT_TOKENS + sum(1 for _ in self._cut(begun))
        most = body.get("max_tokens")
        pieces = list(self._cut(self._text[len(begun) :]))
        is_cut = most is not None and len(pieces) > most
        pieces = pieces[:most]
        is_chat = ask.path != COMPLETIONS_PATH
        events = [self._chunk([{"index": 0, "delta": {"role": "assistant", "content": None}}])] if is_chat else []
        for piece in pieces:
            said: dict[str, object] = {"delta": {"content": piece}} if is_chat else {"text": piece}
            events.append(self._chunk([{"index": 0, **said, "finish_reason": None}]))
        end: dict[str, object] = {"delta": {}} if is_chat else {"text": ""}
        events.append(self._chunk([{"index": 0, **end, "finish_reason": "length" if is_cut else "stop"}]))
        usage = {"prompt_tokens": prompt, "completion_tokens": len(pieces), "total_tokens": prompt + len(pieces)}
        events += [self._chunk([], usage=usage), b"data: [DONE]"]
        return b"".join(event + blank for event in events)

    def _cut(self, text: str) -> Iterator[str]:
        at, turn = 0, 0
        while at < len(text):
            length = self._lengths[turn % len(self._lengths)]
            yield text[at : at + length]
            at, turn = at + length, turn + 1

    def _chunk(self, choices: list[dict[str, object]], **more: object) -> bytes:
        head = {"id": f"chatcmpl-{self._number}", "object": "chat.completion.chunk", "created": self._number, "model": "m"}
        return b"data: " + json.dumps({**head, "choices": choices, **more}, ensure_ascii=False).encode()


def open_joined(path: str, body: bytes, *, tidies: bool = False) -> tuple[Continuation, JoinedStream | JoinedTranslator]:
    """Return what stands between the nodes and a client that speaks ``path``."""
    if path in (MESSAGES, RESPONSES):
        continuation = Continuation(CHAT_PATH, body, max_bytes=1000, prompt_tokens=PROMPT_TOKENS)
        return continuation, JoinedTranslator(continuation, open_answer(path))
    continuation = Continuation(path, body, max_bytes=1000, prompt_tokens=PROMPT_TOKENS)
    return continuation, JoinedStream(continuation, ChatTidier() if tidies else None)


def relay(path: str, body: bytes, nodes: list[tuple[Engine, int | None]], *, size: int, blank: bytes, tidies: bool) -> bytes:
    """Do what the gateway does with nodes of which each dies after so many bytes (None = it does not); return what it says."""
    continuation, joined = open_joined(path, body, tidies=tidies)
    ask, out = Ask(CHAT_PATH if path in (MESSAGES, RESPONSES) else path, body), []
    for engine, dies_after in nodes:
        answer = engine.answer(ask, blank=blank)
        out += [joined.feed(piece) for piece in cut(answer[:dies_after], size)]
        if dies_after is None or continuation.is_finished:
            break
        if closing := continuation.close():
            out.append(joined.feed(closing))
            break
        assert continuation.ineligibility == ""
        ask = continuation.ask_next()
    if continuation.is_finished and dies_after is not None and (closing := continuation.close()):
        out.append(joined.feed(closing))
    out.append(joined.finish())
    if isinstance(joined, JoinedTranslator):
        assert joined.failure is None
    return b"".join(out)


def read_chunks(data: bytes) -> list[dict[str, Any]]:
    events = [event.data for event in read_stream(data).events]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def read_text(path: str, data: bytes) -> str:
    if path in (MESSAGES, RESPONSES):
        return read_said(path, data).text
    choices = [choice for chunk in read_chunks(data) for choice in chunk["choices"]]
    return "".join(choice["text"] if path == COMPLETIONS_PATH else choice["delta"].get("content") or "" for choice in choices)


@examples(150)
@given(
    path=st.sampled_from([CHAT_PATH, COMPLETIONS_PATH, MESSAGES, RESPONSES]),
    text=TEXT,
    lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=4, max_size=4),
    deaths=st.lists(st.integers(0, 3000), max_size=3),
    size=st.integers(1, 400),
    blank=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    tidies=st.booleans(),
)
def test_wherever_nodes_die_a_client_reads_one_answer_without_a_missing_or_repeated_character(
    path: str, text: str, lengths: list[list[int]], deaths: list[int], size: int, blank: bytes, *, tidies: bool
) -> None:
    body = COMPLETION_BODY if path == COMPLETIONS_PATH else CHAT_BODY
    engines = [Engine(text, of_one, number) for number, of_one in enumerate(lengths, start=1)]
    nodes: list[tuple[Engine, int | None]] = [*zip(engines, deaths, strict=False), (engines[-1], None)]
    data = relay(path, body, nodes, size=size, blank=blank, tidies=tidies and path == CHAT_PATH)
    assert read_text(path, data) == text
    if path in (MESSAGES, RESPONSES):
        return
    chunks = read_chunks(data)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert sum("role" in choice.get("delta", {}) for chunk in chunks for choice in chunk["choices"]) <= 1
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice.get("finish_reason")] == [
        "stop"
    ]


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES, RESPONSES])
def test_a_node_that_dies_between_its_last_word_and_its_count_leaves_no_answer_without_usage(path: str) -> None:
    body = CHAT_BODY[:-1] + b',"stream_options":{"include_usage":true}}'
    engine = Engine("Once upon", [1], 1)
    whole = engine.answer(Ask(CHAT_PATH, body))
    dies_after = whole.index(b'"stop"') + len(b'"stop"}]}\n\n')
    assert b"usage" not in whole[:dies_after]
    data = relay(path, body, [(engine, dies_after)], size=4000, blank=b"\n\n", tidies=False)
    events = [json.loads(event.data) for event in read_stream(data).events if event.data != "[DONE]"]
    found = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    (usage,) = [one for one in found if one and one.get("output_tokens", one.get("completion_tokens"))]
    assert usage.get("output_tokens", usage.get("completion_tokens")) == len("Once upon")


@examples(80)
@given(text=TEXT, most=st.integers(1, 45), deaths=st.lists(st.integers(0, 5000), max_size=3), size=st.integers(1, 400))
def test_all_nodes_together_say_no_more_tokens_than_were_asked_for_and_usage_is_that_of_one_answer(
    text: str, most: int, deaths: list[int], size: int
) -> None:
    wants_usage = {"stream_options": {"include_usage": True}}
    body = json.dumps({**json.loads(CHAT_BODY), "max_tokens": most, **wants_usage}).encode()
    engine = Engine(text, [1], 1)
    data = relay(CHAT_PATH, body, [*[(engine, at) for at in deaths], (engine, None)], size=size, blank=b"\n\n", tidies=False)
    assert read_text(CHAT_PATH, data) == text[:most]
    usage = [chunk["usage"] for chunk in read_chunks(data) if chunk.get("usage")]
    spoken = len(text[:most])
    assert usage == [{"prompt_tokens": PROMPT_TOKENS, "completion_tokens": spoken, "total_tokens": PROMPT_TOKENS + spoken}]


def feed(continuation: Continuation, *deltas: Mapping[str, object], finish: str | None = None) -> bytes:
    out = b""
    for delta in deltas:
        chunk = {"id": "a", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        out += continuation.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return out


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "Hm"}, {"reasoning": "Hm"}, {"refusal": "No"}, {"audio": {"id": "a"}},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}]},
        {"function_call": {"name": "f"}},
    ],
)  # fmt: skip
def test_an_answer_that_is_more_than_text_goes_on_nowhere(delta: dict[str, object]) -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(continuation, {"content": "Hello"}, delta)
    assert "more than text" in continuation.ineligibility
    assert continuation.text == ""
    assert continuation.close() == b""


def test_an_answer_longer_than_what_may_be_kept_is_passed_on_and_kept_no_longer() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=6)
    assert b"Hello" in feed(continuation, {"content": "Hello"})
    assert continuation.ineligibility == ""
    assert b"you" in feed(continuation, {"content": "you"})
    assert "too long" in continuation.ineligibility
    assert continuation.text == ""


@pytest.mark.parametrize(
    "event", [b'data: {"error":{"message":"out of memory"}}\n\n', b'data: {"object":"error","message":"x"}\n\n', b"data: {\n\n"]
)
def test_an_engine_that_says_itself_that_it_failed_is_not_gone_on_with(event: bytes) -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(continuation, {"content": "Hello"})
    assert continuation.feed(event) == event
    assert continuation.ineligibility


def test_white_space_that_the_client_has_is_left_out_whether_the_node_says_all_of_it_or_less() -> None:
    for again, expected in (
        (" \n\nyou", " \n\nyou"),
        (" you", " \n\nyou"),
        (" \n", " \n\n"),
        ("you", " \n\nyou"),
        ("  you", " \n\n you"),
    ):
        continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
        feed(continuation, {"content": "Hello"}, {"content": " \n"}, {"content": "\n"})
        asked = json.loads(continuation.ask_next().body)
        assert asked["messages"][-1] == {"role": "assistant", "content": "Hello"}
        feed(continuation, *({"content": letter} for letter in again))
        assert continuation.text == "Hello" + expected


def test_a_node_that_begins_to_think_where_it_was_to_go_on_does_not_join() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(continuation, {"content": "Hello"})
    continuation.ask_next()
    assert feed(continuation, {"reasoning_content": "Hm"}, {"content": " you"}) == b""
    assert continuation.failure is not None


def test_a_tool_may_be_called_once_the_text_has_been_gone_on_with() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(continuation, {"role": "assistant", "content": "Hello"})
    continuation.ask_next()
    call: dict[str, object] = {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]}
    said = feed(continuation, {"role": "assistant", "content": " you"}, call)
    assert said.count(b"tool_calls") == 1
    assert b'"role"' not in said
    assert continuation.ineligibility


def test_the_next_node_may_say_what_is_left_of_the_tokens_and_one_at_least() -> None:
    """White space at the end is asked for again, so it counts as left; a node that is asked for no token refuses."""
    for most, left in ((10, 9), (2, 1), (1, 1)):
        continuation = Continuation(CHAT_PATH, CHAT_BODY[:-1] + b',"max_tokens":%d}' % most, max_bytes=100)
        feed(continuation, {"content": "Hello"}, {"content": " "}, {"content": "\n"})
        assert json.loads(continuation.ask_next().body)["max_tokens"] == left


def test_an_answer_whose_tokens_are_all_there_is_closed_and_one_that_lacks_some_is_not() -> None:
    for most, is_closed in ((2, True), (3, False)):
        continuation = Continuation(CHAT_PATH, CHAT_BODY[:-1] + b',"max_tokens":%d}' % most, max_bytes=100)
        feed(continuation, {"content": "Hel"}, {"content": "lo"})
        assert (b'"length"' in continuation.close()) == is_closed


def test_what_is_kept_is_bounded_in_bytes() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=3)
    feed(continuation, {"content": "éé"})
    assert "too long" in continuation.ineligibility


def test_the_first_reason_stays_and_white_space_alone_is_no_text() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=3)
    feed(continuation, {"content": "Hello"}, {"tool_calls": [{"index": 0}]})
    assert "too long" in continuation.ineligibility
    blank = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(blank, {"content": " \n"})
    assert blank.next_paths == (CHAT_PATH,)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"index": 1, "delta": {"content": "Hi"}}, "more than text"),
        ({"index": 0, "delta": {}, "finish_reason": "error"}, "reported an error"),
    ],
)
def test_a_second_answer_and_an_end_that_is_a_failure_go_on_nowhere(choice: dict[str, object], reason: str) -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    continuation.feed(b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n")
    assert reason in continuation.ineligibility


def test_an_event_too_large_to_be_read_passes_of_the_first_node_and_ends_that_of_the_next() -> None:
    piece = b"data: " + b"x" * (WIRE.event_held_bytes + 1)
    first = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    assert first.feed(piece) == piece
    assert "too large" in first.ineligibility
    following = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(following, {"content": "Hello"})
    following.ask_next()
    assert following.feed(piece) == b""
    assert following.failure is not None


def test_an_answer_of_which_no_text_came_is_asked_for_anew_of_any_node() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(continuation, {"role": "assistant", "content": None}, {"content": "\n"})
    assert continuation.ask_next() == Ask(CHAT_PATH, CHAT_BODY)
    assert continuation.count(TokenCounts(prompt_tokens=7, completion_tokens=2, total_tokens=9)).completion_tokens == 2


def test_usage_is_never_below_zero_and_cached_tokens_never_exceed_the_prompt() -> None:
    continuation = Continuation(CHAT_PATH, CHAT_BODY, max_bytes=100)
    feed(continuation, *({"content": letter} for letter in "Hello"))
    continuation.ask_next()
    odd = {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    said = continuation.feed(b'data: {"choices":[],"usage":' + json.dumps(odd).encode() + b"}\n\n")
    counts = TokenCounts(prompt_tokens=2, completion_tokens=1, total_tokens=3, cached_tokens=2)
    assert continuation.count(counts) == TokenCounts(prompt_tokens=0, completion_tokens=3, total_tokens=3, cached_tokens=0)
    usage = json.loads(said[6:])["usage"]
    assert usage == {
        "prompt_tokens": 0, "completion_tokens": 3, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "'n'"), ({"logprobs": True}, "'logprobs'"), ({"top_logprobs": 3}, "'top_logprobs'"),
        ({"response_format": {"type": "json_object"}}, "'response_format'"), ({"tool_choice": "required"}, "'tool_choice'"),
        ({"guided_json": {}}, "'guided_json'"), ({"structured_outputs": {}}, "'structured_outputs'"),
        ({"grammar": "x"}, "'grammar'"), ({"min_tokens": 3}, "'min_tokens'"), ({"functions": [{}]}, "'functions'"),
        ({"continue_final_message": True}, "'continue_final_message'"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]}, "the assistant's"),
        ({"n": 1, "logprobs": False, "response_format": {"type": "text"}, "tools": [{}], "tool_choice": "auto", "x": None}, ""),
    ],
)  # fmt: skip
def test_what_is_not_the_same_for_the_rest_of_an_answer_is_named(fields: dict[str, object], named: str) -> None:
    ineligibility = find_ineligibility(CHAT_PATH, json.dumps({**json.loads(CHAT_BODY), **fields}).encode())
    assert named in ineligibility
    assert bool(named) == bool(ineligibility)


def test_completions_of_one_text_can_be_gone_on_with_and_nothing_but_chat_and_completions() -> None:
    assert find_ineligibility(COMPLETIONS_PATH, COMPLETION_BODY) == ""
    assert find_ineligibility(COMPLETIONS_PATH, b'{"prompt":["a"]}') == "'prompt' is not one text"
    assert find_ineligibility(COMPLETIONS_PATH, b'{"prompt":"a","echo":true}')
    assert find_ineligibility(MESSAGES, CHAT_BODY) == "the node is asked on /v1/messages"
    assert find_ineligibility(CHAT_PATH, b'{"messages":1}') == "the body cannot be read"


def test_what_other_dialects_ask_for_can_be_gone_on_with() -> None:
    for path in (MESSAGES, RESPONSES):
        translation = say_request(path, stream=True)
        assert find_ineligibility(translation.path, translation.body) == ""
        joined = JoinedTranslator(Continuation(CHAT_PATH, translation.body, max_bytes=9), translation.open_answer(CONTEXT))
        assert joined.usage is None
        assert joined.kept is None
