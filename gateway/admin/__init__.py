"""Operators' pages of the gateway. They show; every change is a page that asks, a POST and one call of a service."""

from __future__ import annotations

from gateway.admin import aliases, callers, models, requests

__all__ = ["aliases", "callers", "models", "requests"]
