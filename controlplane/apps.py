"""Django application of the control plane itself: the user model and the operators' pages."""

from __future__ import annotations

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import register


class ControlplaneConfig(AppConfig):
    """Operators and their pages."""

    name = "controlplane"
    verbose_name = "Operators"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from controlplane.playground.checks import check_gateway_urls

        register(check_gateway_urls, "controlplane")
        if settings.ADMIN_PAGES:  # nobody signs out anywhere else, and what follows loads the pages
            from django.contrib.auth.signals import user_logged_out

            from controlplane.playground.keys import forget_keys_of_session

            user_logged_out.connect(forget_keys_of_session, dispatch_uid="muster playground keys")
