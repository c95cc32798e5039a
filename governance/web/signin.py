"""Signing in and out: by passkey, by password to look, by invitation for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from core.limits import limits
from governance.errors import SignInRefused
from governance.keys import list_passkey_ids
from governance.passkeys import PasskeysUnavailable, ask_for_new, ask_who, read_site, verify_new
from governance.people import Assurance, accept_invitation, find_invitation, sign_in_by_passkey, sign_in_by_password
from governance.signin import close_session, give_challenge, may_act, open_session, read_assurance, take_challenge
from governance.web.pages import read_object, script_answer, with_strict_policy

if TYPE_CHECKING:
    from core.models import User

SIGN_IN = "sign-in"


class PasswordForm(forms.Form):
    """Name, password, and the code of an authenticator app for those who set one up."""

    name = forms.CharField(label="Username", max_length=150, widget=forms.TextInput({"autocomplete": "username"}))
    password = forms.CharField(
        label="Password", max_length=256, strip=False, widget=forms.PasswordInput({"autocomplete": "current-password"})
    )
    code = forms.CharField(
        label="Code of your authenticator app",
        help_text="Only if you have set one up.",
        max_length=10,
        required=False,
        widget=forms.TextInput({"autocomplete": "one-time-code", "inputmode": "numeric"}),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@with_strict_policy
def show_login(request: HttpRequest) -> HttpResponse:
    """Offer the passkey first and the password below it; a POST is name and password."""
    form = PasswordForm(request.POST if request.method == "POST" else None)
    if request.method == "POST" and form.is_valid():
        try:
            user, assurance = sign_in_by_password(request, **form.cleaned_data, address=request.META.get("REMOTE_ADDR", ""))
        except SignInRefused as refusal:
            form.add_error(None, refusal.message)
        else:
            open_session(request, user, assurance=assurance)
            return HttpResponseRedirect(find_next(request, user))
    status = HTTPStatus.FORBIDDEN if form.errors else HTTPStatus.OK
    page = {"form": form, "next": read_next(request), **describe_site(), **describe_session(request)}
    return render(request, "signin/login.html", page, status=status)


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
        raise SignInRefused("The browser sent no passkey. Reload the page and try again.")
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
    return read_next(request) or reverse("admin:index" if user.is_staff else "approvals:inbox")
