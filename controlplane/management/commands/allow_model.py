"""``manage.py allow_model``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from gateway.services.models import allow_model


class Command(ServiceCommand):
    """Let clients use a model."""

    help = "Let clients use a model. Under a policy, higher caps than it has need approval (limit-raise)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="exactly as boxes declare it and clients ask for it")
        parser.add_argument("--max-tokens", type=int, metavar="N", help="cap on generated tokens; left out, as it is")
        parser.add_argument("--max-prompt-chars", type=int, metavar="N", help="cap on the prompt in characters")
        parser.add_argument("--max-queue", type=int, metavar="N", help="how many requests may wait for a box")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        model = allow_model(
            name=options["name"],
            max_tokens=options["max_tokens"],
            max_prompt_chars=options["max_prompt_chars"],
            max_queue=options["max_queue"],
            actor=ACTOR,
        )
        return f"{model.name} is allowed"
