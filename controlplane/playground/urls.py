"""Addresses of the playground. They lie below ``/admin/``, where a session without a passkey may only look."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from controlplane.playground import views

app_name = "playground"
urlpatterns = [
    path("", admin.site.admin_view(views.show_playground), name="page"),
    path("send", views.send, name="send"),
    path("code", views.show_code, name="code"),
    path("facts", views.show_facts, name="facts"),
    path("wait", views.show_wait, name="wait"),
]
