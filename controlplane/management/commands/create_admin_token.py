"""``manage.py create_admin_token``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management import CommandError

from controlplane.management.service_command import ACTOR, ServiceCommand
from core.models import User
from governance.admin_tokens import create_admin_token


class Command(ServiceCommand):
    """Create a token for the admin APIs and print it. It is shown this once."""

    help = "Create a token for the admin APIs and print it. It is shown this once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--name", required=True, help="who or what will use it")
        parser.add_argument(
            "--owner", metavar="USERNAME", help="whose it is: it acts as this person, and brings their approvals"
        )

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        owner = None
        if options["owner"] and (owner := User.objects.filter(username=options["owner"], is_active=True).first()) is None:
            raise CommandError(f"There is no person {options['owner']} who may sign in.")
        _, text = create_admin_token(name=options["name"], actor=ACTOR, owner=owner)
        return text
