"""Rows on streamed chat completions without tools."""

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
from conformance.events import DONE, Stream, list_payloads
from conformance.fields import Field
from conformance.readers.chat import ChatStream, check_logprobs, check_usage, read_chat, require_end
from conformance.table import requirement
from conformance.target import Target, require_script_or_skip, require_stream
from conformance.verdicts import NotApplicable, Violation

PROMPT = "Say hello in a few words."


async def _stream(target: Target, prompt: str = PROMPT, **more: object) -> Stream:
    return require_stream(await target.chat(prompt, stream=True, **more))


async def _chunks(target: Target, prompt: str = PROMPT, **more: object) -> list[Field]:
    return list_payloads((await _stream(target, prompt, **more)).events)


async def _read(target: Target, prompt: str, **more: object) -> ChatStream:
    return require_end(read_chat(await _stream(target, prompt, **more)))


@requirement("chat.stream.no_event_lines", "no event: lines", clients="naive readers, Node helper")
async def _no_event_lines(target: Target) -> None:
    named = [event.name for event in (await _stream(target)).events if event.name]
    if named:
        raise Violation(f"events are named {named[:3]}")


@requirement(
    "chat.stream.head",
    "every chunk has the same id and model, object: chat.completion.chunk, created (integer)",
    clients="LangChain, AI SDK",
)
async def _head(target: Target) -> None:
    chunks = await _chunks(target)
    for chunk in chunks:
        chunk["object"].must_be("chat.completion.chunk")
        chunk["created"].count()
        for name in ("id", "model"):
            chunk[name].must_be(chunks[0][name].value)


@requirement("chat.stream.created", "created is the same in every chunk", clients="OpenAI's schema", needs_script=True)
async def _created(target: Target) -> None:
    found = {chunk["created"].count() for chunk in await _chunks(target)}
    if len(found) != 1:
        raise Violation(f"created is {sorted(found)}")


@requirement(
    "chat.stream.choices",
    "every chunk has choices, each with index, delta, finish_reason (null until the end)",
    clients="Node helper, AI SDK, llm",
)
async def _choices(target: Target) -> None:
    for chunk in await _chunks(target):
        for choice in chunk["choices"].items():
            choice["index"].count()
            choice["delta"].members()
            choice["finish_reason"].must_be(None, "stop", "length", "tool_calls", "content_filter")


@requirement("chat.stream.role", "the first delta has role: assistant", clients="Node helper, runTools")
async def _role(target: Target) -> None:
    first = next((chunk for chunk in await _chunks(target) if chunk["choices"].items()), None)
    if first is None:
        raise Violation("no chunk has a choice")
    first["choices"][0]["delta"]["role"].must_be("assistant")


@requirement(
    "chat.stream.finish", "exactly one finish_reason for each choice", clients="Node helper, AI SDK; tools never run without"
)
async def _finish(target: Target) -> None:
    reasons = [
        (choice["index"].value, choice["finish_reason"].value)
        for chunk in await _chunks(target)
        for choice in chunk["choices"].items()
        if not choice["finish_reason"].is_null
    ]
    if [index for index, _ in reasons] != [0]:
        raise Violation(f"finish reasons (index, reason): {reasons}")


@requirement("chat.stream.done", "[DONE] comes last, once", clients="raw loops, llm")
async def _done(target: Target) -> None:
    data = [event.data for event in (await _stream(target)).events]
    if data.count(DONE) != 1 or data[-1] != DONE:
        raise Violation(f"[DONE] comes {data.count(DONE)} times, the last event is {data[-1][:80] if data else None!r}")


@requirement(
    "chat.stream.usage",
    "include_usage: one chunk with choices: [] and usage right before [DONE], none before",
    clients="Node helper, AI SDK, llm, LangChain",
)
async def _usage(target: Target) -> None:
    chunks = await _chunks(target, stream_options={"include_usage": True})
    for chunk in chunks[:-1]:
        if chunk.get("usage") is not None:
            raise Violation(f"{chunk.path} has usage and is not the last chunk")
        if not chunk["choices"].items():
            raise Violation(f"{chunk.path} has no choices and is not the last chunk")
    chunks[-1]["choices"].must_be([])
    check_usage(chunks[-1]["usage"])


@requirement(
    "chat.stream.no_usage",
    "usage not asked for: no usage and no chunk without choices",
    clients="Node helper, llm (litellm#8349)",
)
async def _no_usage(target: Target) -> None:
    for extra in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        for chunk in await _chunks(target, **extra):
            if not chunk["choices"].items():
                raise Violation(f"{chunk.path} has no choices, with {extra or 'no stream_options'}")
            if chunk.get("usage") is not None:
                raise Violation(f"{chunk.path} has usage that nobody asked for, with {extra or 'no stream_options'}")


@requirement(
    "chat.stream.strict",
    "a strict accumulator takes the whole stream, with and without usage",
    clients="openai-python 3, openai-node 7",
)
async def _strict(target: Target) -> None:
    for options in ({}, {"stream_options": {"include_usage": True}}):
        said = await _read(target, PROMPT, **options)
        if bool(options) != (said.usage is not None):
            raise Violation(f"usage is {said.usage and said.usage.shown}, asked for: {bool(options)}")


@requirement("chat.stream.text", "the pieces add up to what the engine said", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    content = (await _read(target, PROMPT)).first.content
    if content != TEXT:
        raise Violation(f"the text adds up to {content!r}, the engine said {TEXT!r}")


@requirement(
    "chat.stream.n", "n: 2 streams two choices, each with role and finish_reason", clients="openai SDKs", needs_script=True
)
async def _n(target: Target) -> None:
    said = await _read(target, PROMPT, n=2)
    if {index: choice.content for index, choice in said.choices.items()} != {0: TEXT, 1: TEXT}:
        raise Violation(f"the choices are {said.choices}")


@requirement(
    "chat.stream.logprobs", "logprobs are in the chunks of the text they belong to", clients="evaluations, openai-python helper"
)
async def _logprobs(target: Target) -> None:
    answer = await target.chat(PROMPT, stream=True, logprobs=True, top_logprobs=1)
    require_script_or_skip(target, answer, "logprobs")
    said = require_end(read_chat(require_stream(answer))).first
    if not said.logprobs:
        if target.scripted:
            raise Violation("logprobs were asked for and no chunk has them")
        raise NotApplicable("the engine sends no logprobs")
    if target.scripted:
        check_logprobs(said.logprobs, said.content)


@requirement(
    "chat.stream.reasoning",
    "thoughts stream as reasoning_content or reasoning, before the text and not in it",
    clients="opencode, Open WebUI, AI SDK (vllm#27755)",
    needs_script=True,
)
async def _reasoning(target: Target) -> None:
    for prompt in ("[[thinking]] hello", "[[thinking:reasoning]] hello"):
        said = (await _read(target, prompt)).first
        if (said.reasoning, said.content) != (THOUGHT, TEXT):
            raise Violation(f"thoughts {said.reasoning!r} and text {said.content!r}")
        if said.order != ["reasoning", "content"]:
            raise Violation(f"kinds of delta came in the order {said.order}")


@requirement("chat.stream.refusal", "a refusal streams as delta.refusal", clients="openai SDKs", needs_script=True)
async def _refusal(target: Target) -> None:
    said = (await _read(target, "[[refusal]] hello")).first
    if (said.refusal, said.content) != (REFUSAL, ""):
        raise Violation(f"refusal {said.refusal!r}, text {said.content!r}")


@requirement(
    "chat.stream.length", "a text cut off ends with finish_reason: length", clients="agents, AI SDK", needs_script=True
)
async def _length(target: Target) -> None:
    said = (await _read(target, "[[length]] hello")).first
    if (said.finish_reason, said.content) != ("length", CUT_SHORT):
        raise Violation(f"finish_reason {said.finish_reason!r}, text {said.content!r}")


@requirement("chat.stream.stop", "a stop sequence ends with finish_reason: stop", clients="LangChain, aider", needs_script=True)
async def _stop(target: Target) -> None:
    said = (await _read(target, "[[stop_sequence]] hello", stop=["three"])).first
    if (said.finish_reason, said.content) != ("stop", BEFORE_STOP):
        raise Violation(f"finish_reason {said.finish_reason!r}, text {said.content!r}")


@requirement(
    "chat.stream.cached",
    "the usage chunk keeps prompt_tokens_details.cached_tokens",
    clients="LiteLLM, cost displays",
    needs_script=True,
)
async def _cached(target: Target) -> None:
    usage = (await _read(target, "[[cached]] hello", stream_options={"include_usage": True})).usage
    if usage is None:
        raise Violation("no usage chunk")
    usage["prompt_tokens"].must_be(PROMPT_TOKENS)
    usage["prompt_tokens_details"]["cached_tokens"].must_be(CACHED_TOKENS)
