"""Rows on tool calls in chat completions. A real model is asked too; where it calls no tool, the row says so."""

from __future__ import annotations

import json
from typing import Any  # tool definitions are JSON

from conformance.engine.speech import ARGUMENTS, CALL_ID, NASTY, OTHER_ARGUMENTS, OTHER_TOOL, TEXT, TOOL
from conformance.events import list_payloads
from conformance.exchange import Answer
from conformance.fields import Field
from conformance.limits import LIMITS
from conformance.readers.chat import Call, read_chat, require_end
from conformance.rows.calling import CHAT_NAMED, QUESTION, Go, list_goes, no_call
from conformance.table import requirement
from conformance.target import Target, require_ok, require_script_or_skip, require_stream
from conformance.verdicts import Violation


def _function(name: str, **members: list[str]) -> dict[str, Any]:
    """Return a tool whose calls even a tiny model can write, where the engine holds it to the schema."""
    properties = {member: {"type": "string", "enum": values} for member, values in members.items()}
    parameters = {"type": "object", "properties": properties, "required": list(members), "additionalProperties": False}
    function = {"name": name, "description": f"{name} for a place", "strict": True, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _function(TOOL, city=["Paris", "Rome"], unit=["celsius", "fahrenheit"]),
    _function(OTHER_TOOL, zone=["Europe/Paris", "Europe/Rome"]),
]
EXPECTED = [(TOOL, "".join(ARGUMENTS)), (OTHER_TOOL, "".join(OTHER_ARGUMENTS))]


async def _ask(target: Target, go: Go, *, stream: bool) -> Answer:
    choice = go.choose(free="required", named=CHAT_NAMED)
    answer = await target.chat(go.prompt, tools=TOOLS, stream=stream, max_tokens=LIMITS.call_tokens, tool_choice=choice)
    require_script_or_skip(target, answer, "tools")
    return answer


async def _whole(target: Target, directive: str = "tools") -> tuple[Field, list[Field]]:
    """Return the choice of a whole answer, checked for its ending, and its calls."""
    for go in list_goes(target, directive):
        choice = require_ok(await _ask(target, go, stream=False))["choices"][0]
        calls = choice["message"].get("tool_calls")
        if calls is not None and calls.items() and (target.scripted or choice["finish_reason"].value != "length"):
            choice["finish_reason"].must_be(*go.finish_reasons)
            return choice, calls.items()
        if target.scripted:
            raise Violation(f"message.tool_calls is missing: {choice.shown}")
    raise no_call()


async def _pieces(target: Target, directive: str = "tools") -> list[Field]:
    """Return the tool deltas of a stream in their order."""
    for go in list_goes(target, directive):
        stream = require_stream(await _ask(target, go, stream=True))
        pieces = [
            piece
            for chunk in list_payloads(stream.events)
            for choice in chunk["choices"].items()
            if (calls := choice["delta"].get("tool_calls")) is not None
            for piece in calls.items()
        ]
        if pieces:
            return pieces
        if target.scripted:
            raise Violation("no delta has tool_calls")
    raise no_call()


async def _calls(target: Target, directive: str) -> list[Call]:
    """Return the calls as a strict accumulator adds them up."""
    for go in list_goes(target, directive):
        first = require_end(read_chat(require_stream(await _ask(target, go, stream=True)))).first
        if target.scripted or (first.calls and first.finish_reason != "length"):
            if first.finish_reason not in go.finish_reasons:
                raise Violation(f"finish_reason is {first.finish_reason!r}, tool_calls is due")
            return first.calls
    raise no_call()


def _must_say(calls: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    if calls != expected:
        raise Violation(f"the calls are {calls}, the engine made {expected}")


@requirement(
    "chat.tools.call", "a call has id, type: function, function.name and arguments", clients="OpenAI Agents, LiteLLM, Continue"
)
async def _call(target: Target) -> None:
    _, calls = await _whole(target)
    for call in calls:
        call["id"].word()
        call["type"].must_be("function")
        call["function"]["name"].word()
        call["function"]["arguments"].text()


@requirement("chat.tools.arguments", "arguments are a string of JSON, never an object", clients="LangChain, Pydantic AI")
async def _arguments(target: Target) -> None:
    _, calls = await _whole(target)
    for call in calls:
        _parse_arguments(call["function"]["arguments"].text())


@requirement("chat.tools.content", "with calls, content is null (or empty)", clients="LangChain, OpenAI Agents")
async def _content(target: Target) -> None:
    choice, _ = await _whole(target)
    choice["message"]["content"].must_be(None, "")


@requirement(
    "chat.tools.finish",
    "an answer that calls tools says finish_reason: tool_calls",
    clients="AI SDK, agents: tools never run without",
)
async def _finish(target: Target) -> None:
    await _whole(target)


@requirement("chat.tools.parallel", "two calls in one answer arrive with ids of their own", clients="agents", needs_script=True)
async def _parallel(target: Target) -> None:
    _, calls = await _whole(target, "parallel_tools")
    _must_say([(call["function"]["name"].text(), call["function"]["arguments"].text()) for call in calls], EXPECTED)
    if calls[0]["id"].value == calls[1]["id"].value:
        raise Violation(f"both calls have the id {calls[0]['id'].shown}")


@requirement("chat.tools.stream.index", "every tool delta has an index", clients="Python and Node helpers, AI SDK, LangChain")
async def _index(target: Target) -> None:
    for piece in await _pieces(target):
        piece["index"].count()


@requirement(
    "chat.tools.stream.first",
    "the first delta of a call has id, type and function.name; arguments are a string or absent, never null",
    clients="OpenAI Agents, LiteLLM, Continue, runTools",
)
async def _first(target: Target) -> None:
    first = (await _pieces(target))[0]
    first["id"].word()
    first["type"].must_be("function")
    first["function"]["name"].word()
    if "arguments" in first["function"]:
        first["function"]["arguments"].text()


@requirement(
    "chat.tools.stream.later",
    "later deltas leave out id, type and name (null or empty breaks)",
    clients="Python helper, openai-node 7, opencode",
)
async def _later(target: Target) -> None:
    seen: set[int] = set()
    for piece in await _pieces(target):
        index = piece["index"].count()
        if index in seen:
            for place, name in ((piece, "id"), (piece, "type"), (piece["function"], "name")):
                if name in place:
                    raise Violation(f"{place.path}.{name} comes again as {place[name].shown}")
        seen.add(index)


@requirement(
    "chat.tools.stream.arguments",
    "the pieces add up to the arguments; the stream says finish_reason: tool_calls",
    clients="all SDK helpers",
)
async def _stream_arguments(target: Target) -> None:
    calls = await _calls(target, "tools")
    for call in calls:
        _parse_arguments(call.arguments)
    if target.scripted:
        _must_say([(call.name, call.arguments) for call in calls], EXPECTED[:1])
        if calls[0].id != CALL_ID:
            raise Violation(f"the id of the call is {calls[0].id!r}, the engine gave {CALL_ID!r}")


@requirement(
    "chat.tools.stream.parallel",
    "two calls stream with index 0 and 1 and ids of their own",
    clients="agents, openai helpers",
    needs_script=True,
)
async def _stream_parallel(target: Target) -> None:
    _must_say([(call.name, call.arguments) for call in await _calls(target, "parallel_tools")], EXPECTED)


@requirement(
    "chat.tools.stream.interleaved",
    "calls whose arguments come in turns are not mixed up",
    clients="openai helpers",
    needs_script=True,
)
async def _interleaved(target: Target) -> None:
    _must_say([(call.name, call.arguments) for call in await _calls(target, "interleaved_tools")], EXPECTED)


@requirement("chat.tools.stream.whole", "a call in one piece arrives whole", clients="LiteLLM, Continue", needs_script=True)
async def _whole_call(target: Target) -> None:
    _must_say([(call.name, call.arguments) for call in await _calls(target, "whole_tools")], EXPECTED[:1])


@requirement(
    "chat.tools.stream.nasty",
    "arguments with quotes, brackets, escapes and emoji arrive byte for byte",
    clients="agents that write code",
    needs_script=True,
)
async def _nasty(target: Target) -> None:
    _must_say([(call.name, call.arguments) for call in await _calls(target, "nasty_arguments")], [(TOOL, NASTY)])


@requirement(
    "chat.tools.stream.text_first", "a text before a call arrives too", clients="Claude-like agents", needs_script=True
)
async def _text_first(target: Target) -> None:
    said = require_end(read_chat(require_stream(await _ask(target, Go(f"[[text_then_tools]] {QUESTION}"), stream=True)))).first
    if said.content != TEXT or len(said.calls) != 1:
        raise Violation(f"text {said.content!r}, calls {said.calls}")


@requirement(
    "chat.tools.empty",
    "an engine's empty tool_calls: [] does not hide the text",
    clients="AI SDK (litellm#29286)",
    needs_script=True,
)
async def _empty(target: Target) -> None:
    said = require_end(read_chat(require_stream(await target.chat("[[empty_tool_calls]] hello", stream=True)))).first
    if said.content != TEXT or said.calls:
        raise Violation(f"text {said.content!r}, calls {said.calls}")


@requirement(
    "chat.tools.result", "a conversation with a call and its result is answered", clients="every agent", needs_script=True
)
async def _result(target: Target) -> None:
    call = {"id": CALL_ID, "type": "function", "function": {"name": TOOL, "arguments": "".join(ARGUMENTS)}}
    turns = [
        {"role": "user", "content": "[[tools]] What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": "18 degrees"},
    ]
    reply = require_ok(await target.chat(messages=turns, tools=TOOLS))
    reply["choices"][0]["message"]["content"].must_be("The tool has answered.")


def _parse_arguments(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Violation(f"the arguments are no JSON: {text[:120]!r} ({error})") from None
    if not isinstance(value, dict):
        raise Violation(f"the arguments must be an object of JSON and are {text[:120]!r}")
