"""Addresses of the gateway's part of the admin REST API."""

from __future__ import annotations

from django.urls import path

from gateway.api import RequestListView

urlpatterns = [path("requests", RequestListView.as_view(), name="requests")]
