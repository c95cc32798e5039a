"""Django application of ``governance``."""

from __future__ import annotations

from django.apps import AppConfig


class GovernanceConfig(AppConfig):
    """Credentials of administrators and the append-only audit trail."""

    name = "governance"
    verbose_name = "Governance"
    default_auto_field = "django.db.models.BigAutoField"
