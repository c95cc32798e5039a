"""Django application of the floor: the people of an installation."""

from __future__ import annotations

from django.apps import AppConfig


class CoreConfig(AppConfig):
    """People. The label is older than the package: tables, permissions and migrations of installations carry it."""

    name = "core"
    label = "controlplane"
    verbose_name = "Operators"
    default_auto_field = "django.db.models.BigAutoField"
