"""How long a prompt is, in the words of either API: ``/v1/messages/count_tokens`` and ``/v1/responses/input_tokens``.

A count is no request: it has no record, takes no slot and no place in a queue. It counts against the rate of its key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec

from gateway import metrics
from gateway.dialects.messages_request import to_chat_body
from gateway.dialects.surface import SURFACES, Surface, check_turns
from gateway.errors import ClientLeft, GatewayError, RateLimited, ShuttingDown
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection
from gateway.request.response import Application, id_headers, name_header, send_error
from gateway.request.stored import plan_storage
from gateway.token_counts import Count, run_beside
from gateway.values import Caller, Header, InferenceRequest
from gateway.views.endpoints import make_endpoint
from wire.ids import format_id, new_uuid7

_json = msgspec.json.Encoder()

ToChat = Callable[[InferenceRequest], tuple[bytes, tuple[str, ...]]]
"""Returns the body of a chat completion with the same prompt, and the names of what it leaves out. Raises BadRequest."""


@dataclass(frozen=True, slots=True)
class CountingSurface:
    """How one path is read and answered. ``plan`` finds out what the prompt of a request begins with."""

    surface: Surface
    plan: Callable[[Caller, InferenceRequest, str], Awaitable[ToChat]]
    answer: dict[str, str]
    """Members of an answer beside the count."""


def make_counting_routes(runtime: GatewayRuntime) -> dict[str, Application]:
    return {path: _make_application(runtime, counting) for path, counting in COUNTING.items()}


def _make_application(runtime: GatewayRuntime, counting: CountingSurface) -> Application:
    surface = counting.surface

    async def answer(client: ClientConnection) -> None:
        request_id = format_id("req", new_uuid7())
        extra = id_headers(request_id, is_anthropic=surface.is_anthropic)
        try:
            await _answer(runtime, client, counting, request_id=request_id, extra=extra)
        except ClientLeft:
            raise
        except GatewayError as error:
            metrics.REFUSALS.labels(error.code).inc()
            send_error(client, surface, error, request_id, extra)

    return make_endpoint(runtime, {"POST": answer}, surface=surface)


async def _answer(
    runtime: GatewayRuntime, client: ClientConnection, counting: CountingSurface, *, request_id: str, extra: list[Header]
) -> None:
    surface, limiter = counting.surface, runtime.limiter
    if runtime.pipeline.is_stopping:
        raise ShuttingDown(retry_after_s=2)
    caller = await runtime.keys.identify(client.headers, address=client.address, scope=client.scope)
    body = await client.read_body()
    try:
        rate = limiter.take(caller.key_id, caller.requests_per_minute)
    except RateLimited:
        extra += limiter.peek(caller.key_id, caller.requests_per_minute).headers(is_anthropic=surface.is_anthropic)
        raise
    extra += rate.headers(is_anthropic=surface.is_anthropic)
    request = await run_beside(len(body), lambda: surface.parse(body, client.headers))
    entry = runtime.pipeline.admission.route(caller, request.model, request.paths, request.options)[0]
    to_chat = await counting.plan(caller, request, request_id)
    chat, ignored = await run_beside(len(body), lambda: to_chat(surface.rename(request, entry.name)))
    count = await runtime.pipeline.counter.count(entry, chat, tenant=caller.tenant, request_id=request_id)
    extra += _describe(count, entry.name, ignored)
    content: dict[str, object] = {**counting.answer, "input_tokens": count.tokens}
    if count.is_estimated:
        content["estimated"] = True
    client.respond(200, [(b"content-type", b"application/json"), *extra], _json.encode(content))


def _describe(count: Count, model: str, ignored: tuple[str, ...]) -> list[Header]:
    headers = [(b"x-muster-token-count", count.source.value.encode()), name_header(b"x-muster-model", model)]
    if count.node:
        headers.append(name_header(b"x-muster-node", count.node))
    if ignored:
        headers.append(name_header(b"x-muster-ignored", ", ".join(ignored)))
    return headers


async def _plan_messages(_caller: Caller, _request: InferenceRequest, _request_id: str) -> ToChat:
    return lambda request: to_chat_body(request.body, is_counting=True)


async def _plan_responses(caller: Caller, request: InferenceRequest, request_id: str) -> ToChat:
    storage = await plan_storage(caller, request, request_id) if request.previous_response_id else None
    translate = storage.translate if storage is not None else SURFACES["/v1/responses"].translate
    assert translate is not None

    def to_chat(renamed: InferenceRequest) -> tuple[bytes, tuple[str, ...]]:
        translation = translate(renamed)
        return translation.body, translation.ignored

    return to_chat


COUNTING: dict[str, CountingSurface] = {
    "/v1/messages/count_tokens": CountingSurface(replace(SURFACES["/v1/messages"], check=check_turns), _plan_messages, {}),
    "/v1/responses/input_tokens": CountingSurface(
        SURFACES["/v1/responses"], _plan_responses, {"object": "response.input_tokens"}
    ),
}
