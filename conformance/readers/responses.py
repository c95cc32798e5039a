"""Streams of Responses (OpenAI API reference and Open Responses; strict as openai-python 3 and openai-node 7)."""

from __future__ import annotations

from dataclasses import dataclass, field

from conformance.exchange import DONE, Event, Field, Stream, Violation

OBJECT_KEYS = (
    "id", "object", "created_at", "completed_at", "status", "error", "incomplete_details", "instructions", "max_output_tokens",
    "max_tool_calls", "model", "output", "parallel_tool_calls", "previous_response_id", "reasoning", "store", "background",
    "service_tier", "temperature", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "text", "tool_choice",
    "tools", "truncation", "usage", "metadata", "safety_identifier", "prompt_cache_key",
)  # fmt: skip
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
# Beginnings of the names of delta and done events: the type of part they fill, and its member.
_PARTS = {
    "response.output_text": ("output_text", "text"),
    "response.refusal": ("refusal", "refusal"),
    "response.reasoning_text": ("reasoning_text", "text"),
    "response.reasoning_summary_text": ("summary_text", "text"),
}
# Events beside the grammar that no client minds.
_FREE = frozenset({"response.metrics", "response.queued"})


@dataclass(slots=True)
class Part:
    """A content part while its item is open."""

    type: str
    text: str = ""
    finished: bool = False
    closed: bool = False


@dataclass(slots=True)
class Item:
    """An output item. ``added`` and ``done`` as the events gave them; ``arguments``: a call's, from its deltas."""

    added: Field
    parts: dict[int, Part] = field(default_factory=dict)
    arguments: str = ""
    said_arguments: str | None = None
    done: Field | None = None


@dataclass(slots=True)
class ResponseStream:
    """What a stream said. ``last``: the response of the closing event ``ending``; ``order``: the types of all events."""

    created: Field | None = None
    items: list[Item] = field(default_factory=list)
    ending: str = ""
    last: Field | None = None
    order: list[str] = field(default_factory=list)

    def texts(self, part_type: str) -> list[str]:
        """Return the texts of all parts of one type."""
        return [part.text for item in self.items for part in item.parts.values() if part.type == part_type]


class _Reader:
    """The life of a response: created, in progress, items each from added to done, an ending with the whole of it."""

    def __init__(self) -> None:
        self.said = ResponseStream()
        self._ids: set[str] = set()
        self._number = 0
        self._is_done = False

    def take(self, event: Event) -> None:
        if event.data == DONE:
            if not self.said.ending:
                raise Violation("[DONE] before the response has ended")
            self._is_done = True
            return
        body = event.json()
        kind = body["type"].word()
        if event.name and event.name != kind:
            raise Violation(f"event {event.number}: the event line says {event.name!r}, its data {kind!r}")
        if self.said.ending or self._is_done:
            raise Violation(f"event {event.number} ({kind}) follows the end of the response")
        if kind == "error":
            raise Violation(f"a bare error event, which Codex reads as a broken stream: {body.shown}")
        if body["sequence_number"].count() != self._number:
            raise Violation(f"event {event.number}: sequence_number is {body['sequence_number'].value}, {self._number} is due")
        self._number += 1
        self.said.order.append(kind)
        if self.said.created is None and kind != "response.created":
            raise Violation(f"the first event is {kind}, response.created is due")
        self._dispatch(kind, body)

    def _dispatch(self, kind: str, body: Field) -> None:
        if kind in {"response.created", "response.in_progress"}:
            self._begin(kind, body["response"])
        elif kind in LAST_EVENTS:
            self._end(kind, body["response"])
        elif kind == "response.output_item.added":
            self._add_item(body)
        elif kind == "response.output_item.done":
            self._finish_item(body)
        elif kind in {"response.content_part.added", "response.reasoning_summary_part.added"}:
            self._add_part(body)
        elif kind in {"response.content_part.done", "response.reasoning_summary_part.done"}:
            self._close_part(body)
        elif kind.startswith("response.function_call_arguments."):
            self._take_arguments(kind, body)
        elif kind.rpartition(".")[0] in _PARTS:
            self._take_text(kind, body)
        elif kind not in _FREE:
            raise Violation(f"{body.path}: {kind!r} is no event of Responses")

    def _begin(self, kind: str, response: Field) -> None:
        if self.said.created is None:
            self.said.created = response
        elif kind == "response.created":
            raise Violation("a second response.created")
        self._check_identity(response)
        response["status"].must_be("in_progress", "queued")
        if response["output"].items():
            raise Violation(f"{kind} has output already")
        if response.get("usage") is not None:
            raise Violation(f"{kind} has usage already; it is null until the end")

    def _check_identity(self, response: Field) -> None:
        assert self.said.created is not None
        response["id"].must_be(self.said.created["id"].word())
        response["object"].must_be("response")

    def _add_item(self, body: Field) -> None:
        index = body["output_index"].count()
        if index != len(self.said.items):
            raise Violation(f"{body.path}.output_index is {index}, {len(self.said.items)} is due")
        item = body["item"]
        check_item(item)
        if item["id"].word() in self._ids:
            raise Violation(f"{item.path}.id {item['id'].shown} belongs to another item")
        if item["type"].value == "message" and item["content"].items():
            raise Violation(f"{item.path}.content is filled before its parts are added")
        if item["type"].value == "function_call":
            item["arguments"].must_be("")
        self._ids.add(item["id"].text())
        self.said.items.append(Item(item))

    def _open_item(self, body: Field) -> Item:
        index = body["output_index"].count()
        if index >= len(self.said.items) or self.said.items[index].done is not None:
            raise Violation(f"{body.path}: item {index} is not open")
        item = self.said.items[index]
        if "item_id" in body:
            body["item_id"].must_be(item.added["id"].value)
        return item

    def _part_index(self, body: Field) -> int:
        return body["summary_index" if "summary_index" in body else "content_index"].count()

    def _add_part(self, body: Field) -> None:
        item, index = self._open_item(body), self._part_index(body)
        body["item_id"].word()
        if index != len(item.parts):
            raise Violation(f"{body.path}: part {index} is added, {len(item.parts)} is due")
        part = body["part"]
        item.parts[index] = Part(part["type"].word())
        if part["type"].value == "output_text":
            part["text"].must_be("")
            part["annotations"].items()

    def _open_part(self, body: Field, part_type: str) -> Part:
        item, index = self._open_item(body), self._part_index(body)
        body["item_id"].word()
        part = item.parts.get(index)
        if part is None:
            raise Violation(f"{body.path}: part {index} was never added: content_part.added is missing")
        if part.type != part_type:
            raise Violation(f"{body.path}: {body['type'].value} for a part of type {part.type}")
        if part.closed or part.finished:
            raise Violation(f"{body.path}: part {index} is done already")
        return part

    def _take_text(self, kind: str, body: Field) -> None:
        part_type, member = _PARTS[kind.rpartition(".")[0]]
        part = self._open_part(body, part_type)
        if kind.endswith(".delta"):
            part.text += body["delta"].text()
            return
        body[member].must_be(part.text)
        part.finished = True

    def _close_part(self, body: Field) -> None:
        item, index = self._open_item(body), self._part_index(body)
        part = item.parts.get(index)
        if part is None or part.closed:
            raise Violation(f"{body.path}: part {index} is not open")
        if not part.finished:
            raise Violation(f"{body.path}: part {index} ends before its text is done")
        body["part"]["type"].must_be(part.type)
        body["part"]["refusal" if part.type == "refusal" else "text"].must_be(part.text)
        part.closed = True

    def _take_arguments(self, kind: str, body: Field) -> None:
        item = self._open_item(body)
        body["item_id"].word()
        item.added["type"].must_be("function_call")
        if item.said_arguments is not None:
            raise Violation(f"{body.path}: the arguments are done already")
        if kind.endswith(".delta"):
            item.arguments += body["delta"].text()
            return
        body["arguments"].must_be(item.arguments)
        body["name"].must_be(item.added["name"].value)
        item.said_arguments = item.arguments

    def _finish_item(self, body: Field) -> None:
        item, done = self._open_item(body), body["item"]
        check_item(done)
        for name in ("id", "type", "call_id", "name"):
            if name in item.added:
                done[name].must_be(item.added[name].value)
        if done["type"].value == "function_call":
            if item.said_arguments is None:
                raise Violation(f"{body.path}: function_call_arguments.done is missing")
            done["arguments"].must_be(item.said_arguments)
        for index, part in item.parts.items():
            if not part.closed:
                raise Violation(f"{body.path}: the item ends before its part {index} is done")
        if done["type"].value == "message":
            texts = [one["refusal" if one["type"].value == "refusal" else "text"].text() for one in done["content"].items()]
            if texts != [part.text for part in item.parts.values()]:
                raise Violation(f"{done.path}.content differs from what its deltas said: {done['content'].shown}")
        item.done = done

    def _end(self, kind: str, response: Field) -> None:
        self._check_identity(response)
        status = kind.rpartition(".")[2]
        response["status"].must_be(status)
        if status == "failed":
            response["error"]["code"].word()
            response["error"]["message"].word()
        else:
            self._check_output(response)
            check_usage(response["usage"])
        self.said.ending, self.said.last = kind, response

    def _check_output(self, response: Field) -> None:
        open_items = [index for index, item in enumerate(self.said.items) if item.done is None]
        if open_items:
            raise Violation(f"the response ends before output_item.done of item {open_items[0]}")
        output = response["output"].items()
        if len(output) != len(self.said.items):
            raise Violation(f"{response.path}.output has {len(output)} items, the stream had {len(self.said.items)}")
        for final, item in zip(output, self.said.items, strict=True):
            assert item.done is not None
            if final.value != item.done.value:
                raise Violation(f"{final.path} differs from its output_item.done: {final.shown} and {item.done.shown}")


def read_responses(stream: Stream) -> ResponseStream:
    """Accumulate a stream. Raises Violation at the first event that breaks a client."""
    reader = _Reader()
    for event in stream.events:
        reader.take(event)
    return reader.said


def require_end(said: ResponseStream, ending: str = "response.completed") -> Field:
    """Return the response of the closing event, which must be that one. Raises Violation."""
    if said.last is None:
        raise Violation(f"the stream ends without {ending}")
    if said.ending != ending:
        raise Violation(f"the stream ends with {said.ending}, {ending} is due: {said.last.get('error') or said.last.shown}")
    return said.last


def check_item(item: Field) -> None:
    """Check an output item, open or done. Raises Violation."""
    kind = item["type"].word()
    item["id"].word()
    item.must_fit(_ITEMS.get(kind, {}))


def _check_parts(content: Field) -> None:
    for part in content.items():
        part["type"].must_be("output_text", "refusal")
        if part["type"].value == "output_text":
            part.must_fit({"text": Field.text, "annotations": Field.items})
            if (logprobs := part.get("logprobs")) is not None:
                logprobs.items()


_STATUSES = ("in_progress", "completed", "incomplete")
_ITEMS: dict[str, dict[str, object]] = {
    "message": {"status": _STATUSES, "role": "assistant", "content": _check_parts},
    "function_call": {"call_id": Field.word, "name": Field.word, "arguments": Field.text, "status": _STATUSES},
    "reasoning": {"summary": Field.items},
}


def check_usage(usage: Field) -> None:
    """Check token counts of Responses. Raises Violation."""
    read, written = usage["input_tokens"].count(), usage["output_tokens"].count()
    usage["input_tokens_details"]["cached_tokens"].count()
    usage["output_tokens_details"]["reasoning_tokens"].count()
    if usage["total_tokens"].count() != read + written:
        raise Violation(f"{usage.path}.total_tokens is not the sum: {usage.shown}")
