"""Rows on streamed chat completions and on tools."""

from __future__ import annotations

import json
from typing import Any  # tool definitions are JSON

from conformance.engine.script import (
    ARGUMENTS,
    BEFORE_STOP,
    CACHED_TOKENS,
    CALL_ID,
    CUT_SHORT,
    NASTY,
    OTHER_ARGUMENTS,
    OTHER_TOOL,
    PROMPT_TOKENS,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.exchange import DONE, LIMITS, Answer, Field, NotApplicable, Stream, Violation, list_payloads
from conformance.readers.chat import Call, ChatStream, check_logprobs, check_usage, read_chat, require_end
from conformance.table import (
    CHAT_NAMED,
    QUESTION,
    Go,
    Target,
    list_goes,
    no_call,
    require_ok,
    require_script_or_skip,
    require_stream,
    requirement,
)

PROMPT = "Say hello in a few words."


async def _stream(target: Target, prompt: str = PROMPT, **more: object) -> Stream:
    return require_stream(await target.chat(prompt, stream=True, **more))


async def _chunks(target: Target, prompt: str = PROMPT, **more: object) -> list[Field]:
    return list_payloads((await _stream(target, prompt, **more)).events)


async def _read(target: Target, prompt: str, **more: object) -> ChatStream:
    return require_end(read_chat(await _stream(target, prompt, **more)))


@requirement("chat.stream.no_event_lines", "no event: lines", clients="naive readers, Node helper")
async def _no_event_lines(target: Target) -> None:
    named = [event.name for event in (await _stream(target)).events if event.name]
    if named:
        raise Violation(f"events are named {named[:3]}")


@requirement(
    "chat.stream.head",
    "every chunk has the same id and model, object: chat.completion.chunk, created (integer)",
    clients="LangChain, AI SDK",
)
async def _head(target: Target) -> None:
    chunks = await _chunks(target)
    for chunk in chunks:
        chunk["object"].must_be("chat.completion.chunk")
        chunk["created"].count()
        for name in ("id", "model"):
            chunk[name].must_be(chunks[0][name].value)


@requirement("chat.stream.created", "created is the same in every chunk", clients="OpenAI's schema", needs_script=True)
async def _created(target: Target) -> None:
    found = {chunk["created"].count() for chunk in await _chunks(target)}
    if len(found) != 1:
        raise Violation(f"created is {sorted(found)}")


@requirement(
    "chat.stream.choices",
    "every chunk has choices, each with index, delta, finish_reason (null until the end)",
    clients="Node helper, AI SDK, llm",
)
async def _choices(target: Target) -> None:
    for chunk in await _chunks(target):
        for choice in chunk["choices"].items():
            choice["index"].count()
            choice["delta"].members()
            choice["finish_reason"].must_be(None, "stop", "length", "tool_calls", "content_filter")


@requirement("chat.stream.role", "the first delta has role: assistant", clients="Node helper, runTools")
async def _role(target: Target) -> None:
    first = next((chunk for chunk in await _chunks(target) if chunk["choices"].items()), None)
    if first is None:
        raise Violation("no chunk has a choice")
    first["choices"][0]["delta"]["role"].must_be("assistant")


@requirement(
    "chat.stream.finish", "exactly one finish_reason for each choice", clients="Node helper, AI SDK; tools never run without"
)
async def _finish(target: Target) -> None:
    reasons = [
        (choice["index"].value, choice["finish_reason"].value)
        for chunk in await _chunks(target)
        for choice in chunk["choices"].items()
        if not choice["finish_reason"].is_null
    ]
    if [index for index, _ in reasons] != [0]:
        raise Violation(f"finish reasons (index, reason): {reasons}")


@requirement("chat.stream.done", "[DONE] comes last, once", clients="raw loops, llm")
async def _done(target: Target) -> None:
    data = [event.data for event in (await _stream(target)).events]
    if data.count(DONE) != 1 or data[-1] != DONE:
        raise Violation(f"[DONE] comes {data.count(DONE)} times, the last event is {data[-1][:80] if data else None!r}")


@requirement(
    "chat.stream.usage",
    "include_usage: one chunk with choices: [] and usage right before [DONE], none before",
    clients="Node helper, AI SDK, llm, LangChain",
)
async def _usage(target: Target) -> None:
    chunks = await _chunks(target, stream_options={"include_usage": True})
    for chunk in chunks[:-1]:
        if chunk.get("usage") is not None:
            raise Violation(f"{chunk.path} has usage and is not the last chunk")
        if not chunk["choices"].items():
            raise Violation(f"{chunk.path} has no choices and is not the last chunk")
    chunks[-1]["choices"].must_be([])
    check_usage(chunks[-1]["usage"])


@requirement(
    "chat.stream.no_usage",
    "usage not asked for: no usage and no chunk without choices",
    clients="Node helper, llm (litellm#8349)",
)
async def _no_usage(target: Target) -> None:
    for extra in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        for chunk in await _chunks(target, **extra):
            if not chunk["choices"].items():
                raise Violation(f"{chunk.path} has no choices, with {extra or 'no stream_options'}")
            if chunk.get("usage") is not None:
                raise Violation(f"{chunk.path} has usage that nobody asked for, with {extra or 'no stream_options'}")


@requirement(
    "chat.stream.strict",
    "a strict accumulator takes the whole stream, with and without usage",
    clients="openai-python 3, openai-node 7",
)
async def _strict(target: Target) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        said = await _read(target, PROMPT, **options)
        if bool(options) != (said.usage is not None):
            raise Violation(f"usage is {said.usage and said.usage.shown}, asked for: {bool(options)}")


@requirement("chat.stream.text", "the pieces add up to what the engine said", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    content = (await _read(target, PROMPT)).first.content
    if content != TEXT:
        raise Violation(f"the text adds up to {content!r}, the engine said {TEXT!r}")


@requirement(
    "chat.stream.n", "n: 2 streams two choices, each with role and finish_reason", clients="openai SDKs", needs_script=True
)
async def _n(target: Target) -> None:
    said = await _read(target, PROMPT, n=2)
    if {index: choice.content for index, choice in said.choices.items()} != {0: TEXT, 1: TEXT}:
        raise Violation(f"the choices are {said.choices}")


@requirement(
    "chat.stream.logprobs", "logprobs are in the chunks of the text they belong to", clients="evaluations, openai-python helper"
)
async def _logprobs(target: Target) -> None:
    answer = await target.chat(PROMPT, stream=True, logprobs=True, top_logprobs=1)
    require_script_or_skip(target, answer, "logprobs")
    said = require_end(read_chat(require_stream(answer))).first
    if not said.logprobs:
        if target.scripted:
            raise Violation("logprobs were asked for and no chunk has them")
        raise NotApplicable("the engine sends no logprobs")
    if target.scripted:
        check_logprobs(said.logprobs, said.content)


@requirement(
    "chat.stream.reasoning",
    "thoughts stream as reasoning_content or reasoning, before the text and not in it",
    clients="opencode, Open WebUI, AI SDK (vllm#27755)",
    needs_script=True,
)
async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        said = (await _read(target, prompt)).first
        if (said.reasoning, said.content) != (THOUGHT, TEXT):
            raise Violation(f"thoughts {said.reasoning!r} and text {said.content!r}")
        if said.order != ["reasoning", "content"]:
            raise Violation(f"kinds of delta came in the order {said.order}")


@requirement("chat.stream.refusal", "a refusal streams as delta.refusal", clients="openai SDKs", needs_script=True)
async def _refusal(target: Target) -> None:
    said = (await _read(target, "[[refusal]] hello")).first
    if (said.refusal, said.content) != (REFUSAL, ""):
        raise Violation(f"refusal {said.refusal!r}, text {said.content!r}")


@requirement(
    "chat.stream.length", "a text cut off ends with finish_reason: length", clients="agents, AI SDK", needs_script=True
)
async def _length(target: Target) -> None:
    said = (await _read(target, "[[length]] hello")).first
    if (said.finish_reason, said.content) != ("length", CUT_SHORT):
        raise Violation(f"finish_reason {said.finish_reason!r}, text {said.content!r}")


@requirement("chat.stream.stop", "a stop sequence ends with finish_reason: stop", clients="LangChain, aider", needs_script=True)
async def _stop(target: Target) -> None:
    said = (await _read(target, "[[stop_sequence]] hello", stop=["three"])).first
    if (said.finish_reason, said.content) != ("stop", BEFORE_STOP):
        raise Violation(f"finish_reason {said.finish_reason!r}, text {said.content!r}")


@requirement(
    "chat.stream.cached",
    "the usage chunk keeps prompt_tokens_details.cached_tokens",
    clients="LiteLLM, cost displays",
    needs_script=True,
)
async def _cached(target: Target) -> None:
    usage = (await _read(target, "[[cached]] hello", stream_options={"include_usage": True})).usage
    if usage is None:
        raise Violation("no usage chunk")
    usage["prompt_tokens"].must_be(PROMPT_TOKENS)
    usage["prompt_tokens_details"]["cached_tokens"].must_be(CACHED_TOKENS)


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
async def _finish_call(target: Target) -> None:
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
