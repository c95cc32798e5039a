"""``manage.py create_key``."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import suppress
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from gateway.services.errors import NameTaken
from gateway.services.keys import create_api_key
from gateway.services.tenants import create_tenant
from gateway.values import Priority


class Command(ServiceCommand):
    """Create a client API key and print it. It is shown this once."""

    help = "Create a client API key and print it. It is shown this once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--tenant", required=True, help="made when there is none of that name")
        parser.add_argument("--name", required=True, help="who or what will use it")
        parser.add_argument("--rpm", type=int, metavar="N", help="requests per minute; default: the tenant's")
        parser.add_argument("--models", default="", metavar="A,B", help="models it may use; default: every allowed one")

        parser.add_argument(
            "--priority", choices=list(Priority), default=Priority.NORMAL, type=str, help="how a box orders what waits on it"
        )

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        with suppress(NameTaken):
            create_tenant(name=options["tenant"], actor=ACTOR)
        _, text = create_api_key(
            name=options["name"],
            tenant_name=options["tenant"],
            requests_per_minute=options["rpm"],
            allowed_models=[name for name in options["models"].split(",") if name.strip()],
            priority=options["priority"],
            actor=ACTOR,
        )
        return text
