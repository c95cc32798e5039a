"""The approval pages without a browser: who may see and do what, what is said, how many queries it takes."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from core.models import User
from governance import services
from governance.errors import InvalidProposal
from governance.models import Operation
from governance.signin import ASSURANCE
from governance.states import ApprovalState
from governance.views.operation_parts import describe_proof
from tests.fakes.governed_team import Team, make_governed, make_team, propose_token
from wire.optoken.approval import digest_words, policy_words
from wire.optoken.proposal import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
POLICY += "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"


def sign_in(user: User, *, by: str = "passkey") -> Client:
    client = Client()
    client.force_login(user)
    session = client.session
    session[ASSURANCE] = by
    session.save()
    return client


def page_of(operation: Operation, name: str = "operation") -> str:
    return reverse(f"approvals:{name}", args=[operation.pk])


def text_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, response.content.decode()
    return unescape(response.content.decode())


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo")


@pytest.fixture
def operation(team: Team) -> Operation:
    return propose_token(team[0])


@pytest.mark.parametrize("name", ["inbox", "history", "propose", "policy", "draft_policy", "freeze"])
def test_pages_are_for_people_who_are_signed_in_and_run_no_foreign_script(team: Team, name: str) -> None:
    path = reverse(f"approvals:{name}")
    assert Client().get(path).status_code == 302
    response = sign_in(team[1].user).get(path)
    assert response.status_code == 200
    assert response["Content-Security-Policy"] == POLICY
    assert "no-store" in response["Cache-Control"]
    html = response.content.decode()
    assert " style=" not in html
    assert not re.search(r"<script(?![^>]* src=)", html)
    assert not re.search(r"\son\w+=", html)


def offers_of(client: Client, operation: Operation) -> set[str]:
    html = text_of(client, page_of(operation))
    forms = re.findall(r'<form[^>]* data-action="(\w+)"([^>]*)>', html)
    shown = {name for name, rest in forms if "hidden" not in rest}
    said = re.search(r'data-actions="([^"]*)"', html)
    assert said is not None
    assert set(said.group(1).split()) == shown
    return shown


def test_each_person_is_offered_what_they_may_do(team: Team, operation: Operation) -> None:
    outsider = User.objects.create_user("otto")
    requester, approver = sign_in(team[0].user), sign_in(team[1].user)
    assert offers_of(requester, operation) == {"cancel"}
    assert offers_of(approver, operation) == {"approve", "reject"}
    assert offers_of(sign_in(outsider), operation) == set()
    assert "You asked for this and cannot approve it" in text_of(requester, page_of(operation))
    assert "does not name you as an approver" in text_of(sign_in(outsider), page_of(operation))
    team[1].approve(operation)
    assert offers_of(approver, operation) == {"withdraw"}
    services.cancel(op_id=operation.pk, proposer=team[0].proposer)
    assert offers_of(approver, operation) == set()


def test_a_proof_of_the_browser_is_kept_and_shown(team: Team, operation: Operation) -> None:
    client = sign_in(team[1].user)
    body = {"proof": team[1].proof(operation), "comment": "looks right"}
    answer = client.post(page_of(operation, "approve"), body, content_type="application/json")
    assert (answer.status_code, answer.json()) == (200, {"state": "pending"})
    html = text_of(client, page_of(operation))
    assert "1 of 2" in html
    assert "1 more person" in html
    assert "looks right" in html
    assert team[1].key.thumbprint[:16] in html
    lines = {line.label: line.value for line in describe_proof(body["proof"])}  # type: ignore[arg-type]
    assert lines["Site (RP id)"] == "localhost"
    assert lines["Six words signed"] == digest_words(bytes.fromhex(operation.digest))
    assert lines["The device says"] == "user present, user verified"


@pytest.mark.parametrize("body", ["", "[]", '{"proof": 1}', "{", "[" * 5000], ids=["empty", "list", "number", "cut", "deep"])
def test_what_is_no_proof_is_refused_in_words(team: Team, operation: Operation, body: str) -> None:
    answer = sign_in(team[1].user).post(page_of(operation, "approve"), body, content_type="application/json")
    assert answer.status_code == 403
    assert answer.json()["error"]["rule"] == "bad_proof"


def test_forged_posts_are_refused(team: Team, operation: Operation) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(team[0].user)
    for name in ("approve", "reject", "withdraw", "cancel", "use", "claim"):
        assert client.post(page_of(operation, name)).status_code == 403
        assert client.get(page_of(operation, name)).status_code == 405
    operation.refresh_from_db()
    assert operation.state == ApprovalState.PENDING


def test_rejecting_withdrawing_and_cancelling_say_what_happened(team: Team, operation: Operation) -> None:
    approver = sign_in(team[1].user)
    team[1].approve(operation)
    said = approver.post(page_of(operation, "withdraw"), follow=True).content.decode()
    assert "Your decision is withdrawn." in said
    assert "Waiting for approval." in said
    assert (
        "Say why you reject it" in approver.post(page_of(operation, "reject"), {"comment": " "}, follow=True).content.decode()
    )
    said = approver.post(page_of(operation, "reject"), {"comment": "wrong box"}, follow=True).content.decode()
    assert "Your rejection is recorded." in said
    assert "rejected by ben: wrong box" in said
    late = sign_in(team[0].user).post(page_of(operation, "cancel"), follow=True).content.decode()
    assert "This operation is rejected already" in late


def test_an_approved_token_is_shown_once_to_its_requester(team: Team, operation: Operation) -> None:
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    client = sign_in(team[0].user)
    assert offers_of(client, operation) == {"claim"}
    shown = client.post(page_of(operation, "claim"))
    found = re.search(r"msa_\w+", shown.content.decode())
    assert found is not None
    assert services.verify_admin_token(found.group()) is not None
    assert "no-store" in shown["Cache-Control"]
    assert found.group() not in client.post(page_of(operation, "claim"), follow=True).content.decode()


def test_what_is_not_there_is_said_on_a_page(team: Team) -> None:
    client = sign_in(team[0].user)
    for name in ("", "evidence", "live"):
        answer = client.get(f"/approvals/op_{'0' * 32}/{name}")
        assert answer.status_code == 404
        assert "no operation" in answer.content.decode()


def test_proposing_looks_before_it_sends(team: Team) -> None:
    client, path = sign_in(team[0].user), reverse("approvals:propose")
    assert "Make an admin token" in text_of(client, path)
    form = text_of(client, f"{path}?operation=admin-token-mint&reason=for+the+build")
    assert "for the build" in form
    names = set(re.findall(r'name="([^"]+)"', form))
    filled = {"operation": "admin-token-mint", "reason": "for the build", "max_uses": "1", "stops_on_failure": "on"}
    filled |= {"param-name": "ci"} if "param-name" in names else {"param-": '{"name": "ci"}'}
    before = Operation.objects.count()
    preview = client.post(path, {**filled, "step": "look"}).content.decode()
    assert "Nothing is sent yet" in preview
    assert "2 of 3, not counting the requester" in preview
    assert Operation.objects.count() == before
    again = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', preview))
    sent = client.post(path, {**filled, "step": "send"})
    assert {name: unescape(value) for name, value in again.items() if name in filled} == filled
    operation = Operation.objects.get(operation="admin-token-mint")
    assert sent["Location"] == page_of(operation)
    assert (operation.reason, operation.requested_by) == ("for the build", "ana")


def test_the_first_policy_is_explained_and_drafted(settings: Any) -> None:
    team = make_team("ana", "ben", "cleo")
    client = sign_in(team[0].user)
    assert "No policy is in force yet" in text_of(client, reverse("approvals:policy"))
    form = text_of(client, reverse("approvals:draft_policy"))
    filled: dict[str, Any] = dict(re.findall(r'name="(threshold-[^"]+)"[^>]*value="(\d+)"', form))
    filled |= {
        "key": re.findall(r'name="key" value="(\d+)"', form),
        "reason": "begin",
        f"groups-{team[1].user.pk}": "owners, ops",
    }
    sent = client.post(reverse("approvals:draft_policy"), filled)
    assert sent.status_code == 303, sent.content.decode()
    operation = Operation.objects.get()
    assert sent["Location"] == page_of(operation)
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    shown = text_of(client, reverse("approvals:policy"))
    found = services.active_policy()
    assert found is not None
    assert f"./muster trust {policy_words(found[0].sha256)} --data DIR" in shown
    assert found[0].sha256 in shown
    assert "ops, owners" in shown
    assert team[2].key.thumbprint in shown


def test_an_operation_that_is_newer_than_the_policy_is_refused_until_the_next_version_names_it() -> None:
    older = {name: needs for name, needs in DEFAULT_CLASSES.items() if name != "admin-token-mint"}
    team = make_governed(classes=older)
    with pytest.raises(InvalidProposal, match="names nobody for admin-token-mint: approve a policy that does") as caught:
        propose_token(team[0])
    assert caught.value.param == "operation"
    with pytest.raises(InvalidProposal, match="names nobody for admin-token-mint"):
        propose_token(team[0], op_class="model-load")
    client = sign_in(team[0].user)
    form = text_of(client, reverse("approvals:draft_policy"))
    filled: dict[str, Any] = dict(re.findall(r'name="(threshold-[^"]+)"[^>]*value="(\d+)"', form))
    assert filled["threshold-admin-token-mint"] == "2"
    filled |= {"key": re.findall(r'name="key" value="(\d+)" checked', form), "reason": "name it"}
    client.post(reverse("approvals:draft_policy"), filled)
    draft = Operation.objects.get(reason="name it")
    assert "admin-token-mint" in text_of(client, page_of(draft))
    for member in team.members[1:]:
        member.approve(draft)
    services.run_due()
    assert propose_token(team[0]).op_class == "admin-token-mint"


def test_a_freeze_is_on_every_page(team: Team, operation: Operation) -> None:
    client = sign_in(team[1].user)
    client.post(reverse("approvals:freeze"), {"reason": "strange loads"})
    for name in ("inbox", "history", "propose", "policy"):
        said = text_of(client, reverse(f"approvals:{name}"))
        assert "All operations are frozen" in said
        assert "strange loads" in said
    again = client.post(reverse("approvals:freeze"), {"reason": "again"})
    assert again.status_code == 409
    assert "frozen already" in again.content.decode()
    outsider = sign_in(User.objects.create_user("otto"))
    assert "Only approvers" in outsider.post(reverse("approvals:freeze"), {"reason": "x"}).content.decode()


def test_text_of_people_never_becomes_markup(team: Team) -> None:
    hostile = "<img src=x onerror=alert(1)>\"'"
    operation = propose_token(team[0], params={"name": hostile}, reason=hostile)
    services.reject(op_id=operation.pk, user=team[1].user, comment=hostile)
    for path in (page_of(operation), reverse("approvals:inbox"), reverse("approvals:history")):
        assert "<img" not in sign_in(team[2].user).get(path).content.decode()


@pytest.mark.parametrize("name", ["inbox", "history"])
def test_a_list_takes_as_many_queries_for_many_as_for_one(team: Team, name: str) -> None:
    client, path = sign_in(team[1].user), reverse(f"approvals:{name}")

    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert client.get(path).status_code == 200
        return len(queries)

    team[1].approve(propose_token(team[0]))
    few = count()
    for number in range(6):
        team[2].approve(propose_token(team[0], params={"name": f"t{number}"}))
    assert count() <= few <= 14


def test_a_standing_approval_is_used_from_its_page(team: Team, operation: Operation) -> None:
    client = sign_in(team[0].user)
    Operation.objects.filter(pk=operation.pk).update(state=ApprovalState.APPROVED.value)
    assert "no standing approval" in client.post(page_of(operation, "use"), follow=True).content.decode()
    Operation.objects.filter(pk=operation.pk).update(max_uses=2)
    assert "use" in offers_of(client, operation)
    assert "carried out once more" in client.post(page_of(operation, "use"), follow=True).content.decode()
    assert operation.runs.get().use == 1
