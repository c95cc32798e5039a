"""Django application of the control plane itself: the operators' pages and the commands."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import WARNING, CheckMessage, register


class ControlplaneConfig(AppConfig):
    """Pages and commands. It has no rows of its own; the label ``controlplane`` belongs to the people of ``core``."""

    name = "controlplane"
    label = "console"

    def ready(self) -> None:
        from controlplane.playground.checks import check_gateway_urls

        register(check_gateway_urls, "controlplane")
        register(check_proxies, "controlplane")
        if settings.ADMIN_PAGES:  # nobody signs out anywhere else, and what follows loads the pages
            from django.contrib.auth.signals import user_logged_out

            from controlplane.playground.keys import forget_keys_of_session

            user_logged_out.connect(forget_keys_of_session, dispatch_uid="muster playground keys")


def check_proxies(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is missing when a TLS proxy stands in front of which nobody said where it is."""
    if not settings.BEHIND_TLS or settings.TRUSTED_PROXIES:
        return []
    return [
        CheckMessage(
            WARNING,
            "MUSTER_BEHIND_TLS is on and MUSTER_TRUSTED_PROXIES is empty: no forwarding header is believed, so everybody "
            "behind the proxy has its address, and pages take every request for plain HTTP.",
            hint="Name the addresses that the proxy calls from, such as MUSTER_TRUSTED_PROXIES=127.0.0.1, and let it set "
            "X-Forwarded-For and X-Forwarded-Proto as docs/lan-and-https.md shows.",
            id="controlplane.W001",
        )
    ]
