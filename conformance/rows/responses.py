"""Rows on Responses: whole answers, fields of a request, failures, streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any  # request bodies are JSON

from conformance.dialects import (
    FUNCTIONS,
    OPENAI_ERROR_KEYS,
    PIXEL_URL,
    TOOLS,
    answers,
    ask_for_calls,
    break_stream,
    breaks,
    breaks_late,
    carried,
    carries,
    fails_whole,
    find_images,
    find_items,
    find_parts,
    find_result,
    join_text,
    leaves_stream,
    leaves_unanswered,
    makes_calls,
    must_call,
    must_hold,
    only,
    passes_through,
)
from conformance.engine import script as engine
from conformance.exchange import DONE, Event, Field, Violation, list_payloads
from conformance.readers.responses import (
    LAST_EVENTS,
    OBJECT_KEYS,
    ResponseStream,
    check_item,
    check_usage,
    read_responses,
    require_end,
)
from conformance.table import PROMPT, RESPONSES, Row, Target, no_call, require_ok, require_status, require_stream, scripted

# Whole answers


async def _reply(target: Target, prompt: str = PROMPT, **more: Any) -> Field:
    return require_ok(await target.say(RESPONSES, prompt, **more))


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


async def _keys(target: Target) -> None:
    reply = await _reply(target)
    reply.must_have(OBJECT_KEYS)
    if "user" in reply and reply["user"].is_null:
        raise Violation("user is null; OpenAI's schema allows no null there")


_SETTINGS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "instructions": "Be brief.",
    "metadata": {"a": "b"},
    "tool_choice": "none",
}
_SETTINGS_SAID = {
    **_SETTINGS, "text.format.type": "text", "reasoning": lambda reasoning: reasoning.must_have(("effort", "summary")),
    "parallel_tool_calls": Field.flag, "tools": Field.items, "truncation": ("disabled", "auto"), "store": False,
    "background": False,
}  # fmt: skip


async def _message(target: Target) -> None:
    item = only(find_items(await _reply(target), "message"), "messages")
    check_item(item)
    if not item["id"].text().startswith("msg_"):
        raise Violation(f"the id of the message is {item['id'].shown}")
    item["status"].must_be("completed", "incomplete")
    text = only([part for part in item["content"].items() if part["type"].value == "output_text"], "texts")
    if target.scripted:
        text["logprobs"].items()
        text["text"].must_be(engine.TEXT)


async def _called(target: Target, directive: str) -> Field:
    async for _, answer in ask_for_calls(target, RESPONSES, directive):
        reply = require_ok(answer)
        if target.scripted or (find_items(reply, "function_call") and reply["status"].value != "incomplete"):
            return reply
    raise no_call()


async def _call(target: Target) -> None:
    reply = await _called(target, "tools")
    item = only(find_items(reply, "function_call"), "calls")
    check_item(item)
    if not item["id"].text().startswith("fc_"):
        raise Violation(f"the id of the call is {item['id'].shown}")
    reply["status"].must_be("completed")
    if target.scripted:
        item.must_fit({"call_id": engine.CALL_ID, "name": engine.TOOL, "arguments": "".join(engine.ARGUMENTS)})


async def _parallel(target: Target) -> None:
    calls = find_items(await _called(target, "parallel_tools"), "function_call")
    found = [(call["name"].value, call["arguments"].value) for call in calls]
    if found != [(engine.TOOL, "".join(engine.ARGUMENTS)), (engine.OTHER_TOOL, "".join(engine.OTHER_ARGUMENTS))]:
        raise Violation(f"the calls are {found}")


async def _text_and_call(target: Target) -> None:
    kinds = [item["type"].value for item in (await _called(target, "text_then_tools"))["output"].items()]
    if kinds != ["message", "function_call"]:
        raise Violation(f"the items are {kinds}")


async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        reply = await _reply(target, prompt)
        only(find_parts(reply, "output_text"), "texts")["text"].must_be(engine.TEXT)
        item = only(find_items(reply, "reasoning"), "reasoning items")
        texts = [part["text"].text() for name in ("content", "summary") if (held := item.get(name)) for part in held.items()]
        if engine.THOUGHT not in texts:
            raise Violation(f"the reasoning item says {texts}")
        reply["usage"]["output_tokens_details"]["reasoning_tokens"].must_be(3)


async def _refusal(target: Target) -> None:
    only(find_parts(await _reply(target, "[[refusal]] hello"), "refusal"), "refusals")["refusal"].must_be(engine.REFUSAL)


# Requests


async def _instructions(target: Target) -> None:
    body = await carried(target, RESPONSES, instructions="You are brief.")
    must_hold(body, "system", "You are brief.")
    must_hold(body, "user", "[[echo]]")


async def _turns_in_order(target: Target) -> None:
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rule one."}]},
        {"role": "user", "content": "Hello"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello back."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "[[echo]]"}]},
    ]
    body = await carried(target, RESPONSES, given, instructions="Rule zero.")
    texts = [str(join_text(turn["content"].value)) for turn in body["messages"].items()]
    joined = "\n".join(texts)
    places = [joined.find(words) for words in ("Rule zero.", "Rule one.", "Hello", "Hello back.", "[[echo]]")]
    if -1 in places or places != sorted(places):
        raise Violation(f"the engine's messages are {texts}")
    must_hold(body, "assistant", "Hello back.")


async def _tools(target: Target) -> None:
    choice = {"type": "function", "name": engine.TOOL}
    body = await carried(target, RESPONSES, tools=TOOLS[RESPONSES], tool_choice=choice, parallel_tool_calls=False)
    for got, sent in zip(body["tools"].items(), FUNCTIONS, strict=True):
        got["type"].must_be("function")
        for name in ("name", "description", "parameters"):
            got["function"][name].must_be(sent[name])
    body["tool_choice"].must_be({"type": "function", "function": {"name": engine.TOOL}})
    body["parallel_tool_calls"].must_be(False)


async def _limits(target: Target) -> None:
    fields = {"temperature": 0.25, "top_p": 0.5, "seed": 7, "min_p": 0.05, "top_k": 3}
    body = await carried(target, RESPONSES, max_output_tokens=321, **fields)
    limit = body.get("max_completion_tokens") or body["max_tokens"]
    limit.must_be(321)
    body.must_fit(fields)


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_FORMAT = {"name": "answer", "schema": _SCHEMA, "strict": True}
_FORMAT_PLACES = {f"response_format.json_schema.{name}": value for name, value in _FORMAT.items()}


async def _carried_calls(target: Target) -> None:
    arguments = "".join(engine.ARGUMENTS)
    given = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "function_call", "id": "fc_1", "call_id": engine.CALL_ID, "name": engine.TOOL, "arguments": arguments},
        {"type": "function_call_output", "call_id": engine.CALL_ID, "output": "18 degrees"},
        {"role": "user", "content": "[[echo]]"},
    ]
    _, call, result = find_result(await carried(target, RESPONSES, given, tools=TOOLS[RESPONSES]))
    call["id"].must_be(engine.CALL_ID)
    call["function"].must_be({"name": engine.TOOL, "arguments": arguments})
    result["tool_call_id"].must_be(engine.CALL_ID)
    if join_text(result["content"].value) != "18 degrees":
        raise Violation(f"the result arrives as {result['content'].shown}")


async def _thoughts(target: Target) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]}
    said = {"role": "assistant", "content": "It is warm."}
    given = [{"role": "user", "content": "Weather?"}, thought, said, {"role": "user", "content": "[[echo]]"}]
    body = await carried(target, RESPONSES, given)
    turn = next(turn for turn in body["messages"].items() if turn["role"].value == "assistant")
    turn["reasoning_content"].must_be("I look.")
    turn["reasoning"].must_be("I look.")


async def _result_images(target: Target) -> None:
    image = {"type": "input_image", "image_url": PIXEL_URL}
    given = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "id": "fc_1", "call_id": engine.CALL_ID, "name": engine.TOOL, "arguments": "{}"},
        {"type": "function_call_output", "call_id": engine.CALL_ID, "output": [image]},
        {"role": "user", "content": "[[echo]]"},
    ]
    turns = (await carried(target, RESPONSES, given, tools=TOOLS[RESPONSES]))["messages"].items()
    next(turn for turn in turns if turn["role"].value == "tool")["content"].text()
    only(find_images(turns[-1]), "images").must_be(PIXEL_URL)


async def _images(target: Target) -> None:
    image = {"type": "input_image", "image_url": PIXEL_URL, "detail": "low"}
    given = [{"role": "user", "content": [{"type": "input_text", "text": "[[echo]]"}, image]}]
    only(find_images((await carried(target, RESPONSES, given))["messages"][-1]), "images").must_be(PIXEL_URL)


_STRANGE_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
    {"type": "namespace", "name": "mcp__files", "tools": [{"type": "function", "name": "read", "parameters": {}}]},
    {"type": "local_shell"},
    {"type": "something_of_tomorrow", "deep": {"a": 1}},
]


async def _strange_tools(target: Target) -> None:
    body = await carried(target, RESPONSES, tools=[*_STRANGE_TOOLS, *TOOLS[RESPONSES]])
    names = [tool["function"]["name"].value for tool in body["tools"].items() if tool["type"].value == "function"]
    if not {engine.TOOL, engine.OTHER_TOOL} <= set(names):
        raise Violation(f"the engine got the tools {names}")
    strange = [tool["type"].value for tool in body["tools"].items() if tool["type"].value != "function"]
    if strange:
        raise Violation(f"the engine got tools of the types {strange}, which it does not know")


async def _codex(target: Target) -> None:
    turns = (("developer", "<permissions>none</permissions>"), ("user", "<environment_context/>"), ("user", PROMPT))
    given = [{"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]} for role, text in turns]
    more = {
        "instructions": "You are a coding agent.", "tools": [*TOOLS[RESPONSES], *_STRANGE_TOOLS[:2]], "tool_choice": "auto",
        "parallel_tool_calls": False, "reasoning": {"effort": "medium", "summary": "auto"}, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0197-codex", "text": {"verbosity": "medium"},
        "client_metadata": {"session": "1"}, "service_tier": "auto",
    }  # fmt: skip
    body = {name: value for name, value in target.body(RESPONSES, given, **more).items() if name != "max_output_tokens"}
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


async def _unknown_previous(target: Target) -> None:
    answer = await target.say(RESPONSES, PROMPT, previous_response_id="resp_unknown")
    require_status(answer, 404, 400)
    answer.json()["error"]["code"].must_be("previous_response_not_found")


async def _unknown_stored(target: Target) -> None:
    for method in ("GET", "DELETE"):
        answer = await target.send(replace(target.ask_json(f"{RESPONSES}/resp_unknown", b""), method=method))
        require_status(answer, 404)
        answer.json()["error"]["message"].word()


async def _no_input(target: Target) -> None:
    body = target.body(RESPONSES)
    del body["input"]
    answer = await target.send(target.ask_json(RESPONSES, body))
    require_status(answer, 400)
    answer.json()["error"]["param"].must_be("input")


_LATER_SYSTEM = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": PROMPT},
]


# Failures


async def _cut(target: Target) -> None:
    answer, error = await break_stream(target, RESPONSES, "[[cut]]")
    error["message"].word()
    if b"response.completed" in answer.body or b"[DONE]" in answer.body:
        raise Violation("the stream ends as if it were whole")


async def _context(target: Target) -> None:
    for dialect in ("error_400_context", "error_400_context:vllm", "error_400_context:openai"):
        answer = await target.say(RESPONSES, f"[[{dialect}]] hello", stream=True)
        require_status(answer, 400)
        answer.json()["error"]["code"].must_be("context_length_exceeded")


async def _before(target: Target) -> None:
    for stream in (True, False):
        answer = await target.say(RESPONSES, "[[error_500]] hello", stream=stream)
        require_status(answer, 500, 502)
        answer.json()["error"].must_have(OPENAI_ERROR_KEYS)


# Streams


async def _events(target: Target) -> list[Event]:
    return list(require_stream(await target.say(RESPONSES, PROMPT, stream=True)).events)


async def _payloads(target: Target) -> list[Field]:
    return list_payloads(await _events(target))


async def _read(target: Target, prompt: str = PROMPT, **more: Any) -> ResponseStream:
    return read_responses(require_stream(await target.say(RESPONSES, prompt, stream=True, **more)))


def _first(payloads: list[Field], kind: str) -> Field:
    found = next((one for one in payloads if one["type"].value == kind), None)
    if found is None:
        raise Violation(f"there is no {kind}; the events are {sorted({one['type'].value for one in payloads})}")
    return found


async def _names(target: Target) -> None:
    for event in await _events(target):
        if event.data != DONE and event.name != event.json()["type"].value:
            raise Violation(f"event {event.number} is named {event.name!r}, its type is {event.json()['type'].shown}")


async def _numbers(target: Target) -> None:
    numbers = [payload["sequence_number"].count() for payload in await _payloads(target)]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise Violation(f"sequence numbers: {numbers[:20]}")


async def _created(target: Target) -> None:
    payloads = await _payloads(target)
    for payload, kind in zip(payloads[:2], ("response.created", "response.in_progress"), strict=True):
        payload["type"].must_be(kind)
        payload["response"].must_fit({"status": "in_progress", "output": [], "usage": None})


async def _id(target: Target) -> None:
    found = {one["response"]["id"].word() for one in await _payloads(target) if "response" in one}
    if len(found) != 1:
        raise Violation(f"ids: {sorted(found)}")


async def _added(target: Target) -> None:
    payloads = await _payloads(target)
    order = [one["type"].value for one in payloads]
    _first(payloads, "response.output_item.added")["item"]["id"].word()
    _first(payloads, "response.content_part.added")["part"]["type"].must_be("output_text", "reasoning_text")
    _first(payloads, "response.output_text.delta")["delta"].text()
    if not order.index("response.output_item.added") < order.index("response.content_part.added"):
        raise Violation("content_part.added before output_item.added")
    if not order.index("response.content_part.added") < order.index("response.output_text.delta"):
        raise Violation("output_text.delta before content_part.added")


async def _done(target: Target) -> None:
    payloads = await _payloads(target)
    text = "".join(one["delta"].text() for one in payloads if one["type"].value == "response.output_text.delta")
    _first(payloads, "response.output_text.done")["text"].must_be(text)
    _first(payloads, "response.content_part.done")["part"].members()
    opened = sum(one["type"].value == "response.output_item.added" for one in payloads)
    closed = sum(one["type"].value == "response.output_item.done" for one in payloads)
    if opened != closed:
        raise Violation(f"{opened} items are opened, {closed} closed")


async def _last(target: Target) -> None:
    last = (await _payloads(target))[-1]
    last["type"].must_be(*LAST_EVENTS[:2])
    if not last["response"]["output"].items():
        raise Violation("the output of the last event is empty")
    last["response"]["usage"]["total_tokens"].count()


async def _delta_ids(target: Target) -> None:
    delta = _first(await _payloads(target), "response.output_text.delta")
    delta.must_fit({"item_id": Field.word, "output_index": Field.count, "content_index": Field.count, "logprobs": Field.items})


async def _strict(target: Target) -> None:
    said = await _read(target)
    if said.last is None or said.ending not in LAST_EVENTS[:2]:
        raise Violation(f"the stream ends with {said.ending or 'nothing'}")


async def _text(target: Target) -> None:
    said = await _read(target)
    require_end(said)
    if said.texts("output_text") != [engine.TEXT]:
        raise Violation(f"texts: {said.texts('output_text')}")


def _has_whole_call(said: ResponseStream) -> bool:
    # An engine may cut a call off and say completed all the same.
    calls = [item for item in said.items if item.added["type"].value == "function_call"]
    return bool(calls) and said.last is not None and said.last["status"].value != "incomplete"


async def _calls(target: Target, directive: str) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of the calls of a stream that ended well."""
    async for _, answer in ask_for_calls(target, RESPONSES, directive, stream=True):
        said = read_responses(require_stream(answer))
        if target.scripted or (said.ending == "response.completed" and _has_whole_call(said)):
            calls = find_items(require_end(said), "function_call")
            return [(call["call_id"].word(), call["name"].word(), call["arguments"].text()) for call in calls]
    raise no_call()


_PAIR = [
    (engine.CALL_ID, engine.TOOL, "".join(engine.ARGUMENTS)),
    (engine.OTHER_CALL_ID, engine.OTHER_TOOL, "".join(engine.OTHER_ARGUMENTS)),
]


async def _stream_call(target: Target) -> None:
    calls = await _calls(target, "tools")
    if target.scripted:
        must_call(calls, _PAIR[:1])


async def _text_then_call(target: Target) -> None:
    said = await _read(target, "[[text_then_tools]] weather?", tools=TOOLS[RESPONSES])
    require_end(said)
    kinds = [item.added["type"].value for item in said.items]
    if kinds != ["message", "function_call"] or said.texts("output_text") != [engine.TEXT]:
        raise Violation(f"items {kinds}, texts {said.texts('output_text')}")


async def _empty_calls(target: Target) -> None:
    said = await _read(target, "[[empty_tool_calls]] hello")
    require_end(said)
    if said.texts("output_text") != [engine.TEXT] or len(said.items) != 1:
        raise Violation(f"texts {said.texts('output_text')}, {len(said.items)} items")


async def _stream_reasoning(target: Target) -> None:
    said = await _read(target, "[[thinking]] hello")
    require_end(said)
    thoughts = said.texts("reasoning_text") + said.texts("summary_text")
    if engine.THOUGHT not in thoughts or said.texts("output_text") != [engine.TEXT]:
        raise Violation(f"thoughts {thoughts}, texts {said.texts('output_text')}")
    if [item.added["type"].value for item in said.items] != ["reasoning", "message"]:
        raise Violation(f"items: {[item.added['type'].value for item in said.items]}")


async def _stream_refusal(target: Target) -> None:
    said = await _read(target, "[[refusal]] hello")
    require_end(said)
    if said.texts("refusal") != [engine.REFUSAL]:
        raise Violation(f"refusals: {said.texts('refusal')}, texts: {said.texts('output_text')}")


async def _incomplete(target: Target) -> None:
    said = await _read(target, "[[length]] hello")
    require_end(said, "response.incomplete")["incomplete_details"]["reason"].must_be("max_output_tokens")
    if said.texts("output_text") != [engine.CUT_SHORT]:
        raise Violation(f"texts: {said.texts('output_text')}")


async def _late_usage(target: Target) -> None:
    response = require_end(await _read(target, "[[usage_in_finish]] hello"))
    if response["usage"]["output_tokens"].count() == 0:
        raise Violation(f"usage is {response['usage'].shown}")


ROWS = (
    Row("responses.reply.head", "id resp_…, object: response, created_at, status, model", "openai SDKs, Codex", _head),
    Row("responses.reply.keys", "every key of the object is there, null where unknown; no user: null",
        "Open Responses suite, AI SDK", _keys),
    Row("responses.reply.settings",
        "what was asked for comes back: temperature, top_p, instructions, metadata, text.format, tool_choice",
        "openai SDKs, Open Responses suite", answers(RESPONSES, places=_SETTINGS_SAID, **_SETTINGS)),
    Row("responses.reply.usage", "usage with input, output, total tokens and both details", "Codex, AI SDK, OpenAI Agents",
        answers(RESPONSES, places={"usage": check_usage})),
    Row("responses.reply.message", "a message item: id, status, role, content[output_text with text, annotations, logprobs]",
        "openai SDKs (output_text), AI SDK", _message),
    Row("responses.reply.call", "a function_call item: id fc_…, call_id, name, arguments (a string), status",
        "Codex, openai SDKs, AI SDK", _call),
    scripted("responses.reply.parallel", "two calls are two items", "Codex, OpenAI Agents", _parallel),
    scripted("responses.reply.text_then_call", "a text and a call are two items in this order", "Codex", _text_and_call),
    scripted("responses.reply.reasoning", "thoughts are an item of type reasoning, not text", "Codex, AI SDK, OpenAI Agents",
        _reasoning),
    scripted("responses.reply.incomplete", "a text cut off: status incomplete, incomplete_details.reason max_output_tokens",
        "AI SDK, openai SDKs",
        answers(RESPONSES, "[[length]] hello", engine.CUT_SHORT, {
            "status": "incomplete", "incomplete_details.reason": "max_output_tokens",
        })),
    scripted("responses.reply.refusal", "a refusal is a content part of type refusal", "openai SDKs", _refusal),
    scripted("responses.reply.cached", "cached tokens are in input_tokens_details", "Codex, cost displays",
        answers(RESPONSES, "[[cached]] hello", places={
            "usage.input_tokens": engine.PROMPT_TOKENS, "usage.input_tokens_details.cached_tokens": engine.CACHED_TOKENS,
        })),
    scripted("responses.request.instructions", "instructions become the system message", "Codex, OpenAI Agents",
        _instructions),
    scripted("responses.request.turns", "system, developer, user and assistant turns keep their order and text",
        "Codex, AI SDK", _turns_in_order),
    scripted("responses.request.tools", "tools, tool_choice and parallel_tool_calls are carried", "Codex, AI SDK", _tools),
    scripted("responses.request.limits", "max_output_tokens, temperature, top_p and fields of engines are carried",
        "every SDK", _limits),
    scripted("responses.request.format", "text.format with a JSON schema becomes response_format", "openai parse(), AI SDK",
        carries(RESPONSES, (
            {"text": {"format": {"type": "json_schema", **_FORMAT}}},
            {"response_format.type": "json_schema", **_FORMAT_PLACES},
        ))),
    scripted("responses.request.calls", "function_call and function_call_output items become a call and its result",
        "Codex, OpenAI Agents", _carried_calls),
    scripted("responses.request.thoughts",
        "the text of a reasoning item goes back to the engine under both names that engines look for",
        "agents whose model thinks between calls (vllm#27755)", _thoughts),
    scripted("responses.request.result_images",
        "an image in a tool's result reaches the engine as an image of the user, the result stays text",
        "Codex (view_image), computer use", _result_images),
    scripted("responses.request.images", "input_image becomes an image part", "openai SDKs, Codex", _images),
    scripted("responses.request.strange_tools", "unknown tool types (web_search, custom, namespace) are skipped, not refused",
        "Codex (llama.cpp#20156)", _strange_tools),
    Row("responses.request.only_strange_tools", "a request with nothing but unknown tools is answered", "Codex",
        answers(RESPONSES, tools=_STRANGE_TOOLS[:1], tool_choice="auto")),
    Row("responses.request.codex", "a request as Codex sends it is answered", "Codex", _codex),
    Row("responses.request.unknown_previous", "an unknown previous_response_id: 404 or 400, code previous_response_not_found",
        "OpenAI Agents, Codex: never silently ignored", _unknown_previous),
    Row("responses.request.unknown_stored", "GET and DELETE of an unknown response: 404 with an error object", "openai SDKs",
        _unknown_stored),
    Row("responses.request.no_input", "a request without input: 400 with the field named", "openai SDKs", _no_input),
    scripted("responses.request.native", "an engine that speaks Responses gets the request as it was sent, nothing added",
        "vLLM and llama.cpp users (GPUStack#5137)", passes_through(RESPONSES)),
    Row("responses.request.later_system", "a developer message after the first turn is not refused",
        "Codex (llama.cpp#27367)", answers(RESPONSES, _LATER_SYSTEM, instructions="You are a coding agent.")),
    scripted("responses.failed.cut", "engine dies in a stream: response.failed with error.code and message, nothing after it",
        "Codex shows it; a bare error event reads as a broken stream", _cut),
    scripted("responses.failed.engine_error", "an error in the engine's stream: response.failed with the engine's words",
        "Codex, AI SDK", breaks(RESPONSES, "error_in_stream", tells=True)),
    scripted("responses.failed.garbage", "an engine that sends what is no answer: response.failed", "Codex",
        breaks(RESPONSES, "garbage")),
    scripted("responses.failed.no_finish", "a stream of the engine that just ends: response.failed, not completed",
        "Codex, agents", breaks(RESPONSES, "no_finish")),
    scripted("responses.failed.context", "a prompt that does not fit: code context_length_exceeded",
        "Codex stops at once (1 request instead of 6)", _context),
    scripted("responses.failed.before", "an engine's error before the first event is an HTTP error with an error object",
        "openai SDKs", _before),
    scripted("responses.failed.whole_cut", "an engine that dies inside an unstreamed answer is an HTTP error", "openai SDKs",
        fails_whole(RESPONSES, "cut")),
    scripted("responses.failed.whole_garbage", "an engine whose unstreamed answer is none is an HTTP error", "openai SDKs",
        fails_whole(RESPONSES, "garbage")),
    scripted("responses.leave.stream", "a client that leaves a stream frees the engine", "operators (litellm#30244)",
        leaves_stream(RESPONSES)),
    scripted("responses.leave.plain", "a client that leaves before an unstreamed answer frees the engine",
        "operators (litellm pull 30223)", leaves_unanswered(RESPONSES)),
    scripted("responses.failed.late", "an engine's refusal after keep-alives is said in the stream, with the engine's words",
        "Codex, openai SDKs", breaks_late(RESPONSES), is_slow=True),
    Row("responses.stream.names", "the event line equals the type in the data", "Open Responses suite, naive readers",
        _names),
    Row("responses.stream.numbers", "sequence_number counts up by 1", "Open Responses suite, openai helpers", _numbers),
    Row("responses.stream.created", "response.created comes first, then in_progress: output [], usage null",
        "Python and Node helpers raise without", _created),
    Row("responses.stream.id", "the response id is the same in all lifecycle events", "openai-python 3, openai-node 7", _id),
    Row("responses.stream.added", "output_item.added and content_part.added come before the text",
        "Python and Node helpers raise, pi prints nothing", _added),
    Row("responses.stream.done", "output_text.done, content_part.done and output_item.done close what was opened",
        "AI SDK runs no tool, helpers return empty text", _done),
    Row("responses.stream.last", "response.completed (or incomplete) comes last, with the whole object",
        "Codex tries 6 times and fails, Python helper raises", _last),
    Row("responses.stream.delta_ids", "deltas carry item_id, output_index and content_index", "openai helpers, AI SDK",
        _delta_ids),
    Row("responses.stream.strict", "a strict accumulator takes the whole stream", "openai-python 3, openai-node 7", _strict),
    scripted("responses.stream.text", "the pieces add up to what the engine said", "everybody", _text),
    Row("responses.stream.call", "a call streams: added, arguments.delta, arguments.done with name, item.done",
        "Codex, openai helpers, AI SDK", _stream_call),
    scripted("responses.stream.parallel", "two calls are items with output_index of their own", "Codex, OpenAI Agents",
        makes_calls(_calls, "parallel_tools", _PAIR)),
    scripted("responses.stream.interleaved", "calls whose arguments come in turns are not mixed up", "Codex",
        makes_calls(_calls, "interleaved_tools", _PAIR)),
    scripted("responses.stream.whole_call", "a call that the engine says in one piece arrives whole", "Codex",
        makes_calls(_calls, "whole_tools", _PAIR[:1])),
    scripted("responses.stream.nasty", "arguments with quotes, brackets, escapes and emoji arrive byte for byte", "Codex",
        makes_calls(_calls, "nasty_arguments", [(engine.CALL_ID, engine.TOOL, engine.NASTY)])),
    scripted("responses.stream.text_then_call", "a text closes before the call opens", "Codex", _text_then_call),
    scripted("responses.stream.empty_calls", "an engine's empty tool_calls: [] does not hide the text", "Codex, AI SDK",
        _empty_calls),
    scripted("responses.stream.reasoning", "thoughts stream in a reasoning item before the message", "Codex, AI SDK",
        _stream_reasoning),
    scripted("responses.stream.refusal", "a refusal streams as refusal.delta and refusal.done", "openai helpers",
        _stream_refusal),
    scripted("responses.stream.incomplete", "a text cut off ends with response.incomplete", "AI SDK, openai helpers",
        _incomplete),
    scripted("responses.stream.late_usage", "usage in the engine's last chunk of text is not lost", "Codex, cost displays",
        _late_usage),
)  # fmt: skip
