"""Serving a stream to another gateway: the node's socket is here, the client is there."""

from __future__ import annotations

import hmac
from itertools import count

from django.conf import settings

from core.limits import limits
from gateway.dialects.surface import DEFAULT_SURFACE, SURFACES, Surface
from gateway.errors import GatewayError, RouteNotFound
from gateway.process import GatewayRuntime
from gateway.request.attempt import Exchange
from gateway.request.candidates import Candidate
from gateway.request.client import ClientConnection, Receive, Scope, Send
from gateway.request.dispatch import Job, Lease
from gateway.request.outcomes import Broken, Retry, RetryReason, Served
from gateway.request.response import Application, read_name
from gateway.token_counts import exchange as ask_node
from gateway.values import CHAT_PATH, Header, InferenceRequest, ModelEntry
from gateway.views.endpoints import make_client, send_failure
from nodes.links import Link
from nodes.links.http import END_HEADER
from nodes.links.relay import RelayLink
from nodes.session import OpenRequest
from nodes.states import CONTINUATIONS, POOL_RESPONSES, TOKENIZE
from wire import clock
from wire.ids import parse_id

_sequence = count(1)
_JSON = [(b"content-type", b"application/json")]
_NO_HEADERS: list[Header] = []
_SPOKEN_AS = {POOL_RESPONSES: "/v1/responses", CONTINUATIONS: CHAT_PATH}
"""The surface whose words are spoken on an API path of nodes alone."""


async def serve_peer(runtime: GatewayRuntime, *, client: ClientConnection, link: Link, surface: Surface, path: str) -> None:
    """Run one attempt on ``link`` for a peer. What did not start is said in a header, what broke is cut.

    ``path``: the API path on which the node is asked.
    """
    bounds = runtime.limits
    body = await client.read_body(bounds.max_audio_bytes if surface.is_form else bounds.max_body_bytes + bounds.kept_bytes)
    headers = client.headers
    request = InferenceRequest(
        endpoint=surface.path,
        paths=(path,),
        model=read_name(headers, "x-muster-model", max_chars=200),
        is_streaming=headers.get("x-muster-streaming") == "1",
        body=body,
        headers={name: value for name, value in headers.items() if name in surface.forwarded},
    )
    job = Job(
        request_id=headers.get("x-request-id", "")[:80],
        candidates=(Candidate(_name_model(request.model), request),),
        tenant=read_name(headers, "x-muster-tenant", max_chars=80),
        priority=headers.get("x-muster-priority", "")[:10],
        sequence=next(_sequence),
        accepted=clock.monotonic(),
        deadline=clock.monotonic() + _read_number(headers.get("x-muster-deadline-ms")) / 1000,
        attempts=_read_number(headers.get("x-muster-attempt")) or 1,
    )
    if not link.can_take(clock.monotonic()):
        refuse_peer(client, b"busy")
        return
    if not link.answers(request.model, path):  # unloaded since the peer last looked
        refuse_peer(client, b"gone")
        return
    link.active += 1
    lease = Lease(runtime.dispatcher, link, path)
    client.watch()
    exchange = Exchange(job=job, lease=lease, client=client, surface=None, limits=bounds, extra=_NO_HEADERS)
    try:
        outcome = await exchange.run()
        await client.drain()
    except GatewayError:
        return  # the peer hung up; the exchange let go of the node
    finally:
        client.unwatch()
    match outcome:
        case Retry(reason=RetryReason.BUSY):
            refuse_peer(client, b"busy")
        case Retry():
            refuse_peer(client, b"gone")
        case Broken(told=False):
            client.abort()
        case Served() | Broken():
            pass


def _name_model(name: str) -> ModelEntry:
    return ModelEntry(name=name, allowed=True, owned_by="", max_tokens=0, max_prompt_chars=0, max_queue=0, created=0)


def refuse_peer(client: ClientConnection, word: bytes) -> None:
    """Tell a peer that nothing was started: ``busy`` (try later) or ``gone`` (try elsewhere)."""
    client.respond(503, [(END_HEADER.encode(), word)], b"")


def _read_number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 18 else 0


async def count_for_peer(client: ClientConnection, link: Link) -> None:
    """Pass a question on to the node and its answer back; 502 when there is none. Raises BodyTooLarge, ClientLeft."""
    body = await client.read_body(limits().gateway.count_body_bytes)
    headers = client.headers
    most_ms = limits().gateway.count_node_ms
    request = OpenRequest(
        request_id=headers.get("x-request-id", "")[:80],
        attempt=1,
        model=read_name(headers, "x-muster-model", max_chars=200),
        path=TOKENIZE,
        body=body,
        headers={"content-type": "application/json"},
        is_streaming=False,
        deadline_ms=min(_read_number(headers.get("x-muster-deadline-ms")) or most_ms, most_ms),
        tenant=read_name(headers, "x-muster-tenant", max_chars=80),
    )
    try:
        answer = await ask_node(link, request) if TOKENIZE in link.endpoints.get(request.model, ()) else None
    except TimeoutError:
        answer = None
    if answer is None:
        client.respond(502, _JSON, b"{}")
    else:
        client.respond(answer[0], _JSON, answer[1])


def make_peer_application(runtime: GatewayRuntime) -> Application:
    """Return the application behind ``/internal/v1/nodes/{node}/{path}``; without a cluster secret it does not exist."""

    async def application(scope: Scope, receive: Receive, _send: Send) -> None:
        client = make_client(runtime, scope, receive)
        secret = settings.CLUSTER_SECRET
        shown = client.headers.get("x-muster-cluster", "")
        route = scope["url_route"]["kwargs"]
        path = "/" + str(route["path"])
        surface = SURFACES.get(_SPOKEN_AS.get(path, path))
        is_known = surface is not None or path == TOKENIZE
        if not secret or not hmac.compare_digest(shown.encode(), secret.encode()) or not is_known:
            send_failure(client, RouteNotFound(), DEFAULT_SURFACE)
            return
        node_id = parse_id("node", str(route["node"]))
        link = runtime.registry.get(node_id) if node_id is not None else None
        if not isinstance(link, RelayLink):
            refuse_peer(client, b"gone")
            return
        try:
            if surface is None:
                await count_for_peer(client, link)
            else:
                await serve_peer(runtime, client=client, link=link, surface=surface, path=path)
        except GatewayError as error:
            if not client.started and not client.is_gone:
                send_failure(client, error, DEFAULT_SURFACE)

    return application
