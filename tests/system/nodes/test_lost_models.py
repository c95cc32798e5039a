"""Models that approved loads brought and that are gone: what is said of them, where, and how they are asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.conf import LazySettings
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from pytest_django import DjangoDbBlocker

from controlplane.overview import read_overview
from controlplane.problems import look_for_problems
from core.models import User
from governance.errors import InvalidProposal
from governance.models import AuditEvent, Notice, Operation, OperationRun, WebhookEndpoint
from governance.notices import write_message
from governance.operations.runs import run_due
from governance.states import RunState
from nodes.models import Node, NodePresence
from nodes.operations.load import MODEL_LOAD, find_lost_models, tell_failed_reloads
from nodes.tasks import tell_reloads
from tests.fakes.governed_team import Identity, Team, approve_load, make_box, make_due
from tests.fakes.nodes import shared_rows
from wire.ids import format_id
from wire.optoken.approval import read_statement

pytestmark = pytest.mark.django_db
KEEP = {"modelId": "m", "keepLoaded": True}


@pytest.fixture(scope="module")
def rig() -> Identity:
    return Identity()


@pytest.fixture(scope="module")
def box(rig: Identity, team: Team, django_db_blocker: DjangoDbBlocker) -> Iterator[Node]:
    def make() -> Node:
        node = make_box(rig, age_s=-3600.0, keeps_models=True)
        Node.objects.update(model_names=["old"])
        return node

    with shared_rows(django_db_blocker, make) as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def loaded(team: Team, rig: Identity, box: Node, django_db_blocker: DjangoDbBlocker) -> Iterator[Operation]:
    """The approved load of ``m``, which is not there any more."""
    with shared_rows(django_db_blocker, lambda: done(team, rig.runner_id, age_s=3600)) as made:
        yield made


def done(
    team: Team, target: str, operation: str = "model-load", *, state: RunState = RunState.SUCCEEDED, age_s: float = 60,
    result: dict[str, Any] | None = None, **params: Any,
) -> Operation:  # fmt: skip
    """An approved operation that was carried out so long ago."""
    asked = {"modelId": "m", **params}
    row = approve_load(team, target, operation=operation, params=asked)
    make_due(row)
    run_due()
    at = timezone.now() - timedelta(seconds=age_s)
    changed = OperationRun.objects.filter(operation=row).update(
        state=state.value, ended_at=at, result={"modelId": asked["modelId"], **(result or {})}
    )
    assert changed == 1
    return row


def report(*replicas: dict[str, Any]) -> None:
    NodePresence.objects.update(replicas=[{"model": "old", "state": "loaded"}, *replicas])


def lost() -> list[str]:
    return [each.what for each in find_lost_models()]


GONE = ["m was loaded on rig and is not any more."]


def test_a_model_that_is_gone_without_an_unload_is_named_unless_it_is_on_its_way_or_its_node_is_away(loaded: Operation) -> None:
    (found,) = find_lost_models()
    assert ([found.what], found.op_id, found.is_kept) == (GONE, loaded.pk, False)
    assert f"{found.loaded_at:%Y-%m-%d %H:%M}" in found.advice
    for state in ("loaded", "reserved", "loading", "unloading"):
        report({"model": "m", "state": state})
        assert lost() == []
    report()
    assert lost() == GONE
    for age_s in (600, 3600):
        NodePresence.objects.update(last_heartbeat_at=timezone.now() - timedelta(seconds=age_s))
        assert lost() == []


def fail(gave_up_ms: int | None, **changes: Any) -> None:
    report({"model": "m", "state": "failed", "detail": "4 attempts failed", "kept": True, "gave_up_ms": gave_up_ms, **changes})


def told() -> list[tuple[str, str]]:
    """Who is told of a reload that failed: people and webhooks."""
    rows = Notice.objects.filter(event__startswith="reload_failed").order_by("created_at")
    return sorted((row.event.partition(".")[0], row.person.username if row.person else "hook") for row in rows)


def test_a_reload_that_the_node_gave_up_is_told_once_to_those_who_decided_it(
    team: Team, rig: Identity, box: Node, settings: LazySettings
) -> None:
    settings.NOTICE_SENDER = "muster@example.com"
    for member in team.members:
        User.objects.filter(pk=member.user.pk).update(email=f"{member.name}@example.com")
    WebhookEndpoint.objects.create(name="hook", url="http://127.0.0.1:9/", secret="s" * 32)
    row = done(team, rig.runner_id, keepLoaded=True)
    signers = set(row.decisions.values_list("person_name", flat=True))
    fail(gave_up_ms=1_000)
    tell_reloads()
    tell_reloads()
    assert told() == sorted([("reload_failed", "hook"), *(("reload_failed", name) for name in {row.requested_by, *signers})])
    event = AuditEvent.objects.get(action="node.reload-failed")
    assert (event.target, event.op_id) == (box.printed_id, format_id("op", row.pk))
    message = write_message(Notice.objects.filter(event__startswith="reload_failed").latest("created_at"))
    assert message.subject == "m could not be loaded again on rig"
    assert "4 attempts failed" in message.text
    body = message.body
    assert (body["model"], body["reason"], body["operation"]) == ("m", "4 attempts failed", {"id": format_id("op", row.pk)})


@pytest.mark.parametrize(
    ("later_s", "gave_up_ms", "count"),
    [(3600, 1_000, 1), (3600, 2_000, 2), (30, 2_000, 1)],
    ids=["the same failure", "the next failure", "another moment in each report"],
)
def test_the_next_failure_is_told_again_and_the_same_or_one_that_no_approval_keeps_is_not(
    team: Team, rig: Identity, box: Node, later_s: int, gave_up_ms: int, count: int
) -> None:
    fail(gave_up_ms=1_000)
    assert tell_failed_reloads() == 0
    done(team, rig.runner_id, keepLoaded=True)
    for changes in ({}, {"state": "loading"}):
        fail(None, **changes)
        assert tell_failed_reloads() == 0, "while the node still tries"
    detail = {"name": "rig", "model": "m", "reason": "", "gave_up_ms": 1_000}
    at = timezone.now() - timedelta(seconds=later_s)
    AuditEvent.objects.create(
        at=at, actor="system:sweep", action="node.reload-failed", target=box.printed_id, detail=detail
    )  # fmt: skip
    fail(gave_up_ms=gave_up_ms)
    tell_failed_reloads()
    assert AuditEvent.objects.filter(action="node.reload-failed").count() == count


def test_a_model_that_was_unloaded_or_evicted_since_is_not_lost(team: Team, rig: Identity, loaded: Operation) -> None:
    done(team, rig.runner_id, "model-unload", age_s=30)
    assert lost() == []
    done(team, rig.runner_id, age_s=20)
    assert lost() == GONE
    done(team, rig.runner_id, age_s=10, modelId="old", evictModel="m", result={"evicted": "m"})
    assert lost() == []
    done(team, rig.runner_id, age_s=5)
    assert lost() == GONE


def test_a_replica_over_nodes_is_lost_on_all_of_them_until_it_is_unloaded_on_any(team: Team) -> None:
    nodes = [make_box(Identity(name), cluster_address=f"10.0.0.{n}:1") for n, name in enumerate(("head", "helper"), start=1)]
    ids = [node.runner_id for node in nodes]
    row = approve_load(team, *ids, params={"modelId": "big", "members": [{"node": name, "gpus": [0]} for name in ids]})
    make_due(row)
    run_due()
    at = timezone.now() - timedelta(seconds=60)
    OperationRun.objects.filter(operation=row).update(state="succeeded", ended_at=at, result={"modelId": "big"})
    found = [each for each in find_lost_models() if each.model == "big"]
    assert [each.node_name for each in found] == ["head", "helper"]
    assert found[0].again == found[1].again
    assert found[0].again.count("target=") == 2, "it is asked for again on both"
    done(team, ids[1], "model-unload", age_s=30, modelId="big")
    assert [each for each in find_lost_models() if each.model == "big"] == []


def test_only_what_succeeded_and_was_signed_counts(team: Team, rig: Identity, loaded: Operation) -> None:
    for state in (RunState.FAILED, RunState.RESOLVED, RunState.EXECUTING):
        loaded.runs.update(state=state.value)
        assert lost() == []
        loaded.runs.update(state=RunState.SUCCEEDED.value)
        done(team, rig.runner_id, "model-unload", state=state, age_s=10)
        assert lost() == GONE
    Operation.objects.filter(pk=loaded.pk).update(statement=b"{}")  # as no approver signed it
    assert lost() == []


def test_overview_says_so_with_the_page_that_asks_for_the_same_again(
    browser: Client, team: Team, rig: Identity, box: Node
) -> None:
    done(team, rig.runner_id, maxContextLength=512)
    look_for_problems()
    (problem,) = [each for each in read_overview().problems if "any more" in each.what]
    assert (problem.what, problem.link) == (GONE[0], "Propose it again")
    boss = Client()
    boss.force_login(User.objects.create_superuser("boss"))
    assert problem.url.replace("&", "&amp;") in boss.get(reverse("admin:index")).content.decode()
    form = browser.get(problem.url).context["form"]
    filled = [form[name].value() for name in ("targets", "param-modelId", "param-maxContextLength")]
    assert filled == [[rig.runner_id], "m", "512"]
    assert not form["param-keepLoaded"].value(), "the same, which did not keep it"
    done(team, rig.runner_id, keepLoaded=True)
    (found,) = find_lost_models()
    assert browser.get(f"{reverse('approvals:propose')}?{found.again}").context["form"]["param-keepLoaded"].value()


def test_keeping_is_signed_shown_and_left_out_where_it_is_not_asked_for(
    browser: Client, team: Team, rig: Identity, box: Node
) -> None:
    form = browser.get("/approvals/propose?operation=model-load").context["form"]
    assert form["param-keepLoaded"].initial is True
    sent = {"operation": "model-load", "targets": [rig.runner_id], "param-modelId": "m", "reason": "why", "max_uses": "1"}
    for keeps, signed, box_of_form, words in (
        (True, KEEP, {"param-keepLoaded": "on"}, "is loaded again, until an unload is approved"),
        (False, {"modelId": "m"}, {}, "is not loaded again"),
    ):
        row = approve_load(team, rig.runner_id, params={"modelId": "m", "keepLoaded": keeps})
        params = read_statement(bytes(row.statement)).params
        lines = MODEL_LOAD.describe([rig.runner_id], params).lines
        assert params == signed
        assert [line.value for line in lines if line.label == "After a restart of the node"] == [words]
        assert words in browser.post("/approvals/propose", {**sent, **box_of_form, "step": "look"}).content.decode()


def test_a_node_that_does_not_know_how_is_named_before_anybody_signs(team: Team) -> None:
    old = Identity("elder")
    make_box(old)
    with pytest.raises(InvalidProposal, match="elder has not said that it can keep a model loaded") as caught:
        MODEL_LOAD.clean([old.runner_id], KEEP)
    assert caught.value.param == "keepLoaded"
    assert MODEL_LOAD.clean([old.runner_id], {"modelId": "m"}).params == {"modelId": "m"}
    Node.objects.update(keeps_models=False)
    fields: Any = MODEL_LOAD.choices()["params"]
    assert [field["initial"] for field in fields if field["name"] == "keepLoaded"] == [False]
