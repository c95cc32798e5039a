"""Rows on Responses: whole answers, fields of a request, failures."""

from __future__ import annotations

from typing import Any  # request fields are JSON

from conformance.engine.script import (
    ARGUMENTS,
    CACHED_TOKENS,
    CALL_ID,
    CUT_SHORT,
    OTHER_ARGUMENTS,
    OTHER_TOOL,
    PROMPT_TOKENS,
    REASON,
    REFUSAL,
    TEXT,
    THOUGHT,
    TOOL,
)  # fmt: skip
from conformance.exchange import LIMITS, Answer, Field, NotApplicable, Violation, read_json
from conformance.readers.responses import OBJECT_KEYS, check_item, check_usage, read_responses
from conformance.rows.chat import PIXEL, leave_stream, leave_unanswered
from conformance.rows.chat_streams import TOOLS
from conformance.table import (
    CHAT,
    PROMPT,
    RESPONSES,
    RESPONSES_NAMED,
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


_STRANGE_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
    {"type": "local_shell"},
    {"type": "something_of_tomorrow", "deep": {"a": 1}},
]


async def _carried(target: Target, given: object = "[[echo]]", **fields: Any) -> Field:
    """Return the chat request that the engine got. Raises NotApplicable when it speaks Responses itself."""
    text = only(find_parts(require_ok(await target.responses(given, **fields)), "output_text"), "texts")["text"].text()
    got = read_json(text, "what the engine got")
    if got["path"].value == RESPONSES:
        raise NotApplicable("the engine speaks Responses itself; nothing is translated")
    got["path"].must_be(CHAT)
    return got["body"]


def _turns(body: Field, role: str) -> list[Any]:
    """Return the contents of all turns of a role; text parts as one text."""
    return [_plain(turn.value.get("content")) for turn in body["messages"].items() if turn["role"].value == role]


def _plain(content: Any) -> Any:
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _must_hold(found: list[Any], expected: str, where: str) -> None:
    if not any(expected in str(one) for one in found):
        raise Violation(f"{expected!r} is not in the engine's {where}: {found}")


@requirement(
    "responses.request.instructions",
    "instructions become the system message",
    clients="Codex, OpenAI Agents",
    needs_script=True,
)
async def _instructions(target: Target) -> None:
    body = await _carried(target, instructions="You are brief.")
    _must_hold(_turns(body, "system"), "You are brief.", "system message")
    _must_hold(_turns(body, "user"), "[[echo]]", "user message")


@requirement(
    "responses.request.turns",
    "system, developer, user and assistant turns keep their order and text",
    clients="Codex, AI SDK",
    needs_script=True,
)
async def _turns_in_order(target: Target) -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rule one."}]},
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello back."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "[[echo]]"}]},
    ]
    body = await _carried(target, given, instructions="Rule zero.")
    texts = [str(_plain(turn["content"].value)) for turn in body["messages"].items()]
    joined = "\n".join(texts)
    places = [joined.find(words) for words in ("Rule zero.", "Rule one.", "Hello", "Hello back.", "[[echo]]")]
    if -1 in places or places != sorted(places):
        raise Violation(f"the engine's messages are {texts}")
    _must_hold(_turns(body, "assistant"), "Hello back.", "assistant message")


@requirement(
    "responses.request.tools",
    "tools, tool_choice and parallel_tool_calls are carried",
    clients="Codex, AI SDK",
    needs_script=True,
)
async def _tools(target: Target) -> None:
    body = await _carried(target, tools=FLAT_TOOLS, tool_choice={"type": "function", "name": TOOL}, parallel_tool_calls=False)
    for got, sent in zip(body["tools"].items(), TOOLS, strict=True):
        got["type"].must_be("function")
        for name in ("name", "description", "parameters"):
            got["function"][name].must_be(sent["function"][name])
    body["tool_choice"].must_be({"type": "function", "function": {"name": TOOL}})
    body["parallel_tool_calls"].must_be(False)


@requirement(
    "responses.request.limits",
    "max_output_tokens, temperature, top_p and fields of engines are carried",
    clients="every SDK",
    needs_script=True,
)
async def _limits(target: Target) -> None:
    body = await _carried(target, max_output_tokens=321, temperature=0.25, top_p=0.5, seed=7, min_p=0.05, top_k=3)
    limit = body.get("max_completion_tokens") or body["max_tokens"]
    limit.must_be(321)
    for name, value in (("temperature", 0.25), ("top_p", 0.5), ("seed", 7), ("min_p", 0.05), ("top_k", 3)):
        body[name].must_be(value)


@requirement(
    "responses.request.format",
    "text.format with a JSON schema becomes response_format",
    clients="openai parse(), AI SDK",
    needs_script=True,
)
async def _format(target: Target) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    got = (await _carried(target, text={"format": wanted}))["response_format"]
    got["type"].must_be("json_schema")
    got["json_schema"]["name"].must_be("answer")
    got["json_schema"]["schema"].must_be(schema)
    got["json_schema"]["strict"].must_be(True)


@requirement(
    "responses.request.calls",
    "function_call and function_call_output items become a call and its result",
    clients="Codex, OpenAI Agents",
    needs_script=True,
)
async def _calls(target: Target) -> None:
    arguments = "".join(ARGUMENTS)
    given = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "function_call", "id": "fc_1", "call_id": CALL_ID, "name": TOOL, "arguments": arguments},
        {"type": "function_call_output", "call_id": CALL_ID, "output": "18 degrees"},
        {"role": "user", "content": "[[echo]]"},
    ]
    body = await _carried(target, given, tools=FLAT_TOOLS)
    turns = body["messages"].items()
    call = next((turn for turn in turns if turn.value.get("tool_calls")), None)
    result = next((turn for turn in turns if turn["role"].value == "tool"), None)
    if call is None or result is None:
        raise Violation(f"the engine's messages are {body['messages'].shown}")
    call["tool_calls"][0]["id"].must_be(CALL_ID)
    call["tool_calls"][0]["function"].must_be({"name": TOOL, "arguments": arguments})
    result["tool_call_id"].must_be(CALL_ID)
    if _plain(result["content"].value) != "18 degrees":
        raise Violation(f"the result arrives as {result['content'].shown}")


@requirement(
    "responses.request.thoughts",
    "the text of a reasoning item goes back to the engine under both names that engines look for",
    clients="agents whose model thinks between calls (vllm#27755)",
    needs_script=True,
)
async def _thoughts(target: Target) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]}
    said = {"role": "assistant", "content": "It is warm."}
    body = await _carried(
        target, [{"role": "user", "content": "Weather?"}, thought, said, {"role": "user", "content": "[[echo]]"}]
    )
    turn = next(turn for turn in body["messages"].items() if turn["role"].value == "assistant")
    turn["reasoning_content"].must_be("I look.")
    turn["reasoning"].must_be("I look.")


@requirement(
    "responses.request.result_images",
    "an image in a tool's result reaches the engine as an image of the user, the result stays text",
    clients="Codex (view_image), computer use",
    needs_script=True,
)
async def _result_images(target: Target) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    given = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "id": "fc_1", "call_id": CALL_ID, "name": TOOL, "arguments": "{}"},
        {"type": "function_call_output", "call_id": CALL_ID, "output": [{"type": "input_image", "image_url": url}]},
        {"role": "user", "content": "[[echo]]"},
    ]
    turns = (await _carried(target, given, tools=FLAT_TOOLS))["messages"].items()
    next(turn for turn in turns if turn["role"].value == "tool")["content"].text()
    images = [part for part in turns[-1]["content"].items() if part["type"].value == "image_url"]
    only(images, "images")["image_url"]["url"].must_be(url)


@requirement("responses.request.images", "input_image becomes an image part", clients="openai SDKs, Codex", needs_script=True)
async def _images(target: Target) -> None:
    url = f"data:image/png;base64,{PIXEL}"
    content = [{"type": "input_text", "text": "[[echo]]"}, {"type": "input_image", "image_url": url, "detail": "low"}]
    turn = (await _carried(target, [{"role": "user", "content": content}]))["messages"][-1]
    images = [part for part in turn["content"].items() if part["type"].value == "image_url"]
    only(images, "images")["image_url"]["url"].must_be(url)


@requirement(
    "responses.request.strange_tools",
    "unknown tool types (web_search, custom, namespace) are skipped, not refused",
    clients="Codex (llama.cpp#20156)",
    needs_script=True,
)
async def _strange_tools(target: Target) -> None:
    body = await _carried(target, tools=[*_STRANGE_TOOLS, *FLAT_TOOLS])
    names = [tool["function"]["name"].value for tool in body["tools"].items() if tool["type"].value == "function"]
    if not {"get_weather", "get_time"} <= set(names):
        raise Violation(f"the engine got the tools {names}")
    strange = [tool["type"].value for tool in body["tools"].items() if tool["type"].value != "function"]
    if strange:
        raise Violation(f"the engine got tools of the types {strange}, which it does not know")


@requirement("responses.request.only_strange_tools", "a request with nothing but unknown tools is answered", clients="Codex")
async def _only_strange_tools(target: Target) -> None:
    require_ok(await target.responses(tools=_STRANGE_TOOLS[:1], tool_choice="auto"))


@requirement("responses.request.codex", "a request as Codex sends it is answered", clients="Codex")
async def _codex(target: Target) -> None:
    message = {
        "type": "message",
        "role": "developer",
        "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}],
    }
    given = [
        message,
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
    ]
    more = {
        "instructions": "You are a coding agent.", "tools": [*FLAT_TOOLS, *_STRANGE_TOOLS[:2]], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0197-codex", "text": {"verbosity": "medium"},
        "client_metadata": {"session": "1"}, "service_tier": "auto",
    }  # fmt: skip
    body = {name: value for name, value in target.responses_body(given, **more).items() if name != "max_output_tokens"}
    headers = {
        "accept": "text/event-stream",
        "originator": "codex_cli",
        "session_id": "1",
        "openai-beta": "responses=experimental",
    }
    leave_early = await target.send_fresh(
        target.ask_json(RESPONSES, body, headers), leave=lambda so_far: b"output_text.delta" in so_far.body
    )
    require_status(leave_early, 200)
    if b"response.created" not in leave_early.body or b"response.failed" in leave_early.body:
        raise Violation(f"the stream begins {leave_early.body[:200]!r}")


@requirement(
    "responses.request.unknown_previous",
    "an unknown previous_response_id: 404 or 400, code previous_response_not_found",
    clients="OpenAI Agents, Codex: never silently ignored",
)
async def _unknown_previous(target: Target) -> None:
    answer = await target.responses(previous_response_id="resp_unknown")
    require_status(answer, 404, 400)
    answer.json()["error"]["code"].must_be("previous_response_not_found")


@requirement(
    "responses.request.unknown_stored", "GET and DELETE of an unknown response: 404 with an error object", clients="openai SDKs"
)
async def _unknown_stored(target: Target) -> None:
    for method in ("GET", "DELETE"):
        ask = target.ask_json(f"{RESPONSES}/resp_unknown", b"")
        answer = await target.send(type(ask)(method, ask.path, ask.headers))
        require_status(answer, 404)
        answer.json()["error"]["message"].word()


@requirement("responses.request.no_input", "a request without input: 400 with the field named", clients="openai SDKs")
async def _no_input(target: Target) -> None:
    body = target.responses_body()
    del body["input"]
    answer = await target.send(target.ask_json(RESPONSES, body))
    require_status(answer, 400)
    answer.json()["error"]["param"].must_be("input")


@requirement(
    "responses.request.native",
    "an engine that speaks Responses gets the request as it was sent, nothing added",
    clients="vLLM and llama.cpp users (GPUStack#5137)",
    needs_script=True,
)
async def _native(target: Target) -> None:
    for stream in (False, True):
        body = target.responses_body("[[echo]]", stream=stream, temperature=0.5, something_of_tomorrow={"a": None})
        answer = await target.send(target.ask_json(RESPONSES, body))
        require_status(answer, 200)
        text = (
            "".join(read_responses(require_stream(answer)).texts("output_text"))
            if stream
            else only(find_parts(require_ok(answer), "output_text"), "texts")["text"].text()
        )
        got = read_json(text, "what the engine got")
        if got["path"].value == CHAT:
            raise NotApplicable("the engine speaks chat only; the request is translated")
        got["body"].must_be(body)


@requirement(
    "responses.request.later_system",
    "a developer message after the first turn is not refused",
    clients="Codex (llama.cpp#27367)",
)
async def _later_system(target: Target) -> None:
    given = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": PROMPT},
    ]
    require_ok(await target.responses(given, instructions="You are a coding agent."))


async def _failed(target: Target, directives: str) -> tuple[Answer, Field]:
    """Return a stream that failed, and the error of its response.failed."""
    answer = await target.responses(f"{directives} hello", stream=True)
    said = read_responses(require_stream(answer))
    if said.ending != "response.failed" or said.last is None:
        raise Violation(f"the stream ends with {said.ending or 'nothing'} after {len(said.order)} events")
    return answer, said.last["error"]


@requirement(
    "responses.failed.cut",
    "engine dies in a stream: response.failed with error.code and message, nothing after it",
    clients="Codex shows it; a bare error event reads as a broken stream",
    needs_script=True,
)
async def _cut(target: Target) -> None:
    answer, error = await _failed(target, "[[cut]]")
    error["message"].word()
    if b"response.completed" in answer.body or b"[DONE]" in answer.body:
        raise Violation("the stream ends as if it were whole")


@requirement(
    "responses.failed.engine_error",
    "an error in the engine's stream: response.failed with the engine's words",
    clients="Codex, AI SDK",
    needs_script=True,
)
async def _engine_error(target: Target) -> None:
    _, error = await _failed(target, "[[error_in_stream]]")
    if REASON not in error["message"].text():
        raise Violation(f"the engine's words are lost: {error.shown}")


@requirement(
    "responses.failed.garbage", "an engine that sends what is no answer: response.failed", clients="Codex", needs_script=True
)
async def _garbage(target: Target) -> None:
    await skip_where_native(target, Surface.RESPONSES)
    await _failed(target, "[[garbage]]")


@requirement(
    "responses.failed.no_finish",
    "a stream of the engine that just ends: response.failed, not completed",
    clients="Codex, agents",
    needs_script=True,
)
async def _no_finish(target: Target) -> None:
    await _failed(target, "[[no_finish]]")


@requirement(
    "responses.failed.context",
    "a prompt that does not fit: code context_length_exceeded",
    clients="Codex stops at once (1 request instead of 6)",
    needs_script=True,
)
async def _context(target: Target) -> None:
    for dialect in ("error_400_context", "error_400_context:vllm", "error_400_context:openai"):
        answer = await target.responses(f"[[{dialect}]] hello", stream=True)
        require_status(answer, 400)
        answer.json()["error"]["code"].must_be("context_length_exceeded")


@requirement(
    "responses.failed.before",
    "an engine's error before the first event is an HTTP error with an error object",
    clients="openai SDKs",
    needs_script=True,
)
async def _before(target: Target) -> None:
    for stream in (True, False):
        answer = await target.responses("[[error_500]] hello", stream=stream)
        require_status(answer, 500, 502)
        answer.json()["error"].must_have(("message", "type", "param", "code"))


@requirement(
    "responses.failed.whole_cut",
    "an engine that dies inside an unstreamed answer is an HTTP error",
    clients="openai SDKs",
    needs_script=True,
)
async def _whole_cut(target: Target) -> None:
    answer = await target.responses("[[cut]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes")
    answer.json()["error"]["message"].word()


@requirement(
    "responses.failed.whole_garbage",
    "an engine whose unstreamed answer is none is an HTTP error",
    clients="openai SDKs",
    needs_script=True,
)
async def _whole_garbage(target: Target) -> None:
    await skip_where_native(target, Surface.RESPONSES)
    answer = await target.responses("[[garbage]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes")
    answer.json()["error"]["message"].word()


@requirement(
    "responses.leave.stream",
    "a client that leaves a stream frees the engine",
    clients="operators (litellm#30244)",
    needs_script=True,
)
async def _leave(target: Target) -> None:
    await leave_stream(target, RESPONSES, lambda prompt: target.responses_body(prompt, stream=True))


@requirement(
    "responses.leave.plain",
    "a client that leaves before an unstreamed answer frees the engine",
    clients="operators (litellm pull 30223)",
    needs_script=True,
)
async def _leave_plain(target: Target) -> None:
    await leave_unanswered(target, RESPONSES, target.responses_body)


@requirement(
    "responses.failed.late",
    "an engine's refusal after keep-alives is said in the stream, with the engine's words",
    clients="Codex, openai SDKs",
    needs_script=True,
    is_slow=True,
)
async def _late(target: Target) -> None:
    _, error = await _failed(target, f"[[slow:{target.silence_s:g}]] [[error_400]]")
    if REASON not in error["message"].text():
        raise Violation(f"the engine's words are lost: {error.shown}")
