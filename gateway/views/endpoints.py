"""What every endpoint shares: turning a scope into a client, picking a handler by method, rendering errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from channels.consumer import AsyncConsumer
from django.conf import settings
from django.db import DatabaseError

from core.db.threads import run_in_database
from core.roles import find_tenants, may
from gateway.dialects.surface import DEFAULT_SURFACE, SURFACES, Surface
from gateway.errors import (
    ClientLeft,
    GatewayError,
    InvalidAdminToken,
    MethodNotAllowed,
    NotPermitted,
    RateLimited,
    RecordsUnavailable,
)
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection, Receive, Scope, Send
from gateway.request.response import Application, admit_origin, answer_preflight, id_headers, send_error
from gateway.values import Header, HeaderView
from governance.admin_tokens import TokenHolder, find_holder
from governance.errors import TooManyWrongTokens
from nodes.links import Link
from wire.ids import format_id, new_uuid7

logger = logging.getLogger("muster.gateway")

Handler = Callable[[ClientConnection], Awaitable[None]]
_json = msgspec.json.Encoder()
_MESSAGES = "/v1/messages"
_FOR_PAGES = ("/v1/", "/models")
_JSON_TYPE: Header = (b"content-type", b"application/json")


def make_client(
    runtime: GatewayRuntime,
    scope: Scope,
    receive: Receive,
    *,
    headers: HeaderView | None = None,
    body: bytes | None = None,
) -> ClientConnection:
    """Return the client of a scope, under this process's limits. ``headers``, ``body``: where the server has them already."""
    client = ClientConnection(scope, receive, limits=runtime.limits, headers=headers, body=body)
    if settings.CORS_ORIGINS and scope["path"].startswith(_FOR_PAGES):
        client.common = admit_origin(client.headers, settings.CORS_ORIGINS)
    return client


def make_preflight(runtime: GatewayRuntime) -> Application:
    async def application(scope: Scope, receive: Receive, _send: Send) -> None:
        client = make_client(runtime, scope, receive)
        answer_preflight(client)
        await client.drain()

    return application


def make_endpoint(runtime: GatewayRuntime, methods: dict[str, Handler], *, surface: Surface | None = None) -> Application:
    """Return an application that picks a handler by method and says errors as ``surface`` does, None = as the client asks."""
    allowed = ", ".join(sorted(methods)).encode()

    async def application(scope: Scope, receive: Receive, _send: Send) -> None:
        client = make_client(runtime, scope, receive)
        said_by = surface or _surface_of(client)
        try:
            handler = methods.get(scope["method"])
            if handler is None:
                send_failure(client, MethodNotAllowed(f"Use {allowed.decode()}."), said_by, [(b"allow", allowed)])
                return
            await handler(client)
            await client.drain()
        except ClientLeft:
            return
        except GatewayError as error:
            send_failure(client, error, said_by)
        except DatabaseError:
            logger.exception("request.database_unavailable")
            message = "The database cannot be reached now; please retry"
            send_failure(client, RecordsUnavailable(message, retry_after_s=2), said_by)
        except Exception:  # process edge: a bug of ours must not lose the answer
            logger.exception("request.bug")
            if not client.started:
                send_failure(client, GatewayError(), said_by)

    return application


def send_answer(client: ClientConnection, status: int, content: object) -> None:
    ids = id_headers(format_id("req", new_uuid7()), is_anthropic="anthropic-version" in client.headers)
    client.respond(status, [_JSON_TYPE, *ids], _json.encode(content))


def send_failure(client: ClientConnection, error: GatewayError, surface: Surface, extra: list[Header] | None = None) -> None:
    request_id = format_id("req", new_uuid7())
    send_error(client, surface, error, request_id, [*id_headers(request_id, is_anthropic=surface.is_anthropic), *(extra or [])])


async def find_admin(client: ClientConnection) -> TokenHolder | None:
    """Return who calls with an admin token ("Bearer" may be left out), or None. Raises RateLimited."""
    text = client.headers.get("authorization", "").strip()
    if text[:7].lower() == "bearer ":
        text = text[7:].strip()
    try:
        return await run_in_database(find_holder, text, address=client.address) if text else None
    except TooManyWrongTokens as error:
        raise RateLimited(error.message, retry_after_s=error.retry_after_s) from None


async def require_admin(client: ClientConnection, permission: str, *, is_per_tenant: bool = False) -> TokenHolder:
    """Return who calls with an admin token whose role has a permission; ``is_per_tenant``: at least in some tenants.

    Raises InvalidAdminToken, NotPermitted.
    """
    holder = await find_admin(client)
    if holder is None:
        raise InvalidAdminToken
    if not may(holder, permission) and not (is_per_tenant and find_tenants(holder, permission)):
        raise NotPermitted(f"This admin token may not do this: its role needs the permission {permission}.")
    return holder


def is_draining(link: Link) -> bool:
    policy = link.policy
    return policy.draining or policy.cordoned or policy.reclaimed or link.node_draining


def _surface_of(client: ClientConnection) -> Surface:
    is_anthropic = "anthropic-version" in client.headers or str(client.scope["path"]).startswith(_MESSAGES)
    return SURFACES[_MESSAGES] if is_anthropic else DEFAULT_SURFACE


async def _ask_nobody() -> dict[str, Any]:
    """Stand for the server's ``receive`` where the body is there already."""
    raise NotImplementedError


class InferenceConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """A request to an inference surface, as Channels consumes it: one event, read and answered by its client.

    No channel layer has a part in it, and no thread is asked to look after Django's connections: it uses none.
    """

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def __call__(self, scope: Scope, receive: Receive, _send: Send) -> None:
        self.scope, self.receive = scope, receive
        await self.dispatch({"type": "http.request"})

    async def dispatch(self, message: dict[str, object]) -> None:
        await self.http_request(message)

    async def http_request(self, _message: dict[str, object]) -> None:
        await self._inference.serve_scope(self.scope, self.receive)


class Inference:
    """One inference surface, for requests that come by Channels and for those that the server has whole."""

    def __init__(self, runtime: GatewayRuntime, surface: Surface) -> None:
        self._runtime = runtime
        self.surface = surface

    async def serve_scope(self, scope: Scope, receive: Receive) -> None:
        client = make_client(self._runtime, scope, receive)
        if scope["method"] != "POST":
            send_failure(client, MethodNotAllowed("Use POST."), self.surface, [(b"allow", b"POST")])
            return
        await self.serve(client, self._runtime.pipeline.serve(client, self.surface))

    def make_client(self, scope: Scope, headers: HeaderView, body: bytes) -> ClientConnection:
        return make_client(self._runtime, scope, _ask_nobody, headers=headers, body=body)

    async def serve(self, client: ClientConnection, answering: Coroutine[Any, Any, None]) -> None:
        try:
            await answering
            await client.drain()
        except ClientLeft:
            return
        except Exception:  # process edge: a bug of ours must not lose the answer
            logger.exception("request.bug")
            if not client.started and not client.is_gone:
                send_failure(client, GatewayError(), self.surface)
            else:
                client.abort()
