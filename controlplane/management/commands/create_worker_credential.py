"""``manage.py create_worker_credential``."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import suppress
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from nodes.errors import Conflict
from nodes.services.credentials import create_credential, create_provider


class Command(ServiceCommand):
    """Create a credential for GPU boxes and print it. It is shown this once."""

    help = "Create a credential for GPU boxes and print it. It is shown this once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--name", required=True, help="which box or boxes will use it")
        parser.add_argument("--provider", default="local", help="made when there is none of that name (default: local)")
        parser.add_argument("--max-nodes", type=int, default=1, metavar="N", help="how many boxes may enrol with it")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        with suppress(Conflict):
            create_provider(name=options["provider"], actor=ACTOR)
        _, text = create_credential(
            name=options["name"], provider_name=options["provider"], max_nodes=options["max_nodes"], actor=ACTOR
        )
        return text
