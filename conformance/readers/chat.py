"""Streams of chat completions and completions (OpenAI API reference; strict as openai-python 3 and openai-node 7)."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.exchange import DONE, Field, Stream, Violation

FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")
_SAME_IN_ALL = ("id", "model")


@dataclass(slots=True)
class Call:
    """A tool call as its deltas add up."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Choice:
    """One answer as its deltas add up. ``order``: the kinds of delta in the order in which each first came."""

    role: str = ""
    content: str = ""
    refusal: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[Field] = field(default_factory=list)
    finish_reason: str = ""
    order: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ChatStream:
    """What a stream said. ``usage``: of the chunk before ``[DONE]``; ``failure``: its error object."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Field | None = None
    failure: Field | None = None
    chunks: int = 0
    done: bool = False

    @property
    def first(self) -> Choice:
        """The choice with index 0. Raises Violation when there is none."""
        if 0 not in self.choices:
            raise Violation("no chunk has a choice with index 0")
        return self.choices[0]


def read_chat(stream: Stream) -> ChatStream:
    """Accumulate a stream of chat chunks. Raises Violation at the first chunk that an SDK would stumble over."""
    said, head = ChatStream(), dict[str, object]()
    for event in stream.events:
        if said.done or said.failure is not None:
            raise Violation(f"event {event.number} follows {'[DONE]' if said.done else 'an error'}: {event.data[:80]}")
        if event.name:
            raise Violation(f"event {event.number} has an event line ({event.name}); OpenAI's chat streams have none")
        if event.data == DONE:
            said.done = True
            continue
        chunk = event.json()
        chunk.members()
        if "error" in chunk:
            said.failure = chunk["error"]
            continue
        _check_head(chunk, head, "chat.completion.chunk")
        _take_chunk(said, chunk)
    return said


def _check_head(chunk: Field, head: dict[str, object], kind: str) -> None:
    chunk.must_fit({"object": kind, "id": Field.word, "created": Field.count, "model": Field.word})
    for name in _SAME_IN_ALL:
        if head.setdefault(name, chunk[name].value) != chunk[name].value:
            raise Violation(f"{chunk.path}.{name} changes within the stream: {head[name]!r}, then {chunk[name].value!r}")
    fingerprint = chunk.get("system_fingerprint")
    if "system_fingerprint" in chunk and fingerprint is not None:
        fingerprint.text()


def _take_chunk(said: ChatStream, chunk: Field) -> None:
    said.chunks += 1
    choices = chunk["choices"].items()
    if said.usage is not None:
        raise Violation(f"{chunk.path} follows the chunk with usage, which is the last before [DONE]")
    usage = chunk.get("usage")
    if not choices:
        if usage is None:
            raise Violation(f"{chunk.path} has neither choices nor usage")
        check_usage(usage)
        said.usage = usage
        return
    if usage is not None:
        raise Violation(f"{chunk.path} has choices and usage; usage is due in a chunk of its own with empty choices")
    for choice in choices:
        _take_choice(said, choice)


def _take_choice(said: ChatStream, choice: Field) -> None:
    index = choice["index"].count()
    is_first = index not in said.choices
    known = said.choices.setdefault(index, Choice())
    if known.finish_reason:
        raise Violation(f"{choice.path}: a delta after finish_reason {known.finish_reason!r}")
    delta = choice["delta"]
    delta.members()
    if is_first:
        delta["role"].must_be("assistant")
        known.role = "assistant"
    elif (role := delta.get("role")) is not None:
        role.must_be("assistant")
    known.content += _take_text(known, delta, "content")
    known.refusal += _take_text(known, delta, "refusal")
    thought = _take_text(known, delta, "reasoning_content", called="reasoning")
    known.reasoning += thought or _take_text(known, delta, "reasoning")
    calls = delta.get("tool_calls")
    for call in calls.items() if calls is not None else ():
        _note(known, "tool_calls")
        _take_call(known, call)
    _take_logprobs(known, choice)
    reason = choice["finish_reason"]
    if not reason.is_null:
        reason.must_be(*FINISH_REASONS)
        known.finish_reason = reason.text()


def _take_text(known: Choice, delta: Field, name: str, *, called: str = "") -> str:
    piece = delta.get(name)
    text = piece.text() if piece is not None else ""
    if text:
        _note(known, called or name)
    return text


def _note(known: Choice, kind: str) -> None:
    if kind not in known.order:
        known.order.append(kind)


def _take_call(known: Choice, call: Field) -> None:
    index = call["index"].count()
    function = call["function"]
    arguments = function["arguments"].text() if "arguments" in function else ""
    if index == len(known.calls):
        call["type"].must_be("function")
        known.calls.append(Call(call["id"].word(), function["name"].word(), arguments))
        if len({one.id for one in known.calls}) != len(known.calls):
            raise Violation(f"{call.path}.id {call['id'].value!r} belongs to another call already")
        return
    if index > len(known.calls):
        raise Violation(f"{call.path}.index jumps to {index} after {len(known.calls)} calls")
    # The official SDKs join the pieces of a call by adding texts up, and fail at a null.
    for place, name in ((call, "id"), (call, "type"), (function, "name")):
        if name in place:
            raise Violation(f"{place.path}.{name} comes again ({place[name].shown}); later pieces of a call leave it out")
    known.calls[index].arguments += arguments


def _take_logprobs(known: Choice, choice: Field) -> None:
    logprobs = choice.get("logprobs")
    if logprobs is not None and (content := logprobs.get("content")) is not None:
        known.logprobs += content.items()


def check_usage(usage: Field) -> None:
    """Check token counts of a chat answer. Raises Violation."""
    prompt, completion = usage["prompt_tokens"].count(), usage["completion_tokens"].count()
    if usage["total_tokens"].count() != prompt + completion:
        raise Violation(f"{usage.path}.total_tokens is not the sum: {usage.shown}")


def check_logprobs(entries: list[Field], text: str) -> None:
    """Check that the tokens with their log probabilities spell the text. Raises Violation."""
    spelt = b""
    for entry in entries:
        entry["token"].text()
        if entry["logprob"].number() > 0:
            raise Violation(f"{entry.path}.logprob is above 0")
        entry["top_logprobs"].items()
        data = entry["bytes"]
        spelt += entry["token"].text().encode() if data.is_null else bytes(one.count() for one in data.items())
    if spelt.decode(errors="replace") != text:
        raise Violation(f"the tokens of logprobs spell {spelt.decode(errors='replace')!r}, the text is {text!r}")


def require_end(said: ChatStream) -> ChatStream:
    """Check that a stream ended as a good one does. Raises Violation."""
    if said.failure is not None:
        raise Violation(f"the stream says an error: {said.failure.shown}")
    if not said.choices:
        raise Violation("the stream has no choice at all")
    for index, choice in said.choices.items():
        if not choice.finish_reason:
            raise Violation(f"choice {index} has no finish_reason")
    if not said.done:
        raise Violation("the stream does not end with [DONE]")
    return said


@dataclass(slots=True)
class TextStream:
    """What a streamed completion said, by choice. ``usage_is_alone``: its chunk had no choices."""

    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: Field | None = None
    usage_is_alone: bool = False
    done: bool = False


def read_completion(stream: Stream) -> TextStream:
    """Accumulate a streamed completion. Raises Violation."""
    said, head = TextStream(), dict[str, object]()
    for event in stream.events:
        if said.done:
            raise Violation(f"event {event.number} follows [DONE]")
        if event.name:
            raise Violation(f"event {event.number} has an event line ({event.name})")
        if event.data == DONE:
            said.done = True
            continue
        chunk = event.json()
        if "error" in chunk:
            raise Violation(f"the stream says an error: {chunk['error'].shown}")
        _check_head(chunk, head, "text_completion")
        _take_text_chunk(said, chunk)
    if not said.done:
        raise Violation("the stream does not end with [DONE]")
    for index in said.texts:
        if index not in said.finish_reasons:
            raise Violation(f"choice {index} has no finish_reason")
    return said


def _take_text_chunk(said: TextStream, chunk: Field) -> None:
    choices, usage = chunk["choices"].items(), chunk.get("usage")
    if usage is not None:
        check_usage(usage)
        said.usage, said.usage_is_alone = usage, not choices
    elif not choices:
        raise Violation(f"{chunk.path} has neither choices nor usage")
    for choice in choices:
        index = choice["index"].count()
        if index in said.finish_reasons:
            raise Violation(f"{choice.path}: text after finish_reason")
        said.texts[index] = said.texts.get(index, "") + choice["text"].text()
        if (reason := choice.get("finish_reason")) is not None:
            said.finish_reasons[index] = reason.word()
