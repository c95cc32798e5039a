"""``manage.py create_admin_token``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from governance.services import create_admin_token


class Command(ServiceCommand):
    """Create a token for the admin APIs and print it. It is shown this once."""

    help = "Create a token for the admin APIs and print it. It is shown this once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--name", required=True, help="who or what will use it")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        _, text = create_admin_token(name=options["name"], actor=ACTOR)
        return text
