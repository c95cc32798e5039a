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
from governance.states import ApprovalState
from governance.views.operation_parts import describe_proof
from tests.fakes.governed_team import Team, make_governed, make_team, open_session, propose_token
from wire.optoken.approval import digest_words, policy_words
from wire.optoken.proposal import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
POLICY += "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"


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


def test_pages_are_for_people_who_are_signed_in_and_run_no_foreign_script(team: Team, operation: Operation) -> None:
    """A freeze is on every one of them."""
    client = open_session(team[1].user)
    client.post(reverse("approvals:freeze"), {"reason": "strange loads"})
    for name in ("inbox", "history", "propose", "policy", "draft_policy", "freeze"):
        path = reverse(f"approvals:{name}")
        assert Client().get(path).status_code == 302
        response = client.get(path)
        html = response.content.decode()
        assert (response.status_code, response["Content-Security-Policy"]) == (200, POLICY), name
        assert "no-store" in response["Cache-Control"]
        assert not re.search(r"<script(?![^>]* src=)|\son\w+=| style=", html)
        assert "All operations are frozen" in html
        assert "strange loads" in html
    again = client.post(reverse("approvals:freeze"), {"reason": "again"})
    assert (again.status_code, "frozen already" in again.content.decode()) == (409, True)
    outsider = open_session(User.objects.create_user("otto"))
    assert "Only approvers" in outsider.post(reverse("approvals:freeze"), {"reason": "x"}).content.decode()
    for name in ("", "evidence", "live"):
        answer = client.get(f"/approvals/op_{'0' * 32}/{name}")
        assert (answer.status_code, "no operation" in answer.content.decode()) == (404, True)


def offers_of(client: Client, operation: Operation) -> set[str]:
    html = text_of(client, page_of(operation))
    forms = re.findall(r'<form[^>]* data-action="(\w+)"([^>]*)>', html)
    shown = {name for name, rest in forms if "hidden" not in rest}
    said = re.search(r'data-actions="([^"]*)"', html)
    assert said is not None
    assert set(said.group(1).split()) == shown
    return shown


def test_each_person_is_offered_what_they_may_do_and_is_told_what_they_did(team: Team, operation: Operation) -> None:
    outsider = User.objects.create_user("otto")
    requester, approver = open_session(team[0].user), open_session(team[1].user)
    for client, offers, said in (
        (requester, {"cancel"}, "You asked for this and cannot approve it"), (approver, {"approve", "reject"}, "0 of 2"),
        (open_session(outsider), set(), "does not name you as an approver"),
        (open_session(team[1].user, by="password"), set(), "This session is for looking"),
    ):  # fmt: skip
        assert offers_of(client, operation) == offers
        assert said in text_of(client, page_of(operation))

    def do(client: Client, name: str, **fields: str) -> str:
        return unescape(client.post(page_of(operation, name), fields, follow=True).content.decode())

    for body in ("", "[]", '{"proof": 1}', "{", "[" * 5000):
        answer = approver.post(page_of(operation, "approve"), body, content_type="application/json")
        assert (answer.status_code, answer.json()["error"]["rule"]) == (403, "bad_proof")
    proof = {"proof": team[1].proof(operation), "comment": "looks right"}
    answer = approver.post(page_of(operation, "approve"), proof, content_type="application/json")
    assert (answer.status_code, answer.json()) == (200, {"state": "pending"})
    assert offers_of(approver, operation) == {"withdraw"}
    html = text_of(approver, page_of(operation))
    assert not [each for each in ("1 of 2", "1 more person", "looks right", team[1].key.thumbprint[:16]) if each not in html]
    lines = {line.label: line.value for line in describe_proof(proof["proof"])}  # type: ignore[arg-type]
    assert (lines["Site (RP id)"], lines["The device says"]) == ("localhost", "user present, user verified")
    assert lines["Six words signed"] == digest_words(bytes.fromhex(operation.digest))
    said = do(approver, "withdraw")
    assert "Your decision is withdrawn." in said
    assert "Waiting for approval." in said
    assert "Say why you reject it" in do(approver, "reject", comment=" ")
    said = do(approver, "reject", comment="wrong box")
    assert "Your rejection is recorded." in said
    assert "rejected by ben: wrong box" in said
    assert "This operation is rejected already" in do(requester, "cancel")
    assert offers_of(approver, operation) == set()


def test_forged_posts_are_refused(team: Team, operation: Operation) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(team[0].user)
    for name in ("approve", "reject", "withdraw", "cancel", "use", "claim"):
        assert client.post(page_of(operation, name)).status_code == 403
        assert client.get(page_of(operation, name)).status_code == 405
    operation.refresh_from_db()
    assert operation.state == ApprovalState.PENDING


def test_an_approved_token_is_shown_once_to_its_requester(team: Team, operation: Operation) -> None:
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    client = open_session(team[0].user)
    assert offers_of(client, operation) == {"claim"}
    shown = client.post(page_of(operation, "claim"))
    found = re.search(r"msa_\w+", shown.content.decode())
    assert found is not None
    assert services.verify_admin_token(found.group()) is not None
    assert "no-store" in shown["Cache-Control"]
    assert found.group() not in client.post(page_of(operation, "claim"), follow=True).content.decode()


def test_proposing_looks_before_it_sends(team: Team) -> None:
    client, path = open_session(team[0].user), reverse("approvals:propose")
    form = text_of(client, f"{path}?operation=admin-token-mint&reason=for+the+build")
    assert "for the build" in form
    filled = {"operation": "admin-token-mint", "reason": "for the build", "max_uses": "1", "stops_on_failure": "on"}
    filled |= {"param-name": "ci"} if 'name="param-name"' in form else {"param-": '{"name": "ci"}'}
    before = Operation.objects.count()
    preview = client.post(path, {**filled, "step": "look"}).content.decode()
    assert "Nothing is sent yet" in preview
    assert "2 of 3, not counting the requester" in preview
    assert Operation.objects.count() == before
    again = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', preview))
    assert {name: unescape(value) for name, value in again.items() if name in filled} == filled
    sent = client.post(path, {**filled, "step": "send"})
    operation = Operation.objects.get(operation="admin-token-mint")
    assert sent["Location"] == page_of(operation)
    assert (operation.reason, operation.requested_by) == ("for the build", "ana")


def fill_policy(client: Client, marked: str = "", **fields: Any) -> dict[str, Any]:
    """What the form of a policy would send as it opens, and ``fields``."""
    form = text_of(client, reverse("approvals:draft_policy"))
    filled: dict[str, Any] = dict(re.findall(r'name="(threshold-[^"]+)"[^>]*value="(\d+)"', form))
    return filled | {"key": re.findall(rf'name="key" value="(\d+)"{marked}', form), **fields}


def test_the_first_policy_is_explained_and_drafted() -> None:
    team = make_team("ana", "ben", "cleo")
    client = open_session(team[0].user)
    assert "No policy is in force yet" in text_of(client, reverse("approvals:policy"))
    filled = fill_policy(client, reason="begin", **{f"groups-{team[1].user.pk}": "owners, ops"})
    sent = client.post(reverse("approvals:draft_policy"), filled)
    operation = Operation.objects.get()
    assert (sent.status_code, sent["Location"]) == (303, page_of(operation))
    team.sign(operation)
    services.run_due()
    shown, found = text_of(client, reverse("approvals:policy")), services.active_policy()
    assert found is not None
    trust = f"./muster trust {policy_words(found[0].sha256)} --data DIR"
    assert not [each for each in (trust, found[0].sha256, "ops, owners", team[2].key.thumbprint) if each not in shown]
    alone = client.post(reverse("approvals:draft_policy"), fill_policy(client, reason="x") | {"key": filled["key"][:1]})
    assert (alone.status_code, "name at least" in unescape(alone.content.decode())) == (400, True)


def test_an_operation_that_is_newer_than_the_policy_is_refused_until_the_next_version_names_it() -> None:
    older = {name: needs for name, needs in DEFAULT_CLASSES.items() if name != "admin-token-mint"}
    team = make_governed(classes=older)
    with pytest.raises(InvalidProposal, match="names nobody for admin-token-mint: approve a policy that does") as caught:
        propose_token(team[0])
    assert caught.value.param == "operation"
    with pytest.raises(InvalidProposal, match="names nobody for admin-token-mint"):
        propose_token(team[0], op_class="model-load")
    client = open_session(team[0].user)
    filled = fill_policy(client, " checked", reason="name it")
    assert (filled["threshold-admin-token-mint"], len(filled["key"])) == ("2", 3)
    client.post(reverse("approvals:draft_policy"), filled)
    draft = Operation.objects.get(reason="name it")
    assert "admin-token-mint" in text_of(client, page_of(draft))
    team.sign(draft)
    services.run_due()
    assert propose_token(team[0]).op_class == "admin-token-mint"


def test_text_of_people_never_becomes_markup(team: Team) -> None:
    hostile = "<img src=x onerror=alert(1)>\"'"
    operation = propose_token(team[0], params={"name": hostile}, reason=hostile)
    services.reject(op_id=operation.pk, user=team[1].user, comment=hostile)
    for path in (page_of(operation), reverse("approvals:inbox"), reverse("approvals:history")):
        assert "<img" not in open_session(team[2].user).get(path).content.decode()


def test_a_list_takes_as_many_queries_for_many_as_for_one(team: Team) -> None:
    client = open_session(team[1].user)

    def count() -> list[int]:
        counts = []
        for name in ("inbox", "history"):
            with CaptureQueriesContext(connection) as queries:
                assert client.get(reverse(f"approvals:{name}")).status_code == 200
            counts.append(len(queries))
        return counts

    team[1].approve(propose_token(team[0]))
    few = count()
    for number in range(4):
        team[2].approve(propose_token(team[0], params={"name": f"t{number}"}))
    for before, after in zip(few, count(), strict=True):
        assert after <= before <= 14


def test_a_standing_approval_is_used_from_its_page(team: Team, operation: Operation) -> None:
    client = open_session(team[0].user)
    Operation.objects.filter(pk=operation.pk).update(state=ApprovalState.APPROVED.value)
    assert "no standing approval" in client.post(page_of(operation, "use"), follow=True).content.decode()
    Operation.objects.filter(pk=operation.pk).update(max_uses=2)
    assert "use" in offers_of(client, operation)
    assert "carried out once more" in client.post(page_of(operation, "use"), follow=True).content.decode()
    assert operation.runs.get().use == 1
