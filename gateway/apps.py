"""Django application of ``gateway``, and what is checked of its settings at start instead of at the first request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, register


class GatewayConfig(AppConfig):
    """Client API keys, tenants, models and request records."""

    name = "gateway"
    verbose_name = "Gateway"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register(check_settings, "gateway")


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    return [
        *_check_tokenizers(settings.TOKENIZERS_DIR),
        *_check_origins(settings.CORS_ORIGINS),
    ]


def _check_origins(origins: Sequence[str]) -> list[CheckMessage]:
    from gateway.request.response import EVERYBODY, ORIGIN_RE  # needs the models, which Django loads after this module

    return [
        Error(
            f"MUSTER_CORS_ORIGINS names {origin!r}, which is no origin.",
            hint='Name scheme, host and port as browsers send them, such as "https://chat.example.com", or "*".',
            id="gateway.E002",
        )
        for origin in origins
        if origin != EVERYBODY and not ORIGIN_RE.match(origin)
    ]


def _check_tokenizers(root: str) -> list[CheckMessage]:
    if not root or Path(root).is_dir():
        return []
    return [
        Error(
            f"MUSTER_TOKENIZERS_DIR names {root!r}, which is no folder.",
            hint="Name a folder with one folder for each model's tokenizer.json, or leave it empty: nodes then count tokens.",
            id="gateway.E001",
        )
    ]
