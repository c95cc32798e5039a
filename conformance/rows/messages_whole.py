"""Rows on whole answers of the Messages API."""

from __future__ import annotations

from conformance.engine.speech import (
    ARGUMENTS,
    BEFORE_STOP,
    CACHED_TOKENS,
    CALL_ID,
    CUT_SHORT,
    OTHER_TOOL,
    PROMPT_TOKENS,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.fields import Field, read_json
from conformance.limits import LIMITS
from conformance.readers.messages import STOP_REASONS, check_message_head, check_usage
from conformance.rows.calling import MESSAGES_NAMED, list_goes, no_call
from conformance.rows.chat_tools import TOOLS
from conformance.table import requirement
from conformance.target import PROMPT, Target, require_ok, require_script_or_skip
from conformance.verdicts import Violation

ANTHROPIC_TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "strict": True,
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


async def _reply(target: Target, prompt: str = PROMPT, **more: object) -> Field:
    return require_ok(await target.messages(prompt, **more))


def find_blocks(message: Field, kind: str) -> list[Field]:
    """Return the content blocks of one type."""
    return [block for block in message["content"].items() if block["type"].value == kind]


@requirement("messages.reply.head", "id msg_…, type: message, role: assistant, model", clients="anthropic SDKs, Claude Code")
async def _head(target: Target) -> None:
    reply = await _reply(target)
    check_message_head(reply)
    if target.scripted and not reply["id"].text().startswith("msg_"):
        raise Violation(f"the id is {reply['id'].shown}")


@requirement("messages.reply.content", "content[] of blocks with type and text", clients="anthropic SDKs, Claude Code")
async def _content(target: Target) -> None:
    texts = find_blocks(await _reply(target), "text")
    if not texts:
        raise Violation("there is no text block")
    for block in texts:
        block["text"].text()
    if target.scripted:
        texts[0]["text"].must_be(TEXT)


@requirement("messages.reply.stop_reason", "stop_reason and stop_sequence are there", clients="Claude Code, LangChain")
async def _stop_reason(target: Target) -> None:
    reply = await _reply(target)
    reply["stop_reason"].must_be(*STOP_REASONS)
    if target.scripted or "stop_sequence" in reply:
        reply["stop_sequence"].must_be(None)
    if target.scripted:
        reply["stop_reason"].must_be("end_turn")


@requirement(
    "messages.reply.usage",
    "usage with input_tokens, output_tokens and both cache counts",
    clients="Claude Code, LangChain (litellm#24176)",
)
async def _usage(target: Target) -> None:
    usage = (await _reply(target))["usage"]
    check_usage(usage)
    if target.scripted:
        usage.must_have(("cache_creation_input_tokens", "cache_read_input_tokens"))


@requirement("messages.reply.max_tokens", "a text cut off: stop_reason max_tokens", clients="Claude Code", needs_script=True)
async def _max_tokens(target: Target) -> None:
    reply = await _reply(target, "[[length]] hello")
    reply["stop_reason"].must_be("max_tokens")
    find_blocks(reply, "text")[0]["text"].must_be(CUT_SHORT)


@requirement(
    "messages.reply.stop_sequence",
    "stop_sequences reach the engine; the one that ended it is named",
    clients="anthropic SDKs, LangChain",
    needs_script=True,
)
async def _stop_sequence(target: Target) -> None:
    reply = await _reply(target, "[[stop_sequence]] hello", stop_sequences=["three", "four"])
    reply["stop_reason"].must_be("stop_sequence")
    reply["stop_sequence"].must_be("three")
    find_blocks(reply, "text")[0]["text"].must_be(BEFORE_STOP)


@requirement(
    "messages.reply.cached",
    "cached tokens are in cache_read_input_tokens and not in input_tokens",
    clients="Claude Code's cost display",
    needs_script=True,
)
async def _cached(target: Target) -> None:
    usage = (await _reply(target, "[[cached]] hello"))["usage"]
    usage["cache_read_input_tokens"].must_be(CACHED_TOKENS)
    usage["input_tokens"].must_be(PROMPT_TOKENS - CACHED_TOKENS)


async def _called(target: Target, directive: str) -> tuple[Field, list[Field]]:
    """Return a whole answer and its calls."""
    more = {"tools": ANTHROPIC_TOOLS, "max_tokens": LIMITS.call_tokens}
    for go in list_goes(target, directive):
        choice = go.choose(free={"type": "any"}, named=MESSAGES_NAMED)
        answer = await target.messages(go.prompt, tool_choice=choice, **more)
        require_script_or_skip(target, answer, "tools")
        reply = require_ok(answer)
        calls = find_blocks(reply, "tool_use")
        if calls and (target.scripted or reply["stop_reason"].value != "max_tokens"):
            return reply, calls
        if target.scripted:
            raise Violation(f"there is no tool_use block: {reply['content'].shown}")
    raise no_call()


@requirement(
    "messages.reply.tool_use",
    "a call is a tool_use block with id, name, input (an object); stop_reason tool_use",
    clients="Claude Code, anthropic SDKs",
)
async def _tool_use(target: Target) -> None:
    reply, calls = await _called(target, "tools")
    reply["stop_reason"].must_be("tool_use")
    calls[0]["id"].word()
    calls[0]["name"].word()
    calls[0]["input"].members()
    if target.scripted:
        calls[0]["id"].must_be(CALL_ID)
        calls[0]["name"].must_be(TOOL)
        calls[0]["input"].must_be(read_json("".join(ARGUMENTS), "arguments").value)


@requirement("messages.reply.parallel", "two calls are two tool_use blocks", clients="Claude Code", needs_script=True)
async def _parallel(target: Target) -> None:
    calls = find_blocks(await _reply(target, "[[parallel_tools]] weather?", tools=ANTHROPIC_TOOLS), "tool_use")
    if [call["name"].value for call in calls] != [TOOL, OTHER_TOOL]:
        raise Violation(f"the calls are {[call['name'].value for call in calls]}")


@requirement(
    "messages.reply.thinking",
    "thoughts are a thinking block before the text",
    clients="Claude Code, pi, AI SDK",
    needs_script=True,
)
async def _thinking(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        reply = await _reply(target, prompt)
        if [block["type"].value for block in reply["content"].items()] != ["thinking", "text"]:
            raise Violation(f"the blocks are {reply['content'].shown}")
        reply["content"][0]["thinking"].must_be(THOUGHT)
        reply["content"][0]["signature"].text()
        reply["content"][1]["text"].must_be(TEXT)


@requirement("messages.reply.refusal", "a refusal's words reach the reader", clients="anthropic SDKs", needs_script=True)
async def _refusal(target: Target) -> None:
    reply = await _reply(target, "[[refusal]] hello")
    texts = [block["text"].value for block in find_blocks(reply, "text")]
    if REFUSAL not in texts:
        raise Violation(f"texts {texts}, stop_reason {reply['stop_reason'].shown}")
    reply["stop_reason"].must_be("refusal", "end_turn")
