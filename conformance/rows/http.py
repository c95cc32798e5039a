"""Rows on the bytes of a stream, the same for every surface that streams."""

from __future__ import annotations

import re
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any  # request bodies are JSON

from conformance.engine.script import TEXT
from conformance.exchange import (
    DONE,
    LIMITS,
    Answer,
    Ask,
    Connection,
    Stream,
    Violation,
    check_event_data,
    check_whole_writes,
    read_stream,
)
from conformance.readers.chat import read_chat, read_completion
from conformance.readers.messages import read_messages
from conformance.readers.responses import read_responses
from conformance.table import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Surface,
    Target,
    add_row,
    require_status,
    require_stream,
    requirement,
)


@dataclass(frozen=True, slots=True)
class Streaming:
    """A surface that streams: how to ask it and what its text adds up to."""

    surface: Surface
    path: str
    body: Callable[..., dict[str, Any]]
    text: Callable[[Answer], str]

    def ask(self, target: Target, prompt: str = "", **headers: str) -> Ask:
        """Return a request for a stream; ``prompt`` empty = any."""
        body = self.body(target, prompt, stream=True) if prompt else self.body(target, stream=True)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return target.ask_json(self.path, body, {"accept": "text/event-stream", **named})


STREAMING = (
    Streaming(Surface.CHAT, CHAT, Target.chat_body, lambda answer: read_chat(require_stream(answer)).first.content),
    Streaming(
        Surface.COMPLETIONS, COMPLETIONS, Target.completion_body,
        lambda answer: read_completion(require_stream(answer)).texts.get(0, ""),
    ),
    Streaming(
        Surface.RESPONSES, RESPONSES, Target.responses_body,
        lambda answer: "".join(read_responses(require_stream(answer)).texts("output_text")),
    ),
    Streaming(
        Surface.MESSAGES, MESSAGES, Target.messages_body,
        lambda answer: "".join(read_messages(require_stream(answer)).texts("text")),
    ),
)  # fmt: skip

FramingCheck = Callable[[Target, Streaming], Awaitable[None]]


def for_every_stream(
    name: str, text: str, *, clients: str, needs_script: bool = False, is_slow: bool = False
) -> Callable[[FramingCheck], FramingCheck]:
    """Register a check as one row for each surface that streams."""

    def register(check: FramingCheck) -> FramingCheck:
        for streaming in STREAMING:

            async def run(target: Target, streaming: Streaming = streaming) -> None:
                await check(target, streaming)

            surface = streaming.surface
            row_id = f"framing.{name}.{surface}"
            add_row(
                row_id,
                f"{surface}: {text}",
                run,
                clients=clients,
                needs_script=needs_script,
                needs=surface,
                is_slow=is_slow,
            )
        return check

    return register


@for_every_stream("content_type", "a stream is text/event-stream", clients="every SSE client")
async def _content_type(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target))
    require_status(answer, 200)
    if not answer.header("content-type").startswith("text/event-stream"):
        raise Violation(f"content-type is {answer.header('content-type')!r}")


@for_every_stream(
    "no_length", "no content-length, no content-encoding, even if the client accepts gzip", clients="Node SDKs, browsers"
)
async def _no_length(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target, accept_encoding="gzip, deflate, br, zstd"))
    require_status(answer, 200)
    for name in ("content-length", "content-encoding"):
        if answer.header(name):
            raise Violation(f"{name}: {answer.header(name)}")


@for_every_stream("not_buffered", "cache-control: no-cache and x-accel-buffering: no", clients="whoever is behind nginx")
async def _not_buffered(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target))
    require_status(answer, 200)
    if "no-cache" not in answer.header("cache-control"):
        raise Violation(f"cache-control is {answer.header('cache-control')!r}")
    if answer.header("x-accel-buffering") != "no":
        raise Violation(f"x-accel-buffering is {answer.header('x-accel-buffering')!r}")


@for_every_stream("kept_alive", "the connection can be used again after a stream", clients="all SDKs (their pools)")
async def _kept_alive(target: Target, streaming: Streaming) -> None:
    connection = await Connection.open(target.base_url)
    try:
        for _ in range(2):
            answer = await connection.exchange(streaming.ask(target))
            require_stream(answer)
            if answer.closed:
                raise Violation("the server closes the connection after a stream that ended well")
            connection.reuse()
    finally:
        await connection.close()


@for_every_stream("whole_writes", "no write ends inside an event", clients="Open Responses runner, naive readers")
async def _whole_writes(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target))
    require_stream(answer)
    check_whole_writes(answer)


@for_every_stream(
    "split_events", "events that an engine sends in pieces go out whole", clients="Open Responses runner", needs_script=True
)
async def _split_events(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target, "[[split_events]] hello"))
    _require_text(streaming, answer)
    check_whole_writes(answer)


@for_every_stream("json_data", "every event has data that is JSON, except [DONE]", clients="all SDKs")
async def _json_data(target: Target, streaming: Streaming) -> None:
    check_event_data(require_stream(await target.send(streaming.ask(target))))


@for_every_stream("crlf", "an engine's CR LF and missing blanks do no harm", clients="naive readers", needs_script=True)
async def _crlf(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target, "[[crlf]] hello"))
    _require_text(streaming, answer)
    check_event_data(read_stream(answer.body))


@for_every_stream("comments", "an engine's comment lines do no harm", clients="all SDKs", needs_script=True)
async def _comments(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target, "[[comments]] hello"))
    _require_text(streaming, answer)


@for_every_stream(
    "keep_alive",
    "something within 10 s while the engine reads the prompt",
    clients="proxies, SDK read time-outs",
    needs_script=True,
    is_slow=True,
)
async def _keep_alive(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target, f"[[slow:{target.silence_s:g}]] hello"))
    _require_text(streaming, answer)
    check_event_data(read_stream(answer.body))
    if not _list_signs(answer)[0]:
        raise Violation(f"nothing came before the answer; the engine was silent for {target.silence_s:g} s")
    _check_gaps(target, [0.0, *(write.at_s for write in answer.writes)])


@for_every_stream(
    "keep_alive_middle",
    "something within 10 s while the engine is silent within its answer",
    clients="proxies, SDK read time-outs",
    needs_script=True,
    is_slow=True,
)
async def _keep_alive_middle(target: Target, streaming: Streaming) -> None:
    answer = await target.send(streaming.ask(target, f"[[pause:{target.silence_s:g}]] hello"))
    _require_text(streaming, answer)
    signs = _list_signs(answer)
    if True not in signs[signs.index(False) :]:
        raise Violation(f"nothing came within the answer while the engine was silent for {target.silence_s:g} s")
    _check_gaps(target, [write.at_s for write in answer.writes])


def _list_signs(answer: Answer) -> list[bool]:
    """Return for each block of a stream whether it is a mere sign of life: a comment, or a ping."""
    blocks = [block for block in re.split(rb"\r?\n\r?\n", answer.body) if block.strip()]
    return [block.startswith((b":", b"event: ping")) for block in blocks]


def _check_gaps(target: Target, times_s: Sequence[float]) -> None:
    """Check that no silence was too long, where the engine's was long enough to tell."""
    longest_s = max(after - before for before, after in pairwise(times_s))
    if longest_s > LIMITS.keep_alive_s and target.silence_s > LIMITS.keep_alive_s:
        raise Violation(f"nothing came for {longest_s:.1f} s")


@for_every_stream(
    "keep_alive_form",
    "keep-alives are comments; only Messages may use a ping event",
    clients="Node helper, AI SDK, LlamaIndex, llm",
    needs_script=True,
    is_slow=True,
)
async def _keep_alive_form(target: Target, streaming: Streaming) -> None:
    for directive in ("slow", "pause"):
        answer = await target.send(streaming.ask(target, f"[[{directive}:{target.silence_s:g}]] hello"))
        _check_keep_alives(streaming, require_stream(answer))


def _check_keep_alives(streaming: Streaming, stream: Stream) -> None:
    for event in stream.events:
        is_ping = event.name == "ping" or (event.data != DONE and event.json().members().get("type") == "ping")
        if is_ping and streaming.surface is not Surface.MESSAGES:
            raise Violation(f"event {event.number} is a ping ({event.data!r}); only comment lines are understood here")
    if not stream.comments and not any(event.name == "ping" for event in stream.events):
        raise Violation("no comment line and no ping in a stream with a long silence")


@requirement(
    "framing.no_delay", "pieces are not held back until the client acknowledges (TCP_NODELAY)",
    clients="two tools showed a flat 40 ms", needs_script=True, needs=Surface.CHAT,
)  # fmt: skip
async def _no_delay(target: Target) -> None:
    gaps = []
    for _ in range(LIMITS.gap_tries):
        connection = await Connection.open(target.base_url)
        connection.keeps_acks_back = True
        try:
            answer = await connection.exchange(STREAMING[0].ask(target, "[[pace:5]] [[thinking]] hello"))
        finally:
            await connection.close()
        require_stream(answer)
        times = [write.at_s for write in answer.writes]
        gaps.append(statistics.median(after - before for before, after in pairwise(times)))
    if min(gaps) > LIMITS.gap_s:
        raise Violation(f"pieces that the engine says every 5 ms arrive every {min(gaps) * 1000:.0f} ms")


@requirement(
    "framing.plain_json", "an answer that is not streamed is application/json, without `data:` before it",
    clients="every client (GPUStack#4648)", needs=Surface.CHAT,
)  # fmt: skip
async def _plain_json(target: Target) -> None:
    extras: tuple[dict[str, Any], ...] = ({}, {"stream": False})
    for extra in extras:
        answer = await target.chat(**extra)
        require_status(answer, 200)
        if not answer.header("content-type").startswith("application/json"):
            raise Violation(f"content-type is {answer.header('content-type')!r}")
        if answer.body.lstrip().startswith(b"data:"):
            raise Violation("the body begins with `data:`")


@requirement(
    "framing.plain_kept_alive", "the connection can be used again after an answer and after an error",
    clients="all SDKs (their pools)", needs=Surface.CHAT,
)  # fmt: skip
async def _plain_kept_alive(target: Target) -> None:
    good = target.ask_json(CHAT, target.chat_body())
    bad = replace(good, body=b"{")
    connection = await Connection.open(target.base_url)
    try:
        for ask in (good, bad, good):
            answer = await connection.exchange(ask)
            if not answer.whole:
                raise Violation(f"no whole answer: status {answer.status}, {len(answer.body)} bytes")
            connection.reuse()
    finally:
        await connection.close()


def _require_text(streaming: Streaming, answer: Answer) -> None:
    text = streaming.text(answer)
    if text != TEXT:
        raise Violation(f"the text arrives as {text!r}, the engine said {TEXT!r}")
