"""Django application of ``nodes``, and what of its settings must fail at start, not at the first node that registers."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, register
from django.utils.module_loading import import_string

from core.limits import NodeLimits, limits
from nodes.addresses import parse_policy


class NodesConfig(AppConfig):
    name = "nodes"
    verbose_name = "Nodes"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register(check_settings, "nodes")


def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is wrong with the settings that start with ``NODE_``."""
    return [*_check_functions(), *_check_direct_hosts(), *_check_health(limits().nodes)]


def _check_functions() -> list[CheckMessage]:
    hints = {
        "NODE_MODEL_CHECK": "Name a function that takes a model name and returns whether it is allow-listed.",
        "NODE_TRAFFIC": "Name a function of (node id, model or None) that returns live requests and their tenants; or leave it "
        "empty.",
        "NODE_MODEL_FIT": "Name a function of (model, node_id=, quantization=) that returns why no GPU of the node can run it.",
        "NODE_DRAIN_FACTS": "Name a function of (node id, time) that returns nodes.services.drains.DrainFacts.",
        "NODE_REQUESTS": "Name a function of (node id, name of a range or nothing) that returns NodeRequests of conditions.",
    }
    problems: list[CheckMessage] = []
    for setting, hint in hints.items():
        path, number = getattr(settings, setting), "nodes.E001" if setting == "NODE_MODEL_CHECK" else "nodes.E005"
        if setting == "NODE_TRAFFIC" and not path:
            continue
        try:
            is_function = callable(import_string(path))
        except ImportError as error:
            problems.append(Error(f"{setting} names {path!r}, which cannot be imported: {error}", hint=hint, id=number))
        else:
            problems += [] if is_function else [Error(f"{setting} names {path!r}, which is no function.", hint=hint, id=number)]
    return problems


def _check_direct_hosts() -> list[CheckMessage]:
    try:
        parse_policy(settings.NODE_DIRECT_HOSTS, allow_loopback=settings.NODE_DIRECT_ALLOW_LOOPBACK)
    except ValueError as error:
        return [
            Error(
                f"MUSTER_DIRECT_HOSTS: {error}",
                hint="List hosts and networks, separated by commas: gpu1.lan, .gpus.lan, 10.0.0.0/24, gpu1.lan:8000, private.",
                id="nodes.E002",
            )
        ]
    return []


def _check_health(policy: NodeLimits) -> list[CheckMessage]:
    problems: list[CheckMessage] = []
    if not policy.heartbeat_interval_s < policy.stale_after_s <= policy.offline_after_s:
        problems.append(
            Error(
                "MUSTER_HEARTBEAT_INTERVAL_S, MUSTER_STALE_AFTER_S and MUSTER_OFFLINE_AFTER_S must rise in that order.",
                hint="The defaults are 5, 10 and 15 seconds.",
                id="nodes.E003",
            )
        )
    if not policy.bridge_ping_interval_s < policy.bridge_pong_window_s:
        problems.append(
            Error(
                "MUSTER_BRIDGE_PING_INTERVAL_S must be below MUSTER_BRIDGE_PONG_WINDOW_S.",
                hint="The defaults are 15 and 45 seconds.",
                id="nodes.E004",
            )
        )
    return problems
