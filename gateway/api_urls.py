"""Addresses of the gateway's part of the admin REST API."""

from __future__ import annotations

from django.urls import path

from gateway.api import AliasListView, AliasView, RequestListView

urlpatterns = [
    path("requests", RequestListView.as_view(), name="requests"),
    path("api/v1/aliases", AliasListView.as_view(), name="aliases"),
    path("api/v1/aliases/<int:alias_id>", AliasView.as_view(), name="alias"),
]
