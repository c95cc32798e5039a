"""Settings of the playground that must fail at start, not at the first question.

Every process loads this module, also those that show no page: it imports nothing of the playground.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error


def is_gateway_url(url: str) -> bool:
    """Return whether ``url`` is nothing but http or https, a host and perhaps a port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_bare = parts.path in {"", "/"} and not (parts.query or parts.fragment or parts.username or parts.password)
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and is_bare and port != 0


def check_gateway_urls(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is wrong with the addresses of the gateway."""
    named = {
        "MUSTER_PLAYGROUND_GATEWAY_URL": settings.PLAYGROUND_GATEWAY_URL,
        "MUSTER_GATEWAY_PUBLIC_URL": settings.GATEWAY_PUBLIC_URL,
    }
    hint = "Give scheme, host and port alone, such as http://127.0.0.1:8080."
    return [
        Error(f"{name} is no address of a gateway", hint=hint, id="controlplane.E001")
        for name, url in named.items()
        if not is_gateway_url(str(url))
    ]
