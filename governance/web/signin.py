"""Signing in and out: by passkey, by password to look, by invitation for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext, gettext_lazy
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from core.limits import limits
from core.roles import has_tenants
from governance import oidc
from governance.errors import NotPermitted, SignInRefused
from governance.keys import has_passkeys, list_passkey_ids
from governance.passkeys import PasskeysUnavailable, ask_for_new, ask_who, read_site, verify_new
from governance.passwords import REFUSAL
from governance.people import (
    Assurance,
    accept_invitation,
    find_invitation,
    may_enrol,
    may_see_operations,
    needs_code,
    sign_in_by_code,
    sign_in_by_passkey,
    sign_in_by_password,
)
from governance.signin import (
    close_session,
    close_sessions,
    drop_half,
    give_challenge,
    keep_half,
    may_act,
    open_session,
    read_assurance,
    read_half,
    take_challenge,
)
from governance.web.pages import read_object, script_answer, with_strict_policy

if TYPE_CHECKING:
    from core.models import User

SIGN_IN = "sign-in"


class PasswordForm(forms.Form):
    """The first step; the second is for those who set an authenticator app up."""

    name = forms.CharField(label=gettext_lazy("Username"), max_length=150, widget=forms.TextInput({"autocomplete": "username"}))
    password = forms.CharField(
        label=gettext_lazy("Password"),
        max_length=256,
        strip=False,
        widget=forms.PasswordInput({"autocomplete": "current-password"}),
    )


class CodeForm(forms.Form):
    """One code of an authenticator app."""

    code = forms.CharField(
        label=gettext_lazy("Code of your authenticator app"),
        max_length=10,
        widget=forms.TextInput({"autocomplete": "one-time-code", "inputmode": "numeric", "autofocus": True}),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@with_strict_policy
def show_login(request: HttpRequest) -> HttpResponse:
    """Ask for name and password, and offer a passkey below; then for the code of who has an authenticator app."""
    if request.method == "POST" and "code" in request.POST:
        return _take_code(request)
    form = PasswordForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            user = sign_in_by_password(request, **form.cleaned_data, address=_read_address(request))
        except SignInRefused as refusal:
            form.add_error(None, refusal.message)
        else:
            if needs_code(user):
                keep_half(request, user)
                return _show_step(request, CodeForm())
            open_session(request, user, assurance=Assurance.PASSWORD)
            return HttpResponseRedirect(find_next(request, user))
    drop_half(request)
    return _show_step(request, form)


def _take_code(request: HttpRequest) -> HttpResponse:
    """Sign in whose password was right a moment ago, by the code; without such a person begin again."""
    form, user_id = CodeForm(request.POST), read_half(request)
    user = get_user_model().objects.filter(pk=user_id).first() if user_id is not None else None
    if user is None:
        first = PasswordForm({})
        first.errors.clear()
        first.add_error(None, gettext(REFUSAL))
        return _show_step(request, first)
    if form.is_valid():
        try:
            sign_in_by_code(user, code=form.cleaned_data["code"], address=_read_address(request))
        except SignInRefused as refusal:
            form.add_error(None, refusal.message)
        else:
            wanted = find_next(request, user)
            open_session(request, user, assurance=Assurance.TOTP)
            return HttpResponseRedirect(wanted)
    return _show_step(request, form)


def _show_step(request: HttpRequest, form: forms.Form) -> HttpResponse:
    page = {
        "form": form,
        "is_code_step": isinstance(form, CodeForm),
        "offers_passkey": has_passkeys(),
        "issuer": settings.OIDC.name if settings.OIDC is not None else "",
        "is_for_owners": settings.OIDC is not None and settings.LOCAL_SIGN_IN == "owners",
        "next": read_next(request),
        **describe_site(),
        **describe_session(request),
    }
    return render(request, "signin/login.html", page, status=HTTPStatus.FORBIDDEN if form.errors else HTTPStatus.OK)


def _read_address(request: HttpRequest) -> str:
    return str(request.META.get("REMOTE_ADDR", ""))


@require_POST
@script_answer
def send_sign_in_options(request: HttpRequest) -> HttpResponse:
    """Answer with what a browser asks its passkeys at sign-in."""
    return JsonResponse(ask_who(challenge=give_challenge(request, SIGN_IN)))


@require_POST
@script_answer
def receive_passkey(request: HttpRequest) -> HttpResponse:
    """Sign in by a passkey's answer; say where to go."""
    user = sign_in_by_passkey(read_answer(request), challenge=take_challenge(request, SIGN_IN))
    wanted = find_next(request, user)
    open_session(request, user, assurance=Assurance.PASSKEY)
    return JsonResponse({"next": wanted})


@require_POST
@with_strict_policy
def sign_out(request: HttpRequest) -> HttpResponse:
    """End the session."""
    close_session(request)
    return HttpResponseRedirect(reverse("signin:login"))


# Single sign-on


@require_safe
@with_strict_policy
def begin_sign_on(request: HttpRequest) -> HttpResponse:
    """Lead to the issuer. A GET, as the policy of our pages lets no form lead to anybody else's."""
    _require_issuer()
    try:
        return oidc.begin(request, next_url=read_next(request))
    except SignInRefused as refusal:
        return _refuse_sign_on(request, refusal)


@require_safe
@with_strict_policy
def finish_sign_on(request: HttpRequest) -> HttpResponse:
    """Take the issuer's answer: sign the person in, or connect the account to who asked for that."""
    _require_issuer()
    try:
        answer, state = oidc.finish(request)
        if state.get("process") == oidc.CONNECT:
            return _connect(request, answer, state.get("person"))
        user = oidc.sign_in_at_issuer(answer)
    except oidc.NoRole as refusal:
        if refusal.person is not None:
            close_sessions(person=refusal.person, actor=oidc.ACTOR)
        return _refuse_sign_on(request, refusal)
    except SignInRefused as refusal:
        return _refuse_sign_on(request, refusal)
    wanted = str(state.get("next") or "")
    is_ours = url_has_allowed_host_and_scheme(wanted, allowed_hosts=None, require_https=request.is_secure())
    open_session(request, user, assurance=Assurance.OIDC)
    return HttpResponseRedirect(wanted if wanted and is_ours else find_next(request, user))


def _connect(request: HttpRequest, answer: oidc.Answer, person_id: object) -> HttpResponse:
    user = request.user
    # Between the two pages somebody else may have signed in here.
    if isinstance(user, AnonymousUser) or user.pk != person_id or not may_enrol(user, read_assurance(request)):
        raise SignInRefused(gettext("That took too long, or was done in another window. Try again."))
    oidc.connect(user, answer)
    messages.success(
        request, gettext("Connected. From now on you can sign in with %(name)s.") % {"name": oidc.read_issuer().name}
    )
    return HttpResponseRedirect(reverse("signin:keys"))


@require_POST
@login_required
@with_strict_policy
def connect_sign_on(request: HttpRequest) -> HttpResponse:
    """Lead somebody who is signed in to the issuer, to add the account there; by a link, as the policy has it."""
    _require_issuer()
    user = request.user
    assert not isinstance(user, AnonymousUser)
    if not may_enrol(user, read_assurance(request)):
        messages.error(request, gettext("Sign in with your passkey to connect an account."))
        return HttpResponseRedirect(reverse("signin:keys"))
    try:
        url = oidc.begin(request, next_url="", connects=user).headers["Location"]
    except SignInRefused as refusal:
        messages.error(request, refusal.message)
        return HttpResponseRedirect(reverse("signin:keys"))
    return render(request, "signin/connect.html", {"url": url, "name": oidc.read_issuer().name})


@require_POST
@login_required
@with_strict_policy
def disconnect_sign_on(request: HttpRequest) -> HttpResponse:
    user = request.user
    assert not isinstance(user, AnonymousUser)
    try:
        if not may_act(request):
            raise NotPermitted(gettext("Sign in with your passkey to do this."))
        oidc.disconnect(user)
        messages.success(request, gettext("Disconnected from single sign-on."))
    except NotPermitted as refusal:
        messages.error(request, refusal.message)
    return HttpResponseRedirect(reverse("signin:keys"))


def _require_issuer() -> None:
    if settings.OIDC is None:
        raise Http404(gettext("Single sign-on is not set up here."))


def _refuse_sign_on(request: HttpRequest, refusal: SignInRefused) -> HttpResponse:
    first = PasswordForm({})
    first.errors.clear()
    first.add_error(None, refusal.message)
    return _show_step(request, first)


# Invitations


@require_safe
@with_strict_policy
def show_invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Show who is invited and offer to make a passkey."""
    try:
        # Opening the link spends nothing: previews of messengers open it too.
        invitation = find_invitation(token)
    except SignInRefused as refusal:
        page = {"title": "This invitation cannot be used", "explanation": refusal.message}
        return render(request, "signin/refused.html", page, status=HTTPStatus.FORBIDDEN)
    return render(request, "signin/invitation.html", {"invitation": invitation, "token": token, **describe_site()})


@require_POST
@script_answer
def send_invitation_options(request: HttpRequest, token: str) -> HttpResponse:
    """Answer with the passkey that the browser of an invited person is asked to make."""
    person = find_invitation(token).user
    return JsonResponse(ask_for_person(person, challenge=give_challenge(request, f"invitation {person.pk}")))


@require_POST
@script_answer
def receive_invitation(request: HttpRequest, token: str) -> HttpResponse:
    """Enrol the passkey of an invited person, spend the invitation, sign the person in."""
    person = find_invitation(token).user
    passkey = verify_new(read_answer(request), challenge=take_challenge(request, f"invitation {person.pk}"))
    person = accept_invitation(text=token, passkey=passkey, label=read_label(request))
    open_session(request, person, assurance=Assurance.PASSKEY)
    return JsonResponse({"next": reverse("signin:keys")})


# What several pages need


def ask_for_person(person: User, *, challenge: bytes) -> dict[str, Any]:
    """Return what a browser is asked when ``person`` makes a passkey. Raises PasskeysUnavailable."""
    return ask_for_new(
        person_id=person.pk,
        name=person.get_username(),
        full_name=person.get_full_name(),
        known=list_passkey_ids(person),
        challenge=challenge,
    )


def describe_site() -> dict[str, object]:
    """Return what a page says of passkeys here: the one origin where they work, or why there is none."""
    try:
        return {"origin": read_site().origin, "unavailable": ""}
    except PasskeysUnavailable as reason:
        return {"origin": "", "unavailable": reason.message}


def describe_session(request: HttpRequest) -> dict[str, object]:
    """Return what a page says of whoever is signed in."""
    if not request.user.is_authenticated:
        return {"assurance": "", "may_act": False}
    return {"assurance": read_assurance(request).value, "may_act": may_act(request)}


def read_answer(request: HttpRequest) -> Mapping[str, Any]:
    """Return the passkey's part of what a script of ours sent. Raises SignInRefused."""
    answer = read_object(request, most_bytes=limits().governance.sign_in_body_bytes).get("credential")
    if not isinstance(answer, dict) or not isinstance(answer.get("response"), dict):
        raise SignInRefused(_("The browser sent no passkey. Reload the page and try again."))
    return answer


def read_label(request: HttpRequest) -> str:
    """Return what the person calls a key."""
    label = read_object(request, most_bytes=limits().governance.sign_in_body_bytes).get("label")
    return label if isinstance(label, str) else ""


def read_next(request: HttpRequest) -> str:
    """Return where to go after signing in, "" when nothing of this installation was asked for."""
    wanted = request.POST.get("next") or request.GET.get("next") or ""
    # A link to the sign-in page must not lead people to anybody else's, nor back to itself.
    is_ours = url_has_allowed_host_and_scheme(wanted, allowed_hosts=None, require_https=request.is_secure())
    return wanted if is_ours and urlsplit(wanted).path != reverse("signin:login") else ""


def find_next(request: HttpRequest, user: User) -> str:
    """Return where to go after signing in: what was asked for, else the first page that the person may see."""
    if wanted := read_next(request):
        return wanted
    if user.is_staff or may_see_operations(user):
        return reverse("admin:index" if user.is_staff else "approvals:inbox")
    return reverse("tenants:list" if has_tenants(user) else "signin:keys")
