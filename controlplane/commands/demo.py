"""The command behind ``./muster demo fleet``: write the scene into a fresh installation, then play it."""

from __future__ import annotations

from pathlib import Path

from django.core.management import CommandError
from django.db import transaction

from controlplane.commands import Options, argument, command
from controlplane.commands.people import create_person, let_propose
from controlplane.demo.fleet import ACTOR, PEOPLE, REQUESTS
from controlplane.demo.people import Signer
from controlplane.demo.scene import Kept, find_scene, grow, play, require_unused, write_scene
from controlplane.launcher.console import say
from controlplane.launcher.files import read_json
from controlplane.launcher.installation import default_data, installation_path
from core.models import User
from governance.operations.approvals import find_operation
from governance.operations.decisions import approve
from governance.people import create_invitation, make_invitation_url
from governance.states import ApprovalState
from wire import COMMAND
from wire.ids import parse_id


@command(
    "demo_fleet",
    "Write a week of 12 nodes and 5 tenants that nobody has into a fresh installation, and play on until Ctrl-C.",
    argument("--data", type=Path, default=default_data(), metavar="DIR", help="directory of the installation"),
    argument("--requests", type=float, default=28.0, metavar="N", help="asked per minute (default: %(default)g)"),
    argument("--nodes", type=int, default=0, metavar="N", help="so many nodes in all, for measuring"),
    argument("--records", type=int, default=0, metavar="N", help="so many requests in all, for measuring"),
    argument(
        "--week", type=int, default=REQUESTS, metavar="N", help="about so many requests in the week (default: %(default)s)"
    ),
    argument("--sign", default="", metavar="OPERATION", help="instead: have ben and cleo approve an operation that waits"),
    argument("--write-only", action="store_true", help="end when everything is written"),
)
def demonstrate_fleet(options: Options) -> str:
    data, admin = options["data"], User.objects.filter(is_superuser=True, is_active=True).order_by("pk").first()
    if admin is None:
        raise CommandError(f"There is no administrator here. Start the installation with {COMMAND} up first.")
    kept = find_scene(data)
    if options["sign"]:
        return _sign(kept, options["sign"])
    if kept is None:
        require_unused()
        kept = write_scene(data, admin, _make_people(), requests=options["week"])
    grow(nodes=options["nodes"], records=options["records"])
    if options["write_only"]:
        return ""
    running = read_json(installation_path(data))
    gateway, control = str(running.get("gateway_url", "")), str(running.get("public_url", "")).rstrip("/")

    _, invitation = create_invitation(user=admin, actor=ACTOR, hours=24)

    def tell() -> None:
        for line in (
            f"The demo plays until Ctrl-C: {control}/admin/, login {admin.username}. An approval policy is in force, so a",
            f"session by password may only look. To change things make a passkey: {make_invitation_url(invitation)}",
        ):
            say(line)

    play(kept, gateway=gateway, per_minute=options["requests"], nodes=options["nodes"], on_ready=tell)
    return ""


def _sign(kept: Kept | None, text: str) -> str:
    op_id = parse_id("op", text)
    if kept is None or op_id is None:
        raise CommandError(f"There is no operation {text} here, or this is no installation of the demo.")
    state = ""
    for name in ("ben", "cleo"):
        signer = Signer(User.objects.get(username=name), kept.people[name])
        operation = find_operation(op_id)
        if operation.state == ApprovalState.PENDING.value:
            proof = signer.sign(operation.read_statement().digest)
            operation = approve(op_id=op_id, user=signer.user, proof=proof, brought_by=f"token:{name}#demo")
        state = operation.state
    return state


@transaction.atomic
def _make_people() -> dict[str, User]:
    people = {}
    for username, first, last in PEOPLE:
        person = User.objects.filter(username=username).first()
        if person is None:
            names = {"name": username, "first_name": first, "last_name": last, "email": f"{username}@example.com"}
            person = create_person(names)
            let_propose(person)
        people[username] = person
    return people
