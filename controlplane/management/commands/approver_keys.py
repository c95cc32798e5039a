"""``manage.py approver_keys``: register, list and revoke the keys of a person from a shell on the server."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management import CommandError

from controlplane.management.service_command import ACTOR, ServiceCommand
from core.models import User
from governance.keys import KeyView, add_key_file, list_keys, revoke_key


class Command(ServiceCommand):
    """Register, list or revoke the keys of a person."""

    help = "Register the public line of a key file, list the keys of a person, or revoke one."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=["add", "list", "revoke"])
        parser.add_argument("name", help="username")
        parser.add_argument("thumbprint", nargs="?", default="", help="with revoke: the key, or the beginning of it")
        parser.add_argument("--public", default="", metavar="LINE", help="with add: what ./muster keys show prints")
        parser.add_argument("--label", default="", help="with add: what to call it (default: the name in the line)")
        parser.add_argument("--break-glass", action="store_true", help="with add: for break-glass and nothing else")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        person = User.objects.filter(username=options["name"]).first()
        if person is None:
            raise CommandError(f"There is no person {options['name']}.")
        if options["action"] == "add":
            return add(person, options)
        keys = list_keys(person)
        if options["action"] == "list":
            return "\n".join(describe(key) for key in keys) or f"{person.username} has no key."
        return revoke(person, keys, options["thumbprint"])


def add(person: User, options: dict[str, Any]) -> str:  # Any: parsed options
    """Register a key file and say so."""
    key = add_key_file(
        user=person,
        line=options["public"],
        label=options["label"],
        is_break_glass=options["break_glass"],
        actor=ACTOR,
    )
    return f"{key.thumbprint} registered for {person.username}. It approves once a version of the policy names it."


def revoke(person: User, keys: list[KeyView], thumbprint: str) -> str:
    """Revoke the one key in use that begins so. Raises CommandError when it is not one."""
    found = [key for key in keys if thumbprint and key.thumbprint.startswith(thumbprint) and key.revoked_at is None]
    if len(found) != 1:
        raise CommandError(f"{len(found)} keys of {person.username} in use begin so; name exactly one.")
    revoke_key(user=person, key_id=found[0].id, actor=ACTOR, accepts_policy_change=True)
    hint = " The active policy names it: boxes trust it until a new version leaves it out." if found[0].in_policy else ""
    return f"{found[0].thumbprint} revoked.{hint}"


def describe(key: KeyView) -> str:
    """Return one line about a key."""
    words = [key.thumbprint, key.kind, key.label]
    words += ["break-glass"] if key.is_break_glass else []
    words += ["synced"] if key.is_backup_eligible else []
    words += ["in the active policy"] if key.in_policy else []
    words += [f"revoked {key.revoked_at:%Y-%m-%d}"] if key.revoked_at else []
    return "  ".join(words)
