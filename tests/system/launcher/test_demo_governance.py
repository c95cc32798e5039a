"""``manage.py demo_governance``: three people who can begin, each time it is run."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import Client

from controlplane.launcher.files import write_json
from core.models import User
from gateway.services import is_model_allowed
from tests.system.governance.team import make_key

pytestmark = pytest.mark.django_db
MODEL = "muster-tiny-f16"


def run(*words: str) -> str:
    output = StringIO()
    call_command("demo_governance", "--model", MODEL, *words, stdout=output)
    return output.getvalue()


def test_three_people_can_make_a_passkey_and_the_model_is_allowed() -> None:
    made = json.loads(run("--json"))
    assert [person["username"] for person in made["people"]] == ["ana", "ben", "cleo"]
    assert is_model_allowed(MODEL)
    for person in made["people"]:
        path = person["invitation"].removeprefix(settings.PUBLIC_URL)
        assert Client().get(path).status_code == 200
    assert User.objects.get(username="ana").has_perm("governance.add_operation")
    assert not User.objects.get(username="ben").has_perm("governance.add_operation")
    assert not any(user.is_superuser or user.has_usable_password() for user in User.objects.all())


def test_a_second_time_makes_new_links_for_whoever_has_no_passkey_yet() -> None:
    first = json.loads(run("--json"))["people"]
    make_key(User.objects.get(username="ana"))
    second = json.loads(run("--json"))["people"]
    assert second[0]["invitation"] == ""
    assert second[1]["invitation"] not in {"", first[1]["invitation"]}
    assert Client().get(first[1]["invitation"].removeprefix(settings.PUBLIC_URL)).status_code != 200
    assert User.objects.count() == 3


def test_the_steps_name_the_installation_its_gateway_and_the_key(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "installation.json", {"gateway_url": "http://127.0.0.1:9", "api_key": "mst_mine"})
    said = run("--data", str(tmp_path))
    assert f"./muster trust WORDS --data {tmp_path}" in said
    assert "curl http://127.0.0.1:9/v1/chat/completions" in said
    assert "Bearer mst_mine" in said
    assert f"{settings.PUBLIC_URL}/approvals/policy" in said


def test_the_first_step_says_that_password_sessions_become_read_only_and_where_a_passkey_is_made() -> None:
    said = run()
    first = said[said.index("  0. ") : said.index("  1. ")]
    assert "read-only" in first
    assert "administrator" in first
    assert f"{settings.PUBLIC_URL.rstrip('/')}/sign-in/keys" in first
