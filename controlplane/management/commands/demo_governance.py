"""``manage.py demo_governance``: the people of ``./muster demo governance``, and what to do with them. Safe to run again."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction

from controlplane.launcher.files import read_json
from controlplane.launcher.installation import default_data, installation_path
from controlplane.launcher.up import EXAMPLE_QUESTION
from controlplane.management.commands.invite import create_person, let_propose
from controlplane.management.service_command import ACTOR, ServiceCommand
from core.models import User
from gateway.services.models import allow_model
from governance.keys import list_passkey_ids
from governance.people import create_invitation, make_invitation_url

PROPOSER = "ana"
PEOPLE = ((PROPOSER, "Ana"), ("ben", "Ben"), ("cleo", "Cleo"))


@dataclass(frozen=True, slots=True)
class Guest:
    """One person of the demo. ``invitation``: a link that works once, empty for somebody who has a passkey already."""

    username: str
    invitation: str


class Command(ServiceCommand):
    """Make three people, allow a model, and print how they load it together."""

    help = "Make three people with invitations, allow a model, and print step by step how its load is approved."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--model", required=True, help="a model of the box named local")
        parser.add_argument("--data", type=Path, default=default_data(), metavar="DIR", help="directory of the installation")
        parser.add_argument("--json", action="store_true", help="print it for a program")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        model = options["model"]
        allow_model(name=model, actor=ACTOR)
        guests = [make_guest(username, first_name) for username, first_name in PEOPLE]
        if options["json"]:
            found = {"model": model, "public_url": settings.PUBLIC_URL, "people": [asdict(guest) for guest in guests]}
            return json.dumps(found, indent=2)
        return print_steps(guests, model=model, data=options["data"])


@transaction.atomic
def make_guest(username: str, first_name: str) -> Guest:
    """Return a person, made if need be, with a fresh invitation unless there is a passkey already."""
    person = User.objects.filter(username=username).first()
    if person is None:
        names = {"name": username, "first_name": first_name, "last_name": "", "email": f"{username}@example.com"}
        person = create_person(names)
        if username == PROPOSER:
            let_propose(person)
    if list_passkey_ids(person):
        return Guest(username, "")
    _, text = create_invitation(user=person, actor=ACTOR, hours=24)
    return Guest(username, make_invitation_url(text))


def print_steps(guests: list[Guest], *, model: str, data: Path) -> str:
    """Return what to do next, in plain words."""
    where = settings.PUBLIC_URL.rstrip("/")
    chosen = "" if data == default_data() else f" --data {shlex.quote(str(data))}"
    running = read_json(installation_path(data))
    gateway, key = running.get("gateway_url", "GATEWAY"), running.get("api_key", "KEY")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": EXAMPLE_QUESTION}]}, separators=(",", ":"))
    invited = [f"     {guest.username:5} {guest.invitation or 'has a passkey already'}" for guest in guests]
    lines = [
        f"Three people and the model {model} are ready. Nobody alone can load it; two of three can. Step by step:",
        "",
        "  0. The policy of step 3 makes every session that a password opened read-only, also that of the administrator. To go",
        f"     on changing things there, sign in at {where}/admin/ and make a passkey at {where}/sign-in/keys",
        "     before step 3. After it only an invitation makes the first passkey of a person: ./muster manage invite admin",
        "  1. Open each link in a browser profile of its own and make a passkey. A link works once, for a day.",
        *invited,
        f"  2. As ana, open {where}/approvals/policy and press “Draft the first policy”. See that the passkeys of ana, ben and",
        "     cleo are ticked, say why, and press “Submit for approval”.",
        f"  3. As ben and as cleo, open {where}/approvals/ and approve the policy: two of three. Seconds later it is in force,",
        "     and whoever signed in with a password can look and no longer change anything (step 0).",
        "  4. The page of the policy shows twelve words. Tell the node to trust that policy, on the node itself:",
        f"       ./muster trust WORDS{chosen}",
        f"  5. As ana, open {where}/approvals/propose?operation=model-load, tick the node local, choose the model {model},",
        "     say why, press “Preview”, and then “Request approval”.",
        "  6. As ben and as cleo, compare the six words, approve it, and watch it load.",
        "  7. Talk to it:",
        f"       curl {gateway}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"         -H 'Authorization: Bearer {key}' \\",
        f"         -d '{body}'",
        "  8. Unload it the same way. Then check the log of all this:",
        f"       ./muster audit{chosen} verify",
    ]
    return "\n".join(lines)
