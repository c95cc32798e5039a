"""The nodes REST API of the contract, request by request, through the URLs of the control plane."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries, DjangoDbBlocker, Settings

from core.throttle import AuthThrottle
from gateway.services.keys import create_api_key
from gateway.services.models import allow_model
from gateway.services.tenants import create_tenant
from governance.admin_tokens import create_admin_token
from nodes import api
from nodes.models import Node, NodePresence
from nodes.services.credentials import (
    delete_provider,
    disable_provider,
    enable_provider,
    read_credential_digests,
    revoke_credential,
)
from nodes.services.drains import cordon_node, drain_node
from tests.fakes.closed_port import closed_port
from tests.fakes.nodes import ACTOR, audited, find_tables, make_credential, make_node, make_presence, shared_rows
from wire.contract import NodeMode
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.django_db

MODEL, NAME = "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4", "joy-rtx6000-01"
REGISTRATION: dict[str, Any] = {
    "node_name": NAME, "owner_name": "JOY", "gpu_name": "RTX Pro 6000 Blackwell", "vram_total_mb": 98304,
    "current_model": MODEL, "agent_version": "0.1.0",
}  # fmt: skip
HEARTBEAT: dict[str, Any] = {
    "status": "available", "mode": "spare_on", "gpu_util_percent": 22.4, "vram_used_mb": 24576, "vram_free_mb": 73728,
    "spare_score": 78.2, "is_accepting_jobs": True, "active_request_count": 0, "last_local_error": None,
    "observed_at": "2026-03-13T08:15:30Z",
}  # fmt: skip
REGISTER, BEAT = "/nodes/register", "/nodes/heartbeat"
NOBODY = "node_" + "0" * 32
REACH = ["reachable", "unreachable_reason"]


@pytest.fixture(scope="module")
def token(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """A node credential, and a model that is allowed."""

    def make() -> str:
        allow_model(name=MODEL, actor=ACTOR)
        return make_credential(max_nodes=2)[1]

    with shared_rows(django_db_blocker, make) as made:
        yield made


@pytest.fixture(scope="module")
def node_id(token: str, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """A node that has registered with it, whose socket a gateway holds."""
    with shared_rows(django_db_blocker, lambda: enlist(token)) as made:
        yield made


def post(path: str, token: str | None, body: object, **extra: Any) -> tuple[int, Any]:
    """POST JSON and return status and JSON."""
    headers = {"authorization": f"Bearer {token}"} if token is not None else {}
    response = Client().post(path, data=body, content_type="application/json", headers=headers, **extra)
    return response.status_code, response.json()


def enlist(token: str, **changes: Any) -> str:
    """Register a node whose socket a gateway holds, and return its id."""
    status, answer = post(REGISTER, token, {**REGISTRATION, **changes})
    assert status == 200, answer
    NodePresence.objects.filter(node__reach="relay").update(connected=True)
    return str(answer["node_id"])


def beat(token: str, node_id: str, **changes: Any) -> dict[str, Any]:
    """Send a heartbeat that must be accepted and return the answer."""
    status, answer = post(BEAT, token, {**HEARTBEAT, "node_id": node_id, **changes})
    assert status == 200, answer
    return dict(answer)


def own_node() -> Node:
    return Node.objects.get(name=NAME)


def list_nodes() -> list[dict[str, Any]]:
    """Return what administrators see."""
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    response = Client().get("/nodes", headers={"authorization": f"Bearer {admin_token}"})
    assert response.status_code == 200, response.content
    return list(response.json()["nodes"])


def assert_error(answer: tuple[int, Any], status: int, code: str, param: str | None = None) -> str:
    """Hold an answer against the contract's envelope and return the message."""
    error = answer[1]["error"]
    assert set(error) == {"code", "message", "retryable", "type", "param"}
    assert (answer[0], error["code"], error["param"]) == (status, code, param), error
    return str(error["message"])


# Registration


def test_registration_answers_exactly_what_the_contract_says(token: str) -> None:
    status, answer = post(REGISTER, token, {**REGISTRATION, "node_name": "new"})
    node = Node.objects.get(name="new")
    assert list(answer) == ["node_id", "status", "accepted_model", "heartbeat_interval_sec", *REACH]
    assert (status, answer) == (200, {
        "node_id": node.printed_id, "status": "offline", "accepted_model": MODEL, "heartbeat_interval_sec": 5,
        "reachable": False, "unreachable_reason": "it holds no socket to a gateway and registered no public_base_url",
    })  # fmt: skip
    assert isinstance(answer["heartbeat_interval_sec"], int)
    assert (node.owner_name, node.gpu_name, node.vram_total_mb) == ("JOY", "RTX Pro 6000 Blackwell", 98304)
    assert (node.reach, node.max_concurrent, node.model_names) == ("relay", 1, [MODEL])
    *_, event = audited("node.register")
    assert (event.actor, event.target) == ("node:new", node.printed_id)


def test_registering_again_refreshes_the_same_box_and_keeps_what_operators_and_its_socket_decided(
    token: str, node_id: str
) -> None:
    node = own_node()
    cordon_node(node_id=node.pk, actor=ACTOR)
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans")
    Node.objects.update(model_names=["a", "b"])
    assert (enlist(token, public_base_url=""), audited("node.refresh")) == (node_id, []), "nothing changed"
    assert enlist(token, agent_version="0.2.0", owner_name="ROY", max_concurrent=3) == node_id
    node.refresh_from_db()
    assert (node.agent_version, node.owner_name, node.max_concurrent) == ("0.2.0", "ROY", 3)
    assert (node.cordoned, node.draining, node.drain_reason, node.model_names) == (True, True, "fans", ["a", "b"])
    assert audited("node.refresh")[0].detail["changed"] == ["agent_version", "max_concurrent", "owner_name"]


def test_one_credential_enrols_as_many_boxes_as_it_may_and_a_bound_one_its_own(token: str, node_id: str) -> None:
    assert enlist(token, node_name="second") != node_id
    message = assert_error(post(REGISTER, token, {**REGISTRATION, "node_name": "third"}), 400, "BAD_REQUEST", "node_name")
    assert "another credential" in message
    assert enlist(token) == node_id
    _, bound = make_credential("spare", node_id=own_node().pk)
    assert enlist(bound, node_name="anything") == node_id
    assert own_node().printed_id == node_id


def test_a_field_of_a_registration_that_cannot_be_used_is_named(token: str) -> None:
    assert_error(post(REGISTER, token, {**REGISTRATION, "current_model": "other"}), 400, "MODEL_NOT_ALLOWED", "current_model")
    for param, value in (
        ("node_name", None), ("node_name", ""), ("node_name", "x" * 121), ("node_name", "a\u0000b"), ("node_name", "\ud800"),
        ("node_name", ["a"]), ("current_model", ""), ("current_model", "x" * 201), ("vram_total_mb", -1),
        ("vram_total_mb", 2**31), ("vram_total_mb", "much"), ("max_concurrent", 0), ("max_concurrent", 1025),
        ("agent_version", "x" * 61), ("public_base_url", 17.5), ("public_base_url", "x" * 301),
    ):  # fmt: skip
        assert_error(post(REGISTER, token, {**REGISTRATION, "node_name": "new", param: value}), 400, "BAD_REQUEST", param)
    for key in ("two words", "line\nend", "é", "x" * 513, ["k"]):
        refused = post(REGISTER, token, {**REGISTRATION, "api_key": key})
        assert_error(refused, 400, "BAD_REQUEST", "api_key")
        assert str(key) not in str(refused), "a key is not repeated"
    for body in ("[]", "17", "{", '"x"', "", "null", '{"node_name": NaN}'):
        for path in (REGISTER, BEAT):
            status, answer = post(path, token, body)
            assert (status, answer["error"]["code"]) == (400, "BAD_REQUEST"), body
    assert not Node.objects.exclude(name=NAME).exists()


def test_a_url_needs_an_allow_listed_host_and_the_message_names_the_setting(token: str, settings: Settings) -> None:
    def ask(url: str) -> tuple[int, Any]:
        return post(REGISTER, token, {**REGISTRATION, "public_base_url": url})

    settings.NODE_DIRECT_HOSTS = []
    refused = ask("http://10.1.2.3:8000")
    assert "MUSTER_DIRECT_HOSTS" in assert_error(refused, 400, "BAD_REQUEST", "public_base_url")
    settings.NODE_DIRECT_HOSTS = ["10.0.0.0/8"]
    assert ask("http://10.1.2.3:8000")[0] == 200
    for url in (
        "http://169.254.169.254/",
        "http://user@10.1.2.3/",
        "ftp://10.1.2.3/",
        "http://0x0a010203/",
        "http://127.0.0.1/",
    ):
        assert_error(ask(url), 400, "BAD_REQUEST", "public_base_url")
    assert (own_node().reach, own_node().public_base_url) == ("direct", "http://10.1.2.3:8000")


def test_an_api_key_is_in_no_answer_no_row_and_no_log(token: str, settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    with closed_port() as port, caplog.at_level(logging.DEBUG):
        body = {**REGISTRATION, "public_base_url": f"http://127.0.0.1:{port}", "api_key": "a-key-of-the-node"}
        status, answer = post(REGISTER, token, body)
        assert status == 200
        said = f"{answer} {list_nodes()}"
    assert own_node().read_api_key() == "a-key-of-the-node"
    assert "a-key-of-the-node" not in said + caplog.text
    assert find_tables("a-key-of-the-node", b"a-key-of-the-node".hex()) == set()


# Credentials


def test_only_a_node_credential_opens_the_node_api_and_nothing_else(token: str) -> None:
    create_tenant(name="acme", actor=ACTOR)
    _, client_key = create_api_key(name="app", tenant_name="acme", actor=ACTOR)
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    revoked, revoked_text = make_credential("old")
    revoke_credential(credential_id=revoked.pk, actor=ACTOR)
    for wrong in (None, "", "wrong", client_key, admin_token, revoked_text, token[:-1]):
        for path in (REGISTER, BEAT, f"/nodes/{NOBODY}/mode"):
            # The credential comes first: nothing is said about a body that its sender may not send.
            assert_error(post(path, wrong, {}, REMOTE_ADDR=f"10.0.0.{len(path)}"), 401, "INVALID_NODE_TOKEN")
    response = Client().post(REGISTER, data={}, content_type="application/json", headers={"authorization": f"Basic {token}"})
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")
    assert Client().get("/nodes", headers={"authorization": f"Bearer {token}"}).status_code == 401
    assert Client().get("/nodes").status_code == 401


def test_wrong_credentials_from_one_address_are_slowed_down_and_cost_no_query_and_good_ones_go_on(
    token: str, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = AuthThrottle(failures=3, block_s=600.0, read_digests=read_credential_digests)
    monkeypatch.setattr(api, "throttle", slow)
    assert beat(token, node_id)["ok"] is True
    _, newcomer = make_credential("newcomer")
    *wrongs, last = (mint_credential(CredentialKind.WORKER).text for _ in range(9))
    for wrong in wrongs[:3]:
        assert_error(post(REGISTER, wrong, REGISTRATION), 401, "INVALID_NODE_TOKEN")
    with CaptureQueriesContext(connection) as queries:
        for wrong in wrongs[3:]:
            status, answer = post(REGISTER, wrong, REGISTRATION)
            assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (429, "RATE_LIMITED", True)
    assert len(queries) <= 2, "all that are good are read once a second"
    other = {**REGISTRATION, "node_name": "other"}
    assert post(REGISTER, newcomer, other)[0] == 200
    assert beat(token, node_id)["ok"] is True
    assert post(REGISTER, newcomer, other, REMOTE_ADDR="10.0.0.8")[0] == 200
    assert Client().post(REGISTER, headers={"authorization": f"Bearer {last}"})["Retry-After"] == "1"


def test_the_credential_of_another_box_is_invalid_for_this_one(token: str, node_id: str) -> None:
    _, foreign = make_credential("other")
    enlist(foreign, node_name="other")
    assert_error(post(BEAT, foreign, {**HEARTBEAT, "node_id": node_id}), 401, "INVALID_NODE_TOKEN")
    assert_error(post(f"/nodes/{node_id}/mode", foreign, {"mode": "spare_off"}), 401, "INVALID_NODE_TOKEN")
    assert own_node().mode == "spare_on"


def test_a_box_of_a_disabled_provider_cannot_register_and_should_drain(token: str, node_id: str) -> None:
    assert beat(token, node_id)["should_drain"] is False
    disable_provider(name="local", actor=ACTOR)
    status, answer = post(REGISTER, token, REGISTRATION)
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (403, "BAD_REQUEST", True)
    assert beat(token, node_id)["should_drain"] is True
    enable_provider(name="local", actor=ACTOR)
    assert post(REGISTER, token, REGISTRATION)[0] == 200
    delete_provider(name="local", actor=ACTOR)
    assert_error(post(REGISTER, token, REGISTRATION), 401, "INVALID_NODE_TOKEN")


# Heartbeats


def test_a_heartbeat_answers_exactly_what_the_contract_says_and_costs_few_queries(
    token: str, node_id: str, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    before = timezone.now()
    answer = beat(token, node_id)
    assert list(answer) == ["ok", "server_time", "effective_status", "should_drain", *REACH]
    assert (answer["ok"], answer["effective_status"], answer["should_drain"]) == (True, "available", False)
    assert answer["server_time"].endswith("Z")
    assert before <= datetime.fromisoformat(answer["server_time"]) <= timezone.now()
    presence = NodePresence.objects.get()
    said = (presence.gpu_util_percent, presence.vram_used_mb, presence.vram_free_mb, presence.spare_score)
    assert said == (22.4, 24576, 73728, 78.2)
    assert presence.last_heartbeat_at is not None
    assert presence.last_heartbeat_at >= before, "the server's clock, not the node's"
    with django_assert_max_num_queries(8):
        beat(token, node_id)
    assert len(audited("node.online")) == 1
    assert beat(token, node_id, status="offline", is_accepting_jobs=False)["effective_status"] == "offline"
    assert len(audited("node.offline")) == 1


def test_a_heartbeat_may_reclaim_the_box_and_never_lends_it_again(token: str, node_id: str) -> None:
    answer = beat(token, node_id, mode="spare_off")
    assert (answer["effective_status"], answer["should_drain"]) == ("draining", True)
    assert [event.actor for event in audited("node.set_mode")] == [f"node:{NAME}"]
    # This one was written before the reclaim and overtaken by it.
    assert beat(token, node_id, mode="spare_on")["should_drain"] is True
    assert own_node().mode == "spare_off"


def test_a_heartbeat_is_judged_by_what_is_given_and_a_field_that_cannot_be_used_is_named(token: str, node_id: str) -> None:
    for changes in ({"observed_at": at} for at in ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", None)):
        assert beat(token, node_id, **changes)["effective_status"] == "available", "a node's clock may say anything"
    assert post(BEAT, token, {"node_id": node_id, "status": "draining"})[1]["effective_status"] == "draining"
    beat(token, node_id, last_local_error="x" * 5000)
    assert NodePresence.objects.get().last_error == "x" * 500
    for param, value in (
        ("status", "sleeping"), ("status", None), ("mode", "spare"), ("gpu_util_percent", 101), ("vram_used_mb", -1),
        ("vram_free_mb", 2**31), ("spare_score", "high"), ("spare_score", 1e300), ("is_accepting_jobs", "perhaps"),
        ("active_request_count", -1), ("observed_at", "yesterday"), ("observed_at", "0001-01-01T00:00:00+14:00"),
        ("last_local_error", {"a": 1}), ("node_id", None),
    ):  # fmt: skip
        assert_error(post(BEAT, token, {**HEARTBEAT, "node_id": node_id, param: value}), 400, "BAD_REQUEST", param)
    both = {**HEARTBEAT, "node_id": node_id, "status": "draining"}
    assert_error(post(BEAT, token, both), 400, "BAD_REQUEST", "is_accepting_jobs")
    for unknown in (NOBODY, "node_x", "17", "x" * 60, 17.5):
        assert_error(post(BEAT, token, {**HEARTBEAT, "node_id": unknown}), 404, "BAD_REQUEST", "node_id")
        assert_error(post(f"/nodes/{unknown}/mode", token, {"mode": "spare_on"}), 404, "BAD_REQUEST", "node_id")


def test_a_heartbeat_that_another_one_overtook_is_a_sign_of_life_alone(token: str, node_id: str) -> None:
    beat(token, node_id, observed_at="2026-03-13T08:15:30Z", active_request_count=2)
    NodePresence.objects.update(last_heartbeat_at=None)
    beat(token, node_id, observed_at="2026-03-13T08:15:20Z", active_request_count=0, status="error")
    presence = NodePresence.objects.get()
    assert (presence.active_requests, presence.reported_status) == (2, "available")
    assert presence.last_heartbeat_at is not None
    beat(token, node_id, observed_at="2026-03-13T06:15:20Z", active_request_count=1)
    assert NodePresence.objects.get().active_requests == 1, "a clock that was set back by hours is no delay"


# Mode and list


def test_the_mode_answers_exactly_what_the_contract_says(token: str, node_id: str) -> None:
    path = f"/nodes/{node_id}/mode"
    silent = {"node_id": node_id, "mode": "spare_on", "status": "offline"}
    assert post(path, token, {"mode": "spare_on"}) == (200, silent)
    beat(token, node_id)
    taken = {"node_id": node_id, "mode": "spare_off", "status": "draining"}
    assert post(path, token, {"mode": "spare_off", "reason": "owner_reclaim"}) == (200, taken)
    assert (own_node().drain_deadline_at is not None, own_node().drain_reason) == (True, "owner_reclaim")
    assert post(path + "/", token, {"mode": "spare_on"}) == (200, silent | {"status": "available"})
    for body, param in (({}, "mode"), ({"mode": "off"}, "mode"), ({"mode": "spare_on", "reason": "x" * 201}, "reason")):
        assert_error(post(path, token, body), 400, "BAD_REQUEST", param)
    assert post(f"/nodes/{own_node().pk}/mode", token, {"mode": "spare_on"})[0] == 200, "a bare UUID too"
    assert post(REGISTER + "/", token, REGISTRATION)[0] == post(BEAT + "/", token, {**HEARTBEAT, "node_id": node_id})[0] == 200
    response = Client().get(REGISTER, headers={"authorization": f"Bearer {token}"})
    assert (response.status_code, response.json()["error"]["code"]) == (405, "BAD_REQUEST")


def test_the_list_shows_the_contracts_fields_first_and_ours_after_and_takes_three_queries(
    token: str, node_id: str, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    beat(token, node_id, active_request_count=2)
    silent = make_node("silent", mode=NodeMode.SPARE_OFF)
    make_node("gone", credential=make_credential("gone", provider="gone")[0])
    delete_provider(name="gone", actor=ACTOR)
    _, admin_token = create_admin_token(name="more", actor=ACTOR)
    with django_assert_num_queries(3):  # token, its last use, the nodes
        response = Client().get("/nodes", headers={"authorization": f"Bearer {admin_token}"})
    one, two = response.json()["nodes"]
    assert list(one)[:11] == [
        "node_id", "node_name", "owner_name", "status", "mode", "current_model", "gpu_util_percent", "vram_free_mb",
        "spare_score", "active_request_count", "last_heartbeat_at",
    ]  # fmt: skip
    shown = {"node_id": node_id, "status": "available", "current_model": MODEL, "active_request_count": 2, "models": [MODEL]}
    assert {**shown, "cordoned": False, "draining": False}.items() <= one.items()
    assert one["last_heartbeat_at"].endswith("Z")
    told = [two[name] for name in ("node_name", "status", "last_heartbeat_at", "current_model", "memory", "replicas")]
    assert told == ["silent", "offline", None, None, None, []]
    make_presence(silent, age_s=-timedelta(hours=1).total_seconds())
    assert list_nodes()[1]["status"] == "draining", "a presence in the future breaks nothing"
