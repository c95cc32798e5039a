"""The base of commands that call one service: what a service refuses is one clear line, not a traceback."""

from __future__ import annotations

from typing import Any

from django.core.management import BaseCommand, CommandError, CommandParser

from core.errors import ContractError

ACTOR = "system:cli"
"""How the audit trail names whoever has a shell on the server."""
SETTINGS_CHECKS = ("controlplane", "gateway", "governance", "nodes")
"""What an operator can get wrong, by tag. Django's own checks look at our code, and load every page to do so."""


class MusterCommand(BaseCommand):
    """A command whose help names ``./muster`` and only its own options; Django's work all the same."""

    launcher = "./muster manage"
    suppressed_base_arguments = {
        *("--version", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color"),
        "--skip-checks",
    }

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:  # Any: Django's signature
        """Return the parser with the name that people type."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        parser.prog = f"{self.launcher} {subcommand}"
        return parser


class ServiceCommand(MusterCommand):
    """Calls ``act`` and turns a refusal into an error message."""

    requires_system_checks = SETTINGS_CHECKS

    def handle(self, *args: Any, **options: Any) -> None:  # Any: Django's signature
        """Run the command. Raises CommandError."""
        try:
            self.stdout.write(self.act(options))
        except ContractError as error:
            raise CommandError(error.message) from error

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        """Call the service and return what to print."""
        raise NotImplementedError
