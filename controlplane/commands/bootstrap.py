"""The command ``bootstrap``: bring the database up to date and make what a first request needs.

Safe to run at every start: what exists and is still valid is kept, what an operator changed or switched off stays so.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.migrations.executor import MigrationExecutor

from controlplane.commands import Options, argument, command
from controlplane.launcher.files import read_json, write_json
from controlplane.launcher.postgres import explain_old_server
from core.limits import limits
from core.models import User
from gateway.services.errors import NameTaken
from gateway.services.keys import create_api_key
from gateway.services.models import allow_model
from gateway.services.tenants import create_tenant
from governance.admin_tokens import create_admin_token, verify_admin_token
from governance.audit import record_event
from governance.errors import NeedsApproval
from nodes.errors import Conflict
from nodes.services.credentials import create_credential, create_provider, find_credential
from wire import RELEASE
from wire.credentials import CredentialKind, parse_keyid, verify_credential

ACTOR = "system:bootstrap"
TENANT = "default"
PROVIDER = "local"
MODEL = "muster-tiny"
USERNAME = "admin"
WARNING = "warning: "
"""With it begins what whoever started us shall be told."""
_OURS = {"core", "gateway", "governance", "nodes"}


@command(
    "bootstrap",
    "Migrate the database and make the quick start's operator, keys and credentials, kept in a file of mode 0600.",
    argument("--credentials", type=Path, required=True, metavar="FILE", help="where the credentials are kept"),
)
def bootstrap(options: Options) -> str:
    """Do it all; raises CommandError when the file cannot be written."""
    with connection.cursor() as cursor:
        major = cursor.connection.info.server_version // 10_000
    if why := explain_old_server(major):
        raise CommandError(why)
    executor = MigrationExecutor(connection)
    if unknown := find_unknown(executor):
        # What the release before may do, so that an upgrade of several processes has no gap.
        sys.stdout.write(
            f"{WARNING}the database is of a newer release ({unknown[0]} is unknown to {RELEASE}): this one goes on, without "
            "what is new there\n"
        )
    pending = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if pending:
        sys.stdout.write(f"bootstrap: {len(pending)} migrations to apply\n")
        call_command("migrate", interactive=False, verbosity=1)
    path: Path = options["credentials"]
    kept = read_json(path)
    made = make_credentials(kept)
    if made != kept:
        try:
            write_json(path, made)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}") from error
    return "bootstrap: done"


def find_unknown(executor: MigrationExecutor) -> list[str]:
    """Return the migrations of our apps that were applied and that this release does not have."""
    own = {config.label for config in apps.get_app_configs() if config.name.partition(".")[0] in _OURS}
    known = executor.loader.disk_migrations
    return [f"{app}.{name}" for app, name in executor.loader.applied_migrations if app in own and (app, name) not in known]


def make_credentials(kept: dict[str, object]) -> dict[str, object]:
    """Return ``kept`` with everything in it that was missing or is no longer valid made anew."""
    with suppress(Conflict):
        create_provider(name=PROVIDER, actor=ACTOR)
    with suppress(NameTaken):
        create_tenant(name=TENANT, actor=ACTOR)
    if not apps.get_model("gateway", "Model").objects.filter(name=MODEL).exists():
        allow_model(name=MODEL, actor=ACTOR)
    nodes = limits().console.enrolment_nodes

    def enrol(name: str, most: int) -> tuple[object, str]:
        return create_credential(name=name, provider_name=PROVIDER, max_nodes=most, actor=ACTOR)

    return {
        "admin": ensure_operator(kept.get("admin")),
        "admin_token": _keep_admin_token(kept),
        "api_key": _keep(kept, "api_key", _is_key_valid, lambda: create_api_key(name="demo", tenant_name=TENANT, actor=ACTOR)),
        "model": MODEL,
        "worker_secret": _keep(kept, "worker_secret", find_credential, lambda: enrol("workers", nodes)),
        "node_token": _keep(kept, "node_token", find_credential, lambda: enrol("nodes", nodes)),
        "local_node_token": _keep(kept, "local_node_token", find_credential, lambda: enrol("local node", 1)),
    }


@transaction.atomic
def ensure_operator(kept: object) -> dict[str, str]:
    """Return user name and password of the first operator, made when there is no active superuser or nothing was kept."""
    users = User.objects
    password = kept.get("password", "") if isinstance(kept, dict) else ""
    user = users.filter(username=USERNAME).first()
    if isinstance(kept, dict) and users.filter(is_superuser=True, is_active=True).exists():
        is_valid = user is not None and bool(password) and user.check_password(password)
        # An operator may have changed the password since: then it is theirs, and we neither know nor reset it.
        return {"username": USERNAME, "password": password if is_valid else ""}
    fresh = secrets.token_urlsafe(15)
    if user is None:
        user = User(username=USERNAME)
    user.is_superuser = user.is_staff = user.is_active = True
    user.set_password(fresh)
    user.save()
    record_event(actor=ACTOR, action="operator.create", target=USERNAME)
    return {"username": USERNAME, "password": fresh}


def _keep(kept: dict[str, object], name: str, find: Callable[[str], object], make: Callable[[], tuple[object, str]]) -> str:
    text = kept.get(name)
    if isinstance(text, str) and text and find(text):
        return text
    return make()[1]


def _keep_admin_token(kept: dict[str, object]) -> str:
    """Return the kept token, or a new one. Empty once a policy is in force: then not even we may make one without approval."""
    try:
        return _keep(kept, "admin_token", verify_admin_token, lambda: create_admin_token(name="quick start", actor=ACTOR))
    except NeedsApproval:
        return ""


def _is_key_valid(text: str) -> bool:
    keyid = parse_keyid(text, CredentialKind.CLIENT)
    row = apps.get_model("gateway", "ApiKey").objects.filter(keyid=keyid, revoked_at__isnull=True).first() if keyid else None
    return row is not None and verify_credential(text, bytes(row.digest))
