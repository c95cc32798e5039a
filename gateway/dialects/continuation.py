"""Continuation of a stream whose node died: which can go on elsewhere, what the next node is asked, where they join. Pure.

A ``Continuation`` stands between an engine's chat or completion stream and whatever says it to the client. It keeps the text
that passed, in memory alone. The next node is asked to go on behind that text without its trailing white space, since chat
templates cut that off; what the node then says again of it is left out. Source: vLLM, "continue_final_message"; llama.cpp,
"prefill assistant message".
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.dialects.chat import FAILED_FINISHES, AnswerTranslator, ChatUsage, FailingTranslator, list_payloads
from gateway.errors import GatewayError, RequestInterrupted
from gateway.values import CHAT_PATH
from nodes.states import CONTINUATIONS
from wire.bridge import TokenCounts
from wire.events import EventCutter
from wire.tidy import ChatTidier
from wire.unreadable import UNREADABLE

COMPLETIONS_PATH = "/v1/completions"
_DONE = b"[DONE]"
_DONE_EVENT = b"data: [DONE]\n\n"
_NOTHING = (b"", b"null", b"[]", b"{}")

_SAME = frozenset({
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "stop", "seed",
    "temperature", "top_p", "top_k", "min_p", "typical_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "repeat_penalty", "logit_bias", "ignore_eos", "tools", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort",
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_prompt", "allow_remote",
})  # fmt: skip
"""Fields that mean the same for the rest of an answer as for the whole of it."""
_SAME_IF: Mapping[str, tuple[object, ...]] = {
    "n": (1,), "best_of": (1,), "logprobs": (False, 0), "top_logprobs": (0,), "echo": (False,), "suffix": ("",),
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"), "modalities": (["text"],),
}  # fmt: skip
"""Fields that do so with one of these values alone."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class _Turn(msgspec.Struct):
    role: str = ""


_turns_decoder = msgspec.json.Decoder(list[_Turn])


def find_ineligibility(path: str, body: bytes) -> str:
    """Return why the answer to a request could not go on at another node, as part of a sentence; nothing where it could.

    ``path``: the API path on which the first node is asked, with ``body``.
    """
    if path not in (CHAT_PATH, COMPLETIONS_PATH):
        return f"the node is asked on {path}"
    try:
        fields = _fields_decoder.decode(body)
        for name, raw in fields.items():
            if name in _SAME or bytes(raw) == b"null":
                continue
            if name not in _SAME_IF or msgspec.json.decode(raw) not in _SAME_IF[name]:
                return f"'{name}' may not mean the same for the rest of an answer"
        if path == COMPLETIONS_PATH:
            is_text = isinstance(msgspec.json.decode(fields["prompt"]), str)
            return "" if is_text else "'prompt' is not one text"
        turns = _turns_decoder.decode(fields["messages"])
    except (*UNREADABLE, KeyError):
        return "the body cannot be read"
    return "the last message is the assistant's" if not turns or turns[-1].role == "assistant" else ""


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()

    @property
    def says_more(self) -> bool:
        """Whether it says something beside text, which no next node could go on with."""
        others = (self.tool_calls, self.function_call, self.audio)
        return bool(self.refusal or self.reasoning_content or self.reasoning) or any(
            bytes(raw) not in _NOTHING for raw in others
        )


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    kind: str = msgspec.field(default="", name="object")
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw()
    usage: msgspec.Raw = msgspec.Raw()


_chunk_decoder = msgspec.json.Decoder(_Chunk)


class Ask(msgspec.Struct, frozen=True):
    """What the next node is asked: an API path and a body."""

    path: str
    body: bytes


class Continuation:
    """One answer over several attempts: ``feed`` … of the first; then, as often as a node dies, ``ask_next`` and ``feed`` ….

    ``path``, ``body``: what the first node was asked. ``max_bytes``: most text that is kept, as UTF-8. ``prompt_tokens``: an
    estimate, for an answer whose text is whole and whose node died before it counted.
    """

    def __init__(self, path: str, body: bytes, *, max_bytes: int, prompt_tokens: int = 0) -> None:
        self._path = path
        self._body = body
        self._bytes_left = max_bytes
        self._text = bytearray()
        self._tokens = 0
        """Pieces of text that passed. Engines send a token a piece, seldom more."""
        self._blank_tokens = 0
        """Those among them, at the end, that are white space alone."""
        self._asked_tokens = 0
        """Those behind which the present node was asked to go on."""
        self._repeated = ""
        """White space that passed and that the present node was not told of."""
        self._cutter = EventCutter()
        self._was_inside = False
        self._head: _Chunk | None = None
        """The first chunk, whose id and time all the others have."""
        self._has_role = False
        self._is_finished = self._is_done = self._has_usage = False
        self._prompt_tokens = prompt_tokens
        self.has_estimated_usage = False
        """Whether ``close`` counted what the client is told, because no node did."""
        self.nodes: list[tuple[uuid.UUID, str]] = []
        """Id and name of the nodes that said something of the answer, as whoever asks them notes."""
        self.first_byte_at: float | None = None
        """When the first of them began, once another one is asked (clock.monotonic() seconds)."""
        self.number = 1
        """Which attempt is fed."""
        self.ineligibility = ""
        """Why it could not go on from here, as part of a sentence; empty = it could."""
        self.failure: GatewayError | None = None
        """Why the present node's answer does not join the text that passed. Nothing of it is returned from then on."""

    @property
    def is_finished(self) -> bool:
        """Whether the answer came to its end, be it that its closing event is still missing."""
        return self._is_finished or self._is_done

    @property
    def next_paths(self) -> tuple[str, ...]:
        """API paths on which another node would be asked to go on with it; none = it cannot go on from here."""
        if self.ineligibility or self.failure is not None:
            return ()
        if self._path == COMPLETIONS_PATH or not self._text.strip():
            return (self._path,)
        return (CONTINUATIONS,)

    @property
    def text(self) -> str:
        return self._text.decode()

    # the stream

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's stream, cut anywhere; return whole events of the client's one stream of chunks."""
        events = self._cutter.feed(data)
        if not events or self.failure is not None:
            return b""
        if self._cutter.is_inside_event or self._was_inside:
            self._was_inside = self._cutter.is_inside_event
            self._give_up("an event is too large")
            if self.number > 1:
                self.failure = RequestInterrupted()
                return b""
            return events
        if self.number == 1:
            for payload in list_payloads(events):
                self._read(payload)
            return events
        return b"".join([self._say_again(payload) for payload in list_payloads(events)])

    def finish(self) -> bytes:
        """Return what the engine left behind its last blank line: an event that lacks nothing else, or nothing."""
        rest = self._cutter.finish()
        payloads = list(list_payloads(rest))
        if len(payloads) != 1 or not _is_whole(payloads[0]):
            return b""
        return self.feed(rest.rstrip(b"\r\n") + b"\n\n")

    def close(self) -> bytes:
        """Return the events that an answer still lacks whose text is whole; nothing where text may be missing."""
        most, events = self._read_most_tokens(), b""
        if self._is_done or (not self._is_finished and (most is None or self._tokens < most or self.ineligibility)):
            return b""
        if not self._is_finished:
            events = self._render_end("length")
        if not self._has_usage and self._wants_usage():
            self.has_estimated_usage = True
            events += self._render_usage()
        self._cutter = EventCutter()
        return events + _DONE_EVENT

    def count(self, usage: TokenCounts) -> TokenCounts:
        """Return usage as it would be had one node given the whole answer. ``usage``: what the present node counted."""
        asked = min(self._asked_tokens, usage.prompt_tokens)
        prompt, completion = usage.prompt_tokens - asked, usage.completion_tokens + asked
        cached = min(usage.cached_tokens, prompt)
        return TokenCounts(
            prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion, cached_tokens=cached
        )

    # the next node

    def ask_next(self) -> Ask:
        """Turn to the next attempt; return what its node is asked. Only while there is no ``ineligibility``."""
        self.number += 1
        self._cutter, self._was_inside, self.failure = EventCutter(), False, None
        text = self.text
        asked = text.rstrip()
        self._repeated = text[len(asked) :]
        self._asked_tokens = self._tokens - self._blank_tokens if asked else 0
        if not asked:  # it begins from the start, so any node may
            return Ask(self._path, self._body)
        fields = _fields_decoder.decode(self._body)
        for name in ("max_tokens", "max_completion_tokens"):
            most = msgspec.json.decode(fields.get(name, b"null"))
            if isinstance(most, int):
                fields[name] = msgspec.Raw(b"%d" % max(1, most - self._asked_tokens))
        if self._path == COMPLETIONS_PATH:
            fields["prompt"] = msgspec.Raw(_encode(msgspec.json.decode(fields["prompt"]) + asked))
            return Ask(COMPLETIONS_PATH, _encode(fields))
        turns = _list_decoder.decode(fields["messages"])
        turns.append(msgspec.Raw(_encode({"role": "assistant", "content": asked})))
        fields["messages"] = msgspec.Raw(_encode(turns))
        return Ask(CONTINUATIONS, _encode(fields))

    # inside

    def _give_up(self, ineligibility: str) -> None:
        self.ineligibility = self.ineligibility or ineligibility
        self._text.clear()

    def _read(self, payload: bytes) -> None:
        """Take one event of the first attempt."""
        chunk = self._decode(payload)
        if chunk is None:
            return
        for choice in chunk.choices:
            self._take_choice(choice, choice.delta.content if choice.delta is not None else choice.text)

    def _decode(self, payload: bytes) -> _Chunk | None:
        if payload == _DONE:
            self._is_done = True
            return None
        try:
            chunk = _chunk_decoder.decode(payload)
        except UNREADABLE:
            self._give_up("the engine sent an event that is no part of an answer")
            return None
        if bytes(chunk.error) not in _NOTHING or chunk.kind == "error":
            self._give_up("the engine itself reported an error")
        if self._head is None and chunk.id:
            self._head = chunk
        self._has_usage = self._has_usage or bytes(chunk.usage) not in _NOTHING
        return chunk

    def _take_choice(self, choice: _Choice, text: str | None) -> None:
        delta = choice.delta
        if choice.index or (delta is not None and delta.says_more):
            self._give_up("the answer is more than text")
        self._has_role |= delta is not None and delta.role is not None
        if choice.finish_reason:
            self._is_finished = True
            if choice.finish_reason in FAILED_FINISHES:
                self._give_up("the engine itself reported an error")
        if not text:
            return
        self._tokens += 1
        self._blank_tokens = self._blank_tokens + 1 if text.isspace() else 0
        if self.ineligibility:
            return
        said = text.encode()
        self._bytes_left -= len(said)
        if self._bytes_left < 0:
            self._give_up("the answer is too long to be kept")
            return
        self._text += said

    def _say_again(self, payload: bytes) -> bytes:
        """Return one event of a later attempt as the next one of the client's stream; nothing where that has it already."""
        chunk = None if self.failure is not None else self._decode(payload)
        if chunk is None:
            return _DONE_EVENT if self.failure is None and payload == _DONE else b""
        fields: dict[str, Any] = msgspec.json.decode(payload)  # Any: JSON
        is_news = fields.get("usage") is not None or self.ineligibility != ""
        for choice, said in zip(chunk.choices, fields.get("choices") or (), strict=True):
            if self._asked_tokens and choice.delta is not None and (choice.delta.reasoning_content or choice.delta.reasoning):
                self.failure = RequestInterrupted("The node that was to go on with the answer began to think instead.")
                return b""
            is_news |= self._join(choice, said)
        if not is_news:
            return b""
        if self._head is not None:
            fields |= {"id": self._head.id, "created": self._head.created, "model": self._head.model}
        if isinstance(fields.get("usage"), dict):
            fields["usage"] = self._sum_usage(fields["usage"])
        return b"data: " + _encode(fields) + b"\n\n"

    def _join(self, choice: _Choice, said: dict[str, Any]) -> bool:  # Any: JSON
        """Take a choice and put right what is said of it; return whether the client has to hear it."""
        delta = choice.delta
        text = delta.content if delta is not None else choice.text
        joined = self._leave_out(text) if text else text
        had_role = self._has_role
        self._take_choice(choice, joined)
        if delta is None:
            said["text"] = joined or ""
        else:
            if joined != text:
                said["delta"]["content"] = joined
            if had_role:
                said["delta"].pop("role", None)
        return bool(
            joined or choice.finish_reason or (delta is not None and (delta.says_more or (delta.role and not had_role)))
        )

    def _leave_out(self, text: str) -> str:
        """Return a piece without the white space that the client has."""
        at = 0
        while at < min(len(text), len(self._repeated)) and text[at] == self._repeated[at]:
            at += 1
        self._repeated = self._repeated[at:] if at == len(text) else ""
        return text[at:]

    def _sum_usage(self, usage: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        try:
            counts = msgspec.convert(usage, ChatUsage).to_counts()
        except msgspec.ValidationError:
            return usage
        if counts is None:
            return usage
        summed = self.count(counts)
        usage = usage | {
            "prompt_tokens": summed.prompt_tokens,
            "completion_tokens": summed.completion_tokens,
            "total_tokens": summed.total_tokens,
        }
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            usage["prompt_tokens_details"] = details | {"cached_tokens": min(details["cached_tokens"], summed.prompt_tokens)}
        return usage

    def _read_most_tokens(self) -> int | None:
        fields = _fields_decoder.decode(self._body)
        given = [msgspec.json.decode(fields.get(name, b"null")) for name in ("max_completion_tokens", "max_tokens")]
        return next((most for most in given if isinstance(most, int)), None)

    def _wants_usage(self) -> bool:
        options = msgspec.json.decode(_fields_decoder.decode(self._body).get("stream_options", b"null"))
        return isinstance(options, dict) and options.get("include_usage") is True

    def _render_end(self, reason: str) -> bytes:
        said: dict[str, object] = {"delta": {}} if self._path == CHAT_PATH else {"text": ""}
        return self._render_chunk(choices=[{"index": 0, **said, "finish_reason": reason}])

    def _render_usage(self) -> bytes:
        # As the present node would count, since ``feed`` makes of it what one node would have.
        prompt, completion = self._prompt_tokens + self._asked_tokens, max(0, self._tokens - self._asked_tokens)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return self._render_chunk(choices=[], usage=usage)

    def _render_chunk(self, **said: object) -> bytes:
        head, is_chat = self._head or _Chunk(), self._path == CHAT_PATH
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        chunk = {"id": head.id, "object": kind, "created": head.created, "model": head.model, **said}
        return b"data: " + _encode(chunk) + b"\n\n"


def _is_whole(payload: bytes) -> bool:
    try:
        return payload == _DONE or isinstance(msgspec.json.decode(payload), dict)
    except UNREADABLE:
        return False


class JoinedStream:
    """A stream passed on as chunks, whichever node they come from. ``tidier``: puts those of chat right for strict clients."""

    def __init__(self, continuation: Continuation, tidier: ChatTidier | None) -> None:
        self._continuation = continuation
        self._tidier = tidier

    def feed(self, data: bytes) -> bytes:
        events = self._continuation.feed(data)
        return self._tidier.feed(events) if self._tidier is not None and events else events

    def finish(self) -> bytes:
        rest = self.feed(self._continuation.finish())
        return rest + self._tidier.finish() if self._tidier is not None else rest


class JoinedTranslator:
    """An ``AnswerTranslator`` that hears one stream, whichever node it comes from."""

    def __init__(self, continuation: Continuation, translator: AnswerTranslator) -> None:
        self._continuation = continuation
        self._translator = translator

    @property
    def usage(self) -> TokenCounts | None:
        return self._translator.usage

    @property
    def failure(self) -> GatewayError | None:
        return self._translator.failure or self._continuation.failure

    @property
    def kept(self) -> bytes | None:
        return self._translator.kept

    def feed(self, data: bytes) -> bytes:
        events = self._continuation.feed(data)
        return self._translator.feed(events) if events else b""

    def finish(self) -> bytes:
        rest = self._continuation.finish()
        said = self._translator.feed(rest) if rest else b""
        return said + self._translator.finish()

    def translate_whole(self, body: bytes) -> bytes:
        return self._translator.translate_whole(body)

    def fail(self, error: GatewayError) -> bytes:
        return self._translator.fail(error) if isinstance(self._translator, FailingTranslator) else b""
