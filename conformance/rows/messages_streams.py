"""Rows on streams of the Messages API."""

from __future__ import annotations

from typing import Any  # request fields are JSON

from conformance.engine.script import (
    ARGUMENTS,
    BEFORE_STOP,
    CACHED_TOKENS,
    CALL_ID,
    CUT_SHORT,
    NASTY,
    OTHER_ARGUMENTS,
    OTHER_CALL_ID,
    OTHER_TOOL,
    PROMPT_TOKENS,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.exchange import LIMITS, Event, Field, Violation, list_payloads, read_json
from conformance.readers.messages import MessageStream, check_usage, read_messages, require_end
from conformance.rows.messages import ANTHROPIC_TOOLS
from conformance.table import (
    MESSAGES_NAMED,
    PROMPT,
    Target,
    list_goes,
    no_call,
    require_script_or_skip,
    require_stream,
    requirement,
)


async def _events(target: Target) -> list[Event]:
    return list(require_stream(await target.messages(PROMPT, stream=True)).events)


async def _of_kind(target: Target, kind: str) -> list[Field]:
    found = [one for one in list_payloads(await _events(target)) if one["type"].value == kind]
    if not found:
        raise Violation(f"there is no {kind}")
    return found


async def _read(target: Target, prompt: str, **more: Any) -> MessageStream:
    return require_end(read_messages(require_stream(await target.messages(prompt, stream=True, **more))))


@requirement(
    "messages.stream.names",
    "every event has an event line equal to its type",
    clients="every Anthropic client sees nothing without",
)
async def _names(target: Target) -> None:
    for event in await _events(target):
        if event.name != event.json()["type"].value:
            raise Violation(f"event {event.number} is named {event.name!r}: {event.data[:80]}")


@requirement(
    "messages.stream.start",
    "one message_start, first: content [], stop_reason null, usage with both counts",
    clients="Python, Node, LangChain, pi (litellm#33224)",
)
async def _start(target: Target) -> None:
    found = await _of_kind(target, "message_start")
    if len(found) != 1:
        raise Violation(f"{len(found)} message_start")
    (await _events(target))[0].json()["type"].must_be("message_start")
    message = found[0]["message"]
    message["content"].must_be([])
    message["stop_reason"].must_be(None)
    check_usage(message["usage"])


@requirement(
    "messages.stream.block_start", "content_block_start: index from 0, an empty text", clients="anthropic SDKs (litellm#13373)"
)
async def _block_start(target: Target) -> None:
    for number, event in enumerate(await _of_kind(target, "content_block_start")):
        event["index"].must_be(number)
        if event["content_block"]["type"].value == "text":
            event["content_block"]["text"].must_be("")


@requirement("messages.stream.block_stop", "every block is stopped", clients="Claude Code prints nothing; AI SDK runs no tool")
async def _block_stop(target: Target) -> None:
    opened = [event["index"].value for event in await _of_kind(target, "content_block_start")]
    closed = [event["index"].value for event in await _of_kind(target, "content_block_stop")]
    if opened != closed:
        raise Violation(f"blocks {opened} are opened, {closed} stopped")


@requirement(
    "messages.stream.delta",
    "message_delta: stop_reason, stop_sequence, usage.output_tokens",
    clients="Python, Node, AI SDK, pi, LangChain raise",
)
async def _delta(target: Target) -> None:
    (event,) = await _of_kind(target, "message_delta")
    event["delta"].must_have(("stop_reason", "stop_sequence"))
    event["delta"]["stop_reason"].word()
    event["usage"]["output_tokens"].count()


@requirement("messages.stream.stop", "message_stop comes last, no [DONE]", clients="Node SDK, pi, AI SDK")
async def _stop(target: Target) -> None:
    events = await _events(target)
    if events[-1].name != "message_stop":
        raise Violation(f"the last event is {events[-1].name or events[-1].data[:40]!r}")


@requirement(
    "messages.stream.strict",
    "a strict accumulator takes the whole stream",
    clients="anthropic-python, anthropic-node, Claude Code",
)
async def _strict(target: Target) -> None:
    await _read(target, PROMPT)


@requirement("messages.stream.text", "the pieces add up to what the engine said", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    said = await _read(target, PROMPT)
    if said.texts("text") != [TEXT] or len(said.blocks) != 1:
        raise Violation(f"blocks: {said.blocks}")


@requirement(
    "messages.stream.usage",
    "the counts are the engine's: input_tokens and output_tokens by the end",
    clients="Claude Code, cost displays",
    needs_script=True,
)
async def _usage(target: Target) -> None:
    said = await _read(target, PROMPT)
    assert said.message is not None
    assert said.delta is not None
    usage = said.delta["usage"]
    if usage["output_tokens"].count() != 6:
        raise Violation(f"message_delta says {usage.shown}, the engine counted 6 output tokens")
    begun = said.message["usage"]["input_tokens"].value
    ended = usage.value.get("input_tokens")
    if PROMPT_TOKENS not in (begun, ended):
        raise Violation(f"input_tokens: {begun} at the start, {ended} in the end; the engine counted {PROMPT_TOKENS}")


@requirement(
    "messages.stream.cached",
    "cached tokens are told by the end of the stream",
    clients="Claude Code's cost display",
    needs_script=True,
)
async def _cached(target: Target) -> None:
    said = await _read(target, "[[cached]] hello")
    assert said.message is not None
    assert said.delta is not None
    found = [place["usage"].value.get("cache_read_input_tokens") for place in (said.message, said.delta)]
    if CACHED_TOKENS not in found:
        raise Violation(f"cache_read_input_tokens: {found}; the engine said {CACHED_TOKENS}")


async def _calls(target: Target, directive: str) -> list[tuple[str, str, object]]:
    """Return id, name and input of the calls of a stream that ended well."""
    more = {"tools": ANTHROPIC_TOOLS, "max_tokens": LIMITS.call_tokens}
    for go in list_goes(target, directive):
        choice = go.choose(free={"type": "any"}, named=MESSAGES_NAMED)
        answer = await target.messages(go.prompt, tool_choice=choice, stream=True, **more)
        require_script_or_skip(target, answer, "tools")
        said = require_end(read_messages(require_stream(answer)))
        assert said.delta is not None
        calls = [block for block in said.blocks if block.kind == "tool_use"]
        reason = said.delta["delta"]["stop_reason"]
        if target.scripted or (calls and reason.value != "max_tokens"):
            reason.must_be("tool_use")
            return [(block.start["id"].text(), block.start["name"].text(), block.arguments()) for block in calls]
    raise no_call()


def _json(*pieces: str) -> object:
    return read_json("".join(pieces), "arguments").value


_PAIR = [(CALL_ID, TOOL, _json(*ARGUMENTS)), (OTHER_CALL_ID, OTHER_TOOL, _json(*OTHER_ARGUMENTS))]


def _must_say(calls: list[tuple[str, str, object]], expected: list[tuple[str, str, object]]) -> None:
    if calls != expected:
        raise Violation(f"the calls are {calls}, the engine made {expected}")


@requirement(
    "messages.stream.tool_use",
    "a call: content_block_start with input {}, input_json_delta, stop; stop_reason tool_use",
    clients="Claude Code, anthropic SDKs, AI SDK",
)
async def _tool_use(target: Target) -> None:
    calls = await _calls(target, "tools")
    if target.scripted:
        _must_say(calls, _PAIR[:1])


@requirement(
    "messages.stream.parallel", "two calls are two blocks, one after the other", clients="Claude Code", needs_script=True
)
async def _parallel(target: Target) -> None:
    _must_say(await _calls(target, "parallel_tools"), _PAIR)


@requirement(
    "messages.stream.interleaved",
    "calls whose arguments come in turns: blocks still one after the other",
    clients="anthropic SDKs (litellm#13373)",
    needs_script=True,
)
async def _interleaved(target: Target) -> None:
    _must_say(await _calls(target, "interleaved_tools"), _PAIR)


@requirement(
    "messages.stream.whole_call",
    "a call that the engine says in one piece arrives whole",
    clients="Claude Code",
    needs_script=True,
)
async def _whole_call(target: Target) -> None:
    _must_say(await _calls(target, "whole_tools"), _PAIR[:1])


@requirement(
    "messages.stream.nasty",
    "input with quotes, brackets, escapes and emoji arrives unchanged",
    clients="Claude Code writes files with it",
    needs_script=True,
)
async def _nasty(target: Target) -> None:
    _must_say(await _calls(target, "nasty_arguments"), [(CALL_ID, TOOL, _json(NASTY))])


@requirement(
    "messages.stream.text_then_call",
    "a text block stops before the call's block starts",
    clients="Claude Code",
    needs_script=True,
)
async def _text_then_call(target: Target) -> None:
    said = await _read(target, "[[text_then_tools]] weather?", tools=ANTHROPIC_TOOLS)
    if [block.kind for block in said.blocks] != ["text", "tool_use"] or said.texts("text") != [TEXT]:
        raise Violation(f"blocks: {[(block.kind, block.text) for block in said.blocks]}")


@requirement(
    "messages.stream.empty_calls",
    "an engine's empty tool_calls: [] gives the text, no empty input_json_delta",
    clients="anthropic SDKs (litellm#29286)",
    needs_script=True,
)
async def _empty_calls(target: Target) -> None:
    said = await _read(target, "[[empty_tool_calls]] hello")
    if [(block.kind, block.text) for block in said.blocks] != [("text", TEXT)]:
        raise Violation(f"blocks: {[(block.kind, block.text) for block in said.blocks]}")


@requirement(
    "messages.stream.thinking",
    "thoughts stream as thinking_delta in a thinking block, before the text block",
    clients="Claude Code, pi (litellm#32357)",
    needs_script=True,
)
async def _thinking(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        said = await _read(target, prompt)
        if [(block.kind, block.text) for block in said.blocks] != [("thinking", THOUGHT), ("text", TEXT)]:
            raise Violation(f"blocks: {[(block.kind, block.text) for block in said.blocks]}")


@requirement(
    "messages.stream.thinking_call",
    "thoughts, then a call: two blocks, no empty text block between",
    clients="Claude Code",
    needs_script=True,
)
async def _thinking_call(target: Target) -> None:
    said = await _read(target, "[[thinking]] [[tools]] weather?", tools=ANTHROPIC_TOOLS)
    if [block.kind for block in said.blocks] != ["thinking", "tool_use"]:
        raise Violation(f"blocks: {[(block.kind, block.text) for block in said.blocks]}")


@requirement(
    "messages.stream.max_tokens", "streamed: a text cut off: stop_reason max_tokens", clients="Claude Code", needs_script=True
)
async def _max_tokens(target: Target) -> None:
    said = await _read(target, "[[length]] hello")
    assert said.delta is not None
    said.delta["delta"]["stop_reason"].must_be("max_tokens")
    if said.texts("text") != [CUT_SHORT]:
        raise Violation(f"texts: {said.texts('text')}")


@requirement(
    "messages.stream.stop_sequence",
    "the stop sequence that ended it is named in message_delta",
    clients="anthropic SDKs",
    needs_script=True,
)
async def _stop_sequence(target: Target) -> None:
    said = await _read(target, "[[stop_sequence]] hello", stop_sequences=["three", "four"])
    assert said.delta is not None
    said.delta["delta"]["stop_reason"].must_be("stop_sequence")
    said.delta["delta"]["stop_sequence"].must_be("three")
    if said.texts("text") != [BEFORE_STOP]:
        raise Violation(f"texts: {said.texts('text')}")


@requirement(
    "messages.stream.refusal", "streamed: a refusal's words reach the reader", clients="anthropic SDKs", needs_script=True
)
async def _refusal(target: Target) -> None:
    said = await _read(target, "[[refusal]] hello")
    if said.texts("text") != [REFUSAL]:
        raise Violation(f"texts: {said.texts('text')}")
