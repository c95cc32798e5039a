"""``manage.py webhook``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from governance.notices import add_webhook, list_webhooks, remove_webhook


class Command(ServiceCommand):
    """Add, list or remove the webhooks that notices of operations are posted to."""

    help = "Add, list or remove the webhooks that notices of operations are posted to."

    def add_arguments(self, parser: ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True)
        add = actions.add_parser("add", help="post notices there; prints the secret that signs them, this once")
        add.add_argument("name")
        add.add_argument("url", help="https://…, or http://… on this machine or a private network")
        remove = actions.add_parser("remove", help="post nothing there any more")
        remove.add_argument("name")
        actions.add_parser("list", help="names and states; addresses may be secret and are not shown")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        match options["action"]:
            case "add":
                return add_webhook(name=options["name"], url=options["url"], actor=ACTOR)[1]
            case "remove":
                return f"{remove_webhook(name=options['name'], actor=ACTOR).name} is removed"
            case _:
                lines = [f"{row.name}  {'active' if row.is_active else 'removed'}" for row in list_webhooks()]
                return "\n".join(lines) or "There is no webhook."
