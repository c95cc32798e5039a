"""People, their keys and their tokens: who makes them, who takes them away, and that nobody becomes another approver."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.conf import LazySettings
from django.contrib.auth.models import Group, Permission
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.commands import Command
from core.models import User
from core.roles import Role, list_roles, make_role_groups
from core.throttle import AuthThrottle
from governance import admin_tokens
from governance.admin_tokens import create_admin_token, revoke_admin_token, verify_admin_token
from governance.errors import NotFound, NotPermitted
from governance.keys import add_key_file, list_approving, list_keys
from governance.models import AdminToken, ApproverKey, AuditEvent, PolicyVersion
from governance.people import create_invitation
from tests.fakes.clock import install_virtual_clock
from tests.fakes.governed_team import make_key
from tests.fakes.nodes import audited
from tests.fakes.passkeys import Device, KeyFile, SoftPasskey
from tests.fakes.policies import Person, make_people, make_policy_bytes
from wire.credentials import CredentialKind, _checksum, digest_credential, mint_credential
from wire.optoken.approval import encode_bytes

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(180)]
JSON = "application/json"


@pytest.fixture
def site(settings: LazySettings) -> None:
    settings.PUBLIC_URL = "https://muster.example"


@pytest.fixture
def ada() -> User:
    return User.objects.create_superuser("ada")


@pytest.fixture
def boss(ada: User) -> Client:
    """A session of hers that no passkey opened, which may do everything while there is none."""
    client = Client()
    client.force_login(ada)
    return client


def make_clerk(*permissions: str) -> tuple[User, Client]:
    clerk, client = User.objects.create_user("clerk", is_staff=True), Client()
    names = permissions or ("view_user", "change_user", "add_user")
    clerk.user_permissions.set(Permission.objects.filter(codename__in=names))
    client.force_login(clerk)
    return clerk, client


def line_of(key: KeyFile, name: str = "ada") -> str:
    return f"ed25519 {encode_bytes(key.public_key)} {name}"


def enrol(client: Client, device: Device, path: str = "/sign-in/keys") -> Any:
    options = client.post(f"{path}/passkey/options" if path == "/sign-in/keys" else f"{path}/options").json()
    return client.post(f"{path}/passkey", {"credential": device.make(options), "label": "blue"}, content_type=JSON)


def put_in_force(*people: Person) -> None:
    document = make_policy_bytes(people)
    PolicyVersion.objects.create(version=1, document=document, sha256="0" * 64, state="active", created_by="ada")


def run(*words: str) -> str:
    output = StringIO()
    call_command(Command(words[0]), *words[1:], stdout=output)
    return output.getvalue().strip()


# Keys


def test_the_session_that_has_just_made_a_passkey_may_act_at_once_under_a_new_session_key(site: None, boss: Client) -> None:
    before = boss.session.session_key
    assert enrol(boss, Device()).status_code == 200
    put_in_force(*make_people(3))
    page = boss.get("/sign-in/keys").content.decode()
    assert "It signs you in from now on" in page
    assert 'id="read-only"' not in page
    assert boss.session["muster_assurance"] == "passkey"
    assert boss.session.session_key != before
    assert not Session.objects.filter(session_key=before).exists()
    opened = AuditEvent.objects.filter(action="sign-in.open", target="ada").values_list("detail", flat=True)
    assert list(opened) == [{"by": "passkey"}]
    assert boss.post("/admin/nodes/provider/add/", {"name": "rack"}).status_code != 403


def test_nobody_has_more_keys_than_a_policy_can_name(ada: User) -> None:
    for _ in range(8):
        add_key_file(user=ada, line=line_of(KeyFile()), actor="t")
    with pytest.raises(NotPermitted, match="at most 8"):
        add_key_file(user=ada, line=line_of(KeyFile()), actor="t")


def test_the_shell_registers_lists_and_revokes_keys(ada: User) -> None:
    key, p256 = KeyFile(), f"ed25519 {encode_bytes(SoftPasskey().public_key)} x"
    assert "no key" in run("approver_keys", "list", "ada")
    for line in ("", "ed25519", "ed25519 AAAA x", "ssh-ed25519 AAAA x", "ed25519 === x", p256):
        with pytest.raises(CommandError, match="not the public line"):
            run("approver_keys", "add", "ada", "--public", line)
    run("approver_keys", "add", "ada", "--public", line_of(key), "--label", "safe", "--break-glass")
    row = ApproverKey.objects.get()
    assert (row.keyid, row.label, row.is_break_glass, row.kind) == (key.keyid, "safe", True, "ed25519")
    assert "break-glass" in run("approver_keys", "list", "ada")
    with pytest.raises(CommandError, match="enrolled already"):
        run("approver_keys", "add", "ada", "--public", line_of(key))
    with pytest.raises(CommandError, match="exactly one"):
        run("approver_keys", "revoke", "ada")
    assert "revoked" in run("approver_keys", "revoke", "ada", row.thumbprint[:8])
    with pytest.raises(CommandError, match="no person"):
        run("approver_keys", "list", "nobody")
    actions = list(AuditEvent.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["approver-key.enrol", "approver-key.revoke"]


def test_a_key_is_removed_by_its_owner_who_knows_what_follows(site: None, ada: User) -> None:
    people = make_people(3)
    client, invitation = Client(), create_invitation(user=ada, actor="user:boss")[1]
    assert enrol(client, Device(people[0].passkey), f"/sign-in/invitation/{invitation}").status_code == 200
    others = add_key_file(user=User.objects.create_user("bob"), line=line_of(KeyFile()), actor="t")
    assert client.post(f"/sign-in/keys/{others.pk}/remove").status_code == 404
    assert client.post("/sign-in/keys", {"public": line_of(KeyFile()), "label": ""}).status_code == 302
    assert "Key file (Ed25519)" in client.get("/sign-in/keys").content.decode()
    put_in_force(*people)
    key = next(each for each in list_keys(ada) if each.thumbprint in list_approving())
    path = f"/sign-in/keys/{key.pk}/remove"
    assert "new version" in client.get(path).content.decode()
    assert client.post(path).status_code == 403
    assert client.post(path, {"accept": "on"}).status_code == 302
    assert client.post(path, {"accept": "on"}).status_code == 404
    assert ApproverKey.objects.filter(user=ada, revoked_at=None).count() == 1


# Invitations and rights


def test_the_shell_invites_and_makes_people(site: None) -> None:
    with pytest.raises(CommandError, match="--create"):
        run("invite", "grace")
    link = run("invite", "grace", "--create", "--first-name", "Grace", "--can-propose", "--hours", "2")
    assert re.fullmatch(r"https://muster\.example/sign-in/invitation/[\w-]{43}", link)
    grace = User.objects.get()
    assert (grace.first_name, grace.is_staff, grace.is_superuser, grace.has_usable_password()) == ("Grace", True, False, False)
    assert grace.has_perm("nodes.view_node")
    assert not grace.has_perm("governance.change_admintoken")
    assert Client().get(link.removeprefix("https://muster.example")).headers["Referrer-Policy"] == "strict-origin"
    for wrong, said in ((("no spaces", "--create"), "letters"), (("grace", "--hours", "0"), "hours")):
        with pytest.raises(CommandError, match=said):
            run("invite", *wrong)


def test_who_has_keys_or_is_an_administrator_is_invited_by_administrators_alone(ada: User, boss: Client) -> None:
    clerk, client = make_clerk()
    ben = User.objects.create_user("ben")
    link = f"/admin/controlplane/user/{ben.pk}/invite/"
    assert client.post(link).status_code == 200
    make_key(ben)  # the link opens the account
    assert client.post(link).status_code == 403
    assert boss.post(link).status_code == 200
    assert client.post(f"/admin/controlplane/user/{ada.pk}/invite/").status_code == 403
    assert client.post(f"/admin/controlplane/user/{clerk.pk}/invite/").status_code == 200
    clerk.user_permissions.clear()
    assert client.post(f"/admin/controlplane/user/{clerk.pk}/invite/").status_code == 403


def change(client: Client, person: User, **fields: Any) -> Any:
    whole = {
        "username": person.username, "first_name": "", "last_name": "", "email": "", "is_active": "on",
        "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00", **fields,
    }  # fmt: skip
    return client.post(f"/admin/controlplane/user/{person.pk}/change/", whole)


def test_a_name_stays_once_it_is_given_since_policies_and_decisions_are_under_it(boss: Client) -> None:
    mallory = User.objects.create_user("mallory")
    assert change(boss, mallory, username="ben", first_name="M.").status_code == 302
    mallory = User.objects.get(pk=mallory.pk)
    assert (mallory.username, mallory.first_name) == ("mallory", "M.")
    mallory.username = "ben"
    with pytest.raises(ValueError, match="name of a person stays"):
        mallory.save()
    mallory.save(update_fields=["last_name"])
    assert User.objects.get(pk=mallory.pk).username == "mallory"


def test_roles_are_given_by_owners_audited_and_kept_by_the_form_of_a_person(ada: User, boss: Client) -> None:
    ben = User.objects.create_user("ben")
    page = f"/admin/controlplane/user/{ben.pk}/roles/"
    boss.post(page, {"roles": ["operator", "approver"]})
    ben = User.objects.get(pk=ben.pk)
    assert (list_roles(ben), ben.is_staff, ben.is_superuser) == ([Role.OPERATOR, Role.APPROVER], True, False)
    assert (ben.has_perm("nodes.change_node"), ben.has_perm("gateway.add_apikey")) == (True, False)
    (event,) = audited("person.roles")
    assert (event.actor, event.target, event.detail) == ("user:ada", "ben", {"before": [], "after": ["operator", "approver"]})
    # The form of the person has other groups and permissions, and keeps the roles.
    change(boss, ben, first_name="B.", groups=[str(Group.objects.create(name="night shift").pk)])
    ben = User.objects.get(pk=ben.pk)
    assert (list_roles(ben), ben.groups.count(), ben.first_name) == ([Role.OPERATOR, Role.APPROVER], 3, "B.")
    boss.post(page, {"roles": []})
    assert list_roles(User.objects.get(pk=ben.pk)) == []
    answer = boss.post(f"/admin/controlplane/user/{ada.pk}/roles/", {"roles": ["viewer"]})
    assert "last owner" in answer.content.decode()
    assert User.objects.get(pk=ada.pk).is_superuser
    clerk, client = make_clerk()
    assert client.post(f"/admin/controlplane/user/{clerk.pk}/roles/", {"roles": ["owner"]}).status_code == 403


def test_people_of_before_roles_keep_what_they_could_do_once() -> None:
    Group.objects.all().delete()
    staff, guest = User.objects.create_user("staff", is_staff=True), User.objects.create_user("guest")
    make_role_groups(is_update=True)
    later = User.objects.create_user("later")
    make_role_groups(is_update=True)
    found = [User.objects.get(pk=person.pk) for person in (staff, guest, later)]
    assert [list_roles(person) for person in found] == [[Role.APPROVER], [Role.APPROVER], []]
    assert [person.has_perm("governance.add_operation") for person in found] == [True, False, False]
    Group.objects.get(name="viewer").permissions.clear()
    make_role_groups(is_update=True)
    assert not Group.objects.get(name="viewer").permissions.exists()


def test_an_owner_ends_the_sessions_of_somebody(boss: Client) -> None:
    ben, client = User.objects.create_user("ben", is_staff=True), Client()
    client.force_login(ben)
    boss.post(f"/admin/controlplane/user/{ben.pk}/sessions/")
    assert client.get("/admin/").status_code == 302
    assert [event.target for event in audited("sign-in.close-all")] == ["ben"]


def test_an_operator_gives_nobody_more_rights_and_changes_no_administrator(ada: User) -> None:
    clerk, client = make_clerk()
    rights = [str(each.pk) for each in Permission.objects.all()[:5]]
    change(client, clerk, is_superuser="on", is_staff="on", user_permissions=rights, first_name="C.")
    clerk = User.objects.get(pk=clerk.pk)
    assert (clerk.first_name, clerk.is_superuser, clerk.user_permissions.count()) == ("C.", False, 3)
    assert change(client, ada, first_name="X").status_code == 403
    assert client.post(f"/admin/controlplane/user/{ada.pk}/password/", {"password1": "p" * 20}).status_code == 403
    assert User.objects.get(pk=ada.pk).first_name == ""


def test_a_group_that_an_operator_is_in_gets_rights_from_administrators_alone(boss: Client) -> None:
    clerk, client = make_clerk("add_group", "change_group", "delete_group", "view_group")
    group = Group.objects.create(name="clerks")
    clerk.groups.add(group)
    rights = [str(each.pk) for each in Permission.objects.all()[:5]]
    for path in (f"{group.pk}/change/", "add/", f"{group.pk}/delete/"):
        assert client.post(f"/admin/auth/group/{path}", {"name": "x", "permissions": rights}).status_code == 403
    assert client.get(f"/admin/auth/group/{group.pk}/change/").status_code == 200
    assert boss.post("/admin/auth/group/add/", {"name": "y", "permissions": rights}).status_code == 302


def test_a_password_that_was_set_for_somebody_is_in_the_audit_without_it(boss: Client) -> None:
    ben = User.objects.create_user("ben")
    fields = {"usable_password": "true", "password1": "a long and odd phrase", "password2": "a long and odd phrase"}
    path = f"/admin/controlplane/user/{ben.pk}/password/"
    assert boss.post(path, {**fields, "password2": "another"}).status_code == 200
    assert not audited("operator.change")
    assert boss.post(path, fields).status_code == 302
    (event,) = audited("operator.change")
    assert (event.actor, event.target, event.detail) == ("user:ada", "ben", {"fields": ["password"]})


# Admin tokens


def test_a_new_token_is_accepted_and_only_its_digest_is_stored() -> None:
    owner = User.objects.create_user("ada")
    token, text = create_admin_token(name=" deploy ", actor="user:ada", owner=owner)
    assert text.startswith("msa_")
    assert token.name == "deploy"
    assert bytes(AdminToken.objects.get().digest) == digest_credential(text)
    assert verify_admin_token(text) == token
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.target) == ("user:ada", "admin_token.create", "deploy")
    assert text not in str(event.detail)
    for age_s, is_noted in ((0, False), (120, True)):  # at most once a minute
        used_at = timezone.now() - timedelta(seconds=age_s)
        AdminToken.objects.update(last_used_at=used_at)
        verify_admin_token(text)
        assert (AdminToken.objects.get().last_used_at != used_at) is is_noted
    User.objects.update(is_active=False)
    assert verify_admin_token(text) is None


def test_what_is_not_exactly_a_token_is_refused_and_a_revoked_one_too() -> None:
    token, text = create_admin_token(name="deploy", actor="user:ada")
    forged = mint_credential(CredentialKind.ADMIN).text
    same_id = f"msa_{text.split('_')[1]}_{forged.split('_')[2]}"
    others = [mint_credential(kind).text for kind in (CredentialKind.CLIENT, CredentialKind.WORKER)]
    around = [text[:-1], text + "x", text.replace("msa_", "mst_"), text.upper(), " " + text]
    for wrong in ("", "msa_", forged, same_id, *around, *others):
        assert verify_admin_token(wrong) is None, wrong
    first, again = (revoke_admin_token(token_id=token.pk, actor="user:bob") for _ in range(2))
    assert first.revoked_at == again.revoked_at is not None
    assert verify_admin_token(text) is None
    assert AuditEvent.objects.filter(action="admin_token.revoke").count() == 1
    with pytest.raises(NotFound):
        revoke_admin_token(token_id=0, actor="user:bob")


def test_wrong_tokens_of_one_address_are_slowed_down_and_cost_no_query_each(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = create_admin_token(name="deploy", actor="user:ada")
    install_virtual_clock()  # a second of the throttle's does not pass here, however slow the machine
    monkeypatch.setattr(admin_tokens, "throttle", AuthThrottle(read_digests=admin_tokens._read_digests))

    def ask(token: str) -> Any:  # Any: the response of the test client
        return client.get("/nodes", headers={"authorization": f"Bearer {token}"}, REMOTE_ADDR="192.0.2.77")

    with CaptureQueriesContext(connection) as queries:
        answers = [ask(mint_credential(CredentialKind.ADMIN).text) for _ in range(60)]
    assert Counter(answer.status_code for answer in answers)[401] == 20
    late = answers[-1]
    assert (late.status_code, late["Retry-After"], late.json()["error"]["code"]) == (429, "1", "RATE_LIMITED")
    assert len(queries) < 30
    assert ask(text).status_code == 200


@pytest.mark.parametrize("kind", ["unknown id", "wrong secret"])
def test_an_unknown_id_and_a_wrong_secret_take_the_same_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = create_admin_token(name="deploy", actor="user:ada")
    forged = mint_credential(CredentialKind.ADMIN).text
    head = f"msa_{text.split('_')[1]}_{forged.split('_')[2][:32]}"
    wrong = forged if kind == "unknown id" else head + _checksum(head)
    compared: list[int] = []
    monkeypatch.setattr("wire.credentials.hmac.compare_digest", lambda _given, stored: compared.append(len(stored)))
    with CaptureQueriesContext(connection) as queries:
        assert verify_admin_token(wrong) is None
    assert (len(queries), compared) == (1, [32])
