"""``GET /requests`` in the contract's shape."""

from __future__ import annotations

import pytest
from django.test import Client

from governance.services import create_admin_token
from nodes.services import create_credential, create_provider
from tests.fakes.nodes import ACTOR
from tests.fakes.tenants import make_key, make_operator, make_record
from wire.contract import RequestState
from wire.ids import format_id, new_uuid7

pytestmark = pytest.mark.django_db
CONTRACT_KEYS = [
    "request_id",
    "node_id",
    "model",
    "status",
    "prompt_tokens_est",
    "max_tokens",
    "latency_ms",
    "error_code",
    "created_at",
]


@pytest.fixture
def admin() -> Client:
    """A client that shows an admin token."""
    _, text = create_admin_token(name="tests", actor=ACTOR)
    return Client(headers={"authorization": f"Bearer {text}"})


def test_a_record_has_exactly_the_fields_of_the_contract(admin: Client) -> None:
    node_id = new_uuid7()
    record = make_record(node_id=node_id, prompt_tokens_est=384, max_tokens=256, latency_ms=4820)
    (shown,) = admin.get("/requests").json()["requests"]
    assert list(shown)[: len(CONTRACT_KEYS)] == CONTRACT_KEYS
    assert list(shown)[len(CONTRACT_KEYS) :] == ["state", "outcome", "status_code", "engine_error"]
    assert shown["request_id"] == record.printed_id
    assert shown["node_id"] == format_id("node", node_id)
    assert (shown["status"], shown["latency_ms"], shown["error_code"]) == ("completed", 4820, None)
    assert shown["created_at"].endswith("Z")


def test_a_caller_that_left_is_interrupted_in_the_contracts_words_and_cancelled_in_ours(admin: Client) -> None:
    left = make_record(state=RequestState.CANCELLED, status_code=499, age_s=1)
    cut = make_record(state=RequestState.INTERRUPTED, status_code=503, age_s=2)
    both = admin.get("/requests?status=interrupted").json()["requests"]
    one = admin.get("/requests?status=cancelled").json()["requests"]
    assert [(shown["request_id"], shown["status"], shown["state"], shown["outcome"]) for shown in both] == [
        (left.printed_id, "interrupted", "cancelled", "cancelled"),
        (cut.printed_id, "interrupted", "interrupted", "failed"),
    ]
    assert [shown["request_id"] for shown in one] == [left.printed_id]


def test_records_are_filtered_by_status_and_node(admin: Client) -> None:
    node_id = new_uuid7()
    wanted = make_record(node_id=node_id, state=RequestState.FAILED)
    make_record(node_id=node_id)
    make_record(state=RequestState.FAILED)
    for written in (format_id("node", node_id), str(node_id)):
        answer = admin.get(f"/requests?status=failed&node_id={written}").json()
        assert [shown["request_id"] for shown in answer["requests"]] == [wanted.printed_id]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=-1", "limit"),
        ("limit=ten", "limit"),
        ("limit=", "limit"),
        ("limit=%D9%A3", "limit"),
        ("limit=99999999999999999999", "limit"),
        ("status=done", "status"),
        ("status=", "status"),
        ("node_id=node_7", "node_id"),
        ("node_id=", "node_id"),
    ],
)
def test_a_parameter_that_means_nothing_is_named(admin: Client, query: str, param: str) -> None:
    answer = admin.get(f"/requests?{query}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["retryable"]) == ("BAD_REQUEST", param, False)


def test_only_an_admin_token_opens_the_list() -> None:
    make_record()
    create_provider(name="local", actor=ACTOR)
    _, client_key = make_key()
    _, worker = create_credential(name="box", provider_name="local", actor=ACTOR)
    signed_in = Client()
    signed_in.force_login(make_operator())
    answers = [
        Client().get("/requests"),
        signed_in.get("/requests"),
        Client().get("/requests", headers={"authorization": f"Bearer {client_key}"}),
        Client().get("/requests", headers={"authorization": f"Bearer {worker}"}),
        Client().get("/requests", headers={"authorization": "Basic dTpw"}),
    ]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "INVALID_ADMIN_TOKEN"
        assert answer["WWW-Authenticate"].startswith("Bearer")
