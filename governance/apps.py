"""Django application of ``governance``."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class GovernanceConfig(AppConfig):
    """Credentials of administrators and the append-only audit trail."""

    name = "governance"
    verbose_name = "Governance"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from governance.registry import check_operations

        register(check_operations, "governance")
