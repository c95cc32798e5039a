"""Rows on streams that break and on clients that leave."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any  # request bodies are JSON

from conformance.engine.failures import REASON
from conformance.events import DONE, list_payloads
from conformance.exchange import Answer
from conformance.fields import Field
from conformance.limits import LIMITS
from conformance.readers.chat import read_chat
from conformance.table import requirement
from conformance.target import CHAT, Target, require_ok, require_status, require_stream
from conformance.verdicts import Violation

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
async def _cut(target: Target) -> None:
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
