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

from controlplane.commands.people import let_propose
from gateway.admin.callers import CHAT_PATH, choose_chat_model
from gateway.admin.requests import EstimatedPaginator
from gateway.errors import GatewayError
from gateway.models import ApiKey, GatewayProcess, Model, RequestDay, RequestRecord, StoredResponse, Tenant
from gateway.routing import Target
from gateway.services.explanations import explain_ending, explain_wait
from gateway.services.models import allow_model, create_alias, remember_models
from gateway.services.requests import FAILED, REFUSED, find_id
from gateway.services.responses import keep_response
from gateway.services.tenants import change_response_policy
from gateway.values import Dimension, RequestOutcome, judge_outcome
from nodes.services.availability import Has, ServingNode
from nodes.states import Unavailable
from tests.fakes.clock import shift_clock
from tests.fakes.limits import set_limits
from tests.fakes.nodes import (
    ACTOR,
    audited,
    make_gateway,
    make_key,
    make_node,
    make_operator,
    make_presence,
    make_record,
    make_tenant,
)
from wire.contract import ErrorCode, RequestState
from wire.ids import new_uuid7

pytestmark = pytest.mark.django_db
MOST_QUERIES = 12
"""Session, operator, count, rows, and one for each filter whose choices are rows. None of them for each row."""
POLYGLOT = "\"'><img src=x onerror=alert(1)>{{7*7}}<script>alert(2)</script>"


def make_rows(first: int) -> None:
    for number in range(first, first + 4):
        make_key(f"key {number}", tenant=f"tenant {number}", allowed_models=["tiny"])
        allow_model(name=f"model {number}", actor=ACTOR)
        create_alias(name="x", tenant_name=f"tenant {number}", targets=[Target(f"model {number}")], actor=ACTOR)
        make_record(model=f"model {number}", node_name=f"node {number}")
        make_gateway()


@pytest.mark.parametrize("page", ["tenant", "apikey", "model", "modelalias", "requestrecord", "gatewayprocess"])
def test_a_list_takes_as_many_queries_for_many_rows_as_for_few(boss: Client, page: str) -> None:
    counts = []
    for first in (0, 4):
        make_rows(first)
        with CaptureQueriesContext(connection) as queries:
            assert boss.get(reverse(f"admin:gateway_{page}_changelist")).status_code == 200
        counts.append(len(queries))
    assert counts[0] == counts[1] <= MOST_QUERIES + (page == "modelalias")


def test_a_new_key_is_shown_exactly_once(boss: Client) -> None:
    tenant = make_tenant()
    form: dict[str, Any] = {"name": "ci", "tenant": tenant.pk, "requests_per_minute": 30, "allowed_models": ["b", "a"]}
    for name in ("a", "b"):
        allow_model(name=name, actor=ACTOR)
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


CHANGES: list[tuple[str, str, dict[str, str], dict[str, object]]] = [
    ("tenant", "limits", {"requests_per_minute": "9"}, {"requests_per_minute": 9}),
    ("tenant", "weight", {"weight": "250"}, {"weight": 250}),
    ("tenant", "disable", {}, {"is_active": False}),
    ("tenant", "enable", {}, {"is_active": True}),
    ("tenant", "responses", {"stores_responses": "on", "responses_kept_days": "7"}, {"stores_responses": True}),
    ("tenant", "responses", {"responses_kept_days": "7"}, {"stores_responses": False, "responses_kept_days": 7}),
    ("model", "allow", {}, {"allowed": True}),
    ("model", "caps", {"max_tokens": "256", "max_prompt_chars": "", "max_queue": "7"}, {"max_tokens": 256, "max_queue": 7}),
    ("model", "details", {"fallbacks": "c\n\n", "context_tokens": "8192", "tokenizer": "qwen3", "tidy": "on", "resumes": "on"},
     {"fallbacks": ["c"], "context_tokens": 8192, "tokenizer": "qwen3", "tidy": True, "resumes": True}),
    ("model", "weights", {"latency": "0.5", "affinity": "0"}, {"score_weights": {"latency": 0.5, "affinity": 0.0}}),
    ("model", "disallow", {}, {"allowed": False}),
]  # fmt: skip


def test_rows_change_by_the_answer_to_the_question_alone(boss: Client) -> None:
    boss.post(reverse("admin:gateway_tenant_add"), {"name": "research"})
    remember_models(names=["tiny", "c"])
    rows: dict[str, Any] = {"tenant": Tenant.objects.get(), "model": Model.objects.get(name="tiny")}
    for kind, change, form, expected in CHANGES:
        url = reverse(f"admin:gateway_{kind}_confirm", args=[rows[kind].pk, change])
        before = type(rows[kind]).objects.values(*expected).get(pk=rows[kind].pk)
        assert boss.get(url).status_code == 200
        assert type(rows[kind]).objects.values(*expected).get(pk=rows[kind].pk) == before
        boss.post(url, form)
        assert type(rows[kind]).objects.values(*expected).get(pk=rows[kind].pk) == expected
    assert [event.actor for event in audited("tenant.response_policy")] == ["user:ada"] * 2
    key, _ = make_key()
    boss.post(reverse("admin:gateway_apikey_confirm", args=[key.pk, "revoke"]))
    key.refresh_from_db()
    assert (key.revoked_at is not None, audited("api_key.revoke")[0].actor) == (True, "user:ada")
    keep("resp_1")
    keep("resp_2", tenant="other")
    url = reverse("admin:gateway_tenant_confirm", args=[rows["tenant"].pk, "forget"])
    assert (boss.get(url).status_code, StoredResponse.objects.count()) == (200, 2)
    assert "Deleted 1 answer of research." in boss.post(url, follow=True).content.decode()
    assert [row.pk for row in StoredResponse.objects.all()] == ["resp_2"]
    assert audited("tenant.forget_responses")[0].detail == {"responses": 1}


def test_a_rotated_key_has_a_new_text_that_is_shown_once_and_keeps_all_else(boss: Client) -> None:
    key, old = make_key()
    page = boss.post(reverse("admin:gateway_apikey_confirm", args=[key.pk, "rotate"]))

    (text,) = set(re.findall(r"mst_[0-9A-Za-z_]{51}", page.text))
    rotated = ApiKey.objects.get()
    assert text != old
    assert (rotated.pk, rotated.name, rotated.budgets) == (key.pk, key.name, key.budgets)
    assert "no-store" in page["Cache-Control"]
    assert audited("api_key.rotate")[0].detail == {"from": key.keyid, "keyid": rotated.keyid}


def test_a_first_question_goes_to_a_served_model_that_answers_chats() -> None:
    make_presence(make_node("a", model_names=["bge"], model_endpoints={"bge": ["/v1/embeddings"]}))
    make_presence(make_node("b", model_names=["mixed", "tiny"], model_endpoints={"mixed": [CHAT_PATH]}))
    make_presence(make_node("c", model_names=["mixed"], model_endpoints={"mixed": ["/v1/embeddings"]}))
    asked: tuple[list[str], ...] = (["bge", "tiny"], ["bge", "gone", "mixed"], ["bge", "gone"], ["bge"], [])
    assert [choose_chat_model(names) for names in asked] == ["tiny", "mixed", "gone", "bge", ""]


def test_lists_of_callers_say_what_they_were_used_for(boss: Client) -> None:
    key, _ = make_key()
    today = timezone.now().replace(hour=0, minute=0, second=0, microsecond=0)
    for dimension, name in ((Dimension.KEY, str(key.pk)), (Dimension.TENANT, key.tenant.name)):
        RequestDay.objects.create(dimension=dimension.value, at=today, name=name, served=2, failed=1)
    for page in ("apikey", "tenant"):
        assert "3 requests" in boss.get(reverse(f"admin:gateway_{page}_changelist")).text


def test_neither_a_post_without_the_csrf_token_nor_an_operator_without_permission_changes_anything() -> None:
    key, _ = make_key()
    revoke = reverse("admin:gateway_apikey_confirm", args=[key.pk, "revoke"])
    forged, stranger = Client(enforce_csrf_checks=True), Client()
    forged.force_login(make_operator())
    stranger.force_login(make_operator("bob", is_superuser=False))
    assert [client.post(revoke).status_code for client in (forged, stranger)] == [403, 403]
    assert [stranger.get(reverse(f"admin:gateway_apikey_{page}")).status_code for page in ("changelist", "add")] == [403, 403]
    key.refresh_from_db()
    assert key.revoked_at is None


ALL = {"completed", "failed", "running", "rejected"}
FILTERS: dict[str, set[str]] = {
    "state=open": {"running"}, "state=wrong": {"failed", "rejected"}, "state=refused": {"rejected"},
    "state=completed": {"completed"}, "error=any": {"failed", "rejected"}, "error=NO_AVAILABLE_NODE": {"rejected"},
    "error=REQUEST_TIMEOUT": set(), "model=big": {"failed"}, "tenant=mobile": {"running"}, "node=attic": {"completed"},
    "since=1795000000": ALL,
    "range=1h": {"completed", "failed", "running", "rejected"}, "range=15min": {"completed", "running", "rejected"},
    "slower=2000": {"failed"}, "key=notebook": {"completed", "failed", "running", "rejected"}, "key=nobody": set(),
    "state=wrong&model=big&error=FORWARDED_REQUEST_FAILED": {"failed"}, "state=nonsense&error=nonsense&slower=x&since=x": ALL,
    "since=2020-01-01T00:00:00Z&until=2020-01-02T00:00:00Z": set(), "since=2020-01-01": ALL,
}  # fmt: skip


def test_requests_are_filtered(boss: Client) -> None:
    allow_model(name="big", actor=ACTOR)
    make_tenant("mobile")
    make_record(state=RequestState.COMPLETED, node_name="attic", node_id=make_gateway().pk)
    make_record(state=RequestState.FAILED, model="big", error_code="FORWARDED_REQUEST_FAILED", age_s=1800, latency_ms=2000)
    make_record(state=RequestState.RUNNING, tenant="mobile")
    make_record(state=RequestState.REJECTED, status_code=400, error_code="BAD_REQUEST")
    make_record(state=RequestState.REJECTED, status_code=503, error_code="NO_AVAILABLE_NODE")
    for query, found in FILTERS.items():
        page = boss.get(reverse("admin:gateway_requestrecord_changelist") + f"?{query}")
        assert {row.record.state for row in page.context["rows"]} == found, query


def search(boss: Client, text: str) -> list[uuid.UUID]:
    """Return the ids of the requests that the list shows for a search."""
    page = boss.get(reverse("admin:gateway_requestrecord_changelist"), {"q": text})
    return [row.record.pk for row in page.context["rows"]]


def test_a_request_is_found_by_its_id_and_by_the_end_of_it_that_the_list_shows(boss: Client) -> None:
    wanted, _other = make_record(finished_at=timezone.now()), make_record(finished_at=timezone.now())
    waiting = make_record(state=RequestState.QUEUED)
    for record in (wanted, waiting):
        tail = record.printed_id[-12:]
        assert tail[-8:] in boss.get(reverse("admin:gateway_requestrecord_changelist")).content.decode()
        for text in (
            record.printed_id,
            str(record.pk),
            f"  {record.printed_id} ",
            tail,
            tail[-8:],
            tail.upper(),
            record.pk.hex[-20:],
        ):
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
        find_id(RequestRecord.objects.all(), "0" * 12)
    with connection.cursor() as cursor:
        cursor.execute("EXPLAIN " + next(query["sql"] for query in queries if "RIGHT(" in query["sql"]))
        lines = [line for (line,) in cursor.fetchall()]
    assert not [line for line in lines if "Seq Scan" in line]
    assert [line for line in lines if "_tail" in line]


def test_a_long_table_is_estimated_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(gateway={"page_exact_rows": 3})
    for _ in range(5):
        make_record()
    rows = RequestRecord.objects.order_by("-created_at")
    with CaptureQueriesContext(connection) as queries:
        everything = EstimatedPaginator(rows, 2).count
        filtered = EstimatedPaginator(rows.filter(model="tiny"), 2).count
    assert everything >= 3
    assert filtered == 3
    assert all("LIMIT" in query["sql"] for query in queries if "COUNT" in query["sql"].upper())


def test_text_from_outside_is_shown_as_text(boss: Client) -> None:
    make_key(POLYGLOT[:80], allowed_models=[POLYGLOT], tenant=POLYGLOT[:80])
    allow_model(name=POLYGLOT, actor=ACTOR)
    alias = create_alias(name="x" + POLYGLOT, tenant_name=POLYGLOT[:80], targets=[Target(POLYGLOT)], actor=ACTOR)
    make_record(model=POLYGLOT, node_name=POLYGLOT, tenant=POLYGLOT[:80], key_name=POLYGLOT[:80])
    pages = [reverse(f"admin:gateway_{page}_changelist") for page in ("apikey", "model", "requestrecord", "modelalias")]
    pages += [reverse("admin:gateway_modelalias_change", args=[alias.pk])]
    for page in (*pages, reverse("admin:gateway_modelalias_confirm", args=[alias.pk, "targets"])):
        html = boss.get(page).content.decode()
        assert ("<img src=x" in html, "<script>alert" in html, "{{7*7}}" in html) == (False, False, True), page


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
    invited = make_operator("bob", is_superuser=False)
    let_propose(invited)
    client = Client()
    client.force_login(invited)
    pages = [reverse("admin:gateway_requestrecord_changelist"), reverse(LIST)]
    assert [client.get(page).status_code for page in pages] == [200, 403], "who is invited to propose reads no prompts"


def box(name: str = "attic", unavailable: Unavailable | None = None, **changes: Any) -> ServingNode:
    values: dict[str, Any] = {"has": Has.LOADED, "active": 0, "slots": 2}
    return ServingNode(new_uuid7(), name, unavailable=unavailable, **{**values, **changes})


def record(code: ErrorCode | str | None, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"state": RequestState.FAILED.value, "model": "tiny", "endpoint": "/v1/messages"}
    return RequestRecord(error_code=code, **{**values, **changes})


@pytest.mark.parametrize(
    ("boxes", "brief", "said"),
    [
        ([], "no node", "No node has tiny. Check the model name, or load it on a node."),
        ([box(has=Has.COULD)], "not loaded", "attic could load it. Propose on the page of attic to load it."),
        ([box(has=Has.LOADING, percent=40)], "loading", "attic is loading tiny, 40 % so far."),
        ([box(active=2), box("den", active=3)], "nodes full", "is full: attic 2 of 2, den 3 of 2. It starts when one is done."),
        ([box(active=1)], "starting", "tiny is served by attic (1 of 2 slots free)."),
        (
            [box(unavailable=Unavailable.CORDONED)],
            "cordoned",
            "and it is cordoned. Uncordon attic, or load tiny on another node.",
        ),
        ([box(unavailable=Unavailable.TAKEN_BACK, owner="ana")], "taken back", "was taken back by its owner. Ask ana,"),
        ([box(unavailable=Unavailable.PROVIDER_OFF, provider="lab")], "provider off", "Enable the provider lab,"),
        ([box(unavailable=Unavailable.ERROR, last_error="CUDA")], "node in error", "reports an error. attic says: CUDA"),
        ([box(unavailable=Unavailable.ERROR)], "node in error", "Look at the page of attic and at its log."),
        ([box(unavailable=Unavailable.LATE)], "node late", "attic gets no new work until it is heard again."),
        ([box(unavailable=Unavailable.SILENT)], "node offline", "and it is offline. Check the power of attic,"),
        (
            [box(unavailable=Unavailable.SILENT), box("den", Unavailable.DRAINING)],
            "draining",
            "attic is offline, den is being drained.",
        ),
        ([box(str(n), Unavailable.SILENT) for n in range(5)], "node offline", "2 is offline and 2 more."),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_what_stands_in_the_way_is_said_and_what_to_do(boxes: list[ServingNode], brief: str, said: str) -> None:
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
    for code in sorted(codes | {ErrorCode.CLIENT_CLOSED_REQUEST, ErrorCode.TICKET_UNUSED}):
        ending = explain_ending(record(code))
        assert ending is not None, code
        assert "this code" not in str(ending.what), code
