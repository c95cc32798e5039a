"""Rows on whole answers of the Responses API."""

from __future__ import annotations

from typing import Any  # request fields are JSON

from conformance.engine.speech import (
    ARGUMENTS,
    CACHED_TOKENS,
    CALL_ID,
    CUT_SHORT,
    OTHER_ARGUMENTS,
    OTHER_TOOL,
    PROMPT_TOKENS,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.fields import Field
from conformance.limits import LIMITS
from conformance.readers.responses import OBJECT_KEYS, check_item, check_usage
from conformance.rows.calling import RESPONSES_NAMED, list_goes, no_call
from conformance.rows.chat_tools import TOOLS
from conformance.table import requirement
from conformance.target import PROMPT, Target, require_ok, require_script_or_skip
from conformance.verdicts import Violation

FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
"""Tools as Responses has them: the function's members beside ``type``."""


async def _reply(target: Target, prompt: str = PROMPT, **more: object) -> Field:
    return require_ok(await target.responses(prompt, **more))


def find_items(response: Field, kind: str) -> list[Field]:
    """Return the output items of one type."""
    return [item for item in response["output"].items() if item["type"].value == kind]


def find_parts(response: Field, kind: str) -> list[Field]:
    """Return the content parts of one type, of all messages."""
    parts = [part for item in find_items(response, "message") for part in item["content"].items()]
    return [part for part in parts if part["type"].value == kind]


def only(found: list[Field], what: str) -> Field:
    """Return the one entry of a list. Raises Violation."""
    if len(found) != 1:
        raise Violation(f"{len(found)} {what}, one is due")
    return found[0]


@requirement("responses.reply.head", "id resp_…, object: response, created_at, status, model", clients="openai SDKs, Codex")
async def _head(target: Target) -> None:
    reply = await _reply(target)
    if not reply["id"].word().startswith("resp_"):
        raise Violation(f"the id is {reply['id'].shown}")
    reply["object"].must_be("response")
    reply["created_at"].number()
    reply["status"].must_be("completed", "incomplete")
    reply["model"].word()
    if (error := reply.get("error")) is not None:
        raise Violation(f"error is {error.shown} in an answer that is whole")


@requirement(
    "responses.reply.keys",
    "every key of the object is there, null where unknown; no user: null",
    clients="Open Responses suite, AI SDK",
)
async def _keys(target: Target) -> None:
    reply = await _reply(target)
    reply.must_have(OBJECT_KEYS)
    if "user" in reply and reply["user"].is_null:
        raise Violation("user is null; OpenAI's schema allows no null there")


@requirement(
    "responses.reply.settings",
    "what was asked for comes back: temperature, top_p, instructions, metadata, text.format, tool_choice",
    clients="openai SDKs, Open Responses suite",
)
async def _settings(target: Target) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "tool_choice": "none",
    }
    reply = await _reply(target, **asked)
    for name, value in asked.items():
        reply[name].must_be(value)
    reply["text"]["format"]["type"].must_be("text")
    reply["reasoning"].must_have(("effort", "summary"))
    reply["parallel_tool_calls"].flag()
    reply["tools"].items()
    reply["truncation"].must_be("disabled", "auto")
    reply["store"].must_be(False)
    reply["background"].must_be(False)


@requirement(
    "responses.reply.usage", "usage with input, output, total tokens and both details", clients="Codex, AI SDK, OpenAI Agents"
)
async def _usage(target: Target) -> None:
    check_usage((await _reply(target))["usage"])


@requirement(
    "responses.reply.message",
    "a message item: id, status, role, content[output_text with text, annotations, logprobs]",
    clients="openai SDKs (output_text), AI SDK",
)
async def _message(target: Target) -> None:
    item = only(find_items(await _reply(target), "message"), "messages")
    check_item(item)
    if not item["id"].text().startswith("msg_"):
        raise Violation(f"the id of the message is {item['id'].shown}")
    item["status"].must_be("completed", "incomplete")
    text = only([part for part in item["content"].items() if part["type"].value == "output_text"], "texts")
    if target.scripted:
        text["logprobs"].items()
        text["text"].must_be(TEXT)


async def _called(target: Target, directive: str) -> Field:
    more = {"tools": FLAT_TOOLS, "max_output_tokens": LIMITS.call_tokens}
    for go in list_goes(target, directive):
        choice = go.choose(free="required", named=RESPONSES_NAMED)
        answer = await target.responses(go.prompt, tool_choice=choice, **more)
        require_script_or_skip(target, answer, "tools")
        reply = require_ok(answer)
        if target.scripted or (find_items(reply, "function_call") and reply["status"].value != "incomplete"):
            return reply
    raise no_call()


@requirement(
    "responses.reply.call",
    "a function_call item: id fc_…, call_id, name, arguments (a string), status",
    clients="Codex, openai SDKs, AI SDK",
)
async def _call(target: Target) -> None:
    reply = await _called(target, "tools")
    item = only(find_items(reply, "function_call"), "calls")
    check_item(item)
    if not item["id"].text().startswith("fc_"):
        raise Violation(f"the id of the call is {item['id'].shown}")
    reply["status"].must_be("completed")
    if target.scripted:
        item["call_id"].must_be(CALL_ID)
        item["name"].must_be(TOOL)
        item["arguments"].must_be("".join(ARGUMENTS))


@requirement("responses.reply.parallel", "two calls are two items", clients="Codex, OpenAI Agents", needs_script=True)
async def _parallel(target: Target) -> None:
    calls = find_items(await _called(target, "parallel_tools"), "function_call")
    found = [(call["name"].value, call["arguments"].value) for call in calls]
    if found != [(TOOL, "".join(ARGUMENTS)), (OTHER_TOOL, "".join(OTHER_ARGUMENTS))]:
        raise Violation(f"the calls are {found}")


@requirement(
    "responses.reply.text_then_call", "a text and a call are two items in this order", clients="Codex", needs_script=True
)
async def _text_then_call(target: Target) -> None:
    kinds = [item["type"].value for item in (await _called(target, "text_then_tools"))["output"].items()]
    if kinds != ["message", "function_call"]:
        raise Violation(f"the items are {kinds}")


@requirement(
    "responses.reply.reasoning",
    "thoughts are an item of type reasoning, not text",
    clients="Codex, AI SDK, OpenAI Agents",
    needs_script=True,
)
async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        reply = await _reply(target, prompt)
        only(find_parts(reply, "output_text"), "texts")["text"].must_be(TEXT)
        item = only(find_items(reply, "reasoning"), "reasoning items")
        texts = [part["text"].text() for name in ("content", "summary") if (held := item.get(name)) for part in held.items()]
        if THOUGHT not in texts:
            raise Violation(f"the reasoning item says {texts}")
        reply["usage"]["output_tokens_details"]["reasoning_tokens"].must_be(3)


@requirement(
    "responses.reply.incomplete",
    "a text cut off: status incomplete, incomplete_details.reason max_output_tokens",
    clients="AI SDK, openai SDKs",
    needs_script=True,
)
async def _incomplete(target: Target) -> None:
    reply = await _reply(target, "[[length]] hello")
    reply["status"].must_be("incomplete")
    reply["incomplete_details"]["reason"].must_be("max_output_tokens")
    only(find_parts(reply, "output_text"), "texts")["text"].must_be(CUT_SHORT)


@requirement("responses.reply.refusal", "a refusal is a content part of type refusal", clients="openai SDKs", needs_script=True)
async def _refusal(target: Target) -> None:
    only(find_parts(await _reply(target, "[[refusal]] hello"), "refusal"), "refusals")["refusal"].must_be(REFUSAL)


@requirement(
    "responses.reply.cached", "cached tokens are in input_tokens_details", clients="Codex, cost displays", needs_script=True
)
async def _cached(target: Target) -> None:
    usage = (await _reply(target, "[[cached]] hello"))["usage"]
    usage["input_tokens"].must_be(PROMPT_TOKENS)
    usage["input_tokens_details"]["cached_tokens"].must_be(CACHED_TOKENS)
