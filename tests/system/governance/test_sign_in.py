"""Signing in: passkeys, invitations, passwords with and without a code, and what each session may do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pyotp
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as generate_ec_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from django.conf import LazySettings, settings
from django.contrib.auth.hashers import MD5PasswordHasher
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from core.limits import limits
from core.models import User
from gateway.models import ApiKey, Tenant
from governance.errors import SignInRefused
from governance.models import ApproverKey, AuditEvent, Invitation, OneTimePassword, Operation, SignInFailure
from governance.operations.policies import draft_policy
from governance.operations.runs import run_due
from governance.passkeys import verify_known
from governance.passwords import ANYWHERE_PACE, NAME_PACE, REFUSAL, _hide, sweep_failures
from governance.people import create_invitation
from tests.fakes.governed_team import RP_ID, Member, Team, make_client, make_team, open_session, post, propose_token
from tests.fakes.nodes import find_tables, make_tenant
from tests.fakes.passkeys import USER_PRESENT, Device, KeyFile, PrivateKey, SoftPasskey
from wire.optoken.approval import decode_bytes, encode_bytes

pytestmark = pytest.mark.django_db

PASSWORD = "a password for tests only"
HERE = "127.0.0.1"
JSON = "application/json"


@pytest.fixture(autouse=True)
def site(settings: LazySettings) -> None:
    """The installation is opened at the address that the passkeys of the tests belong to, and hashes passwords quickly."""
    settings.PUBLIC_URL = "https://muster.example"
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def ada() -> User:
    return User.objects.create_superuser("ada", password=PASSWORD)


class CountingHasher(MD5PasswordHasher):
    """Counts what signing in costs."""

    hashed = 0

    def encode(self, password: str, salt: str) -> str:
        CountingHasher.hashed += 1
        return super().encode(password, salt)


def invitation_of(user: User) -> str:
    _, text = create_invitation(user=user, actor="user:boss")
    return f"/sign-in/invitation/{text}"


def accept(client: Client, path: str, device: Device, *, label: str = "laptop") -> Any:
    """Make a passkey on the page of an invitation; the last response."""
    options = client.post(f"{path}/options").json()
    return client.post(f"{path}/passkey", {"credential": device.make(options), "label": label}, content_type=JSON)


def enrolled(user: User, device: Device) -> Client:
    client = Client()
    assert accept(client, invitation_of(user), device).status_code == 200
    return client


def by_passkey(device: Device, *, client: Client | None = None) -> tuple[Client, Any]:
    client = client or Client()
    options = client.post("/sign-in/passkey/options").json()
    return client, client.post("/sign-in/passkey", {"credential": device.answer(options)}, content_type=JSON)


def by_password(client: Client, *, password: str = PASSWORD, name: str = "ada", code: str = "", **more: str) -> Any:
    """Sign in by name and password, and with a code by the second step; the last response."""
    response = client.post("/sign-in/", {"name": name, "password": password, **more})
    return client.post("/sign-in/", {"code": code, **more}) if code else response


def is_signed_in(client: Client) -> bool:
    return client.get("/sign-in/keys").status_code == 200


MAKERS: dict[str, Callable[[], PrivateKey]] = {
    "ES256": lambda: generate_ec_key(SECP256R1()), "EdDSA": Ed25519PrivateKey.generate,
    "RS256": lambda: generate_private_key(65537, 2048),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", list(MAKERS))
def test_an_invitation_enrols_a_passkey_that_signs_in_from_then_on(ada: User, algorithm: str) -> None:
    device = Device(SoftPasskey(MAKERS[algorithm]()))
    assert is_signed_in(enrolled(ada, device))
    key = ApproverKey.objects.get()
    assert (key.user, key.kind, key.label, key.transports) == (ada, "webauthn", "laptop", ["internal"])
    assert decode_bytes(key.public_key) == device.passkey.public_key
    again, response = by_passkey(device)
    assert response.json() == {"next": "/admin/"}
    assert again.session["muster_assurance"] == "passkey"
    actions = set(AuditEvent.objects.values_list("action", flat=True))
    assert actions >= {"invitation.create", "invitation.use", "approver-key.enrol", "sign-in.open"}


def test_an_invitation_works_once_until_a_newer_one_or_its_time_ends_it(ada: User) -> None:
    older, path = invitation_of(ada), invitation_of(ada)
    assert Client().get(older).status_code == 403
    for _ in range(2):  # looking at it spends nothing
        assert "Make your passkey" in Client().get(path).content.decode()
    late, second = Device(), Client()
    options = second.post(f"{path}/options").json()  # two hold it
    assert accept(Client(), path, Device()).status_code == 200
    response = second.post(f"{path}/passkey", {"credential": late.make(options), "label": "x"}, content_type=JSON)
    assert response.status_code == 403
    assert (Client().get(path).status_code, Client().post(f"{path}/options").status_code) == (403, 403)
    assert ApproverKey.objects.count() == 1
    newest = invitation_of(ada)
    Invitation.objects.update(expires_at=timezone.now())
    assert Client().get(newest).status_code == 403


NOT_HERE: dict[str, dict[str, Any]] = {
    "user not verified": {"flags": USER_PRESENT}, "user not present": {"flags": 0x04},
    "other origin": {"origin": "https://evil.example"}, "other port": {"origin": "https://muster.example:8443"},
    "other relying party": {"rp_id": "evil.example"}, "other type": {"client_type": "webauthn.created"},
    "in a frame": {"client_changes": {"crossOrigin": True}}, "other challenge": {"client_changes": {"challenge": "AAAA"}},
}  # fmt: skip


@pytest.mark.parametrize("changes", NOT_HERE.values(), ids=NOT_HERE)
def test_a_passkey_or_an_answer_that_was_not_made_here_by_its_user_is_refused(ada: User, changes: dict[str, Any]) -> None:
    device = Device()
    assert accept(Client(), invitation_of(ada), device.misbehaving(**changes)).status_code == 403
    assert not ApproverKey.objects.exists()
    assert Invitation.objects.get().used_at is None
    enrolled(ada, device)
    client, response = by_passkey(device.misbehaving(**changes))
    assert response.status_code == 403
    assert not is_signed_in(client)


def test_an_answer_is_worth_one_try_for_its_purpose_and_for_five_minutes(ada: User) -> None:
    device, client = Device(), Client()
    enrolled(ada, device)

    def send(answer: Any) -> int:
        return client.post("/sign-in/passkey", {"credential": answer}, content_type=JSON).status_code

    options = client.post("/sign-in/passkey/options").json()
    assert send(device.misbehaving(flags=0).answer(options)) == 403
    assert send(device.answer(options)) == 403
    assert send(device.answer(client.post(f"{invitation_of(ada)}/options").json())) == 403
    late = client.post("/sign-in/passkey/options").json()
    session = client.session
    session["muster_challenge"] = {**session["muster_challenge"], "at": int(time.time()) - 301}
    session.save()
    assert send(device.answer(late)) == 403
    assert send(device.answer(client.post("/sign-in/passkey/options").json())) == 200


NULL_ID = '{"credential": {"id": "\\u0000", "response": {}}}'
NOT_BASE64 = '{"credential": {"id": "AAAA", "rawId": "AAAA", "type": "public-key", "response": {"clientDataJSON": "%%%"}}}'
UNREADABLE = ["", "[]", "null", '{"credential": 7}', '{"credential": {"response": {}}}', NOT_BASE64, NULL_ID, "[" * 50_000]


@pytest.mark.parametrize("page", ["passkey", "invitation"])
def test_what_cannot_be_read_is_refused_in_words(ada: User, page: str) -> None:
    client, path = Client(), invitation_of(ada)
    at, ask = ("/sign-in/passkey", "/sign-in/passkey/options") if page == "passkey" else (f"{path}/passkey", f"{path}/options")
    for body in UNREADABLE:
        client.post(ask)
        response = client.post(at, body, content_type=JSON)
        assert response.status_code == 403, body[:40]
        assert response.json()["error"]["message"]


def test_no_altered_answer_is_accepted_and_every_one_is_refused_in_words() -> None:
    chance, device, challenge = random.Random(7), Device(), bytes(32)
    right = device.answer({"challenge": encode_bytes(challenge)})
    verify = partial(verify_known, keyid=device.passkey.keyid, public_key=device.passkey.public_key)
    verify(right, challenge=challenge)
    for _ in range(400):
        name = chance.choice(sorted(right["response"]))
        content = bytearray(decode_bytes(right["response"][name]))
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            del content[chance.randrange(len(content)) :]
        altered = {**right, "response": {**right["response"], name: encode_bytes(bytes(content))}}
        with pytest.raises(SignInRefused):
            verify(altered, challenge=challenge)


def test_a_passkey_belongs_to_one_person_and_stays_outside_when_it_is_removed_or_the_person_switched_off(ada: User) -> None:
    device, bob = Device(), User.objects.create_user("bob")
    client = enrolled(ada, device)
    assert accept(Client(), invitation_of(bob), device).status_code == 403
    assert Invitation.objects.get(user=bob).used_at is None
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert by_passkey(device)[1].status_code == 403
    assert not is_signed_in(client)
    User.objects.filter(pk=ada.pk).update(is_active=True)
    ApproverKey.objects.update(revoked_at=timezone.now())
    assert by_passkey(device)[1].status_code == 403


# Sessions


def test_signing_in_changes_the_key_of_the_session_and_drops_what_it_held(ada: User) -> None:
    client = Client()
    client.post("/sign-in/passkey/options")
    before = client.session.session_key
    by_password(client)
    assert client.session.session_key != before
    assert (client.cookies["sessionid"]["httponly"], client.cookies["sessionid"]["samesite"]) == (True, "Lax")
    assert "muster_challenge" not in client.session
    stepped_up = client.session.session_key
    device = Device()
    enrolled(ada, device)
    by_passkey(device, client=client)
    assert client.session.session_key not in {before, stepped_up}


@pytest.mark.parametrize(
    ("mark", "age_s", "lives"),
    [("seen_at", 29 * 60, True), ("seen_at", 31 * 60, False), ("signed_in_at", 12 * 3600 + 1, False)],
)
def test_a_session_ends_when_it_is_idle_or_old(ada: User, mark: str, age_s: int, lives: bool) -> None:
    client = Client()
    by_password(client)
    session = client.session
    before = session[f"muster_{mark}"] = int(time.time()) - age_s
    session.save()
    if lives:  # a page that follows by itself is no use of it
        assert client.get("/sign-in/keys", headers={"X-Muster-Follow": "1"}).status_code == 200
        assert client.session["muster_seen_at"] == before
    assert is_signed_in(client) is lives
    assert not lives or client.session["muster_seen_at"] > before


def test_other_sessions_of_the_person_are_listed_and_ended(ada: User) -> None:
    here, there, other = Client(), Client(), Client()
    User.objects.create_user("bob", password=PASSWORD)
    by_password(here)
    by_password(there)
    by_password(other, name="bob")
    assert here.get("/sign-in/keys").content.decode().count("<li>Since") == 2
    here.post("/sign-in/sessions/end")
    assert (is_signed_in(here), is_signed_in(there), is_signed_in(other)) == (True, False, True)


def test_signing_out_ends_the_session_on_both_ways(ada: User) -> None:
    for path in ("/sign-in/out", "/admin/logout/"):
        client = Client()
        by_password(client)
        assert client.get(path).status_code == 405
        assert client.post(path).headers["Location"] == "/sign-in/"
        assert not is_signed_in(client)


def test_forged_forms_are_refused() -> None:
    for path in ("/sign-in/", "/sign-in/passkey/options", "/sign-in/passkey", "/sign-in/out", "/sign-in/sessions/end"):
        assert Client(enforce_csrf_checks=True).post(path, {}).status_code == 403


def test_only_addresses_of_ours_are_gone_to_after_signing_in(ada: User) -> None:
    assert by_password(Client(), next="/admin/nodes/").headers["Location"] == "/admin/nodes/"
    for wanted in ("https://evil.example/", "//evil.example/", "javascript:alert(1)", "/sign-in/?next=/x", ""):
        assert by_password(Client(), next=wanted).headers["Location"] == "/admin/", wanted


# What a session may do


def test_losing_the_passkey_does_not_make_the_password_strong_again(ada: User) -> None:
    enrolled(ada, Device())
    ApproverKey.objects.update(revoked_at=timezone.now())
    client = Client()
    by_password(client)
    assert client.post("/admin/auth/group/add/", {"name": "a group"}).status_code == 403
    assert client.post("/sign-in/keys/passkey/options").status_code == 403
    assert client.post("/admin/logout/").status_code == 302


# Passwords, codes, guessing


def set_app_up(user: User) -> str:
    secret = pyotp.random_base32()
    OneTimePassword.objects.create(user=user, secret=secret, confirmed_at=timezone.now())
    return secret


def test_an_app_is_set_up_by_a_right_code_and_asked_for_from_then_on(ada: User) -> None:
    client = Client()
    by_password(client)
    page = client.get("/sign-in/totp").content.decode()
    assert 'src="data:image/svg+xml' in page
    secret = OneTimePassword.objects.get().secret
    assert secret in page
    assert client.post("/sign-in/totp", {"code": "000 00x"}).status_code == 200
    assert OneTimePassword.objects.get().confirmed_at is None
    assert client.post("/sign-in/totp", {"code": pyotp.TOTP(secret).now()}).status_code == 302
    half = Client()
    assert 'name="code"' in by_password(half).content.decode()
    assert not is_signed_in(half)
    later = pyotp.TOTP(secret).at(timezone.now() + timedelta(seconds=30))
    fresh = Client()
    assert by_password(fresh, code=later).status_code == 302
    assert fresh.session["muster_assurance"] == "totp"
    assert secret not in client.get("/sign-in/keys").content.decode()


def test_nothing_tells_a_name_that_is_none_from_another_one_and_a_code_works_once(ada: User, settings: LazySettings) -> None:
    code = pyotp.TOTP(set_app_up(ada)).now()
    assert [by_password(Client(), code=code).status_code for _ in range(2)] == [302, 403]
    User.objects.create_user("off", password=PASSWORD, is_active=False)
    wrong = {"password": "wrong"}
    for attempt in (wrong, {"code": "123456"}, {"name": "nobody"}, {"name": "off"}, {"name": "nobody", **wrong}):
        assert by_password(Client(), **attempt).content.decode().count(REFUSAL) == 1
    settings.PASSWORD_HASHERS = [f"{__name__}.CountingHasher"]
    User.objects.create_user("bob", password=PASSWORD)
    for name in ("bob", "stranger"):
        CountingHasher.hashed = 0
        by_password(Client(), name=name, password="wrong")
        assert CountingHasher.hashed == 1


def be_wrong_again(**row: str) -> None:
    """Let a wait last for minutes, so that no slow machine outlasts it."""
    SignInFailure.objects.filter(**row).update(count=20, last_at=timezone.now())


def test_guessing_is_slowed_down_for_one_name_from_one_address_alone(ada: User) -> None:
    User.objects.create_superuser("bob", password=PASSWORD)
    assert [NAME_PACE.wait(n).total_seconds() for n in (0, 4, 5, 6, 7, 8, 1000)] == [0, 0, 1, 2, 4, 8, 900]
    for _ in range(NAME_PACE.free):
        assert by_password(Client(), password="wrong").status_code == 403
    assert NAME_PACE.wait(SignInFailure.objects.get(name=_hide("ada"), address=HERE).count)
    be_wrong_again(name=_hide("ada"), address=HERE)
    assert by_password(Client()).status_code == 403
    assert by_password(Client(), name="bob").status_code == 302
    elsewhere = Client(REMOTE_ADDR="198.51.100.7")
    assert by_password(elsewhere).status_code == 302
    SignInFailure.objects.update(last_at=timezone.now() - NAME_PACE.wait(20))
    assert by_password(Client()).status_code == 302
    assert SignInFailure.objects.get(name=_hide("ada"), address=HERE).count == 0
    assert AuditEvent.objects.filter(action="sign-in.slow-down").count() == 1


def test_thirty_addresses_guess_for_one_name_no_faster_and_the_person_gets_in_from_home_and_by_passkey(
    ada: User, settings: LazySettings
) -> None:
    device, at_home = Device(), "192.0.2.1"
    enrolled(ada, device)
    assert by_password(Client(REMOTE_ADDR=at_home)).status_code == 302
    settings.PASSWORD_HASHERS = [f"{__name__}.CountingHasher"]
    CountingHasher.hashed = 0
    for n in range(ANYWHERE_PACE.free):
        assert by_password(Client(REMOTE_ADDR=f"198.51.100.{n}"), password=f"guess {n}").status_code == 403
    be_wrong_again(name=_hide("ada"), address="")
    hashed = CountingHasher.hashed
    for n in range(ANYWHERE_PACE.free, 30):
        assert by_password(Client(REMOTE_ADDR=f"198.51.100.{n}"), password=f"guess {n}").status_code == 403
    assert CountingHasher.hashed == hashed
    assert by_password(Client(REMOTE_ADDR="198.51.100.200")).status_code == 403
    assert by_password(Client(REMOTE_ADDR=at_home)).status_code == 302
    assert by_passkey(device)[1].status_code == 200
    # Nor did the right ones let anybody guess on.
    assert by_password(Client(REMOTE_ADDR="198.51.100.201")).status_code == 403
    # Who waits for the short while gets in from a new place too, and is known there.
    SignInFailure.objects.filter(address="").update(last_at=timezone.now() - timedelta(seconds=ANYWHERE_PACE.longest_s))
    assert by_password(Client(REMOTE_ADDR="203.0.113.9")).status_code == 302
    be_wrong_again(address="")
    assert by_password(Client(REMOTE_ADDR="203.0.113.9")).status_code == 302


def test_codes_behind_a_right_password_are_slowed_down_from_everywhere_but_home(ada: User) -> None:
    secret, at_home, at = set_app_up(ada), "192.0.2.1", timezone.now()
    assert by_password(Client(REMOTE_ADDR=at_home), code=pyotp.TOTP(secret).at(at - timedelta(seconds=30))).status_code == 302
    for n in range(NAME_PACE.free):
        by_password(Client(REMOTE_ADDR=f"198.51.100.{n}"), code="000000")
    assert SignInFailure.objects.get(name=_hide("ada", of="code"), address="").count == NAME_PACE.free
    be_wrong_again(name=_hide("ada", of="code"), address="")
    assert by_password(Client(REMOTE_ADDR="192.0.2.2"), code=pyotp.TOTP(secret).at(at)).status_code == 403
    assert by_password(Client(REMOTE_ADDR=at_home), code=pyotp.TOTP(secret).at(at)).status_code == 302


def test_an_address_is_known_for_its_days_and_for_its_name_alone(ada: User) -> None:
    User.objects.create_superuser("bob", password=PASSWORD)
    assert by_password(Client()).status_code == 302
    for name in ("ada", "bob"):
        by_password(Client(REMOTE_ADDR="198.51.100.1"), name=name, password="wrong")
        be_wrong_again(name=_hide(name), address="")
    assert by_password(Client(), name="bob").status_code == 403
    assert by_password(Client()).status_code == 302
    known = timedelta(seconds=limits().governance.sign_in_known_s)
    assert sweep_failures(now=timezone.now() + known - timedelta(seconds=9)) > 0
    here = SignInFailure.objects.filter(name=_hide("ada"), address=HERE)
    assert here.update(signed_in_at=timezone.now() - known) == 1
    by_password(Client(REMOTE_ADDR="198.51.100.1"), password="wrong")
    be_wrong_again(name=_hide("ada"), address="")
    assert by_password(Client()).status_code == 403


def test_what_was_typed_at_sign_in_stands_in_no_table_and_no_log(ada: User, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for n in range(NAME_PACE.free + 2):
        by_password(Client(), name="typed-as-a-name", password="typed-as-a-password", code="typed-code")
        by_password(Client(REMOTE_ADDR=f"198.51.100.{n}"), name="ada", password="typed-as-a-password")
    assert by_password(Client(REMOTE_ADDR="192.0.2.1")).status_code == 302
    secret, link = set_app_up(ada), invitation_of(ada).rpartition("/")[2]
    events = str(list(AuditEvent.objects.values_list("actor", "target", "detail")))
    assert not [word for word in (secret, link) if word in events]
    assert "typed-" not in caplog.text
    assert SignInFailure.objects.exclude(name="").exists()
    assert find_tables("typed-") == set()


@dataclass
class Case:
    """Who came in how, and what there is for them to act on. ``person``: whose session, invitation or token it is."""

    client: Client
    person: User
    ben: Member
    invitation: str
    pending: Operation | None

    def change(self, before: int, path: str, body: dict[str, object], count: Callable[[], int]) -> bool:
        self.client.post(path, body)
        return count() != before


def look(case: Case) -> bool:
    return case.client.get("/admin/").status_code == 200


def enrol(case: Case) -> bool:
    before, page = ApproverKey.objects.count(), "/sign-in/keys/passkey"
    ask, hand_in = (
        (f"{case.invitation}/options", f"{case.invitation}/passkey") if case.invitation else (f"{page}/options", page)
    )
    options = case.client.post(ask)
    if options.status_code == 200:
        device = Device(SoftPasskey(rp_id=RP_ID, origin=settings.PUBLIC_URL))
        case.client.post(hand_in, {"credential": device.make(options.json()), "label": "new"}, content_type=JSON)
    return ApproverKey.objects.count() > before


def file(case: Case) -> bool:
    line = f"ed25519 {encode_bytes(KeyFile().public_key)} x"
    return case.change(ApproverKey.objects.count(), "/sign-in/keys", {"public": line}, ApproverKey.objects.count)


def app(case: Case) -> bool:
    case.client.get("/sign-in/totp")
    row = OneTimePassword.objects.filter(user=case.person, confirmed_at=None).first()
    case.client.post("/sign-in/totp", {"code": pyotp.TOTP(row.secret).now() if row else "000000"})
    return row is not None and OneTimePassword.objects.filter(user=case.person, confirmed_at__isnull=False).exists()


def remove(case: Case) -> bool:
    in_use = ApproverKey.objects.filter(revoked_at=None)
    return case.change(in_use.count(), f"/sign-in/keys/{case.ben.key.pk}/remove", {"accept": "on"}, in_use.count)


def tenant(case: Case) -> bool:
    return case.change(
        Tenant.objects.count(), "/admin/gateway/tenant/add/", {"name": "new", "requests_per_minute": "1"}, Tenant.objects.count
    )


def key(case: Case) -> bool:
    form: dict[str, object] = {"tenant": Tenant.objects.first().pk, "name": "new", "priority": "normal"}  # type: ignore[union-attr]
    return case.change(ApiKey.objects.count(), "/admin/gateway/apikey/add/", form, ApiKey.objects.count)


def invite(case: Case) -> bool:
    other = User.objects.create_user("otto")
    path = f"/admin/controlplane/user/{other.pk}/invite/"
    return case.change(Invitation.objects.count(), path, {}, Invitation.objects.count)


def approve(case: Case) -> bool:
    if case.pending is None:
        return False
    body = {"proof": case.ben.proof(case.pending)}
    path = reverse("approvals:approve", args=[case.pending.pk])
    if "HTTP_AUTHORIZATION" in case.client.defaults:
        path = f"/api/v1/operations/{case.pending.pk}/approvals"
    post(case.client, path, body)
    return case.pending.decisions.exists()


def propose(case: Case) -> bool:
    before = Operation.objects.count()
    if "HTTP_AUTHORIZATION" in case.client.defaults:
        asked = {"operation": "admin-token-mint", "params": {"name": "new"}, "reason": "why not"}
        post(case.client, "/api/v1/operations", asked)
        return Operation.objects.count() > before
    asked_for = {"operation": "admin-token-mint", "reason": "why not", "param-": '{"name": "new"}', "param-name": "new"}
    form: dict[str, object] = {**asked_for, "max_uses": "1", "stops_on_failure": "on", "step": "send"}
    return case.change(before, reverse("approvals:propose"), form, Operation.objects.count)


ACTIONS = (look, enrol, file, app, remove, tenant, key, invite, approve, propose)
STATES = ("none", "drafted", "in force", "solo")
_LOOK, _BEGIN = "look", "look enrol file app tenant key invite"
_OWN = f"{_BEGIN} remove"
_SIGN, _ALL = f"{_OWN} approve", f"{_OWN} approve propose"
_CODE = _BEGIN.replace(" app", "")  # has one
TABLE = {
    #                                      none     drafted    in force           solo
    "nobody":                              ("",      "",        "",                ""),
    "password":                            (_BEGIN,  _BEGIN,    _LOOK,             _LOOK),
    "password and code":                   (_CODE,   _CODE,     _LOOK,             _LOOK),
    "password of a person with a passkey": (_LOOK,   _LOOK,     _LOOK,             _LOOK),
    "passkey":                             (_OWN,    _SIGN,     _ALL,              _ALL),
    "invitation":                          ("enrol", "enrol",   "enrol",           "enrol"),
    "token of nobody":                     ("",      "",        "propose",         "propose"),
    "token of a person":                   ("",      "approve", "approve propose", "approve propose"),
}  # fmt: skip
"""What is allowed, by the way of coming in and the state of the policy; whatever is absent is refused."""


def come_in(kind: str, ben: Member, eve: User) -> tuple[Client, User, str]:
    match kind:
        case "nobody":
            return Client(), eve, ""
        case "password":
            return open_session(eve, by="password"), eve, ""
        case "password and code":
            OneTimePassword.objects.create(user=eve, secret=pyotp.random_base32(), confirmed_at=timezone.now())
            return open_session(eve, by="totp"), eve, ""
        case "password of a person with a passkey":
            return open_session(ben.user, by="password"), ben.user, ""
        case "passkey":
            return open_session(ben.user, by="passkey"), ben.user, ""
        case "invitation":
            return Client(), eve, f"/sign-in/invitation/{create_invitation(user=eve, actor='user:ana')[1]}"
        case "token of nobody":
            return make_client(None), eve, ""
        case _:
            return make_client(ben), ben.user, ""


def set_policy(team: Team, state: str) -> Operation | None:
    """Bring the policy into a state; return what waits for ben's approval."""
    if state == "none":
        return None
    if state == "drafted":
        return draft_policy(approvers=team.choices(), reason="the first policy", proposer=team[0].proposer)
    first = draft_policy(
        approvers=team.choices(), reason="the first policy", proposer=team[0].proposer, is_solo=state == "solo"
    )
    for member in team.members[:1] if state == "solo" else team.members[1:]:
        member.approve(first)
    run_due()
    return propose_token(team[0])


@pytest.mark.parametrize("state", STATES)
def test_what_each_way_of_coming_in_may_do_in_each_state_of_the_policy(settings: LazySettings, state: str) -> None:
    settings.PUBLIC_URL = f"http://{RP_ID}:8000"
    team, eve = make_team(), User.objects.create_superuser("eve")
    User.objects.filter(pk=team[1].user.pk).update(is_superuser=True)
    make_tenant("research")
    pending = set_policy(team, state)
    for kind, allowed in TABLE.items():
        beginning = transaction.savepoint()
        client, person, invitation = come_in(kind, team[1], eve)
        case = Case(client, person, team[1], invitation, pending)
        cookies, done = client.cookies, []
        for act in ACTIONS:  # each from the same beginning
            client.cookies, point = deepcopy(cookies), transaction.savepoint()
            if act(case):
                done.append(act.__name__)
            transaction.savepoint_rollback(point)
        transaction.savepoint_rollback(beginning)
        assert sorted(done) == sorted(allowed[STATES.index(state)].split()), kind


def test_a_passkey_is_offered_once_somebody_has_one(ada: User) -> None:
    assert "Use a passkey" not in Client().get("/sign-in/").content.decode()
    enrolled(ada, Device())
    assert "Use a passkey" in Client().get("/sign-in/").content.decode()
    ApproverKey.objects.update(revoked_at=timezone.now())
    assert "Use a passkey" not in Client().get("/sign-in/").content.decode()


def test_a_right_password_waits_for_its_code_for_a_few_minutes_and_in_one_browser(ada: User) -> None:
    secret, client = set_app_up(ada), Client()
    by_password(client)
    assert client.post("/sign-in/", {"code": "000000"}).status_code == 403
    assert Client().post("/sign-in/", {"code": pyotp.TOTP(secret).now()}).status_code == 403
    session = client.session
    session["muster_half"] = {
        **session["muster_half"],
        "at": session["muster_half"]["at"] - limits().governance.challenge_s - 1,
    }
    session.save()
    assert client.post("/sign-in/", {"code": pyotp.TOTP(secret).now()}).status_code == 403
    assert by_password(client, code=pyotp.TOTP(secret).now()).status_code == 302


def test_passkeys_are_explained_where_no_browser_makes_them(ada: User, settings: LazySettings) -> None:
    enrolled(ada, Device())
    for url, said in (("http://10.0.0.7:8000", "host name"), ("http://[::1]", "host name"), ("http://muster.lan", "HTTPS")):
        settings.PUBLIC_URL = url
        assert said in Client().get("/sign-in/").content.decode()
        response = Client().post("/sign-in/passkey/options")
        assert response.status_code == 400
        assert url in response.json()["error"]["message"]
    settings.PUBLIC_URL = "http://localhost:8123/"
    assert Client().post("/sign-in/passkey/options").json()["rpId"] == "localhost"
