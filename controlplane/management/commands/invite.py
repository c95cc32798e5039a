"""``manage.py invite``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import Permission
from django.core.exceptions import ValidationError
from django.core.management import CommandError
from django.db import transaction

from controlplane.management.service_command import ACTOR, ServiceCommand
from core.models import User
from governance.audit import record_event
from governance.people import create_invitation, make_invitation_url


class Command(ServiceCommand):
    """Print a link with which a person makes a passkey and signs in. It works once."""

    help = "Print a link with which a person makes a passkey and signs in. It works once, for --hours."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="username")
        parser.add_argument("--hours", type=int, default=72, metavar="N", help="how long it lives (default: %(default)s)")
        parser.add_argument("--create", action="store_true", help="make the person when there is none of that name")
        parser.add_argument("--first-name", default="", help="with --create")
        parser.add_argument("--last-name", default="", help="with --create")
        parser.add_argument("--email", default="", help="with --create: where notices go")
        parser.add_argument("--can-propose", action="store_true", help="let the person see the fleet and propose operations")

    @transaction.atomic
    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        person = User.objects.filter(username=options["name"]).first()
        if person is None:
            if not options["create"]:
                raise CommandError(f"There is no person {options['name']}. Add --create to make one.")
            person = create_person(options)
        if options["can_propose"]:
            let_propose(person)
        _, text = create_invitation(user=person, actor=ACTOR, hours=options["hours"])
        return make_invitation_url(text)


def create_person(options: dict[str, Any]) -> User:  # Any: parsed options
    """Make a person without a password. Raises CommandError for a name that is none."""
    try:
        User.username_validator(options["name"])
    except ValidationError as error:
        raise CommandError("A username has letters, digits and @ . + - _ only.") from error
    person = User.objects.create_user(
        options["name"], email=options["email"], first_name=options["first_name"], last_name=options["last_name"]
    )
    record_event(actor=ACTOR, action="operator.create", target=person.username, detail={"fields": ["username"]})
    return person


def let_propose(person: User) -> None:
    """Open the admin to a person, with the pages that hold no prompts and the permission to propose operations."""
    pages = Permission.objects.filter(
        content_type__app_label__in=["nodes", "gateway", "governance"], codename__startswith="view_"
    ).exclude(codename="view_storedresponse")
    propose = Permission.objects.filter(content_type__app_label="governance", codename="add_operation")
    person.is_staff = True
    person.save(update_fields=["is_staff"])
    person.user_permissions.add(*pages, *propose)
    record_event(actor=ACTOR, action="operator.change", target=person.username, detail={"fields": ["is_staff", "permissions"]})
