"""Settings of the playground that must fail at start, not at the first question."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error

from controlplane.playground.passage import is_gateway_url


def check_gateway_urls(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is wrong with the addresses of the gateway."""
    named = {
        "MUSTER_PLAYGROUND_GATEWAY_URL": settings.PLAYGROUND_GATEWAY_URL,
        "MUSTER_GATEWAY_PUBLIC_URL": settings.GATEWAY_PUBLIC_URL,
    }
    hint = "Give scheme, host and port alone, such as http://127.0.0.1:8080."
    return [
        Error(f"{name} is {url!r}, which is no address of a gateway", hint=hint, id="controlplane.E001")
        for name, url in named.items()
        if not is_gateway_url(str(url))
    ]
