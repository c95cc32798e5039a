"""Rows on chat completions: whole answers, fields of a request, failures."""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Callable
from typing import Any  # request bodies are JSON

from conformance.engine.script import (
    BEFORE_STOP,
    CACHED_TOKENS,
    CUT_SHORT,
    PROMPT_TOKENS,
    REASON,
    REFUSAL,
    TEXT,
    THOUGHT,
)  # fmt: skip
from conformance.exchange import DONE, LIMITS, Answer, Field, NotApplicable, Violation, list_payloads, read_json
from conformance.readers.chat import FINISH_REASONS, check_logprobs, check_usage, read_chat
from conformance.rows.chat_streams import TOOLS
from conformance.table import (
    CHAT,
    PROMPT,
    Target,
    require_ok,
    require_script_or_skip,
    require_status,
    require_stream,
    requirement,
)


async def _reply(target: Target) -> Field:
    return require_ok(await target.chat())


@requirement("chat.reply.head", "id, object: chat.completion, created (integer), model", clients="all SDKs")
async def _head(target: Target) -> None:
    reply = await _reply(target)
    reply["object"].must_be("chat.completion")
    reply["id"].word()
    reply["created"].count()
    reply["model"].word()


@requirement("chat.reply.choices", "choices[] with index, message.role, message.content, finish_reason", clients="all SDKs")
async def _choices(target: Target) -> None:
    choices = (await _reply(target))["choices"].items()
    if not choices:
        raise Violation("choices is empty")
    for number, choice in enumerate(choices):
        choice["index"].must_be(number)
        choice["message"]["role"].must_be("assistant")
        choice["message"]["content"].text()
        choice["finish_reason"].must_be(*FINISH_REASONS)


@requirement(
    "chat.reply.usage",
    "usage with prompt, completion and total tokens, total = sum",
    clients="smolagents, LiteLLM crash without",
)
async def _usage(target: Target) -> None:
    check_usage((await _reply(target))["usage"])


@requirement("chat.reply.fingerprint", "system_fingerprint is a string or absent, never null", clients="OpenAI's own schema")
async def _fingerprint(target: Target) -> None:
    reply = await _reply(target)
    if "system_fingerprint" in reply:
        reply["system_fingerprint"].text()


@requirement("chat.reply.text", "the text arrives as the engine said it", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    (await _reply(target))["choices"][0]["message"]["content"].must_be(TEXT)


@requirement("chat.reply.n", "n: 2 gives two choices with index 0 and 1", clients="openai SDKs, evaluations", needs_script=True)
async def _n(target: Target) -> None:
    choices = require_ok(await target.chat(n=2))["choices"].items()
    if [choice["index"].value for choice in choices] != [0, 1]:
        raise Violation(f"the choices have index {[choice['index'].value for choice in choices]}")


@requirement(
    "chat.reply.logprobs", "logprobs.content[] with token, bytes, logprob, top_logprobs", clients="evaluations, LangChain"
)
async def _logprobs(target: Target) -> None:
    answer = await target.chat(logprobs=True, top_logprobs=1)
    require_script_or_skip(target, answer, "logprobs")
    choice = require_ok(answer)["choices"][0]
    logprobs = choice.get("logprobs")
    if logprobs is None:
        if target.scripted:
            raise Violation("logprobs were asked for and are missing")
        raise NotApplicable("the engine sends no logprobs")
    entries = logprobs["content"].items()
    check_logprobs(entries, choice["message"]["content"].text() if target.scripted else _spell(entries))


def _spell(entries: list[Field]) -> str:
    """Return what the tokens spell: a real model's last token may have no text."""
    data = b"".join(bytes(entry["bytes"].value or entry["token"].text().encode()) for entry in entries)
    return data.decode(errors="replace")


@requirement(
    "chat.reply.reasoning",
    "thoughts come as reasoning_content or reasoning, not in the text",
    clients="opencode, Open WebUI, AI SDK",
    needs_script=True,
)
async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        message = require_ok(await target.chat(prompt))["choices"][0]["message"]
        message["content"].must_be(TEXT)
        thoughts = [message.value.get(name) for name in ("reasoning_content", "reasoning")]
        if THOUGHT not in thoughts:
            raise Violation(
                f"reasoning_content is {thoughts[0]!r} and reasoning {thoughts[1]!r}, the engine thought {THOUGHT!r}"
            )


@requirement("chat.reply.refusal", "a refusal is in message.refusal", clients="openai SDKs", needs_script=True)
async def _refusal(target: Target) -> None:
    message = require_ok(await target.chat("[[refusal]] hello"))["choices"][0]["message"]
    message["refusal"].must_be(REFUSAL)
    message["content"].must_be(None, "")


@requirement(
    "chat.reply.length",
    "an answer cut off by max_tokens says finish_reason: length",
    clients="agents, AI SDK",
    needs_script=True,
)
async def _length(target: Target) -> None:
    choice = require_ok(await target.chat("[[length]] hello"))["choices"][0]
    choice["finish_reason"].must_be("length")
    choice["message"]["content"].must_be(CUT_SHORT)


@requirement(
    "chat.reply.stop",
    "stop reaches the engine and the answer says finish_reason: stop",
    clients="LangChain, aider",
    needs_script=True,
)
async def _stop(target: Target) -> None:
    reply = require_ok(await target.chat("[[stop_sequence]] hello", stop=["three"]))
    reply["choices"][0]["finish_reason"].must_be("stop")
    reply["choices"][0]["message"]["content"].must_be(BEFORE_STOP)


@requirement(
    "chat.reply.cached",
    "usage.prompt_tokens_details.cached_tokens arrives",
    clients="LiteLLM, agents' cost displays",
    needs_script=True,
)
async def _cached(target: Target) -> None:
    usage = require_ok(await target.chat("[[cached]] hello"))["usage"]
    usage["prompt_tokens"].must_be(PROMPT_TOKENS)
    usage["prompt_tokens_details"]["cached_tokens"].must_be(CACHED_TOKENS)


@requirement(
    "chat.reply.cut",
    "an engine that dies inside an answer is an error, never half a body with 200",
    clients="every client",
    needs_script=True,
)
async def _cut(target: Target) -> None:
    answer = await target.chat("[[cut]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes, whole: {answer.whole}")
    answer.json()["error"]["message"].word()


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
    clients="operators of shared nodes",
    needs_script=True,
)
async def _key_stays(target: Target) -> None:
    text = require_ok(await target.chat("[[echo]]"))["choices"][0]["message"]["content"].text()
    if target.api_key and target.api_key in text:
        raise Violation("the engine got the client's key")


ERROR_KEYS = ("message", "type", "param", "code")


async def _broken(target: Target, directives: str) -> tuple[Answer, Field]:
    """Return a stream that broke, and the error it says in the end."""
    answer = await target.chat(f"{directives} hello", stream=True)
    said = read_chat(require_stream(answer))
    if said.failure is None:
        raise Violation(f"the stream ends in silence after {said.chunks} chunks (done: {said.done})")
    return answer, said.failure


def _check_broken(answer: Answer, failure: Field) -> None:
    failure.must_have(ERROR_KEYS)
    failure["message"].word()
    failure["type"].word()
    if not failure["code"].is_null:
        failure["code"].text()
    for chunk in list_payloads(require_stream(answer).events):
        for choice in chunk.value.get("choices") or ():
            if choice.get("finish_reason") is not None:
                raise Violation(f"a finish_reason was invented: {choice['finish_reason']!r}")


@requirement(
    "chat.broken.cut",
    "engine dies in a stream: one error chunk with message, type, param, code; nothing after it",
    clients="raw loops of the Python SDK take silence for success",
    needs_script=True,
)
async def _cut_stream(target: Target) -> None:
    _check_broken(*await _broken(target, "[[cut]]"))


@requirement("chat.broken.closed", "after such an error the connection is closed", clients="all SDK pools", needs_script=True)
async def _closed(target: Target) -> None:
    ask = target.ask_json(CHAT, target.chat_body("[[cut]] hello", stream=True))
    answer = await target.send_fresh(ask, watches_close=True)
    require_status(answer, 200)
    if not answer.closed:
        raise Violation("the connection stays open for the next request")


@requirement(
    "chat.broken.engine_error",
    "an error that the engine says in its stream arrives as one, without [DONE] after it",
    clients="llama.cpp#14566, vllm#12886",
    needs_script=True,
)
async def _engine_error(target: Target) -> None:
    answer, failure = await _broken(target, "[[error_in_stream]]")
    failure["message"].word()
    if REASON not in failure["message"].text():
        raise Violation(f"the engine's words are lost: {failure.shown}")
    failure.must_have(("message", "type", "code"))
    if any(event.data == DONE for event in require_stream(answer).events):
        raise Violation("[DONE] after an error")


@requirement(
    "chat.broken.garbage",
    "an event that is not JSON is never passed for an answer",
    clients="every SDK raises",
    needs_script=True,
)
async def _garbage(target: Target) -> None:
    answer = await target.chat("[[garbage]] hello", stream=True)
    require_status(answer, 200)
    if DONE.encode() in answer.body or b'"finish_reason":"stop"' in answer.body.replace(b" ", b""):
        raise Violation("the stream ends as if it were whole")


@requirement(
    "chat.broken.no_finish",
    "a stream of the engine that just ends: one error chunk; no finish_reason, no [DONE] is invented",
    clients="Node helper, AI SDK",
    needs_script=True,
)
async def _no_finish(target: Target) -> None:
    _check_broken(*await _broken(target, "[[no_finish]]"))


@requirement(
    "chat.broken.late",
    "an engine's refusal after keep-alives is one error chunk with the engine's words, no [DONE]",
    clients="Open WebUI hangs without (vllm-mlx#101)",
    needs_script=True,
    is_slow=True,
)
async def _late(target: Target) -> None:
    answer, failure = await _broken(target, f"[[slow:{target.silence_s:g}]] [[error_400]]")
    _check_broken(answer, failure)
    if REASON not in failure["message"].text():
        raise Violation(f"the engine's words are lost: {failure.shown}")


@requirement(
    "chat.leave.stream",
    "a client that leaves a stream frees the engine",
    clients="operators (litellm#30244)",
    needs_script=True,
)
async def _leave_stream(target: Target) -> None:
    await leave_stream(target, CHAT, lambda prompt: target.chat_body(prompt, stream=True))


@requirement(
    "chat.leave.plain",
    "a client that leaves before an unstreamed answer frees the engine",
    clients="operators (litellm pull 30223)",
    needs_script=True,
)
async def _leave_plain(target: Target) -> None:
    await leave_unanswered(target, CHAT, target.chat_body)


@requirement(
    "chat.leave.prefill",
    "a client that leaves a stream before its first piece frees the engine",
    clients="operators (llama.cpp pull 24630)",
    needs_script=True,
)
async def _leave_prefill(target: Target) -> None:
    await leave_unanswered(target, CHAT, lambda prompt: target.chat_body(f"[[slow:60]] {prompt}", stream=True))


async def leave_unanswered(target: Target, path: str, body: Callable[[str], dict[str, Any]]) -> None:
    """Ask for what never comes, leave once the engine has begun, and check that it hears of that. Raises Violation."""
    key = uuid.uuid4().hex
    waiting = asyncio.create_task(target.send_fresh(target.ask_json(path, body(f"[[endless:{key}]] go on"))))
    try:
        await _wait_for(target, key, "here")
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await _must_hear(target, key)


async def leave_stream(target: Target, path: str, body: Callable[[str], dict[str, Any]]) -> None:
    """Leave a stream that goes on and on after its first words, and check that the engine hears of that. Raises Violation."""
    key = uuid.uuid4().hex
    ask = target.ask_json(path, body(f"[[endless:{key}]] go on"))
    answer = await target.send_fresh(ask, leave=lambda so_far: b'"on "' in so_far.body)
    require_status(answer, 200)
    await _must_hear(target, key)


async def _must_hear(target: Target, key: str) -> None:
    if not await _wait_for(target, key, "left"):
        raise Violation(f"the engine still works {LIMITS.heard_s:g} s after its client has left")


async def _wait_for(target: Target, key: str, state: str) -> bool:
    deadline = asyncio.get_running_loop().time() + LIMITS.heard_s
    while asyncio.get_running_loop().time() < deadline:
        answer = await target.send_fresh(target.ask_json(CHAT, target.chat_body(f"[[gone:{key}]]")))
        if require_ok(answer)["choices"][0]["message"]["content"].value == state:
            return True
        await asyncio.sleep(0.05)
    return False
