"""Single sign-on at an OpenID Connect issuer: authorization code with PKCE, state and nonce, and the roles that follow.

OpenID Connect Core 1.0 sections 3.1.2 and 3.1.3. ``allauth`` speaks with the issuer and keeps state; which person signs in is
decided here. A person is known by issuer and ``sub`` alone, never by an e-mail address.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt
import requests
from allauth.socialaccount.adapter import get_adapter
from allauth.socialaccount.internal import statekit
from allauth.socialaccount.models import SocialAccount, SocialApp
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from allauth.socialaccount.providers.openid_connect.provider import OpenIDConnectProvider
from allauth.socialaccount.providers.openid_connect.views import OpenIDConnectOAuth2Adapter
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _

from core.issuer import Issuer
from core.limits import limits
from core.models import Membership, User
from core.roles import Role, list_roles
from governance.audit import record_event
from governance.errors import NotPermitted, SignInRefused
from governance.members import change_roles, remove_member, set_member
from wire import clock

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""With a public key alone: a token that is signed with the client's secret, or with nothing, is refused."""
ACTOR = "system:single-sign-on"
LOGIN, CONNECT = "login", "connect"
_configs: dict[str, tuple[float, dict[str, Any]]] = {}  # Any: JSON
"""What the issuer said of its addresses, and when; of this process alone."""

logger = logging.getLogger("muster.governance")


class IssuerUnreachable(SignInRefused):
    """The issuer did not answer, or not as OpenID Connect has it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the issuer says of somebody, verified. ``groups``: None = it named none at all."""

    sub: str
    username: str
    email: str
    is_email_verified: bool
    first_name: str
    last_name: str
    groups: tuple[str, ...]


class _Unacceptable(OAuth2Error):  # type: ignore[misc]  # allauth ships no types
    """What is wrong with an answer of the issuer, in words that hold nothing of it that is secret."""


class IssuerClient(OpenIDConnectOAuth2Adapter):  # type: ignore[misc]  # allauth ships no types
    """``allauth``'s client of the one issuer of the settings: it checks who answers, and the signature of what is answered."""

    def get_provider(self) -> OpenIDConnectProvider:
        said = read_issuer()
        app = SocialApp(
            provider="openid_connect", provider_id=said.url, name=said.name, client_id=said.client_id,
            secret=said.client_secret,
            settings={"server_url": said.url, "scope": list(said.scopes), "oauth_pkce_enabled": True},
        )  # fmt: skip
        return _Provider(self.request, app=app)

    def get_callback_url(self, request: HttpRequest, app: object) -> str:
        # Where the operator says that people come in, never what a Host header says.
        return f"{settings.PUBLIC_URL.rstrip('/')}{reverse('signin:oidc-callback')}"

    @property
    def openid_config(self) -> dict[str, Any]:  # Any: JSON
        issuer = read_issuer().url
        at, known = _configs.get(issuer, (0.0, {}))
        if not known or clock.monotonic() - at > limits().governance.oidc_config_s:
            known = super().openid_config
            remember_config(issuer, known)
        if str(known.get("issuer", "")).rstrip("/") != issuer:
            raise _Unacceptable(f"the issuer calls itself {str(known.get('issuer'))[:200]!r}")
        return known

    def read_claims(self, response: Mapping[str, Any], *, nonce: str) -> dict[str, Any]:  # Any: JSON
        """Return the claims of an answer's ID token and, behind it, those of the userinfo endpoint. Raises OAuth2Error."""
        token, said = str(response.get("id_token") or ""), read_issuer()
        try:
            head = jwt.get_unverified_header(token)
            claims: dict[str, Any] = jwt.decode(
                token,
                self._find_key(head),
                algorithms=list(ALGORITHMS),
                audience=said.client_id,
                issuer=self.openid_config["issuer"],
                leeway=limits().governance.oidc_leeway_s,
                options={"require": ["iss", "sub", "aud", "exp", "iat"]},
            )
        except jwt.PyJWTError as error:
            raise _Unacceptable(f"the ID token does not hold: {error}") from error
        if not nonce or not secrets.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise _Unacceptable("the ID token has another nonce")
        if claims.get("azp", said.client_id) != said.client_id:
            raise _Unacceptable("the ID token was issued to another client")
        return self._add_userinfo(claims, str(response["access_token"]))

    def open_session(self) -> requests.Session:
        """Return a session whose requests have a time-out."""
        session: requests.Session = get_adapter().get_requests_session()
        return session

    def _find_key(self, head: Mapping[str, Any]) -> jwt.PyJWK:
        with self.open_session() as session:
            found = session.get(self.openid_config["jwks_uri"])
            found.raise_for_status()
        keys = jwt.PyJWKSet.from_dict(found.json()).keys
        fitting = [key for key in keys if key.key_id == head.get("kid")] if head.get("kid") else keys
        if len(fitting) != 1:
            raise _Unacceptable("the ID token names no key of the issuer")
        return fitting[0]

    def _add_userinfo(self, claims: dict[str, Any], access_token: str) -> dict[str, Any]:  # Any: JSON
        if not self.openid_config.get("userinfo_endpoint") or _find_claim(claims, read_issuer().groups_claim) is not None:
            return claims
        told = self._fetch_user_info(access_token)
        # Section 5.3.2: of somebody else it must not be used.
        return {**told, **claims} if isinstance(told, dict) and told.get("sub") == claims["sub"] else claims


class _Provider(OpenIDConnectProvider):  # type: ignore[misc]  # allauth ships no types
    """What a browser may add to ``allauth``'s addresses (scopes, parameters) has no effect here."""

    oauth2_adapter_class = IssuerClient


def remember_config(issuer: str, config: dict[str, Any]) -> None:  # Any: JSON
    _configs[issuer] = (clock.monotonic(), config)


def forget_configs() -> None:
    _configs.clear()


def read_issuer() -> Issuer:
    """Return the issuer of the settings; pages ask only where there is one."""
    found = settings.OIDC
    assert found is not None
    return found


def begin(request: HttpRequest, *, next_url: str, connects: User | None = None) -> HttpResponse:
    """Return the way to the issuer. ``connects``: whose account there is to be added. Raises IssuerUnreachable."""
    client, nonce = IssuerClient(request, read_issuer().url), secrets.token_urlsafe(24)
    process = LOGIN if connects is None else CONNECT
    told: dict[str, object] = {"nonce": nonce, "person": None if connects is None else connects.pk}
    try:
        answer: HttpResponse = client.get_provider().redirect(
            request, process=process, next_url=next_url, auth_params={"nonce": nonce}, **told
        )
    except (OAuth2Error, requests.RequestException, KeyError, TypeError, ValueError) as error:
        raise _explain(error) from error
    if not request.user.is_authenticated:
        request.session.set_expiry(limits().governance.challenge_s)
    return answer


def finish(request: HttpRequest) -> tuple[Answer, Mapping[str, Any]]:
    """Return what the issuer says, and the state of ``begin``: ``next``, ``process``, ``person``. Raises SignInRefused."""
    state = statekit.unstash_state(request, state_id=request.GET.get("state", ""), provider_id=read_issuer().url)
    if state is None:
        raise SignInRefused(_("That took too long, or was done in another window. Try again."))
    if "code" not in request.GET:
        name = read_issuer().name
        raise SignInRefused(_("%(name)s did not let you in. Try again, or ask who runs it.") % {"name": name})
    client = IssuerClient(request, read_issuer().url)
    try:
        # RFC 9207: an answer that names its issuer must come from the one that was asked.
        if request.GET.get("iss", read_issuer().url).rstrip("/") != read_issuer().url:
            raise _Unacceptable("the answer comes from another issuer")
        app = client.get_provider().app
        response = client.get_access_token_data(
            request, app, client.get_client(request, app), pkce_code_verifier=state.get("pkce_code_verifier")
        )
        claims = client.read_claims(response, nonce=str(state.get("nonce", "")))
    except (OAuth2Error, requests.RequestException, KeyError, TypeError, ValueError) as error:
        raise _explain(error) from error
    return read_answer(claims), state


def _explain(error: Exception) -> SignInRefused:
    said = {"name": read_issuer().name, "issuer": read_issuer().url}
    # An answer may hold a token: only our own words are logged.
    logger.warning(
        "oidc_refused issuer=%s error=%s", said["issuer"], error if isinstance(error, _Unacceptable) else type(error).__name__
    )
    if isinstance(error, requests.Timeout | requests.ConnectionError):
        return IssuerUnreachable(
            _("%(name)s does not answer at %(issuer)s. Sign in with a local account, or try again later.") % said
        )
    return SignInRefused(_("%(name)s gave an answer that Muster does not accept. Try again; the log says why.") % said)


def read_answer(claims: Mapping[str, Any]) -> Answer:  # Any: JSON
    groups = _find_claim(claims, read_issuer().groups_claim)
    named = groups if isinstance(groups, list) else [groups] if isinstance(groups, str) else []

    def text(name: str) -> str:
        value = claims.get(name)
        return value if isinstance(value, str) else ""

    if len(claims["sub"]) > limits().governance.oidc_sub_chars:
        raise SignInRefused(_("%(name)s gave an answer that Muster does not accept.") % {"name": read_issuer().name})
    return Answer(
        sub=claims["sub"],
        username=text("preferred_username") or text("email"),
        email=text("email"),
        is_email_verified=claims.get("email_verified") is True,
        first_name=text("given_name")[:150],
        last_name=text("family_name")[:150],
        groups=tuple(one for one in named if isinstance(one, str)),
    )


def _find_claim(claims: Mapping[str, Any], name: str) -> object:  # Any: JSON
    """Return a claim by its name, or by the path to it (``realm_access.roles``); None where there is none."""
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


# Who it is, and what that person may do


def map_roles(answer: Answer) -> frozenset[str]:
    """Return the roles that the groups of somebody give, as the settings write them; the default role where they give none."""
    said = read_issuer()
    mapped = frozenset(role for group in answer.groups for role in said.roles.get(group, ()))
    return mapped or (frozenset() if said.default_role == "none" else frozenset({said.default_role}))


def find_account(answer: Answer) -> SocialAccount | None:
    return SocialAccount.objects.select_related("user").filter(provider=read_issuer().url, uid=answer.sub).first()


def has_account(person: User) -> bool:
    return bool(SocialAccount.objects.filter(user_id=person.pk, provider=read_issuer().url).exists())


def sign_in_at_issuer(answer: Answer) -> User:
    """Return the person with this account, made if need be, with the roles of today's groups. Raises SignInRefused.

    Whoever has no role any more loses those that the issuer gave before; the refusal then carries no person.
    """
    _require_domain(answer)
    roles = map_roles(answer)
    account = find_account(answer)
    with transaction.atomic():
        if account is None and roles:
            account = _make_person(answer)
        if account is not None:
            # In a transaction of its own: a refusal below must not undo it.
            _apply_roles(account, roles)
            if answer.is_email_verified and not account.user.has_usable_password():
                User.objects.filter(pk=account.user_id).update(email=answer.email)
    # As it is now: the row that came with the account is older than its roles.
    person = User.objects.get(pk=account.user_id) if account is not None else None
    if person is None or not (roles or list_roles(person) or person.is_staff or person.memberships.exists()):
        text = _("%(name)s knows you, but none of your groups there has a role here. Ask an owner of this installation.")
        raise NoRole(text % {"name": read_issuer().name}, person)
    if not person.is_active:
        raise SignInRefused(_("This account is switched off. Ask an owner of this installation."))
    return person


class NoRole(SignInRefused):
    """The issuer knows somebody who has no role here. ``person``: whose sessions are to end, None = nobody of ours."""

    def __init__(self, message: str, person: User | None) -> None:
        super().__init__(message)
        self.person = person


def _require_domain(answer: Answer) -> None:
    domains = read_issuer().allowed_domains
    if domains and not (answer.is_email_verified and answer.email.rpartition("@")[2].lower() in domains):
        text = _("Only people with a verified e-mail address of %(domains)s may sign in here.")
        raise SignInRefused(text % {"domains": ", ".join(domains)})


def _make_person(answer: Answer) -> SocialAccount:
    """Make a person for an account that is new. Raises SignInRefused for a name that is no user name, or somebody else's."""
    name = answer.username[:150]
    try:
        User.username_validator(name)
    except ValidationError:
        text = _("%(name)s gave no name that can be used here: letters, digits and @ . + - _ only.")
        raise SignInRefused(text % {"name": read_issuer().name}) from None
    taken = _(
        "There is a local account named %(user)s already. Sign in to it without %(name)s and connect the two under My keys."
    ) % {"user": name, "name": read_issuer().name}
    # Without regard to case: people who approve are told apart by their names.
    if User.objects.filter(username__iexact=name).exists():
        raise SignInRefused(taken)
    try:
        with transaction.atomic():
            person = User.objects.create_user(
                name, email=answer.email if answer.is_email_verified else "", first_name=answer.first_name,
                last_name=answer.last_name,
            )  # fmt: skip
            account = SocialAccount.objects.create(
                user=person, provider=read_issuer().url, uid=answer.sub, extra_data={"roles": []}
            )
    except IntegrityError:
        raise SignInRefused(taken) from None
    record_event(actor=ACTOR, action="operator.create", target=name, detail={"issuer": read_issuer().url})
    return account


def _apply_roles(account: SocialAccount, roles: frozenset[str]) -> None:
    """Give the roles of today's groups and take those that groups gave earlier. What owners gave here stays."""
    person = account.user
    given = frozenset(account.extra_data.get("roles", ()))
    everywhere = {role for role in roles if ":" not in role}
    kept = set(list_roles(person)) - {Role(role) for role in given if ":" not in role}
    wanted = kept | {Role(role) for role in everywhere}
    if wanted != set(list_roles(person)):
        try:
            change_roles(person=person, roles=wanted, actor=ACTOR)
        except NotPermitted:
            # The last owner stays one until there is another: nobody could repair the mapping otherwise.
            change_roles(person=person, roles=wanted | {Role.OWNER}, actor=ACTOR)
            roles |= {Role.OWNER.value}
    # Of two groups that give a role in one tenant the admin's counts.
    parts = [role.partition(":") for role in sorted(roles, reverse=True) if ":" in role]
    tenants = {tenant: role for role, _colon, tenant in parts}
    held = {row.tenant: row for row in Membership.objects.filter(user_id=person.pk)}
    for tenant, role in tenants.items():
        if tenant not in held or held[tenant].is_from_issuer:
            set_member(person=person, tenant=tenant, role=Role(role), actor=ACTOR, is_from_issuer=True)
    for tenant, row in held.items():
        if row.is_from_issuer and tenant not in tenants:
            remove_member(membership_id=row.pk, tenant=tenant, actor=ACTOR)
    account.extra_data = {"roles": sorted(roles)}
    account.save()  # with the time, on which ``people.require_local`` relies


@transaction.atomic
def connect(person: User, answer: Answer) -> None:
    """Add the account to a person who is signed in and asked for it. Raises SignInRefused when it is somebody's already."""
    _require_domain(answer)
    found = find_account(answer)
    if found is not None and found.user_id != person.pk:
        raise SignInRefused(_("This account is connected to another person here."))
    if found is None:
        SocialAccount.objects.create(user=person, provider=read_issuer().url, uid=answer.sub, extra_data={"roles": []})
        name = person.get_username()
        record_event(actor=f"user:{name}", action="sign-in.connect", target=name, detail={"issuer": read_issuer().url})


@transaction.atomic
def disconnect(person: User) -> None:
    """Remove the person's accounts at issuers. Raises NotPermitted for who has no other way in."""
    if not (person.has_usable_password() or person.approver_keys.filter(revoked_at__isnull=True).exists()):
        raise NotPermitted(_("You have no other way to sign in. Make a passkey first."))
    name = person.get_username()
    for account in SocialAccount.objects.select_related("user").filter(user_id=person.pk):
        # What its groups gave goes with it: nobody would read them any more.
        _apply_roles(account, frozenset())
        account.delete()
        record_event(actor=f"user:{name}", action="sign-in.disconnect", target=name, detail={"issuer": account.provider})
