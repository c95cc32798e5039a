"""Django application of ``gateway``."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class GatewayConfig(AppConfig):
    """Client API keys, tenants, models and request records."""

    name = "gateway"
    verbose_name = "Gateway"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from gateway.checks import check_settings

        register(check_settings, "gateway")
