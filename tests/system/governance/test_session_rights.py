"""The sum of the rules: what each way of coming in may do in each state of the policy, held against one table."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import pyotp
import pytest
from django.conf import settings
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from core.models import User
from gateway.models import ApiKey, Tenant
from governance import services
from governance.models import ApproverKey, Invitation, OneTimePassword, Operation
from governance.services.people import create_invitation
from tests.fakes.governed_team import RP_ID, Member, Team, make_client, make_team, open_session, post, propose_token
from tests.fakes.passkeys import Device, KeyFile, SoftPasskey
from tests.fakes.tenants import make_tenant
from wire.optoken.approval import encode_bytes

pytestmark = pytest.mark.django_db

JSON = "application/json"


@dataclass
class Case:
    """Who came in how, and what there is for them to act on. ``person``: whose session, invitation or token it is."""

    client: Client
    person: User
    ben: Member
    invitation: str
    pending: Operation | None

    def change(self, before: int, path: str, body: dict[str, object], count: Callable[[], int]) -> bool:
        """Whether posting a form brought something about."""
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
    """A client that came in so, whose it is, and the address of an invitation."""
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
        return services.draft_policy(approvers=team.choices(), reason="the first policy", proposer=team[0].proposer)
    first = services.draft_policy(
        approvers=team.choices(), reason="the first policy", proposer=team[0].proposer, is_solo=state == "solo"
    )
    for member in team.members[:1] if state == "solo" else team.members[1:]:
        member.approve(first)
    services.run_due()
    return propose_token(team[0])


@pytest.mark.parametrize("state", STATES)
def test_what_each_way_of_coming_in_may_do_in_each_state_of_the_policy(state: str) -> None:
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
