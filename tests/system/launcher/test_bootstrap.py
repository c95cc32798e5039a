"""``manage.py bootstrap``: what a first request needs, made once."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from django.core.checks.registry import registry
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import override_settings

from controlplane.launcher.credentials import require_credentials
from controlplane.launcher.files import read_json
from controlplane.management.commands.bootstrap import ACTOR, MODEL, USERNAME, make_credentials
from controlplane.management.service_command import SETTINGS_CHECKS
from core.models import User
from gateway.services import disallow_model, is_model_allowed, revoke_api_key
from governance.services import revoke_admin_token, verify_admin_token
from nodes.services import find_credential, revoke_credential
from tests.system.governance.team import make_governed
from wire.credentials import CredentialKind, parse_keyid

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_a_second_time_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    assert _bootstrap(path) == _bootstrap(path)


def test_what_was_revoked_is_made_anew_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    before = _bootstrap(path)
    token = verify_admin_token(str(before["admin_token"]))
    worker = find_credential(str(before["worker_secret"]))
    assert token is not None
    assert worker is not None
    revoke_admin_token(token_id=token.pk, actor=ACTOR)
    revoke_credential(credential_id=worker.pk, actor=ACTOR)
    after = _bootstrap(path)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"admin_token", "worker_secret"}


def test_a_revoked_demo_key_is_made_anew(tmp_path: Path) -> None:
    from django.apps import apps

    path = tmp_path / "credentials.json"
    before = str(_bootstrap(path)["api_key"])
    row = apps.get_model("gateway", "ApiKey").objects.get(keyid=parse_keyid(before, CredentialKind.CLIENT))
    assert isinstance(row.pk, uuid.UUID)
    revoke_api_key(key_id=row.pk, actor=ACTOR)
    assert _bootstrap(path)["api_key"] != before


def test_a_password_that_the_operator_changed_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    _bootstrap(path)
    user = User.objects.get(username=USERNAME)
    user.set_password("chosen by the operator")
    user.save()
    assert _bootstrap(path)["admin"] == {"username": USERNAME, "password": ""}
    user.refresh_from_db()
    assert user.check_password("chosen by the operator")


def test_an_operator_deleted_for_another_is_not_brought_back(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    _bootstrap(path)
    User.objects.create_superuser("somebody", password="a long enough one")
    User.objects.filter(username=USERNAME).delete()
    _bootstrap(path)
    assert not User.objects.filter(username=USERNAME).exists()


def test_deleting_the_file_gives_a_new_password(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    _bootstrap(path)
    path.unlink()
    _bootstrap(path)
    assert User.objects.get(username=USERNAME).check_password(require_credentials(path).password)


def test_a_model_that_the_operator_took_off_the_list_stays_off() -> None:
    kept = make_credentials({})
    disallow_model(name=MODEL, actor=ACTOR)
    make_credentials(kept)
    assert not is_model_allowed(MODEL)


def test_under_a_policy_a_revoked_admin_token_is_not_made_anew_and_the_rest_still_works(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    token = verify_admin_token(str(_bootstrap(path)["admin_token"]))
    assert token is not None
    make_governed()
    assert verify_admin_token(str(_bootstrap(path)["admin_token"])) == token
    revoke_admin_token(token_id=token.pk, actor=ACTOR)
    assert _bootstrap(path)["admin_token"] == ""
    assert require_credentials(path).admin_token == ""


@override_settings(CORS_ORIGINS=("chat.example.com",))
def test_a_wrong_setting_ends_it_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(SystemCheckError, match="MUSTER_CORS_ORIGINS"):
        call_command("bootstrap", credentials=tmp_path / "credentials.json", skip_checks=False)
    assert not (tmp_path / "credentials.json").exists()


def test_commands_look_at_the_settings_of_every_app_of_ours() -> None:
    ours = {"controlplane", "core", "gateway", "governance", "nodes"}
    checks = [check for check in registry.get_checks() if check.__module__.partition(".")[0] in ours]
    assert {tag for check in checks for tag in check.tags} == set(SETTINGS_CHECKS)
