"""Django application of ``nodes``."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register


class NodesConfig(AppConfig):
    """GPU boxes and their credentials."""

    name = "nodes"
    verbose_name = "Nodes"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from nodes.checks import check_settings

        register(check_settings, "nodes")
