"""Rows on the bytes of a stream, the same for every surface that streams."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any  # request bodies are JSON

from conformance.dialects import DIALECTS, Dialect, each
from conformance.engine.script import TEXT
from conformance.exchange import (
    DONE,
    LIMITS,
    Answer,
    Connection,
    Stream,
    Violation,
    check_event_data,
    check_whole_writes,
    read_stream,
)
from conformance.table import CHAT, Row, Surface, Target, require_status, require_stream, scripted


async def _content_type(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target))
    require_status(answer, 200)
    if not answer.header("content-type").startswith("text/event-stream"):
        raise Violation(f"content-type is {answer.header('content-type')!r}")


async def _no_length(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target, accept_encoding="gzip, deflate, br, zstd"))
    require_status(answer, 200)
    for name in ("content-length", "content-encoding"):
        if answer.header(name):
            raise Violation(f"{name}: {answer.header(name)}")


async def _not_buffered(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target))
    require_status(answer, 200)
    if "no-cache" not in answer.header("cache-control"):
        raise Violation(f"cache-control is {answer.header('cache-control')!r}")
    if answer.header("x-accel-buffering") != "no":
        raise Violation(f"x-accel-buffering is {answer.header('x-accel-buffering')!r}")


async def _kept_alive(dialect: Dialect, target: Target) -> None:
    async with Connection.opened(target.base_url) as connection:
        for _ in range(2):
            answer = await connection.exchange(dialect.ask(target))
            require_stream(answer)
            if answer.closed:
                raise Violation("the server closes the connection after a stream that ended well")
            connection.reuse()


async def _whole_writes(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target))
    require_stream(answer)
    check_whole_writes(answer)


async def _split_events(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target, "[[split_events]] hello"))
    _require_text(dialect, answer)
    check_whole_writes(answer)


async def _json_data(dialect: Dialect, target: Target) -> None:
    check_event_data(require_stream(await target.send(dialect.ask(target))))


async def _crlf(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target, "[[crlf]] hello"))
    _require_text(dialect, answer)
    check_event_data(read_stream(answer.body))


async def _comments(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target, "[[comments]] hello"))
    _require_text(dialect, answer)


async def _keep_alive(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target, f"[[slow:{target.silence_s:g}]] hello"))
    _require_text(dialect, answer)
    check_event_data(read_stream(answer.body))
    if not _list_signs(answer)[0]:
        raise Violation(f"nothing came before the answer; the engine was silent for {target.silence_s:g} s")
    _check_gaps(target, [0.0, *(write.at_s for write in answer.writes)])


async def _keep_alive_middle(dialect: Dialect, target: Target) -> None:
    answer = await target.send(dialect.ask(target, f"[[pause:{target.silence_s:g}]] hello"))
    _require_text(dialect, answer)
    signs = _list_signs(answer)
    if True not in signs[signs.index(False) :]:
        raise Violation(f"nothing came within the answer while the engine was silent for {target.silence_s:g} s")
    _check_gaps(target, [write.at_s for write in answer.writes])


def _list_signs(answer: Answer) -> list[bool]:
    """Return for each block of a stream whether it is a mere sign of life: a comment, or a ping."""
    blocks = [block for block in re.split(rb"\r?\n\r?\n", answer.body) if block.strip()]
    return [block.startswith((b":", b"event: ping")) for block in blocks]


def _check_gaps(target: Target, times_s: Sequence[float]) -> None:
    # A shorter silence of the engine could not tell a server with keep-alives from one without.
    longest_s = max(after - before for before, after in pairwise(times_s))
    if longest_s > LIMITS.keep_alive_s and target.silence_s > LIMITS.keep_alive_s:
        raise Violation(f"nothing came for {longest_s:.1f} s")


async def _keep_alive_form(dialect: Dialect, target: Target) -> None:
    for directive in ("slow", "pause"):
        answer = await target.send(dialect.ask(target, f"[[{directive}:{target.silence_s:g}]] hello"))
        _check_keep_alives(dialect, require_stream(answer))


def _check_keep_alives(dialect: Dialect, stream: Stream) -> None:
    for event in stream.events:
        is_ping = event.name == "ping" or (event.data != DONE and event.json().members().get("type") == "ping")
        if is_ping and dialect.surface is not Surface.MESSAGES:
            raise Violation(f"event {event.number} is a ping ({event.data!r}); only comment lines are understood here")
    if not stream.comments and not any(event.name == "ping" for event in stream.events):
        raise Violation("no comment line and no ping in a stream with a long silence")


async def _no_delay(target: Target) -> None:
    gaps = []
    for _ in range(LIMITS.gap_tries):
        async with Connection.opened(target.base_url) as connection:
            connection.keeps_acks_back = True
            answer = await connection.exchange(DIALECTS[CHAT].ask(target, "[[pace:5]] [[thinking]] hello"))
        require_stream(answer)
        times = [write.at_s for write in answer.writes]
        gaps.append(statistics.median(after - before for before, after in pairwise(times)))
    if min(gaps) > LIMITS.gap_s:
        raise Violation(f"pieces that the engine says every 5 ms arrive every {min(gaps) * 1000:.0f} ms")


async def _plain_json(target: Target) -> None:
    extras: tuple[dict[str, Any], ...] = ({}, {"stream": False})
    for extra in extras:
        answer = await target.say(CHAT, **extra)
        require_status(answer, 200)
        if not answer.header("content-type").startswith("application/json"):
            raise Violation(f"content-type is {answer.header('content-type')!r}")
        if answer.body.lstrip().startswith(b"data:"):
            raise Violation("the body begins with `data:`")


async def _plain_kept_alive(target: Target) -> None:
    good = target.ask_json(CHAT, target.body(CHAT))
    bad = replace(good, body=b"{")
    async with Connection.opened(target.base_url) as connection:
        for ask in (good, bad, good):
            answer = await connection.exchange(ask)
            if not answer.whole:
                raise Violation(f"no whole answer: status {answer.status}, {len(answer.body)} bytes")
            connection.reuse()


def _require_text(dialect: Dialect, answer: Answer) -> None:
    text = dialect.stream_text(require_stream(answer))
    if text != TEXT:
        raise Violation(f"the text arrives as {text!r}, the engine said {TEXT!r}")


ROWS = (
    *each("framing.content_type", "a stream is text/event-stream", "every SSE client", _content_type),
    *each("framing.no_length", "no content-length, no content-encoding, even if the client accepts gzip",
        "Node SDKs, browsers", _no_length),
    *each("framing.not_buffered", "cache-control: no-cache and x-accel-buffering: no", "whoever is behind nginx",
        _not_buffered),
    *each("framing.kept_alive", "the connection can be used again after a stream", "all SDKs (their pools)", _kept_alive),
    *each("framing.whole_writes", "no write ends inside an event", "Open Responses runner, naive readers", _whole_writes),
    *each("framing.split_events", "events that an engine sends in pieces go out whole", "Open Responses runner",
        _split_events, needs_script=True),
    *each("framing.json_data", "every event has data that is JSON, except [DONE]", "all SDKs", _json_data),
    *each("framing.crlf", "an engine's CR LF and missing blanks do no harm", "naive readers", _crlf, needs_script=True),
    *each("framing.comments", "an engine's comment lines do no harm", "all SDKs", _comments, needs_script=True),
    *each("framing.keep_alive", "something within 10 s while the engine reads the prompt", "proxies, SDK read time-outs",
        _keep_alive, needs_script=True, is_slow=True),
    *each("framing.keep_alive_middle", "something within 10 s while the engine is silent within its answer",
        "proxies, SDK read time-outs", _keep_alive_middle, needs_script=True, is_slow=True),
    *each("framing.keep_alive_form", "keep-alives are comments; only Messages may use a ping event",
        "Node helper, AI SDK, LlamaIndex, llm", _keep_alive_form, needs_script=True, is_slow=True),
    scripted("framing.no_delay", "pieces are not held back until the client acknowledges (TCP_NODELAY)",
        "two tools showed a flat 40 ms", _no_delay, needs=Surface.CHAT),
    Row("framing.plain_json", "an answer that is not streamed is application/json, without `data:` before it",
        "every client (GPUStack#4648)", _plain_json, needs=Surface.CHAT),
    Row("framing.plain_kept_alive", "the connection can be used again after an answer and after an error",
        "all SDKs (their pools)", _plain_kept_alive, needs=Surface.CHAT),
)  # fmt: skip
