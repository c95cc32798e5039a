"""Rows on streams of the Responses API."""

from __future__ import annotations

from typing import Any  # request fields are JSON

from conformance.engine.script import (
    ARGUMENTS,
    CALL_ID,
    CUT_SHORT,
    NASTY,
    OTHER_ARGUMENTS,
    OTHER_CALL_ID,
    OTHER_TOOL,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.exchange import DONE, LIMITS, Event, Field, Violation, list_payloads
from conformance.readers.responses import LAST_EVENTS, ResponseStream, read_responses, require_end
from conformance.rows.responses import FLAT_TOOLS
from conformance.table import (
    PROMPT,
    RESPONSES_NAMED,
    Target,
    list_goes,
    no_call,
    require_script_or_skip,
    require_stream,
    requirement,
)


async def _events(target: Target, prompt: str = PROMPT, **more: Any) -> list[Event]:
    return list(require_stream(await target.responses(prompt, stream=True, **more)).events)


async def _payloads(target: Target) -> list[Field]:
    return list_payloads(await _events(target))


async def _read(target: Target, prompt: str = PROMPT, **more: Any) -> ResponseStream:
    return read_responses(require_stream(await target.responses(prompt, stream=True, **more)))


def _first(payloads: list[Field], kind: str) -> Field:
    found = next((one for one in payloads if one["type"].value == kind), None)
    if found is None:
        raise Violation(f"there is no {kind}; the events are {sorted({one['type'].value for one in payloads})}")
    return found


@requirement(
    "responses.stream.names", "the event line equals the type in the data", clients="Open Responses suite, naive readers"
)
async def _names(target: Target) -> None:
    for event in await _events(target):
        if event.data != DONE and event.name != event.json()["type"].value:
            raise Violation(f"event {event.number} is named {event.name!r}, its type is {event.json()['type'].shown}")


@requirement("responses.stream.numbers", "sequence_number counts up by 1", clients="Open Responses suite, openai helpers")
async def _numbers(target: Target) -> None:
    numbers = [payload["sequence_number"].count() for payload in await _payloads(target)]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise Violation(f"sequence numbers: {numbers[:20]}")


@requirement(
    "responses.stream.created",
    "response.created comes first, then in_progress: output [], usage null",
    clients="Python and Node helpers raise without",
)
async def _created(target: Target) -> None:
    payloads = await _payloads(target)
    for payload, kind in zip(payloads[:2], ("response.created", "response.in_progress"), strict=True):
        payload["type"].must_be(kind)
        payload["response"]["status"].must_be("in_progress")
        payload["response"]["output"].must_be([])
        payload["response"]["usage"].must_be(None)


@requirement(
    "responses.stream.id", "the response id is the same in all lifecycle events", clients="openai-python 3, openai-node 7"
)
async def _id(target: Target) -> None:
    found = {one["response"]["id"].word() for one in await _payloads(target) if "response" in one}
    if len(found) != 1:
        raise Violation(f"ids: {sorted(found)}")


@requirement(
    "responses.stream.added",
    "output_item.added and content_part.added come before the text",
    clients="Python and Node helpers raise, pi prints nothing",
)
async def _added(target: Target) -> None:
    payloads = await _payloads(target)
    order = [one["type"].value for one in payloads]
    _first(payloads, "response.output_item.added")["item"]["id"].word()
    _first(payloads, "response.content_part.added")["part"]["type"].must_be("output_text", "reasoning_text")
    _first(payloads, "response.output_text.delta")["delta"].text()
    if not order.index("response.output_item.added") < order.index("response.content_part.added"):
        raise Violation("content_part.added before output_item.added")
    if not order.index("response.content_part.added") < order.index("response.output_text.delta"):
        raise Violation("output_text.delta before content_part.added")


@requirement(
    "responses.stream.done",
    "output_text.done, content_part.done and output_item.done close what was opened",
    clients="AI SDK runs no tool, helpers return empty text",
)
async def _done(target: Target) -> None:
    payloads = await _payloads(target)
    text = "".join(one["delta"].text() for one in payloads if one["type"].value == "response.output_text.delta")
    _first(payloads, "response.output_text.done")["text"].must_be(text)
    _first(payloads, "response.content_part.done")["part"].members()
    opened = sum(one["type"].value == "response.output_item.added" for one in payloads)
    closed = sum(one["type"].value == "response.output_item.done" for one in payloads)
    if opened != closed:
        raise Violation(f"{opened} items are opened, {closed} closed")


@requirement(
    "responses.stream.last",
    "response.completed (or incomplete) comes last, with the whole object",
    clients="Codex tries 6 times and fails, Python helper raises",
)
async def _last(target: Target) -> None:
    last = (await _payloads(target))[-1]
    last["type"].must_be(*LAST_EVENTS[:2])
    if not last["response"]["output"].items():
        raise Violation("the output of the last event is empty")
    last["response"]["usage"]["total_tokens"].count()


@requirement(
    "responses.stream.delta_ids", "deltas carry item_id, output_index and content_index", clients="openai helpers, AI SDK"
)
async def _delta_ids(target: Target) -> None:
    payloads = await _payloads(target)
    delta = _first(payloads, "response.output_text.delta")
    delta["item_id"].word()
    delta["output_index"].count()
    delta["content_index"].count()
    delta["logprobs"].items()


@requirement("responses.stream.strict", "a strict accumulator takes the whole stream", clients="openai-python 3, openai-node 7")
async def _strict(target: Target) -> None:
    said = await _read(target)
    if said.last is None or said.ending not in LAST_EVENTS[:2]:
        raise Violation(f"the stream ends with {said.ending or 'nothing'}")


@requirement("responses.stream.text", "the pieces add up to what the engine said", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    said = await _read(target)
    require_end(said)
    if said.texts("output_text") != [TEXT]:
        raise Violation(f"texts: {said.texts('output_text')}")


def _has_whole_call(said: ResponseStream) -> bool:
    """Return whether a real model finished a call: an engine may cut it off and say completed all the same."""
    calls = [item for item in said.items if item.added["type"].value == "function_call"]
    return bool(calls) and said.last is not None and said.last["status"].value != "incomplete"


async def _calls(target: Target, directive: str) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of the calls of a stream that ended well."""
    more = {"tools": FLAT_TOOLS, "max_output_tokens": LIMITS.call_tokens}
    for go in list_goes(target, directive):
        choice = go.choose(free="required", named=RESPONSES_NAMED)
        answer = await target.responses(go.prompt, stream=True, tool_choice=choice, **more)
        require_script_or_skip(target, answer, "tools")
        said = read_responses(require_stream(answer))
        if target.scripted or (said.ending == "response.completed" and _has_whole_call(said)):
            response = require_end(said)
            calls = [item for item in response["output"].items() if item["type"].value == "function_call"]
            return [(call["call_id"].word(), call["name"].word(), call["arguments"].text()) for call in calls]
    raise no_call()


_PAIR = [(CALL_ID, TOOL, "".join(ARGUMENTS)), (OTHER_CALL_ID, OTHER_TOOL, "".join(OTHER_ARGUMENTS))]


def _must_say(calls: list[tuple[str, str, str]], expected: list[tuple[str, str, str]]) -> None:
    if calls != expected:
        raise Violation(f"the calls are {calls}, the engine made {expected}")


@requirement(
    "responses.stream.call",
    "a call streams: added, arguments.delta, arguments.done with name, item.done",
    clients="Codex, openai helpers, AI SDK",
)
async def _call(target: Target) -> None:
    calls = await _calls(target, "tools")
    if target.scripted:
        _must_say(calls, _PAIR[:1])


@requirement(
    "responses.stream.parallel",
    "two calls are items with output_index of their own",
    clients="Codex, OpenAI Agents",
    needs_script=True,
)
async def _parallel(target: Target) -> None:
    _must_say(await _calls(target, "parallel_tools"), _PAIR)


@requirement(
    "responses.stream.interleaved", "calls whose arguments come in turns are not mixed up", clients="Codex", needs_script=True
)
async def _interleaved(target: Target) -> None:
    _must_say(await _calls(target, "interleaved_tools"), _PAIR)


@requirement(
    "responses.stream.whole_call", "a call that the engine says in one piece arrives whole", clients="Codex", needs_script=True
)
async def _whole_call(target: Target) -> None:
    _must_say(await _calls(target, "whole_tools"), _PAIR[:1])


@requirement(
    "responses.stream.nasty",
    "arguments with quotes, brackets, escapes and emoji arrive byte for byte",
    clients="Codex",
    needs_script=True,
)
async def _nasty(target: Target) -> None:
    _must_say(await _calls(target, "nasty_arguments"), [(CALL_ID, TOOL, NASTY)])


@requirement("responses.stream.text_then_call", "a text closes before the call opens", clients="Codex", needs_script=True)
async def _text_then_call(target: Target) -> None:
    said = await _read(target, "[[text_then_tools]] weather?", tools=FLAT_TOOLS)
    require_end(said)
    kinds = [item.added["type"].value for item in said.items]
    if kinds != ["message", "function_call"] or said.texts("output_text") != [TEXT]:
        raise Violation(f"items {kinds}, texts {said.texts('output_text')}")


@requirement(
    "responses.stream.empty_calls",
    "an engine's empty tool_calls: [] does not hide the text",
    clients="Codex, AI SDK",
    needs_script=True,
)
async def _empty_calls(target: Target) -> None:
    said = await _read(target, "[[empty_tool_calls]] hello")
    require_end(said)
    if said.texts("output_text") != [TEXT] or len(said.items) != 1:
        raise Violation(f"texts {said.texts('output_text')}, {len(said.items)} items")


@requirement(
    "responses.stream.reasoning",
    "thoughts stream in a reasoning item before the message",
    clients="Codex, AI SDK",
    needs_script=True,
)
async def _reasoning(target: Target) -> None:
    said = await _read(target, "[[thinking]] hello")
    require_end(said)
    thoughts = said.texts("reasoning_text") + said.texts("summary_text")
    if THOUGHT not in thoughts or said.texts("output_text") != [TEXT]:
        raise Violation(f"thoughts {thoughts}, texts {said.texts('output_text')}")
    if [item.added["type"].value for item in said.items] != ["reasoning", "message"]:
        raise Violation(f"items: {[item.added['type'].value for item in said.items]}")


@requirement(
    "responses.stream.refusal",
    "a refusal streams as refusal.delta and refusal.done",
    clients="openai helpers",
    needs_script=True,
)
async def _refusal(target: Target) -> None:
    said = await _read(target, "[[refusal]] hello")
    require_end(said)
    if said.texts("refusal") != [REFUSAL]:
        raise Violation(f"refusals: {said.texts('refusal')}, texts: {said.texts('output_text')}")


@requirement(
    "responses.stream.incomplete",
    "a text cut off ends with response.incomplete",
    clients="AI SDK, openai helpers",
    needs_script=True,
)
async def _incomplete(target: Target) -> None:
    said = await _read(target, "[[length]] hello")
    require_end(said, "response.incomplete")["incomplete_details"]["reason"].must_be("max_output_tokens")
    if said.texts("output_text") != [CUT_SHORT]:
        raise Violation(f"texts: {said.texts('output_text')}")


@requirement(
    "responses.stream.late_usage",
    "usage in the engine's last chunk of text is not lost",
    clients="Codex, cost displays",
    needs_script=True,
)
async def _late_usage(target: Target) -> None:
    response = require_end(await _read(target, "[[usage_in_finish]] hello"))
    if response["usage"]["output_tokens"].count() == 0:
        raise Violation(f"usage is {response['usage'].shown}")
