"""Rows on whole chat completions."""

from __future__ import annotations

from conformance.engine.speech import (
    BEFORE_STOP,
    CACHED_TOKENS,
    CUT_SHORT,
    PROMPT_TOKENS,
    REFUSAL,
    TEXT,
    THOUGHT,
)  # fmt: skip
from conformance.fields import Field
from conformance.readers.chat import FINISH_REASONS, check_logprobs, check_usage
from conformance.table import requirement
from conformance.target import Target, require_ok, require_script_or_skip
from conformance.verdicts import NotApplicable, Violation


async def _reply(target: Target) -> Field:
    return require_ok(await target.chat())


@requirement("chat.reply.head", "id, object: chat.completion, created (integer), model", clients="all SDKs")
async def _head(target: Target) -> None:
    reply = await _reply(target)
    reply["object"].must_be("chat.completion")
    reply["id"].word()
    reply["created"].count()
    reply["model"].word()


@requirement("chat.reply.choices", "choices[] with index, message.role, message.content, finish_reason", clients="all SDKs")
async def _choices(target: Target) -> None:
    choices = (await _reply(target))["choices"].items()
    if not choices:
        raise Violation("choices is empty")
    for number, choice in enumerate(choices):
        choice["index"].must_be(number)
        choice["message"]["role"].must_be("assistant")
        choice["message"]["content"].text()
        choice["finish_reason"].must_be(*FINISH_REASONS)


@requirement(
    "chat.reply.usage",
    "usage with prompt, completion and total tokens, total = sum",
    clients="smolagents, LiteLLM crash without",
)
async def _usage(target: Target) -> None:
    check_usage((await _reply(target))["usage"])


@requirement("chat.reply.fingerprint", "system_fingerprint is a string or absent, never null", clients="OpenAI's own schema")
async def _fingerprint(target: Target) -> None:
    reply = await _reply(target)
    if "system_fingerprint" in reply:
        reply["system_fingerprint"].text()


@requirement("chat.reply.text", "the text arrives as the engine said it", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    (await _reply(target))["choices"][0]["message"]["content"].must_be(TEXT)


@requirement("chat.reply.n", "n: 2 gives two choices with index 0 and 1", clients="openai SDKs, evaluations", needs_script=True)
async def _n(target: Target) -> None:
    choices = require_ok(await target.chat(n=2))["choices"].items()
    if [choice["index"].value for choice in choices] != [0, 1]:
        raise Violation(f"the choices have index {[choice['index'].value for choice in choices]}")


@requirement(
    "chat.reply.logprobs", "logprobs.content[] with token, bytes, logprob, top_logprobs", clients="evaluations, LangChain"
)
async def _logprobs(target: Target) -> None:
    answer = await target.chat(logprobs=True, top_logprobs=1)
    require_script_or_skip(target, answer, "logprobs")
    choice = require_ok(answer)["choices"][0]
    logprobs = choice.get("logprobs")
    if logprobs is None:
        if target.scripted:
            raise Violation("logprobs were asked for and are missing")
        raise NotApplicable("the engine sends no logprobs")
    entries = logprobs["content"].items()
    check_logprobs(entries, choice["message"]["content"].text() if target.scripted else _spell(entries))


def _spell(entries: list[Field]) -> str:
    """Return what the tokens spell: a real model's last token may have no text."""
    data = b"".join(bytes(entry["bytes"].value or entry["token"].text().encode()) for entry in entries)
    return data.decode(errors="replace")


@requirement(
    "chat.reply.reasoning",
    "thoughts come as reasoning_content or reasoning, not in the text",
    clients="opencode, Open WebUI, AI SDK",
    needs_script=True,
)
async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        message = require_ok(await target.chat(prompt))["choices"][0]["message"]
        message["content"].must_be(TEXT)
        thoughts = [message.value.get(name) for name in ("reasoning_content", "reasoning")]
        if THOUGHT not in thoughts:
            raise Violation(
                f"reasoning_content is {thoughts[0]!r} and reasoning {thoughts[1]!r}, the engine thought {THOUGHT!r}"
            )


@requirement("chat.reply.refusal", "a refusal is in message.refusal", clients="openai SDKs", needs_script=True)
async def _refusal(target: Target) -> None:
    message = require_ok(await target.chat("[[refusal]] hello"))["choices"][0]["message"]
    message["refusal"].must_be(REFUSAL)
    message["content"].must_be(None, "")


@requirement(
    "chat.reply.length",
    "an answer cut off by max_tokens says finish_reason: length",
    clients="agents, AI SDK",
    needs_script=True,
)
async def _length(target: Target) -> None:
    choice = require_ok(await target.chat("[[length]] hello"))["choices"][0]
    choice["finish_reason"].must_be("length")
    choice["message"]["content"].must_be(CUT_SHORT)


@requirement(
    "chat.reply.stop",
    "stop reaches the engine and the answer says finish_reason: stop",
    clients="LangChain, aider",
    needs_script=True,
)
async def _stop(target: Target) -> None:
    reply = require_ok(await target.chat("[[stop_sequence]] hello", stop=["three"]))
    reply["choices"][0]["finish_reason"].must_be("stop")
    reply["choices"][0]["message"]["content"].must_be(BEFORE_STOP)


@requirement(
    "chat.reply.cached",
    "usage.prompt_tokens_details.cached_tokens arrives",
    clients="LiteLLM, agents' cost displays",
    needs_script=True,
)
async def _cached(target: Target) -> None:
    usage = require_ok(await target.chat("[[cached]] hello"))["usage"]
    usage["prompt_tokens"].must_be(PROMPT_TOKENS)
    usage["prompt_tokens_details"]["cached_tokens"].must_be(CACHED_TOKENS)


@requirement(
    "chat.reply.cut",
    "an engine that dies inside an answer is an error, never half a body with 200",
    clients="every client",
    needs_script=True,
)
async def _cut(target: Target) -> None:
    answer = await target.chat("[[cut]] hello")
    if answer.status < 500:
        raise Violation(f"status {answer.status} with {len(answer.body)} bytes, whole: {answer.whole}")
    answer.json()["error"]["message"].word()
