"""Giving a key or a tenant more needs approval once there is a policy; giving less, and everything before, does not."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import unescape
from io import StringIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import Client
from django.urls import reverse
from django.utils.html import escape

from controlplane.management.commands.bootstrap import MODEL, make_credentials
from core.limits import GatewayLimits
from gateway.models import ApiKey, Model, Tenant
from gateway.operations import LIMIT_RAISE
from gateway.services import (
    ApprovalNeeded,
    allow_model,
    change_key_limits,
    change_model_caps,
    change_model_details,
    change_tenant_limit,
    create_tenant,
    disallow_model,
    raise_key_limit,
    raise_model_caps,
    remember_models,
    revoke_api_key,
)
from governance import services
from governance.errors import InvalidProposal
from governance.models import AuditEvent, Operation, OperationRun
from governance.registry import RunOrder
from governance.states import RunState
from tests.fakes.governed_team import Team, make_governed, make_team
from tests.fakes.nodes import ACTOR, audited
from tests.fakes.tenants import make_key
from wire.contract import ErrorCode
from wire.optoken.proposal import DEFAULT_CLASSES

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


def test_before_the_first_policy_an_operator_raises_alone(key: ApiKey, big: Model) -> None:
    assert change(key, requests_per_minute=1000, priority="high").requests_per_minute == 1000
    assert change_tenant_limit(name="research", requests_per_minute=None, actor=ACTOR).requests_per_minute is None
    change_caps(max_tokens=10**9, max_prompt_chars=10**9, max_queue=10**9)
    change_caps(max_tokens=None, max_prompt_chars=None, max_queue=None)
    allow_model(name="new", max_tokens=10**9, actor=ACTOR)
    assert (caps_of("big"), caps_of("new")) == ((None, None, None), (10**9, None, None))


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


def test_more_is_refused_without_approval_and_changes_nothing(team: Team, key: ApiKey, subtests: pytest.Subtests) -> None:
    before = list(ApiKey.objects.values()), list(Tenant.objects.values()), AuditEvent.objects.count()
    for what, ask in MORE.items():
        with subtests.test(what), transaction.atomic():
            with pytest.raises(ApprovalNeeded, match="limit-raise") as refusal:
                ask(key)
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


def test_what_gives_nobody_more_is_done_at_once(team: Team, key: ApiKey, subtests: pytest.Subtests) -> None:
    for what, act in LESS.items():
        with subtests.test(what), transaction.atomic():
            act(key)
            transaction.set_rollback(True)


def test_an_approved_raise_is_carried_out_and_recorded_under_its_operation(team: Team, key: ApiKey) -> None:
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
    run = carry_out(team, propose(team, "tenant:research", requests_per_minute=SETTING * 2))
    assert (run.state, Tenant.objects.get(name="research").requests_per_minute) == (RunState.SUCCEEDED.value, SETTING * 2)


def test_what_is_revoked_or_gone_meanwhile_fails_with_the_reason(caps_team: Team, key: ApiKey) -> None:
    raises = propose(caps_team, f"key:{key.pk}", requests_per_minute=500), propose_caps(caps_team)
    revoke_api_key(key_id=key.pk, actor=ACTOR)
    Model.objects.all().delete()
    runs = [carry_out(caps_team, operation) for operation in raises]
    assert [run.state for run in runs] == [RunState.FAILED.value] * 2
    assert "is revoked" in runs[0].message
    assert runs[1].message == "There is no model big."
    assert "does not exist any more" in LIMIT_RAISE.describe(["model:big"], {"max_tokens": 4096}).title
    assert LIMIT_RAISE.preview(["model:big"], {"max_tokens": 4096, "max_queue": 50})


def test_what_is_no_raise_any_more_ends_with_the_reason_and_lowers_nothing(caps_team: Team, key: ApiKey) -> None:
    for target in (f"key:{key.pk}", "tenant:research"):
        lower, higher = (propose(caps_team, target, requests_per_minute=rate) for rate in (500, 1000))
        assert carry_out(caps_team, higher).state == RunState.SUCCEEDED.value
        run = carry_out(caps_team, lower)
        assert (run.state, "has 1000 requests per minute by now, and approved were 500" in run.message) == (
            RunState.FAILED.value,
            True,
        )
    assert ApiKey.objects.values_list("requests_per_minute", "tenant__requests_per_minute").get() == (1000, 1000)
    waiting = propose_caps(caps_team, params={"max_tokens": 4096, "max_queue": 50})
    assert carry_out(caps_team, propose_caps(caps_team, params={"max_tokens": 8192})).state == RunState.SUCCEEDED.value
    run = carry_out(caps_team, waiting)
    assert (run.state, caps_of("big")) == (RunState.FAILED.value, (8192, None, 10))
    assert run.message.startswith("The model big has 8192 tokens to generate by now, and approved were 4096")


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


def test_the_description_says_what_is_now_and_what_would_be(key: ApiKey) -> None:
    said = LIMIT_RAISE.describe([f"key:{key.pk}"], {"requests_per_minute": 500, "priority": "high"})
    assert said.title == "Raise the limits of key notebook of research"
    assert [(line.value, line.now) for line in said.lines] == [("500", "30"), ("high", "normal")]
    make_key("follower")
    (impact,) = LIMIT_RAISE.preview(["tenant:research"], {"requests_per_minute": 500})
    assert impact.text.startswith("1 keys of research have no limit of their own")


def find_offer(text: str) -> str:
    """Return where the page leads to propose it, or nothing."""
    found = re.findall(r'href="(/approvals/propose[^"]*)"', text) if "Propose it" in text else []
    return unescape(found[0]) if found else ""


def read_offer(text: str) -> dict[str, list[str]]:
    """Return what the page proposes, or nothing."""
    return parse_qs(urlsplit(find_offer(text)).query)


def test_the_page_of_a_key_says_that_approval_is_needed_and_offers_to_propose_it(boss: Client, team: Team, key: ApiKey) -> None:
    url = reverse("admin:gateway_apikey_confirm", args=[key.pk, "limits"])
    answer = boss.post(url, {"requests_per_minute": 500, "allowed_models": "", "priority": "high"})
    page = answer.content.decode()
    assert answer.status_code == 200
    assert escape("This needs approval") in page
    wanted = {"operation": ["limit-raise"], "target": [f"key:{key.pk}"], "requests_per_minute": ["500"], "priority": ["high"]}
    assert read_offer(page) == wanted
    assert boss.post(url, {"requests_per_minute": 29, "allowed_models": "", "priority": "low"}).status_code == 302


LIMITS = GatewayLimits()
NONE: dict[str, int | None] = {"max_tokens": None, "max_prompt_chars": None, "max_queue": None}


@pytest.fixture
def big() -> Model:
    """An allowed model with a cap on tokens and on the queue, and the default one on prompts."""
    return allow_model(name="big", max_tokens=1024, max_queue=10, actor=ACTOR)


@pytest.fixture
def caps_team(big: Model) -> Team:
    """Three people whose policy is in force; the model is there already."""
    return make_governed()


def change_caps(name: str = "big", **caps: int | None) -> Model:
    """Change the caps that are named and leave the others as they are."""
    now: dict[str, Any] = dict(Model.objects.filter(name=name).values(*NONE).get())
    return change_model_caps(name=name, actor=ACTOR, **(now | caps))


def caps_of(name: str) -> tuple[int | None, ...]:
    model = Model.objects.get(name=name)
    return model.max_tokens, model.max_prompt_chars, model.max_queue


def propose_caps(caps_team: Team, *targets: str, **changes: Any) -> Operation:
    asked: dict[str, Any] = {"params": {"max_tokens": 4096}, "reason": "long reports", "proposer": caps_team[0].proposer}
    return services.propose(operation="limit-raise", targets=targets or ["model:big"], **(asked | changes))


def approve(caps_team: Team, operation: Operation) -> None:
    for member in caps_team.members[1:3]:
        member.approve(operation)


def carry_out(caps_team: Team, operation: Operation) -> OperationRun:
    """Approve an operation of one target, carry it out and return how that went."""
    approve(caps_team, operation)
    services.run_due()
    return operation.runs.get()


def order_of(operation: Operation, params: Mapping[str, object]) -> RunOrder:
    """Return the order for the only run of an approved operation."""
    run = operation.runs.get()
    return RunOrder(
        run_id=run.pk, op_id=operation.printed_id, use=1, operation="limit-raise", target=run.target, params=params, token="",
        token_expires_at=0, requested_by="ana", approved_by=("ben", "cleo"),
    )  # fmt: skip


def declare(name: str, **caps: int | None) -> None:
    """Leave a row that is not allowed, with those caps."""
    Model.objects.create(name=name, allowed=False, **caps)


MORE_CAPS: dict[str, Callable[[], object]] = {
    "tokens": lambda: change_caps(max_tokens=1025),
    "tokens to the setting": lambda: change_caps(max_tokens=None),
    "prompt above the setting": lambda: change_caps(max_prompt_chars=LIMITS.max_prompt_chars + 1),
    "queue to the setting": lambda: change_caps(max_queue=None),
    "one up and one down": lambda: change_caps(max_tokens=1, max_queue=11),
    "allowed again with more": lambda: allow_model(name="big", max_queue=11, actor=ACTOR),
    "new model above the setting": lambda: allow_model(name="new", max_tokens=LIMITS.max_tokens_cap + 1, actor=ACTOR),
    "declared above the setting": lambda: allow_model(name="seen", max_queue=LIMITS.max_queue + 1, actor=ACTOR),
    "declared above its own": lambda: allow_model(name="small", max_tokens=6, actor=ACTOR),
    "caps of what is not allowed": lambda: change_caps("small", max_tokens=6),
}


def test_higher_caps_are_refused_without_approval_and_change_nothing(caps_team: Team, subtests: pytest.Subtests) -> None:
    declare("seen")
    declare("small", max_tokens=5)
    before = list(Model.objects.values()), AuditEvent.objects.count()
    said = r"is more than .* has today, which is \d+\..*propose limit-raise"
    for what, ask in MORE_CAPS.items():
        with subtests.test(what), transaction.atomic():
            with pytest.raises(ApprovalNeeded, match=said) as refusal:
                ask()
            assert (refusal.value.code, refusal.value.status) == (ErrorCode.APPROVAL_REFUSED, 403)
            assert refusal.value.param in NONE
            assert (list(Model.objects.values()), AuditEvent.objects.count()) == before


LESS_CAPS: dict[str, Callable[[], object]] = {
    "tokens": lambda: change_caps(max_tokens=1023),
    "the same": change_caps,
    "from the setting to a number": lambda: change_caps(max_prompt_chars=1),
    "to the same number as the setting": lambda: change_caps(max_prompt_chars=LIMITS.max_prompt_chars),
    "back to the setting from above": lambda: change_caps("huge", max_tokens=None),
    "above the setting and less than today": lambda: change_caps("huge", max_tokens=10**8),
    "details": lambda: change_model_details(
        name="big", fallbacks=[], context_tokens=10**9, tokenizer="big", tidy=True, actor=ACTOR
    ),
    "not allowed and allowed": lambda: [disallow_model(name="huge", actor=ACTOR), allow_model(name="huge", actor=ACTOR)],
    "allowed with what it had": lambda: allow_model(name="huge", max_tokens=10**9, actor=ACTOR),
    "new model": lambda: allow_model(name="new", actor=ACTOR),
    "new model at the setting": lambda: allow_model(name="new", max_tokens=LIMITS.max_tokens_cap, actor=ACTOR),
    "declared": lambda: remember_models(names=["seen"]),
}


def test_caps_that_give_nobody_more_are_changed_at_once(caps_team: Team, subtests: pytest.Subtests) -> None:
    declare("huge", max_tokens=10**9)
    for what, act in LESS_CAPS.items():
        with subtests.test(what), transaction.atomic():
            act()
            transaction.set_rollback(True)


def test_an_approved_raise_is_carried_out_once_with_the_approved_values(caps_team: Team) -> None:
    operation = propose_caps(caps_team, params={"max_tokens": 4096, "max_queue": 50})
    caps_team[1].approve(operation)
    services.run_due()
    assert caps_of("big") == (1024, None, 10)
    caps_team[2].approve(operation)
    services.run_due()
    assert caps_of("big") == (4096, None, 50)
    (event,) = audited("model.raise")
    assert (event.op_id, event.target) == (operation.printed_id, "big")
    assert event.detail == {"from": {"max_tokens": 1024, "max_queue": 10}, "to": {"max_tokens": 4096, "max_queue": 50}}
    change_caps(max_tokens=1)
    services.run_due()
    assert caps_of("big") == (1, None, 50)
    spent = order_of(operation, {"max_tokens": 4096, "max_queue": 50})
    with pytest.raises(ApprovalNeeded):
        raise_model_caps(name="big", max_tokens=4096, max_queue=50, actor=ACTOR, order=spent)


OTHER_CAPS: dict[str, Callable[[RunOrder], object]] = {
    "another value": lambda order: raise_model_caps(name="big", max_tokens=4097, actor=ACTOR, order=order),
    "one value more": lambda order: raise_model_caps(name="big", max_tokens=4096, max_queue=50, actor=ACTOR, order=order),
    "another cap": lambda order: raise_model_caps(name="big", max_queue=4096, actor=ACTOR, order=order),
    "no value": lambda order: raise_model_caps(name="big", actor=ACTOR, order=order),
    "another model": lambda order: raise_model_caps(name="other", max_tokens=4096, actor=ACTOR, order=order),
    "an order for another model": lambda order: raise_model_caps(
        name="other", max_tokens=4096, actor=ACTOR, order=replace(order, target="model:other")
    ),
    "an order of other values": lambda order: raise_model_caps(
        name="big", max_tokens=9999, actor=ACTOR, order=replace(order, params={"max_tokens": 9999})
    ),
}


def test_an_approval_carries_nothing_that_was_not_signed(caps_team: Team, subtests: pytest.Subtests) -> None:
    allow_model(name="other", max_tokens=1, actor=ACTOR)
    operation = propose_caps(caps_team)
    approve(caps_team, operation)
    approved = order_of(operation, {"max_tokens": 4096})
    for what, act in OTHER_CAPS.items():
        with subtests.test(what), transaction.atomic():
            with pytest.raises(ApprovalNeeded):
                act(approved)
            assert (caps_of("big"), caps_of("other")) == ((1024, None, 10), (1, None, None))
    raised = raise_model_caps(name="big", max_tokens=4096, actor=ACTOR, order=approved)
    assert raised.max_tokens == 4096


def test_a_batch_raises_several_models_and_stops_at_the_first_that_fails(caps_team: Team) -> None:
    allow_model(name="wide", max_tokens=2, actor=ACTOR)
    allow_model(name="last", max_tokens=2, actor=ACTOR)
    targets = ["model:big", "model:wide", "model:last"]
    done, stopped = propose_caps(caps_team, *targets, params={"max_tokens": 2048}), propose_caps(caps_team, *targets)
    approve(caps_team, done)
    services.run_due()
    assert [caps_of(name)[0] for name in ("big", "wide", "last")] == [2048] * 3
    Model.objects.filter(name="wide").delete()
    approve(caps_team, stopped)
    services.run_due()
    states = [run.state for run in stopped.runs.order_by("position")]
    assert states == [RunState.SUCCEEDED.value, RunState.FAILED.value, RunState.SKIPPED.value]
    assert [caps_of(name)[0] for name in ("big", "last")] == [4096, 2048]


def test_a_standing_approval_raises_again_what_was_lowered_in_between(big: Model) -> None:
    team = make_team()
    team.start(classes={**DEFAULT_CLASSES, "limit-raise": {**DEFAULT_CLASSES["limit-raise"], "maxUses": 3}})
    operation = propose_caps(team, max_uses=3)
    approve(team, operation)
    states = []
    for lower in (False, True, False):
        if lower:
            change_caps(max_tokens=1024)
        services.use_approval(op_id=operation.pk, proposer=team[0].proposer)
        services.run_due()
        states.append(operation.runs.latest("use").state)
        assert caps_of("big")[0] == 4096
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


def test_what_cannot_be_asked_for_names_the_field_and_says_why(key: ApiKey, big: Model) -> None:
    allow_model(name="small", max_tokens=2048, actor=ACTOR)
    for targets, params, param, said in REFUSED:
        with pytest.raises(InvalidProposal, match=re.escape(said) or None) as refusal:
            LIMIT_RAISE.clean([target.format(key=key.pk) for target in targets], params)
        assert refusal.value.param == param, (targets, params)


def test_the_page_of_a_model_says_that_approval_is_needed_and_offers_what_is_more(
    boss: Client, caps_team: Team, big: Model
) -> None:
    url = reverse("admin:gateway_model_confirm", args=[big.pk, "caps"])
    page = boss.post(url, {"max_tokens": 4096, "max_prompt_chars": "", "max_queue": ""}).content.decode()
    assert "This needs approval" in page
    asked = {"max_tokens": ["4096"], "max_queue": [str(LIMITS.max_queue)]}
    assert read_offer(page) == {"operation": ["limit-raise"], "target": ["model:big"], **asked}
    form = boss.get(find_offer(page)).content.decode()
    assert re.search(r'<input type="checkbox" name="targets" value="model:big"[^>]* checked', form)
    for name, (value,) in asked.items():
        assert re.search(rf'<input type="number" name="param-{name}" value="{value}"', form)
    assert boss.post(url, {"max_tokens": 1000, "max_prompt_chars": 5, "max_queue": 10}).status_code == 302
    assert caps_of("big") == (1000, 5, 10)


def test_commands_go_on_under_a_policy_and_say_what_to_do_where_they_may_not(caps_team: Team) -> None:
    for most in ("100", "99"):
        call_command("allow_model", "tiny", "--max-tokens", most, stdout=StringIO())
    with pytest.raises(CommandError, match="100 tokens to generate is more than the model tiny has today, which is 99"):
        call_command("allow_model", "tiny", "--max-tokens", "100", stdout=StringIO())
    make_credentials({})
    call_command("demo_governance", "--model", "shown", stdout=StringIO())
    assert Model.objects.filter(name__in=(MODEL, "shown"), allowed=True).count() == 2


def test_allowing_a_declared_model_with_more_offers_to_raise_it_and_a_new_one_says_what_to_do(
    boss: Client, caps_team: Team
) -> None:
    remember_models(names=["seen"])
    url, more = reverse("admin:gateway_model_add"), {"max_tokens": 10**6, "max_prompt_chars": "", "max_queue": ""}
    page = boss.post(url, {"name": "seen", **more}).content.decode()
    assert read_offer(page) == {"operation": ["limit-raise"], "target": ["model:seen"], "max_tokens": [str(10**6)]}
    page = boss.post(url, {"name": "new", **more}).content.decode()
    assert "Allow it without, then have it raised." in page
    assert find_offer(page) == ""
    assert not Model.objects.filter(name="new").exists()
    assert not Model.objects.get(name="seen").allowed
    assert boss.post(url, {"name": "new", **more, "max_tokens": ""}).status_code == 302
