"""Groups of boxes that are switched on and off together."""

from __future__ import annotations

import re

from django.db import IntegrityError, transaction

from core.hints import publish_hint
from governance.audit import record_event
from nodes.errors import BadRequest, Conflict, ProviderNotFound
from nodes.models import NodeCredential, Provider, ProviderState
from wire import clock

_NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,59}\Z")


@transaction.atomic
def create_provider(*, name: str, actor: str) -> Provider:
    """Create an enabled provider, or bring a deleted one back (its old credentials stay revoked).

    Raises BadRequest for a name that is not 1 to 60 letters, digits, ``-`` or ``_``, and Conflict when it exists.
    """
    if not _NAME_RE.match(name):
        raise BadRequest(
            "A provider name is 1 to 60 letters, digits, hyphens or underscores and starts with a letter or digit.",
            param="name",
        )
    provider = _revive(name) or _insert(name)
    _record(provider, "provider.create", actor)
    return provider


@transaction.atomic
def enable_provider(*, name: str, actor: str) -> Provider:
    """Let boxes of a provider connect and work again. Raises ProviderNotFound."""
    return _move(name, ProviderState.DISABLED, ProviderState.ENABLED, "provider.enable", actor)


@transaction.atomic
def disable_provider(*, name: str, actor: str) -> Provider:
    """Stop boxes of a provider from connecting and from getting work. Raises ProviderNotFound."""
    return _move(name, ProviderState.ENABLED, ProviderState.DISABLED, "provider.disable", actor)


@transaction.atomic
def delete_provider(*, name: str, actor: str) -> Provider:
    """End a provider and revoke its credentials. The row stays, because boxes and records refer to it.

    Raises ProviderNotFound.
    """
    now = clock.now()
    changed = (
        Provider.objects.filter(name=name)
        .exclude(state=ProviderState.DELETED)
        .update(state=ProviderState.DELETED, updated_at=now)
    )
    if not changed:
        raise ProviderNotFound(f"There is no provider {name!r}.", param="name")
    provider = Provider.objects.get(name=name)
    revoked = NodeCredential.objects.filter(provider=provider, revoked_at__isnull=True).update(revoked_at=now, updated_at=now)
    _record(provider, "provider.delete", actor, revoked_credentials=revoked)
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
        raise Conflict(f"Provider {name!r} exists already.", param="name") from None


def _move(name: str, old: ProviderState, new: ProviderState, action: str, actor: str) -> Provider:
    changed = Provider.objects.filter(name=name, state=old).update(state=new, updated_at=clock.now())
    provider = Provider.objects.filter(name=name).exclude(state=ProviderState.DELETED).first()
    if provider is None:
        raise ProviderNotFound(f"There is no provider {name!r}.", param="name")
    if changed:
        _record(provider, action, actor)
    return provider


def _record(provider: Provider, action: str, actor: str, **detail: int) -> None:
    record_event(actor=actor, action=action, target=provider.name, detail=detail)
    publish_hint("providers", provider.name)
