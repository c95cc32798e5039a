"""Rows on what a chat request may hold: what must reach the engine, and what must not be refused."""

from __future__ import annotations

import base64
import json
from typing import Any  # request bodies are JSON

from conformance.fields import Field, read_json
from conformance.limits import LIMITS
from conformance.rows.chat_tools import TOOLS
from conformance.table import requirement
from conformance.target import CHAT, PROMPT, Target, require_ok
from conformance.verdicts import Violation

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(64)).decode()


async def _echo(target: Target, **fields: Any) -> Field:
    """Return the body that the engine got for a request that asks it to repeat that."""
    answer = await target.chat("[[echo]]", **fields)
    text = require_ok(answer)["choices"][0]["message"]["content"].text()
    return read_json(text, "what the engine got")["body"]


@requirement(
    "chat.request.unknown_fields",
    "fields nobody knows, and those of engines, reach the engine unchanged",
    clients="vLLM and llama.cpp users (extra_body)",
    needs_script=True,
)
async def _unknown_fields(target: Target) -> None:
    extra = {
        "min_p": 0.05, "top_k": 20, "repetition_penalty": 1.1, "seed": 7, "logit_bias": {"15": -100}, "user": "u-1",
        "chat_template_kwargs": {"enable_thinking": False}, "guided_regex": "[a-z]+", "reasoning_effort": "low",
        "something_of_tomorrow": {"deep": [1, 2.5, None, "ü"]},
    }  # fmt: skip
    got = await _echo(target, **extra)
    for name, value in extra.items():
        got[name].must_be(value)


@requirement(
    "chat.request.format",
    "response_format with a JSON schema reaches the engine",
    clients="openai parse(), Pydantic AI, LangChain",
    needs_script=True,
)
async def _format(target: Target) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    (await _echo(target, response_format=wanted))["response_format"].must_be(wanted)


@requirement(
    "chat.request.tool_choice",
    "tools, tool_choice and parallel_tool_calls reach the engine",
    clients="agents (ollama#17921)",
    needs_script=True,
)
async def _tool_choice(target: Target) -> None:
    for choice in ("none", "required", {"type": "function", "function": {"name": "get_time"}}):
        got = await _echo(target, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        got["tools"].must_be(TOOLS)
        got["tool_choice"].must_be(choice)
        got["parallel_tool_calls"].must_be(False)


@requirement(
    "chat.request.images", "text and image parts reach the engine as they are", clients="Open WebUI, AI SDK", needs_script=True
)
async def _images(target: Target) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}}
    turns = [{"role": "user", "content": [{"type": "text", "text": "[[echo]]"}, image]}]
    (await _echo(target, messages=turns))["messages"].must_be(turns)


@requirement(
    "chat.request.later_system",
    "a system or developer message after the first turn is not refused",
    clients="Claude Code, opencode (llama.cpp#27367)",
)
async def _later_system(target: Target) -> None:
    for role in ("system", "developer"):
        turns = [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello."},
            {"role": role, "content": "Be even briefer."},
            {"role": "user", "content": PROMPT},
        ]
        require_ok(await target.chat(messages=turns))


@requirement(
    "chat.request.first_developer",
    "a developer message in place of the system message is not refused",
    clients="openai SDKs, AI SDK",
)
async def _first_developer(target: Target) -> None:
    turns = [{"role": "developer", "content": "You are brief."}, {"role": "user", "content": PROMPT}]
    require_ok(await target.chat(messages=turns))


@requirement("chat.request.nulls", "optional fields that are null are as if absent", clients="Go, Java and Rust clients")
async def _nulls(target: Target) -> None:
    names = ("stop", "tools", "tool_choice", "stream_options", "seed", "response_format", "user", "logit_bias", "stream")
    require_ok(await target.chat(**dict.fromkeys(names)))


@requirement(
    "chat.request.large",
    "a body of some megabytes (images) is taken, agents send up to 32 MB",
    clients="agents, Open WebUI",
    needs_script=True,
)
async def _large(target: Target) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * LIMITS.image_bytes}}
    turns = [{"role": "user", "content": [{"type": "text", "text": PROMPT}, image]}]
    require_ok(await target.chat(messages=turns))


@requirement(
    "chat.request.long",
    "a prompt of 60 KB is taken: agents send 30 to 100 KB",
    clients="Claude Code, Codex, opencode",
    needs_script=True,
)
async def _long(target: Target) -> None:
    text = "An instruction to an agent. " * (LIMITS.text_chars // 28)
    require_ok(await target.chat(messages=[{"role": "system", "content": text}, {"role": "user", "content": PROMPT}]))


@requirement("chat.request.text_parts", "content as a list of text parts is taken", clients="AI SDK, LangChain, opencode")
async def _text_parts(target: Target) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "Say hello"}, {"type": "text", "text": " in a few words."}]}]
    require_ok(await target.chat(messages=turns))


@requirement(
    "chat.request.chunked",
    "a body sent in chunks, without content-length, is taken",
    clients="Node streams, Go and Rust clients",
)
async def _chunked(target: Target) -> None:
    require_ok(await target.send(target.ask_json(CHAT, target.chat_body(), {"transfer-encoding": "chunked"})))


@requirement(
    "chat.request.unicode",
    "escaped and plain characters beyond ASCII reach the engine the same",
    clients="everybody outside ASCII",
    needs_script=True,
)
async def _unicode(target: Target) -> None:
    turns = [{"role": "system", "content": "grüße 你好 🦙 \u2028 \u0000 end"}, {"role": "user", "content": "[[echo]]"}]
    body = target.chat_body(messages=turns)
    for ascii_only in (True, False):
        answer = await target.send(target.ask_json(CHAT, json.dumps(body, ensure_ascii=ascii_only).encode()))
        text = require_ok(answer)["choices"][0]["message"]["content"].text()
        read_json(text, "what the engine got")["body"]["messages"].must_be(turns)


@requirement(
    "chat.request.key_stays",
    "the client's key does not travel to the engine",
    clients="operators of shared boxes",
    needs_script=True,
)
async def _key_stays(target: Target) -> None:
    text = require_ok(await target.chat("[[echo]]"))["choices"][0]["message"]["content"].text()
    if target.api_key and target.api_key in text:
        raise Violation("the engine got the client's key")
