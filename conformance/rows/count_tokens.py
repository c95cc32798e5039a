"""Rows on counting tokens before asking."""

from __future__ import annotations

from conformance.readers.messages import check_error
from conformance.rows.messages_whole import ANTHROPIC_TOOLS
from conformance.table import requirement
from conformance.target import COUNT_TOKENS, PROMPT, Target, require_ok, require_script_or_skip, require_status
from conformance.verdicts import NotApplicable, Violation

_NEAR_TOKENS, _NEAR_SHARE = 4, 0.25
"""An estimate is allowed to be off by so much."""


async def _count(target: Target, **more: object) -> int:
    body = {"model": target.model, "messages": [{"role": "user", "content": PROMPT}], **more}
    return require_ok(await target.send(target.ask_json(COUNT_TOKENS, body)))["input_tokens"].count()


@requirement(
    "count_tokens.reply", "{input_tokens: n}, no max_tokens needed", clients="Claude Code, anthropic SDKs (litellm#30043)"
)
async def _reply(target: Target) -> None:
    if await _count(target) < 1:
        raise Violation("the prompt counts as no token")


async def _prompt_tokens(target: Target, **more: object) -> int:
    """Return what usage says of the same prompt once it was answered."""
    answer = await target.messages(PROMPT, **more)
    require_script_or_skip(target, answer, "tools")
    usage = require_ok(answer)["usage"]
    cached = usage.get("cache_read_input_tokens")
    return usage["input_tokens"].count() + (cached.count() if cached is not None else 0)


@requirement("count_tokens.exact", "the count is what usage says afterwards, or near it", clients="Claude Code's compaction")
async def _exact(target: Target) -> None:
    if target.scripted:
        raise NotApplicable("the scripted engine has no tokenizer")
    counted, used = await _count(target), await _prompt_tokens(target)
    if abs(counted - used) > max(_NEAR_TOKENS, used * _NEAR_SHARE):
        raise Violation(f"{counted} tokens are counted, usage says {used}")


@requirement("count_tokens.all", "system and tools are counted", clients="Claude Code's compaction")
async def _all(target: Target) -> None:
    if not target.scripted and await _prompt_tokens(target) == await _prompt_tokens(target, tools=ANTHROPIC_TOOLS):
        raise NotApplicable("the model's template knows no tools: its own usage does not grow with them")
    plain = await _count(target)
    with_system = await _count(target, system="You are a very brief assistant with many rules to follow.")
    with_tools = await _count(target, tools=ANTHROPIC_TOOLS)
    if not (with_system > plain and with_tools > plain):
        raise Violation(f"{plain} tokens alone, {with_system} with a system message, {with_tools} with tools")


@requirement("count_tokens.longer", "a longer prompt counts for more", clients="Claude Code's compaction")
async def _longer(target: Target) -> None:
    short = await _count(target)
    long = await _count(target, messages=[{"role": "user", "content": PROMPT * 20}])
    if long <= short * 5:
        raise Violation(f"{short} tokens, and {long} for twenty times the text")


@requirement("count_tokens.beta", "?beta=true and unknown betas are not refused", clients="Claude Code")
async def _beta(target: Target) -> None:
    body = {"model": target.model, "messages": [{"role": "user", "content": PROMPT}]}
    ask = target.ask_json(f"{COUNT_TOKENS}?beta=true", body, {"anthropic-beta": "token-counting-2024-11-01,x-2027"})
    require_ok(await target.send(ask))["input_tokens"].count()


@requirement("count_tokens.bad", "a request without messages: 400 in Anthropic's shape", clients="anthropic SDKs")
async def _bad(target: Target) -> None:
    answer = await target.send(target.ask_json(COUNT_TOKENS, {"model": target.model}))
    require_status(answer, 400)
    check_error(answer.json())
