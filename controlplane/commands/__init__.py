"""The commands of ``./muster manage``: ours, one function each, and Django's own. Help shows only what a person sets."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from django.core.management import BaseCommand, CommandError, CommandParser, ManagementUtility

from core.errors import ContractError

ACTOR = "system:cli"
"""How the audit trail names whoever has a shell on the server."""
SETTINGS_CHECKS = ("controlplane", "gateway", "nodes")
"""What an operator can get wrong, by tag. Django's own checks look at our code, and load every page to do so."""
MODULES = {
    "audit": ("audit",),
    "bootstrap": ("bootstrap",),
    "ca": ("ca",),
    "demo": ("demo_fleet",),
    "fleet": (
        *("allow_model", "create_key", "create_worker_credential", "disallow_model", "explain", "node_action"),
        *("replay_routing", "set_provider_state", "set_provider_terms", "ticket_key", "webhook"),
    ),
    "people": ("approver_keys", "create_admin_token", "demo_governance", "invite"),
}
"""Which module of this package declares which commands."""
# Options of each of Django's commands. They work, and no help shows them.
_OF_DJANGO = {
    *("--version", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color", "--force-color", "--skip-checks"),
}

Options = Mapping[str, Any]
"""Parsed options, as argparse has them."""
Arguments = Callable[[ArgumentParser], object]


@dataclass(frozen=True, slots=True)
class Declared:
    """A command of ours. ``act`` returns what to print, or that and the exit status."""

    text: str
    arguments: tuple[Arguments, ...]
    act: Callable[[Options], str | tuple[str, int]]


declared: dict[str, Declared] = {}


def argument(*names: str, **options: Any) -> Arguments:  # Any: ``ArgumentParser.add_argument``'s own
    """Return what adds an argument to a command."""
    return lambda parser: parser.add_argument(*names, **options)


def command(
    name: str, text: str, *arguments: Arguments
) -> Callable[[Callable[[Options], str | tuple[str, int]]], Callable[[Options], str | tuple[str, int]]]:
    """Declare a function as the command ``name``. ``text``: its help, which the launcher reads out of the source."""

    def declare(act: Callable[[Options], str | tuple[str, int]]) -> Callable[[Options], str | tuple[str, int]]:
        declared[name] = Declared(text, arguments, act)
        return act

    return declare


class Command(BaseCommand):
    """Runs a declared command. What a service refuses is one clear line, not a traceback."""

    requires_system_checks = SETTINGS_CHECKS

    def __init__(self, name: str) -> None:
        super().__init__()
        import_module(f"controlplane.commands.{next(module for module, names in MODULES.items() if name in names)}")
        self._declared = declared[name]
        self.help = self._declared.text

    def add_arguments(self, parser: ArgumentParser) -> None:
        for add in self._declared.arguments:
            add(parser)

    def handle(self, *args: object, **options: object) -> None:
        try:
            said = self._declared.act(options)
        except ContractError as error:
            raise CommandError(error.message) from error
        text, status = (said, 0) if isinstance(said, str) else said
        if text:
            self.stdout.write(text)
        if status:
            raise SystemExit(status)


class MusterUtility(ManagementUtility):
    """Django's command line with our commands."""

    def fetch_command(self, subcommand: str) -> BaseCommand:
        """Return a command, ours first."""
        is_ours = any(subcommand in names for names in MODULES.values())
        found = Command(subcommand) if is_ours else super().fetch_command(subcommand)
        make_parser = found.create_parser

        def create_parser(*args: str, **options: Any) -> CommandParser:  # Any: of argparse
            parser = make_parser(*args, **options)
            # ``suppressed_base_arguments`` would do, but Django adds --skip-checks past it.
            for action in parser._actions:  # noqa: SLF001  # argparse has no other way to what was added
                if not _OF_DJANGO.isdisjoint(action.option_strings):
                    action.help = SUPPRESS
            return parser

        found.create_parser = create_parser  # type: ignore[method-assign]  # of this one command
        return found


def run_command(words: Sequence[str]) -> None:
    """Run one command under the name that people type, wherever it was started."""
    MusterUtility(["muster" if words[:1] in (["audit"], ["ca"]) else "muster manage", *words]).execute()
