"""Django application of ``gateway``."""

from __future__ import annotations

from django.apps import AppConfig


class GatewayConfig(AppConfig):
    """Client API keys, tenants, models and request records."""

    name = "gateway"
    verbose_name = "Gateway"
    default_auto_field = "django.db.models.BigAutoField"
