"""Answers of the scripted engine in every API: whole ones and the chunks of a stream (OpenAI's and Anthropic's references)."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any  # answers are JSON

from conformance.engine.script import PROMPT_TOKENS, REASON, Ending, Script, Speech, ToolCall
from conformance.exchange import LIMITS

CREATED = 1_775_000_000
Json = dict[str, Any]


def count_usage(speech: Speech, *, answers: int = 1) -> Json:
    """Return the usage of ``answers`` answers to one prompt; details only where there is something to detail."""
    completion = speech.completion_tokens * answers
    usage: Json = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": completion,
        "total_tokens": PROMPT_TOKENS + completion,
    }
    if speech.cached:
        usage["prompt_tokens_details"] = {"cached_tokens": speech.cached}
    if speech.thoughts:
        usage["completion_tokens_details"] = {"reasoning_tokens": len(speech.thoughts)}
    return usage


def render_chat(speech: Speech, script: Script, body: Mapping[str, Any]) -> Json:
    """Return a whole chat completion."""
    message: Json = {"role": "assistant", "content": "".join(speech.pieces) if speech.pieces else None, "refusal": None}
    if speech.refusal:
        message["refusal"] = "".join(speech.refusal)
    if speech.thoughts:
        message[_thought_name(script)] = "".join(speech.thoughts)
    if speech.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in speech.calls
        ]
    elif "empty_tool_calls" in script:
        message["tool_calls"] = []
    choice: Json = {"message": message, "logprobs": _logprobs(speech.pieces, script, body), "finish_reason": speech.ending}
    if speech.stopped_at is not None:
        choice["stop_reason"] = speech.stopped_at
    answers = _count_answers(body)
    reply = {
        **_head(body, "chat.completion"),
        "choices": [{"index": index, **choice} for index in range(answers)],
        "usage": count_usage(speech, answers=answers),
    }
    if "no_usage" in script:
        del reply["usage"]
    return reply


def stream_chat(speech: Speech, script: Script, body: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the chunks of a stream, without usage unless the request asked for it."""
    head = _head(body, "chat.completion.chunk")
    answers = _count_answers(body)
    empty: Json = {"tool_calls": []} if "empty_tool_calls" in script else {}
    for delta in _list_deltas(speech, script):
        logprobs = _logprobs((delta["content"],), script, body) if delta.get("content") else None
        for index in range(answers):
            choice = {"index": index, "delta": {**delta, **empty}, "logprobs": logprobs, "finish_reason": None}
            yield {**head, "choices": [choice]}
    if "no_finish" in script:
        return
    usage = count_usage(speech, answers=answers)
    has_usage = bool((body.get("stream_options") or {}).get("include_usage")) and "no_usage" not in script
    for index in range(answers):
        last: Json = {"index": index, "delta": {}, "logprobs": None, "finish_reason": speech.ending}
        if speech.stopped_at is not None:
            last["stop_reason"] = speech.stopped_at
        beside = {"usage": usage} if has_usage and "usage_in_finish" in script else {}
        yield {**head, "choices": [last], **beside}
    if has_usage and "usage_in_finish" not in script:
        yield {**head, "choices": [], "usage": usage}


def render_completion(speech: Speech, script: Script, body: Mapping[str, Any]) -> Json:
    """Return a whole completion, one choice for each prompt."""
    texts = [_with_prompt(prompt, speech, body) for prompt in list_prompts(body)]
    choices = [
        {"index": index, "text": text, "logprobs": _token_logprobs(text, script, body), "finish_reason": speech.ending}
        for index, text in enumerate(texts)
    ]
    usage = count_usage(speech, answers=len(texts))
    return {**_head(body, "text_completion"), "choices": choices, "usage": usage}


def stream_completion(speech: Speech, script: Script, body: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the chunks of a streamed completion."""
    head = _head(body, "text_completion")
    prompts = len(list_prompts(body))
    for index in range(prompts):
        for piece in speech.pieces:
            yield {**head, "choices": [{"index": index, "text": piece, "logprobs": None, "finish_reason": None}]}
        yield {**head, "choices": [{"index": index, "text": "", "logprobs": None, "finish_reason": speech.ending}]}
    if (body.get("stream_options") or {}).get("include_usage") and "no_usage" not in script:
        yield {**head, "choices": [], "usage": count_usage(speech, answers=prompts)}


def list_prompts(body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a completion: a text, a list of tokens, or a list of either."""
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _head(body: Mapping[str, Any], kind: str) -> Json:
    ident = zlib.crc32(repr(sorted(body.items())).encode())
    prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
    return {"id": f"{prefix}-{ident:08x}", "object": kind, "created": CREATED, "model": body.get("model", "scripted")}


def _count_answers(body: Mapping[str, Any]) -> int:
    return int(body.get("n") or 1)


def _thought_name(script: Script) -> str:
    return "reasoning" if script.argument("thinking") == "reasoning" else "reasoning_content"


def _list_deltas(speech: Speech, script: Script) -> Iterator[Json]:
    yield {"role": "assistant", "content": None if speech.calls else ""}
    yield from ({_thought_name(script): piece} for piece in speech.thoughts)
    yield from ({"refusal": piece} for piece in speech.refusal)
    yield from ({"content": piece} for piece in speech.pieces)
    if speech.interleaved:
        yield from (_open_call(index, call) for index, call in enumerate(speech.calls))
        for pieces in zip(*(call.pieces for call in speech.calls), strict=True):
            yield from (_continue_call(index, piece) for index, piece in enumerate(pieces))
        return
    for index, call in enumerate(speech.calls):
        yield _open_call(index, call)
        if not call.whole:
            yield from (_continue_call(index, piece) for piece in call.pieces)


def _open_call(index: int, call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments if call.whole else ""}
    return {"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]}


def _continue_call(index: int, piece: str) -> Json:
    return {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _logprobs(pieces: tuple[str, ...], script: Script, body: Mapping[str, Any]) -> Json | None:
    if not (body.get("logprobs") or "logprobs" in script):
        return None
    return {
        "content": [
            {
                "token": piece,
                "bytes": list(piece.encode()),
                "logprob": -0.25,
                "top_logprobs": [{"token": piece, "bytes": list(piece.encode()), "logprob": -0.25}],
            }
            for piece in pieces
        ],
        "refusal": None,
    }


def _with_prompt(prompt: Any, speech: Speech, body: Mapping[str, Any]) -> str:
    before = prompt if body.get("echo") and isinstance(prompt, str) else ""
    return before + ("" if body.get("max_tokens") == 0 else "".join(speech.pieces))


def _token_logprobs(text: str, script: Script, body: Mapping[str, Any]) -> Json | None:
    # The older form of log probabilities is parallel lists; the first token of a prompt has none.
    if body.get("logprobs") is None and "logprobs" not in script:
        return None
    tokens = text.split(" ")
    offsets = [sum(len(token) + 1 for token in tokens[:index]) for index in range(len(tokens))]
    numbers: list[float | None] = [None, *(-0.5 for _ in tokens[1:])]
    tops: list[Json | None] = [None, *({token: -0.5} for token in tokens[1:])]
    return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}


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
        items.append((item, _part_events(part, speech.thoughts)))
    if speech.pieces:
        text = {"type": "output_text", "text": "".join(speech.pieces), "annotations": [], "logprobs": []}
        items.append((_message_item(text), _part_events(text, speech.pieces)))
    if speech.refusal:
        refused = {"type": "refusal", "refusal": "".join(speech.refusal)}
        items.append((_message_item(refused), _part_events(refused, speech.refusal)))
    for number, call in enumerate(speech.calls):
        called = {"id": f"fc_native0{number}", "type": "function_call", "call_id": call.id, "name": call.name}
        item = {**called, "arguments": call.arguments, "status": "completed"}
        events: list[Json] = [{"type": "response.function_call_arguments.delta", "delta": piece} for piece in call.pieces]
        ended = {"type": "response.function_call_arguments.done", "name": call.name, "arguments": call.arguments}
        items.append((item, [*events, ended]))
    return items


def _message_item(part: Json) -> Json:
    return {"id": "msg_native01", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def _part_events(part: Json, pieces: tuple[str, ...]) -> list[Json]:
    name = "refusal" if part["type"] == "refusal" else "text"
    place: Json = {"content_index": 0} | ({"logprobs": []} if part["type"] == "output_text" else {})
    events: list[Json] = [{"type": "response.content_part.added", "content_index": 0, "part": {**part, name: ""}}]
    events += [{"type": f"response.{part['type']}.delta", **place, "delta": piece} for piece in pieces]
    events.append({"type": f"response.{part['type']}.done", **place, name: part[name]})
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


TRANSCRIPT = "Good morning, dear llama."
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\nscripted").decode()


def embed(body: Mapping[str, Any]) -> Json:
    """Return a vector for each input: little-endian float32 in base64 when asked, else numbers."""
    inputs = _list_inputs(body.get("input"))
    length = int(body.get("dimensions") or LIMITS.dimensions)
    vectors = [make_vector(text, length) for text in inputs]
    if body.get("encoding_format") == "base64":
        shown: list[Any] = [base64.b64encode(struct.pack(f"<{length}f", *vector)).decode() for vector in vectors]
    else:
        shown = list(vectors)
    count = 3 * len(inputs)
    return {
        "object": "list",
        "model": body.get("model", "scripted"),
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def make_vector(text: object, length: int = LIMITS.dimensions) -> list[float]:
    """Return numbers that a float32 holds exactly and that differ from input to input."""
    seed = zlib.crc32(json.dumps(text).encode())
    return [((seed >> index) % 64) / 64 for index in range(length)]


def _list_inputs(value: object) -> list[object]:
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return value
    return [value]


def rank(body: Mapping[str, Any]) -> Json:
    """Return the documents by how many words they share with the query, best first."""
    query = set(str(body.get("query", "")).lower().split())
    documents = [document if isinstance(document, str) else document.get("text", "") for document in body.get("documents", [])]
    scores = [len(query & set(text.lower().split())) / (len(query) or 1) for text in documents]
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.get("top_n") or len(documents)]
    results = [{"index": index, "relevance_score": scores[index], "document": {"text": documents[index]}} for index in order]
    return {"id": "rerank-scripted", "model": body.get("model", "scripted"), "results": results, "usage": {"total_tokens": 9}}


def transcribe(fields: Mapping[str, str]) -> tuple[str, bytes]:
    """Return content type and body of a transcript in the format that was asked for."""
    kind = fields.get("response_format", "json")
    if kind == "text":
        return "text/plain; charset=utf-8", f"{TRANSCRIPT}\n".encode()
    if kind == "srt":
        return "text/plain; charset=utf-8", f"1\n00:00:00,000 --> 00:00:01,500\n{TRANSCRIPT}\n\n".encode()
    if kind == "vtt":
        return "text/plain; charset=utf-8", f"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n{TRANSCRIPT}\n\n".encode()
    said: Json = {"text": TRANSCRIPT, "usage": {"type": "duration", "seconds": 2}}
    if kind == "verbose_json":
        segment = {"id": 0, "seek": 0, "start": 0.0, "end": 1.5, "text": TRANSCRIPT, "tokens": [1], "temperature": 0.0}
        said |= {"task": "transcribe", "language": fields.get("language", "english"), "duration": 1.5, "segments": [segment]}
    return "application/json", json.dumps(said).encode()


def draw(body: Mapping[str, Any]) -> Json:
    """Return as many images as were asked for."""
    return {"created": CREATED, "data": [{"b64_json": PIXEL} for _ in range(int(body.get("n") or 1))]}
