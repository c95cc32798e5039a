"""Tenants, keys and the allow-list change through one function each, which also writes the audit."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test import Client
from django.utils import timezone
from pytest_django import DjangoCaptureOnCommitCallbacks

from controlplane.tasks import sweep
from core.limits import GatewayLimits, limits
from gateway.models import ApiKey, GatewayProcess, Model, RequestRecord
from gateway.request.models import Catalogue
from gateway.services.errors import InvalidValue, KeyRevoked, ModelNotFound, NameTaken, TenantNotFound
from gateway.services.keys import change_key_limits, create_api_key, revoke_api_key
from gateway.services.models import (
    allow_declared,
    allow_model,
    change_model_canary,
    change_model_weights,
    disallow_model,
    is_model_allowed,
    remember_models,
)
from gateway.services.requests import close_orphaned_requests, read_expiring_keys
from gateway.services.tenants import create_tenant
from gateway.tasks import (
    ADVISORY_LOCK,
    DEFAULT_PARTITION,
    RECONCILE_LOCK,
    TABLE,
    PartitionsBusy,
    list_partition_days,
    maintain_day_partitions,
    partition_name,
    reconcile_requests,
)
from gateway.tasks import maintain_partitions as maintain_task
from gateway.values import Priority, Weights
from governance.admin_tokens import create_admin_token
from nodes.services.credentials import create_credential, create_provider
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
from tests.fakes.waiting import wait_until
from wire.bridge import MUSTER_V1
from wire.contract import FINAL_REQUEST_STATES, OPEN_REQUEST_STATES, RequestState
from wire.ids import format_id, new_uuid7

pytestmark = pytest.mark.django_db


def test_what_cannot_be_made_is_refused_and_a_tenant_is_created_once_and_audited() -> None:
    for name in ("", "   ", "x" * 81, "line\nbreak", "nul\x00", "\u202eevil"):
        with pytest.raises(InvalidValue) as refusal:
            create_tenant(name=name, actor=ACTOR)
        assert refusal.value.param == "name"
    for limit in (0, -1, 2**31):
        with pytest.raises(InvalidValue) as refusal:
            create_tenant(name="research", requests_per_minute=limit, actor=ACTOR)
        assert refusal.value.param == "requests_per_minute"
    create_tenant(name=" research ", requests_per_minute=60, actor=ACTOR)
    assert [(event.actor, event.target) for event in audited("tenant.create")] == [(ACTOR, "research")]
    with pytest.raises(NameTaken):
        create_tenant(name="research", actor=ACTOR)
    with pytest.raises(TenantNotFound):
        create_api_key(name="k", tenant_name="nobody", actor=ACTOR)
    with pytest.raises(InvalidValue) as refusal:
        make_key(expires_at=timezone.now() - timedelta(seconds=1))
    assert refusal.value.param == "expires_at"


def test_a_key_is_stored_as_a_hash_and_never_in_the_audit() -> None:
    key, text = make_key(requests_per_minute=10, allowed_models=["b", "a", "a"])
    assert bytes(ApiKey.objects.get().digest) == hashlib.sha256(text.encode()).digest()
    assert key.allowed_models == ["a", "b"]
    event = audited("api_key.create")[0]
    assert text not in str(event.detail)
    assert event.detail["keyid"] == key.keyid


def test_revoking_a_key_is_for_good_and_happens_once() -> None:
    key, _ = make_key()
    first = revoke_api_key(key_id=key.pk, actor=ACTOR)
    second = revoke_api_key(key_id=key.pk, actor=ACTOR)
    assert first.revoked_at == second.revoked_at
    assert first.updated_at > key.updated_at
    assert len(audited("api_key.revoke")) == 1
    with pytest.raises(KeyRevoked):
        change_key_limits(key_id=key.pk, requests_per_minute=1, allowed_models=(), actor=ACTOR)


def test_a_key_has_a_priority_that_stays_until_it_is_changed() -> None:
    assert make_key("plain")[0].priority == "normal"
    key, _ = make_key(priority="low")
    kept = change_key_limits(key_id=key.pk, requests_per_minute=5, allowed_models=(), actor=ACTOR)
    assert kept.priority == "low"
    changed = change_key_limits(key_id=key.pk, requests_per_minute=5, allowed_models=(), priority="high", actor=ACTOR)
    assert changed.priority == "high"
    assert audited("api_key.limits")[-1].detail["to"]["priority"] == "high"
    assert dict(Catalogue(GatewayLimits()).load_keys(None))[key.keyid].caller.priority is Priority.HIGH


def test_a_model_is_allowed_and_disallowed() -> None:
    assert not is_model_allowed("tiny")
    allow_model(name="tiny", max_tokens=100, actor=ACTOR)
    assert is_model_allowed("tiny")
    disallow_model(name="tiny", actor=ACTOR)
    assert not is_model_allowed("tiny")
    assert Model.objects.get().max_tokens == 100
    with pytest.raises(ModelNotFound):
        disallow_model(name="other", actor=ACTOR)


def test_what_a_trusted_credential_declares_is_allowed_once_and_never_against_an_operator() -> None:
    remember_models(names=["seen"])
    allow_model(name="taken-back", actor=ACTOR)
    disallow_model(name="taken-back", actor=ACTOR)
    declared = dict.fromkeys(("seen", "new", "taken-back"), "rigs")
    assert allow_declared(declared) == ["new", "seen"]
    assert allow_declared(declared) == []
    assert [is_model_allowed(name) for name in declared] == [True, True, False]
    assert [(event.actor, event.target) for event in audited("model.allow")[-2:]] == [
        ("credential:rigs", "new"), ("credential:rigs", "seen"),
    ]  # fmt: skip
    allow_model(name="taken-back", actor=ACTOR)
    disallow_model(name="seen", actor=ACTOR)
    assert allow_declared(declared) == []


def test_the_update_remembers_what_operators_took_back_before_it() -> None:
    remember_models(names=["seen"])
    for name in ("kept", "back", "again"):
        allow_model(name=name, actor=ACTOR)
    disallow_model(name="back", actor=ACTOR)
    disallow_model(name="again", actor=ACTOR)
    allow_model(name="again", actor=ACTOR)
    Model.objects.update(refused=False)
    with connection.cursor() as cursor:
        cursor.execute(import_module("gateway.migrations.0024_refused_before").FIND)
    assert dict(Model.objects.values_list("name", "refused")) == {"seen": False, "kept": False, "back": True, "again": False}


def test_names_that_nodes_make_up_do_not_fill_the_list(caplog: pytest.LogCaptureFixture) -> None:
    set_limits(gateway={"known_models": 3})
    allow_model(name="tiny", actor=ACTOR)
    assert remember_models(names=["a", "b", "c", "tiny"]) == 2
    assert remember_models(names=["d"]) == 0
    assert set(Model.objects.values_list("name", flat=True)) == {"tiny", "a", "b"}
    assert "models.too_many_names noted=0 left_out=1" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda: create_tenant(name="other", actor=ACTOR),
        lambda: make_key("other"),
        lambda: allow_model(name="other", actor=ACTOR),
        lambda: remember_models(names=["declared"]),
    ],
)
def test_every_change_sends_one_hint_after_the_commit(
    change: Callable[[], object], django_capture_on_commit_callbacks: DjangoCaptureOnCommitCallbacks
) -> None:
    make_tenant()
    with django_capture_on_commit_callbacks() as callbacks:
        change()
    assert len(callbacks) == 1


def test_gateways_learn_the_weights_of_models_and_tenants_and_a_tenant_is_weighed_over_rest() -> None:
    make_tenant("research")
    make_key("k")
    allow_model(name="m", actor=ACTOR)
    change_model_weights(name="m", weights={"affinity": 0.4}, actor=ACTOR)
    admin = Client(headers={"authorization": f"Bearer {create_admin_token(name='t', actor=ACTOR)[1]}"})
    answer = admin.patch("/api/v1/tenants/research", {"weight": 250}, "application/json")
    assert answer.json() == {"name": "research", "is_active": True, "requests_per_minute": None, "weight": 250}
    assert admin.get("/api/v1/tenants").json() == {"tenants": [answer.json()]}
    assert admin.get("/api/v1/tenants/research").json() == answer.json()
    assert [event.detail for event in audited("tenant.weight")] == [{"from": 100, "to": 250}]
    assert admin.patch("/api/v1/tenants/research", {"weight": 0}, "application/json").status_code == 400
    assert admin.patch("/api/v1/tenants/nobody", {"weight": 9}, "application/json").status_code == 404
    catalogue = Catalogue(GatewayLimits())
    catalogue.apply_models(catalogue.load_models())
    weights = catalogue.weights
    assert weights == {"m": Weights(0.25, 0.25, 0.20, 0.20, 0.4)}
    assert [entry.caller.weight for _, entry in catalogue.load_keys(None)] == [2.5]
    change_model_weights(name="m", weights={}, actor=ACTOR)
    catalogue.apply_models(catalogue.load_models())
    assert weights == {}
    for wrong in ({"affinity": 1.5}, {"speed": 1.0}):
        with pytest.raises(InvalidValue, match="Weights look like"):
            change_model_weights(name="m", weights=wrong, actor=ACTOR)


def test_a_canary_question_is_set_and_taken_away_and_one_that_would_tell_nothing_is_refused() -> None:
    allow_model(name="m", actor=ACTOR)
    change_model_canary(name="m", question=" What is 17 times 3? ", answer="51", actor=ACTOR)
    (entry,) = Catalogue(GatewayLimits()).load_models()
    assert (entry.canary_question, entry.canary_answer) == ("What is 17 times 3?", "51")
    change_model_canary(name="m", question="", answer="", actor=ACTOR)
    assert [event.detail for event in audited("model.canary")] == [{"is_asked": True}, {"is_asked": False}]
    for question, answer, param in TELLS_NOTHING:
        with pytest.raises(InvalidValue) as refusal:
            change_model_canary(name="m", question=question, answer=answer, actor=ACTOR)
        assert refusal.value.param == param
    assert Catalogue(GatewayLimits()).load_models()[0].canary_question == ""


TELLS_NOTHING = [
    ("What is 17 times 3?", "", "answer"), ("", "51", "question"), ("Say Paris.", "paris", "answer"),
    ("two\nlines", "x", "question"), ("q", "x" * 201, "answer"), ("q" * 501, "x", "question"),
]  # fmt: skip


DEAD_AFTER_S = 0.2
"""Short, because nobody counts as dead before the test's own database server has run for that long."""


@pytest.mark.parametrize("state", sorted(OPEN_REQUEST_STATES))
def test_open_requests_of_a_silent_gateway_are_interrupted(state: RequestState) -> None:
    record = make_record(gateway_id=make_gateway(silent_s=60).pk, state=state, age_s=30)
    assert close_orphaned_requests(dead_after_s=DEAD_AFTER_S, confirm_s=0.01) == 1
    record.refresh_from_db()
    assert (record.state, record.error_code) == ("interrupted", "REQUEST_INTERRUPTED")
    assert record.finished_at is not None
    assert record.latency_ms is not None
    assert 30_000 <= record.latency_ms < 60_000


def test_gateways_that_could_not_write_while_the_database_stood_still_are_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, dead = make_gateway(silent_s=60), make_gateway(silent_s=60)
    rows = [make_record(gateway_id=one.pk, state=RequestState.RUNNING, age_s=60) for one in (alive, dead)]

    def write_heartbeat(_seconds: float) -> None:
        GatewayProcess.objects.filter(pk=alive.pk).update(heartbeat_at=Now() + timedelta(hours=1))

    monkeypatch.setattr("gateway.services.requests.clock", SimpleNamespace(sleep=write_heartbeat))  # not that of every thread
    assert close_orphaned_requests(dead_after_s=DEAD_AFTER_S) == 1
    assert [RequestRecord.objects.get(pk=row.pk).state for row in rows] == ["running", "interrupted"]


def test_nobody_is_dead_before_a_database_that_began_anew_has_run_for_as_long_or_its_first_heartbeat_is_due() -> None:
    record = make_record(gateway_id=make_gateway(silent_s=2e8).pk, state=RequestState.RUNNING, age_s=60)
    assert close_orphaned_requests(dead_after_s=1e8, confirm_s=0.01) == 0
    record.refresh_from_db()
    assert record.state == "running"
    RequestRecord.objects.all().delete()
    for age_s in (1, 11):
        make_record(gateway_id=new_uuid7(), state=RequestState.QUEUED, age_s=age_s)
    assert close_orphaned_requests() == 1


@pytest.mark.parametrize("state", sorted(FINAL_REQUEST_STATES))
def test_a_final_state_is_never_changed(state: RequestState) -> None:
    record = make_record(gateway_id=make_gateway(stopped=True).pk, state=state, age_s=60)
    assert close_orphaned_requests(dead_after_s=DEAD_AFTER_S) == 0
    record.refresh_from_db()
    assert (record.state, record.error_code, record.finished_at) == (state.value, None, None)


def test_more_than_one_batch_is_closed_in_one_call() -> None:
    set_limits(gateway={"orphans_batch": 3})
    gateway = make_gateway(stopped=True)
    for _ in range(7):
        make_record(gateway_id=gateway.pk, state=RequestState.RUNNING)
    assert close_orphaned_requests() == 7


@pytest.mark.django_db(transaction=True)
def test_a_row_that_is_being_written_is_left_for_the_next_call_and_a_second_worker_leaves_the_work_to_the_first() -> None:
    gateway, closed = make_gateway(stopped=True), list[int]()
    busy, _other = (make_record(gateway_id=gateway.pk, state=RequestState.RUNNING) for _ in range(2))
    with transaction.atomic():
        RequestRecord.objects.filter(pk=busy.pk).update(state="completed")
        in_thread(lambda: closed.append(close_orphaned_requests())).join(30)
    assert closed == [1]
    busy.refresh_from_db()
    assert busy.state == "completed"
    make_record(gateway_id=gateway.pk, state=RequestState.RUNNING)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [RECONCILE_LOCK])
        in_thread(lambda: closed.append(reconcile_requests())).join(30)
    assert closed == [1, 0]
    assert reconcile_requests() == 1


def test_a_sweep_takes_every_look_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    record = make_record(gateway_id=make_gateway(stopped=True).pk, state=RequestState.RUNNING)
    presence = make_presence(make_node(), age_s=16, connected=True, protocol=MUSTER_V1)

    def spoil(execute: Callable[..., object], sql: str, *rest: Any) -> object:
        if "gateway_requestrecord" in sql:
            raise KeyError("a defect")
        return execute(sql, *rest)

    with connection.execute_wrapper(spoil):
        sweep()
    presence.refresh_from_db()
    assert presence.reported_status == "offline"
    assert "sweep_failed look=reconcile_requests" in caplog.text
    sweep()
    record.refresh_from_db()
    assert record.state == "interrupted"


TODAY = date(2031, 5, 17)
NOON = datetime(2031, 5, 17, 12, tzinfo=UTC)
PATIENT_MS = 30_000


@pytest.fixture
def no_partitions(transactional_db: None) -> Iterator[None]:
    """Start and end with the DEFAULT partition alone, and have the maintainer wait for its locks as long as that takes."""
    set_limits(gateway={"partition_lock_ms": PATIENT_MS})
    drop_days()
    yield
    drop_days()


def drop_days() -> None:
    with connection.cursor() as cursor:
        for day in list_partition_days():
            cursor.execute(f"DROP TABLE {partition_name(day)}")


def partition_of(record: RequestRecord) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT tableoid::regclass::text FROM {TABLE} WHERE id = %s", [record.pk])
        row = cursor.fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.usefixtures("no_partitions")
def test_partitions_of_today_and_the_next_days_are_made_once() -> None:
    report = maintain_day_partitions(today=TODAY)
    assert len(report.created) == limits().gateway.partition_days_ahead + 1
    assert list_partition_days() == {TODAY + timedelta(days=step) for step in range(limits().gateway.partition_days_ahead + 1)}
    assert maintain_day_partitions(today=TODAY).created == ()
    assert maintain_day_partitions(today=TODAY + timedelta(days=1)).created == (
        partition_name(TODAY + timedelta(days=limits().gateway.partition_days_ahead + 1)),
    )


@pytest.mark.usefixtures("no_partitions")
def test_rows_that_came_before_their_partition_move_into_it() -> None:
    early = [make_record(created_at=NOON + timedelta(hours=hour)) for hour in (-12, 0, 11)]
    later = make_record(created_at=NOON + timedelta(days=100))
    report = maintain_day_partitions(today=TODAY)
    assert report.moved_rows == 3
    assert {partition_of(record) for record in early} == {partition_name(TODAY)}
    assert partition_of(later) == DEFAULT_PARTITION
    assert RequestRecord.objects.count() == 4


@pytest.mark.usefixtures("no_partitions")
def test_what_is_past_its_retention_goes_wherever_it_lies() -> None:
    set_limits(gateway={"retention_days": 3})
    kept = make_record(created_at=NOON - timedelta(days=3))
    make_record(created_at=NOON - timedelta(days=4))
    maintain_day_partitions(today=TODAY - timedelta(days=4))
    stray = make_record(created_at=NOON - timedelta(days=40))
    report = maintain_day_partitions(today=TODAY)
    assert report.dropped == (partition_name(TODAY - timedelta(days=4)),)
    assert list(RequestRecord.objects.values_list("pk", flat=True)) == [kept.pk]
    assert not RequestRecord.objects.filter(pk=stray.pk).exists()


@pytest.mark.usefixtures("no_partitions")
def test_a_second_maintainer_leaves_at_once_and_a_table_that_stays_in_use_is_left_for_the_next_call() -> None:
    with hold(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"), pytest.raises(PartitionsBusy):
        maintain_day_partitions(today=TODAY)
    set_limits(gateway={"partition_lock_ms": 500})
    with hold(f"LOCK TABLE {TABLE} IN ACCESS SHARE MODE"):
        with pytest.raises(PartitionsBusy):
            maintain_day_partitions(today=TODAY)
        assert maintain_task() == 0
    set_limits(gateway={"partition_lock_ms": PATIENT_MS})
    assert len(maintain_day_partitions(today=TODAY).created) == limits().gateway.partition_days_ahead + 1


@pytest.mark.usefixtures("no_partitions")
@pytest.mark.timeout(180)  # above the sum of the waits
def test_an_update_that_waits_for_the_move_finds_its_row() -> None:
    """A statement planned before the partition existed must still see the row that moved into it."""
    set_limits(gateway={"partition_lock_ms": 120_000})  # the maintainer must not give up before the update waits too
    record, updated = make_record(created_at=NOON), list[int]()
    with hold(f"LOCK TABLE {TABLE} IN SHARE MODE", f"LOCK TABLE {DEFAULT_PARTITION} IN SHARE MODE"):
        mover = in_thread(lambda: maintain_day_partitions(today=TODAY))
        wait_until(lambda: waiting_statements() >= 1, what="the maintainer waits for the table")
        rows = RequestRecord.objects.filter(pk=record.pk)
        updater = in_thread(lambda: updated.append(rows.update(model="changed")))
        wait_until(lambda: waiting_statements() >= 2, what="the update waits behind it")
    mover.join(30)
    updater.join(30)
    record.refresh_from_db()
    assert (updated, record.model) == ([1], "changed")


def waiting_statements() -> int:
    with connection.cursor() as cursor:
        # Of this database alone: other tests wait for locks on the same server.
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
        row = cursor.fetchone()
    return int(row[0]) if row else 0


def in_thread(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        finally:
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextmanager
def hold(*statements: str) -> Iterator[None]:
    """Run statements in another connection's transaction and keep it open for the block."""
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            ready.set()
            done.wait(120)

    thread = in_thread(work)
    try:
        assert ready.wait(30)
        yield
    finally:
        done.set()
        thread.join(30)


CONTRACT_KEYS = [
    "request_id", "node_id", "model", "status", "prompt_tokens_est", "max_tokens", "latency_ms", "error_code", "created_at",
]  # fmt: skip


@pytest.fixture
def admin() -> Client:
    """A client that shows an admin token."""
    _, text = create_admin_token(name="tests", actor=ACTOR)
    return Client(headers={"authorization": f"Bearer {text}"})


def test_a_record_has_exactly_the_fields_of_the_contract_and_is_found_by_its_words_and_ours(admin: Client) -> None:
    node_id = new_uuid7()
    record = make_record(node_id=node_id, prompt_tokens_est=384, max_tokens=256, latency_ms=4820, age_s=0)
    left = make_record(state=RequestState.CANCELLED, status_code=499, age_s=1)
    cut = make_record(state=RequestState.INTERRUPTED, status_code=503, age_s=2)
    shown = admin.get(f"/requests?status=completed&node_id={node_id}").json()["requests"][0]
    assert list(shown) == [*CONTRACT_KEYS, "state", "outcome", "status_code", "engine_error"]
    assert (shown["request_id"], shown["node_id"]) == (record.printed_id, format_id("node", node_id))
    assert (shown["status"], shown["latency_ms"], shown["error_code"]) == ("completed", 4820, None)
    assert shown["created_at"].endswith("Z")
    both = admin.get("/requests?status=interrupted").json()["requests"]
    assert [(shown["request_id"], shown["status"], shown["state"], shown["outcome"]) for shown in both] == [
        (left.printed_id, "interrupted", "cancelled", "cancelled"),
        (cut.printed_id, "interrupted", "interrupted", "failed"),
    ]
    one = admin.get("/requests?status=cancelled").json()["requests"]
    assert [shown["request_id"] for shown in one] == [left.printed_id]


MEANINGLESS = {
    "limit": ("0", "1001", "-1", "ten", "", "%D9%A3", "9" * 20), "status": ("done", ""), "node_id": ("node_7", ""),
}  # fmt: skip


def test_a_parameter_that_means_nothing_is_named(admin: Client) -> None:
    for param, values in MEANINGLESS.items():
        for value in values:
            answer = admin.get(f"/requests?{param}={value}")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["retryable"]) == (400, "BAD_REQUEST", False)
            assert error["param"] == param, value


def test_only_an_admin_token_opens_the_list() -> None:
    make_record()
    create_provider(name="local", actor=ACTOR)
    signed_in = Client()
    signed_in.force_login(make_operator())
    answers = [Client().get("/requests"), signed_in.get("/requests")]
    for shown in (make_key()[1], create_credential(name="box", provider_name="local", actor=ACTOR)[1], "dTpw"):
        scheme = "Basic" if shown == "dTpw" else "Bearer"
        answers.append(Client().get("/requests", headers={"authorization": f"{scheme} {shown}"}))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "INVALID_ADMIN_TOKEN")
        assert answer["WWW-Authenticate"].startswith("Bearer")


def test_only_keys_in_use_that_were_made_for_longer_are_named_before_they_end() -> None:
    now = datetime.now(UTC)
    create_tenant(name="team", actor=ACTOR)
    for name, made, ends, used in (
        ("ci", now - timedelta(days=60), now + timedelta(days=2), now),
        ("playground: ann", now, now + timedelta(hours=1), now),
        ("idle", now - timedelta(days=60), now + timedelta(days=2), now - timedelta(days=30)),
        ("later", now - timedelta(days=60), now + timedelta(days=30), now),
    ):
        key, _text = create_api_key(name=name, tenant_name="team", actor=ACTOR, expires_at=ends)
        ApiKey.objects.filter(pk=key.pk).update(created_at=made, last_used_at=used)

    assert [key.name for key in read_expiring_keys()] == ["ci"]
