"""The webhooks that notices are posted to. One is switched off, never deleted: its notices keep pointing at it."""

from __future__ import annotations

import secrets

from django.db import transaction

from core.limits import limits
from governance.audit import record_event
from governance.models import Notice, WebhookEndpoint
from governance.webhooks import InvalidWebhook, parse_webhook_url
from wire import clock


@transaction.atomic
def add_webhook(*, name: str, url: str, actor: str) -> tuple[WebhookEndpoint, str]:
    """Post notices to ``url`` from now on; return the row and the secret that signs them, which is shown once.

    The name of a webhook that was removed may be used again. Raises InvalidWebhook.
    """
    cleaned = name.strip()
    if not cleaned or len(cleaned) > limits().governance.webhook_name_chars or not cleaned.isprintable():
        raise InvalidWebhook(
            f"Give the webhook a name of 1 to {limits().governance.webhook_name_chars} printable characters.", param="name"
        )
    target = parse_webhook_url(url)
    secret = f"whsec_{secrets.token_urlsafe(32)}"
    values = {"url": url.strip(), "secret": secret, "is_active": True}
    endpoint, is_new = WebhookEndpoint.objects.select_for_update().get_or_create(name=cleaned, defaults=values)
    if not is_new:
        if endpoint.is_active:
            raise InvalidWebhook(f"There is a webhook {cleaned} already; remove it first.", param="name")
        for field, value in values.items():
            setattr(endpoint, field, value)
        endpoint.save(update_fields=list(values))
    # Of the address only the host: chat services put their password into the path.
    record_event(actor=actor, action="webhook.add", target=cleaned, detail={"host": target.host})
    return endpoint, secret


@transaction.atomic
def remove_webhook(*, name: str, actor: str) -> WebhookEndpoint:
    """Post nothing there any more, what waits included; doing so again changes nothing. Raises InvalidWebhook."""
    endpoint = WebhookEndpoint.objects.select_for_update().filter(name=name.strip()).first()
    if endpoint is None:
        raise InvalidWebhook(f"There is no webhook {name.strip()[: limits().governance.webhook_name_chars]!r}.", param="name")
    if endpoint.is_active:
        endpoint.is_active = False
        endpoint.save(update_fields=["is_active"])
        waiting = Notice.objects.filter(webhook=endpoint, sent_at=None, given_up_at=None)
        waiting.update(given_up_at=clock.now(), last_error="the webhook was removed")
        record_event(actor=actor, action="webhook.remove", target=endpoint.name)
    return endpoint


def list_webhooks() -> list[WebhookEndpoint]:
    """Return every webhook, removed ones included, by name."""
    return list(WebhookEndpoint.objects.order_by("name"))
