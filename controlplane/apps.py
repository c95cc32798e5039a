"""Django application of the control plane itself: the user model and the operators' pages."""

from __future__ import annotations

from django.apps import AppConfig


class ControlplaneConfig(AppConfig):
    """Operators and their pages."""

    name = "controlplane"
    verbose_name = "Operators"
    default_auto_field = "django.db.models.BigAutoField"
