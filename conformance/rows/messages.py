"""Rows on Messages: whole answers, fields of a request, failures, streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any  # request bodies are JSON

from conformance.dialects import (
    FUNCTIONS,
    PIXEL_URL,
    TOOLS,
    answers,
    ask_for_calls,
    break_stream,
    breaks,
    breaks_late,
    carried,
    carries,
    closes,
    fails_whole,
    find_blocks,
    find_images,
    find_result,
    join_text,
    leaves_stream,
    leaves_unanswered,
    makes_calls,
    must_call,
    must_hold,
    must_tell,
    passes_through,
)
from conformance.engine import script as engine
from conformance.exchange import LIMITS, Answer, Event, Field, Violation, list_payloads, read_json
from conformance.readers.messages import (
    STOP_REASONS,
    MessageStream,
    check_error,
    check_message_head,
    check_usage,
    read_messages,
    require_end,
)
from conformance.table import (
    MESSAGES,
    PROMPT,
    Check,
    Row,
    Target,
    no_call,
    require_ok,
    require_status,
    require_stream,
    scripted,
)

# Whole answers


async def _reply(target: Target, prompt: str = PROMPT, **more: Any) -> Field:
    return require_ok(await target.say(MESSAGES, prompt, **more))


async def _head(target: Target) -> None:
    reply = await _reply(target)
    check_message_head(reply)
    if target.scripted and not reply["id"].text().startswith("msg_"):
        raise Violation(f"the id is {reply['id'].shown}")


async def _content(target: Target) -> None:
    texts = find_blocks(await _reply(target), "text")
    if not texts:
        raise Violation("there is no text block")
    for block in texts:
        block["text"].text()
    if target.scripted:
        texts[0]["text"].must_be(engine.TEXT)


async def _stop_reason(target: Target) -> None:
    reply = await _reply(target)
    reply["stop_reason"].must_be(*STOP_REASONS)
    if target.scripted or "stop_sequence" in reply:
        reply["stop_sequence"].must_be(None)
    if target.scripted:
        reply["stop_reason"].must_be("end_turn")


async def _usage(target: Target) -> None:
    usage = (await _reply(target))["usage"]
    check_usage(usage)
    if target.scripted:
        usage.must_have(("cache_creation_input_tokens", "cache_read_input_tokens"))


_STOPS = {"stop_sequences": ["three", "four"]}
_STOPPED = {"stop_reason": "stop_sequence", "stop_sequence": "three"}


async def _tool_use(target: Target) -> None:
    reply, call = await _called(target)
    reply["stop_reason"].must_be("tool_use")
    call.must_fit({"id": Field.word, "name": Field.word, "input": Field.members})
    if target.scripted:
        call.must_fit({"id": engine.CALL_ID, "name": engine.TOOL, "input": _INPUT})


async def _called(target: Target) -> tuple[Field, Field]:
    async for _, answer in ask_for_calls(target, MESSAGES, "tools"):
        reply = require_ok(answer)
        calls = find_blocks(reply, "tool_use")
        if calls and (target.scripted or reply["stop_reason"].value != "max_tokens"):
            return reply, calls[0]
        if target.scripted:
            raise Violation(f"there is no tool_use block: {reply['content'].shown}")
    raise no_call()


async def _parallel(target: Target) -> None:
    calls = find_blocks(await _reply(target, "[[parallel_tools]] weather?", tools=TOOLS[MESSAGES]), "tool_use")
    if [call["name"].value for call in calls] != [engine.TOOL, engine.OTHER_TOOL]:
        raise Violation(f"the calls are {[call['name'].value for call in calls]}")


async def _thinking(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        reply = await _reply(target, prompt)
        if [block["type"].value for block in reply["content"].items()] != ["thinking", "text"]:
            raise Violation(f"the blocks are {reply['content'].shown}")
        reply["content"].must_fit({"0.thinking": engine.THOUGHT, "0.signature": Field.text, "1.text": engine.TEXT})


async def _refusal(target: Target) -> None:
    reply = await _reply(target, "[[refusal]] hello")
    texts = [block["text"].value for block in find_blocks(reply, "text")]
    if engine.REFUSAL not in texts:
        raise Violation(f"texts {texts}, stop_reason {reply['stop_reason'].shown}")
    reply["stop_reason"].must_be("refusal", "end_turn")


# Requests


async def _keys(target: Target) -> None:
    bearer = f"Bearer {target.api_key}"
    for headers in ({"authorization": None}, {"x-api-key": None, "authorization": bearer}, {"authorization": bearer}):
        answer = await target.send(target.ask_json(MESSAGES, target.body(MESSAGES), headers))
        if answer.status != 200:
            raise Violation(f"{answer.status} with {', '.join(name for name, _ in answer.ask.headers)}: {answer.body[:120]!r}")


async def _versions(target: Target) -> None:
    for version in ("2023-06-01", "2026-10-21", "2031-01-01", None):
        answer = await target.send(target.ask_json(MESSAGES, target.body(MESSAGES), {"anthropic-version": version}))
        if answer.status != 200:
            raise Violation(f"{answer.status} with anthropic-version {version}: {answer.body[:120]!r}")


_BETAS = "claude-code-20250219,oauth-2025-04-20,interleaved-thinking-2025-05-14,something-of-tomorrow-2027-01-01"


def _takes_betas(**fields: Any) -> Check:
    async def check(target: Target) -> None:
        ask = target.ask_json(f"{MESSAGES}?beta=true", target.body(MESSAGES, **fields), {"anthropic-beta": _BETAS})
        require_ok(await target.send(ask))

    return check


def _check_error(answer: Answer, kind: str) -> str:
    """Check an error of a type and return its words. Raises Violation."""
    check_error(answer.json())
    error = answer.json()["error"]
    error["type"].must_be(kind)
    return error["message"].text()


async def _max_tokens_field(target: Target) -> None:
    body = target.body(MESSAGES)
    del body["max_tokens"]
    answer = await target.send(target.ask_json(MESSAGES, body))
    require_status(answer, 400)
    _check_error(answer, "invalid_request_error")


async def _system(target: Target) -> None:
    must_hold(await carried(target, MESSAGES, system="You are brief."), "system", "You are brief.")
    blocks = [
        {"type": "text", "text": "You are "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    body = await carried(target, MESSAGES, system=blocks)
    must_hold(body, "system", "You are ")
    must_hold(body, "system", "brief.")
    if "cache_control" in json.dumps(body.value):
        raise Violation("cache_control travels to an engine that does not know it")


_LATER_SYSTEM = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello."},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": PROMPT},
]


async def _tools(target: Target) -> None:
    choices = (
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": engine.TOOL}, {"type": "function", "function": {"name": engine.TOOL}}),
        ({"type": "none"}, "none"),
    )
    for asked, expected in choices:
        body = await carried(target, MESSAGES, tools=TOOLS[MESSAGES], tool_choice=asked)
        for got, sent in zip(body["tools"].items(), FUNCTIONS, strict=True):
            got["type"].must_be("function")
            for name in ("name", "description", "parameters"):
                got["function"][name].must_be(sent[name])
        body["tool_choice"].must_be(expected)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    body = await carried(target, MESSAGES, tools=TOOLS[MESSAGES], tool_choice=one)
    body["parallel_tool_calls"].must_be(False)


async def _server_tools(target: Target) -> None:
    strange = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "something_of_tomorrow", "name": "x"},
    ]
    tools = (await carried(target, MESSAGES, tools=[*strange, *TOOLS[MESSAGES]]))["tools"].items()
    names = [tool["function"]["name"].value for tool in tools]
    if names != [engine.TOOL, engine.OTHER_TOOL]:
        raise Violation(f"the engine got the tools {names}")


_INPUT = json.loads("".join(engine.ARGUMENTS))


async def _results(target: Target) -> None:
    result = {"type": "tool_result", "tool_use_id": engine.CALL_ID}
    contents: list[Any] = ["18 degrees", [{"type": "text", "text": "18 "}, {"type": "text", "text": "degrees"}]]
    for content in contents:
        turns = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": engine.CALL_ID, "name": engine.TOOL, "input": _INPUT},
            ]},
            {"role": "user", "content": [{**result, "content": content}, {"type": "text", "text": "[[echo]]"}]},
        ]  # fmt: skip
        turn, call, told = find_result(await carried(target, MESSAGES, messages=turns, tools=TOOLS[MESSAGES]))
        call["id"].must_be(engine.CALL_ID)
        call["function"]["name"].must_be(engine.TOOL)
        read_json(call["function"]["arguments"].text(), "arguments").must_be(_INPUT)
        if join_text(turn["content"].value) != "I look.":
            raise Violation(f"the text beside the call arrives as {turn['content'].shown}")
        told["tool_call_id"].must_be(engine.CALL_ID)
        if str(join_text(told["content"].value)).split() != ["18", "degrees"]:
            raise Violation(f"the result arrives as {told['content'].shown}")


_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PIXEL_URL.partition(",")[2]},
}


async def _result_images(target: Target) -> None:
    result = {"type": "tool_result", "tool_use_id": engine.CALL_ID, "content": [_IMAGE]}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": engine.CALL_ID, "name": engine.TOOL, "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "[[echo]]"}]},
    ]
    got = (await carried(target, MESSAGES, messages=turns, tools=TOOLS[MESSAGES]))["messages"].items()
    next(turn for turn in got if turn["role"].value == "tool")["content"].text()
    images = find_images(got[-1])
    if len(images) != 1:
        raise Violation(f"the engine's last turn has {len(images)} images: {got[-1].shown}")
    images[0].must_be(PIXEL_URL)


async def _images(target: Target) -> None:
    turns = [{"role": "user", "content": [_IMAGE, {"type": "text", "text": "[[echo]]"}]}]
    urls = [url.value for url in find_images((await carried(target, MESSAGES, messages=turns))["messages"][-1])]
    if urls != [PIXEL_URL]:
        raise Violation(f"the engine got the images {urls}")


async def _limits(target: Target) -> None:
    body = await carried(target, MESSAGES, max_tokens=321, temperature=0.25, top_p=0.5, top_k=3, stop_sequences=["three"])
    limit = body.get("max_completion_tokens") or body["max_tokens"]
    limit.must_be(321)
    body.must_fit({"temperature": 0.25, "top_p": 0.5, "top_k": 3, "stop": ["three"]})


async def _thinking_blocks(target: Target) -> None:
    thought = {"type": "thinking", "thinking": "I greet.", "signature": "c2ln"}
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello."}]},
        {"role": "user", "content": "[[echo]]"},
    ]
    must_hold(await carried(target, MESSAGES, messages=turns, thinking={"type": "adaptive"}), "assistant", "Hello.")


_EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
_REMINDER = {"type": "text", "text": "<system-reminder>none</system-reminder>"}


async def _format(target: Target) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"type": "string", "enum": ["question", "remark"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if target.scripted:
        got = (await carried(target, MESSAGES, **fields))["response_format"]
        got["type"].must_be("json_schema")
        got["json_schema"]["schema"].must_be(schema)
        return
    texts = find_blocks(await _reply(target, max_tokens=64, **fields), "text")
    answer = read_json("".join(block["text"].text() for block in texts), "the answer")
    if answer["kind"].value not in ("question", "remark"):
        raise Violation(f"the answer does not keep to the schema: {answer.shown}")


# Failures


async def _cut(target: Target) -> None:
    _, error = await break_stream(target, MESSAGES, "[[cut]]")
    error["type"].must_be("api_error", "overloaded_error")


async def _context(target: Target) -> None:
    for dialect in ("error_400_context", "error_400_context:vllm", "error_400_context:openai"):
        answer = await target.say(MESSAGES, f"[[{dialect}]] hello")
        require_status(answer, 400)
        words = f"prompt is too long: {engine.ASKED_TOKENS} tokens > {engine.CONTEXT_TOKENS} maximum"
        if words not in _check_error(answer, "invalid_request_error"):
            raise Violation(f"[[{dialect}]]: {answer.json()['error']['message'].shown}, due is {words!r}")


async def _answer_too_long(target: Target) -> None:
    answer = await target.say(MESSAGES, "[[error_400_context:answer]] hello")
    require_status(answer, 400)
    check_error(answer.json())
    sizes = f"{engine.FITTING_TOKENS} + {engine.ANSWER_TOKENS} > {engine.CONTEXT_TOKENS}"
    words = f"input length and `max_tokens` exceed context limit: {sizes},"
    if words not in answer.json()["error"]["message"].text():
        raise Violation(f"{answer.json()['error']['message'].shown}, due is {words!r}")


async def _before(target: Target) -> None:
    cases = (("error_500", "api_error"), ("error_429", "rate_limit_error"), ("error_503", "overloaded_error"))
    for directive, kind in cases:
        for stream in (True, False):
            answer = await target.say(MESSAGES, f"[[{directive}]] hello", stream=stream)
            if answer.status < 400:
                raise Violation(f"[[{directive}]]: status {answer.status}")
            _check_error(answer, kind)


async def _foreign_type(target: Target) -> None:
    answer = await target.say(MESSAGES, "[[error_400:messages]] hello")
    require_status(answer, 400)
    _check_error(answer, "invalid_request_error")
    must_tell(answer.json()["error"])


# Streams


async def _events(target: Target) -> list[Event]:
    return list(require_stream(await target.say(MESSAGES, PROMPT, stream=True)).events)


async def _of_kind(target: Target, kind: str) -> list[Field]:
    found = [one for one in list_payloads(await _events(target)) if one["type"].value == kind]
    if not found:
        raise Violation(f"there is no {kind}")
    return found


async def _read(target: Target, prompt: str, **more: Any) -> MessageStream:
    return require_end(read_messages(require_stream(await target.say(MESSAGES, prompt, stream=True, **more))))


async def _names(target: Target) -> None:
    for event in await _events(target):
        if event.name != event.json()["type"].value:
            raise Violation(f"event {event.number} is named {event.name!r}: {event.data[:80]}")


async def _start(target: Target) -> None:
    found = await _of_kind(target, "message_start")
    if len(found) != 1:
        raise Violation(f"{len(found)} message_start")
    (await _events(target))[0].json()["type"].must_be("message_start")
    found[0]["message"].must_fit({"content": [], "stop_reason": None, "usage": check_usage})


async def _block_start(target: Target) -> None:
    for number, event in enumerate(await _of_kind(target, "content_block_start")):
        event["index"].must_be(number)
        if event["content_block"]["type"].value == "text":
            event["content_block"]["text"].must_be("")


async def _block_stop(target: Target) -> None:
    opened = [event["index"].value for event in await _of_kind(target, "content_block_start")]
    closed = [event["index"].value for event in await _of_kind(target, "content_block_stop")]
    if opened != closed:
        raise Violation(f"blocks {opened} are opened, {closed} stopped")


async def _delta(target: Target) -> None:
    (event,) = await _of_kind(target, "message_delta")
    event["delta"].must_have(("stop_reason", "stop_sequence"))
    event["delta"]["stop_reason"].word()
    event["usage"]["output_tokens"].count()


async def _stop(target: Target) -> None:
    events = await _events(target)
    if events[-1].name != "message_stop":
        raise Violation(f"the last event is {events[-1].name or events[-1].data[:40]!r}")


async def _strict(target: Target) -> None:
    await _read(target, PROMPT)


async def _text(target: Target) -> None:
    said = await _read(target, PROMPT)
    if said.texts("text") != [engine.TEXT] or len(said.blocks) != 1:
        raise Violation(f"blocks: {said.blocks}")


async def _stream_usage(target: Target) -> None:
    said = await _read(target, PROMPT)
    assert said.message is not None
    assert said.delta is not None
    usage = said.delta["usage"]
    if usage["output_tokens"].count() != 6:
        raise Violation(f"message_delta says {usage.shown}, the engine counted 6 output tokens")
    begun = said.message["usage"]["input_tokens"].value
    ended = usage.value.get("input_tokens")
    if engine.PROMPT_TOKENS not in (begun, ended):
        raise Violation(f"input_tokens: {begun} at the start, {ended} in the end; the engine counted {engine.PROMPT_TOKENS}")


async def _cached(target: Target) -> None:
    said = await _read(target, "[[cached]] hello")
    assert said.message is not None
    assert said.delta is not None
    found = [place["usage"].value.get("cache_read_input_tokens") for place in (said.message, said.delta)]
    if engine.CACHED_TOKENS not in found:
        raise Violation(f"cache_read_input_tokens: {found}; the engine said {engine.CACHED_TOKENS}")


async def _calls(target: Target, directive: str) -> list[tuple[str, str, object]]:
    """Return id, name and input of the calls of a stream that ended well."""
    async for _, answer in ask_for_calls(target, MESSAGES, directive, stream=True):
        said = require_end(read_messages(require_stream(answer)))
        assert said.delta is not None
        calls = [block for block in said.blocks if block.kind == "tool_use"]
        reason = said.delta["delta"]["stop_reason"]
        if target.scripted or (calls and reason.value != "max_tokens"):
            reason.must_be("tool_use")
            return [(block.start["id"].text(), block.start["name"].text(), block.arguments()) for block in calls]
    raise no_call()


_PAIR = [
    (engine.CALL_ID, engine.TOOL, _INPUT),
    (engine.OTHER_CALL_ID, engine.OTHER_TOOL, json.loads("".join(engine.OTHER_ARGUMENTS))),
]


async def _stream_tool_use(target: Target) -> None:
    calls = await _calls(target, "tools")
    if target.scripted:
        must_call(calls, _PAIR[:1])


def _streams_blocks(prompts: list[str], *expected: tuple[str, str | None], **more: Any) -> Check:
    """Return a check of the kind and the text of each block of a stream; None = any text."""

    async def check(target: Target) -> None:
        for prompt in prompts:
            found = [(block.kind, block.text) for block in (await _read(target, prompt, **more)).blocks]
            kinds_fit = [kind for kind, _ in found] == [kind for kind, _ in expected]
            if not kinds_fit or any(wanted not in {None, text} for (_, text), (_, wanted) in zip(found, expected, strict=True)):
                raise Violation(f"blocks: {found}")

    return check


def _streams_text(prompt: str, text: str, ending: Mapping[str, str], **more: Any) -> Check:
    """Return a check of the one text of a stream and of how its message_delta says that it ended."""

    async def check(target: Target) -> None:
        said = await _read(target, prompt, **more)
        assert said.delta is not None
        for name, value in ending.items():
            said.delta["delta"][name].must_be(value)
        if said.texts("text") != [text]:
            raise Violation(f"texts: {said.texts('text')}")

    return check


ROWS = (
    Row("messages.reply.head", "id msg_…, type: message, role: assistant, model", "anthropic SDKs, Claude Code", _head),
    Row("messages.reply.content", "content[] of blocks with type and text", "anthropic SDKs, Claude Code", _content),
    Row("messages.reply.stop_reason", "stop_reason and stop_sequence are there", "Claude Code, LangChain", _stop_reason),
    Row("messages.reply.usage", "usage with input_tokens, output_tokens and both cache counts",
        "Claude Code, LangChain (litellm#24176)", _usage),
    scripted("messages.reply.max_tokens", "a text cut off: stop_reason max_tokens", "Claude Code",
        answers(MESSAGES, "[[length]] hello", engine.CUT_SHORT, {"stop_reason": "max_tokens"})),
    scripted("messages.reply.stop_sequence", "stop_sequences reach the engine; the one that ended it is named",
        "anthropic SDKs, LangChain",
        answers(MESSAGES, "[[stop_sequence]] hello", engine.BEFORE_STOP, _STOPPED, **_STOPS)),
    scripted("messages.reply.cached", "cached tokens are in cache_read_input_tokens and not in input_tokens",
        "Claude Code's cost display",
        answers(MESSAGES, "[[cached]] hello", places={
            "usage.cache_read_input_tokens": engine.CACHED_TOKENS,
            "usage.input_tokens": engine.PROMPT_TOKENS - engine.CACHED_TOKENS,
        })),
    Row("messages.reply.tool_use", "a call is a tool_use block with id, name, input (an object); stop_reason tool_use",
        "Claude Code, anthropic SDKs", _tool_use),
    scripted("messages.reply.parallel", "two calls are two tool_use blocks", "Claude Code", _parallel),
    scripted("messages.reply.thinking", "thoughts are a thinking block before the text", "Claude Code, pi, AI SDK",
        _thinking),
    scripted("messages.reply.refusal", "a refusal's words reach the reader", "anthropic SDKs", _refusal),
    Row("messages.request.keys", "the key is taken from x-api-key, from Authorization: Bearer, and from both at once",
        "anthropic SDKs, old and new; Claude Code", _keys),
    Row("messages.request.versions", "any anthropic-version is taken, and none", "anthropic SDKs of every year", _versions),
    Row("messages.request.betas", "unknown betas and ?beta=true are not refused", "Claude Code (litellm#20021)",
        _takes_betas()),
    Row("messages.request.max_tokens", "without max_tokens: 400 in Anthropic's shape", "anthropic SDKs", _max_tokens_field),
    scripted("messages.request.system", "system, as a text or as blocks with cache_control, becomes the system message",
        "Claude Code, AI SDK", _system),
    Row("messages.request.later_system", "a system message after the first turn is not refused",
        "Claude Code (llama.cpp#27367)", answers(MESSAGES, messages=_LATER_SYSTEM, system="You are a coding agent.")),
    scripted("messages.request.tools", "tools and tool_choice are carried", "Claude Code, AI SDK", _tools),
    scripted("messages.request.server_tools", "server-side and unknown tool types are left out, not refused",
        "Claude Code (web_search)", _server_tools),
    scripted("messages.request.results", "tool_use and tool_result blocks become a call and its result",
        "Claude Code, every agent", _results),
    scripted("messages.request.result_images",
        "an image in a tool's result reaches the engine as an image of the user, the result stays text",
        "Claude Code (Read of a picture), computer use", _result_images),
    scripted("messages.request.images", "image blocks become image parts", "Claude Code, anthropic SDKs", _images),
    scripted("messages.request.limits", "max_tokens, temperature, top_p, top_k and stop_sequences are carried",
        "anthropic SDKs before 2026", _limits),
    scripted("messages.request.thinking_blocks", "thinking blocks of earlier turns are taken, with their signatures",
        "Claude Code", _thinking_blocks),
    Row("messages.request.claude_code", "a request as Claude Code sends it is answered", "Claude Code",
        _takes_betas(
            system=[{"type": "text", "text": "You are Claude Code.", **_EPHEMERAL}, {"type": "text", "text": "Be brief."}],
            messages=[{"role": "user", "content": [_REMINDER, {"type": "text", "text": PROMPT, **_EPHEMERAL}]}],
            tools=[*TOOLS[MESSAGES], {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
            metadata={"user_id": "user_1_account__session_2"},
            thinking={"type": "adaptive"},
            output_config={"effort": "medium"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        )),
    scripted("messages.request.native", "an engine that speaks Messages gets the request as it was sent, nothing added",
        "vLLM and llama.cpp users", passes_through(MESSAGES)),
    scripted("messages.request.long", "a system prompt of 60 KB is taken", "Claude Code",
        answers(MESSAGES, system="An instruction to an agent. " * (LIMITS.text_chars // 28))),
    Row("messages.request.format",
        "output_config.format is kept to: the answer is JSON of that schema, whichever engine answers",
        "anthropic SDKs (messages.parse), AI SDK", _format),
    scripted("messages.request.unhonoured", "what engines' own Messages take and forget is said in chat",
        "Claude Code, anthropic SDKs",
        carries(
            MESSAGES,
            ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
            ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
            ({"tools": TOOLS[MESSAGES], "tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
            ({"seed": 7}, {"seed": 7}),
        )),
    scripted("messages.failed.cut", "engine dies in a stream: event: error with type and message, no message_stop",
        "Claude Code asks again without streaming", _cut),
    scripted("messages.failed.engine_error", "an error in the engine's stream: event: error with the engine's words",
        "Claude Code, anthropic SDKs", breaks(MESSAGES, "error_in_stream", tells=True)),
    scripted("messages.failed.garbage", "an engine that sends what is no answer: event: error", "anthropic SDKs",
        breaks(MESSAGES, "garbage")),
    scripted("messages.failed.no_finish", "a stream of the engine that just ends: event: error, no message_stop",
        "Claude Code", breaks(MESSAGES, "no_finish")),
    scripted("messages.failed.closed", "after an error in a stream the connection is closed", "all SDK pools",
        closes(MESSAGES)),
    scripted("messages.failed.context", "a prompt that does not fit: 400, `prompt is too long: N tokens > M maximum`",
        "Claude Code compacts only on these words", _context),
    scripted("messages.failed.answer_too_long",
        "an answer that does not fit behind its prompt: 400, `… exceed context limit: N + A > M, …`",
        "Claude Code asks again for less only on these words", _answer_too_long),
    scripted("messages.failed.before", "an engine's error before the first event is an HTTP error in Anthropic's shape",
        "anthropic SDKs", _before),
    scripted("messages.failed.foreign_type",
        "an engine's Messages error of a type that Anthropic does not know gets one it does",
        "anthropic SDKs (vLLM says BadRequestError)", _foreign_type),
    scripted("messages.failed.whole_cut", "an engine that dies inside an unstreamed answer is an HTTP error",
        "anthropic SDKs", fails_whole(MESSAGES, "cut")),
    scripted("messages.failed.whole_garbage", "an engine whose unstreamed answer is none is an HTTP error", "anthropic SDKs",
        fails_whole(MESSAGES, "garbage")),
    scripted("messages.leave.stream", "a client that leaves a stream frees the engine", "operators (litellm#30244)",
        leaves_stream(MESSAGES)),
    scripted("messages.leave.plain", "a client that leaves before an unstreamed answer frees the engine",
        "operators (litellm pull 30223)", leaves_unanswered(MESSAGES)),
    scripted("messages.failed.late", "an engine's refusal after keep-alives is said in the stream, with the engine's words",
        "Claude Code, anthropic SDKs", breaks_late(MESSAGES), is_slow=True),
    Row("messages.stream.names", "every event has an event line equal to its type",
        "every Anthropic client sees nothing without", _names),
    Row("messages.stream.start", "one message_start, first: content [], stop_reason null, usage with both counts",
        "Python, Node, LangChain, pi (litellm#33224)", _start),
    Row("messages.stream.block_start", "content_block_start: index from 0, an empty text", "anthropic SDKs (litellm#13373)",
        _block_start),
    Row("messages.stream.block_stop", "every block is stopped", "Claude Code prints nothing; AI SDK runs no tool",
        _block_stop),
    Row("messages.stream.delta", "message_delta: stop_reason, stop_sequence, usage.output_tokens",
        "Python, Node, AI SDK, pi, LangChain raise", _delta),
    Row("messages.stream.stop", "message_stop comes last, no [DONE]", "Node SDK, pi, AI SDK", _stop),
    Row("messages.stream.strict", "a strict accumulator takes the whole stream",
        "anthropic-python, anthropic-node, Claude Code", _strict),
    scripted("messages.stream.text", "the pieces add up to what the engine said", "everybody", _text),
    scripted("messages.stream.usage", "the counts are the engine's: input_tokens and output_tokens by the end",
        "Claude Code, cost displays", _stream_usage),
    scripted("messages.stream.cached", "cached tokens are told by the end of the stream", "Claude Code's cost display",
        _cached),
    Row("messages.stream.tool_use", "a call: content_block_start with input {}, input_json_delta, stop; stop_reason tool_use",
        "Claude Code, anthropic SDKs, AI SDK", _stream_tool_use),
    scripted("messages.stream.parallel", "two calls are two blocks, one after the other", "Claude Code",
        makes_calls(_calls, "parallel_tools", _PAIR)),
    scripted("messages.stream.interleaved", "calls whose arguments come in turns: blocks still one after the other",
        "anthropic SDKs (litellm#13373)", makes_calls(_calls, "interleaved_tools", _PAIR)),
    scripted("messages.stream.whole_call", "a call that the engine says in one piece arrives whole", "Claude Code",
        makes_calls(_calls, "whole_tools", _PAIR[:1])),
    scripted("messages.stream.nasty", "input with quotes, brackets, escapes and emoji arrives unchanged",
        "Claude Code writes files with it",
        makes_calls(_calls, "nasty_arguments", [(engine.CALL_ID, engine.TOOL, json.loads(engine.NASTY))])),
    scripted("messages.stream.text_then_call", "a text block stops before the call's block starts", "Claude Code",
        _streams_blocks(["[[text_then_tools]] weather?"], ("text", engine.TEXT), ("tool_use", None), tools=TOOLS[MESSAGES])),
    scripted("messages.stream.empty_calls", "an engine's empty tool_calls: [] gives the text, no empty input_json_delta",
        "anthropic SDKs (litellm#29286)", _streams_blocks(["[[empty_tool_calls]] hello"], ("text", engine.TEXT))),
    scripted("messages.stream.thinking", "thoughts stream as thinking_delta in a thinking block, before the text block",
        "Claude Code, pi (litellm#32357)",
        _streams_blocks(
            ["[[thinking]] hello", "[[thinking:reasoning]] hello"], ("thinking", engine.THOUGHT), ("text", engine.TEXT),
        )),
    scripted("messages.stream.thinking_call", "thoughts, then a call: two blocks, no empty text block between", "Claude Code",
        _streams_blocks(["[[thinking]] [[tools]] weather?"], ("thinking", None), ("tool_use", None), tools=TOOLS[MESSAGES])),
    scripted("messages.stream.max_tokens", "streamed: a text cut off: stop_reason max_tokens", "Claude Code",
        _streams_text("[[length]] hello", engine.CUT_SHORT, {"stop_reason": "max_tokens"})),
    scripted("messages.stream.stop_sequence", "the stop sequence that ended it is named in message_delta", "anthropic SDKs",
        _streams_text("[[stop_sequence]] hello", engine.BEFORE_STOP, _STOPPED, **_STOPS)),
    scripted("messages.stream.refusal", "streamed: a refusal's words reach the reader", "anthropic SDKs",
        _streams_text("[[refusal]] hello", engine.REFUSAL, {})),
)  # fmt: skip
