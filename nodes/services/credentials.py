"""Credentials of nodes, shown once and revoked but never deleted, and the providers that they belong to."""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.errors import BadRequest, Conflict, CredentialNotFound, NodeNotFound, ProviderNotFound
from nodes.models import Node, NodeCredential, Provider, ProviderState, open_credential, seal_credential
from wire import clock
from wire.credentials import (
    CredentialKind,
    MintedCredential,
    derive_credential,
    is_credential,
    mint_credential,
    parse_keyid,
    stand_in,
    verify_credential,
)

if TYPE_CHECKING:
    import jwt

_NO_DIGEST = bytes(32)

logger = logging.getLogger("muster.nodes")


@transaction.atomic
def create_credential(
    *,
    name: str,
    provider_name: str,
    actor: str,
    max_nodes: int = 1,
    node_id: uuid.UUID | None = None,
    allows_models: bool = False,
    own: MintedCredential | None = None,
) -> tuple[NodeCredential, str]:
    """Create a credential and return it with its text, which exists nowhere else and is shown once.

    With ``node_id`` it speaks for that node alone; without, up to ``max_nodes`` nodes may enrol with it. ``allows_models``:
    clients may use what its nodes declare. ``own``: what stands for the operator's own secret.
    Raises BadRequest, ProviderNotFound, NodeNotFound.
    """
    cleaned = name.strip()
    if not cleaned or len(cleaned) > limits().nodes.credential_name_chars:
        raise BadRequest(
            _("Give the credential a name of 1 to %(most)s characters.") % {"most": limits().nodes.credential_name_chars},
            param="name",
        )
    if not 1 <= max_nodes <= limits().nodes.credential_nodes:
        raise BadRequest(
            _("max_nodes must be between 1 and %(credential_nodes)s.") % {"credential_nodes": limits().nodes.credential_nodes},
            param="max_nodes",
        )
    provider = Provider.objects.filter(name=provider_name).exclude(state=ProviderState.DELETED).first()
    if provider is None:
        raise ProviderNotFound(
            _("There is no provider %(provider_name)r; create it first.") % {"provider_name": provider_name},
            param="provider_name",
        )
    node = _find_bound_node(node_id, provider)
    minted = own or mint_credential(CredentialKind.WORKER)
    credential = NodeCredential.objects.create(
        name=cleaned,
        keyid=minted.keyid,
        digest=minted.digest,
        sealed_text=seal_credential(minted.text),
        provider=provider,
        node=node,
        max_nodes=max_nodes,
        allows_models=allows_models,
        variable=OWN_SECRET if own is not None else "",
    )
    detail: dict[str, object] = {"keyid": minted.keyid, "provider": provider.name, "max_nodes": max_nodes}
    if allows_models:
        detail["allows_models"] = True
    record_event(actor=actor, action="node_credential.create", target=cleaned, detail=detail)
    return credential, minted.text


@transaction.atomic
def revoke_credential(*, credential_id: int, actor: str) -> NodeCredential:
    """Make a credential useless; nodes connected with it are cut off. Doing so again changes nothing.

    Raises CredentialNotFound.
    """
    now = clock.now()
    open_ones = NodeCredential.objects.filter(pk=credential_id, revoked_at__isnull=True)
    changed = open_ones.update(revoked_at=now, updated_at=now)
    credential = NodeCredential.objects.select_related("provider").filter(pk=credential_id).first()
    if credential is None:
        raise CredentialNotFound(
            _("There is no node credential %(credential_id)s.") % {"credential_id": credential_id}, param="credential_id"
        )
    if changed:
        record_event(actor=actor, action="node_credential.revoke", target=credential.name, detail={"keyid": credential.keyid})
        publish_hint("nodes", credential.keyid)
    return credential


@transaction.atomic
def trust_models(*, credential_id: int, trusts: bool, actor: str) -> NodeCredential:
    """Have what the nodes of a credential declare allowed by itself, or no longer; what is allowed stays so.

    Raises CredentialNotFound.
    """
    now = clock.now()
    credential = NodeCredential.objects.select_for_update().filter(pk=credential_id).first()
    if credential is None:
        raise CredentialNotFound(f"There is no node credential {credential_id}.", param="credential_id")
    if credential.allows_models != trusts:
        credential.allows_models = trusts
        credential.save(update_fields=["allows_models", "updated_at"])
        credential.nodes.update(updated_at=now)  # gateways read a node again when its row changed
        detail = {"keyid": credential.keyid, "allows_models": trusts}
        record_event(actor=actor, action="node_credential.trust_models", target=credential.name, detail=detail)
        publish_hint("providers", credential.keyid)
    return credential


OWN_SECRET, OWN_NAME = "MUSTER_WORKER_SECRET", "environment"


def read_bearer(text: str) -> str:
    """Return the credential that a text stands for: itself, or that of the operator's own secret."""
    return stand_in(text, settings.OWN_WORKER_SECRET, CredentialKind.WORKER, secret_key=settings.SECRET_KEY)


@transaction.atomic
def keep_own_credential(*, actor: str) -> None:
    """Make the credential of MUSTER_WORKER_SECRET, and end that of another secret or provider.

    One that somebody revoked stays so. Raises BadRequest.
    """
    secret, provider_name = settings.OWN_WORKER_SECRET, settings.OWN_PROVIDER
    wanted = None
    if secret and not is_credential(secret):
        wanted = derive_credential(CredentialKind.WORKER, secret, secret_key=settings.SECRET_KEY)
    for row in NodeCredential.objects.select_for_update().filter(variable=OWN_SECRET, revoked_at=None):
        if wanted is not None and (row.keyid, row.provider.name) == (wanted.keyid, provider_name):
            return
        revoke_credential(credential_id=row.pk, actor=actor)
        # Its key id is free for when the secret comes back.
        NodeCredential.objects.filter(pk=row.pk).update(keyid=mint_credential(CredentialKind.WORKER).keyid)
    if wanted is None:
        return
    if NodeCredential.objects.filter(keyid=wanted.keyid).exists():
        logger.warning("credential.own_revoked variable=%s; it was revoked on its page: choose another secret", OWN_SECRET)
        return
    if not Provider.objects.filter(name=provider_name).exclude(state=ProviderState.DELETED).exists():
        create_provider(name=provider_name, actor=actor)
    nodes = limits().nodes.credential_nodes
    # As where the variable comes from: clients may use what a worker with this secret serves.
    create_credential(name=OWN_NAME, provider_name=provider_name, max_nodes=nodes, allows_models=True, actor=actor, own=wanted)


def list_provider_names() -> list[str]:
    """Return the providers that credentials can be of, by name."""
    return list(Provider.objects.exclude(state=ProviderState.DELETED).order_by("name").values_list("name", flat=True))


def find_credential(text: str) -> NodeCredential | None:
    """Return the credential that ``text`` is, None when it is none: see ``find_credentials``."""
    return find_credentials({text}).get(text)


def find_credentials(texts: Collection[str]) -> dict[str, NodeCredential]:
    """Return the credentials (provider and bound node loaded) of those texts that are one and not revoked.

    A client key or an admin token is none. The provider may be disabled: what that means is for the caller to decide.
    """
    spoken = {text: read_bearer(text) for text in texts}
    jwts = {text: row for text in texts if text.count(".") == 2 and (row := find_by_jwt(text)) is not None}
    keyids = {text: keyid for text, own in spoken.items() if (keyid := parse_keyid(own, CredentialKind.WORKER)) is not None}
    if not keyids:
        _touch(jwts.values())
        return jwts
    rows = NodeCredential.objects.select_related("provider", "node").filter(keyid__in=set(keyids.values()), revoked_at=None)
    known = {row.keyid: row for row in rows}
    found = jwts
    for text, keyid in keyids.items():
        row = known.get(keyid)
        # Compared also where there is no row: the time does not tell which key ids exist.
        matches = verify_credential(spoken[text], bytes(row.digest) if row is not None else _NO_DIGEST)
        if row is not None and matches:
            found[text] = row
    _touch(found.values())
    return found


JWT_CREDENTIAL = "agents-by-jwt"
"""Name of the credential, one for each provider, that agents with a token of ``AGENT_JWKS`` enrol with. Nobody has its text."""
_HMAC, _BY_KEY = ("HS256",), ("EdDSA", "ES256", "RS256")


def find_by_jwt(text: str) -> NodeCredential | None:
    """Return the credential that a JWT (RFC 7519) of an agent stands for, provider and bound node loaded; None = none.

    HS256 with the text of a credential, which ``kid`` names by its key id; or EdDSA, ES256 or RS256 with a key of
    ``AGENT_JWKS``, whose ``provider`` claim names the provider (default ``local``). ``sub`` and ``exp`` are required.
    """
    import jwt  # a gateway without such agents does not load it

    try:
        header = jwt.get_unverified_header(text)
    except jwt.PyJWTError:
        return None
    kid = header.get("kid")
    if header.get("alg") in _HMAC:
        row = NodeCredential.objects.select_related("provider", "node").filter(keyid=kid or "", revoked_at=None).first()
        secret = open_credential(row) if row is not None else ""
        return row if secret and _read_claims(text, secret, _HMAC) is not None else None
    key = _find_jwk(kid) if isinstance(kid, str) else None
    claims = _read_claims(text, key, _BY_KEY) if key is not None else None
    return None if claims is None else _find_jwt_credential(str(claims.get("provider") or "local"))


def read_jwt_subject(text: str) -> str | None:
    """Return the agent that a credential which was found good names; None = it is no JWT and names none."""
    if text.count(".") != 2 or text == settings.OWN_WORKER_SECRET:
        return None
    import jwt

    return str(jwt.decode(text, options={"verify_signature": False}).get("sub", ""))


def _read_claims(text: str, key: jwt.PyJWK | str, algorithms: Sequence[str]) -> dict[str, object] | None:
    import jwt

    try:
        claims: dict[str, object] = jwt.decode(
            text, key, algorithms=list(algorithms), options={"require": ["exp", "sub"]}, leeway=limits().nodes.jwt_leeway_s
        )
    except jwt.PyJWTError:
        return None
    return claims


def _find_jwt_credential(provider_name: str) -> NodeCredential | None:
    provider = Provider.objects.filter(name=provider_name).exclude(state=ProviderState.DELETED).first()
    if provider is None:
        return None
    minted = mint_credential(CredentialKind.WORKER)  # its text is forgotten: only tokens stand for it
    row, _made = NodeCredential.objects.select_related("provider", "node").get_or_create(
        name=JWT_CREDENTIAL,
        provider=provider,
        defaults={"keyid": minted.keyid, "digest": minted.digest, "max_nodes": limits().nodes.credential_nodes},
    )
    return row if row.revoked_at is None else None


class _Jwks:
    """The keys that ``AGENT_JWKS`` names, as last read; a file, or a URL that is asked once in ``jwks_s``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._source = ""
        self._keys: dict[str, jwt.PyJWK] = {}

    def find(self, kid: str) -> jwt.PyJWK | None:
        import jwt

        source = settings.AGENT_JWKS
        with self._lock:
            if source and (source != self._source or clock.monotonic() - self._read_at >= limits().nodes.jwks_s):
                self._source, self._read_at = source, clock.monotonic()
                try:
                    found = jwt.PyJWKSet.from_json(_read_source(source))
                    self._keys = {key.key_id: key for key in found.keys if key.key_id}
                except (OSError, ValueError, jwt.PyJWTError) as error:
                    # Those that were read before stay: an issuer that restarts must not stop agents.
                    logger.error("agent.jwks_unreadable source=%s error=%s", source, error)  # noqa: TRY400
            return self._keys.get(kid) if source else None


_find_jwk = _Jwks().find


def _read_source(source: str) -> str:
    """Return the text of a JWK set (RFC 7517 section 5). Raises OSError."""
    if "://" not in source:
        return Path(source).read_text(encoding="utf-8")
    import httpx  # a gateway without such a URL does not load it

    try:
        answer = httpx.get(source, timeout=limits().nodes.lookup_s, follow_redirects=False)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise OSError(str(error) or type(error).__name__) from None
    return answer.text


def read_credential_digests() -> list[bytes]:
    """Return the digests of all credentials that are not revoked."""
    return [bytes(digest) for digest in NodeCredential.objects.filter(revoked_at=None).values_list("digest", flat=True)]


def _find_bound_node(node_id: uuid.UUID | None, provider: Provider) -> Node | None:
    if node_id is None:
        return None
    node = Node.objects.filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    if node.provider_id != provider.pk:
        raise BadRequest(
            _("Node %(name)r belongs to another provider than %(provider)r.") % {"name": node.name, "provider": provider.name},
            param="provider_name",
        )
    return node


def _touch(credentials: Iterable[NodeCredential]) -> None:
    now = clock.now()
    before = now - timedelta(seconds=limits().nodes.credential_use_s)
    due = [one.pk for one in credentials if one.last_used_at is None or one.last_used_at <= before]
    if due:
        # updated_at stays: use is not a change that anyone must reload.
        unused = Q(last_used_at__isnull=True) | Q(last_used_at__lt=before)
        NodeCredential.objects.filter(unused, pk__in=due).update(last_used_at=now)


_NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}\Z")


@transaction.atomic
def create_provider(*, name: str, actor: str) -> Provider:
    """Create an enabled provider, or bring a deleted one back (its old credentials stay revoked).

    Raises BadRequest for a name that is not 1 to 60 letters, digits, ``-`` or ``_``, and Conflict when it exists.
    """
    if not _NAME_RE.match(name):
        raise BadRequest(
            _("A provider name is 1 to 60 letters, digits, hyphens or underscores and starts with a letter or digit."),
            param="name",
        )
    provider = _revive(name) or _insert(name)
    _record(provider, "provider.create", actor)
    return provider


@transaction.atomic
def enable_provider(*, name: str, actor: str) -> Provider:
    """Let nodes of a provider connect and work again. Raises ProviderNotFound."""
    return _move(name, ProviderState.DISABLED, ProviderState.ENABLED, "provider.enable", actor)


@transaction.atomic
def disable_provider(*, name: str, actor: str) -> Provider:
    """Stop nodes of a provider from connecting and from getting work. Raises ProviderNotFound."""
    return _move(name, ProviderState.ENABLED, ProviderState.DISABLED, "provider.disable", actor)


@transaction.atomic
def delete_provider(*, name: str, actor: str) -> Provider:
    """End a provider and revoke its credentials. Raises ProviderNotFound."""
    # The row stays, because nodes and records refer to it.
    now = clock.now()
    changed = (
        Provider.objects.filter(name=name)
        .exclude(state=ProviderState.DELETED)
        .update(state=ProviderState.DELETED, updated_at=now)
    )
    if not changed:
        raise ProviderNotFound(_("There is no provider %(name)r.") % {"name": name}, param="name")
    provider = Provider.objects.get(name=name)
    revoked = NodeCredential.objects.filter(provider=provider, revoked_at__isnull=True).update(revoked_at=now, updated_at=now)
    _record(provider, "provider.delete", actor, revoked_credentials=revoked)
    return provider


@transaction.atomic
def change_provider_terms(
    *,
    name: str,
    max_queue: int | None,
    queue_s: int | None,
    no_node_s: int | None,
    max_models: int | None,
    actor: str,
) -> Provider:
    """Set how long, and how many, requests wait for a provider's models, and how many models a node of it may declare.

    None = as everywhere. Of a model that several providers have, the most patient one counts, and its queue is full when all
    of theirs are. Raises BadRequest, ProviderNotFound.
    """
    most = limits().nodes
    for param, value, least, bound in (
        ("max_queue", max_queue, 1, most.report_integer), ("queue_s", queue_s, 1, most.provider_wait_s),
        ("no_node_s", no_node_s, 0, most.provider_wait_s), ("max_models", max_models, 1, most.max_models),
    ):  # fmt: skip
        if value is not None and not least <= value <= bound:
            raise BadRequest(f"{param} must be between {least} and {bound:g}.", param=param)
    provider = Provider.objects.select_for_update().filter(name=name).exclude(state=ProviderState.DELETED).first()
    if provider is None:
        raise ProviderNotFound(f"There is no provider {name!r}.", param="name")
    after = {"max_queue": max_queue, "queue_s": queue_s, "no_node_s": no_node_s, "max_models": max_models}
    before = {field: getattr(provider, field) for field in after}
    if after != before:
        for field, value in after.items():
            setattr(provider, field, value)
        provider.save(update_fields=[*after, "updated_at"])
        record_event(actor=actor, action="provider.terms", target=name, detail={"from": before, "to": after})
        publish_hint("providers", name)
    return provider


def _revive(name: str) -> Provider | None:
    changed = Provider.objects.filter(name=name, state=ProviderState.DELETED).update(
        state=ProviderState.ENABLED, updated_at=clock.now()
    )
    return Provider.objects.get(name=name) if changed else None


def _insert(name: str) -> Provider:
    try:
        with transaction.atomic():
            return Provider.objects.create(name=name)
    except IntegrityError:
        raise Conflict(_("Provider %(name)r exists already.") % {"name": name}, param="name") from None


def _move(name: str, old: ProviderState, new: ProviderState, action: str, actor: str) -> Provider:
    changed = Provider.objects.filter(name=name, state=old).update(state=new, updated_at=clock.now())
    provider = Provider.objects.filter(name=name).exclude(state=ProviderState.DELETED).first()
    if provider is None:
        raise ProviderNotFound(_("There is no provider %(name)r.") % {"name": name}, param="name")
    if changed:
        _record(provider, action, actor)
    return provider


def _record(provider: Provider, action: str, actor: str, **detail: int) -> None:
    record_event(actor=actor, action=action, target=provider.name, detail=detail)
    publish_hint("providers", provider.name)
