"""Rows on what a Responses request may hold. Where the engine speaks chat only, they look at the chat request it got."""

from __future__ import annotations

from typing import Any  # request bodies are JSON

from conformance.engine.speech import ARGUMENTS, CALL_ID, TOOL
from conformance.fields import Field, read_json
from conformance.readers.responses import read_responses
from conformance.rows.chat_requests import PIXEL
from conformance.rows.chat_tools import TOOLS
from conformance.rows.responses_whole import FLAT_TOOLS, find_parts, only
from conformance.table import requirement
from conformance.target import CHAT, PROMPT, RESPONSES, Target, require_ok, require_status, require_stream
from conformance.verdicts import NotApplicable, Violation

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
