"""``manage.py disallow_model``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from gateway.services.models import disallow_model


class Command(ServiceCommand):
    """Refuse a model to clients."""

    help = "Refuse a model to clients."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        model = disallow_model(name=options["name"], actor=ACTOR)
        return f"{model.name} is not allowed any more"
