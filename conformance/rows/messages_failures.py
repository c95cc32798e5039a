"""Rows on Messages that fail, before their first event and after it."""

from __future__ import annotations

from conformance.engine.failures import ANSWER_TOKENS, ASKED_TOKENS, CONTEXT_TOKENS, FITTING_TOKENS, REASON
from conformance.exchange import Answer
from conformance.fields import Field
from conformance.readers.messages import check_error, read_messages
from conformance.rows.chat_failures import leave_stream, leave_unanswered
from conformance.rows.speaking import skip_where_native
from conformance.table import Surface, requirement
from conformance.target import MESSAGES, Target, require_status, require_stream
from conformance.verdicts import Violation


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
