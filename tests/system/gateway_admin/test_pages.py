"""Operators' pages of the gateway: what they show, how many queries that takes, and what their buttons do."""

from __future__ import annotations

import json
import re
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.management.commands.invite import let_propose
from gateway.admin import paginator
from gateway.admin.endings import explain_ending
from gateway.admin.stories import split_time
from gateway.errors import GatewayError
from gateway.models import ApiKey, GatewayProcess, Model, RequestRecord, StoredResponse, Tenant
from gateway.routing import Target
from gateway.services import allow_model, change_response_policy, create_alias, remember_models
from gateway.services.requests import find_records
from gateway.services.responses import keep_response
from gateway.services.traffic import FAILED, REFUSED
from gateway.services.waiting import explain_wait
from gateway.values import RequestOutcome, judge_outcome
from nodes.services.serving import Has, ServingBox
from nodes.states import Obstacle
from tests.fakes.clock import shift_clock
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, audited, make_node, make_presence
from tests.fakes.tenants import make_gateway, make_key, make_operator, make_record, make_tenant
from wire.contract import ErrorCode, RequestState
from wire.ids import new_uuid7

pytestmark = pytest.mark.django_db
MOST_QUERIES = 10
"""Session, operator, count, rows, and one for each filter whose choices are rows. None of them for each row."""
POLYGLOT = "\"'><img src=x onerror=alert(1)>{{7*7}}<script>alert(2)</script>"


@pytest.fixture
def stranger() -> Client:
    """The browser of an operator without any permission."""
    client = Client()
    client.force_login(make_operator("bob", is_superuser=False))
    return client


def make_rows(first: int) -> None:
    for number in range(first, first + 4):
        make_key(f"key {number}", tenant=f"tenant {number}", allowed_models=["tiny"])
        allow_model(name=f"model {number}", actor=ACTOR)
        make_record(model=f"model {number}", node_name=f"node {number}")
        make_gateway()


@pytest.mark.parametrize("page", ["tenant", "apikey", "model", "requestrecord", "gatewayprocess"])
def test_a_list_takes_as_many_queries_for_many_rows_as_for_few(boss: Client, page: str) -> None:
    counts = []
    for first in (0, 4):
        make_rows(first)
        with CaptureQueriesContext(connection) as queries:
            assert boss.get(reverse(f"admin:gateway_{page}_changelist")).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1] <= MOST_QUERIES


def test_a_new_key_is_shown_exactly_once(boss: Client) -> None:
    tenant = make_tenant()
    form: dict[str, Any] = {"name": "ci", "tenant": tenant.pk, "requests_per_minute": 30, "allowed_models": "b\na\n\n b "}
    answer = boss.post(reverse("admin:gateway_apikey_add"), {**form, "last_day": "2031-01-31", "priority": "high"})
    (text,) = set(re.findall(r"mst_[0-9A-Za-z_]{51}", answer.content.decode()))
    key = ApiKey.objects.get()
    assert "no-store" in answer["Cache-Control"]
    assert (key.requests_per_minute, key.allowed_models) == (30, ["a", "b"])
    assert key.expires_at is not None
    assert key.expires_at.isoformat() == "2031-02-01T00:00:00+00:00"
    for page, arguments in (("changelist", []), ("change", [key.pk])):
        assert text not in boss.get(reverse(f"admin:gateway_apikey_{page}", args=arguments)).content.decode()
    assert audited("api_key.create")[0].actor == "user:ada"


def test_a_key_is_revoked_by_the_answer_to_the_question(boss: Client) -> None:
    key, _ = make_key()
    page = boss.post(reverse("admin:gateway_apikey_confirm", args=[key.pk, "revoke"]), follow=True).content.decode()
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert f"Revoked the key {key.name}" in page
    assert audited("api_key.revoke")[0].actor == "user:ada"
    assert "revoked" in boss.get(reverse("admin:gateway_apikey_changelist")).content.decode()


def test_a_post_without_the_csrf_token_changes_nothing() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_operator())
    key, _ = make_key()
    assert client.post(reverse("admin:gateway_apikey_confirm", args=[key.pk, "revoke"])).status_code == 403
    key.refresh_from_db()
    assert key.revoked_at is None


def test_an_operator_without_permission_sees_and_does_nothing(stranger: Client) -> None:
    key, _ = make_key()
    assert stranger.get(reverse("admin:gateway_apikey_changelist")).status_code == 403
    assert stranger.get(reverse("admin:gateway_apikey_add")).status_code == 403
    assert stranger.post(reverse("admin:gateway_apikey_confirm", args=[key.pk, "revoke"])).status_code == 403
    key.refresh_from_db()
    assert key.revoked_at is None


def test_a_tenant_is_created_limited_and_switched_off_and_on(boss: Client) -> None:
    boss.post(reverse("admin:gateway_tenant_add"), {"name": "mobile"})
    tenant = Tenant.objects.get()
    boss.post(reverse("admin:gateway_tenant_confirm", args=[tenant.pk, "limits"]), {"requests_per_minute": "9"})
    boss.post(reverse("admin:gateway_tenant_confirm", args=[tenant.pk, "disable"]))
    tenant.refresh_from_db()
    assert (tenant.requests_per_minute, tenant.is_active) == (9, False)
    boss.post(reverse("admin:gateway_tenant_confirm", args=[tenant.pk, "enable"]))
    tenant.refresh_from_db()
    assert tenant.is_active


def test_a_declared_model_is_allowed_capped_and_disallowed(boss: Client) -> None:
    remember_models(names=["tiny"])
    model = Model.objects.get()
    url = "admin:gateway_model_confirm"
    boss.post(reverse(url, args=[model.pk, "allow"]))
    boss.post(reverse(url, args=[model.pk, "caps"]), {"max_tokens": "256", "max_prompt_chars": "", "max_queue": "7"})
    model.refresh_from_db()
    assert (model.allowed, model.max_tokens, model.max_queue) == (True, 256, 7)
    boss.post(reverse(url, args=[model.pk, "disallow"]))
    model.refresh_from_db()
    assert not model.allowed


FILTERS: dict[str, set[str]] = {
    "state=open": {"running"}, "state=wrong": {"failed", "rejected"}, "state=refused": {"rejected"},
    "state=completed": {"completed"}, "error=any": {"failed", "rejected"}, "error=NO_AVAILABLE_NODE": {"rejected"},
    "error=REQUEST_TIMEOUT": set(), "model=big": {"failed"}, "tenant=mobile": {"running"}, "node=attic": {"completed"},
    "period=1h": {"completed", "failed", "running", "rejected"}, "period=15m": {"completed", "running", "rejected"},
}  # fmt: skip


def test_requests_are_filtered(boss: Client) -> None:
    allow_model(name="big", actor=ACTOR)
    make_tenant("mobile")
    make_record(state=RequestState.COMPLETED, node_name="attic", node_id=make_gateway().pk)
    make_record(state=RequestState.FAILED, model="big", error_code="FORWARDED_REQUEST_FAILED", age_s=1800)
    make_record(state=RequestState.RUNNING, tenant="mobile")
    make_record(state=RequestState.REJECTED, status_code=400, error_code="BAD_REQUEST")
    make_record(state=RequestState.REJECTED, status_code=503, error_code="NO_AVAILABLE_NODE")
    for query, found in FILTERS.items():
        page = boss.get(reverse("admin:gateway_requestrecord_changelist") + f"?{query}")
        assert {record.state for record in page.context["cl"].result_list} == found, query


def search(boss: Client, text: str) -> list[uuid.UUID]:
    """Return the ids of the requests that the list shows for a search."""
    page = boss.get(reverse("admin:gateway_requestrecord_changelist"), {"q": text})
    return [record.pk for record in page.context["cl"].result_list]


def test_a_request_is_found_by_its_id_and_by_the_end_of_it_that_the_list_shows(boss: Client) -> None:
    wanted, _other = make_record(finished_at=timezone.now()), make_record(finished_at=timezone.now())
    waiting = make_record(state=RequestState.QUEUED)
    for record in (wanted, waiting):
        tail = record.printed_id[-12:]
        assert tail in boss.get(reverse("admin:gateway_requestrecord_changelist")).content.decode()
        for text in (record.printed_id, str(record.pk), f"  {record.printed_id} ", tail, tail.upper(), record.pk.hex[-20:]):
            assert search(boss, text) == [record.pk]
    assert search(boss, "not an id") == search(boss, "0" * 12) == search(boss, "0" * 8 + wanted.printed_id[-12:]) == []


def test_the_end_of_an_id_is_found_without_reading_every_row() -> None:
    record = make_record(finished_at=timezone.now())
    copied = ", ".join(str(field.column) for field in RequestRecord._meta.concrete_fields if not field.primary_key)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO gateway_requestrecord (id, {copied})"
            f" SELECT gen_random_uuid(), {copied} FROM gateway_requestrecord, generate_series(1, 2000) WHERE id = %s",
            [record.pk],
        )
        cursor.execute("ANALYZE gateway_requestrecord")
        cursor.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'gateway_requestrecord_tail'::regclass")
        assert cursor.fetchall() == [(True,)]
    with CaptureQueriesContext(connection) as queries:
        find_records(RequestRecord.objects.all(), "0" * 12)
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + next(query["sql"] for query in queries if "RIGHT(" in query["sql"]))
        lines = [line for (line,) in cursor.fetchall()]
    assert not [line for line in lines if "Seq Scan" in line]
    assert [line for line in lines if "_tail" in line]


def test_requests_are_found_by_the_name_of_a_model_a_tenant_or_a_key(boss: Client) -> None:
    allow_model(name="big", actor=ACTOR)
    key, _ = make_key("notebook", tenant="mobile")
    create_alias(name="gpt-4o", tenant_name=None, targets=[Target("big")], actor=ACTOR)
    by_model, by_alias = make_record(model="big"), make_record(model="big", asked_model="gpt-4o")
    by_key, by_tenant = make_record(key_id=key.pk), make_record(tenant="mobile")
    unknown, _old = make_record(model="gpt-9"), make_record(model="gpt-9", age_s=3 * 86_400)
    assert set(search(boss, "Big")) == {by_model.pk, by_alias.pk}
    assert search(boss, "gpt-4o") == [by_alias.pk]
    assert search(boss, "notebook") == [by_key.pk]
    assert search(boss, "mobile") == [by_tenant.pk]
    assert search(boss, "gpt-9") == [unknown.pk]
    assert search(boss, "nobody") == []


def test_a_long_table_is_estimated_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(gateway={"page_exact_rows": 3})
    for _ in range(5):
        make_record()
    rows = RequestRecord.objects.order_by("-created_at")
    with CaptureQueriesContext(connection) as queries:
        everything = paginator.EstimatedPaginator(rows, 2).count
        filtered = paginator.EstimatedPaginator(rows.filter(model="tiny"), 2).count
    assert everything >= 3
    assert filtered == 3
    assert all("LIMIT" in query["sql"] for query in queries if "COUNT" in query["sql"].upper())


def test_text_from_outside_is_shown_as_text(boss: Client) -> None:
    make_key(POLYGLOT[:80], allowed_models=[POLYGLOT])
    allow_model(name=POLYGLOT, actor=ACTOR)
    make_record(model=POLYGLOT, node_name=POLYGLOT, tenant=POLYGLOT[:80], key_name=POLYGLOT[:80])
    for page in ("apikey", "model", "requestrecord"):
        html = boss.get(reverse(f"admin:gateway_{page}_changelist")).content.decode()
        assert "<img src=x" not in html
        assert "<script>alert" not in html
        assert "{{7*7}}" in html


def test_the_page_of_a_request_says_how_it_ended_and_the_names_of_its_model(boss: Client) -> None:
    node = make_node("attic", model_names=["tiny"], cordoned=True)
    make_presence(node)
    changes: dict[str, Any] = {"model": "tiny", "asked_model": "gpt-4o-mini", "node_id": node.pk, "node_name": "attic"}
    failed = make_record(state=RequestState.FAILED, error_code="NODE_DRAINING", **changes)
    page = boss.get(reverse("admin:gateway_requestrecord_change", args=[failed.pk])).content.decode()
    assert "Every box that serves the model was being held back." in page
    assert "Now: Only attic has tiny, and it is cordoned. Uncordon attic" in page
    assert all(text in page for text in ("gpt-4o-mini", reverse("admin:nodes_node_change", args=[node.pk])))
    assert "data-open" not in page
    queued = make_record(state=RequestState.QUEUED, model="tiny")
    waiting = boss.get(reverse("admin:gateway_requestrecord_change", args=[queued.pk])).content.decode()
    assert "It waits: Only attic has tiny, and it is cordoned." in waiting
    assert "data-open" in waiting


ENDS: list[tuple[str, int, str, str, list[str]]] = [
    ("rejected", 400, "BAD_REQUEST", "", ["mst-is-refused", ">refused<", "has to change it"]),
    ("rejected", 503, "NO_AVAILABLE_NODE", "", ["mst-is-rejected", ">not accepted<", "queue"]),
    ("rejected", 400, "BAD_REQUEST", "below 0", ["The engine on attic refused the request with HTTP 400.", "below 0"]),
    ("failed", 500, "FORWARDED_REQUEST_FAILED", "CUDA <oom>", ["with HTTP 500.", "The engine said: <q>CUDA &lt;oom&gt;</q>"]),
    ("failed", 401, "FORWARDED_REQUEST_FAILED", "", ["turned the node away with HTTP 401.", "--backend-key"]),
    ("failed", 502, "FORWARDED_REQUEST_FAILED", "", ["in the log of the node"]),
]


def test_the_page_of_a_request_says_whose_fault_it_was_and_what_the_engine_said(boss: Client) -> None:
    for state, status, code, said, texts in ENDS:
        changes: dict[str, Any] = {"status_code": status, "error_code": code, "engine_error": said}
        record = make_record(node_name="attic", attempts=1, state=RequestState(state), **changes)
        page = boss.get(reverse("admin:gateway_requestrecord_change", args=[record.pk])).content.decode()
        assert [text for text in texts if text not in page] == []
        assert "are not kept" not in page


def test_the_rows_that_count_as_refused_and_failed_are_those_of_the_table() -> None:
    rows = [
        make_record(state=state, status_code=status) for state in RequestState for status in (None, 200, 399, 400, 499, 500)
    ]
    for condition, outcome in ((REFUSED, RequestOutcome.REFUSED), (FAILED, RequestOutcome.FAILED)):
        due = {row.pk for row in rows if judge_outcome(RequestState(row.state), row.status_code) is outcome}
        assert set(RequestRecord.objects.filter(condition).values_list("pk", flat=True)) == due


@pytest.mark.parametrize("off_s", [-3600, 3600], ids=["behind", "ahead"])
def test_whether_a_gateway_serves_does_not_depend_on_the_clock_of_the_page(
    boss: Client, monkeypatch: pytest.MonkeyPatch, off_s: int
) -> None:
    for host, silent_s in (("alive", 0), ("silent", 60)):
        GatewayProcess.objects.create(host=host, pid=1, heartbeat_at=Now() - timedelta(seconds=silent_s))
    make_gateway(stopped=True)
    shift_clock(monkeypatch, off_s)
    page = boss.get(reverse("admin:gateway_gatewayprocess_changelist")).content.decode()
    rows = {host: page.split(f">{host}<")[1].split("</tr>")[0] for host in ("alive", "silent")}
    assert "serving" in rows["alive"]
    assert "lost" in rows["silent"]
    assert "stopped" in page


LIST = "admin:gateway_storedresponse_changelist"
PAGE = "admin:gateway_storedresponse_change"


def keep(response_id: str, text: str = "a secret question", tenant: str = "research") -> None:
    make_tenant(tenant)
    change_response_policy(name=tenant, stores_responses=True, responses_kept_days=3, actor=ACTOR)
    body = json.dumps({"id": response_id, "output": [{"type": "message", "content": f"about {text}"}]}).encode()
    asked: list[Any] = [{"role": "user", "content": text}]
    keep_response(tenant=tenant, key_id=uuid.uuid4(), kept_days=3, model="tiny", previous_id="", input_items=asked, body=body)


def make_viewer(*permissions: str, name: str) -> Client:
    """Return the browser of an operator with these permissions on kept answers."""
    operator = make_operator(name, is_superuser=False)
    operator.user_permissions.add(*Permission.objects.filter(codename__in=[f"{name}_storedresponse" for name in permissions]))
    client = Client()
    client.force_login(operator)
    return client


def test_the_list_shows_no_prompt_and_reads_none(boss: Client) -> None:
    counts = []
    for first in (0, 4):
        for number in range(first, first + 4):
            keep(f"resp_{number}")
        with CaptureQueriesContext(connection) as queries:
            html = boss.get(reverse(LIST)).content.decode()
        assert "resp_0" in html
        assert "a secret question" not in html
        assert not [query for query in queries if '"gateway_storedresponse"."body",' in query["sql"]]
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 10


def test_only_who_may_view_kept_answers_sees_them_folded_and_as_text() -> None:
    keep("resp_1", POLYGLOT)
    for number, permissions in enumerate([(), ("change",), ("view",)]):
        viewer = make_viewer(*permissions, name=f"bob{number}")
        due = 200 if "view" in permissions else 403
        assert [viewer.get(url).status_code for url in (reverse(LIST), reverse(PAGE, args=["resp_1"]))] == [due, due]
    html = make_viewer("view", name="eve").get(reverse(PAGE, args=["resp_1"])).content.decode()
    assert (html.count("<summary") >= 2, "<img src=x" in html) == (True, False)
    assert "&lt;img src=x onerror=alert(1)&gt;{{7*7}}" in html


def test_who_is_invited_to_propose_may_not_read_prompts() -> None:
    keep("resp_1")
    bob = make_operator("bob", is_superuser=False)
    let_propose(bob)
    client = Client()
    client.force_login(bob)
    assert client.get(reverse("admin:gateway_requestrecord_changelist")).status_code == 200
    assert client.get(reverse(LIST)).status_code == 403


def test_a_tenants_policy_is_switched_on_and_off_by_the_answer_to_the_question(boss: Client) -> None:
    tenant = make_tenant()
    url = reverse("admin:gateway_tenant_confirm", args=[tenant.pk, "responses"])
    boss.post(url, {"stores_responses": "on", "responses_kept_days": "7"})
    tenant.refresh_from_db()
    assert (tenant.stores_responses, tenant.responses_kept_days) == (True, 7)
    assert "7 days" in boss.get(reverse("admin:gateway_tenant_changelist")).content.decode()
    boss.post(url, {"responses_kept_days": "7"})
    assert not Tenant.objects.get().stores_responses
    assert [event.actor for event in audited("tenant.response_policy")] == ["user:ada"] * 2


def test_what_is_kept_is_deleted_by_the_answer_to_the_question_alone(boss: Client) -> None:
    keep("resp_1")
    keep("resp_2", tenant="other")
    url = reverse("admin:gateway_tenant_confirm", args=[make_tenant().pk, "forget"])
    assert boss.get(url).status_code == 200
    assert StoredResponse.objects.count() == 2
    page = boss.post(url, follow=True).content.decode()
    assert "Deleted what was kept for research: 1 answers." in page
    assert [row.pk for row in StoredResponse.objects.all()] == ["resp_2"]
    assert audited("tenant.forget_responses")[0].detail == {"responses": 1}


def box(name: str = "attic", obstacle: Obstacle | None = None, **changes: Any) -> ServingBox:
    values: dict[str, Any] = {"has": Has.LOADED, "active": 0, "slots": 2}
    return ServingBox(new_uuid7(), name, obstacle=obstacle, **{**values, **changes})


def record(code: ErrorCode | str | None, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"state": RequestState.FAILED.value, "model": "tiny", "endpoint": "/v1/messages"}
    return RequestRecord(error_code=code, **{**values, **changes})


@pytest.mark.parametrize(
    ("boxes", "brief", "said"),
    [
        ([], "no node", "No node has tiny. Start a node that has it."),
        ([box(has=Has.COULD)], "not loaded", "attic could load it. Propose on the page of attic to load it."),
        ([box(has=Has.LOADING, percent=40)], "loading", "attic is loading tiny, 40 % so far."),
        ([box(active=2), box("den", active=3)], "nodes full", "is full: attic 2 of 2, den 3 of 2. It starts when one is done."),
        ([box(active=1)], "starting", "tiny is served by attic (1 of 2 slots free)."),
        ([box(obstacle=Obstacle.CORDONED)], "cordoned", "and it is cordoned. Uncordon attic, or load tiny on another node."),
        ([box(obstacle=Obstacle.TAKEN_BACK, owner="ana")], "taken back", "was taken back by its owner. Ask ana,"),
        ([box(obstacle=Obstacle.PROVIDER_OFF, provider="lab")], "provider off", "Enable the provider lab,"),
        ([box(obstacle=Obstacle.ERROR, last_error="CUDA")], "node in error", "reports an error. attic says: CUDA"),
        ([box(obstacle=Obstacle.ERROR)], "node in error", "Look at the page of attic and at its log."),
        ([box(obstacle=Obstacle.LATE)], "node late", "attic gets no new work until it is heard again."),
        ([box(obstacle=Obstacle.SILENT)], "node offline", "and it is offline. Check the power of attic,"),
        ([box(obstacle=Obstacle.SILENT), box("den", Obstacle.DRAINING)], "draining", "attic is offline, den is being drained."),
        ([box(str(n), Obstacle.SILENT) for n in range(5)], "node offline", "2 is offline and 2 more."),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_what_stands_in_the_way_is_said_and_what_to_do(boxes: list[ServingBox], brief: str, said: str) -> None:
    wait = explain_wait("tiny", boxes)
    assert wait.brief == brief
    assert said in f"{wait.reason} {wait.advice}"


UNRECORDED = {ErrorCode.INVALID_API_KEY, ErrorCode.INVALID_ADMIN_TOKEN, ErrorCode.NOT_FOUND, ErrorCode.NOT_PERMITTED}
"""Nobody is known then in whose name a record could be."""


def list_errors(kind: type[GatewayError]) -> list[type[GatewayError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in list_errors(below))]


def test_every_way_in_which_a_gateway_ends_a_request_is_explained() -> None:
    errors = [error for error in list_errors(GatewayError) if error.__module__ == "gateway.errors"]
    codes = {error.code for error in errors} - UNRECORDED
    assert len(codes) > 10
    for code in sorted(codes | {ErrorCode.CLIENT_CLOSED_REQUEST}):
        ending = explain_ending(record(code))
        assert ending is not None, code
        assert "this code" not in ending.what, code


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (record(None), None),
        (record(ErrorCode.NO_AVAILABLE_NODE), "No node took the request in time"),
        (record(ErrorCode.NO_AVAILABLE_NODE, state="rejected"), "The queue of the model was full"),
        (record(ErrorCode.REQUEST_TIMEOUT, attempts=1), "longer than a request may take"),
        (record(ErrorCode.FORWARDED_REQUEST_FAILED, status_code=429), "The engine had no room (HTTP 429)."),
        (record("FORWARDED_REQUEST_FAILED", status_code=200, is_streaming=True, bytes_out=1234), "after 1,234 bytes"),
    ],
)
def test_an_ending_says_what_the_record_knows(ended: RequestRecord, said: str | None) -> None:
    ending = explain_ending(ended)
    assert ending is None if said is None else ending is not None and said in ending.what


def test_the_time_of_a_request_is_split_without_a_rest() -> None:
    split = split_time(record(None, attempts=1, queue_ms=100, ttfb_ms=250, latency_ms=1000))
    assert [(part.name, part.ms, part.start, part.share) for part in split] == [
        ("queue", 100, 0, 10), ("first", 150, 10, 15), ("answer", 750, 25, 75),
    ]  # fmt: skip
    assert [part.ms for part in split_time(record(None, attempts=1, queue_ms=90, ttfb_ms=20, latency_ms=50))] == [50, 0, 0]
    assert split_time(record(None, latency_ms=5)) == split_time(record(None, attempts=1)) == ()
