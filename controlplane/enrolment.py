"""The pages that add nodes and lead through a first start: what to paste, and what has been reached, up to a first answer."""

from __future__ import annotations

from typing import Any

from channels.db import database_sync_to_async
from django import forms
from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from controlplane.playground.asks import AskRefused, PlaygroundError
from controlplane.playground.keys import lend_key, may_lend, may_play, may_see_records
from controlplane.playground.views import DEFAULT_TENANT, Trial, show_trial
from core.admin_pages import name_actor
from core.errors import ContractError
from core.limits import limits
from core.models import User
from core.roles import may
from gateway.admin.callers import choose_chat_model, describe_key
from gateway.services.keys import create_api_key
from gateway.services.models import allow_model, list_offers
from gateway.services.tenants import list_tenants
from governance.keys import list_keys
from governance.signin import may_act
from nodes.services.availability import read_fleet
from nodes.services.credentials import create_credential, list_provider_names
from nodes.services.enrolment import (
    CHOICES,
    Reached,
    Software,
    create_setup_code,
    is_local,
    read_reached,
    write_commands,
)

ADD_CREDENTIAL = "nodes.add_nodecredential"
CHANGE_MODEL = "gateway.change_model"


class SetupForm(forms.Form):
    """What the machine is called and what it runs."""

    software = forms.ChoiceField(
        label=gettext_lazy("What does it run?"),
        choices=[(choice.software.value, choice.label) for choice in CHOICES],
        initial=Software.OURS.value,
        widget=forms.RadioSelect,
    )
    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=limits().nodes.credential_name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Of the node and its credential, such as rack-2."),
    )
    provider = forms.ChoiceField(
        label=gettext_lazy("Provider"),
        widget=UnfoldAdminSelectWidget,
        help_text=gettext_lazy("Nodes of a provider are switched on and off together."),
    )

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # Django's form arguments
        names = list_provider_names()
        field = self.fields["provider"]
        assert isinstance(field, forms.ChoiceField)
        field.choices = [(name, name) for name in names]
        if len(names) == 1:
            field.widget, field.initial = forms.HiddenInput(), names[0]


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def show_setup(request: HttpRequest) -> HttpResponse:
    """Ask what the node runs; on POST make its credential, or a code for somebody else, and show what is pasted there."""
    if not may(request.user, ADD_CREDENTIAL):
        raise PermissionDenied
    # Providers that are hidden have one value, which a form that was sent without it does not lose.
    form = SetupForm(request.POST if request.method == "POST" else None)
    context = {**admin.site.each_context(request), "title": _("Add a node"), "form": form, "choices": CHOICES}
    if request.method != "POST" or not form.is_valid() or not may_act(request):
        return TemplateResponse(request, "admin/muster/setup.html", context)
    said, gateway = form.cleaned_data, str(settings.GATEWAY_PUBLIC_URL).rstrip("/")
    try:
        if "code" in request.POST:
            code, text = create_setup_code(name=said["name"], provider_name=said["provider"], actor=name_actor(request))
            credential = code.credential
            context |= {"code": text, "code_url": f"{gateway}/setup?code={text}"}
        else:
            credential, token = create_credential(name=said["name"], provider_name=said["provider"], actor=name_actor(request))
            context["commands"] = write_commands(
                Software(said["software"]), gateway=gateway, token=token, provider=said["provider"], name=said["name"]
            )
    except ContractError as refusal:
        form.add_error(refusal.param if refusal.param in form.fields else None, str(refusal))
        return TemplateResponse(request, "admin/muster/setup.html", context)
    context |= {
        "credential": credential,
        "gateway": gateway,
        "is_local": is_local(gateway),
        **_read_state(request, credential.pk),
    }
    return TemplateResponse(request, "admin/muster/setup_wait.html", context)


class FirstKeyForm(forms.Form):
    """The key of a first application."""

    name = forms.CharField(
        label=gettext_lazy("Name of the application"),
        max_length=limits().gateway.name_chars,
        initial="my-app",
        widget=UnfoldAdminTextInputWidget,
    )


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def show_start(request: HttpRequest) -> HttpResponse:
    """Lead through the first minutes in three steps: a safe sign-in, a node, and a key with a first answer."""
    user = request.user
    assert isinstance(user, User)  # or nobody would be let in
    form = FirstKeyForm(request.POST if request.method == "POST" else None)
    fleet = read_fleet()
    context: dict[str, Any] = {
        **admin.site.each_context(request),
        "title": _("First steps"),
        "form": form,
        "has_passkey": bool(list_keys(user)),
        "nodes": [node for node in fleet.nodes if node.takes_work],
        "may_add_nodes": may(user, ADD_CREDENTIAL),
        "may_make_keys": may_lend(request) and may_act(request),
    }
    if request.method == "POST" and form.is_valid() and context["may_make_keys"]:
        tenants = [tenant.name for tenant in list_tenants() if tenant.is_active]
        try:
            tenant = DEFAULT_TENANT if DEFAULT_TENANT in tenants else next(iter(tenants), DEFAULT_TENANT)
            key, text = create_api_key(name=form.cleaned_data["name"], tenant_name=tenant, actor=name_actor(request))
            context["created"] = describe_key(key, text)
        except ContractError as refusal:
            form.add_error(None, str(refusal))
    return TemplateResponse(request, "admin/muster/start.html", context)


@never_cache
@require_safe
def show_state(request: HttpRequest, credential_id: int) -> HttpResponse:
    """Show how far the nodes of a credential are, as a part of the page."""
    if not may(request.user, ADD_CREDENTIAL):
        raise PermissionDenied
    return render(request, "admin/muster/setup_state.html", _read_state(request, credential_id))


@never_cache
@require_POST
def allow(request: HttpRequest, credential_id: int) -> HttpResponse:
    """Allow those of the nodes' models that were ticked, and show how far the nodes are."""
    if not (may(request.user, ADD_CREDENTIAL) and may(request.user, CHANGE_MODEL)):
        raise PermissionDenied
    declared = {name for reached in read_reached(credential_id) for name in reached.models}
    problem = ""
    try:
        for name in sorted(declared & set(request.POST.getlist("model"))):
            allow_model(name=name, actor=name_actor(request))
    except ContractError as refusal:
        problem = str(refusal)
    context = {**_read_state(request, credential_id), "problem": problem, "takes_focus": True}
    return render(request, "admin/muster/setup_state.html", context)


@require_POST
async def test(request: HttpRequest, credential_id: int) -> HttpResponse:
    """Ask one model of the node a short question, and show what came of it as a part of the page."""
    try:
        trial, may_see = await database_sync_to_async(_prepare_trial, thread_sensitive=False)(request, credential_id)
    except PlaygroundError as refusal:
        return render(request, "admin/muster/trial.html", {"error": refusal.message})
    return await show_trial(request, trial, may_see=may_see)


def _prepare_trial(request: HttpRequest, credential_id: int) -> tuple[Trial, bool]:
    """Return what to ask, and whether the person may see the record. Runs in a thread."""
    if not (may_play(request) and may_lend(request) and may_act(request)):
        raise PermissionDenied
    wanted, allowed = request.POST.get("node", ""), set(list_offers().models)
    node = next((one for one in read_reached(credential_id) if one.name == wanted), None)
    models = [name for name in node.models if name in allowed] if node is not None else []
    model = choose_chat_model(models)
    tenants = [tenant.name for tenant in list_tenants() if tenant.is_active]
    if node is None or not model or not tenants:
        raise AskRefused(_("The node has no model that clients may use, or no tenant is enabled."))
    key = lend_key(request, DEFAULT_TENANT if DEFAULT_TENANT in tenants else tenants[0])
    return Trial(key, model, node.name), may_see_records(request)


def _read_state(request: HttpRequest, credential_id: int) -> dict[str, object]:
    reached, allowed = read_reached(credential_id), set(list_offers().models)
    return {
        "credential_id": credential_id,
        "nodes": [
            {
                "node": node,
                "models": [(name, name in allowed) for name in node.models],
                "is_allowed": any(name in allowed for name in node.models),
                "is_ready": _is_ready(node, allowed),
            }
            for node in reached
        ],
        "is_done": bool(reached) and all(_is_ready(node, allowed) for node in reached),
        "may_allow": may(request.user, CHANGE_MODEL) and may_act(request),
        "may_test": may_play(request) and may_lend(request) and may_act(request),
    }


def _is_ready(node: Reached, allowed: set[str]) -> bool:
    return node.is_online and any(name in allowed for name in node.models) and (node.trusts or not node.is_governed)


urlpatterns: list[URLPattern] = [
    path("start/", admin.site.admin_view(show_start), name="start"),
    path("nodes/node/setup/", admin.site.admin_view(show_setup), name="nodes_node_setup"),
    path("nodes/node/setup/<int:credential_id>/state", admin.site.admin_view(show_state), name="nodes_node_setup_state"),
    path("nodes/node/setup/<int:credential_id>/allow", admin.site.admin_view(allow), name="nodes_node_setup_allow"),
    path("nodes/node/setup/<int:credential_id>/test", test, name="nodes_node_setup_test"),
]
"""Below ``/admin/``, in the names of the admin site, beside the pages of nodes."""
