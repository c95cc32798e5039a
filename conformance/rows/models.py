"""Rows on the list of models, on health, on how the server is reached, and on counting tokens."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import quote

from conformance.dialects import TOOLS
from conformance.exchange import Answer, Ask, Field, NotApplicable, Violation
from conformance.readers.messages import check_error
from conformance.table import (
    ANTHROPIC_VERSION,
    CHAT,
    COUNT_TOKENS,
    MESSAGES,
    MODELS,
    PROMPT,
    Row,
    Target,
    require_ok,
    require_script_or_skip,
    require_status,
)


async def _get(target: Target, path: str, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await target.send(Ask("GET", path, tuple(named.items())))


async def _openai(target: Target, path: str = MODELS) -> Answer:
    return await _get(target, path, authorization=f"Bearer {target.api_key}")


async def _anthropic(target: Target, path: str = MODELS) -> Answer:
    return await _get(target, path, x_api_key=target.api_key, anthropic_version=ANTHROPIC_VERSION)


def _check_model(row: Field) -> None:
    row.must_fit({"id": Field.word, "object": "model", "created": Field.count, "owned_by": Field.text})


def _check_anthropic_model(row: Field) -> None:
    row.must_fit({"type": "model", "id": Field.word, "display_name": Field.word})
    try:
        when = datetime.fromisoformat(row["created_at"].text())
    except ValueError:
        raise Violation(f"{row.path}.created_at is no RFC 3339 time: {row['created_at'].shown}") from None
    if when.tzinfo is None:
        raise Violation(f"{row.path}.created_at has no zone: {row['created_at'].shown}")


async def _list(target: Target) -> None:
    reply = require_ok(await _openai(target))
    reply["object"].must_be("list")
    rows = reply["data"].items()
    for row in rows:
        _check_model(row)
    if target.model not in [row["id"].value for row in rows]:
        raise Violation(f"{target.model} is not listed")


async def _one(target: Target) -> None:
    row = require_ok(await _openai(target, f"{MODELS}/{quote(target.model, safe='')}"))
    _check_model(row)
    row["id"].must_be(target.model)


async def _slash(target: Target) -> None:
    if "/" in target.model:
        for name in (target.model, quote(target.model, safe="")):
            require_ok(await _openai(target, f"{MODELS}/{name}"))["id"].must_be(target.model)
        return
    for name in ("nobody/has-this", "nobody%2Fhas-this"):
        answer = await _openai(target, f"{MODELS}/{name}")
        require_status(answer, 404)
        if "nobody/has-this" not in answer.json()["error"]["message"].text():
            raise Violation(f"the slash of {name} is lost: {answer.json()['error']['message'].shown}")


async def _unknown(target: Target) -> None:
    answer = await _openai(target, f"{MODELS}/nobody-has-this")
    require_status(answer, 404)
    answer.json()["error"].must_have(("message", "type", "param", "code"))


async def _anthropic_list(target: Target) -> None:
    reply = require_ok(await _anthropic(target))
    rows = reply["data"].items()
    for row in rows:
        _check_anthropic_model(row)
    reply["has_more"].flag()
    if rows:
        reply["first_id"].must_be(rows[0]["id"].value)
        reply["last_id"].must_be(rows[-1]["id"].value)
    if target.model not in [row["id"].value for row in rows] and not reply["has_more"].value:
        raise Violation(f"{target.model} is not listed")


async def _anthropic_one(target: Target) -> None:
    row = require_ok(await _anthropic(target, f"{MODELS}/{quote(target.model, safe='')}"))
    _check_anthropic_model(row)
    row["id"].must_be(target.model)


async def _keys(target: Target) -> None:
    for headers in ({"authorization": f"Bearer {target.api_key}"}, {"x_api_key": target.api_key}):
        require_ok(await _get(target, MODELS, **headers))["data"].items()


async def _health(target: Target) -> None:
    require_status(await _get(target, "/health"), 200)


async def _head(target: Target) -> None:
    answer = await target.send(Ask("HEAD", "/"))
    if not answer.whole or answer.body:
        raise Violation(f"status {answer.status}, whole: {answer.whole}, {len(answer.body)} bytes of body")


async def _no_redirect(target: Target) -> None:
    answer = await target.send(target.ask_json(CHAT, target.body(CHAT)))
    if 300 <= answer.status < 400:
        raise Violation(f"{answer.status} to {answer.header('location')!r}")
    slashed = await target.send(target.ask_json(CHAT + "/", target.body(CHAT)))
    if 300 <= slashed.status < 400:
        raise Violation(f"with a slash at its end: {slashed.status} to {slashed.header('location')!r}")


async def _browser(target: Target) -> None:
    ask = target.ask_json(CHAT, target.body(CHAT), {"origin": "https://example.org", "cookie": "sessionid=x; csrftoken=y"})
    answer = await target.send(ask)
    require_ok(answer)
    if answer.header("set-cookie"):
        raise NotApplicable("the server sets a cookie; no client minds")


# An estimate is allowed to be off by so much.
_NEAR_TOKENS, _NEAR_SHARE = 4, 0.25


async def _count(target: Target, **more: object) -> int:
    body = {"model": target.model, "messages": [{"role": "user", "content": PROMPT}], **more}
    return require_ok(await target.send(target.ask_json(COUNT_TOKENS, body)))["input_tokens"].count()


async def _reply(target: Target) -> None:
    if await _count(target) < 1:
        raise Violation("the prompt counts as no token")


async def _prompt_tokens(target: Target, **more: object) -> int:
    """Return what usage says of the same prompt once it was answered."""
    answer = await target.say(MESSAGES, PROMPT, **more)
    require_script_or_skip(target, answer, "tools")
    usage = require_ok(answer)["usage"]
    cached = usage.get("cache_read_input_tokens")
    return usage["input_tokens"].count() + (cached.count() if cached is not None else 0)


async def _exact(target: Target) -> None:
    if target.scripted:
        raise NotApplicable("the scripted engine has no tokenizer")
    counted, used = await _count(target), await _prompt_tokens(target)
    if abs(counted - used) > max(_NEAR_TOKENS, used * _NEAR_SHARE):
        raise Violation(f"{counted} tokens are counted, usage says {used}")


async def _all(target: Target) -> None:
    if not target.scripted and await _prompt_tokens(target) == await _prompt_tokens(target, tools=TOOLS[MESSAGES]):
        raise NotApplicable("the model's template knows no tools: its own usage does not grow with them")
    plain = await _count(target)
    with_system = await _count(target, system="You are a very brief assistant with many rules to follow.")
    with_tools = await _count(target, tools=TOOLS[MESSAGES])
    if not (with_system > plain and with_tools > plain):
        raise Violation(f"{plain} tokens alone, {with_system} with a system message, {with_tools} with tools")


async def _longer(target: Target) -> None:
    short = await _count(target)
    long = await _count(target, messages=[{"role": "user", "content": PROMPT * 20}])
    if long <= short * 5:
        raise Violation(f"{short} tokens, and {long} for twenty times the text")


async def _beta(target: Target) -> None:
    body = {"model": target.model, "messages": [{"role": "user", "content": PROMPT}]}
    ask = target.ask_json(f"{COUNT_TOKENS}?beta=true", body, {"anthropic-beta": "token-counting-2024-11-01,x-2027"})
    require_ok(await target.send(ask))["input_tokens"].count()


async def _bad(target: Target) -> None:
    answer = await target.send(target.ask_json(COUNT_TOKENS, {"model": target.model}))
    require_status(answer, 400)
    check_error(answer.json())


ROWS = (
    Row("models.list", "{object: list, data[{id, object: model, created, owned_by}]}, never a bare array",
        "openai SDKs, Open WebUI, LibreChat", _list),
    Row("models.one", "GET /v1/models/{id} gives one", "openai SDKs, aider", _one),
    Row("models.slash", "ids with a slash work, plain and percent-encoded (found or an honest 404)",
        "openai SDKs with hub names", _slash),
    Row("models.unknown", "an unknown id: 404 with an error object", "openai SDKs", _unknown),
    Row("models.anthropic", "with anthropic-version: data[{type, id, display_name, created_at}], has_more, first_id, last_id",
        "anthropic SDKs, Claude Code", _anthropic_list),
    Row("models.anthropic_one", "with anthropic-version: one model in Anthropic's shape", "anthropic SDKs", _anthropic_one),
    Row("models.keys", "the list takes the key as Bearer and as x-api-key", "Open WebUI, anthropic SDKs", _keys),
    Row("models.health", "GET /health answers 200 without a key", "load balancers, Open WebUI", _health),
    Row("models.head", "HEAD / is answered, with any status and no body", "Claude Code, Open WebUI (reachability)", _head),
    Row("models.no_redirect", "a POST is never redirected and needs no slash at its end",
        "every SDK loses the body on a redirect", _no_redirect, needs=None),
    Row("models.browser", "no cookie, login page or CSRF check stands before the API", "every SDK", _browser),
    Row("count_tokens.reply", "{input_tokens: n}, no max_tokens needed", "Claude Code, anthropic SDKs (litellm#30043)",
        _reply),
    Row("count_tokens.exact", "the count is what usage says afterwards, or near it", "Claude Code's compaction", _exact),
    Row("count_tokens.all", "system and tools are counted", "Claude Code's compaction", _all),
    Row("count_tokens.longer", "a longer prompt counts for more", "Claude Code's compaction", _longer),
    Row("count_tokens.beta", "?beta=true and unknown betas are not refused", "Claude Code", _beta),
    Row("count_tokens.bad", "a request without messages: 400 in Anthropic's shape", "anthropic SDKs", _bad),
)  # fmt: skip
