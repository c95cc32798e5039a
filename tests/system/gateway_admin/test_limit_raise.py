"""Giving a key or a tenant more needs approval once there is a policy; giving less, and everything before, does not."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from core.limits import GatewayLimits
from gateway.models import ApiKey, Tenant
from gateway.operations import LIMIT_RAISE
from gateway.services import (
    ApprovalNeeded,
    change_key_limits,
    change_tenant_limit,
    create_api_key,
    create_tenant,
    raise_key_limit,
    revoke_api_key,
)
from governance import services
from governance.errors import InvalidProposal
from governance.models import AdminToken, AuditEvent, Operation
from governance.registry import RunOrder
from governance.states import RunState
from tests.system.gateway_admin.factories import ACTOR, audited, make_key
from tests.system.governance.team import Team, make_governed
from wire.contract import ErrorCode

pytestmark = pytest.mark.django_db
SETTING = GatewayLimits().requests_per_minute


AN_ORDER = RunOrder(
    run_id=uuid.UUID(int=1), op_id="op-1", use=1, operation="limit-raise", target="", params={},
    token="", token_expires_at=0, requested_by="ana", approved_by=("ben", "cleo"),
)  # fmt: skip


@pytest.fixture
def key() -> ApiKey:
    """A key with 30 requests a minute, of a tenant with 60."""
    create_tenant(name="research", requests_per_minute=60, actor=ACTOR)
    return make_key(requests_per_minute=30)[0]


@pytest.fixture
def team(key: ApiKey) -> Team:
    """Three people whose policy is in force; the key is there already."""
    return make_governed()


def change(key: ApiKey, **changes: Any) -> ApiKey:
    wanted: dict[str, Any] = {"requests_per_minute": key.requests_per_minute, "allowed_models": [], "priority": None}
    return change_key_limits(key_id=key.pk, actor=ACTOR, **(wanted | changes))


def propose(team: Team, target: str, **params: object) -> Operation:
    return services.propose(
        operation="limit-raise", targets=[target], params=params, reason="a demo for customers", proposer=team[0].proposer
    )


def test_before_the_first_policy_an_operator_raises_alone(key: ApiKey) -> None:
    assert change(key, requests_per_minute=1000, priority="high").requests_per_minute == 1000
    assert change_tenant_limit(name="research", requests_per_minute=None, actor=ACTOR).requests_per_minute is None


MORE: dict[str, Callable[[ApiKey], object]] = {
    "key": lambda key: change(key, requests_per_minute=31),
    "key to the tenant's": lambda key: change(key, requests_per_minute=None),
    "key to high priority": lambda key: change(key, priority="high"),
    "tenant": lambda key: change_tenant_limit(name="research", requests_per_minute=61, actor=ACTOR),
    "tenant to the setting": lambda key: change_tenant_limit(name="research", requests_per_minute=None, actor=ACTOR),
    "new key above its tenant": lambda key: make_key("greedy", requests_per_minute=61),
    "new key of high priority": lambda key: make_key("greedy", priority="high"),
    "new tenant above the setting": lambda key: create_tenant(name="greedy", requests_per_minute=SETTING + 1, actor=ACTOR),
}


@pytest.mark.parametrize("what", sorted(MORE))
def test_more_is_refused_without_approval_and_changes_nothing(team: Team, key: ApiKey, what: str) -> None:
    before = list(ApiKey.objects.values()), list(Tenant.objects.values()), AuditEvent.objects.count()
    with pytest.raises(ApprovalNeeded, match="limit-raise") as refusal:
        MORE[what](key)
    assert (refusal.value.code, refusal.value.status) == (ErrorCode.APPROVAL_REFUSED, 403)
    assert (list(ApiKey.objects.values()), list(Tenant.objects.values()), AuditEvent.objects.count()) == before


LESS: dict[str, Callable[[ApiKey], object]] = {
    "key": lambda key: change(key, requests_per_minute=29),
    "the same": change,
    "models": lambda key: change(key, allowed_models=["tiny"]),
    "low priority": lambda key: change(key, priority="low"),
    "tenant": lambda key: change_tenant_limit(name="research", requests_per_minute=59, actor=ACTOR),
    "new key at its tenant's": lambda key: make_key("modest", requests_per_minute=60),
    "new key without": lambda key: make_key("modest"),
    "new tenant at the setting": lambda key: create_tenant(name="modest", requests_per_minute=SETTING, actor=ACTOR),
}


@pytest.mark.parametrize("what", sorted(LESS))
def test_what_gives_nobody_more_is_done_at_once(team: Team, key: ApiKey, what: str) -> None:
    LESS[what](key)


def test_an_approved_raise_of_a_key_is_carried_out_and_recorded_under_its_operation(team: Team, key: ApiKey) -> None:
    operation = propose(team, f"key:{key.pk}", requests_per_minute=500, priority="high")
    team[1].approve(operation)
    services.run_due()
    key.refresh_from_db()
    assert (key.requests_per_minute, key.priority) == (30, "normal")
    team[2].approve(operation)
    services.run_due()
    key.refresh_from_db()
    assert (key.requests_per_minute, key.priority) == (500, "high")
    (event,) = audited("api_key.raise")
    assert event.op_id == operation.printed_id
    assert event.detail["from"] == {"requests_per_minute": 30, "priority": "normal"}


def test_an_approved_raise_of_a_tenant_is_carried_out(team: Team) -> None:
    operation = propose(team, "tenant:research", requests_per_minute=SETTING * 2)
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    assert Tenant.objects.get(name="research").requests_per_minute == SETTING * 2
    assert operation.runs.get().state == RunState.SUCCEEDED.value


def test_a_key_that_was_revoked_meanwhile_fails_with_the_reason(team: Team, key: ApiKey) -> None:
    operation = propose(team, f"key:{key.pk}", requests_per_minute=500)
    revoke_api_key(key_id=key.pk, actor=ACTOR)
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    run = operation.runs.get()
    assert run.state == RunState.FAILED.value
    assert "is revoked" in run.message


@pytest.mark.parametrize("target", ["key:{key}", "tenant:research"], ids=["key", "tenant"])
def test_what_is_no_raise_any_more_ends_with_the_reason_and_lowers_nothing(team: Team, key: ApiKey, target: str) -> None:
    operations = [propose(team, target.format(key=key.pk), requests_per_minute=rate) for rate in (500, 1000)]
    for operation in reversed(operations):
        team[1].approve(operation)
        team[2].approve(operation)
        services.run_due()
    run = operations[0].runs.get()
    assert run.state == RunState.FAILED.value
    assert "has 1000 requests per minute by now, and approved were 500" in run.message
    rates = list(ApiKey.objects.values_list("requests_per_minute", "tenant__requests_per_minute").get())
    assert 1000 in rates
    assert 500 not in rates


def test_the_approval_of_one_key_raises_no_other(team: Team, key: ApiKey) -> None:
    other, _ = make_key("other", requests_per_minute=1)
    operation = propose(team, f"key:{key.pk}", requests_per_minute=500)
    team[1].approve(operation)
    team[2].approve(operation)
    run = operation.runs.get()
    wanted = {"requests_per_minute": 500}
    order = replace(AN_ORDER, run_id=run.pk, op_id=operation.printed_id, target=f"key:{other.pk}", params=wanted)
    with pytest.raises(ApprovalNeeded):
        raise_key_limit(key_id=other.pk, requests_per_minute=500, priority=None, actor=ACTOR, order=order)


def test_an_approved_run_raises_what_it_names_to_what_it_says(team: Team, key: ApiKey) -> None:
    other, _ = make_key("other", requests_per_minute=1)
    order = replace(AN_ORDER, target=f"key:{key.pk}", params={"requests_per_minute": 500})
    for key_id, rate, priority in ((other.pk, 500, None), (key.pk, 501, None), (key.pk, 500, "high"), (key.pk, None, "high")):
        with pytest.raises(ApprovalNeeded, match=f"approved for key:{key.pk} is not this"):
            raise_key_limit(key_id=key_id, requests_per_minute=rate, priority=priority, actor=ACTOR, order=order)
    for name, wanted in (("research", 501), ("research", None), ("other", 500)):
        with pytest.raises(ApprovalNeeded, match="approved for tenant:research is not this"):
            change_tenant_limit(
                name=name, requests_per_minute=wanted, actor=ACTOR,
                order=replace(order, target="tenant:research"),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("target", "params", "param"),
    [
        ("key:{key}", {"requests_per_minute": 30}, "requests_per_minute"),
        ("key:{key}", {"requests_per_minute": 30, "priority": "high"}, "requests_per_minute"),
        ("key:{key}", {"requests_per_minute": 0}, "requests_per_minute"),
        ("key:{key}", {"requests_per_minute": True}, "requests_per_minute"),
        ("key:{key}", {"requests_per_minute": "500"}, "requests_per_minute"),
        ("key:{key}", {"priority": "low"}, "priority"),
        ("key:{key}", {}, "params"),
        ("key:{key}", {"requests_per_minute": 500, "models": "all"}, "params"),
        ("key:nobody", {"requests_per_minute": 500}, "targets"),
        ("tenant:nobody", {"requests_per_minute": 500}, "targets"),
        ("tenant:research", {"priority": "high"}, "priority"),
        ("box:research", {"requests_per_minute": 500}, "targets"),
    ],
    ids=[
        "no raise",
        "one of two",
        "zero",
        "true",
        "text",
        "low",
        "nothing",
        "unknown",
        "no key",
        "no tenant",
        "tenant priority",
        "no kind",
    ],
)
def test_what_cannot_be_asked_for_names_the_field(key: ApiKey, target: str, params: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidProposal) as refusal:
        LIMIT_RAISE.clean([target.format(key=key.pk)], params)
    assert refusal.value.param == param


def test_the_description_says_what_is_now_and_what_would_be(key: ApiKey) -> None:
    said = LIMIT_RAISE.describe([f"key:{key.pk}"], {"requests_per_minute": 500, "priority": "high"})
    assert said.title == "Raise the limits of key notebook of research"
    assert [(line.value, line.now) for line in said.lines] == [("500", "30"), ("high", "normal")]
    make_key("follower")
    (impact,) = LIMIT_RAISE.preview(["tenant:research"], {"requests_per_minute": 500})
    assert impact.text.startswith("1 keys of research have no limit of their own")


def test_the_page_offers_keys_and_tenants_with_what_they_have(key: ApiKey) -> None:
    offered = dict(LIMIT_RAISE.choices()["targets"])  # type: ignore[call-overload]  # what a page reads
    assert offered == {
        "tenant:research": "tenant research (60 a minute)",
        f"key:{key.pk}": "key notebook of research (30 a minute, normal)",
    }


def read_offer(text: str) -> dict[str, list[str]]:
    """Return what the page proposes, or nothing."""
    if "Propose it" not in text:
        return {}
    (address,) = re.findall(r'href="(/approvals/propose[^"]*)"', text)
    return parse_qs(urlsplit(unescape(address)).query)


def test_the_page_of_a_key_says_that_approval_is_needed_and_offers_to_propose_it(boss: Client, team: Team, key: ApiKey) -> None:
    url = reverse("admin:gateway_apikey_confirm", args=[key.pk, "limits"])
    answer = boss.post(url, {"requests_per_minute": 500, "allowed_models": "", "priority": "high"})
    page = answer.content.decode()
    assert answer.status_code == 200
    assert escape("This needs approval") in page
    wanted = {"operation": ["limit-raise"], "target": [f"key:{key.pk}"], "requests_per_minute": ["500"], "priority": ["high"]}
    assert read_offer(page) == wanted
    assert boss.post(url, {"requests_per_minute": 29, "allowed_models": "", "priority": "low"}).status_code == 302


def test_the_page_of_a_tenant_offers_the_setting_for_an_empty_limit(boss: Client, team: Team) -> None:
    url = reverse("admin:gateway_tenant_confirm", args=[Tenant.objects.get().pk, "limits"])
    page = boss.post(url, {"requests_per_minute": ""}).content.decode()
    wanted = {"operation": ["limit-raise"], "target": ["tenant:research"], "requests_per_minute": [str(SETTING)]}
    assert read_offer(page) == wanted


def test_a_new_key_above_its_tenant_is_refused_on_its_page_without_an_offer(boss: Client, team: Team, key: ApiKey) -> None:
    body = {"name": "greedy", "tenant": key.tenant_id, "requests_per_minute": 61, "allowed_models": "", "priority": "normal"}
    page = boss.post(reverse("admin:gateway_apikey_add"), body).content.decode()
    assert "more than the tenant research has today" in page
    assert read_offer(page) == {}
    assert ApiKey.objects.count() == 1


def test_minting_an_admin_token_on_its_page_offers_to_propose_it(boss: Client, team: Team) -> None:
    page = boss.post(reverse("admin:governance_admintoken_add"), {"name": "grafana"}).content.decode()
    assert read_offer(page) == {"operation": ["admin-token-mint"], "target": ["control-plane"], "name": ["grafana"]}
    assert not AdminToken.objects.exists()


def test_creating_a_key_without_a_limit_never_asks(team: Team) -> None:
    assert create_api_key(name="plain", tenant_name="research", actor=ACTOR)[0].requests_per_minute is None
