"""Commands for people: keys of approvers, admin tokens, invitations, and the people of ``./muster demo governance``."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from django.conf import settings
from django.contrib.auth.models import Permission
from django.core.exceptions import ValidationError
from django.core.management import CommandError
from django.db import transaction

from controlplane.commands import ACTOR, Options, argument, command
from controlplane.launcher.files import read_json
from controlplane.launcher.installation import default_data, installation_path
from controlplane.launcher.up import EXAMPLE_QUESTION
from core.models import User
from core.roles import Role, list_roles
from gateway.services.models import allow_model
from governance.admin_tokens import create_admin_token, read_grant
from governance.audit import record_event
from governance.keys import add_key_file, list_approving, list_keys, list_passkey_ids, revoke_key
from governance.members import change_roles
from governance.people import create_invitation, make_invitation_url
from wire import COMMAND

PROPOSER = "ana"
PEOPLE = ((PROPOSER, "Ana"), ("ben", "Ben"), ("cleo", "Cleo"))


@command(
    "approver_keys",
    "Register the public line of a key file, list the keys of a person, or revoke one.",
    argument("action", choices=["add", "list", "revoke"]),
    argument("name", help="username"),
    argument("thumbprint", nargs="?", default="", help="with revoke: the key, or the beginning of it"),
    argument("--public", default="", metavar="LINE", help=f"with add: what {COMMAND} keys show prints"),
    argument("--label", default="", help="with add: what to call it (default: the name in the line)"),
    argument("--break-glass", action="store_true", help="with add: for break-glass and nothing else"),
)
def manage_keys(options: Options) -> str:
    person = User.objects.filter(username=options["name"]).first()
    if person is None:
        raise CommandError(f"There is no person {options['name']}.")
    if options["action"] == "add":
        label, is_break_glass = options["label"], options["break_glass"]
        key = add_key_file(user=person, line=options["public"], label=label, is_break_glass=is_break_glass, actor=ACTOR)
        return f"{key.thumbprint} registered for {person.username}. It approves once a version of the policy names it."
    return _list(person) if options["action"] == "list" else _revoke(person, options["thumbprint"])


def _list(person: User) -> str:
    approving, lines = list_approving(), []
    for key in list_keys(person):
        words = [key.thumbprint, key.kind, key.label]
        words += ["break-glass"] if key.is_break_glass else []
        words += ["synced"] if key.is_backup_eligible else []
        words += ["in the active policy"] if key.thumbprint in approving else []
        words += [f"revoked {key.revoked_at:%Y-%m-%d}"] if key.revoked_at else []
        lines.append("  ".join(words))
    return "\n".join(lines) or f"{person.username} has no key."


def _revoke(person: User, thumbprint: str) -> str:
    in_use = [key for key in list_keys(person) if key.revoked_at is None]
    found = [key for key in in_use if thumbprint and key.thumbprint.startswith(thumbprint)]
    if len(found) != 1:
        raise CommandError(f"{len(found)} keys of {person.username} in use begin so; name exactly one.")
    key = revoke_key(user=person, key_id=found[0].pk, actor=ACTOR, accepts_policy_change=True)
    is_named = key.thumbprint in list_approving()
    hint = " The active policy names it: nodes trust it until a new version leaves it out." if is_named else ""
    return f"{key.thumbprint} revoked.{hint}"


@command(
    "create_admin_token",
    "Create a token for the admin APIs and print it. It is shown this once.",
    argument("--name", required=True, help="who or what will use it"),
    argument("--owner", metavar="USERNAME", help="whose it is: it acts as this person, and brings their approvals"),
    argument("--role", default="", choices=["", *Role], help="what it may do (default: everything)"),
    argument("--tenant", default="", metavar="NAME", help="of a role of tenants: the one in which it counts"),
    argument("--days", type=int, metavar="N", help="how long it works (default: it never expires)"),
)
def create_token(options: Options) -> str:
    owner = None
    if options["owner"] and (owner := User.objects.filter(username=options["owner"], is_active=True).first()) is None:
        raise CommandError(f"There is no person {options['owner']} who may sign in.")
    grant = read_grant({name: options[name] for name in ("role", "tenant", "days")})
    return create_admin_token(name=options["name"], actor=ACTOR, owner=owner, grant=grant)[1]


@command(
    "invite",
    "Print a link with which a person makes a passkey and signs in. It works once, for --hours.",
    argument("name", help="username"),
    argument("--hours", type=int, default=72, metavar="N", help="how long it lives (default: %(default)s)"),
    argument("--create", action="store_true", help="make the person when there is none of that name"),
    argument("--first-name", default="", help="with --create"),
    argument("--last-name", default="", help="with --create"),
    argument("--email", default="", help="with --create: where notices go"),
    argument("--can-propose", action="store_true", help="let the person see the fleet and propose operations"),
)
@transaction.atomic
def invite(options: Options) -> str:
    person = User.objects.filter(username=options["name"]).first()
    if person is None:
        if not options["create"]:
            raise CommandError(f"There is no person {options['name']}. Add --create to make one.")
        person = create_person(options)
    if options["can_propose"]:
        let_propose(person)
    _, text = create_invitation(user=person, actor=ACTOR, hours=options["hours"])
    return make_invitation_url(text)


def create_person(options: Options) -> User:
    """Make a person without a password. Raises CommandError for a name that is none."""
    try:
        User.username_validator(options["name"])
    except ValidationError as error:
        raise CommandError("A username has letters, digits and @ . + - _ only.") from error
    person = User.objects.create_user(
        options["name"], email=options["email"], first_name=options["first_name"], last_name=options["last_name"]
    )
    record_event(actor=ACTOR, action="operator.create", target=person.username, detail={"fields": ["username"]})
    return change_roles(person=person, roles=[Role.APPROVER], actor=ACTOR)


def let_propose(person: User) -> None:
    """Open the console to a person who changes nothing there, and let them propose operations."""
    person.user_permissions.add(Permission.objects.get(content_type__app_label="governance", codename="add_operation"))
    change_roles(person=person, roles=[*list_roles(person), Role.VIEWER], actor=ACTOR)
    record_event(actor=ACTOR, action="operator.change", target=person.username, detail={"fields": ["permissions"]})


@command(
    "demo_governance",
    "Make three people with invitations, allow a model, and print step by step how its load is approved.",
    argument("--model", required=True, help="a model of the node named local"),
    argument("--data", type=Path, default=default_data(), metavar="DIR", help="directory of the installation"),
    argument("--json", action="store_true", help="print it for a program"),
)
def demonstrate(options: Options) -> str:
    model = options["model"]
    allow_model(name=model, actor=ACTOR)
    guests = [_make_guest(username, first_name) for username, first_name in PEOPLE]
    if options["json"]:
        found = {"model": model, "public_url": settings.PUBLIC_URL, "people": [asdict(guest) for guest in guests]}
        return json.dumps(found, indent=2)
    return _print_steps(guests, model=model, data=options["data"])


@dataclass(frozen=True, slots=True)
class Guest:
    """One person of the demo. ``invitation``: a link that works once, empty for somebody who has a passkey already."""

    username: str
    invitation: str


@transaction.atomic
def _make_guest(username: str, first_name: str) -> Guest:
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


def _print_steps(guests: list[Guest], *, model: str, data: Path) -> str:
    where = settings.PUBLIC_URL.rstrip("/")
    chosen = "" if data == default_data() else f" --data {shlex.quote(str(data))}"
    running = read_json(installation_path(data))
    gateway, key = running.get("gateway_url", "GATEWAY"), running.get("api_key", "KEY")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": EXAMPLE_QUESTION}]}, separators=(",", ":"))
    invited = [f"     {guest.username:5} {guest.invitation or 'has a passkey already'}" for guest in guests]
    lines = [
        f"Three people and the model {model} are ready. Loading it needs two of the three. Step by step:",
        "",
        "  0. The policy of step 3 makes every session that a password opened read-only, also that of the administrator. To go",
        f"     on changing things there, sign in at {where}/admin/ and make a passkey at {where}/sign-in/keys",
        f"     before step 3. After it only an invitation makes the first passkey of a person: {COMMAND} manage invite admin",
        "  1. Open each link in a browser profile of its own and make a passkey. A link works once, for a day.",
        *invited,
        f"  2. As ana, open {where}/approvals/policy and press “Draft the first policy”. See that the passkeys of ana, ben and",
        "     cleo are ticked, say why, and press “Submit for approval”.",
        f"  3. As ben and as cleo, open {where}/approvals/ and approve the policy: two of three. Seconds later it is in force,",
        "     and whoever signed in with a password can look and no longer change anything (step 0).",
        "  4. The page of the policy shows twelve words. Tell the node to trust that policy, on the node itself:",
        f"       {COMMAND} trust WORDS{chosen}",
        f"  5. As ana, open {where}/approvals/propose?operation=model-load, tick the node local, choose the model {model},",
        "     say why, press “Preview”, and then “Request approval”.",
        "  6. As ben and as cleo, compare the six words, approve it, and watch it load.",
        "  7. Talk to it:",
        f"       curl {gateway}/v1/chat/completions -H 'Content-Type: application/json' \\",
        f"         -H 'Authorization: Bearer {key}' \\",
        f"         -d '{body}'",
        "  8. Unload it the same way. Then check the log of all this:",
        f"       {COMMAND} audit{chosen} verify",
    ]
    return "\n".join(lines)
