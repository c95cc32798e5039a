"""Operators' pages of nodes. They show; every change is a page that asks, a POST and one call of a service."""

from __future__ import annotations

from nodes.admin import credentials, gpus, nodes

__all__ = ["credentials", "gpus", "nodes"]
