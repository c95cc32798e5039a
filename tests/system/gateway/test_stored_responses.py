"""Kept answers of /v1/responses as rows: who may have them, how a conversation is read back, and when they are gone."""

from __future__ import annotations

import json
import threading
import time
import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from gateway.errors import BadRequest, ResponseNotFound
from gateway.models import StoredResponse, Tenant
from gateway.services import responses as responses_module
from gateway.services.errors import ResponseNotKept
from gateway.services.responses import (
    delete_expired_responses,
    delete_response,
    get_response,
    keep_response,
    list_input_items,
    load_history,
    require_response,
)
from gateway.services.tenants import change_response_policy, create_tenant
from gateway.tasks import forget_expired_responses
from tests.fakes.limits import set_limits

pytestmark = pytest.mark.django_db
ACTOR = "user:ada"
KEY_ID = uuid.UUID(int=7)


def make_keeper(name: str = "acme", *, days: int = 30) -> Tenant:
    """Return a tenant whose answers may be kept."""
    create_tenant(name=name, actor=ACTOR)
    return change_response_policy(name=name, stores_responses=True, responses_kept_days=days, actor=ACTOR)


def say(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


def answer(response_id: str, *output: dict[str, Any]) -> bytes:
    return json.dumps({"id": response_id, "object": "response", "output": output}).encode()


def keep(response_id: str, previous_id: str = "", *, tenant: str = "acme", **changes: Any) -> None:
    """Keep a turn that says its own id on both sides."""
    arguments: dict[str, Any] = {
        "key_id": KEY_ID,
        "kept_days": 30,
        "model": "tiny",
        "input_items": [say("user", f"ask {response_id}")],
        "body": answer(response_id, say("assistant", f"answer {response_id}")),
    }
    keep_response(tenant=tenant, previous_id=previous_id, **{**arguments, **changes})


def keep_chain(turns: int) -> str:
    """Keep a conversation of so many turns and return the id of its last one."""
    for number in range(turns):
        keep(f"resp_{number}", f"resp_{number - 1}" if number else "")
    return f"resp_{turns - 1}"


def expire(response_id: str) -> None:
    StoredResponse.objects.filter(pk=response_id).update(expires_at=timezone.now() - timedelta(seconds=1))


def wait_for_lock(thread: threading.Thread) -> None:
    """Return once the thread's connection waits for a lock of ours, or the thread is through."""
    deadline = time.monotonic() + 30
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with connection.cursor() as cursor:
        while thread.is_alive() and time.monotonic() < deadline:
            cursor.execute("SELECT pg_stat_clear_snapshot()")  # a transaction sees what it saw first
            cursor.execute(waiting)
            if cursor.fetchone() != (0,):
                return
            thread.join(0.01)


def texts_of(items: list[bytes]) -> list[str]:
    return [json.loads(item)["content"] for item in items]


def is_found(response_id: str, *, tenant: str = "acme") -> bool:
    try:
        get_response(tenant=tenant, response_id=response_id)
    except ResponseNotFound:
        return False
    return True


def test_an_answer_is_given_back_byte_for_byte_for_the_days_of_key_or_tenant_whichever_are_fewer() -> None:
    make_keeper(days=5)
    body = b'{"output": [],  "b": 1, "a": 1.50, "id": "resp_1", "text": "\\u0000 \\ud83d\\ude00 \xc3\xa9"}'
    keep("resp_1", body=body, input_items=[say("user", "before\x00after")], kept_days=2)
    assert get_response(tenant="acme", response_id="resp_1") == body
    assert texts_of(load_history(tenant="acme", response_id="resp_1")) == ["before\x00after"]
    keep("resp_2", kept_days=30)
    kept = {row.pk: (row.expires_at - row.created_at).days for row in StoredResponse.objects.all()}
    assert kept == {"resp_1": 2, "resp_2": 5}


def test_what_is_not_allowed_not_readable_too_large_or_given_up_is_not_kept() -> None:
    make_keeper()
    create_tenant(name="closed", actor=ACTOR)
    set_limits(gateway={"kept_bytes": 1000})
    wrong = [*UNREADABLE, {"tenant": "closed"}, {"tenant": "nobody"}, {"give_up_at": time.monotonic() - 0.001}]
    for change in wrong:
        with pytest.raises(ResponseNotKept):
            keep("resp_1", **change)
    assert not StoredResponse.objects.exists()
    keep("resp_1", give_up_at=time.monotonic() + 60)
    make_keeper("other")
    with pytest.raises(ResponseNotKept):  # the id of another tenant's answer, which stays
        keep("resp_1", tenant="other")
    assert (is_found("resp_1"), is_found("resp_1", tenant="other")) == (True, False)


UNREADABLE: list[dict[str, Any]] = [
    {"body": b"not json"}, {"body": answer("chatcmpl-1")}, {"body": answer("resp_" + "x" * 76)}, {"body": b'{"id": "resp_1"}'},
    {"input_items": ["words"]}, {"input_items": [b'{"broken": ']}, {"input_items": [say("user", "x" * 1000)]},
]  # fmt: skip


def test_what_is_written_after_the_caller_has_given_up_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    make_keeper()
    clock = iter([0.0, 10.0])  # the process stands still behind its first look
    monkeypatch.setattr(responses_module, "clock", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(ResponseNotKept):
        keep("resp_1", give_up_at=5.0)
    assert not is_found("resp_1")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("gives_up", [True, False], ids=["a database that makes wait", "a policy that was switched off"])
def test_a_database_that_makes_wait_is_given_up_on_and_no_answer_slips_in_behind_a_policy(*, gives_up: bool) -> None:
    make_keeper()
    outcomes: list[str] = []

    def keep_meanwhile() -> None:
        try:
            while not outcomes:
                try:
                    keep("resp_1", give_up_at=time.monotonic() + (0.1 if gives_up else 600.0))
                    outcomes.append("kept")
                except ResponseNotKept:
                    outcomes.extend(
                        [] if gives_up else ["refused"]
                    )  # the machine stood still before the database was asked at all
        except DatabaseError:
            outcomes.append("given up")
        finally:
            connection.close()

    keeper = threading.Thread(target=keep_meanwhile)
    with transaction.atomic():
        if gives_up:
            Tenant.objects.select_for_update().get(name="acme")
        else:
            change_response_policy(name="acme", stores_responses=False, responses_kept_days=30, actor=ACTOR)
        keeper.start()
        keeper.join(30) if gives_up else wait_for_lock(keeper)
    keeper.join(30)
    assert outcomes == ["given up" if gives_up else "refused"]
    assert not StoredResponse.objects.exists()


def test_a_conversation_comes_back_oldest_first_in_one_query() -> None:
    make_keeper()
    last = keep_chain(12)
    with CaptureQueriesContext(connection) as queries:
        history = load_history(tenant="acme", response_id=last)
    assert len(queries) == 1
    expected = [f"{side} resp_{number}" for number in range(12) for side in ("ask", "answer")]
    assert texts_of(history) == expected


@pytest.mark.parametrize("gone", ["resp_0", "resp_2", "resp_4"])
@pytest.mark.parametrize("way", ["deleted", "expired"])
def test_a_conversation_with_a_turn_missing_is_not_found(gone: str, way: str) -> None:
    make_keeper()
    last = keep_chain(5)
    if way == "deleted":
        delete_response(tenant="acme", response_id=gone)
    else:
        expire(gone)
    with pytest.raises(ResponseNotFound) as caught:
        load_history(tenant="acme", response_id=last)
    assert (caught.value.code, caught.value.status) == ("previous_response_not_found", 404)
    assert caught.value.param == "previous_response_id"
    assert f"'{gone}'" in caught.value.message


def test_whatever_is_called_a_response_that_is_none_or_leads_to_another_tenants_is_not_found() -> None:
    make_keeper()
    make_keeper("other")
    keep("resp_1")
    keep("resp_theirs", tenant="other")
    keep("resp_mine", "resp_theirs")
    with pytest.raises(ResponseNotFound):
        load_history(tenant="acme", response_id="resp_mine")
    for text in ("resp_theirs", "", "resp_unknown", "resp_\x00", "resp_1\n", "msg_1", "resp_" + "x" * 1000, "resp_' OR '1'='1"):
        for ask in (load_history, get_response, delete_response, require_response):
            with pytest.raises(ResponseNotFound):
                ask(tenant="acme", response_id=text)


@pytest.mark.parametrize(("limit", "most"), [("kept_turns", 3), ("kept_bytes", 400)], ids=["turns", "bytes"])
def test_a_conversation_that_is_too_long_is_refused_by_name(limit: str, most: int) -> None:
    make_keeper()
    last = keep_chain(5)
    set_limits(gateway={limit: most})
    assert len(load_history(tenant="acme", response_id="resp_1")) == 4
    with pytest.raises(BadRequest) as caught:
        load_history(tenant="acme", response_id=last)
    assert not isinstance(caught.value, ResponseNotFound)
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")
    assert str(most) in caught.value.message


def test_an_expired_answer_is_unreadable_at_once_and_deleted_by_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(gateway={"kept_batch": 2})
    make_keeper()
    keep_chain(6)
    for number in range(5):
        expire(f"resp_{number}")
    assert [is_found(f"resp_{number}") for number in (0, 5)] == [False, True]
    assert forget_expired_responses() == 5
    assert [row.pk for row in StoredResponse.objects.all()] == ["resp_5"]
    assert delete_expired_responses() == 0


def read_page(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"after": "", "limit": 20, "order": "asc", **changes}
    page: dict[str, Any] = json.loads(list_input_items(tenant="acme", response_id="resp_1", **arguments))
    return page


def test_items_are_listed_with_id_type_and_parts_as_clients_read_them() -> None:
    make_keeper()
    call = {"type": "function_call", "id": "fc_own", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "4", "id": None}
    parts = {"role": "user", "content": [{"type": "input_text", "text": "hi"}], "status": "in_progress"}
    keep("resp_1", input_items=[{"role": "assistant", "content": "hello"}, call, result, parts])

    assert read_page()["data"] == [
        {
            "id": "msg_1_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        },
        call,
        {**result, "id": "fco_1_2"},
        {**parts, "id": "msg_1_3", "type": "message"},
    ]
