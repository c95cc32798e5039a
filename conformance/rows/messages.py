"""Rows on Messages: whole answers, fields of a request, failures."""

from __future__ import annotations

import json
from typing import Any  # request bodies are JSON

from conformance.engine.script import (
    ANSWER_TOKENS,
    ARGUMENTS,
    ASKED_TOKENS,
    BEFORE_STOP,
    CACHED_TOKENS,
    CALL_ID,
    CONTEXT_TOKENS,
    CUT_SHORT,
    FITTING_TOKENS,
    OTHER_TOOL,
    PROMPT_TOKENS,
    REASON,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.exchange import LIMITS, Answer, Field, NotApplicable, Violation, read_json
from conformance.readers.messages import STOP_REASONS, check_error, check_message_head, check_usage, read_messages
from conformance.rows.chat import PIXEL, leave_stream, leave_unanswered
from conformance.rows.chat_streams import TOOLS
from conformance.table import (
    CHAT,
    MESSAGES,
    MESSAGES_NAMED,
    PROMPT,
    Surface,
    Target,
    list_goes,
    no_call,
    require_ok,
    require_script_or_skip,
    require_status,
    require_stream,
    requirement,
    skip_where_native,
)

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


_INPUT = json.loads("".join(ARGUMENTS))
_BETAS = "claude-code-20250219,oauth-2025-04-20,interleaved-thinking-2025-05-14,something-of-tomorrow-2027-01-01"


async def _carried(target: Target, **fields: Any) -> Field:
    """Return the chat request that the engine got. Raises NotApplicable when it speaks Messages itself."""
    texts = find_blocks(require_ok(await target.messages("[[echo]]", **fields)), "text")
    got = read_json("".join(block["text"].text() for block in texts), "what the engine got")
    if got["path"].value == MESSAGES:
        raise NotApplicable("the engine speaks Messages itself; nothing is translated")
    got["path"].must_be(CHAT)
    return got["body"]


def _plain(content: Any) -> Any:
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _must_hold(body: Field, role: str, words: str) -> None:
    found = [_plain(turn.value.get("content")) for turn in body["messages"].items() if turn["role"].value == role]
    if not any(words in str(one) for one in found):
        raise Violation(f"{words!r} is in none of the engine's {role} messages: {found}")


@requirement(
    "messages.request.keys",
    "the key is taken from x-api-key, from Authorization: Bearer, and from both at once",
    clients="anthropic SDKs, old and new; Claude Code",
)
async def _keys(target: Target) -> None:
    bearer = f"Bearer {target.api_key}"
    for headers in ({"authorization": None}, {"x-api-key": None, "authorization": bearer}, {"authorization": bearer}):
        answer = await target.send(target.ask_json(MESSAGES, target.messages_body(), headers))
        if answer.status != 200:
            raise Violation(f"{answer.status} with {', '.join(name for name, _ in answer.ask.headers)}: {answer.body[:120]!r}")


@requirement("messages.request.versions", "any anthropic-version is taken, and none", clients="anthropic SDKs of every year")
async def _versions(target: Target) -> None:
    for version in ("2023-06-01", "2026-10-21", "2031-01-01", None):
        answer = await target.send(target.ask_json(MESSAGES, target.messages_body(), {"anthropic-version": version}))
        if answer.status != 200:
            raise Violation(f"{answer.status} with anthropic-version {version}: {answer.body[:120]!r}")


@requirement("messages.request.betas", "unknown betas and ?beta=true are not refused", clients="Claude Code (litellm#20021)")
async def _betas(target: Target) -> None:
    ask = target.ask_json(f"{MESSAGES}?beta=true", target.messages_body(), {"anthropic-beta": _BETAS})
    require_ok(await target.send(ask))


@requirement("messages.request.max_tokens", "without max_tokens: 400 in Anthropic's shape", clients="anthropic SDKs")
async def _max_tokens_field(target: Target) -> None:
    body = target.messages_body()
    del body["max_tokens"]
    answer = await target.send(target.ask_json(MESSAGES, body))
    require_status(answer, 400)
    check_error(answer.json())
    answer.json()["error"]["type"].must_be("invalid_request_error")


@requirement(
    "messages.request.system",
    "system, as a text or as blocks with cache_control, becomes the system message",
    clients="Claude Code, AI SDK",
    needs_script=True,
)
async def _system(target: Target) -> None:
    _must_hold(await _carried(target, system="You are brief."), "system", "You are brief.")
    blocks = [
        {"type": "text", "text": "You are "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    body = await _carried(target, system=blocks)
    _must_hold(body, "system", "You are ")
    _must_hold(body, "system", "brief.")
    if "cache_control" in json.dumps(body.value):
        raise Violation("cache_control travels to an engine that does not know it")


@requirement(
    "messages.request.later_system",
    "a system message after the first turn is not refused",
    clients="Claude Code (llama.cpp#27367)",
)
async def _later_system(target: Target) -> None:
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": PROMPT},
    ]
    require_ok(await target.messages(messages=turns, system="You are a coding agent."))


@requirement("messages.request.tools", "tools and tool_choice are carried", clients="Claude Code, AI SDK", needs_script=True)
async def _tools(target: Target) -> None:
    choices = (
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": TOOL}, {"type": "function", "function": {"name": TOOL}}),
        ({"type": "none"}, "none"),
    )
    for asked, expected in choices:
        body = await _carried(target, tools=ANTHROPIC_TOOLS, tool_choice=asked)
        for got, sent in zip(body["tools"].items(), TOOLS, strict=True):
            got["type"].must_be("function")
            for name in ("name", "description", "parameters"):
                got["function"][name].must_be(sent["function"][name])
        body["tool_choice"].must_be(expected)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    (await _carried(target, tools=ANTHROPIC_TOOLS, tool_choice=one))["parallel_tool_calls"].must_be(False)


@requirement(
    "messages.request.server_tools",
    "server-side and unknown tool types are left out, not refused",
    clients="Claude Code (web_search)",
    needs_script=True,
)
async def _server_tools(target: Target) -> None:
    strange = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "something_of_tomorrow", "name": "x"},
    ]
    tools = (await _carried(target, tools=[*strange, *ANTHROPIC_TOOLS]))["tools"].items()
    names = [tool["function"]["name"].value for tool in tools]
    if names != ["get_weather", "get_time"]:
        raise Violation(f"the engine got the tools {names}")


@requirement(
    "messages.request.results",
    "tool_use and tool_result blocks become a call and its result",
    clients="Claude Code, every agent",
    needs_script=True,
)
async def _results(target: Target) -> None:
    result = {"type": "tool_result", "tool_use_id": CALL_ID}
    contents: list[Any] = ["18 degrees", [{"type": "text", "text": "18 "}, {"type": "text", "text": "degrees"}]]
    for content in contents:
        turns = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "text", "text": "I look."}, {"type": "tool_use", "id": CALL_ID, "name": TOOL, "input": _INPUT},
            ]},
            {"role": "user", "content": [{**result, "content": content}, {"type": "text", "text": "[[echo]]"}]},
        ]  # fmt: skip
        body = await _carried(target, messages=turns, tools=ANTHROPIC_TOOLS)
        got = body["messages"].items()
        call = next((turn for turn in got if turn.value.get("tool_calls")), None)
        told = next((turn for turn in got if turn["role"].value == "tool"), None)
        if call is None or told is None:
            raise Violation(f"the engine's messages are {body['messages'].shown}")
        call["tool_calls"][0]["id"].must_be(CALL_ID)
        call["tool_calls"][0]["function"]["name"].must_be(TOOL)
        read_json(call["tool_calls"][0]["function"]["arguments"].text(), "arguments").must_be(_INPUT)
        if _plain(call["content"].value) != "I look.":
            raise Violation(f"the text beside the call arrives as {call['content'].shown}")
        told["tool_call_id"].must_be(CALL_ID)
        if str(_plain(told["content"].value)).split() != ["18", "degrees"]:
            raise Violation(f"the result arrives as {told['content'].shown}")


@requirement(
    "messages.request.result_images",
    "an image in a tool's result reaches the engine as an image of the user, the result stays text",
    clients="Claude Code (Read of a picture), computer use",
    needs_script=True,
)
async def _result_images(target: Target) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": [image]}
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": CALL_ID, "name": TOOL, "input": {}}]},
        {"role": "user", "content": [result, {"type": "text", "text": "[[echo]]"}]},
    ]
    got = (await _carried(target, messages=turns, tools=ANTHROPIC_TOOLS))["messages"].items()
    next(turn for turn in got if turn["role"].value == "tool")["content"].text()
    images = [part for part in got[-1]["content"].items() if part["type"].value == "image_url"]
    if len(images) != 1:
        raise Violation(f"the engine's last turn has {len(images)} images: {got[-1].shown}")
    images[0]["image_url"]["url"].must_be(f"data:image/png;base64,{PIXEL}")


@requirement(
    "messages.request.images", "image blocks become image parts", clients="Claude Code, anthropic SDKs", needs_script=True
)
async def _images(target: Target) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "[[echo]]"}]
    turn = (await _carried(target, messages=[{"role": "user", "content": content}]))["messages"][-1]
    urls = [part["image_url"]["url"].value for part in turn["content"].items() if part["type"].value == "image_url"]
    if urls != [f"data:image/png;base64,{PIXEL}"]:
        raise Violation(f"the engine got the images {urls}")


@requirement(
    "messages.request.limits",
    "max_tokens, temperature, top_p, top_k and stop_sequences are carried",
    clients="anthropic SDKs before 2026",
    needs_script=True,
)
async def _limits(target: Target) -> None:
    body = await _carried(target, max_tokens=321, temperature=0.25, top_p=0.5, top_k=3, stop_sequences=["three"])
    limit = body.get("max_completion_tokens") or body["max_tokens"]
    limit.must_be(321)
    for name, value in (("temperature", 0.25), ("top_p", 0.5), ("top_k", 3), ("stop", ["three"])):
        body[name].must_be(value)


@requirement(
    "messages.request.thinking_blocks",
    "thinking blocks of earlier turns are taken, with their signatures",
    clients="Claude Code",
    needs_script=True,
)
async def _thinking_blocks(target: Target) -> None:
    thought = {"type": "thinking", "thinking": "I greet.", "signature": "c2ln"}
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Hello."}]},
        {"role": "user", "content": "[[echo]]"},
    ]
    _must_hold(await _carried(target, messages=turns, thinking={"type": "adaptive"}), "assistant", "Hello.")


@requirement("messages.request.claude_code", "a request as Claude Code sends it is answered", clients="Claude Code")
async def _claude_code(target: Target) -> None:
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "<system-reminder>none</system-reminder>"}
    more: dict[str, Any] = {
        "system": [{"type": "text", "text": "You are Claude Code.", **ephemeral}, {"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [reminder, {"type": "text", "text": PROMPT, **ephemeral}]}],
        "tools": [*ANTHROPIC_TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    ask = target.ask_json(f"{MESSAGES}?beta=true", target.messages_body(**more), {"anthropic-beta": _BETAS})
    require_ok(await target.send(ask))


@requirement(
    "messages.request.native",
    "an engine that speaks Messages gets the request as it was sent, nothing added",
    clients="vLLM and llama.cpp users",
    needs_script=True,
)
async def _native(target: Target) -> None:
    for stream in (False, True):
        body = target.messages_body("[[echo]]", stream=stream, temperature=0.5, something_of_tomorrow={"a": None})
        answer = await target.send(target.ask_json(MESSAGES, body))
        require_status(answer, 200)
        texts = (
            read_messages(require_stream(answer)).texts("text")
            if stream
            else [block["text"].text() for block in find_blocks(require_ok(answer), "text")]
        )
        got = read_json("".join(texts), "what the engine got")
        if got["path"].value == CHAT:
            raise NotApplicable("the engine speaks chat only; the request is translated")
        got["body"].must_be(body)


@requirement("messages.request.long", "a system prompt of 60 KB is taken", clients="Claude Code", needs_script=True)
async def _long(target: Target) -> None:
    require_ok(await target.messages(system="An instruction to an agent. " * (LIMITS.text_chars // 28)))


@requirement(
    "messages.request.format",
    "output_config.format is kept to: the answer is JSON of that schema, whichever engine answers",
    clients="anthropic SDKs (messages.parse), AI SDK",
)
async def _format(target: Target) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"type": "string", "enum": ["question", "remark"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    fields = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if target.scripted:
        got = (await _carried(target, **fields))["response_format"]
        got["type"].must_be("json_schema")
        got["json_schema"]["schema"].must_be(schema)
        return
    texts = find_blocks(require_ok(await target.messages(max_tokens=64, **fields)), "text")
    answer = read_json("".join(block["text"].text() for block in texts), "the answer")
    if answer["kind"].value not in ("question", "remark"):
        raise Violation(f"the answer does not keep to the schema: {answer.shown}")


@requirement(
    "messages.request.unhonoured",
    "what engines' own Messages take and forget is said in chat",
    clients="Claude Code, anthropic SDKs",
    needs_script=True,
)
async def _unhonoured(target: Target) -> None:
    for fields, name, expected in (
        ({"thinking": {"type": "disabled"}}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, "reasoning_effort", "low"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "none"}}, "tool_choice", "none"),
        ({"seed": 7}, "seed", 7),
    ):
        (await _carried(target, **fields))[name].must_be(expected)


async def _failed(target: Target, directives: str) -> tuple[Answer, Field]:
    """Return a stream that failed, and the error it says."""
    answer = await target.messages(f"{directives} hello", stream=True)
    said = read_messages(require_stream(answer))
    if said.failure is None:
        raise Violation(f"the stream ends without an error event (stopped: {said.stopped})")
    return answer, said.failure


@requirement(
    "messages.failed.cut",
    "engine dies in a stream: event: error with type and message, no message_stop",
    clients="Claude Code asks again without streaming",
    needs_script=True,
)
async def _cut(target: Target) -> None:
    _, error = await _failed(target, "[[cut]]")
    error["type"].must_be("api_error", "overloaded_error")


@requirement(
    "messages.failed.engine_error",
    "an error in the engine's stream: event: error with the engine's words",
    clients="Claude Code, anthropic SDKs",
    needs_script=True,
)
async def _engine_error(target: Target) -> None:
    _, error = await _failed(target, "[[error_in_stream]]")
    if REASON not in error["message"].text():
        raise Violation(f"the engine's words are lost: {error.shown}")


@requirement(
    "messages.failed.garbage",
    "an engine that sends what is no answer: event: error",
    clients="anthropic SDKs",
    needs_script=True,
)
async def _garbage(target: Target) -> None:
    await skip_where_native(target, Surface.MESSAGES)
    await _failed(target, "[[garbage]]")


@requirement(
    "messages.failed.no_finish",
    "a stream of the engine that just ends: event: error, no message_stop",
    clients="Claude Code",
    needs_script=True,
)
async def _no_finish(target: Target) -> None:
    await _failed(target, "[[no_finish]]")


@requirement(
    "messages.failed.closed", "after an error in a stream the connection is closed", clients="all SDK pools", needs_script=True
)
async def _closed(target: Target) -> None:
    ask = target.ask_json(MESSAGES, target.messages_body("[[cut]] hello", stream=True))
    answer = await target.send_fresh(ask, watches_close=True)
    require_status(answer, 200)
    if not answer.closed:
        raise Violation("the connection stays open for the next request")


@requirement(
    "messages.failed.context",
    "a prompt that does not fit: 400, `prompt is too long: N tokens > M maximum`",
    clients="Claude Code compacts only on these words",
    needs_script=True,
)
async def _context(target: Target) -> None:
    for dialect in ("error_400_context", "error_400_context:vllm", "error_400_context:openai"):
        answer = await target.messages(f"[[{dialect}]] hello")
        require_status(answer, 400)
        check_error(answer.json())
        answer.json()["error"]["type"].must_be("invalid_request_error")
        words = f"prompt is too long: {ASKED_TOKENS} tokens > {CONTEXT_TOKENS} maximum"
        if words not in answer.json()["error"]["message"].text():
            raise Violation(f"[[{dialect}]]: {answer.json()['error']['message'].shown}, due is {words!r}")


@requirement(
    "messages.failed.answer_too_long",
    "an answer that does not fit behind its prompt: 400, `… exceed context limit: N + A > M, …`",
    clients="Claude Code asks again for less only on these words",
    needs_script=True,
)
async def _answer_too_long(target: Target) -> None:
    answer = await target.messages("[[error_400_context:answer]] hello")
    require_status(answer, 400)
    check_error(answer.json())
    words = f"input length and `max_tokens` exceed context limit: {FITTING_TOKENS} + {ANSWER_TOKENS} > {CONTEXT_TOKENS},"
    if words not in answer.json()["error"]["message"].text():
        raise Violation(f"{answer.json()['error']['message'].shown}, due is {words!r}")


@requirement(
    "messages.failed.before",
    "an engine's error before the first event is an HTTP error in Anthropic's shape",
    clients="anthropic SDKs",
    needs_script=True,
)
async def _before(target: Target) -> None:
    cases = (("error_500", "api_error"), ("error_429", "rate_limit_error"), ("error_503", "overloaded_error"))
    for directive, kind in cases:
        for stream in (True, False):
            answer = await target.messages(f"[[{directive}]] hello", stream=stream)
            if answer.status < 400:
                raise Violation(f"[[{directive}]]: status {answer.status}")
            check_error(answer.json())
            answer.json()["error"]["type"].must_be(kind)


@requirement(
    "messages.failed.foreign_type",
    "an engine's Messages error of a type that Anthropic does not know gets one it does",
    clients="anthropic SDKs (vLLM says BadRequestError)",
    needs_script=True,
)
async def _foreign_type(target: Target) -> None:
    answer = await target.messages("[[error_400:messages]] hello")
    require_status(answer, 400)
    check_error(answer.json())
    answer.json()["error"]["type"].must_be("invalid_request_error")
    if REASON not in answer.json()["error"]["message"].text():
        raise Violation(f"the engine's words are lost: {answer.json().shown}")


@requirement(
    "messages.failed.whole_cut",
    "an engine that dies inside an unstreamed answer is an HTTP error",
    clients="anthropic SDKs",
    needs_script=True,
)
async def _whole_cut(target: Target) -> None:
    answer = await target.messages("[[cut]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes")
    check_error(answer.json())


@requirement(
    "messages.failed.whole_garbage",
    "an engine whose unstreamed answer is none is an HTTP error",
    clients="anthropic SDKs",
    needs_script=True,
)
async def _whole_garbage(target: Target) -> None:
    await skip_where_native(target, Surface.MESSAGES)
    answer = await target.messages("[[garbage]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes")
    check_error(answer.json())


@requirement(
    "messages.leave.stream",
    "a client that leaves a stream frees the engine",
    clients="operators (litellm#30244)",
    needs_script=True,
)
async def _leave(target: Target) -> None:
    await leave_stream(target, MESSAGES, lambda prompt: target.messages_body(prompt, stream=True))


@requirement(
    "messages.leave.plain",
    "a client that leaves before an unstreamed answer frees the engine",
    clients="operators (litellm pull 30223)",
    needs_script=True,
)
async def _leave_plain(target: Target) -> None:
    await leave_unanswered(target, MESSAGES, target.messages_body)


@requirement(
    "messages.failed.late",
    "an engine's refusal after keep-alives is said in the stream, with the engine's words",
    clients="Claude Code, anthropic SDKs",
    needs_script=True,
    is_slow=True,
)
async def _late(target: Target) -> None:
    _, error = await _failed(target, f"[[slow:{target.silence_s:g}]] [[error_400]]")
    if REASON not in error["message"].text():
        raise Violation(f"the engine's words are lost: {error.shown}")
