"""Governance over REST: operations, the policy, the freeze and the log; who may, and what is refused in which words."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from html import unescape
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.db import connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from pytest_django.fixtures import Settings

from core.models import User
from core.roles import Role
from governance import checkpoints
from governance.admin_tokens import revoke_admin_token, verify_admin_token
from governance.errors import InvalidProposal
from governance.members import change_roles
from governance.models import AdminToken, AuditEvent, Operation, PolicyVersion
from governance.operations import decisions
from governance.operations.runs import run_due
from governance.rest.stream import StatusStream
from governance.states import ApprovalState
from tests.fakes.audit_logs import append
from tests.fakes.governed_team import (
    Identity,
    Team,
    make_box,
    make_client,
    make_governed,
    make_team,
    open_session,
    post,
    propose_load,
    propose_token,
    refusal,
)
from tests.fakes.limits import set_limits
from wire import auditlog
from wire.credentials import CredentialKind, mint_credential
from wire.ids import format_id, new_uuid7
from wire.optoken.approval import STATEMENT_DOMAIN, decode_bytes, digest_words, policy_words, verify_bundle, verify_chain
from wire.optoken.documents import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db
LIST = "/api/v1/operations"
POLICY, CHAIN, DRAFTS, FREEZE = "/api/v1/policy", "/api/v1/policy/chain", "/api/v1/policy/drafts", "/api/v1/freeze"
CHECKPOINT, CONSISTENCY = "/api/v1/audit/checkpoint", "/api/v1/audit/consistency"
MINT = {"operation": "admin-token-mint", "params": {"name": "ci"}, "reason": "for the build"}


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo")


@pytest.fixture
def clients(team: Team) -> list[Client]:
    """Ana, ben and cleo with a token each, last a token of nobody; the policy of the three is in force."""
    return [make_client(member) for member in team.members] + [make_client(None, name="robot")]


def test_an_operation_is_asked_for_approved_carried_out_and_its_token_claimed(team: Team, clients: list[Client]) -> None:
    asked = post(clients[0], LIST, MINT)
    assert asked.status_code == 201
    shown = asked.json()
    path = f"{LIST}/{shown['op_id']}"
    assert asked["Location"] == path
    assert (shown["state"], shown["requested_by"], shown["actions"]) == ("pending", "ana", ["cancel"])
    operation = Operation.objects.get(operation="admin-token-mint")
    assert "belongs to one" in refusal(post(clients[3], f"{path}/claim"), 403)["message"]
    assert "Only the person who asked" in refusal(post(clients[1], f"{path}/claim"), 403)["message"]
    assert "not been approved" in refusal(post(clients[0], f"{path}/claim"), 409)["message"]
    for client, member, state in zip(clients[1:3], team.members[1:], ("pending", "approved"), strict=True):
        answer = post(client, f"{path}/approvals", {"proof": member.proof(operation), "comment": "words compared"})
        assert (answer.status_code, answer.json()["state"]) == (200, state), answer.content
    run_due()
    ended = clients[0].get(path).json()
    assert [run["state"] for run in ended["runs"]] == ["succeeded"]
    said = [(one["person"], one["comment"]) for one in ended["decisions"]]
    assert said == [("ben", "words compared"), ("cleo", "words compared")]
    _, statement, verdict = verify_bundle(clients[1].get(f"{path}/evidence").json())
    assert (statement.op_id, verdict.is_met) == (operation.printed_id, True)
    claimed = post(clients[0], f"{path}/claim")
    assert (claimed.status_code, claimed["Cache-Control"]) == (200, "no-store")
    secret = claimed.json()["secret"]
    token = verify_admin_token(secret)
    assert token is not None
    assert (token.pk, token.owner) == (claimed.json()["token_id"], team[0].user)
    assert "claimed already" in refusal(post(clients[0], f"{path}/claim"), 409)["message"]
    for shown_again in (LIST, *(f"{path}{part}" for part in ("", "/statement", "/evidence", "/receipts"))):
        body = clients[0].get(shown_again).content.decode()
        assert secret not in body
        assert secret.rpartition("_")[2][:32] not in body


def test_the_statement_is_served_as_it_is_signed(team: Team, clients: list[Client]) -> None:
    operation = propose_token(team[0])
    answer = clients[1].get(f"{LIST}/{operation.printed_id}/statement", headers={"accept": "application/octet-stream"})
    digest = hashlib.sha256(STATEMENT_DOMAIN + answer.content).digest()
    assert answer.content == bytes(operation.statement)
    assert answer["Content-Type"] == "application/octet-stream"
    assert (answer["X-Statement-Digest"], answer["X-Statement-Words"]) == (digest.hex(), digest_words(digest))
    shown = clients[1].get(f"{LIST}/{operation.pk}").json()
    assert decode_bytes(shown["statement_b64"]) == answer.content
    assert shown["statement"]["opId"] == operation.printed_id
    assert shown["assertion"]["allowCredentials"][0]["id"] == team[1].passkey.keyid


def test_a_rule_of_approval_that_refuses_is_named_by_its_code(team: Team, clients: list[Client]) -> None:
    operation = propose_token(team[0])
    path = f"{LIST}/{operation.pk}/approvals"
    other = propose_token(team[0], params={"name": "other"})
    cases = [
        (clients[0], team[0].proof(operation), "requester_approves"),
        (clients[1], team[1].proof(other), "wrong_challenge"),
        (clients[1], {**team[1].proof(operation), "signature": "AAAA"}, "bad_proof_signature"),
        (clients[1], {**team[1].proof(operation), "signature": "not base64url!"}, "bad_proof"),
        (clients[1], {**team[1].proof(operation), "approver": "nobody"}, "unknown_key"),
    ]
    for client, proof, rule in cases:
        assert refusal(post(client, path, {"proof": proof}), 403)["rule"] == rule
    assert post(clients[1], path, {"proof": team[1].proof(operation)}).status_code == 200
    assert refusal(post(clients[1], path, {"proof": team[1].proof(operation)}), 403)["rule"] == "duplicate_proof"


def test_an_operation_is_rejected_withdrawn_and_cancelled_by_those_who_may(team: Team, clients: list[Client]) -> None:
    path = f"{LIST}/{propose_token(team[0]).printed_id}"
    assert refusal(post(clients[1], f"{path}/rejections", {}), 400)["param"] == "comment"
    assert "belongs to one" in refusal(post(clients[3], f"{path}/rejections", {"comment": "no"}), 403)["message"]
    assert refusal(post(clients[0], f"{path}/rejections", {"comment": "no"}), 403)["code"] == "NOT_PERMITTED"
    answer = post(clients[1], f"{path}/rejections", {"comment": "not today"})
    assert (answer.status_code, answer.json()["state"]) == (200, "rejected")
    assert "not today" in clients[0].get(path).json()["state_reason"]
    assert refusal(post(clients[2], f"{path}/rejections", {"comment": "no"}), 409)["code"] == "STATE_CHANGED"
    operation = propose_token(team[0])
    path = f"{LIST}/{operation.printed_id}"
    team[1].approve(operation)
    assert "nothing to take back" in refusal(clients[2].delete(f"{path}/approvals"), 403)["message"]
    assert refusal(clients[3].delete(f"{path}/approvals"), 403)["code"] == "NOT_PERMITTED"
    answer = clients[1].delete(f"{path}/approvals")
    assert (answer.status_code, answer.json()["approvals"]) == (200, 0)
    assert answer.json()["decisions"][0]["withdrawn_at"] is not None
    assert "Only ana can cancel" in refusal(post(clients[1], f"{path}/cancel"), 403)["message"]
    assert refusal(post(clients[0], f"{path}/cancel", {"force": True}), 400)["param"] == "force"
    assert post(clients[0], f"{path}/cancel").json()["state"] == "cancelled"
    assert refusal(post(clients[0], f"{path}/cancel"), 409)["code"] == "STATE_CHANGED"


def test_a_token_of_nobody_asks_under_its_own_name(clients: list[Client]) -> None:
    name = f"token:robot#{AdminToken.objects.get(name='robot').keyid}"
    shown = post(clients[3], LIST, MINT).json()
    assert shown["requested_by"] == name
    assert AuditEvent.objects.get(action="operation.propose", op_id=shown["op_id"]).actor == name
    minted = mint_credential(CredentialKind.ADMIN)
    AdminToken.objects.create(name="robot", keyid=minted.keyid, digest=minted.digest)
    of_same_name = Client(headers={"authorization": f"Bearer {minted.text}"})
    assert post(of_same_name, f"{LIST}/{shown['op_id']}/cancel").status_code == 403
    assert post(clients[3], f"{LIST}/{shown['op_id']}/cancel").status_code == 200


def test_the_same_key_asks_once_and_one_that_is_none_is_refused(clients: list[Client]) -> None:
    first = post(clients[0], LIST, MINT, **{"idempotency-key": "build-7"})
    again = post(clients[0], LIST, MINT, **{"idempotency-key": "build-7"})
    assert first.json()["op_id"] == again.json()["op_id"]
    changed = post(clients[0], LIST, {**MINT, "params": {"name": "other"}}, **{"idempotency-key": "build-7"})
    assert refusal(changed, 409)["param"] == "idempotency_key"
    others = post(clients[1], LIST, MINT, **{"idempotency-key": "build-7"})
    assert others.json()["op_id"] != first.json()["op_id"]
    assert AuditEvent.objects.filter(action="operation.propose", op_id=first.json()["op_id"]).count() == 1
    for key in ("", "k" * 121, "k\u00e9"):
        assert refusal(post(clients[2], LIST, MINT, **{"idempotency-key": key}), 400)["param"] == "Idempotency-Key"


UNUSABLE: list[tuple[dict[str, object], str]] = [
    ({"operation": "reboot"}, "operation"), ({"operation": 7}, "operation"), ({"operation": "policy-change"}, "operation"),
    ({"targets": "control-plane"}, "targets"), ({"targets": ["elsewhere"]}, "targets"),
    ({"targets": ["control-plane"] * 65}, "targets"), ({"params": ["name"]}, "params"), ({"params": {}}, "name"),
    ({"params": {"name": 7}}, "name"), ({"params": {"name": "ci", "scope": "all"}}, "params"),
    ({"params": {"name": "in\u202eside"}}, "params"), ({"reason": ""}, "reason"), ({"reason": "x" * 1001}, "reason"),
    ({"op_class": "standing"}, "op_class"), ({"max_uses": 0}, "max_uses"), ({"max_uses": "1"}, "max_uses"),
    ({"max_uses": 2}, "params"), ({"stops_on_failure": "yes"}, "stops_on_failure"), ({"not_before": "tomorrow"}, "not_before"),
    ({"not_before": 1800000000}, "not_before"), ({"not_after": "9999-12-31T23:59:59Z"}, "not_after"),
    ({"not_after": "2021-01-01T00:00:00Z"}, "not_after"), ({"reviews": "op_7"}, "reviews"), ({"maxUses": 2}, "maxUses"),
]  # fmt: skip
"""What is changed in a good request, and the field that is then named."""


def test_a_request_that_cannot_be_used_names_the_field(clients: list[Client]) -> None:
    for changes, param in UNUSABLE:
        error = refusal(post(clients[0], LIST, {**MINT, **changes}), 400)
        assert (error["code"], error["param"]) == ("BAD_REQUEST", param), (changes, error)
    assert Operation.objects.count() == 1, "the policy change alone"


TWO_READINGS: list[tuple[str | bytes, str | None, str]] = [
    ('{"operation": "a", "operation": "b"}', None, "'operation' stands twice"),
    ('{"params": {"name": "a", "name": "b"}}', None, "'name' stands twice"),
    ('{"params": {"size": 1.5}}', "params.size", "1.5 cannot be signed"),
    ('{"params": {"size": 1.0}}', "params.size", "1.0 cannot be signed"),
    ('{"params": {"size": [1e3]}}', "params.size", "1e3 cannot be signed"),
    ('{"params": {"size": NaN}}', "params.size", "NaN cannot be signed"),
    ('{"params": {"size": 9007199254740993}}', "params.size", "whole numbers go to"),
    ('{"params": {"name": "\\u0000"}}', "params.name", "NUL"), ('{"params": {"name": "\\ud800"}}', "params.name", "surrogate"),
    ('{"max_uses": ' + "9" * 5000 + "}", None, "not JSON that can be used"),
    ('{"params": ' + "[" * 3000 + "]" * 3000 + "}", None, "not JSON that can be used"),
    ('{"params": ' + "[" * 1200 + "]" * 1200 + "}", None, "not JSON that can be used"),
    ("{", None, "not JSON that can be used"), ("[]", None, "Expected a dictionary"), ("7", None, "Expected a dictionary"),
    (b"\xff", None, "not UTF-8"),
]  # fmt: skip


def test_json_that_can_be_read_in_two_ways_is_refused_and_so_is_what_is_too_large_or_of_another_type() -> None:
    client = make_client(None)
    for body, param, words in TWO_READINGS:
        error = refusal(client.post(LIST, body, content_type="application/json"), 400)
        assert error["param"] == param, body[:60]
        assert words in error["message"]
    large = '{"reason": "' + "x" * 1024 * 1024 + '"}'
    assert refusal(client.post(LIST, large, content_type="application/json"), 413)["code"] == "BODY_TOO_LARGE"
    assert refusal(client.post(LIST, {"operation": "a"}), 415)["code"] == "BAD_REQUEST"


def test_an_operation_that_does_not_exist_is_not_found_nor_changed(team: Team, clients: list[Client]) -> None:
    for op_id in ("7", "op_7", "op_" + "0" * 31, "node_" + "0" * 32, "%00", "..%2F"):
        for part in ("", "/statement", "/evidence", "/receipts"):
            assert refusal(clients[0].get(f"{LIST}/{op_id}{part}"), 404)["code"] == "NOT_FOUND"
    bodies = {"approvals": {"proof": team[1].proof(propose_token(team[0]))}, "rejections": {"comment": "no"}}
    for part in ("approvals", "rejections", "cancel", "uses", "claim"):
        for op_id in ("7", format_id("op", new_uuid7())):
            assert refusal(post(clients[1], f"{LIST}/{op_id}/{part}", bodies.get(part)), 404)["code"] == "NOT_FOUND"


def test_pages_of_the_list_show_every_operation_once(team: Team, clients: list[Client]) -> None:
    made = [propose_token(team[index % 2], params={"name": f"t{index}"}).printed_id for index in range(5)]
    query, seen = "?limit=2&operation=admin-token-mint", []
    while query:
        page = clients[2].get(LIST + query).json()
        seen.append([one["op_id"] for one in page["operations"]])
        propose_token(team[2], params={"name": f"late{len(seen)}"})
        query = page["next_cursor"] and f"?limit=2&operation=admin-token-mint&cursor={page['next_cursor']}"
    assert [len(page) for page in seen] == [2, 2, 1]
    assert [op_id for page in seen for op_id in page] == made[::-1]


MEANINGLESS = [
    ("limit=0", "limit"), ("limit=201", "limit"), ("limit=ten", "limit"), ("state=done", "state"), ("cursor=7", "cursor"),
    ("cursor=" + "_" * 32, "cursor"), ("requested_by=%00", "requested_by"), ("operation=" + "x" * 41, "operation"),
]  # fmt: skip
NO_SIZES = ("", "old=1", "old=2&new=1", "old=-1&new=1", "old=0&new=99999999999999999999", "old=x&new=1", "old=1&new=999")


def test_a_question_that_means_nothing_is_named() -> None:
    client = make_client(None)
    for query, param in MEANINGLESS:
        assert refusal(client.get(f"{LIST}?{query}"), 400)["param"] == param, query
    for after in ("-1", "one", "99999999999"):
        assert refusal(client.get(f"{CHAIN}?after={after}"), 400)["param"] == "after"
    for query in NO_SIZES:
        assert refusal(client.get(f"{CONSISTENCY}?{query}"), 400)["code"] == "BAD_REQUEST"
    assert "no checkpoint yet" in refusal(client.get(CHECKPOINT), 404)["message"]


def test_the_list_costs_the_same_however_long_it_is(team: Team, clients: list[Client]) -> None:
    propose_token(team[0])
    clients[0].get(LIST)
    with CaptureQueriesContext(connection) as few:
        clients[0].get(LIST)
    for index in range(12):
        team[1].approve(propose_token(team[0], params={"name": f"t{index}"}))
    with CaptureQueriesContext(connection) as many:
        clients[0].get(LIST)
    assert len(many) == len(few) <= 6, [query["sql"][:90] for query in many]


def test_only_an_admin_token_opens_any_of_it(team: Team, clients: list[Client]) -> None:
    operation = propose_token(team[0])
    signed_in = Client()
    signed_in.force_login(team[0].user)
    for client in (Client(), signed_in, Client(headers={"authorization": "Bearer msa_wrong"})):
        for part in ("", "/statement", "/evidence", "/receipts", "/events"):
            answer = client.get(f"{LIST}/{operation.pk}{part}")
            assert refusal(answer, 401)["code"] == "INVALID_ADMIN_TOKEN"
            assert answer["WWW-Authenticate"].startswith("Bearer")
        for path in (POLICY, CHAIN, FREEZE, CHECKPOINT, f"{CONSISTENCY}?old=0&new=0"):
            assert refusal(client.get(path), 401)["code"] == "INVALID_ADMIN_TOKEN"
        for path in (LIST, DRAFTS, FREEZE, f"{LIST}/{operation.pk}/cancel"):
            assert refusal(post(client, path, MINT), 401)["code"] == "INVALID_ADMIN_TOKEN"
    operation.refresh_from_db()
    assert operation.state == "pending"


def draft(team: Team, **changes: object) -> dict[str, object]:
    people = [{"username": one.username, "groups": ["staff"], "key_ids": list(one.key_ids)} for one in team.choices()]
    return {"approvers": people, "reason": "the first policy", **changes}


def test_a_policy_is_drafted_signed_and_then_read_with_its_chain() -> None:
    team = make_team()
    client = make_client(team[0])
    assert "Draft the first one" in refusal(client.get(POLICY), 404)["message"]
    assert client.get(CHAIN).json() == {"policies": []}
    drafted = post(client, DRAFTS, draft(team, thresholds={"model-load": 2}))
    assert drafted.status_code == 201, drafted.content
    assert (drafted.json()["operation"], drafted.json()["state"]) == ("policy-change", "pending")
    operation = PolicyVersion.objects.get().adopted_by
    for member in team.members[1:]:
        member.approve(operation)
    run_due()
    shown = client.get(POLICY).json()
    document = decode_bytes(shown["document_b64"])
    assert shown["version"] == 1
    assert shown["sha256"] == hashlib.sha256(document).hexdigest()
    assert shown["words"] == policy_words(shown["sha256"])
    assert shown["document"] == json.loads(document)
    assert shown["document"]["approvers"][0]["groups"] == ["staff"]
    (policy,) = verify_chain(client.get(CHAIN).json()["policies"], current=None)
    assert policy.ref.sha256 == shown["sha256"]
    assert client.get(f"{CHAIN}?after=1").json() == {"policies": []}


UNUSABLE_DRAFTS: list[tuple[dict[str, object], str]] = [
    ({"approvers": []}, "approvers"), ({"approvers": "ana"}, "approvers"), ({"reason": " "}, "reason"),
    ({"approvers": [{"username": "ana", "key_ids": [999]}]}, "approvers"),
    ({"approvers": [{"username": "nobody", "key_ids": [1]}]}, "approvers"),
    ({"approvers": [{"username": "ana", "key_ids": []}]}, "approvers.0.key_ids"),
    ({"approvers": [{"username": "ana", "key_ids": ["1"]}]}, "approvers.0.key_ids.0"),
    ({"approvers": [{"username": "ana"}]}, "approvers.0.key_ids"), ({"thresholds": {"model-load": 3}}, "approvers"),
    ({"thresholds": {"model-load": 0}}, "thresholds.model-load"), ({"thresholds": {"tea": 2}}, "thresholds"),
    ({"classes": {"model-load": 7}}, "classes.model-load"), ({"classes": {"model-load": {"tea": True}}}, "approvers"),
    ({"is_solo": "no"}, "is_solo"), ({"expires_at": "9999-12-31T00:00:00Z"}, "expires_at"),
]  # fmt: skip
"""What is changed in a good draft, and the field that is then named."""


def test_a_draft_that_cannot_become_a_policy_names_the_field() -> None:
    team = make_team()
    client = make_client(team[0])
    for changes, param in UNUSABLE_DRAFTS:
        error = refusal(post(client, DRAFTS, draft(team, **changes)), 400)
        assert (error["code"], error["param"]) == ("BAD_REQUEST", param), (changes, error)
    assert not PolicyVersion.objects.exists()


def test_one_approver_freezes_and_a_quorum_lifts_it() -> None:
    team = make_team()
    clients = [make_client(team[0]), make_client(None)]
    nothing = {"is_frozen": False, "frozen_by": None, "frozen_at": None, "reason": None}
    for path, body in ((FREEZE, {"reason": "a key was seen"}), (LIST, MINT)):
        assert refusal(post(clients[0], path, body), 409)["code"] == "NO_POLICY"
    team.start()
    assert clients[0].get(FREEZE).json() == nothing
    assert "belongs to one" in refusal(post(clients[1], FREEZE, {"reason": "a key was seen"}), 403)["message"]
    assert refusal(post(clients[0], FREEZE), 400)["param"] == "reason"
    frozen = post(clients[0], FREEZE, {"reason": "a key was seen"})
    assert frozen.status_code == 200
    assert (frozen.json()["is_frozen"], frozen.json()["frozen_by"]) == (True, "ana")
    assert clients[1].get(FREEZE).json() == frozen.json()
    assert refusal(post(clients[0], FREEZE, {"reason": "again"}), 409)["code"] == "FROZEN"
    asked = post(clients[0], "/api/v1/operations", {"operation": "unfreeze", "reason": "the key was an old one"})
    assert (asked.status_code, asked.json()["is_frozen"]) == (201, True)


def test_a_witness_can_follow_the_log(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = base64.urlsafe_b64encode(b"\x07" * 32).decode().rstrip("=")
    client = make_client(None)
    append(1)
    old = checkpoints.make_checkpoint(now=timezone.now())
    append(5)
    new = checkpoints.make_checkpoint(now=timezone.now())
    assert old is not None
    assert new is not None
    answer = client.get(CHECKPOINT)
    assert answer["Content-Type"].startswith("text/plain")
    signed = auditlog.open_note(answer.content.decode(), checkpoints.log_keys(), checkpoints.check_signature)
    assert signed.size == new.size > old.size
    shown = client.get(f"{CONSISTENCY}?old={old.size}&new={new.size}").json()
    assert (shown["old"], shown["new"]) == (old.size, new.size)
    assert auditlog.verify_consistency(
        old=old.size, size=new.size, old_root=bytes(old.root), new_root=bytes(new.root),
        proof=[auditlog.to_bytes(step) for step in shown["proof"]],
    )  # fmt: skip


@pytest.mark.django_db(transaction=True)
async def test_a_stream_fills_silence_and_ends_with_its_token(team: Team, clients: list[Client]) -> None:
    token, headers = (
        await AdminToken.objects.aget(owner=team[0].user),
        {"authorization": clients[0].defaults["HTTP_AUTHORIZATION"]},
    )
    operation = await database_sync_to_async(propose_token)(team[0])
    request = RequestFactory().get("/", headers=headers)
    set_limits(governance={"stream_poll_s": 0.05, "stream_pause_s": 0.01, "stream_heartbeat_s": 0.2})
    stream = StatusStream(request, operation.pk)
    async with asyncio.timeout(30.0):
        chunks = aiter(stream)
        assert (await anext(chunks)).startswith(b"event: status\ndata: {")
        assert await anext(chunks) == b": still here\n\n"
        await database_sync_to_async(revoke_admin_token)(token_id=token.pk, actor="user:ana")
        assert {chunk async for chunk in chunks} <= {b": still here\n\n"}


PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self' data:; "
PAGE_POLICY += "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"


def make_reader(name: str) -> User:
    return change_roles(person=User.objects.create_user(name), roles=[Role.APPROVER], actor="t")


def page_of(operation: Operation, name: str = "operation") -> str:
    return reverse(f"approvals:{name}", args=[operation.pk])


def text_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, response.content.decode()
    return unescape(response.content.decode())


@pytest.fixture
def operation(team: Team) -> Operation:
    return propose_token(team[0])


def test_pages_are_for_people_who_are_signed_in_and_run_no_foreign_script(team: Team, operation: Operation) -> None:
    client = open_session(team[1].user)
    client.post(reverse("approvals:freeze"), {"reason": "strange loads"})
    for name in ("inbox", "history", "propose", "policy", "draft_policy", "freeze"):
        path = reverse(f"approvals:{name}")
        assert Client().get(path).status_code == 302
        response = client.get(path)
        html = response.content.decode()
        assert (response.status_code, response["Content-Security-Policy"]) == (200, PAGE_POLICY), name
        assert "no-store" in response["Cache-Control"]
        assert not re.search(r"<script(?![^>]* src=)|\son\w+=| style=", html)
        assert "All operations are frozen" in html
        assert "strange loads" in html
    again = client.post(reverse("approvals:freeze"), {"reason": "again"})
    assert (again.status_code, "frozen already" in again.content.decode()) == (409, True)
    outsider = open_session(make_reader("otto"))
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


def test_each_person_is_offered_what_they_may_do(team: Team, operation: Operation) -> None:
    requester, approver = open_session(team[0].user), open_session(team[1].user)
    assert open_session(User.objects.create_user("eve")).get(page_of(operation)).status_code == 403
    others = [open_session(make_reader("otto")), open_session(team[1].user, by="password")]
    assert [offers_of(client, operation) for client in (requester, approver, *others)] == [
        {"cancel"}, {"approve", "reject"}, set(), set(),
    ]  # fmt: skip
    for body in ("", "[]", '{"proof": 1}', "{", "[" * 5000):
        answer = approver.post(page_of(operation, "approve"), body, content_type="application/json")
        assert (answer.status_code, answer.json()["error"]["rule"]) == (403, "bad_proof")
    proof = {"proof": team[1].proof(operation), "comment": "looks right"}
    answer = approver.post(page_of(operation, "approve"), proof, content_type="application/json")
    assert (answer.status_code, answer.json()) == (200, {"state": "pending"})
    assert offers_of(approver, operation) == {"withdraw"}
    assert "looks right" in text_of(approver, page_of(operation))
    for name, comment, offers in (
        ("withdraw", "", {"approve", "reject"}), ("reject", " ", {"approve", "reject"}), ("reject", "wrong node", set()),
    ):  # fmt: skip
        approver.post(page_of(operation, name), {"comment": comment})
        assert offers_of(approver, operation) == offers
    assert "rejected by ben: wrong node" in text_of(requester, page_of(operation))
    assert offers_of(requester, operation) == set()


def test_forged_posts_are_refused(team: Team, operation: Operation) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(team[0].user)
    for name in ("approve", "reject", "withdraw", "cancel", "use", "claim"):
        assert client.post(page_of(operation, name)).status_code == 403
        assert client.get(page_of(operation, name)).status_code == 405
    operation.refresh_from_db()
    assert operation.state == ApprovalState.PENDING


def fill_policy(client: Client, marked: str = "", **fields: Any) -> dict[str, Any]:
    """What the form of a policy would send as it opens, and ``fields``."""
    form = text_of(client, reverse("approvals:draft_policy"))
    filled: dict[str, Any] = dict(re.findall(r'name="(threshold-[^"]+)"[^>]*value="(\d+)"', form))
    return filled | {"key": re.findall(rf'name="key" value="(\d+)"{marked}', form), **fields}


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
    run_due()
    assert propose_token(team[0]).op_class == "admin-token-mint"


def test_text_of_people_never_becomes_markup(team: Team) -> None:
    hostile = "<img src=x onerror=alert(1)>\"'"
    operation = propose_token(team[0], params={"name": hostile}, reason=hostile)
    decisions.reject(op_id=operation.pk, user=team[1].user, comment=hostile)
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

    boxes = [make_box(Identity(f"n{number}")).runner_id for number in range(4)]
    team[1].approve(propose_token(team[0]))
    propose_load(team[0], boxes[0])
    few = count()
    for number in range(4):
        team[2].approve(propose_token(team[0], params={"name": f"t{number}"}))
        propose_load(team[0], *boxes[: number + 1])
    for before, after in zip(few, count(), strict=True):
        assert after <= before <= 24


def test_a_standing_approval_is_used_from_its_page(team: Team, operation: Operation) -> None:
    client = open_session(team[0].user)
    Operation.objects.filter(pk=operation.pk).update(state=ApprovalState.APPROVED.value)
    assert "no standing approval" in client.post(page_of(operation, "use"), follow=True).content.decode()
    Operation.objects.filter(pk=operation.pk).update(max_uses=2)
    assert "use" in offers_of(client, operation)
    assert "carried out once more" in client.post(page_of(operation, "use"), follow=True).content.decode()
    assert operation.runs.get().use == 1
