"""``manage.py set_provider_state``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from nodes.services.credentials import delete_provider, disable_provider, enable_provider

CHANGES = {"enabled": enable_provider, "disabled": disable_provider, "deleted": delete_provider}


class Command(ServiceCommand):
    """Switch the boxes of a provider on or off, or end the provider."""

    help = "Switch the boxes of a provider on or off, or end the provider."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        parser.add_argument("state", choices=sorted(CHANGES))

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        CHANGES[options["state"]](name=options["name"], actor=ACTOR)
        return f"{options['name']} is {options['state']}"
