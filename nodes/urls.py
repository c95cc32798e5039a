"""Addresses of the nodes REST API. The contract writes them without a trailing slash; with one they work too."""

from __future__ import annotations

from django.urls import re_path

from nodes.api import HeartbeatView, ModeView, NodeListView, RegisterView

urlpatterns = [
    re_path(r"^nodes/?$", NodeListView.as_view(), name="nodes"),
    re_path(r"^nodes/register/?$", RegisterView.as_view(), name="node-register"),
    re_path(r"^nodes/heartbeat/?$", HeartbeatView.as_view(), name="node-heartbeat"),
    re_path(r"^nodes/(?P<node_id>[^/]+)/mode/?$", ModeView.as_view(), name="node-mode"),
]
