"""The admin site of operators: Unfold's, with our dashboard as its first page."""

from __future__ import annotations

from django.contrib.admin.apps import AdminConfig
from unfold.sites import UnfoldAdminSite


class MusterAdminSite(UnfoldAdminSite):  # type: ignore[misc]  # Unfold ships no types
    """The one admin site. Pages show; every change is a call of one service."""

    site_title = "Muster"
    site_header = "Muster"
    index_title = "Overview"


class MusterAdminConfig(AdminConfig):
    """Puts our site in the place of Django's."""

    default_site = "controlplane.admin_site.MusterAdminSite"
