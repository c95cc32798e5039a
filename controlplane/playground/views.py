"""The page, what it sends, the code it shows and the record it follows. Each view only translates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from http import HTTPStatus
from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import render
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_POST, require_safe

from controlplane.playground.asks import (
    IMAGE_TYPES,
    PRIORITIES,
    SURFACES,
    Ask,
    AskRefused,
    AskTooLarge,
    NotAllowed,
    PlaygroundError,
    SignedOut,
    SurfaceName,
    build_body,
    build_wish,
    read_ask,
)
from controlplane.playground.keys import lend_key, may_lend, may_play, may_see_records
from controlplane.playground.relay import Call, Relay, find_gateway_url
from controlplane.playground.snippets import ANTHROPIC_VERSION, write_code
from core.limits import limits
from gateway.routing import AUTO
from gateway.services.errors import ServiceError
from gateway.services.explanations import explain_waits
from gateway.services.models import list_offers
from gateway.services.requests import find_request
from gateway.services.tenants import list_tenants
from gateway.values import TICKETS_PATH
from governance.web.pages import ADMIN_POLICY, describe_refusal, refuse, script_answer
from nodes.services.availability import list_models_without, read_fleet
from nodes.services.tickets import list_ticket_origins
from wire import clock
from wire.credentials import CredentialKind, parse_keyid
from wire.ids import parse_id

DEFAULT_TENANT = "default"
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
SAID_BY_SCRIPTS = (
    gettext_noop("This image is too large. Make it smaller and choose it again."),
    gettext_noop("{count} characters of base64: {text}…"),
    gettext_noop("{count} numbers: {text}"),
    gettext_noop("The connection to the control plane broke off."),
    gettext_noop("The connection to the node broke off."),
    gettext_noop("Check the network, then send again ({name})."),
    gettext_noop("the gateway"),
    gettext_noop("the gateway, for a ticket"),
    gettext_noop("The gateway, because no node that clients reach has the model and a free slot."),
    gettext_noop(
        "The gateway, because browsers let no page of https ask {host} by http. Give the node a --ticket-url of https."
    ),
    gettext_noop("the node itself, at {host}"),
    gettext_noop(
        "The gateway, because this browser got no answer from {host}. Start that node with {origins}, see that this machine "
        "reaches it and trusts its certificate, and reload this page if the node is new."
    ),
    gettext_noop("The answer broke off before its end."),
    gettext_noop("The page of the request says more. Send again."),
    gettext_noop("The control plane answered {status}."),
    gettext_noop("Reload this page; you may have been signed out."),
    gettext_noop("The gateway answered {status} and nothing that can be read."),
    gettext_noop("It stands below, as it came."),
    gettext_noop("The gateway asks to wait for {wait} s."),
    gettext_noop("Sign in"),
    gettext_noop("… the rest is not kept."),
    gettext_noop("Answering…"),
    gettext_noop("Not sent: see the form."),
    gettext_noop("Nothing asked."),
    gettext_noop("stopped by you"),
    gettext_noop("Stopped."),
    gettext_noop("Request failed."),
    gettext_noop("Done."),
    gettext_noop("Stopped before anything came."),
    gettext_noop("The answer is empty."),
    gettext_noop("Sent. Waiting for the answer…"),
    gettext_noop("A key that this page made was revoked: send again, and it makes another. A key of your own: check it."),
    gettext_noop("Choose a model that a node serves, or look under Nodes why no node takes work."),
    gettext_noop("Undrain a node under Nodes, or choose another model."),
    gettext_noop("Allow the model under Models, or choose another one."),
    gettext_noop("Wait a moment, then send again. The limit stands under Tenants."),
    gettext_noop("Shorten the prompt, or choose a model with a larger window."),
    gettext_noop("Shorten the prompt or lower Max tokens, or choose a model with a larger window."),
    gettext_noop("Lower Max tokens."),
    gettext_noop("Every node was busy, or the model is slow. Send again, or ask for fewer tokens."),
    gettext_noop("The engine on the node failed; the log of the node says why."),
    gettext_noop("The node went away in the middle. Send again."),
    gettext_noop("Copy"),
    gettext_noop("Copied"),
    gettext_noop("Selected: press Ctrl+C"),
    gettext_noop("The control plane did not answer, so the code may be old. Reload the page."),
)
"""What the scripts of the page say, {name} for a value; a test keeps both in step."""
_TRIAL = "Say hello in one sentence."
_encode = msgspec.json.Encoder().encode

Answer = Callable[[HttpRequest], HttpResponse]


@require_safe
def show_playground(request: HttpRequest) -> HttpResponse:
    """Show the form. It works without a gateway; only sending needs one."""
    if not may_play(request):
        raise PermissionDenied
    offers, fleet, origins = list_offers(), read_fleet(), list_ticket_origins(limits().console.playground_nodes)
    served, silent, wanted = (
        fleet.served_models,
        list_models_without(SURFACES[SurfaceName.CHAT].path),
        request.GET.get("model", ""),
    )
    chatty = () if wanted else tuple(name for name in offers.models if name not in silent)
    tenants = [tenant.name for tenant in list_tenants() if tenant.is_active]
    context: dict[str, Any] = {  # Any: Django's template context
        **admin.site.each_context(request),
        "title": _("Playground"),
        "surfaces": SURFACES.values(),
        "models": [(name, name in served) for name in offers.models],
        "chosen_model": choose_model(chatty or offers.models, free=fleet.free_models, served=served, wanted=wanted),
        "is_any_served": not served.isdisjoint(offers.models),
        "aliases": offers.aliases,
        "may_lend": may_lend(request),
        "tenants": tenants,
        "chosen_tenant": DEFAULT_TENANT if DEFAULT_TENANT in tenants else next(iter(tenants), ""),
        "priorities": PRIORITIES,
        "image_types": ",".join(IMAGE_TYPES),
        "max_image_bytes": limits().console.playground_image_bytes,
        "has_ticket_nodes": bool(origins),
        "words": {text: _(text) for text in SAID_BY_SCRIPTS},
    }
    policy = ADMIN_POLICY.replace("connect-src 'self'", " ".join(["connect-src 'self'", *origins]))
    headers = {"Content-Security-Policy": policy}
    return TemplateResponse(request, "admin/muster/playground.html", context, headers=headers)


def choose_model(names: Sequence[str], *, free: Collection[str], served: Collection[str], wanted: str = "") -> str:
    """Return the model that the page preselects: the one that a link names, else one with a free slot, else one that is served,
    else the first; "" of none.
    """
    if wanted in names:
        return wanted
    best = [name for name in names if name in free] or [name for name in names if name in served] or names
    return next(iter(best), "")


def _for_script(view: Answer) -> Answer:
    """Let a view answer a script of the page."""

    @wraps(view)
    def guarded(request: HttpRequest) -> HttpResponse:
        _require_player(request)
        return view(request)

    return script_answer(guarded)


@require_POST
@_for_script
def show_code(request: HttpRequest) -> HttpResponse:
    """Answer the form as programs."""
    data = _read_form(request)
    answer: dict[str, Any]  # JSON
    try:
        base_url = str(settings.GATEWAY_PUBLIC_URL).rstrip("/") or find_gateway_url()
        answer = asdict(write_code(read_ask(data, is_draft=True), base_url=base_url))
    # With 200: a form being filled in is no failure.
    except AskRefused as refusal:
        answer = describe_refusal(refusal)
    return JsonResponse(answer)


@require_POST
async def send(request: HttpRequest) -> HttpResponse | StreamingHttpResponse:
    """Ask the gateway, and stream what it says to the page as it comes. When the page leaves, the request is cancelled."""
    try:
        asked = await database_sync_to_async(_prepare, thread_sensitive=False)(request)
        relay = Relay(Call(path=asked.ask.surface.path, body=_encode(build_body(asked.ask)), headers=asked.headers))
        head = await relay.head()
    except (PlaygroundError, ServiceError) as refusal:
        return refuse(refusal)
    record = asked.find_record(head.headers.get("x-request-id", ""))
    headers = {**head.headers, **_STREAM_HEADERS, **({"x-playground-record": record} if record else {})}
    return StreamingHttpResponse(relay, status=head.status, headers=headers)


@require_POST
async def try_key(request: HttpRequest) -> HttpResponse:
    """Ask a model one short question with a key that was just made, and answer what came of it as a part of a page."""
    key, model = request.POST.get("key", ""), request.POST.get("model", "")
    try:
        may_see = await database_sync_to_async(_require_maker, thread_sensitive=False)(request)
    except PlaygroundError as refusal:
        return refuse(refusal)
    if parse_keyid(key, CredentialKind.CLIENT) is None:
        return render(request, "admin/muster/trial.html", {"error": _("This is no API key; one looks like mst_….")})
    return await show_trial(request, Trial(key, model), may_see=may_see)


@dataclass(frozen=True, slots=True)
class Trial:
    """One short question to a model. ``node``: which one shall answer, empty = any."""

    key: str = field(repr=False)
    model: str
    node: str = ""


async def show_trial(request: HttpRequest, trial: Trial, *, may_see: bool) -> HttpResponse:
    """Ask it, and answer what came of it as a part of a page. ``may_see``: whether the person may look at the record."""
    question: dict[str, Any] = {  # JSON
        "model": trial.model,
        "max_tokens": limits().console.playground_trial_tokens,
        "messages": [{"role": "user", "content": _TRIAL}],
        **({"x_pool_options": {"prefer_gpu": trial.node}} if trial.node else {}),
    }
    headers = {"authorization": f"Bearer {trial.key}", "content-type": "application/json", "accept-encoding": "identity"}
    began = clock.monotonic()
    try:
        relay = Relay(Call(path=SURFACES[SurfaceName.CHAT].path, body=_encode(question), headers=headers))
        head = await relay.head()
        said = b"".join([chunk async for chunk in relay])
    except PlaygroundError as refusal:
        return render(request, "admin/muster/trial.html", {"error": refusal.message})
    node = head.headers.get("x-muster-node", "")
    context = {**_read_trial(head.status, said), "seconds": clock.monotonic() - began, "node": node}
    if trial.node and node and node != trial.node:
        context["error"] = _("%(other)s answered instead of %(node)s, which has no free slot now.") % {
            "other": node, "node": trial.node,
        }  # fmt: skip
    if may_see:
        context["record"] = find_record_url(head.headers.get("x-request-id", ""))
    return render(request, "admin/muster/trial.html", context)


def _read_trial(status: int, said: bytes) -> dict[str, object]:
    """Return ``text`` of an answer, or ``error`` of what the gateway or the engine said instead."""
    try:
        answer = msgspec.json.decode(said)
        if status == HTTPStatus.OK:
            return {"text": str(answer["choices"][0]["message"]["content"] or "")}
        return {"error": str(answer["error"]["message"])}
    except (msgspec.DecodeError, LookupError, TypeError):
        return {"error": _("The gateway answered with status %(status)s and nothing that can be read.") % {"status": status}}


def _require_maker(request: HttpRequest) -> bool:
    """Let nobody pass who may not make keys; return whether they may see records. Runs in a thread."""
    _require_player(request)
    if not may_lend(request):
        raise NotAllowed(_("You may not make API keys."))
    return may_see_records(request)


@require_POST
async def ask_ticket(request: HttpRequest) -> HttpResponse:
    """Ask the gateway for a ticket, and answer what the page then sends to the node, and where; or that it is to be relayed."""
    try:
        asked = await database_sync_to_async(_prepare, thread_sensitive=False)(request)
        relay = Relay(Call(path=TICKETS_PATH, body=_encode(build_wish(asked.ask)), headers=asked.headers))
        head = await relay.head()
        said = b"".join([chunk async for chunk in relay])
    except (PlaygroundError, ServiceError) as refusal:
        return refuse(refusal)
    headers = {**head.headers, **_STREAM_HEADERS}
    if head.status != HTTPStatus.CREATED:
        return HttpResponse(said, status=head.status, headers=headers)
    given = msgspec.json.decode(said)
    printed = head.headers.get("x-request-id", "")
    answer = {
        "url": given["base_url"] + asked.ask.surface.path.removeprefix("/v1"),
        "ticket": given["ticket"],
        "body": {**build_body(replace(asked.ask, pool_options={})), "model": given["model"]},
        "model": given["model"],
        "request": printed,
        "record": asked.find_record(printed),
    }
    return HttpResponse(_encode(answer), headers=headers)


@require_safe
@_for_script
def show_facts(request: HttpRequest) -> HttpResponse:
    """Answer how a request stands, by ``?request=req_…``. Whoever may not see records is refused."""
    if not may_see_records(request):
        raise NotAllowed(_("You may not look at request records."))
    printed = request.GET.get("request", "")
    record_id = parse_id("req", printed)
    facts = find_request(record_id) if record_id is not None else None
    if facts is None:
        raise AskRefused(_("There is no such request (yet)."), param="request")
    return JsonResponse({**facts, "url": find_record_url(printed)})


@require_safe
@_for_script
def show_wait(request: HttpRequest) -> HttpResponse:
    """Answer in words why a request for ``?model=`` (``&tenant=`` has aliases of its own) would wait now, "" if not."""
    asked, tenant = request.GET.get("model", ""), request.GET.get("tenant", "")
    found = [alias for alias in list_offers().aliases if alias.name == asked and alias.tenant in ("", tenant)]
    models = max(found, key=lambda alias: alias.tenant).models if found else (asked,)
    waits = list(explain_waits(models[: limits().console.playground_explained]).values()) if asked and asked != AUTO else []
    is_held_up = bool(waits) and not any(wait.is_starting for wait in waits)
    why = f"Waiting. {waits[0].reason} {waits[0].advice}" if is_held_up else ""
    return JsonResponse({"why": why})


def find_record_url(printed_id: str) -> str:
    """Return the page of a request, "" without an id."""
    record_id = parse_id("req", printed_id)
    return reverse("admin:gateway_requestrecord_change", args=[record_id]) if record_id is not None else ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a person asks. ``headers`` hold the key; ``may_see``: whether that person may look at records."""

    ask: Ask
    headers: dict[str, str] = field(repr=False)
    may_see: bool

    def find_record(self, printed_id: str) -> str:
        return find_record_url(printed_id) if self.may_see else ""


def _prepare(request: HttpRequest) -> _Asked:
    """Return what to ask; runs in a thread. Raises PlaygroundError, ServiceError."""
    _require_player(request)
    ask = read_ask(_read_form(request))
    if may_lend(request):
        key = lend_key(request, ask.tenant)
    elif ask.own_key:
        key = ask.own_key
    else:
        raise AskRefused(_("Paste an API key of yours: you may not make one."), param="key")
    if not (key.isascii() and key.isprintable()):
        raise AskRefused(_("This is no API key; one looks like mst_…."), param="key")
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "accept-encoding": "identity"}
    if ask.surface.name is SurfaceName.MESSAGES:
        headers["anthropic-version"] = ANTHROPIC_VERSION
    headers["user-agent"] = "muster-playground"
    return _Asked(ask, headers, may_see_records(request))


def _require_player(request: HttpRequest) -> None:
    if not request.user.is_authenticated:
        raise SignedOut
    if not may_play(request):
        raise NotAllowed(_("Your account may not use the playground."))


def _read_form(request: HttpRequest) -> bytes:
    if request.content_type != "application/json":
        raise AskRefused(_("The page sent something that cannot be read. Reload it and try again."))
    # As a stream: Django's limit for forms is below that of a picture.
    data = request.read(limits().console.playground_form_bytes + 1)
    if len(data) > limits().console.playground_form_bytes:
        raise AskTooLarge(
            f"This is more than {limits().console.playground_form_bytes >> 20} MB. Take a smaller image or a shorter prompt."
        )
    return bytes(data)


app_name = "playground"
# Below ``/admin/``, where a session without a passkey may only look.
urlpatterns = [
    path("", admin.site.admin_view(show_playground), name="page"),
    path("send", send, name="send"),
    path("ticket", ask_ticket, name="ticket"),
    path("trial", try_key, name="trial"),
    path("code", show_code, name="code"),
    path("facts", show_facts, name="facts"),
    path("wait", show_wait, name="wait"),
]
