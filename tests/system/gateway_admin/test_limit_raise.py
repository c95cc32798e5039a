"""Giving more to a key, a tenant or a model needs approval once there is a policy; giving less, and all before, does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.db import transaction
from django.test import Client
from django.urls import reverse

from core.limits import GatewayLimits
from gateway.models import ApiKey, Model, Tenant
from gateway.operations import LIMIT_RAISE
from gateway.services.keys import change_key_limits, raise_key_limit, revoke_api_key
from gateway.services.limits import ApprovalNeeded
from gateway.services.models import (
    allow_model,
    change_model_caps,
    change_model_details,
    disallow_model,
    raise_model_caps,
    remember_models,
)
from gateway.services.tenants import change_tenant_limit, change_tenant_weight, create_tenant
from governance.admin_tokens import create_admin_token
from governance.errors import InvalidProposal
from governance.models import AuditEvent, Operation, OperationRun
from governance.operations import proposals
from governance.operations.proposals import use_approval
from governance.operations.runs import run_due
from governance.registry import RunOrder
from governance.states import RunState
from tests.fakes.governed_team import Team, make_governed, make_team
from tests.fakes.nodes import ACTOR, audited, make_key, make_node, make_presence
from wire.contract import ErrorCode
from wire.optoken.documents import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db
LIMITS = GatewayLimits()
SETTING = LIMITS.requests_per_minute
CAPS = ("max_tokens", "max_prompt_chars", "max_queue")


@pytest.fixture(autouse=True)
def big(db: None) -> Model:
    """An allowed model with a cap on tokens and on the queue, and the default one on prompts."""
    return allow_model(name="big", max_tokens=1024, max_queue=10, actor=ACTOR)


@pytest.fixture
def key() -> ApiKey:
    """A key with 30 requests a minute, of a tenant with 60."""
    create_tenant(name="research", requests_per_minute=60, actor=ACTOR)
    return make_key(requests_per_minute=30)[0]


@pytest.fixture
def team(key: ApiKey, big: Model) -> Team:
    """Three people whose policy is in force; key and model are there already, and some rows that are not allowed."""
    for name, caps in (("seen", {}), ("small", {"max_tokens": 5}), ("huge", {"max_tokens": 10**9})):
        Model.objects.create(name=name, allowed=name == "huge", **caps)
    return make_governed()


def change(key: ApiKey, **changes: Any) -> ApiKey:
    wanted: dict[str, Any] = {"requests_per_minute": key.requests_per_minute, "allowed_models": [], "priority": None}
    return change_key_limits(key_id=key.pk, actor=ACTOR, **(wanted | changes))


def limit(name: str = "research", most: int | None = None) -> Tenant:
    return change_tenant_limit(name=name, requests_per_minute=most, actor=ACTOR)


def change_caps(name: str = "big", **caps: Any) -> Model:
    """Change the caps that are named and leave the others as they are."""
    now: dict[str, Any] = dict(Model.objects.filter(name=name).values(*CAPS).get())
    return change_model_caps(name=name, actor=ACTOR, **(now | caps))


def caps_of(name: str = "big") -> tuple[int | None, ...]:
    found: tuple[int | None, ...] = Model.objects.values_list(*CAPS).get(name=name)
    return found


def propose(team: Team, *targets: str, max_uses: int = 1, **params: object) -> Operation:
    return proposals.propose(
        operation="limit-raise", targets=targets, params=params, reason="a demo", proposer=team[0].proposer, max_uses=max_uses
    )


def approve(team: Team, operation: Operation) -> Operation:
    for member in team.members[1:3]:
        member.approve(operation)
    return operation


def carry_out(team: Team, operation: Operation) -> OperationRun:
    """Approve an operation of one target, carry it out and return how that went."""
    approve(team, operation)
    run_due()
    return operation.runs.get()


def order_of(operation: Operation, **params: object) -> RunOrder:
    """Return the order for the only run of an approved operation."""
    run = operation.runs.get()
    return RunOrder(
        run_id=run.pk, op_id=operation.printed_id, use=1, operation="limit-raise", target=run.target, params=params, token="",
        token_expires_at=0, requested_by="ana", approved_by=("ben", "cleo"),
    )  # fmt: skip


def test_before_the_first_policy_an_operator_raises_alone(key: ApiKey) -> None:
    assert change(key, requests_per_minute=1000, priority="high").requests_per_minute == 1000
    assert limit().requests_per_minute is None
    change_caps("big", **dict.fromkeys(CAPS, 10**9))
    change_caps("big", **dict.fromkeys(CAPS))
    allow_model(name="new", max_tokens=10**9, actor=ACTOR)
    assert (caps_of(), caps_of("new")) == ((None, None, None), (10**9, None, None))


MORE: dict[str, Callable[[ApiKey], object]] = {
    "key": lambda key: change(key, requests_per_minute=31),
    "key to the tenant's": lambda key: change(key, requests_per_minute=None),
    "key to high priority": lambda key: change(key, priority="high"),
    "tenant": lambda _: limit(most=61),
    "tenant to the setting": lambda _: limit(),
    "new key above its tenant": lambda _: make_key("greedy", requests_per_minute=61),
    "new key of high priority": lambda _: make_key("greedy", priority="high"),
    "new tenant above the setting": lambda _: create_tenant(name="greedy", requests_per_minute=SETTING + 1, actor=ACTOR),
    "weight of a tenant": lambda _: change_tenant_weight(name="research", weight=101, actor=ACTOR),
    "tokens": lambda _: change_caps(max_tokens=1025),
    "tokens to the setting": lambda _: change_caps(max_tokens=None),
    "prompt above the setting": lambda _: change_caps(max_prompt_chars=LIMITS.max_prompt_chars + 1),
    "queue to the setting": lambda _: change_caps(max_queue=None),
    "one up and one down": lambda _: change_caps(max_tokens=1, max_queue=11),
    "allowed again with more": lambda _: allow_model(name="big", max_queue=11, actor=ACTOR),
    "new model above the setting": lambda _: allow_model(name="new", max_tokens=LIMITS.max_tokens_cap + 1, actor=ACTOR),
    "declared above the setting": lambda _: allow_model(name="seen", max_queue=LIMITS.max_queue + 1, actor=ACTOR),
    "declared above its own": lambda _: allow_model(name="small", max_tokens=6, actor=ACTOR),
    "caps of what is not allowed": lambda _: change_caps("small", max_tokens=6),
}
LESS: dict[str, Callable[[ApiKey], object]] = {
    "key": lambda key: change(key, requests_per_minute=29),
    "the same": change,
    "models of a key": lambda key: change(key, allowed_models=["tiny"]),
    "low priority": lambda key: change(key, priority="low"),
    "tenant": lambda _: limit(most=59),
    "new key at its tenant's": lambda _: make_key("modest", requests_per_minute=60),
    "new key without": lambda _: make_key("modest"),
    "new tenant at the setting": lambda _: create_tenant(name="modest", requests_per_minute=SETTING, actor=ACTOR),
    "weight of a tenant": lambda _: change_tenant_weight(name="research", weight=50, actor=ACTOR),
    "tokens": lambda _: change_caps(max_tokens=1023),
    "the same caps": lambda _: change_caps(),
    "from the setting to a number": lambda _: change_caps(max_prompt_chars=1),
    "to the same number as the setting": lambda _: change_caps(max_prompt_chars=LIMITS.max_prompt_chars),
    "back to the setting from above": lambda _: change_caps("huge", max_tokens=None),
    "above the setting and less than today": lambda _: change_caps("huge", max_tokens=10**8),
    "details": lambda _: change_model_details(
        name="big", fallbacks=[], context_tokens=10**9, tokenizer="big", tidy=True, resumes=True, actor=ACTOR
    ),
    "not allowed and allowed": lambda _: [
        disallow_model(name="huge", actor=ACTOR), allow_model(name="huge", actor=ACTOR),
    ],
    "allowed with what it had": lambda _: allow_model(name="huge", max_tokens=10**9, actor=ACTOR),
    "new model": lambda _: allow_model(name="new", actor=ACTOR),
    "new model at the setting": lambda _: allow_model(name="new", max_tokens=LIMITS.max_tokens_cap, actor=ACTOR),
    "declared": lambda _: remember_models(names=["seen"]),
}  # fmt: skip


def test_more_is_refused_without_approval_and_changes_nothing_and_what_gives_nobody_more_is_done_at_once(
    team: Team, key: ApiKey, subtests: pytest.Subtests
) -> None:
    def read() -> list[object]:
        return [*(list(kind.objects.values()) for kind in (ApiKey, Tenant, Model)), AuditEvent.objects.count()]

    before = read()
    for what, ask in MORE.items():
        with subtests.test(what), transaction.atomic():
            with pytest.raises(ApprovalNeeded, match="limit-raise") as refusal:
                ask(key)
            assert (refusal.value.code, refusal.value.status) == (ErrorCode.APPROVAL_REFUSED, 403)
            assert read() == before
    for what, act in LESS.items():
        with subtests.test(what), transaction.atomic():
            act(key)
            transaction.set_rollback(True)


def test_a_higher_weight_over_rest_is_refused_without_approval_and_a_lower_one_is_not(
    key: ApiKey, request: pytest.FixtureRequest
) -> None:
    admin = Client(headers={"authorization": f"Bearer {create_admin_token(name='t', actor=ACTOR)[1]}"})
    request.getfixturevalue("team")
    refusal = admin.patch("/api/v1/tenants/research", {"weight": 101}, "application/json")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "APPROVAL_REFUSED")
    assert "101 % in the queue is more than the tenant research has today, which is 100" in refusal.json()["error"]["message"]
    assert admin.patch("/api/v1/tenants/research", {"weight": 40}, "application/json").json()["weight"] == 40


def test_an_approved_raise_is_carried_out_once_with_the_approved_values_and_recorded(team: Team, key: ApiKey) -> None:
    raises = [
        propose(team, f"key:{key.pk}", requests_per_minute=500, priority="high"),
        propose(team, "model:big", max_tokens=4096, max_queue=50),
    ]
    for operation in raises:
        team[1].approve(operation)
    run_due()
    key.refresh_from_db()
    assert (key.requests_per_minute, key.priority, caps_of()) == (30, "normal", (1024, None, 10))
    for operation in raises:
        team[2].approve(operation)
    run_due()
    key.refresh_from_db()
    assert (key.requests_per_minute, key.priority, caps_of()) == (500, "high", (4096, None, 50))
    (of_key,), (of_model,) = audited("api_key.raise"), audited("model.raise")
    assert [of_key.op_id, of_model.op_id] == [operation.printed_id for operation in raises]
    assert of_key.detail["from"] == {"requests_per_minute": 30, "priority": "normal"}
    assert of_model.detail == {"from": {"max_tokens": 1024, "max_queue": 10}, "to": {"max_tokens": 4096, "max_queue": 50}}
    change_caps(max_tokens=1)
    run_due()
    assert caps_of() == (1, None, 50)
    spent = order_of(raises[1], max_tokens=4096, max_queue=50)
    with pytest.raises(ApprovalNeeded):
        raise_model_caps(name="big", max_tokens=4096, max_queue=50, actor=ACTOR, order=spent)
    run = carry_out(team, propose(team, "tenant:research", requests_per_minute=SETTING * 2, weight=250))
    tenant = Tenant.objects.get(name="research")
    assert (run.state, tenant.requests_per_minute, tenant.weight) == (RunState.SUCCEEDED.value, SETTING * 2, 250)


def test_what_is_revoked_gone_or_no_raise_any_more_fails_with_the_reason_and_lowers_nothing(team: Team, key: ApiKey) -> None:
    for target in (f"key:{key.pk}", "tenant:research"):
        lower, higher = (propose(team, target, requests_per_minute=rate) for rate in (500, 1000))
        assert carry_out(team, higher).state == RunState.SUCCEEDED.value
        run = carry_out(team, lower)
        assert run.state == RunState.FAILED.value
        assert "has 1000 requests per minute by now, and approved were 500" in run.message
    assert ApiKey.objects.values_list("requests_per_minute", "tenant__requests_per_minute").get() == (1000, 1000)
    waiting = propose(team, "model:big", max_tokens=4096, max_queue=50)
    assert carry_out(team, propose(team, "model:big", max_tokens=8192)).state == RunState.SUCCEEDED.value
    run = carry_out(team, waiting)
    assert (run.state, caps_of()) == (RunState.FAILED.value, (8192, None, 10))
    raises = propose(team, f"key:{key.pk}", requests_per_minute=5000), propose(team, "model:big", max_tokens=10**6)
    revoke_api_key(key_id=key.pk, actor=ACTOR)
    Model.objects.all().delete()
    runs = [carry_out(team, operation) for operation in raises]
    assert [run.state for run in runs] == [RunState.FAILED.value] * 2
    assert "is revoked" in runs[0].message
    assert runs[1].message == "There is no model big."
    assert "does not exist any more" in LIMIT_RAISE.describe(["model:big"], {"max_tokens": 4096}).title


def test_an_approval_carries_nothing_that_was_not_signed(team: Team, key: ApiKey, subtests: pytest.Subtests) -> None:
    other, _ = make_key("other", requests_per_minute=1)
    allow_model(name="other", max_tokens=1, actor=ACTOR)
    of_key = order_of(approve(team, propose(team, f"key:{key.pk}", requests_per_minute=500)), requests_per_minute=500)
    of_tenant = order_of(approve(team, propose(team, "tenant:research", requests_per_minute=500)), requests_per_minute=500)
    of_model = order_of(approve(team, propose(team, "model:big", max_tokens=4096)), max_tokens=4096)
    rows: list[tuple[Callable[..., object], RunOrder, dict[str, Any]]] = [
        (raise_key_limit, of_key, {"key_id": other.pk, "requests_per_minute": 500}),
        (raise_key_limit, of_key, {"key_id": key.pk, "requests_per_minute": 501}),
        (raise_key_limit, of_key, {"key_id": key.pk, "requests_per_minute": 500, "priority": "high"}),
        (raise_key_limit, of_key, {"key_id": key.pk, "requests_per_minute": None, "priority": "high"}),
        (change_tenant_limit, of_tenant, {"name": "research", "requests_per_minute": 501}),
        (change_tenant_limit, of_tenant, {"name": "research", "requests_per_minute": None}),
        (change_tenant_limit, of_tenant, {"name": "other", "requests_per_minute": 500}),
        (change_tenant_limit, of_tenant, {"name": "research", "requests_per_minute": 500, "weight": 200}),
        (raise_model_caps, of_model, {"name": "big", "max_tokens": 4097}),
        (raise_model_caps, of_model, {"name": "big", "max_tokens": 4096, "max_queue": 50}),
        (raise_model_caps, of_model, {"name": "big", "max_queue": 4096}),
        (raise_model_caps, of_model, {"name": "big"}),
        (raise_model_caps, of_model, {"name": "other", "max_tokens": 4096}),
        (raise_model_caps, replace(of_model, target="model:other"), {"name": "other", "max_tokens": 4096}),
        (raise_model_caps, replace(of_model, params={"max_tokens": 9999}), {"name": "big", "max_tokens": 9999}),
    ]
    for act, order, asked in rows:
        with subtests.test(f"{act.__name__} {asked}"), transaction.atomic():
            with pytest.raises(ApprovalNeeded):
                act(**{"priority": None} | asked if act is raise_key_limit else asked, actor=ACTOR, order=order)
            assert (caps_of(), caps_of("other")) == ((1024, None, 10), (1, None, None))
    assert raise_model_caps(name="big", max_tokens=4096, actor=ACTOR, order=of_model).max_tokens == 4096


def test_a_batch_raises_several_models_and_stops_at_the_first_that_fails(team: Team) -> None:
    names = ("big", "wide", "last")
    for name in names[1:]:
        allow_model(name=name, max_tokens=2, actor=ACTOR)
    targets = [f"model:{name}" for name in names]
    done, stopped = (propose(team, *targets, max_tokens=most) for most in (2048, 4096))
    approve(team, done)
    run_due()
    assert [caps_of(name)[0] for name in names] == [2048] * 3
    Model.objects.filter(name="wide").delete()
    approve(team, stopped)
    run_due()
    states = [run.state for run in stopped.runs.order_by("position")]
    assert states == [RunState.SUCCEEDED.value, RunState.FAILED.value, RunState.SKIPPED.value]
    assert [caps_of(name)[0] for name in ("big", "last")] == [4096, 2048]


def test_a_standing_approval_raises_again_what_was_lowered_in_between() -> None:
    team = make_team()
    team.start(classes={**DEFAULT_CLASSES, "limit-raise": {**DEFAULT_CLASSES["limit-raise"], "maxUses": 3}})
    operation, states = approve(team, propose(team, "model:big", max_uses=3, max_tokens=4096)), []
    for lower in (False, True, False):
        if lower:
            change_caps(max_tokens=1024)
        use_approval(op_id=operation.pk, proposer=team[0].proposer)
        run_due()
        states.append(operation.runs.latest("use").state)
        assert caps_of()[0] == 4096
    assert states == [RunState.SUCCEEDED.value, RunState.SUCCEEDED.value, RunState.FAILED.value]
    assert len(audited("model.raise")) == 2


REFUSED: list[tuple[list[str], dict[str, object], str, str]] = [
    (["key:{key}"], {"requests_per_minute": 30}, "requests_per_minute", "is 30 today"),
    (["key:{key}"], {"requests_per_minute": 30, "priority": "high"}, "requests_per_minute", "is 30 today"),
    (["key:{key}"], {"requests_per_minute": 0}, "requests_per_minute", ""),
    (["key:{key}"], {"requests_per_minute": True}, "requests_per_minute", ""),
    (["key:{key}"], {"requests_per_minute": "500"}, "requests_per_minute", ""),
    (["key:{key}"], {"priority": "low"}, "priority", ""),
    (["key:{key}"], {}, "params", ""),
    (["key:nobody"], {"requests_per_minute": 500}, "targets", ""),
    (["tenant:nobody"], {"requests_per_minute": 500}, "targets", ""),
    (["tenant:research"], {"priority": "high"}, "priority", ""),
    (["tenant:research"], {"weight": 100}, "weight", "is 100 today"),
    (["tenant:research"], {"weight": 10_001}, "weight", "from 1 to"),
    (["box:research"], {"requests_per_minute": 500}, "targets", ""),
    (["model:big"], {"max_tokens": 1024}, "max_tokens", "is 1024 today"),
    (["model:big"], {"max_tokens": 4096, "max_queue": 9}, "max_queue", "leave it out"),
    (["model:big"], {"max_prompt_chars": LIMITS.max_prompt_chars}, "max_prompt_chars", "no raise"),
    (["model:big"], {"max_tokens": 0}, "max_tokens", "from 1 to"),
    (["model:big"], {"max_queue": True}, "max_queue", "whole number"),
    (["model:big"], {"max_queue": 2**31}, "max_queue", "from 1 to"),
    (["model:big"], {"requests_per_minute": 10**6}, "requests_per_minute", "belongs to keys and tenants"),
    (["model:big"], {"priority": "high"}, "priority", "belongs to keys"),
    (["model:big"], {"context_tokens": 4096}, "params", "nothing else"),
    (["model:big", "tenant:research"], {"max_tokens": 4096}, "max_tokens", "belongs to models"),
    (["tenant:research", "key:{key}"], {"max_queue": 50}, "max_queue", "the tenant research takes requests_per_minute"),
    (["model:big", "model:small"], {"max_tokens": 2048}, "max_tokens", "model small is 2048 today"),
    (["model:nothing"], {"max_tokens": 4096}, "targets", "model:nothing"),
]
"""What is asked for, the field that is named, and some of the words."""


def test_what_cannot_be_asked_for_names_the_field_and_says_why(key: ApiKey) -> None:
    allow_model(name="small", max_tokens=2048, actor=ACTOR)
    for targets, params, param, said in REFUSED:
        with pytest.raises(InvalidProposal, match=re.escape(said) or None) as refusal:
            LIMIT_RAISE.clean([target.format(key=key.pk) for target in targets], params)
        assert refusal.value.param == param, (targets, params)


def read_offer(page: str) -> dict[str, list[str]]:
    """Return what the page proposes, or nothing."""
    found = re.findall(r'href="(/approvals/propose[^"]*)"', page) if "Propose it" in page else [""]
    return parse_qs(urlsplit(unescape(found[0])).query)


def test_a_page_on_which_more_is_asked_for_offers_to_propose_it(boss: Client, team: Team, key: ApiKey, big: Model) -> None:
    none = dict.fromkeys(CAPS, "")
    offered: list[tuple[str, dict[str, Any], dict[str, list[str]]]] = [
        (reverse("admin:gateway_apikey_confirm", args=[key.pk, "limits"]),
         {"requests_per_minute": 500, "allowed_models": [], "priority": "high"},
         {"target": [f"key:{key.pk}"], "requests_per_minute": ["500"], "priority": ["high"]}),
        (reverse("admin:gateway_model_confirm", args=[big.pk, "caps"]), none | {"max_tokens": 4096},
         {"target": ["model:big"], "max_tokens": ["4096"], "max_queue": [str(LIMITS.max_queue)]}),
        (reverse("admin:gateway_model_add"), none | {"name": "seen", "max_tokens": 10**6},
         {"target": ["model:seen"], "max_tokens": [str(10**6)]}),
        (reverse("admin:gateway_model_add"), none | {"name": "new", "max_tokens": 10**6}, {}),
    ]  # fmt: skip
    for url, form, offer in offered:
        page = boss.post(url, form).content.decode()
        assert read_offer(page) == ({"operation": ["limit-raise"], **offer} if offer else {})
    assert not Model.objects.filter(name="new").exists()
    assert not Model.objects.get(name="seen").allowed
    less: list[dict[str, Any]] = [
        {"requests_per_minute": 29, "allowed_models": [], "priority": "low"},
        {"max_tokens": 1000, "max_prompt_chars": 5, "max_queue": 10},
    ]
    assert [boss.post(offered[place][0], form).status_code for place, form in enumerate(less)] == [302, 302]
    assert caps_of() == (1000, 5, 10)


def test_the_preview_says_whose_slots_are_held_and_who_waits(big: Model) -> None:
    (impact,) = LIMIT_RAISE.preview(["model:big"], {"max_tokens": 4096})
    assert (impact.level, "No node serves big now." in impact.text) == ("caution", True)
    for name, slots, draining in (("rig", 4, False), ("other", 2, False), ("away", 8, True)):
        make_presence(make_node(name, model_names=["big"], max_concurrent=slots, draining=draining))
    (impact,) = LIMIT_RAISE.preview(["model:big"], {"max_prompt_chars": 2_000_000})
    assert impact.text.startswith("Longer requests for big hold a slot longer")
    assert impact.text.endswith("2 nodes serve big now, with 6 slots in all.")
    (impact,) = LIMIT_RAISE.preview(["model:big"], {"max_queue": 50})
    assert impact.text.startswith("More requests for big may wait")
