"""The pages of a tenant for its members: keys, usage, budgets, requests and members, of that tenant alone.

A tenant of which somebody is no member is not there for them. Whoever may read tenants at all has the lists of the console.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, time, timedelta
from functools import wraps
from typing import Any

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import AnonymousUser
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods, require_safe

from core.admin_pages import name_actor
from core.errors import ContractError
from core.limits import limits
from core.models import Membership, User
from core.roles import (
    ADD_KEY,
    ADD_MEMBER,
    CHANGE_KEY,
    MEANINGS,
    REMOVE_MEMBER,
    SEE_TENANT,
    Role,
    limit_rows,
    may,
)
from gateway.admin.callers import DateInput, describe_key
from gateway.admin.usage import Used, show_budget
from gateway.models import ApiKey, Tenant
from gateway.services.budgets import read_budget_states
from gateway.services.explanations import name_state
from gateway.services.keys import create_api_key, revoke_api_key, rotate_api_key
from gateway.services.request_pages import Cursor, RequestFilter, read_page
from gateway.services.rollups import Order, Part, add_sums, read_totals
from gateway.values import Dimension
from governance.members import remove_member
from governance.people import invite_member, make_invitation_url
from governance.web.pages import close_page, render_page
from wire import clock

View = Callable[..., HttpResponse]


class KeyForm(forms.Form):
    """A new key; limits and models beyond these are the tenant's."""

    name = forms.CharField(
        label=gettext_lazy("Name"), max_length=limits().gateway.name_chars, help_text=gettext_lazy("Who or what will use it")
    )
    requests_per_minute = forms.IntegerField(
        label=gettext_lazy("Requests per minute"),
        required=False,
        min_value=1,
        max_value=limits().gateway.record_integer,
        help_text=gettext_lazy("At most what the tenant has. Empty: as much."),
    )
    last_day = forms.DateField(
        label=gettext_lazy("Expires on"),
        required=False,
        widget=DateInput,
        help_text=gettext_lazy("The key works until this day ends (UTC). Empty: it never expires."),
    )


class MemberForm(forms.Form):
    """Somebody new."""

    name = forms.CharField(
        label=gettext_lazy("Username"),
        max_length=150,
        help_text=gettext_lazy("Letters, digits and @ . + - _. It cannot be changed later."),
    )
    email = forms.EmailField(label=gettext_lazy("E-mail"), required=False, help_text=gettext_lazy("Where notices go"))
    role = forms.ChoiceField(
        label=gettext_lazy("Role"),
        choices=[(role.value, MEANINGS[role][0]) for role in (Role.TENANT_VIEWER, Role.TENANT_ADMIN)],
    )


def tenant_page(permission: str) -> Callable[[View], View]:
    """Let a view show a page of one tenant to who may read it and has ``permission`` there; to others it is not there."""

    def mark(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, tenant_id: int, **rest: Any) -> HttpResponse:  # Any: parts of the address
            if isinstance(request.user, AnonymousUser):
                return redirect_to_login(request.get_full_path())
            tenant = Tenant.objects.filter(pk=tenant_id).first()
            if tenant is None or not may(request.user, SEE_TENANT, tenant=tenant.name):
                raise Http404(_("There is no such tenant, or you are no member of it."))
            if not may(request.user, permission, tenant=tenant.name):
                raise PermissionDenied
            return close_page(view(request, tenant, **rest))

        return guarded

    return mark


@require_safe
def list_own(request: HttpRequest) -> HttpResponse:
    """Show the tenants of which somebody is a member; of one lead there."""
    if isinstance(request.user, AnonymousUser):
        return redirect_to_login(request.get_full_path())
    tenants = list(limit_rows(Tenant.objects.order_by("name"), request.user, SEE_TENANT, tenant="name"))
    if len(tenants) == 1:
        return HttpResponseRedirect(_locate(tenants[0]))
    return close_page(render_page(request, "tenants/list.html", {"tenants": tenants}))


@require_safe
@tenant_page(SEE_TENANT)
def show_tenant(request: HttpRequest, tenant: Tenant) -> HttpResponse:
    """Show all there is of a tenant. The number of queries does not grow with what it has."""
    before = Cursor.read(request.GET.get("before", ""))
    page = read_page(RequestFilter(tenant=tenant.name), before=before, size=limits().gateway.page_own_requests)
    part = Part(limits().gateway.page_own_days, Dimension.TENANT_MODEL, tenant=tenant.name)
    named, others = read_totals(part, most=limits().gateway.page_usage_rows, order=Order.TOKENS)
    total = add_sums([*(one.sums for one in named), *([others] if others is not None else [])])
    members = Membership.objects.filter(tenant=tenant.name).select_related("user").order_by("user__username")
    context = {
        "tenant": tenant,
        "days": limits().gateway.page_own_days,
        "keys": [_show_key(key) for key in ApiKey.objects.filter(tenant=tenant).select_related("tenant")],
        "models": [(one.name.rpartition("\n")[2], Used(one.sums, 0.0)) for one in named],
        "total": Used(total, 100.0),
        "currency": settings.CURRENCY,
        "budgets": [show_budget(one) for one in read_budget_states(tenant=tenant.name)],
        "requests": [(record, name_state(record)[0]) for record in page.records],
        "older": str(page.older) if page.older is not None else "",
        "is_later": before is not None,
        "members": [(row, MEANINGS[Role(row.role)][0]) for row in members],
        "may_add_keys": may(request.user, ADD_KEY, tenant=tenant.name),
        "may_change_keys": may(request.user, CHANGE_KEY, tenant=tenant.name),
        "may_add_members": may(request.user, ADD_MEMBER, tenant=tenant.name),
        "may_remove_members": may(request.user, REMOVE_MEMBER, tenant=tenant.name),
    }
    return render_page(request, "tenants/tenant.html", context)


def _show_key(key: ApiKey) -> tuple[ApiKey, str]:
    if key.revoked_at is not None:
        return key, _("revoked")
    is_over = key.expires_at is not None and key.expires_at <= clock.now()
    return key, _("expired") if is_over else _("active")


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page(ADD_KEY)
def add_key(request: HttpRequest, tenant: Tenant) -> HttpResponse:
    """Ask for a new key on GET; make it on POST and show it, once."""
    form = KeyForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        day = form.cleaned_data["last_day"]
        try:
            key, text = create_api_key(
                name=form.cleaned_data["name"],
                tenant_name=tenant.name,
                actor=name_actor(request),
                requests_per_minute=form.cleaned_data["requests_per_minute"],
                expires_at=None if day is None else datetime.combine(day + timedelta(days=1), time.min, tzinfo=UTC),
                is_within_tenant=not may(request.user, ADD_KEY),
            )
        except ContractError as refusal:
            form.add_error(refusal.param if refusal.param in form.fields else None, str(refusal))
        else:
            return _show_secret(request, tenant, key, text)
    title = _("New API key of %(tenant)s") % {"tenant": tenant.name}
    return _ask(request, tenant, form, title=title, button=_("Create"))


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page(CHANGE_KEY)
def change_key(request: HttpRequest, tenant: Tenant, *, key_id: uuid.UUID, change: str) -> HttpResponse:
    """Ask on GET; on POST give a key another text, or end it."""
    key = ApiKey.objects.filter(pk=key_id, tenant=tenant, revoked_at=None).first()
    if key is None:
        raise Http404(_("There is no such key, or it was revoked."))
    form, is_rotation = forms.Form(request.POST if request.method == "POST" else None), change == "rotate"
    if request.method == "POST":
        if is_rotation:
            return _show_secret(request, tenant, *rotate_api_key(key_id=key.pk, actor=name_actor(request)))
        revoke_api_key(key_id=key.pk, actor=name_actor(request), tenants=[tenant.name])
        messages.success(request, _("Revoked the key %(name)s.") % {"name": key.name})
        return HttpResponseRedirect(_locate(tenant))
    title = _("Rotate %(name)s?") if is_rotation else _("Revoke %(name)s?")
    meaning = (
        _("The next page shows another text once. The one that clients have now stops working within five seconds.")
        if is_rotation
        else _("The key stops working within five seconds, for good.")
    )
    button = _("Rotate") if is_rotation else _("Revoke")
    return _ask(request, tenant, form, title=title % {"name": key.name}, explanation=meaning, button=button, is_danger=True)


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page(ADD_MEMBER)
def add_member(request: HttpRequest, tenant: Tenant) -> HttpResponse:
    """Ask who on GET; on POST make an account and show the link with which the person comes in, once."""
    form = MemberForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        said = form.cleaned_data
        try:
            text = invite_member(
                name=said["name"],
                email=said["email"],
                tenant=tenant.name,
                role=Role(said["role"]),
                actor=name_actor(request),
                may_add_known=may(request.user, ADD_MEMBER),
            )
        except ContractError as refusal:
            form.add_error(refusal.param if refusal.param in form.fields else None, str(refusal))
        else:
            if not text:
                messages.success(request, _("%(name)s is a member now.") % {"name": said["name"]})
                return HttpResponseRedirect(_locate(tenant))
            page = {
                "title": _("Invitation of %(person)s") % {"person": said["name"]},
                "secret": make_invitation_url(text),
                "usage": _("Hand this link to the person yourself. It works once, for 72 hours."),
                "back_url": _locate(tenant),
            }
            return render_page(request, "tenants/secret.html", page)
    title = _("Invite somebody to %(tenant)s") % {"tenant": tenant.name}
    return _ask(request, tenant, form, title=title, button=_("Invite"))


@require_http_methods(["GET", "HEAD", "POST"])
@tenant_page(REMOVE_MEMBER)
def end_membership(request: HttpRequest, tenant: Tenant, *, member_id: int) -> HttpResponse:
    """Ask on GET; on POST end a membership. The account stays."""
    row = Membership.objects.select_related("user").filter(pk=member_id, tenant=tenant.name).first()
    if row is None:
        raise Http404(_("This person is no member of the tenant any more."))
    if request.method == "POST":
        name = remove_member(membership_id=row.pk, tenant=tenant.name, actor=name_actor(request))
        messages.success(request, _("%(name)s is no member any more.") % {"name": name})
        is_self = isinstance(request.user, User) and row.user_id == request.user.pk
        return HttpResponseRedirect(reverse("tenants:list") if is_self else _locate(tenant))
    title = _("Remove %(name)s?") % {"name": row.user.get_username()}
    meaning = _("The person sees nothing of the tenant any more. Keys stay: revoke those that the person knows.")
    return _ask(request, tenant, forms.Form(), title=title, explanation=meaning, button=_("Remove"), is_danger=True)


def _locate(tenant: Tenant) -> str:
    return reverse("tenants:tenant", args=[tenant.pk])


def _ask(request: HttpRequest, tenant: Tenant, form: forms.Form, **said: object) -> HttpResponse:
    return render_page(request, "tenants/ask.html", {"tenant": tenant, "form": form, "back_url": _locate(tenant), **said})


def _show_secret(request: HttpRequest, tenant: Tenant, key: ApiKey, text: str) -> HttpResponse:
    made = describe_key(key, text)
    page = {"title": key.name, "secret": text, "usage": made.usage, "steps": made.steps, "back_url": _locate(tenant)}
    return render_page(request, "tenants/secret.html", page)


app_name = "tenants"
urlpatterns = [
    path("", list_own, name="list"),
    path("<int:tenant_id>/", show_tenant, name="tenant"),
    path("<int:tenant_id>/keys/new", add_key, name="add-key"),
    path("<int:tenant_id>/keys/<uuid:key_id>/rotate", change_key, {"change": "rotate"}, name="rotate-key"),
    path("<int:tenant_id>/keys/<uuid:key_id>/revoke", change_key, {"change": "revoke"}, name="revoke-key"),
    path("<int:tenant_id>/members/new", add_member, name="add-member"),
    path("<int:tenant_id>/members/<int:member_id>/remove", end_membership, name="remove-member"),
]
