"""A person's own keys on their page, from a shell on the server, and an administrator's invitation."""

from __future__ import annotations

import html
import re
from io import StringIO
from typing import Any

import pytest
from django.conf import LazySettings
from django.contrib.auth.models import Permission
from django.contrib.sessions.models import Session
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from core.models import User
from governance.errors import NotPermitted
from governance.models import ApproverKey, AuditEvent, Invitation, PolicyVersion
from governance.services.approver_keys import add_key_file, list_keys
from governance.services.people import create_invitation
from tests.fakes.governed_team import make_key
from tests.fakes.passkeys import Device, KeyFile, SoftPasskey
from tests.fakes.policies import Person, make_people, make_policy_bytes
from wire.optoken.approval import encode_bytes

pytestmark = pytest.mark.django_db
JSON = "application/json"


@pytest.fixture(autouse=True)
def site(settings: LazySettings) -> None:
    """The installation is opened at the address that the passkeys of the tests belong to."""
    settings.PUBLIC_URL = "https://muster.example"


@pytest.fixture
def ada() -> User:
    """A person who has no key yet."""
    return User.objects.create_superuser("ada")


@pytest.fixture
def password_session(ada: User) -> Client:
    """A session of hers that no passkey opened."""
    client = Client()
    client.force_login(ada)
    return client


def line_of(key: KeyFile, name: str = "ada") -> str:
    """The public line of a key file."""
    return f"ed25519 {encode_bytes(key.public_key)} {name}"


def enrol(client: Client, device: Device, *, label: str = "telephone") -> Any:
    """The response to making a passkey on the page of keys."""
    options = client.post("/sign-in/keys/passkey/options")
    if options.status_code != 200:
        return options
    return client.post("/sign-in/keys/passkey", {"credential": device.make(options.json()), "label": label}, content_type=JSON)


def by_passkey(user: User, device: Device) -> Client:
    """A session that a passkey opened."""
    client = Client()
    _, text = create_invitation(user=user, actor="user:boss")
    path = f"/sign-in/invitation/{text}"
    options = client.post(f"{path}/options").json()
    client.post(f"{path}/passkey", {"credential": device.make(options), "label": "first"}, content_type=JSON)
    return client


def put_in_force(*people: Person) -> None:
    """An active policy that names the keys of these people."""
    PolicyVersion.objects.create(
        version=1, document=make_policy_bytes(people), sha256="0" * 64, state="active", created_by="ada"
    )


def run(*words: str) -> str:
    """What a management command prints."""
    output = StringIO()
    call_command(*words, stdout=output)
    return output.getvalue().strip()


def test_the_session_that_has_just_made_a_passkey_may_act_at_once_under_a_new_session_key(password_session: Client) -> None:
    before = password_session.session.session_key
    assert enrol(password_session, Device()).status_code == 200
    put_in_force(*make_people(3))
    page = password_session.get("/sign-in/keys").content.decode()
    assert "It signs you in from now on" in page
    assert 'id="read-only"' not in page
    assert password_session.session["muster_assurance"] == "passkey"
    assert password_session.session.session_key != before
    assert not Session.objects.filter(session_key=before).exists()
    opened = AuditEvent.objects.filter(action="sign-in.open", target="ada").values_list("detail", flat=True)
    assert list(opened) == [{"by": "passkey"}]
    assert password_session.post("/admin/nodes/provider/add/", {"name": "rack"}).status_code != 403


READ_ONLY_PAGES = (
    "/admin/", "/admin/nodes/node/", "/admin/gateway/apikey/", "/admin/gateway/apikey/add/", "/admin/nodes/provider/add/",
    "/admin/playground/", "/admin/controlplane/user/", "/approvals/", "/approvals/propose?operation=freeze", "/sign-in/keys",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "says", "leads_to"),
    [
        (None, "./muster manage invite", "/sign-in/keys"),
        ({}, "signed in without your passkey", "/sign-in/?next="),
        ({"revoked_at": timezone.now()}, "none that is in use", "/sign-in/keys"),
    ],
)
def test_every_page_of_a_read_only_session_says_why_and_leads_to_what_repairs_it(
    ada: User, password_session: Client, key: dict[str, Any] | None, says: str, leads_to: str
) -> None:
    put_in_force(*make_people(3))
    if key is not None:
        make_key(ada)
        ApproverKey.objects.update(**key)
    for path in READ_ONLY_PAGES:
        banner = re.search(r'id="read-only".*?</p>', password_session.get(path).content.decode(), re.DOTALL)
        assert banner is not None, path
        assert says in banner[0]
        assert f'href="{leads_to}' in banner[0]


def test_a_passkey_enrols_more_keys_and_the_page_says_what_they_are(ada: User) -> None:
    client = by_passkey(ada, Device())
    assert enrol(client, Device().synced(), label="cloud").status_code == 200
    assert client.post("/sign-in/keys", {"public": line_of(KeyFile()), "label": ""}).status_code == 302
    page = client.get("/sign-in/keys").content.decode()
    assert "bound to one device" in page
    assert "synced between devices" in page
    assert "Key file (Ed25519)" in page
    assert page.count("not in the policy") == 3
    assert sorted(ApproverKey.objects.values_list("label", flat=True)) == ["ada", "cloud", "first"]


def test_nobody_has_more_keys_than_a_policy_can_name(ada: User) -> None:
    for _ in range(8):
        add_key_file(user=ada, line=line_of(KeyFile()), actor="t")
    with pytest.raises(NotPermitted, match="at most 8"):
        add_key_file(user=ada, line=line_of(KeyFile()), actor="t")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ed25519",
        "ed25519 AAAA x",
        "ssh-ed25519 AAAA x",
        "ed25519 === x",
        f"ed25519 {encode_bytes(SoftPasskey().public_key)} x",
    ],
    ids=["nothing", "word", "no key", "ssh", "not base64", "P-256"],
)
def test_what_is_no_public_line_is_refused_in_words(ada: User, line: str) -> None:
    with pytest.raises(CommandError, match="not the public line"):
        run("approver_keys", "add", "ada", "--public", line)


def test_the_shell_registers_lists_and_revokes_keys(ada: User) -> None:
    key = KeyFile()
    assert "no key" in run("approver_keys", "list", "ada")
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


def test_somebody_elses_key_cannot_be_removed(ada: User) -> None:
    bob = User.objects.create_user("bob")
    key = add_key_file(user=bob, line=line_of(KeyFile()), actor="t")
    assert by_passkey(ada, Device()).post(f"/sign-in/keys/{key.pk}/remove").status_code == 404


def test_removing_a_key_that_the_policy_names_asks_whether_one_knows_what_follows(ada: User) -> None:
    people = make_people(3)
    client = by_passkey(ada, Device(people[0].passkey))
    put_in_force(*people)
    (key,) = list_keys(ada)
    assert key.in_policy
    assert "in the active policy" in client.get("/sign-in/keys").content.decode()
    path = f"/sign-in/keys/{key.id}/remove"
    assert "new version" in client.get(path).content.decode()
    assert client.post(path).status_code == 403
    assert client.post(path, {"accept": "on"}).status_code == 302
    assert by_passkey(ada, Device()).get("/sign-in/keys").content.decode().count("in the active policy") == 0


def test_the_shell_invites_and_makes_people() -> None:
    with pytest.raises(CommandError, match="--create"):
        run("invite", "grace")
    link = run("invite", "grace", "--create", "--first-name", "Grace", "--can-propose", "--hours", "2")
    assert re.fullmatch(r"https://muster\.example/sign-in/invitation/[\w-]{43}", link)
    grace = User.objects.get()
    assert (grace.first_name, grace.is_staff, grace.is_superuser, grace.has_usable_password()) == ("Grace", True, False, False)
    assert grace.has_perm("nodes.view_node")
    assert not grace.has_perm("governance.change_admintoken")
    assert Client().get(link.removeprefix("https://muster.example")).status_code == 200
    with pytest.raises(CommandError, match="letters"):
        run("invite", "no spaces", "--create")
    with pytest.raises(CommandError, match="hours"):
        run("invite", "grace", "--hours", "0")


def test_an_administrator_invites_on_the_operators_page(ada: User, password_session: Client) -> None:
    bob = User.objects.create_user("bob")
    link = f"/admin/controlplane/user/{bob.pk}/invite/"
    assert link in password_session.get(f"/admin/controlplane/user/{bob.pk}/change/").content.decode()
    assert "Invite bob?" in password_session.get(link).content.decode()
    assert not Invitation.objects.exists()
    response = password_session.post(link)
    assert "no-store" in response.headers["Cache-Control"]
    (path,) = re.findall(r"https://muster\.example(/sign-in/invitation/[\w-]{43})", response.content.decode())
    assert Client().get(path).status_code == 200
    assert AuditEvent.objects.get(action="invitation.create").actor == "user:ada"
    User.objects.filter(pk=bob.pk).update(is_active=False)
    assert "switched off" in password_session.post(link).content.decode()


def test_the_form_for_a_new_operator_speaks_of_what_there_is(password_session: Client) -> None:
    page = html.unescape(password_session.get("/admin/controlplane/user/add/").content.decode())
    assert not [words for words in ("Single Sign-On", "LDAP", "After you've created", "Password-based") if words in page]
    assert "The page that follows gives the person rights and makes an invitation." in page
    assert "signs in with a passkey alone" in page
    form = {"username": "zoe", "usable_password": "false"}
    assert password_session.post("/admin/controlplane/user/add/", form).status_code == 302
    assert not User.objects.get(username="zoe").has_usable_password()


def test_nobody_invites_their_way_up_to_an_administrator(ada: User) -> None:
    bob, client = User.objects.create_user("bob", is_staff=True), Client()
    bob.user_permissions.set(Permission.objects.filter(codename__in=["view_user", "change_user"]))
    client.force_login(bob)
    assert client.post(f"/admin/controlplane/user/{ada.pk}/invite/").status_code == 403
    assert client.post(f"/admin/controlplane/user/{bob.pk}/invite/").status_code == 200
