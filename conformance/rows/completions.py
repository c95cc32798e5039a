"""Rows on the older completions."""

from __future__ import annotations

from conformance.engine.speech import TEXT
from conformance.readers.chat import check_usage, read_completion
from conformance.table import requirement
from conformance.target import Target, require_ok, require_script_or_skip, require_stream
from conformance.verdicts import NotApplicable, Violation

_PROMPTS = ["Once upon a time", "The capital of France is"]


@requirement(
    "completions.reply",
    "object: text_completion, choices with index, text, logprobs, finish_reason; usage",
    clients="openai SDKs, llm, lm-eval",
)
async def _reply(target: Target) -> None:
    reply = require_ok(await target.completions())
    reply["object"].must_be("text_completion")
    for name in ("id", "model"):
        reply[name].word()
    reply["created"].count()
    choice = reply["choices"][0]
    choice["index"].must_be(0)
    choice["text"].text()
    choice["finish_reason"].must_be("stop", "length", "content_filter")
    if (logprobs := choice.get("logprobs")) is not None:
        logprobs.members()
    check_usage(reply["usage"])


@requirement("completions.text", "the text arrives as the engine said it", clients="everybody", needs_script=True)
async def _text(target: Target) -> None:
    require_ok(await target.completions())["choices"][0]["text"].must_be(TEXT)


@requirement(
    "completions.stream",
    "streams like chat with text per chunk, a finish_reason and [DONE]; no usage unless asked for",
    clients="openai SDKs, Continue, llm",
)
async def _stream(target: Target) -> None:
    said = read_completion(require_stream(await target.completions(stream=True)))
    # llama.cpp puts usage beside the last choice, which no client minds; a chunk without choices is what breaks them.
    if said.usage is not None and (said.usage_is_alone or target.scripted):
        raise Violation("usage that nobody asked for")
    if target.scripted and said.texts != {0: TEXT}:
        raise Violation(f"the text adds up to {said.texts}")


@requirement(
    "completions.stream.usage",
    "include_usage: one chunk with choices: [] and usage before [DONE]",
    clients="openai SDKs, LiteLLM",
)
async def _stream_usage(target: Target) -> None:
    said = read_completion(require_stream(await target.completions(stream=True, stream_options={"include_usage": True})))
    if said.usage is None:
        raise Violation("no usage")
    if target.scripted and not said.usage_is_alone:
        raise Violation("the chunk with usage has choices")


@requirement("completions.prompts", "a list of prompts gives choices with index 0 to n-1", clients="lm-eval, LangChain")
async def _prompts(target: Target) -> None:
    answer = await target.completions(_PROMPTS)
    require_script_or_skip(target, answer, "a list of prompts")
    found = [choice["index"].value for choice in require_ok(answer)["choices"].items()]
    if sorted(found) != [0, 1]:
        raise Violation(f"two prompts give choices with index {found}")


@requirement(
    "completions.echo", "echo with logprobs and max_tokens 0 or 1 returns the prompt's log probabilities", clients="lm-eval"
)
async def _echo(target: Target) -> None:
    for tokens in (0, 1):
        answer = await target.completions(_PROMPTS[0], echo=True, logprobs=1, max_tokens=tokens)
        require_script_or_skip(target, answer, "echo with logprobs")
        choice = require_ok(answer)["choices"][0]
        logprobs = choice.get("logprobs")
        if not target.scripted and (
            logprobs is None or "tokens" not in logprobs or not choice["text"].text().startswith("Once")
        ):
            raise NotApplicable("the engine has no echo with logprobs")
        if logprobs is None:
            raise Violation("logprobs are missing")
        if not choice["text"].text().startswith(_PROMPTS[0]):
            raise Violation(f"the text does not begin with the prompt: {choice['text'].shown}")
        lengths = {name: len(logprobs[name].items()) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        if len(set(lengths.values())) != 1:
            raise Violation(f"the lists of logprobs differ in length: {lengths}")


@requirement("completions.tokens", "a prompt of token numbers is taken", clients="lm-eval, guidance")
async def _tokens(target: Target) -> None:
    answer = await target.completions([1, 15, 27])
    require_script_or_skip(target, answer, "token numbers")
    require_ok(answer)["choices"][0]["text"].text()
