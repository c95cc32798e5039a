"""Speech as chat completions and completions: whole answers and the chunks of a stream (OpenAI API reference)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any  # answers are JSON

from conformance.engine.script import Script
from conformance.engine.speech import PROMPT_TOKENS, Speech, ToolCall

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
    """Return the older form of log probabilities, parallel lists; the first token of a prompt has none."""
    if body.get("logprobs") is None and "logprobs" not in script:
        return None
    tokens = text.split(" ")
    offsets = [sum(len(token) + 1 for token in tokens[:index]) for index in range(len(tokens))]
    numbers: list[float | None] = [None, *(-0.5 for _ in tokens[1:])]
    tops: list[Json | None] = [None, *({token: -0.5} for token in tokens[1:])]
    return {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": tops, "text_offset": offsets}
