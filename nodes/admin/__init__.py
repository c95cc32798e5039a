"""Operators' pages of the node registry: they show, ask, and call one service on a confirmed POST."""

from __future__ import annotations

from nodes.admin.boxes import NodeAdmin, describe_age
from nodes.admin.credentials import NodeCredentialAdmin
from nodes.admin.providers import ProviderAdmin

__all__ = ["NodeAdmin", "NodeCredentialAdmin", "ProviderAdmin", "describe_age"]
