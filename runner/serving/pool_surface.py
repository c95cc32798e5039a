"""llm-pool's ``POST /v1/responses``: the request as a chat completion through ``Serving``, the answer in the pool's shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from runner.definitions.fields import Decoding
from runner.engines.port import CHAT
from runner.errors import EngineUnavailable
from runner.serving.request import Answer, Inference, Numbers
from runner.serving.responses import (
    PoolMetrics,
    ResponseBuilder,
    make_metrics,
    read_pool_request,
    to_chat,
)
from runner.serving.service import Serving
from wire import clock

log = logging.getLogger(__name__)


class PoolSurface:
    """``defaults`` gives the decoding defaults of the settings as they are now."""

    def __init__(self, serving: Serving, defaults: Callable[[], Decoding]) -> None:
        self._serving = serving
        self._defaults = defaults

    @asynccontextmanager
    async def open(self, request: Inference) -> AsyncIterator[Answer]:
        """Serve a request in the pool's shape. Raises RequestRefused."""
        began = clock.monotonic()
        wanted = read_pool_request(request.body, defaults=self._defaults())
        model = self._serving.registry.find(wanted.model)
        chat = to_chat(wanted, model.definition)
        if chat.ignored:
            log.info("decoding fields ignored model=%s fields=%s", model.model_id, ",".join(chat.ignored))
        inner = replace(
            request, path=CHAT, body=chat.body, model=wanted.model, is_streaming=wanted.stream, allow_remote=wanted.allow_remote
        )
        async with self._serving.open(inner) as answer:
            if answer.status >= 300:
                yield answer
                return
            builder = ResponseBuilder(model=wanted.model)
            if answer.chunks is not None and answer.is_event_stream:
                headers = {**answer.headers, "content-type": "text/event-stream; charset=utf-8"}
                chunks = _translate(answer, builder, began)
                outer = Answer(answer.status, headers, chunks=chunks, is_event_stream=True, numbers=answer.numbers)
                yield outer
                outer.usage = answer.usage
                return
            builder.take_answer(await _collect(answer))
            metrics = _measure(answer.numbers, builder, began, first_ms=None)
            # Some providers answer a request for a stream with one JSON object.
            body = builder.to_events(metrics) if wanted.stream else builder.to_json(metrics)
            media_type = "text/event-stream; charset=utf-8" if wanted.stream else "application/json"
            headers = {**answer.headers, **answer.numbers.headers(), "content-type": media_type}
            headers["content-length"] = str(len(body))
            yield Answer(
                answer.status, headers, body=body, is_event_stream=wanted.stream, usage=answer.usage, numbers=answer.numbers
            )


async def _translate(answer: Answer, builder: ResponseBuilder, began: float) -> AsyncIterator[bytes]:
    """Yield the pool's events as text comes; an engine that breaks off ends in one error event."""
    assert answer.chunks is not None
    sent_at, first_ms = clock.monotonic(), None
    yield builder.begin()
    try:
        async for chunk in answer.chunks:
            out = builder.feed(chunk)
            if first_ms is None and builder.has_text:
                first_ms = (clock.monotonic() - sent_at) * 1000
            if out:
                yield out
    except EngineUnavailable as error:
        answer.has_failed = True
        yield builder.fail(error.code, error.message)
        return
    last = builder.finish(_measure(answer.numbers, builder, began, first_ms=first_ms))
    answer.has_failed = answer.has_failed or builder.has_failed
    yield last + answer.numbers.comment()


async def _collect(answer: Answer) -> bytes:
    if answer.body is not None:
        return answer.body
    assert answer.chunks is not None
    return b"".join([chunk async for chunk in answer.chunks])


def _measure(numbers: Numbers, builder: ResponseBuilder, began: float, *, first_ms: float | None) -> PoolMetrics:
    return make_metrics(
        backend_ms=numbers.wall_ms,
        engine_ms=numbers.wall_ms + numbers.queue_wait_ms,
        pool_ms=(clock.monotonic() - began) * 1000,
        queue_wait_ms=numbers.queue_wait_ms,
        tokenize_ms=builder.tokenize_ms if builder.tokenize_ms is not None else numbers.tokenize_ms,
        first_token_ms=first_ms,
        generate_ms=builder.generate_ms,
        prompt_tokens=builder.prompt_tokens,
        output_tokens=builder.output_tokens,
    )
