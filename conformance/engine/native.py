"""Speech as an engine that speaks Messages or Responses itself says it: for boxes whose answers pass through untouched."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any  # answers are JSON

from conformance.engine.chat import CREATED
from conformance.engine.failures import REASON
from conformance.engine.script import Script
from conformance.engine.speech import PROMPT_TOKENS, Ending, Speech

Json = dict[str, Any]
MESSAGE_ID, RESPONSE_ID = "msg_native01", "resp_native01"
_STOP_REASONS = {Ending.STOP: "end_turn", Ending.LENGTH: "max_tokens", Ending.TOOL_CALLS: "tool_use"}


def render_message(speech: Speech, script: Script, body: Mapping[str, Any]) -> Json:
    """Return a whole answer of ``POST /v1/messages``."""
    del script
    blocks = [{**empty, **whole} for empty, whole, _deltas in _list_blocks(speech)]
    return {
        "id": MESSAGE_ID,
        "type": "message",
        "role": "assistant",
        "model": body.get("model", "scripted"),
        "content": blocks,
        "stop_reason": _stop_reason(speech),
        "stop_sequence": speech.stopped_at,
        "usage": _message_usage(speech, speech.completion_tokens),
    }


def stream_message(speech: Speech, script: Script, body: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the events of a streamed answer; each one's ``type`` is also its event line."""
    start = {**render_message(Speech(cached=speech.cached), script, body), "stop_reason": None, "content": []}
    start["usage"] = _message_usage(speech, 1)
    yield {"type": "message_start", "message": start}
    for index, (empty, _whole, deltas) in enumerate(_list_blocks(speech)):
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield from ({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas)
        yield {"type": "content_block_stop", "index": index}
    if "no_finish" in script:
        return
    ending = {"stop_reason": _stop_reason(speech), "stop_sequence": speech.stopped_at}
    yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": speech.completion_tokens}}
    yield {"type": "message_stop"}


def refuse_tools(body: Mapping[str, Any]) -> str:
    """Return why an engine as strict as vLLM 0.33 refuses the tools of a request; empty when it takes them."""
    for index, tool in enumerate(body.get("tools") or ()):
        if "messages" in body and "input_schema" not in tool:
            return (
                f"1 validation error: {{'type': 'missing', 'loc': 'body.tools.{index}.input_schema', 'msg': 'Field required'}}"
            )
        if "input" in body and tool.get("type") == "custom" and (tool.get("format") or {}).get("type") == "grammar":
            return "Custom tools with a grammar format are not supported; only free-form text custom tools are accepted."
    return ""


def fail_message(number: int, body: Mapping[str, Any]) -> Json:
    """Return the event that ends a broken stream; ``number``: of events before it."""
    del number, body
    return {"type": "error", "error": {"type": "api_error", "message": REASON}}


def fail_response(number: int, body: Mapping[str, Any]) -> Json:
    """Return the event that ends a broken stream; ``number``: of events before it."""
    failed = {**_response(Speech(), body, [], is_over=False), "status": "failed"}
    failed["error"] = {"code": "server_error", "message": REASON}
    return {"type": "response.failed", "sequence_number": number, "response": failed}


def _list_blocks(speech: Speech) -> list[tuple[Json, Json, list[Json]]]:
    """Return each block as it starts, what it holds in the end, and its deltas."""
    blocks: list[tuple[Json, Json, list[Json]]] = []
    if speech.thoughts:
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in speech.thoughts]
        deltas.append({"type": "signature_delta", "signature": "scripted"})
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        blocks.append((empty, {"thinking": "".join(speech.thoughts), "signature": "scripted"}, deltas))
    pieces = speech.pieces or speech.refusal
    if pieces:
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
        blocks.append(({"type": "text", "text": ""}, {"text": "".join(pieces)}, deltas))
    for call in speech.calls:
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in call.pieces]
        called: Json = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        blocks.append((called, {"input": json.loads(call.arguments)}, deltas))
    return blocks


def _stop_reason(speech: Speech) -> str:
    if speech.refusal:
        return "refusal"
    return "stop_sequence" if speech.stopped_at is not None else _STOP_REASONS[speech.ending]


def _message_usage(speech: Speech, output: int) -> Json:
    return {
        "input_tokens": PROMPT_TOKENS - speech.cached,
        "output_tokens": output,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": speech.cached,
    }


def render_response(speech: Speech, script: Script, body: Mapping[str, Any]) -> Json:
    """Return a whole answer of ``POST /v1/responses``."""
    del script
    return _response(speech, body, [item for item, _events in _list_items(speech)], is_over=True)


def stream_response(speech: Speech, script: Script, body: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the events of a streamed answer, numbered."""
    for number, event in enumerate(_list_response_events(speech, script, body)):
        yield {**event, "sequence_number": number}


def _list_response_events(speech: Speech, script: Script, body: Mapping[str, Any]) -> Iterator[Json]:
    begun = _response(speech, body, [], is_over=False)
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    done = []
    for index, (item, events) in enumerate(_list_items(speech)):
        opened = {**item, "status": "in_progress"} if "status" in item else dict(item)
        opened |= {"content": []} if "content" in item else {}
        opened |= {"arguments": ""} if "arguments" in item else {}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        yield from ({**event, "item_id": item["id"], "output_index": index} for event in events)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        done.append(item)
    if "no_finish" in script:
        return
    ended = _response(speech, body, done, is_over=True)
    kind = "response.incomplete" if speech.ending is Ending.LENGTH else "response.completed"
    yield {"type": kind, "response": ended}


def _list_items(speech: Speech) -> list[tuple[Json, list[Json]]]:
    """Return each output item as it ends, with the events between its beginning and its end."""
    items: list[tuple[Json, list[Json]]] = []
    if speech.thoughts:
        part = {"type": "reasoning_text", "text": "".join(speech.thoughts)}
        item = {"id": "rs_native01", "type": "reasoning", "summary": [], "content": [part]}
        kinds = ("response.reasoning_text.delta", "response.reasoning_text.done")
        items.append((item, _part_events(part, speech.thoughts, kinds)))
    if speech.pieces:
        text = {"type": "output_text", "text": "".join(speech.pieces), "annotations": [], "logprobs": []}
        kinds = ("response.output_text.delta", "response.output_text.done")
        items.append((_message_item(text), _part_events(text, speech.pieces, kinds)))
    if speech.refusal:
        refused = {"type": "refusal", "refusal": "".join(speech.refusal)}
        kinds = ("response.refusal.delta", "response.refusal.done")
        items.append((_message_item(refused), _part_events(refused, speech.refusal, kinds)))
    for number, call in enumerate(speech.calls):
        called = {"id": f"fc_native0{number}", "type": "function_call", "call_id": call.id, "name": call.name}
        item = {**called, "arguments": call.arguments, "status": "completed"}
        events: list[Json] = [{"type": "response.function_call_arguments.delta", "delta": piece} for piece in call.pieces]
        ended = {"type": "response.function_call_arguments.done", "name": call.name, "arguments": call.arguments}
        items.append((item, [*events, ended]))
    return items


def _message_item(part: Json) -> Json:
    return {"id": "msg_native01", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def _part_events(part: Json, pieces: tuple[str, ...], kinds: tuple[str, str]) -> list[Json]:
    name = "refusal" if part["type"] == "refusal" else "text"
    place: Json = {"content_index": 0} | ({"logprobs": []} if part["type"] == "output_text" else {})
    events: list[Json] = [{"type": "response.content_part.added", "content_index": 0, "part": {**part, name: ""}}]
    events += [{"type": kinds[0], **place, "delta": piece} for piece in pieces]
    events.append({"type": kinds[1], **place, name: part[name]})
    return [*events, {"type": "response.content_part.done", "content_index": 0, "part": part}]


def _response(speech: Speech, body: Mapping[str, Any], output: list[Json], *, is_over: bool) -> Json:
    is_cut = speech.ending is Ending.LENGTH
    usage = {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": speech.cached, "cache_write_tokens": 0},
        "output_tokens": speech.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": len(speech.thoughts)},
        "total_tokens": PROMPT_TOKENS + speech.completion_tokens,
    }
    settings = {
        "temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_logprobs": 0,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "truncation": "disabled", "metadata": {},
        "service_tier": "default", "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
        "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "previous_response_id": None,
        "safety_identifier": None, "prompt_cache_key": None,
    }  # fmt: skip
    given = {name: value for name, value in body.items() if name in settings and value is not None}
    return {
        "id": RESPONSE_ID,
        "object": "response",
        "created_at": CREATED,
        "completed_at": CREATED + 1 if is_over and not is_cut else None,
        "status": "in_progress" if not is_over else "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_over and is_cut else None,
        "model": body.get("model", "scripted"),
        "output": output,
        **settings,
        **given,
        "store": False,
        "background": False,
        "usage": usage if is_over else None,
    }
