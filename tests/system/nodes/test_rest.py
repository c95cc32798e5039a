"""The nodes REST API of the contract, request by request, through the URLs of the control plane."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries, Settings

from core.throttle import AuthThrottle
from gateway.services import allow_model, create_api_key, create_tenant
from governance.services import create_admin_token
from nodes import authentication
from nodes.models import Node, NodePresence
from nodes.services import (
    cordon_node,
    delete_provider,
    disable_provider,
    drain_node,
    enable_provider,
    read_credential_digests,
    revoke_credential,
    undrain_node,
)
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence
from tests.fakes.rows import find_tables
from tests.unit.closed_port import closed_port
from wire.contract import NodeMode
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.django_db

MODEL = "Qwen/Qwen3.5-35B-A3B-GPTQ-Int4"
URL = "https://node-01.example.com"
REGISTRATION = {
    "node_name": "joy-rtx6000-01",
    "owner_name": "JOY",
    "gpu_name": "RTX Pro 6000 Blackwell",
    "vram_total_mb": 98304,
    "current_model": MODEL,
    "agent_version": "0.1.0",
}
HEARTBEAT = {
    "status": "available",
    "mode": "spare_on",
    "gpu_util_percent": 22.4,
    "vram_used_mb": 24576,
    "vram_free_mb": 73728,
    "spare_score": 78.2,
    "is_accepting_jobs": True,
    "active_request_count": 0,
    "last_local_error": None,
    "observed_at": "2026-03-13T08:15:30Z",
}
NOBODY = "node_" + "0" * 32


@pytest.fixture(autouse=True)
def _allow_listed_model() -> None:
    allow_model(name=MODEL, actor=ACTOR)


@pytest.fixture
def token() -> str:
    """A node credential."""
    return make_credential()[1]


def post(path: str, token: str | None, body: object, **extra: Any) -> tuple[int, Any]:
    """POST JSON and return status and JSON."""
    headers = {"authorization": f"Bearer {token}"} if token is not None else {}
    response = Client().post(path, data=body, content_type="application/json", headers=headers, **extra)
    return response.status_code, response.json()


def register(token: str, **changes: Any) -> str:
    """Register a node whose socket a gateway holds, and return its id."""
    status, answer = post("/nodes/register", token, {**REGISTRATION, **changes})
    assert status == 200, answer
    NodePresence.objects.filter(node__reach="relay").update(connected=True)
    return str(answer["node_id"])


def beat(token: str, node_id: str, **changes: Any) -> dict[str, Any]:
    """Send a heartbeat that must be accepted and return the answer."""
    status, answer = post("/nodes/heartbeat", token, {**HEARTBEAT, "node_id": node_id, **changes})
    assert status == 200, answer
    return dict(answer)


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
    status, answer = post("/nodes/register", token, REGISTRATION)
    assert status == 200
    contract = ["node_id", "status", "accepted_model", "heartbeat_interval_sec"]
    assert list(answer) == [*contract, "reachable", "unreachable_reason"]
    node = Node.objects.get()
    assert answer == {
        "node_id": node.printed_id,
        "status": "offline",
        "accepted_model": MODEL,
        "heartbeat_interval_sec": 5,
        "reachable": False,
        "unreachable_reason": "it holds no socket to a gateway and registered no public_base_url",
    }
    assert isinstance(answer["heartbeat_interval_sec"], int)
    assert (node.name, node.owner_name, node.gpu_name, node.vram_total_mb) == (
        "joy-rtx6000-01",
        "JOY",
        "RTX Pro 6000 Blackwell",
        98304,
    )
    assert (node.reach, node.max_concurrent, node.model_names) == ("relay", 1, [MODEL])
    (event,) = audited("node.register")
    assert (event.actor, event.target) == ("node:joy-rtx6000-01", node.printed_id)


def test_registering_again_refreshes_the_same_box(token: str) -> None:
    first = register(token, max_concurrent=3)
    assert register(token) == first
    assert not audited("node.refresh"), "nothing changed"
    assert register(token, agent_version="0.2.0", owner_name="ROY") == first
    node = Node.objects.get()
    assert (node.agent_version, node.owner_name, node.max_concurrent) == ("0.2.0", "ROY", 3)
    assert audited("node.refresh")[0].detail["changed"] == ["agent_version", "owner_name"]


def test_a_refresh_keeps_what_operators_decided(token: str) -> None:
    register(token)
    node = Node.objects.get()
    cordon_node(node_id=node.pk, actor=ACTOR)
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans")
    register(token, agent_version="0.3.0")
    node.refresh_from_db()
    assert (node.cordoned, node.draining, node.drain_reason) == (True, True, "fans")


def test_one_credential_enrols_as_many_boxes_as_it_may() -> None:
    _, token = make_credential(max_nodes=2)
    first = register(token, node_name="a")
    second = register(token, node_name="b")
    assert first != second
    message = assert_error(post("/nodes/register", token, {**REGISTRATION, "node_name": "c"}), 400, "BAD_REQUEST", "node_name")
    assert "another credential" in message
    assert register(token, node_name="a") == first


def test_a_bound_credential_registers_its_own_box_whatever_the_name() -> None:
    node = make_node("rack-7")
    _, token = make_credential("spare", node_id=node.pk)
    assert register(token, node_name="anything") == node.printed_id
    assert Node.objects.get().name == "rack-7"


def test_a_model_that_is_not_allow_listed_is_refused(token: str) -> None:
    body = {**REGISTRATION, "current_model": "other/model"}
    assert_error(post("/nodes/register", token, body), 400, "MODEL_NOT_ALLOWED", "current_model")
    assert not Node.objects.exists()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"node_name": None}, "node_name"),
        ({"node_name": ""}, "node_name"),
        ({"node_name": "x" * 121}, "node_name"),
        ({"node_name": "a\u0000b"}, "node_name"),
        ({"node_name": "\ud800"}, "node_name"),
        ({"node_name": ["a"]}, "node_name"),
        ({"current_model": ""}, "current_model"),
        ({"current_model": "x" * 201}, "current_model"),
        ({"vram_total_mb": -1}, "vram_total_mb"),
        ({"vram_total_mb": 2**31}, "vram_total_mb"),
        ({"vram_total_mb": "much"}, "vram_total_mb"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"max_concurrent": 1025}, "max_concurrent"),
        ({"agent_version": "x" * 61}, "agent_version"),
        ({"public_base_url": 17.5}, "public_base_url"),
        ({"public_base_url": "x" * 301}, "public_base_url"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(token: str, changes: dict[str, Any], param: str) -> None:
    assert_error(post("/nodes/register", token, {**REGISTRATION, **changes}), 400, "BAD_REQUEST", param)
    assert not Node.objects.exists()


@pytest.mark.parametrize("body", ["[]", "17", "{", '"x"', "", "null", '{"node_name": NaN}'])
def test_a_body_that_is_no_object_is_refused(token: str, body: str) -> None:
    for path in ("/nodes/register", "/nodes/heartbeat"):
        status, answer = post(path, token, body)
        assert (status, answer["error"]["code"]) == (400, "BAD_REQUEST"), body


def test_a_url_needs_an_allow_listed_host_and_the_message_names_the_setting(token: str, settings: Settings) -> None:
    body = {**REGISTRATION, "public_base_url": "http://10.1.2.3:8000"}
    message = assert_error(post("/nodes/register", token, body), 400, "BAD_REQUEST", "public_base_url")
    assert "MUSTER_DIRECT_HOSTS" in message
    settings.NODE_DIRECT_HOSTS = ["10.0.0.0/8"]
    assert post("/nodes/register", token, body)[0] == 200
    node = Node.objects.get()
    assert (node.reach, node.public_base_url) == ("direct", "http://10.1.2.3:8000")
    for url in ("http://169.254.169.254/", "http://user@10.1.2.3/", "ftp://10.1.2.3/", "http://0x0a010203/"):
        refused = post("/nodes/register", token, {**REGISTRATION, "public_base_url": url})
        assert_error(refused, 400, "BAD_REQUEST", "public_base_url")
    node.refresh_from_db()
    assert node.public_base_url == "http://10.1.2.3:8000"


@pytest.mark.parametrize("api_key", ["two words", "line\nend", "é", "x" * 513, ["k"]])
def test_an_api_key_that_no_header_can_carry_is_refused_without_being_repeated(token: str, api_key: object) -> None:
    refused = post("/nodes/register", token, {**REGISTRATION, "api_key": api_key})
    assert_error(refused, 400, "BAD_REQUEST", "api_key")
    assert str(api_key) not in str(refused)
    assert not Node.objects.exists()


def test_an_api_key_is_in_no_answer_no_row_and_no_log(token: str, settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    with closed_port() as port, caplog.at_level(logging.DEBUG):
        body = {**REGISTRATION, "public_base_url": f"http://127.0.0.1:{port}", "api_key": "a-key-of-the-node"}
        status, answer = post("/nodes/register", token, body)
    assert status == 200
    listed = Client().get("/nodes", headers={"authorization": f"Bearer {admin_token}"})
    assert listed.status_code == 200
    assert Node.objects.get().read_api_key() == "a-key-of-the-node"
    assert "a-key-of-the-node" not in str(answer) + listed.content.decode() + caplog.text
    assert find_tables("a-key-of-the-node", b"a-key-of-the-node".hex()) == set()


def test_loopback_needs_its_switch(token: str, settings: Settings) -> None:
    body = {**REGISTRATION, "public_base_url": "http://127.0.0.1:8000"}
    assert_error(post("/nodes/register", token, body), 400, "BAD_REQUEST", "public_base_url")
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    assert post("/nodes/register", token, body)[0] == 200


@pytest.mark.parametrize("url", ["", None])
def test_a_box_without_a_url_dials_in(token: str, url: str | None) -> None:
    register(token, public_base_url=url)
    assert Node.objects.get().reach == "relay"


def test_a_connected_box_keeps_the_models_its_socket_told(token: str) -> None:
    register(token)
    node = Node.objects.get()
    Node.objects.update(model_names=["a", "b"])
    NodePresence.objects.update(connected=True)
    register(token)
    node.refresh_from_db()
    assert node.model_names == ["a", "b"]


# Credentials


@pytest.mark.parametrize("path", ["/nodes/register", "/nodes/heartbeat", f"/nodes/{NOBODY}/mode"])
def test_only_a_node_credential_opens_the_node_api(path: str, token: str) -> None:
    create_tenant(name="acme", actor=ACTOR)
    _, client_key = create_api_key(name="app", tenant_name="acme", actor=ACTOR)
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    revoked, revoked_text = make_credential("old")
    revoke_credential(credential_id=revoked.pk, actor=ACTOR)
    for wrong in (None, "", "wrong", client_key, admin_token, revoked_text, token[:-1]):
        # The credential comes first: nothing is said about a body that its sender may not send.
        assert_error(post(path, wrong, {}), 401, "INVALID_NODE_TOKEN")
    response = Client().post(path, data={}, content_type="application/json", headers={"authorization": f"Basic {token}"})
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")


def test_wrong_credentials_from_one_address_are_slowed_down_and_cost_no_query_and_good_ones_go_on(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        authentication, "throttle", AuthThrottle(failures=3, block_s=600.0, read_digests=read_credential_digests)
    )
    node_id = register(token)
    _, newcomer = make_credential("newcomer")
    *wrongs, last = (mint_credential(CredentialKind.WORKER).text for _ in range(9))
    for wrong in wrongs[:3]:
        assert_error(post("/nodes/register", wrong, REGISTRATION), 401, "INVALID_NODE_TOKEN")
    with CaptureQueriesContext(connection) as queries:
        for wrong in wrongs[3:]:
            status, answer = post("/nodes/register", wrong, REGISTRATION)
            assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (429, "RATE_LIMITED", True)
    assert len(queries) <= 2, "all that are good are read once a second"
    assert post("/nodes/register", newcomer, {**REGISTRATION, "node_name": "other"})[0] == 200
    assert beat(token, node_id)["ok"] is True
    again = {**REGISTRATION, "node_name": "other"}
    response = Client(REMOTE_ADDR="10.0.0.8").post(
        "/nodes/register", data=again, content_type="application/json", headers={"authorization": f"Bearer {newcomer}"}
    )
    assert response.status_code == 200
    assert Client().post("/nodes/register", headers={"authorization": f"Bearer {last}"})["Retry-After"] == "1"


def test_a_node_credential_does_not_open_the_admin_api(token: str) -> None:
    response = Client().get("/nodes", headers={"authorization": f"Bearer {token}"})
    assert response.status_code == 401
    assert Client().get("/nodes").status_code == 401


def test_the_credential_of_another_box_is_invalid_for_this_one(token: str) -> None:
    node_id = register(token)
    _, foreign = make_credential("other")
    register(foreign, node_name="other")
    body = {**HEARTBEAT, "node_id": node_id}
    assert_error(post("/nodes/heartbeat", foreign, body), 401, "INVALID_NODE_TOKEN")
    assert_error(post(f"/nodes/{node_id}/mode", foreign, {"mode": "spare_off"}), 401, "INVALID_NODE_TOKEN")
    assert Node.objects.get(name="joy-rtx6000-01").mode == "spare_on"


def test_a_box_of_a_disabled_provider_cannot_register_and_should_drain(token: str) -> None:
    node_id = register(token)
    assert beat(token, node_id)["should_drain"] is False
    disable_provider(name="local", actor=ACTOR)
    status, answer = post("/nodes/register", token, REGISTRATION)
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (403, "BAD_REQUEST", True)
    assert beat(token, node_id)["should_drain"] is True
    enable_provider(name="local", actor=ACTOR)
    assert post("/nodes/register", token, REGISTRATION)[0] == 200
    delete_provider(name="local", actor=ACTOR)
    assert_error(post("/nodes/register", token, REGISTRATION), 401, "INVALID_NODE_TOKEN")


# Heartbeats


def test_a_heartbeat_answers_exactly_what_the_contract_says(token: str) -> None:
    node_id = register(token)
    before = timezone.now()
    answer = beat(token, node_id)
    contract = ["ok", "server_time", "effective_status", "should_drain"]
    assert list(answer) == [*contract, "reachable", "unreachable_reason"]
    assert (answer["ok"], answer["effective_status"], answer["should_drain"]) == (True, "available", False)
    assert answer["server_time"].endswith("Z")
    assert before <= datetime.fromisoformat(answer["server_time"]) <= timezone.now()
    presence = NodePresence.objects.get()
    assert (presence.gpu_util_percent, presence.vram_used_mb, presence.vram_free_mb, presence.spare_score) == (
        22.4,
        24576,
        73728,
        78.2,
    )
    assert presence.last_heartbeat_at is not None
    assert presence.last_heartbeat_at >= before, "the server's clock, not the box's"


def test_the_first_heartbeat_of_a_box_is_recorded_and_the_next_are_not(token: str) -> None:
    node_id = register(token)
    for _ in range(3):
        beat(token, node_id)
    assert len(audited("node.online")) == 1
    beat(token, node_id, status="offline", is_accepting_jobs=False)
    assert len(audited("node.offline")) == 1


@pytest.mark.parametrize(
    ("status", "accepting", "effective"),
    [
        ("available", True, "available"),
        ("available", False, "draining"),
        ("busy", True, "busy"),
        ("draining", False, "draining"),
        ("draining", None, "draining"),
        ("error", False, "error"),
        ("error", True, "error"),
        ("offline", False, "offline"),
    ],
)
def test_the_effective_status_overrides_the_boxs_own(token: str, status: str, accepting: bool | None, effective: str) -> None:
    answer = beat(token, register(token), status=status, is_accepting_jobs=accepting)
    assert answer["effective_status"] == effective


def test_a_draining_box_must_not_say_that_it_accepts(token: str) -> None:
    body = {**HEARTBEAT, "node_id": register(token), "status": "draining"}
    assert_error(post("/nodes/heartbeat", token, body), 400, "BAD_REQUEST", "is_accepting_jobs")


def test_a_held_back_box_is_told_to_drain(token: str) -> None:
    node_id = register(token)
    node = Node.objects.get()
    drain_node(node_id=node.pk, actor=ACTOR, reason="")
    answer = beat(token, node_id)
    assert (answer["effective_status"], answer["should_drain"]) == ("draining", True)
    undrain_node(node_id=node.pk, actor=ACTOR)
    assert beat(token, node_id)["should_drain"] is False
    cordon_node(node_id=node.pk, actor=ACTOR)
    answer = beat(token, node_id)
    assert (answer["effective_status"], answer["should_drain"]) == ("draining", True)


def test_a_heartbeat_may_reclaim_the_box_and_never_lends_it_again(token: str) -> None:
    node_id = register(token)
    answer = beat(token, node_id, mode="spare_off")
    assert (answer["effective_status"], answer["should_drain"]) == ("draining", True)
    (event,) = audited("node.set_mode")
    assert event.actor == "node:joy-rtx6000-01"
    # This one was written before the reclaim and overtaken by it.
    assert beat(token, node_id, mode="spare_on")["should_drain"] is True
    assert Node.objects.get().mode == "spare_off"


@pytest.mark.parametrize("observed_at", ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2026-03-13T08:15:30+14:00", None])
def test_the_boxs_clock_may_say_anything(token: str, observed_at: str | None) -> None:
    assert beat(token, register(token), observed_at=observed_at)["effective_status"] == "available"


def test_only_id_and_status_are_needed(token: str) -> None:
    body = {"node_id": register(token), "status": "available"}
    status, answer = post("/nodes/heartbeat", token, body)
    assert (status, answer["effective_status"]) == (200, "available")


def test_a_long_error_text_is_cut(token: str) -> None:
    beat(token, register(token), last_local_error="x" * 5000)
    assert NodePresence.objects.get().last_error == "x" * 500


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"status": "sleeping"}, "status"),
        ({"status": None}, "status"),
        ({"mode": "spare"}, "mode"),
        ({"gpu_util_percent": 101}, "gpu_util_percent"),
        ({"vram_used_mb": -1}, "vram_used_mb"),
        ({"vram_free_mb": 2**31}, "vram_free_mb"),
        ({"spare_score": "high"}, "spare_score"),
        ({"spare_score": 1e300}, "spare_score"),
        ({"is_accepting_jobs": "perhaps"}, "is_accepting_jobs"),
        ({"active_request_count": -1}, "active_request_count"),
        ({"observed_at": "yesterday"}, "observed_at"),
        ({"observed_at": "0001-01-01T00:00:00+14:00"}, "observed_at"),
        ({"last_local_error": {"a": 1}}, "last_local_error"),
        ({"node_id": 17.5}, "node_id"),
        ({"node_id": None}, "node_id"),
    ],
)
def test_a_heartbeat_field_that_cannot_be_used_is_named(token: str, changes: dict[str, Any], param: str) -> None:
    body = {**HEARTBEAT, "node_id": register(token), **changes}
    status, answer = post("/nodes/heartbeat", token, body)
    assert answer["error"]["code"] == "BAD_REQUEST"
    # A number is a possible id, though of no box.
    assert (status, answer["error"]["param"]) in {(400, param), (404, "node_id") if param == "node_id" else (400, param)}


@pytest.mark.parametrize("node_id", [NOBODY, "node_x", "17", "x" * 60])
def test_an_unknown_box_is_404_bad_request(token: str, node_id: str) -> None:
    register(token)
    assert_error(post("/nodes/heartbeat", token, {**HEARTBEAT, "node_id": node_id}), 404, "BAD_REQUEST", "node_id")
    assert_error(post(f"/nodes/{node_id}/mode", token, {"mode": "spare_on"}), 404, "BAD_REQUEST", "node_id")


def test_a_heartbeat_costs_few_queries(token: str, django_assert_max_num_queries: DjangoAssertNumQueries) -> None:
    node_id = register(token)
    beat(token, node_id)
    with django_assert_max_num_queries(8):
        beat(token, node_id)


# Mode


def test_the_mode_answers_exactly_what_the_contract_says(token: str) -> None:
    node_id = register(token)
    beat(token, node_id)
    body = {"mode": "spare_off", "reason": "owner_reclaim"}
    assert post(f"/nodes/{node_id}/mode", token, body) == (
        200,
        {"node_id": node_id, "mode": "spare_off", "status": "draining"},
    )
    node = Node.objects.get()
    assert node.drain_deadline_at is not None
    assert node.drain_reason == "owner_reclaim"
    back = post(f"/nodes/{node_id}/mode", token, {"mode": "spare_on"})
    assert back == (200, {"node_id": node_id, "mode": "spare_on", "status": "available"})


def test_spare_on_does_not_make_a_silent_box_available(token: str) -> None:
    node_id = register(token)
    assert post(f"/nodes/{node_id}/mode", token, {"mode": "spare_on"})[1]["status"] == "offline"


@pytest.mark.parametrize(
    ("body", "param"), [({}, "mode"), ({"mode": "off"}, "mode"), ({"mode": "spare_on", "reason": "x" * 201}, "reason")]
)
def test_a_mode_that_is_none_is_refused(token: str, body: dict[str, Any], param: str) -> None:
    assert_error(post(f"/nodes/{register(token)}/mode", token, body), 400, "BAD_REQUEST", param)


# List


def test_the_list_shows_the_contracts_fields_first_and_ours_after(token: str) -> None:
    node_id = register(token)
    beat(token, node_id, active_request_count=2)
    (node,) = list_nodes()
    assert list(node)[:11] == [
        "node_id",
        "node_name",
        "owner_name",
        "status",
        "mode",
        "current_model",
        "gpu_util_percent",
        "vram_free_mb",
        "spare_score",
        "active_request_count",
        "last_heartbeat_at",
    ]
    assert (node["node_id"], node["status"], node["current_model"]) == (node_id, "available", MODEL)
    assert (node["active_request_count"], node["models"], node["cordoned"], node["draining"]) == (2, [MODEL], False, False)
    assert node["last_heartbeat_at"].endswith("Z")


def test_the_list_shows_what_a_box_reports_of_its_models() -> None:
    replicas = [{"model": "m", "state": "loading", "progress": 0.5}]
    make_presence(
        make_node("a"), replicas=replicas, available_models=["x"], memory={"total_mb": 9}, queue_depth=2, avg_wait_ms=3
    )
    make_node("b")
    one, two = list_nodes()
    assert (one["replicas"], one["available_models"], one["memory"]) == (replicas, ["x"], {"total_mb": 9})
    assert (one["queue_depth"], one["avg_wait_ms"]) == (2, 3)
    assert (two["replicas"], two["available_models"], two["memory"], two["queue_depth"]) == ([], [], None, None)


@pytest.mark.parametrize(("age_s", "status"), [(1, "available"), (90, "available"), (301, "offline")])
def test_the_list_judges_freshness_when_it_is_read(age_s: float, status: str) -> None:
    set_limits(nodes={"stale_after_s": 60.0, "offline_after_s": 300.0})
    make_presence(make_node(), age_s=age_s)
    (node,) = list_nodes()
    assert node["status"] == status


def test_the_list_shows_boxes_that_were_never_heard_and_none_of_deleted_providers() -> None:
    make_node("silent", mode=NodeMode.SPARE_OFF)
    credential, _ = make_credential("gone", provider="gone")
    make_node("gone", credential=credential)
    delete_provider(name="gone", actor=ACTOR)
    (node,) = list_nodes()
    assert (node["node_name"], node["status"], node["last_heartbeat_at"], node["current_model"]) == (
        "silent",
        "offline",
        None,
        None,
    )


def test_the_list_takes_as_many_queries_for_many_boxes_as_for_one(django_assert_num_queries: DjangoAssertNumQueries) -> None:
    credential, _ = make_credential(max_nodes=50)
    for number in range(20):
        make_presence(make_node(str(number), credential=credential))
    make_node("without presence", credential=credential)
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    # Token, its last use, the boxes.
    with django_assert_num_queries(3):
        response = Client().get("/nodes", headers={"authorization": f"Bearer {admin_token}"})
    assert len(response.json()["nodes"]) == 21


# Addresses


def test_a_trailing_slash_works_too(token: str) -> None:
    assert post("/nodes/register/", token, REGISTRATION)[0] == 200
    node_id = Node.objects.get().printed_id
    assert post("/nodes/heartbeat/", token, {**HEARTBEAT, "node_id": node_id})[0] == 200
    assert post(f"/nodes/{node_id}/mode/", token, {"mode": "spare_on"})[0] == 200
    assert post(f"/nodes/{Node.objects.get().pk}/mode", token, {"mode": "spare_on"})[0] == 200, "a bare UUID too"


def test_another_method_is_405_in_the_contracts_envelope(token: str) -> None:
    response = Client().get("/nodes/register", headers={"authorization": f"Bearer {token}"})
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "BAD_REQUEST"


def test_a_presence_in_the_future_does_not_break_the_list() -> None:
    make_presence(make_node(), age_s=-timedelta(hours=1).total_seconds())
    assert list_nodes()[0]["status"] == "available"
