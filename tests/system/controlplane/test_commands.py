"""Management commands call the same services as the pages."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from django.conf import settings
from django.core.checks.registry import registry
from django.core.management import CommandError, call_command
from django.test import Client

from controlplane.launcher.credentials import require_credentials
from controlplane.launcher.files import read_json
from controlplane.management.commands.bootstrap import ACTOR
from controlplane.management.service_command import SETTINGS_CHECKS
from core.models import User
from gateway.models import ApiKey, Model
from gateway.services import is_model_allowed, revoke_api_key
from governance.services import revoke_admin_token, verify_admin_token
from nodes.models import Node, Provider
from nodes.services import find_credential, revoke_credential
from tests.fakes.governed_team import make_governed
from tests.system.gateway_admin.factories import audited
from tests.system.nodes.factories import make_credential, make_node
from wire.credentials import CredentialKind, parse_keyid

pytestmark = pytest.mark.django_db


def run(*words: str) -> str:
    output = StringIO()
    call_command(*words, stdout=output)
    return output.getvalue().strip()


def test_a_model_is_allowed_and_disallowed() -> None:
    run("allow_model", "tiny", "--max-tokens", "100")
    assert Model.objects.get(name="tiny", allowed=True).max_tokens == 100
    run("disallow_model", "tiny")
    assert not Model.objects.get(name="tiny").allowed
    assert audited("model.allow")[0].actor == "system:cli"


def test_a_key_is_printed_and_nothing_else_is() -> None:
    text = run("create_key", "--tenant", "research", "--name", "ci", "--rpm", "7", "--models", "a,b", "--priority", "low")
    key = ApiKey.objects.get()

    assert text.startswith(f"mst_{key.keyid}_")
    assert (key.tenant.name, key.requests_per_minute, key.allowed_models) == ("research", 7, ["a", "b"])
    assert key.priority == "low"
    run("create_key", "--tenant", "research", "--name", "second")
    assert ApiKey.objects.count() == 2


def test_a_worker_credential_is_printed_with_its_provider_made() -> None:
    credential = find_credential(run("create_worker_credential", "--name", "box", "--provider", "lab", "--max-nodes", "3"))

    assert credential is not None
    assert (credential.provider.name, credential.max_nodes) == ("lab", 3)


def test_an_admin_token_is_printed_and_belongs_to_whom_it_was_made_for() -> None:
    ben = User.objects.create_user("ben")
    for words, owner in (((), None), (("--owner", "ben"), ben)):
        token = verify_admin_token(run("create_admin_token", "--name", "ci", *words))
        assert token is not None
        assert token.owner == owner


def test_a_provider_is_switched_off_and_on() -> None:
    make_credential(provider="lab")
    run("set_provider_state", "lab", "disabled")
    assert Provider.objects.get(name="lab").state == "disabled"
    run("set_provider_state", "lab", "enabled")
    assert Provider.objects.get(name="lab").state == "enabled"


@pytest.mark.parametrize("named_by", ["name", "printed id", "uuid"])
def test_a_node_is_cordoned_and_drained_however_it_is_named(named_by: str) -> None:
    node = make_node("attic")
    text = {"name": node.name, "printed id": node.printed_id, "uuid": str(node.pk)}[named_by]

    run("node_action", text, "cordon")
    run("node_action", text, "drain", "--reason", "new driver", "--timeout", "5")
    node.refresh_from_db()
    assert (node.cordoned, node.draining, node.drain_reason) == (True, True, "new driver")

    run("node_action", text, "undrain")
    run("node_action", text, "uncordon")
    node.refresh_from_db()
    assert (node.cordoned, node.draining) == (False, False)


@pytest.mark.parametrize(
    "words",
    [
        ("disallow_model", "nothing"),
        ("allow_model", "tiny", "--max-tokens", "0"),
        ("create_key", "--tenant", "t", "--name", ""),
        ("create_worker_credential", "--name", "x", "--max-nodes", "0"),
        ("create_admin_token", "--name", " "),
        ("create_admin_token", "--name", "ci", "--owner", "nobody"),
        ("set_provider_state", "nothing", "disabled"),
        ("node_action", "nothing", "drain"),
    ],
)
def test_a_refusal_is_one_line(words: tuple[str, ...]) -> None:
    with pytest.raises(CommandError) as refusal:
        run(*words)

    assert "\n" not in str(refusal.value)


def test_a_name_that_two_nodes_have_is_not_guessed() -> None:
    for credential in ("one", "two"):
        make_node("box", credential=make_credential(credential)[0])

    with pytest.raises(CommandError, match="Several nodes"):
        run("node_action", "box", "drain")
    assert not Node.objects.filter(draining=True).exists()


def _bootstrap(path: Path) -> dict[str, object]:
    call_command("bootstrap", credentials=path)
    return read_json(path)


def test_everything_is_made_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    _bootstrap(path)
    made = require_credentials(path)
    assert path.stat().st_mode & 0o777 == 0o600
    user = User.objects.get(username=made.username)
    assert user.check_password(made.password)
    assert user.is_superuser
    assert user.is_staff
    assert verify_admin_token(made.admin_token)
    assert parse_keyid(made.api_key, CredentialKind.CLIENT)
    assert is_model_allowed(made.model)
    for text, nodes in ((made.worker_secret, 64), (made.node_token, 64), (made.local_node_token, 1)):
        credential = find_credential(text)
        assert credential is not None
        assert credential.max_nodes == nodes


def test_what_was_revoked_is_made_anew_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    before = _bootstrap(path)
    token = verify_admin_token(str(before["admin_token"]))
    worker = find_credential(str(before["worker_secret"]))
    assert token is not None
    assert worker is not None
    key = ApiKey.objects.get(keyid=parse_keyid(str(before["api_key"]), CredentialKind.CLIENT))
    revoke_admin_token(token_id=token.pk, actor=ACTOR)
    revoke_credential(credential_id=worker.pk, actor=ACTOR)
    revoke_api_key(key_id=key.pk, actor=ACTOR)
    after = _bootstrap(path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"admin_token", "worker_secret", "api_key"}


def test_under_a_policy_a_revoked_admin_token_is_not_made_anew_and_the_rest_still_works(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    token = verify_admin_token(str(_bootstrap(path)["admin_token"]))
    assert token is not None
    make_governed()
    assert verify_admin_token(str(_bootstrap(path)["admin_token"])) == token
    revoke_admin_token(token_id=token.pk, actor=ACTOR)
    assert _bootstrap(path)["admin_token"] == ""
    assert require_credentials(path).admin_token == ""


def test_commands_look_at_the_settings_of_every_app_of_ours() -> None:
    ours = {"controlplane", "core", "gateway", "governance", "nodes"}
    checks = [check for check in registry.get_checks() if check.__module__.partition(".")[0] in ours]
    assert {tag for check in checks for tag in check.tags} == set(SETTINGS_CHECKS)


DEMO_MODEL = "muster-tiny-f16"


def run_demo(*words: str) -> str:
    return run("demo_governance", "--model", DEMO_MODEL, *words)


def test_three_people_can_make_a_passkey_and_the_model_is_allowed() -> None:
    made = json.loads(run_demo("--json"))
    assert [person["username"] for person in made["people"]] == ["ana", "ben", "cleo"]
    assert is_model_allowed(DEMO_MODEL)
    for person in made["people"]:
        path = person["invitation"].removeprefix(settings.PUBLIC_URL)
        assert Client().get(path).status_code == 200
    assert User.objects.get(username="ana").has_perm("governance.add_operation")
    assert not User.objects.get(username="ben").has_perm("governance.add_operation")
    assert not any(user.is_superuser or user.has_usable_password() for user in User.objects.all())
