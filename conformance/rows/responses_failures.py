"""Rows on Responses that fail, before their first event and after it."""

from __future__ import annotations

from conformance.engine.failures import REASON
from conformance.exchange import Answer
from conformance.fields import Field
from conformance.readers.responses import read_responses
from conformance.rows.chat_failures import leave_stream, leave_unanswered
from conformance.rows.speaking import skip_where_native
from conformance.table import Surface, requirement
from conformance.target import RESPONSES, Target, require_status, require_stream
from conformance.verdicts import Violation


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
