"""Rows on chat completions: streams, tools, whole answers, fields of a request, failures."""

from __future__ import annotations

import json
from typing import Any  # request bodies are JSON

from conformance.dialects import (
    OPENAI_ERROR_KEYS,
    PIXEL_URL,
    TOOLS,
    answers,
    ask_for_calls,
    break_late,
    break_stream,
    carries,
    closes,
    leaves_stream,
    leaves_unanswered,
    makes_calls,
    must_call,
    must_tell,
)
from conformance.engine import script as engine
from conformance.exchange import DONE, LIMITS, Answer, Field, NotApplicable, Stream, Violation, list_payloads, read_json
from conformance.readers.chat import (
    FINISH_REASONS,
    Call,
    ChatStream,
    Choice,
    check_logprobs,
    check_usage,
    read_chat,
    require_end,
)
from conformance.table import (
    CHAT,
    PROMPT,
    QUESTION,
    Check,
    Row,
    Target,
    no_call,
    require_ok,
    require_script_or_skip,
    require_status,
    require_stream,
    scripted,
)

# Streams


async def _stream(target: Target, prompt: str = PROMPT, **more: Any) -> Stream:
    return require_stream(await target.say(CHAT, prompt, stream=True, **more))


async def _chunks(target: Target, **more: Any) -> list[Field]:
    return list_payloads((await _stream(target, **more)).events)


async def _read(target: Target, prompt: str, **more: Any) -> ChatStream:
    return require_end(read_chat(await _stream(target, prompt, **more)))


async def _no_event_lines(target: Target) -> None:
    named = [event.name for event in (await _stream(target)).events if event.name]
    if named:
        raise Violation(f"events are named {named[:3]}")


async def _chunk_head(target: Target) -> None:
    chunks = await _chunks(target)
    for chunk in chunks:
        chunk["object"].must_be("chat.completion.chunk")
        chunk["created"].count()
        for name in ("id", "model"):
            chunk[name].must_be(chunks[0][name].value)


async def _created(target: Target) -> None:
    found = {chunk["created"].count() for chunk in await _chunks(target)}
    if len(found) != 1:
        raise Violation(f"created is {sorted(found)}")


async def _chunk_choices(target: Target) -> None:
    for chunk in await _chunks(target):
        for choice in chunk["choices"].items():
            choice.must_fit({"index": Field.count, "delta": Field.members, "finish_reason": (None, *FINISH_REASONS[:4])})


async def _role(target: Target) -> None:
    first = next((chunk for chunk in await _chunks(target) if chunk["choices"].items()), None)
    if first is None:
        raise Violation("no chunk has a choice")
    first.at("choices.0.delta.role").must_be("assistant")


async def _finish(target: Target) -> None:
    reasons = [
        (choice["index"].value, choice["finish_reason"].value)
        for chunk in await _chunks(target)
        for choice in chunk["choices"].items()
        if not choice["finish_reason"].is_null
    ]
    if [index for index, _ in reasons] != [0]:
        raise Violation(f"finish reasons (index, reason): {reasons}")


async def _done(target: Target) -> None:
    data = [event.data for event in (await _stream(target)).events]
    if data.count(DONE) != 1 or data[-1] != DONE:
        raise Violation(f"[DONE] comes {data.count(DONE)} times, the last event is {data[-1][:80] if data else None!r}")


async def _stream_usage(target: Target) -> None:
    chunks = await _chunks(target, stream_options={"include_usage": True})
    for chunk in chunks[:-1]:
        if chunk.get("usage") is not None:
            raise Violation(f"{chunk.path} has usage and is not the last chunk")
        if not chunk["choices"].items():
            raise Violation(f"{chunk.path} has no choices and is not the last chunk")
    chunks[-1]["choices"].must_be([])
    check_usage(chunks[-1]["usage"])


async def _no_usage(target: Target) -> None:
    for extra in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        for chunk in await _chunks(target, **extra):
            if not chunk["choices"].items():
                raise Violation(f"{chunk.path} has no choices, with {extra or 'no stream_options'}")
            if chunk.get("usage") is not None:
                raise Violation(f"{chunk.path} has usage that nobody asked for, with {extra or 'no stream_options'}")


async def _strict(target: Target) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        said = await _read(target, PROMPT, **options)
        if bool(options) != (said.usage is not None):
            raise Violation(f"usage is {said.usage and said.usage.shown}, asked for: {bool(options)}")


async def _stream_text(target: Target) -> None:
    content = (await _read(target, PROMPT)).first.content
    if content != engine.TEXT:
        raise Violation(f"the text adds up to {content!r}, the engine said {engine.TEXT!r}")


async def _stream_n(target: Target) -> None:
    said = await _read(target, PROMPT, n=2)
    if {index: choice.content for index, choice in said.choices.items()} != {0: engine.TEXT, 1: engine.TEXT}:
        raise Violation(f"the choices are {said.choices}")


async def _stream_logprobs(target: Target) -> None:
    answer = await target.say(CHAT, PROMPT, stream=True, logprobs=True, top_logprobs=1)
    require_script_or_skip(target, answer, "logprobs")
    said = require_end(read_chat(require_stream(answer))).first
    if not said.logprobs:
        if target.scripted:
            raise Violation("logprobs were asked for and no chunk has them")
        raise NotApplicable("the engine sends no logprobs")
    if target.scripted:
        check_logprobs(said.logprobs, said.content)


async def _stream_reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        said = (await _read(target, prompt)).first
        if (said.reasoning, said.content) != (engine.THOUGHT, engine.TEXT):
            raise Violation(f"thoughts {said.reasoning!r} and text {said.content!r}")
        if said.order != ["reasoning", "content"]:
            raise Violation(f"kinds of delta came in the order {said.order}")


async def _stream_refusal(target: Target) -> None:
    said = (await _read(target, "[[refusal]] hello")).first
    if (said.refusal, said.content) != (engine.REFUSAL, ""):
        raise Violation(f"refusal {said.refusal!r}, text {said.content!r}")


def _ends(prompt: str, reason: str, text: str, **more: Any) -> Check:
    async def check(target: Target) -> None:
        said = (await _read(target, prompt, **more)).first
        if (said.finish_reason, said.content) != (reason, text):
            raise Violation(f"finish_reason {said.finish_reason!r}, text {said.content!r}")

    return check


async def _stream_cached(target: Target) -> None:
    usage = (await _read(target, "[[cached]] hello", stream_options={"include_usage": True})).usage
    if usage is None:
        raise Violation("no usage chunk")
    usage.must_fit({"prompt_tokens": engine.PROMPT_TOKENS, "prompt_tokens_details.cached_tokens": engine.CACHED_TOKENS})


# Tools

_EXPECTED = [(engine.TOOL, "".join(engine.ARGUMENTS)), (engine.OTHER_TOOL, "".join(engine.OTHER_ARGUMENTS))]


_NAMED_CALL = {"id": Field.word, "type": "function", "function.name": Field.word}


async def _whole(target: Target, directive: str = "tools") -> tuple[Field, list[Field]]:
    """Return the choice of a whole answer, checked for its ending, and its calls."""
    async for go, answer in ask_for_calls(target, CHAT, directive):
        choice = require_ok(answer)["choices"][0]
        calls = choice["message"].get("tool_calls")
        if calls is not None and calls.items() and (target.scripted or choice["finish_reason"].value != "length"):
            choice["finish_reason"].must_be(*go.finish_reasons)
            return choice, calls.items()
        if target.scripted:
            raise Violation(f"message.tool_calls is missing: {choice.shown}")
    raise no_call()


async def _pieces(target: Target) -> list[Field]:
    """Return the tool deltas of a stream in their order."""
    async for _, answer in ask_for_calls(target, CHAT, "tools", stream=True):
        pieces = [
            piece
            for chunk in list_payloads(require_stream(answer).events)
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
    async for go, answer in ask_for_calls(target, CHAT, directive, stream=True):
        first = require_end(read_chat(require_stream(answer))).first
        if target.scripted or (first.calls and first.finish_reason != "length"):
            if first.finish_reason not in go.finish_reasons:
                raise Violation(f"finish_reason is {first.finish_reason!r}, tool_calls is due")
            return first.calls
    raise no_call()


async def _call(target: Target) -> None:
    _, calls = await _whole(target)
    for call in calls:
        call.must_fit({**_NAMED_CALL, "function.arguments": Field.text})


async def _arguments(target: Target) -> None:
    _, calls = await _whole(target)
    for call in calls:
        _parse_arguments(call["function"]["arguments"].text())


async def _content(target: Target) -> None:
    choice, _ = await _whole(target)
    choice["message"]["content"].must_be(None, "")


async def _finish_call(target: Target) -> None:
    await _whole(target)


async def _parallel(target: Target) -> None:
    _, calls = await _whole(target, "parallel_tools")
    must_call([(call["function"]["name"].text(), call["function"]["arguments"].text()) for call in calls], _EXPECTED)
    if calls[0]["id"].value == calls[1]["id"].value:
        raise Violation(f"both calls have the id {calls[0]['id'].shown}")


async def _index(target: Target) -> None:
    for piece in await _pieces(target):
        piece["index"].count()


async def _first(target: Target) -> None:
    first = (await _pieces(target))[0]
    first.must_fit(_NAMED_CALL)
    if "arguments" in first["function"]:
        first["function"]["arguments"].text()


async def _later(target: Target) -> None:
    seen: set[int] = set()
    for piece in await _pieces(target):
        index = piece["index"].count()
        if index in seen:
            for place, name in ((piece, "id"), (piece, "type"), (piece["function"], "name")):
                if name in place:
                    raise Violation(f"{place.path}.{name} comes again as {place[name].shown}")
        seen.add(index)


async def _stream_arguments(target: Target) -> None:
    calls = await _calls(target, "tools")
    for call in calls:
        _parse_arguments(call.arguments)
    if target.scripted:
        must_call([(call.name, call.arguments) for call in calls], _EXPECTED[:1])
        if calls[0].id != engine.CALL_ID:
            raise Violation(f"the id of the call is {calls[0].id!r}, the engine gave {engine.CALL_ID!r}")


async def _read_calls(target: Target, directive: str) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in await _calls(target, directive)]


async def _says(target: Target, prompt: str, count: int, **more: Any) -> None:
    """Check that a stream has the text of the engine and so many calls."""
    said: Choice = (await _read(target, prompt, **more)).first
    if said.content != engine.TEXT or len(said.calls) != count:
        raise Violation(f"text {said.content!r}, calls {said.calls}")


async def _text_first(target: Target) -> None:
    await _says(target, f"[[text_then_tools]] {QUESTION}", 1, tools=TOOLS[CHAT], tool_choice="required")


async def _empty(target: Target) -> None:
    await _says(target, "[[empty_tool_calls]] hello", 0)


_TURNS_WITH_RESULT = [
    {"role": "user", "content": "[[tools]] What is the weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": engine.CALL_ID, "type": "function", "function": {"name": engine.TOOL, "arguments": "".join(engine.ARGUMENTS)}},
    ]},
    {"role": "tool", "tool_call_id": engine.CALL_ID, "content": "18 degrees"},
]  # fmt: skip


def _parse_arguments(text: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Violation(f"the arguments are no JSON: {text[:120]!r} ({error})") from None
    if not isinstance(value, dict):
        raise Violation(f"the arguments must be an object of JSON and are {text[:120]!r}")


# Whole answers


async def _reply(target: Target, prompt: str = PROMPT, **more: Any) -> Field:
    return require_ok(await target.say(CHAT, prompt, **more))


_HEAD = {"object": "chat.completion", "id": Field.word, "created": Field.count, "model": Field.word}


async def _choices(target: Target) -> None:
    choices = (await _reply(target))["choices"].items()
    if not choices:
        raise Violation("choices is empty")
    for number, choice in enumerate(choices):
        choice.must_fit({
            "index": number, "message.role": "assistant", "message.content": Field.text, "finish_reason": FINISH_REASONS,
        })  # fmt: skip


async def _fingerprint(target: Target) -> None:
    reply = await _reply(target)
    if "system_fingerprint" in reply:
        reply["system_fingerprint"].text()


async def _n(target: Target) -> None:
    found = [choice["index"].value for choice in (await _reply(target, n=2))["choices"].items()]
    if found != [0, 1]:
        raise Violation(f"the choices have index {found}")


async def _logprobs(target: Target) -> None:
    answer = await target.say(CHAT, PROMPT, logprobs=True, top_logprobs=1)
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
    # A real model's last token may have no text, so its tokens are held against themselves.
    data = b"".join(bytes(entry["bytes"].value or entry["token"].text().encode()) for entry in entries)
    return data.decode(errors="replace")


async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        message = (await _reply(target, prompt)).at("choices.0.message")
        message["content"].must_be(engine.TEXT)
        thoughts = [message.value.get(name) for name in ("reasoning_content", "reasoning")]
        if engine.THOUGHT not in thoughts:
            raise Violation(
                f"reasoning_content is {thoughts[0]!r} and reasoning {thoughts[1]!r}, the engine thought {engine.THOUGHT!r}"
            )


async def _cut(target: Target) -> None:
    answer = await target.say(CHAT, "[[cut]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes, whole: {answer.whole}")
    answer.json()["error"]["message"].word()


# Requests

_EXTRA = {
    "min_p": 0.05, "top_k": 20, "repetition_penalty": 1.1, "seed": 7, "logit_bias": {"15": -100}, "user": "u-1",
    "chat_template_kwargs": {"enable_thinking": False}, "guided_regex": "[a-z]+", "reasoning_effort": "low",
    "something_of_tomorrow": {"deep": [1, 2.5, None, "ü"]},
}  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA, "strict": True}}}
_CHOICES = [
    {"tools": TOOLS[CHAT], "tool_choice": choice, "parallel_tool_calls": False}
    for choice in ("none", "required", {"type": "function", "function": {"name": engine.OTHER_TOOL}})
]
_IMAGE = {"type": "image_url", "image_url": {"url": PIXEL_URL, "detail": "low"}}
_WITH_IMAGE = {"messages": [{"role": "user", "content": [{"type": "text", "text": "[[echo]]"}, _IMAGE]}]}


async def _later_system(target: Target) -> None:
    for role in ("system", "developer"):
        turns = [
            {"role": "system", "content": "You are brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello."},
            {"role": role, "content": "Be even briefer."},
            {"role": "user", "content": PROMPT},
        ]
        await _reply(target, messages=turns)


_OPTIONAL = ("stop", "tools", "tool_choice", "stream_options", "seed", "response_format", "user", "logit_bias", "stream")

_LARGE_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * LIMITS.image_bytes}}
_LONG_TEXT = "An instruction to an agent. " * (LIMITS.text_chars // 28)

_PARTS = [{"type": "text", "text": "Say hello"}, {"type": "text", "text": " in a few words."}]


async def _chunked(target: Target) -> None:
    require_ok(await target.send(target.ask_json(CHAT, target.body(CHAT), {"transfer-encoding": "chunked"})))


async def _unicode(target: Target) -> None:
    turns = [{"role": "system", "content": "grüße 你好 🦙 \u2028 \u0000 end"}, {"role": "user", "content": "[[echo]]"}]
    body = target.body(CHAT, messages=turns)
    for ascii_only in (True, False):
        answer = await target.send(target.ask_json(CHAT, json.dumps(body, ensure_ascii=ascii_only).encode()))
        text = require_ok(answer).at("choices.0.message.content").text()
        read_json(text, "what the engine got")["body"]["messages"].must_be(turns)


async def _key_stays(target: Target) -> None:
    text = (await _reply(target, "[[echo]]")).at("choices.0.message.content").text()
    if target.api_key and target.api_key in text:
        raise Violation("the engine got the client's key")


# Failures


def _check_broken(answer: Answer, failure: Field) -> None:
    failure.must_have(OPENAI_ERROR_KEYS)
    failure["message"].word()
    failure["type"].word()
    if not failure["code"].is_null:
        failure["code"].text()
    for chunk in list_payloads(require_stream(answer).events):
        for choice in chunk.value.get("choices") or ():
            if choice.get("finish_reason") is not None:
                raise Violation(f"a finish_reason was invented: {choice['finish_reason']!r}")


def _breaks_with_one_error(directive: str) -> Check:
    async def check(target: Target) -> None:
        _check_broken(*await break_stream(target, CHAT, f"[[{directive}]]"))

    return check


async def _engine_error(target: Target) -> None:
    answer, failure = await break_stream(target, CHAT, "[[error_in_stream]]")
    failure["message"].word()
    must_tell(failure)
    failure.must_have(("message", "type", "code"))
    if any(event.data == DONE for event in require_stream(answer).events):
        raise Violation("[DONE] after an error")


async def _garbage(target: Target) -> None:
    answer = await target.say(CHAT, "[[garbage]] hello", stream=True)
    require_status(answer, 200)
    if DONE.encode() in answer.body or b'"finish_reason":"stop"' in answer.body.replace(b" ", b""):
        raise Violation("the stream ends as if it were whole")


async def _late(target: Target) -> None:
    answer, failure = await break_late(target, CHAT)
    _check_broken(answer, failure)
    must_tell(failure)


ROWS = (
    Row("chat.stream.no_event_lines", "no event: lines", "naive readers, Node helper", _no_event_lines),
    Row("chat.stream.head", "every chunk has the same id and model, object: chat.completion.chunk, created (integer)",
        "LangChain, AI SDK", _chunk_head),
    scripted("chat.stream.created", "created is the same in every chunk", "OpenAI's schema", _created),
    Row("chat.stream.choices", "every chunk has choices, each with index, delta, finish_reason (null until the end)",
        "Node helper, AI SDK, llm", _chunk_choices),
    Row("chat.stream.role", "the first delta has role: assistant", "Node helper, runTools", _role),
    Row("chat.stream.finish", "exactly one finish_reason for each choice", "Node helper, AI SDK; tools never run without",
        _finish),
    Row("chat.stream.done", "[DONE] comes last, once", "raw loops, llm", _done),
    Row("chat.stream.usage", "include_usage: one chunk with choices: [] and usage right before [DONE], none before",
        "Node helper, AI SDK, llm, LangChain", _stream_usage),
    Row("chat.stream.no_usage", "usage not asked for: no usage and no chunk without choices",
        "Node helper, llm (litellm#8349)", _no_usage),
    Row("chat.stream.strict", "a strict accumulator takes the whole stream, with and without usage",
        "openai-python 3, openai-node 7", _strict),
    scripted("chat.stream.text", "the pieces add up to what the engine said", "everybody", _stream_text),
    scripted("chat.stream.n", "n: 2 streams two choices, each with role and finish_reason", "openai SDKs", _stream_n),
    Row("chat.stream.logprobs", "logprobs are in the chunks of the text they belong to", "evaluations, openai-python helper",
        _stream_logprobs),
    scripted("chat.stream.reasoning", "thoughts stream as reasoning_content or reasoning, before the text and not in it",
        "opencode, Open WebUI, AI SDK (vllm#27755)", _stream_reasoning),
    scripted("chat.stream.refusal", "a refusal streams as delta.refusal", "openai SDKs", _stream_refusal),
    scripted("chat.stream.length", "a text cut off ends with finish_reason: length", "agents, AI SDK",
        _ends("[[length]] hello", "length", engine.CUT_SHORT)),
    scripted("chat.stream.stop", "a stop sequence ends with finish_reason: stop", "LangChain, aider",
        _ends("[[stop_sequence]] hello", "stop", engine.BEFORE_STOP, stop=["three"])),
    scripted("chat.stream.cached", "the usage chunk keeps prompt_tokens_details.cached_tokens", "LiteLLM, cost displays",
        _stream_cached),
    Row("chat.tools.call", "a call has id, type: function, function.name and arguments", "OpenAI Agents, LiteLLM, Continue",
        _call),
    Row("chat.tools.arguments", "arguments are a string of JSON, never an object", "LangChain, Pydantic AI", _arguments),
    Row("chat.tools.content", "with calls, content is null (or empty)", "LangChain, OpenAI Agents", _content),
    Row("chat.tools.finish", "an answer that calls tools says finish_reason: tool_calls",
        "AI SDK, agents: tools never run without", _finish_call),
    scripted("chat.tools.parallel", "two calls in one answer arrive with ids of their own", "agents", _parallel),
    Row("chat.tools.stream.index", "every tool delta has an index", "Python and Node helpers, AI SDK, LangChain", _index),
    Row("chat.tools.stream.first",
        "the first delta of a call has id, type and function.name; arguments are a string or absent, never null",
        "OpenAI Agents, LiteLLM, Continue, runTools", _first),
    Row("chat.tools.stream.later", "later deltas leave out id, type and name (null or empty breaks)",
        "Python helper, openai-node 7, opencode", _later),
    Row("chat.tools.stream.arguments", "the pieces add up to the arguments; the stream says finish_reason: tool_calls",
        "all SDK helpers", _stream_arguments),
    scripted("chat.tools.stream.parallel", "two calls stream with index 0 and 1 and ids of their own",
        "agents, openai helpers", makes_calls(_read_calls, "parallel_tools", _EXPECTED)),
    scripted("chat.tools.stream.interleaved", "calls whose arguments come in turns are not mixed up", "openai helpers",
        makes_calls(_read_calls, "interleaved_tools", _EXPECTED)),
    scripted("chat.tools.stream.whole", "a call in one piece arrives whole", "LiteLLM, Continue",
        makes_calls(_read_calls, "whole_tools", _EXPECTED[:1])),
    scripted("chat.tools.stream.nasty", "arguments with quotes, brackets, escapes and emoji arrive byte for byte",
        "agents that write code", makes_calls(_read_calls, "nasty_arguments", [(engine.TOOL, engine.NASTY)])),
    scripted("chat.tools.stream.text_first", "a text before a call arrives too", "Claude-like agents", _text_first),
    scripted("chat.tools.empty", "an engine's empty tool_calls: [] does not hide the text", "AI SDK (litellm#29286)", _empty),
    scripted("chat.tools.result", "a conversation with a call and its result is answered", "every agent",
        answers(CHAT, messages=_TURNS_WITH_RESULT, tools=TOOLS[CHAT], text="The tool has answered.")),
    Row("chat.reply.head", "id, object: chat.completion, created (integer), model", "all SDKs",
        answers(CHAT, places=_HEAD)),
    Row("chat.reply.choices", "choices[] with index, message.role, message.content, finish_reason", "all SDKs", _choices),
    Row("chat.reply.usage", "usage with prompt, completion and total tokens, total = sum",
        "smolagents, LiteLLM crash without", answers(CHAT, places={"usage": check_usage})),
    Row("chat.reply.fingerprint", "system_fingerprint is a string or absent, never null", "OpenAI's own schema",
        _fingerprint),
    scripted("chat.reply.text", "the text arrives as the engine said it", "everybody", answers(CHAT, text=engine.TEXT)),
    scripted("chat.reply.n", "n: 2 gives two choices with index 0 and 1", "openai SDKs, evaluations", _n),
    Row("chat.reply.logprobs", "logprobs.content[] with token, bytes, logprob, top_logprobs", "evaluations, LangChain",
        _logprobs),
    scripted("chat.reply.reasoning", "thoughts come as reasoning_content or reasoning, not in the text",
        "opencode, Open WebUI, AI SDK", _reasoning),
    scripted("chat.reply.refusal", "a refusal is in message.refusal", "openai SDKs",
        answers(CHAT, "[[refusal]] hello", places={
            "choices.0.message.refusal": engine.REFUSAL, "choices.0.message.content": (None, ""),
        })),
    scripted("chat.reply.length", "an answer cut off by max_tokens says finish_reason: length", "agents, AI SDK",
        answers(CHAT, "[[length]] hello", engine.CUT_SHORT, {"choices.0.finish_reason": "length"})),
    scripted("chat.reply.stop", "stop reaches the engine and the answer says finish_reason: stop", "LangChain, aider",
        answers(CHAT, "[[stop_sequence]] hello", engine.BEFORE_STOP, {"choices.0.finish_reason": "stop"}, stop=["three"])),
    scripted("chat.reply.cached", "usage.prompt_tokens_details.cached_tokens arrives", "LiteLLM, agents' cost displays",
        answers(CHAT, "[[cached]] hello", places={
            "usage.prompt_tokens": engine.PROMPT_TOKENS, "usage.prompt_tokens_details.cached_tokens": engine.CACHED_TOKENS,
        })),
    scripted("chat.reply.cut", "an engine that dies inside an answer is an error, never half a body with 200", "every client",
        _cut),
    scripted("chat.request.unknown_fields", "fields nobody knows, and those of engines, reach the engine unchanged",
        "vLLM and llama.cpp users (extra_body)", carries(CHAT, (_EXTRA, _EXTRA))),
    scripted("chat.request.format", "response_format with a JSON schema reaches the engine",
        "openai parse(), Pydantic AI, LangChain", carries(CHAT, (_FORMAT, _FORMAT))),
    scripted("chat.request.tool_choice", "tools, tool_choice and parallel_tool_calls reach the engine",
        "agents (ollama#17921)", carries(CHAT, *((fields, fields) for fields in _CHOICES))),
    scripted("chat.request.images", "text and image parts reach the engine as they are", "Open WebUI, AI SDK",
        carries(CHAT, (_WITH_IMAGE, _WITH_IMAGE))),
    Row("chat.request.later_system", "a system or developer message after the first turn is not refused",
        "Claude Code, opencode (llama.cpp#27367)", _later_system),
    Row("chat.request.first_developer", "a developer message in place of the system message is not refused",
        "openai SDKs, AI SDK",
        answers(CHAT, messages=[{"role": "developer", "content": "You are brief."}, {"role": "user", "content": PROMPT}])),
    Row("chat.request.nulls", "optional fields that are null are as if absent", "Go, Java and Rust clients",
        answers(CHAT, **dict.fromkeys(_OPTIONAL))),
    scripted("chat.request.large", "a body of some megabytes (images) is taken, agents send up to 32 MB",
        "agents, Open WebUI",
        answers(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}, _LARGE_IMAGE]}])),
    scripted("chat.request.long", "a prompt of 60 KB is taken: agents send 30 to 100 KB", "Claude Code, Codex, opencode",
        answers(CHAT, messages=[{"role": "system", "content": _LONG_TEXT}, {"role": "user", "content": PROMPT}])),
    Row("chat.request.text_parts", "content as a list of text parts is taken", "AI SDK, LangChain, opencode",
        answers(CHAT, messages=[{"role": "user", "content": _PARTS}])),
    Row("chat.request.chunked", "a body sent in chunks, without content-length, is taken",
        "Node streams, Go and Rust clients", _chunked),
    scripted("chat.request.unicode", "escaped and plain characters beyond ASCII reach the engine the same",
        "everybody outside ASCII", _unicode),
    scripted("chat.request.key_stays", "the client's key does not travel to the engine", "operators of shared nodes",
        _key_stays),
    scripted("chat.broken.cut", "engine dies in a stream: one error chunk with message, type, param, code; nothing after it",
        "raw loops of the Python SDK take silence for success", _breaks_with_one_error("cut")),
    scripted("chat.broken.closed", "after such an error the connection is closed", "all SDK pools", closes(CHAT)),
    scripted("chat.broken.engine_error", "an error that the engine says in its stream arrives as one, without [DONE] after it",
        "llama.cpp#14566, vllm#12886", _engine_error),
    scripted("chat.broken.garbage", "an event that is not JSON is never passed for an answer", "every SDK raises", _garbage),
    scripted("chat.broken.no_finish",
        "a stream of the engine that just ends: one error chunk; no finish_reason, no [DONE] is invented",
        "Node helper, AI SDK", _breaks_with_one_error("no_finish")),
    scripted("chat.broken.late", "an engine's refusal after keep-alives is one error chunk with the engine's words, no [DONE]",
        "Open WebUI hangs without (vllm-mlx#101)", _late, is_slow=True),
    scripted("chat.leave.stream", "a client that leaves a stream frees the engine", "operators (litellm#30244)",
        leaves_stream(CHAT)),
    scripted("chat.leave.plain", "a client that leaves before an unstreamed answer frees the engine",
        "operators (litellm pull 30223)", leaves_unanswered(CHAT)),
    scripted("chat.leave.prefill", "a client that leaves a stream before its first piece frees the engine",
        "operators (llama.cpp pull 24630)", leaves_unanswered(CHAT, "[[slow:60]] ", stream=True)),
)  # fmt: skip
