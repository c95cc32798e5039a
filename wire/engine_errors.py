"""What an engine's error says: whose fault it is, and the engine's words without those of the request. Pure.

The runner and the gateway read the same errors: a request may reach either of them first, and engines of other people's
nodes are read by the gateway alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from wire.limits import WIRE
from wire.unreadable import UNREADABLE


class Blame(StrEnum):
    """Who can do something about an engine's error."""

    CALLER = "caller"
    """The request is wrong and will be wrong on every node: it is refused."""
    INSTALLATION = "installation"
    """The node, its engine or its configuration is wrong: the request failed."""
    CAPACITY = "capacity"
    """The engine has no room now: the request failed, and the operator should see that."""


# By HTTP status. One that is not here is the installation's: what nobody has judged should be seen by an operator.
_STATUSES: dict[int, tuple[Blame, str]] = {
    400: (Blame.CALLER, "a field is wrong, or the prompt does not fit"),
    401: (Blame.INSTALLATION, "the key is the node's own: callers never show theirs to an engine"),
    402: (Blame.INSTALLATION, "the owner's account at a provider is empty"),
    403: (Blame.INSTALLATION, "the engine does not let the node in; who may ask was decided before"),
    404: (Blame.INSTALLATION, "the node said that it serves this model on this path, and its engine does not"),
    405: (Blame.INSTALLATION, "the same, of the method"),
    408: (Blame.INSTALLATION, "the engine did not get the request from the node in time"),
    409: (Blame.INSTALLATION, "the engine is in another state than the node believes"),
    410: (Blame.INSTALLATION, "the provider took the model away"),
    413: (Blame.CALLER, "the body is larger than the engine takes"),
    415: (Blame.CALLER, "the engine does not take this kind of content"),
    422: (Blame.CALLER, "a field is wrong (FastAPI, TGI)"),
    424: (Blame.INSTALLATION, "generating failed (TGI)"),
    429: (Blame.CAPACITY, "the engine's queue is full: the caller's own limit was counted before"),
    503: (Blame.CAPACITY, "the engine is overloaded, or still loads"),
    529: (Blame.CAPACITY, "the provider is overloaded (Anthropic)"),
}  # fmt: skip


# Refusals of our runner whose status alone would say something else (``runner.errors``).
_CODES = {
    "remote_not_allowed": Blame.CALLER,  # the request has to say allow_remote
    "spending_cap_reached": Blame.CALLER,  # the tenant's own cap
}


def judge_error(status: int, code: object = None) -> Blame:
    """Return whose fault an engine's error is, by its HTTP status (400 and above) and the ``code`` of its body."""
    if isinstance(code, str) and code in _CODES:
        return _CODES[code]
    return _STATUSES[status][0] if status in _STATUSES else Blame.INSTALLATION


# A model that cannot see or hear was given a picture or a sound: llama.cpp says the first (since May 2025) or the sixth with
# 500, Ollama the second with 500 and the third with 400, vLLM the fourth and fifth with 400. TGI and TabbyAPI leave the
# picture out without a word. With the last line llama.cpp refuses fields that it cannot read; of what it generated itself it
# says "Failed to parse input".
_CALLERS_MISTAKE = re.compile(
    r"\b(?:image|audio|video|vision|multimodal)\b[\w ]{0,24} (?:is|are) not (?:supported|enabled)"
    r"|missing data required for image input"
    r"|does(?: not|n't) support (?:images?|vision|audio|videos?|multimodal)\b"
    r"|\bis not a multimodal model"
    r"|\bAt most 0 (?:image|audio|video)"
    r"|unsupported content(?: part type|\[\]\.type)"
    r"|^Failed to parse (?:messages|tools|tool call arguments)\b",
    re.IGNORECASE,
)
_BUG_STATUSES = frozenset({500, 501})


def correct_status(status: int, message: str) -> int:
    """Return the HTTP status of an error: 400 where an engine says with a 5xx that it cannot take a part of the request.

    SDKs repeat a request upon every 5xx, and this one is wrong on every node.
    """
    return 400 if status in _BUG_STATUSES and _CALLERS_MISTAKE.search(message) else status


class EngineErrorObject(msgspec.Struct):
    """The ``error`` member of an engine's error body, whatever types its own members have."""

    message: object = None
    type: object = None
    code: object = None
    param: object = None
    n_prompt_tokens: object = None
    n_ctx: object = None


class EngineErrorBody(msgspec.Struct):
    """An engine's error body.

    vLLM and llama.cpp say ``{"error": {…}}`` (``code`` a number), older vLLM ``{"object": "error", "message"}``, FastAPI
    servers ``{"detail"}``, Ollama ``{"error": "text"}``.
    """

    error: EngineErrorObject | str | None = None
    type: object = None
    message: object = None
    detail: object = None


_decoder = msgspec.json.Decoder(EngineErrorBody)
_TAGS = re.compile(r"<(?:script|style)\b.*?(?:</(?:script|style)>|\Z)|<[^<>]*>", re.DOTALL | re.IGNORECASE)


def read_error_body(body: bytes) -> EngineErrorBody | None:
    """Return an error body, None when it is no such JSON."""
    try:
        return _decoder.decode(body)
    except UNREADABLE:
        return None


def find_message(found: EngineErrorBody) -> str:
    """Return the message of an error body; what is no text as JSON, "" when it has none."""
    inner = found.error if isinstance(found.error, EngineErrorObject) else None
    for said in (inner.message if inner else None, found.error, found.message, found.detail):
        if isinstance(said, str) and said:
            return said
        if isinstance(said, dict | list) and said:
            return msgspec.json.encode(said).decode()
    return ""


def strip_markup(body: bytes) -> str:
    """Return the text at the beginning of a page, such as a proxy's error."""
    return " ".join(_TAGS.sub(" ", body[: WIRE.error_head_bytes].decode("utf-8", "replace")).split())


def read_message(body: bytes) -> str:
    """Return what an engine's error body says, in whatever shape."""
    found = read_error_body(body) if len(body) <= WIRE.error_body_bytes else None
    if found is not None:
        return find_message(found)
    return "" if body[:1] in (b"[", b"{") else strip_markup(body)


_ELLIPSIS = "…"
# Where validators begin to repeat what they were given: pydantic's text and its dictionaries, llama.cpp's parser.
_ECHO = re.compile(r"""(?:\binput_value=|['"]input['"]\s*:|\b(?:messages|tools) = [\[{]|\bbody=)""")
_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|([nrtfvb0])|(.))", re.DOTALL)
# What neither a line of a log nor a page may carry: control characters, and those that turn the direction of text.
_GAPS = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")
_CREDENTIAL = re.compile(r"\b(?:sk|hf|gsk|mst|msa|msw)[-_][A-Za-z0-9_-]{12,}|\bBearer\s+\S+", re.IGNORECASE)


def quote_message(message: str, asked: bytes) -> str:
    """Return an engine's words as they may be kept and logged: one line of up to ``error_quote_chars``, no credential.

    They end, with an ellipsis, before the first place where a validator begins to repeat its input, and before the first run of
    20 characters that the request (``asked``: its body) holds as a text of its own, escaped or not. Names of fields
    and of the model are no such text. Takes a moment in which ``asked`` is decoded and searched: run it beside the event
    loop where that may be long.
    """
    if not message:
        return ""
    text, is_cut = message, False
    if (echo := _ECHO.search(text)) is not None:
        text, is_cut = text[: echo.start()], True
    most = WIRE.error_quote_chars
    text = _ESCAPE.sub(_unescape, text[: 4 * most]).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = _CREDENTIAL.sub(_ELLIPSIS, _flatten(text))
    # A run may begin before the cut and end behind it: what is kept is searched with as much of what follows.
    searched = text[: most + WIRE.echo_chars]
    if (start := _find_echo(searched, asked)) is not None:
        text, is_cut = text[:start], True
    limit = most - 1 if is_cut or len(text) > most else most
    is_cut = is_cut or len(text) > limit
    return text[:limit].rstrip() + _ELLIPSIS if is_cut else text


def _flatten(text: str) -> str:
    return _GAPS.sub(" ", text).strip()


def _unescape(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return found[5] or " "
    return chr(code) if (code := int(digits, 16)) <= sys.maxunicode else " "


def _list_texts(asked: bytes) -> Iterator[str]:
    """Yield what a request says: every text of its JSON but the name of the model."""
    try:
        decoded = msgspec.json.decode(asked)
    except UNREADABLE:
        for edge in (asked[: WIRE.echo_edge_bytes], asked[WIRE.echo_edge_bytes :][-WIRE.echo_edge_bytes :]):
            yield edge.decode("utf-8", "replace")
        return
    if isinstance(decoded, dict):
        decoded = [value for name, value in decoded.items() if name != "model"]
    left = [decoded]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case dict() as members:
                left.extend(members.values())
            case list() as items:
                left.extend(items)


def _find_echo(text: str, asked: bytes) -> int | None:
    """Return where the first run of ``echo_chars`` characters begins that the request holds too."""
    if len(text) < WIRE.echo_chars:
        return None
    said = "\0".join(_flatten(one) for one in _list_texts(asked))
    # Such a run covers at least one of the blocks into which the text is cut here, so only those are searched for.
    block = WIRE.echo_chars // 2
    for at in range(0, len(text) - block + 1, block):
        starts = [run.start for run in _list_runs(text, range(at, at + block), said) if run.stop - run.start >= WIRE.echo_chars]
        if starts:
            return min(starts)
    return None


def _list_runs(text: str, of: range, said: str) -> Iterator[range]:
    """Yield the stretches of ``text`` around its block ``of`` that stand in ``said``, one for each place of the block."""
    at, block = of.start, text[of.start : of.stop]
    place = said.find(block)
    for _ in range(WIRE.echo_places):
        if place < 0:
            return
        before, behind = 0, len(of)
        while before < min(at, place) and text[at - before - 1] == said[place - before - 1]:
            before += 1
        while at + behind < len(text) and place + behind < len(said) and text[at + behind] == said[place + behind]:
            behind += 1
        yield range(at - before, at + behind)
        place = said.find(block, place + 1)
    yield range(max(0, at - len(of)), at + WIRE.echo_chars)
