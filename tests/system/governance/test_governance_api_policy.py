"""The policy, the freeze and the audit log over REST."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from django.test import Client
from django.utils import timezone
from pytest_django.fixtures import Settings

from governance import checkpoints, services
from governance.models import PolicyVersion
from tests.system.governance.governance_rest import make_client, post, refusal
from tests.system.governance.team import Team, make_team
from wire import auditlog
from wire.optoken.approval import decode_bytes, policy_words, verify_chain

pytestmark = pytest.mark.django_db
POLICY, CHAIN, DRAFTS, FREEZE = "/api/v1/policy", "/api/v1/policy/chain", "/api/v1/policy/drafts", "/api/v1/freeze"
CHECKPOINT, CONSISTENCY = "/api/v1/audit/checkpoint", "/api/v1/audit/consistency"


def draft(team: Team, **changes: object) -> dict[str, object]:
    """The body that drafts a policy of everybody."""
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
    services.run_due()
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


UNUSABLE: list[tuple[dict[str, object], str]] = [
    ({"approvers": []}, "approvers"),
    ({"approvers": "ana"}, "approvers"),
    ({"approvers": [{"username": "ana", "key_ids": [999]}]}, "approvers"),
    ({"approvers": [{"username": "nobody", "key_ids": [1]}]}, "approvers"),
    ({"approvers": [{"username": "ana", "key_ids": []}]}, "approvers.0.key_ids"),
    ({"approvers": [{"username": "ana", "key_ids": ["1"]}]}, "approvers.0.key_ids.0"),
    ({"approvers": [{"username": "ana"}]}, "approvers.0.key_ids"),
    ({"thresholds": {"model-load": 3}}, "approvers"),
    ({"thresholds": {"model-load": 0}}, "thresholds.model-load"),
    ({"thresholds": {"tea": 2}}, "thresholds"),
    ({"classes": {"model-load": 7}}, "classes.model-load"),
    ({"classes": {"model-load": {"tea": True}}}, "approvers"),
    ({"is_solo": "no"}, "is_solo"),
    ({"expires_at": "9999-12-31T00:00:00Z"}, "expires_at"),
    ({"reason": " "}, "reason"),
]
"""What is changed in a good draft, and the field that is then named."""


def test_a_draft_that_cannot_become_a_policy_names_the_field() -> None:
    team = make_team()
    client = make_client(team[0])
    for changes, param in UNUSABLE:
        error = refusal(post(client, DRAFTS, draft(team, **changes)), 400)
        assert (error["code"], error["param"]) == ("BAD_REQUEST", param), (changes, error)
    assert not PolicyVersion.objects.exists()


@pytest.mark.parametrize("after", ["-1", "one", "99999999999"])
def test_a_version_that_is_none_is_refused(after: str) -> None:
    assert refusal(make_client(None).get(f"{CHAIN}?after={after}"), 400)["param"] == "after"


def test_one_approver_freezes_and_a_quorum_lifts_it() -> None:
    team = make_team()
    clients = [make_client(team[0]), make_client(None)]
    nothing = {"is_frozen": False, "frozen_by": None, "frozen_at": None, "reason": None}
    assert refusal(post(clients[0], FREEZE, {"reason": "a key was seen"}), 409)["code"] == "NO_POLICY"
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


def test_the_newest_checkpoint_and_proofs_that_the_log_only_grew(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = base64.urlsafe_b64encode(b"\x07" * 32).decode().rstrip("=")
    client = make_client(None)
    assert "no checkpoint yet" in refusal(client.get(CHECKPOINT), 404)["message"]
    assert refusal(client.get(f"{CONSISTENCY}?old=1&new=999"), 400)["code"] == "BAD_REQUEST"


@pytest.mark.django_db(transaction=True)
def test_a_witness_can_follow_the_log(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = base64.urlsafe_b64encode(b"\x07" * 32).decode().rstrip("=")
    client = make_client(None)
    old = checkpoints.make_checkpoint(now=timezone.now())
    for index in range(5):
        make_client(None, name=f"t{index}")
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


@pytest.mark.parametrize("query", ["", "old=1", "old=2&new=1", "old=-1&new=1", "old=0&new=99999999999999999999", "old=x&new=1"])
def test_sizes_that_the_log_never_had_are_refused(query: str) -> None:
    assert refusal(make_client(None).get(f"{CONSISTENCY}?{query}"), 400)["code"] == "BAD_REQUEST"


def test_without_a_token_nothing_is_read() -> None:
    for path in (POLICY, CHAIN, FREEZE, CHECKPOINT, f"{CONSISTENCY}?old=0&new=0"):
        assert refusal(Client().get(path), 401)["code"] == "INVALID_ADMIN_TOKEN"
