"""A person's own keys, authenticator app and sessions."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_http_methods, require_POST

from core.limits import limits
from governance.errors import GovernanceError, NotPermitted
from governance.keys import add_key_file, enrol_passkey, list_approving, list_keys, revoke_key
from governance.oidc import has_account
from governance.passkeys import verify_new
from governance.passwords import begin_app, confirm_app, has_app, remove_app
from governance.people import Assurance, may_enrol
from governance.signin import (
    close_other_sessions,
    give_challenge,
    list_sessions,
    may_act,
    open_session,
    read_assurance,
    take_challenge,
)
from governance.web.pages import script_answer, with_strict_policy
from governance.web.signin import ask_for_person, describe_session, describe_site, read_answer, read_label
from wire import COMMAND

if TYPE_CHECKING:
    from core.models import User

ENROL = "enrol"
NEEDS_PASSKEY = gettext_lazy(
    "Sign in with your passkey for this. If you have none, or lost it, ask an administrator for an invitation."
)


class KeyFileForm(forms.Form):
    """The public line of a key file."""

    public = forms.CharField(
        label=gettext_lazy("Public line"),
        max_length=400,
        help_text=format_lazy(gettext_lazy("What {muster} keys show prints."), muster=COMMAND),
    )
    label = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=limits().governance.key_label_chars,
        required=False,
        help_text=gettext_lazy("Empty: the name in the line."),
    )


class CodeForm(forms.Form):
    """One code of an authenticator app."""

    code = forms.CharField(
        label=gettext_lazy("Code"),
        max_length=10,
        widget=forms.TextInput({"autocomplete": "one-time-code", "inputmode": "numeric"}),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
@with_strict_policy
def show_keys(request: HttpRequest) -> HttpResponse:
    """List the person's keys, app and sessions; a POST is the public line of a key file."""
    person = read_person(request)
    form = KeyFileForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            require_enrolling(request)
            key = add_key_file(
                user=person,
                line=form.cleaned_data["public"],
                label=form.cleaned_data["label"],
                actor=f"user:{person.get_username()}",
            )
        except GovernanceError as refusal:
            form.add_error(refusal.param if refusal.param in form.fields else None, refusal.message)
        else:
            messages.success(
                request, _("%(key)s is registered. It approves once a version of the policy names it.") % {"key": key.label}
            )
            return HttpResponseRedirect(reverse("signin:keys"))
    page = {
        "section": "keys",
        "keys": list_keys(person),
        "approving": list_approving(),
        "form": form,
        "sessions": list_sessions(request),
        "has_app": has_app(person),
        "may_enrol": may_enrol(person, read_assurance(request)),
        "by_passkey": read_assurance(request) is Assurance.PASSKEY,
        "needs_passkey": NEEDS_PASSKEY,
        "issuer": settings.OIDC.name if settings.OIDC is not None else "",
        "is_connected": settings.OIDC is not None and has_account(person),
        **describe_site(),
        **describe_session(request),
    }
    return render(request, "signin/keys.html", page, status=HTTPStatus.FORBIDDEN if form.errors else HTTPStatus.OK)


@require_POST
@login_required
@script_answer
def send_key_options(request: HttpRequest) -> HttpResponse:
    """Answer with the passkey that the browser of the signed-in person is asked to make."""
    require_enrolling(request)
    return JsonResponse(ask_for_person(read_person(request), challenge=give_challenge(request, ENROL)))


@require_POST
@login_required
@script_answer
def receive_key(request: HttpRequest) -> HttpResponse:
    """Enrol the passkey that the browser made."""
    person = read_person(request)
    require_enrolling(request)
    passkey = verify_new(read_answer(request), challenge=take_challenge(request, ENROL))
    key = enrol_passkey(user=person, passkey=passkey, label=read_label(request), actor=f"user:{person.get_username()}")
    if read_assurance(request) is not Assurance.PASSKEY:
        # The browser has just proven the key, its user verified: as good as a sign-in, and written down as one.
        open_session(request, person, assurance=Assurance.PASSKEY)
    messages.success(
        request, _("%(key)s is enrolled. It signs you in from now on, and this session may act.") % {"key": key.label}
    )
    return JsonResponse({"next": reverse("signin:keys")})


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
@with_strict_policy
def remove_key(request: HttpRequest, key_id: int) -> HttpResponse:
    """Ask on GET and say what it means, revoke on POST."""
    person = read_person(request)
    in_use = [key for key in list_keys(person) if key.revoked_at is None]
    key = next((each for each in in_use if each.pk == key_id), None)
    if key is None:
        raise Http404
    fault = "" if read_assurance(request) is Assurance.PASSKEY else str(NEEDS_PASSKEY)
    if request.method == "POST" and not fault:
        try:
            revoke_key(
                user=person,
                key_id=key.pk,
                actor=f"user:{person.get_username()}",
                accepts_policy_change="accept" in request.POST,
            )
        except GovernanceError as refusal:
            fault = refusal.message
        else:
            messages.success(request, _("%(key)s is removed.") % {"key": key.label})
            return HttpResponseRedirect(reverse("signin:keys"))
    is_last_passkey = key.is_passkey and sum(each.is_passkey for each in in_use) == 1
    page = {"key": key, "approves": key.thumbprint in list_approving(), "fault": fault, "is_last_passkey": is_last_passkey}
    return render(request, "signin/remove_key.html", page, status=HTTPStatus.FORBIDDEN if fault else HTTPStatus.OK)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
@with_strict_policy
def show_app(request: HttpRequest) -> HttpResponse:
    """Set an authenticator app up: the QR code on GET, its first code on POST."""
    person = read_person(request)
    form = CodeForm(request.POST if request.method == "POST" else None)
    if has_app(person):
        return HttpResponseRedirect(reverse("signin:keys"))
    if not may_act(request) and not may_enrol(person, read_assurance(request)):
        page = {"title": _("An authenticator app cannot be set up now"), "explanation": NEEDS_PASSKEY}
        return render(request, "signin/refused.html", page, status=HTTPStatus.FORBIDDEN)
    if request.method == "POST" and form.is_valid():
        try:
            confirm_app(user=person, code=form.cleaned_data["code"], actor=f"user:{person.get_username()}")
        except GovernanceError as refusal:
            form.add_error("code", refusal.message)
        else:
            messages.success(request, _("The authenticator app is set up. Signing in by password asks for its code now."))
            return HttpResponseRedirect(reverse("signin:keys"))
    return render(request, "signin/app.html", {"form": form, "enrolment": begin_app(person), **describe_session(request)})


@require_POST
@login_required
@with_strict_policy
def forget_app(request: HttpRequest) -> HttpResponse:
    """Remove the authenticator app."""
    if may_act(request):
        person = read_person(request)
        remove_app(user=person, actor=f"user:{person.get_username()}")
        messages.success(request, _("The authenticator app is removed."))
    else:
        messages.error(request, NEEDS_PASSKEY)
    return HttpResponseRedirect(reverse("signin:keys"))


@require_POST
@login_required
@with_strict_policy
def end_other_sessions(request: HttpRequest) -> HttpResponse:
    """Sign the person out everywhere else."""
    # Every session may, also one that only looks: it only takes away.
    ended = close_other_sessions(request)
    messages.success(
        request, ngettext("%(count)s other session ended.", "%(count)s other sessions ended.", ended) % {"count": ended}
    )
    return HttpResponseRedirect(reverse("signin:keys"))


def require_enrolling(request: HttpRequest) -> None:
    """Raise NotPermitted unless this session may add a key."""
    if not may_enrol(read_person(request), read_assurance(request)):
        raise NotPermitted(str(NEEDS_PASSKEY))


def read_person(request: HttpRequest) -> User:
    """Return who is signed in."""
    assert not isinstance(request.user, AnonymousUser)
    return request.user
