"""Raising the caps of a model needs approval once there is a policy; lowering them, and everything before, does not."""

from __future__ import annotations

import re
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

from controlplane.management.commands.bootstrap import MODEL, make_credentials
from core.limits import GatewayLimits
from gateway.models import Model
from gateway.operations import LIMIT_RAISE
from gateway.services import (
    ApprovalNeeded,
    allow_model,
    change_model_caps,
    change_model_details,
    create_tenant,
    disallow_model,
    raise_model_caps,
    remember_models,
)
from governance import services
from governance.errors import InvalidProposal
from governance.models import AuditEvent, Operation, OperationRun
from governance.registry import RunOrder
from governance.states import RunState
from tests.system.gateway_admin.factories import ACTOR, audited, make_key
from tests.system.governance.team import Team, make_governed, make_team
from tests.system.nodes.factories import make_node, make_presence
from wire.contract import ErrorCode
from wire.optoken.proposal import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db
LIMITS = GatewayLimits()
NONE: dict[str, int | None] = {"max_tokens": None, "max_prompt_chars": None, "max_queue": None}


@pytest.fixture
def big() -> Model:
    """An allowed model with a cap on tokens and on the queue, and the default one on prompts."""
    return allow_model(name="big", max_tokens=1024, max_queue=10, actor=ACTOR)


@pytest.fixture
def team(big: Model) -> Team:
    """Three people whose policy is in force; the model is there already."""
    return make_governed()


def change(name: str = "big", **caps: int | None) -> Model:
    """Change the caps that are named and leave the others as they are."""
    now: dict[str, Any] = dict(Model.objects.filter(name=name).values(*NONE).get())
    return change_model_caps(name=name, actor=ACTOR, **(now | caps))


def caps_of(name: str) -> tuple[int | None, ...]:
    model = Model.objects.get(name=name)
    return model.max_tokens, model.max_prompt_chars, model.max_queue


def propose(team: Team, *targets: str, **changes: Any) -> Operation:
    asked: dict[str, Any] = {"params": {"max_tokens": 4096}, "reason": "long reports", "proposer": team[0].proposer}
    return services.propose(operation="limit-raise", targets=targets or ["model:big"], **(asked | changes))


def approve(team: Team, operation: Operation) -> None:
    for member in team.members[1:3]:
        member.approve(operation)


def carry_out(team: Team, operation: Operation) -> OperationRun:
    """Approve an operation of one target, carry it out and return how that went."""
    approve(team, operation)
    services.run_due()
    return operation.runs.get()


def order_of(operation: Operation, params: Mapping[str, object]) -> RunOrder:
    """Return the order for the only run of an approved operation."""
    run = operation.runs.get()
    return RunOrder(
        run_id=run.pk, op_id=operation.printed_id, use=1, operation="limit-raise", target=run.target, params=params, token="",
        token_expires_at=0, requested_by="ana", approved_by=("ben", "cleo"),
    )  # fmt: skip


def test_before_the_first_policy_an_operator_raises_caps_alone(big: Model) -> None:
    change(max_tokens=10**9, max_prompt_chars=10**9, max_queue=10**9)
    change(max_tokens=None, max_prompt_chars=None, max_queue=None)
    allow_model(name="new", max_tokens=10**9, actor=ACTOR)
    assert (caps_of("big"), caps_of("new")) == ((None, None, None), (10**9, None, None))


def declare(name: str, **caps: int | None) -> None:
    """Leave a row that is not allowed, with those caps."""
    Model.objects.create(name=name, allowed=False, **caps)


MORE: dict[str, Callable[[], object]] = {
    "tokens": lambda: change(max_tokens=1025),
    "tokens to the setting": lambda: change(max_tokens=None),
    "prompt above the setting": lambda: change(max_prompt_chars=LIMITS.max_prompt_chars + 1),
    "queue to the setting": lambda: change(max_queue=None),
    "one up and one down": lambda: change(max_tokens=1, max_queue=11),
    "allowed again with more": lambda: allow_model(name="big", max_queue=11, actor=ACTOR),
    "new model above the setting": lambda: allow_model(name="new", max_tokens=LIMITS.max_tokens_cap + 1, actor=ACTOR),
    "declared above the setting": lambda: allow_model(name="seen", max_queue=LIMITS.max_queue + 1, actor=ACTOR),
    "declared above its own": lambda: allow_model(name="small", max_tokens=6, actor=ACTOR),
    "caps of what is not allowed": lambda: change("small", max_tokens=6),
}


def test_higher_caps_are_refused_without_approval_and_change_nothing(team: Team, subtests: pytest.Subtests) -> None:
    declare("seen")
    declare("small", max_tokens=5)
    before = list(Model.objects.values()), AuditEvent.objects.count()
    said = r"is more than .* has today, which is \d+\..*propose limit-raise"
    for what, ask in MORE.items():
        with subtests.test(what), transaction.atomic():
            with pytest.raises(ApprovalNeeded, match=said) as refusal:
                ask()
            assert (refusal.value.code, refusal.value.status) == (ErrorCode.APPROVAL_REFUSED, 403)
            assert refusal.value.param in NONE
            assert (list(Model.objects.values()), AuditEvent.objects.count()) == before


LESS: dict[str, Callable[[], object]] = {
    "tokens": lambda: change(max_tokens=1023),
    "the same": change,
    "from the setting to a number": lambda: change(max_prompt_chars=1),
    "to the same number as the setting": lambda: change(max_prompt_chars=LIMITS.max_prompt_chars),
    "back to the setting from above": lambda: change("huge", max_tokens=None),
    "above the setting and less than today": lambda: change("huge", max_tokens=10**8),
    "details": lambda: change_model_details(
        name="big", fallbacks=[], context_tokens=10**9, tokenizer="big", tidy=True, actor=ACTOR
    ),
    "not allowed and allowed": lambda: [disallow_model(name="huge", actor=ACTOR), allow_model(name="huge", actor=ACTOR)],
    "allowed with what it had": lambda: allow_model(name="huge", max_tokens=10**9, actor=ACTOR),
    "new model": lambda: allow_model(name="new", actor=ACTOR),
    "new model at the setting": lambda: allow_model(name="new", max_tokens=LIMITS.max_tokens_cap, actor=ACTOR),
    "declared": lambda: remember_models(names=["seen"]),
}


def test_what_gives_nobody_more_is_done_at_once(team: Team, subtests: pytest.Subtests) -> None:
    declare("huge", max_tokens=10**9)
    for what, act in LESS.items():
        with subtests.test(what), transaction.atomic():
            act()
            transaction.set_rollback(True)


def test_what_is_allowed_with_too_much_says_what_can_be_done_at_once(team: Team) -> None:
    with pytest.raises(ApprovalNeeded, match=r"a new model has today, which is .* Allow it without, then have it raised\."):
        allow_model(name="new", max_tokens=10**9, max_queue=10**9, actor=ACTOR)


def test_an_approved_raise_is_carried_out_once_with_the_approved_values(team: Team) -> None:
    operation = propose(team, params={"max_tokens": 4096, "max_queue": 50})
    team[1].approve(operation)
    services.run_due()
    assert caps_of("big") == (1024, None, 10)
    team[2].approve(operation)
    services.run_due()
    assert caps_of("big") == (4096, None, 50)
    (event,) = audited("model.raise")
    assert (event.op_id, event.target) == (operation.printed_id, "big")
    assert event.detail == {"from": {"max_tokens": 1024, "max_queue": 10}, "to": {"max_tokens": 4096, "max_queue": 50}}
    change(max_tokens=1)
    services.run_due()
    assert caps_of("big") == (1, None, 50)
    spent = order_of(operation, {"max_tokens": 4096, "max_queue": 50})
    with pytest.raises(ApprovalNeeded):
        raise_model_caps(name="big", max_tokens=4096, max_queue=50, actor=ACTOR, order=spent)


def test_a_raise_above_the_setting_is_carried_out(team: Team) -> None:
    run = carry_out(team, propose(team, params={"max_prompt_chars": LIMITS.max_prompt_chars * 2}))
    assert run.state == RunState.SUCCEEDED.value
    assert caps_of("big") == (1024, LIMITS.max_prompt_chars * 2, 10)


OTHERS: dict[str, Callable[[RunOrder], object]] = {
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


def test_an_approval_carries_nothing_that_was_not_signed(team: Team, subtests: pytest.Subtests) -> None:
    allow_model(name="other", max_tokens=1, actor=ACTOR)
    operation = propose(team)
    approve(team, operation)
    approved = order_of(operation, {"max_tokens": 4096})
    for what, act in OTHERS.items():
        with subtests.test(what), transaction.atomic():
            with pytest.raises(ApprovalNeeded):
                act(approved)
            assert (caps_of("big"), caps_of("other")) == ((1024, None, 10), (1, None, None))
    raised = raise_model_caps(name="big", max_tokens=4096, actor=ACTOR, order=approved)
    assert raised.max_tokens == 4096


def test_what_is_no_raise_any_more_ends_with_the_reason_and_lowers_nothing(team: Team) -> None:
    waiting, first = propose(team, params={"max_tokens": 4096, "max_queue": 50}), propose(team, params={"max_tokens": 8192})
    assert carry_out(team, first).state == RunState.SUCCEEDED.value
    run = carry_out(team, waiting)
    assert (run.state, caps_of("big")) == (RunState.FAILED.value, (8192, None, 10))
    assert run.message.startswith("The model big has 8192 tokens to generate by now, and approved were 4096")


def test_what_was_lowered_meanwhile_is_raised_to_what_was_approved(team: Team) -> None:
    operation = propose(team)
    change(max_tokens=5)
    assert carry_out(team, operation).state == RunState.SUCCEEDED.value
    assert caps_of("big") == (4096, None, 10)


def test_a_model_that_is_gone_ends_with_the_reason(team: Team) -> None:
    operation = propose(team)
    Model.objects.all().delete()
    run = carry_out(team, operation)
    assert (run.state, run.message) == (RunState.FAILED.value, "There is no model big.")
    assert "does not exist any more" in LIMIT_RAISE.describe(["model:big"], {"max_tokens": 4096}).title
    assert LIMIT_RAISE.preview(["model:big"], {"max_tokens": 4096, "max_queue": 50})


def test_a_batch_raises_several_models_and_stops_at_the_first_that_fails(team: Team) -> None:
    allow_model(name="wide", max_tokens=2, actor=ACTOR)
    allow_model(name="last", max_tokens=2, actor=ACTOR)
    targets = ["model:big", "model:wide", "model:last"]
    done, stopped = propose(team, *targets, params={"max_tokens": 2048}), propose(team, *targets)
    approve(team, done)
    services.run_due()
    assert [caps_of(name)[0] for name in ("big", "wide", "last")] == [2048] * 3
    Model.objects.filter(name="wide").delete()
    approve(team, stopped)
    services.run_due()
    states = [run.state for run in stopped.runs.order_by("position")]
    assert states == [RunState.SUCCEEDED.value, RunState.FAILED.value, RunState.SKIPPED.value]
    assert [caps_of(name)[0] for name in ("big", "last")] == [4096, 2048]


def test_a_standing_approval_raises_again_what_was_lowered_in_between(big: Model) -> None:
    team = make_team()
    team.start(classes={**DEFAULT_CLASSES, "limit-raise": {**DEFAULT_CLASSES["limit-raise"], "maxUses": 3}})
    operation = propose(team, max_uses=3)
    approve(team, operation)
    states = []
    for lower in (False, True, False):
        if lower:
            change(max_tokens=1024)
        services.use_approval(op_id=operation.pk, proposer=team[0].proposer)
        services.run_due()
        states.append(operation.runs.latest("use").state)
        assert caps_of("big")[0] == 4096
    assert states == [RunState.SUCCEEDED.value, RunState.SUCCEEDED.value, RunState.FAILED.value]
    assert len(audited("model.raise")) == 2


REFUSED: dict[str, tuple[list[str], dict[str, object], str, str]] = {
    "no raise": (["model:big"], {"max_tokens": 1024}, "max_tokens", "is 1024 today"),
    "one of two": (["model:big"], {"max_tokens": 4096, "max_queue": 9}, "max_queue", "leave it out"),
    "the setting": (["model:big"], {"max_prompt_chars": LIMITS.max_prompt_chars}, "max_prompt_chars", "no raise"),
    "zero": (["model:big"], {"max_tokens": 0}, "max_tokens", "from 1 to"),
    "true": (["model:big"], {"max_queue": True}, "max_queue", "whole number"),
    "too large": (["model:big"], {"max_queue": 2**31}, "max_queue", "from 1 to"),
    "rate": (["model:big"], {"requests_per_minute": 10**6}, "requests_per_minute", "belongs to keys and tenants"),
    "priority": (["model:big"], {"priority": "high"}, "priority", "belongs to keys"),
    "unknown": (["model:big"], {"context_tokens": 4096}, "params", "nothing else"),
    "mixed": (["model:big", "tenant:research"], {"max_tokens": 4096}, "max_tokens", "belongs to models"),
    "other kinds": (
        ["tenant:research", "key:{key}"],
        {"max_queue": 50},
        "max_queue",
        "the tenant research takes requests_per_minute",
    ),
    "one of the models": (["model:big", "model:small"], {"max_tokens": 2048}, "max_tokens", "model small is 2048 today"),
    "no model": (["model:nothing"], {"max_tokens": 4096}, "targets", "model:nothing"),
}
"""What is asked for, the field that is named, and some of the words."""


def test_what_cannot_be_asked_for_names_the_field_and_says_why(big: Model, subtests: pytest.Subtests) -> None:
    key, _ = make_key()
    allow_model(name="small", max_tokens=2048, actor=ACTOR)
    for what, (targets, params, param, said) in REFUSED.items():
        with subtests.test(what):
            with pytest.raises(InvalidProposal, match=re.escape(said)) as refusal:
                LIMIT_RAISE.clean([target.format(key=key.pk) for target in targets], params)
            assert refusal.value.param == param


def test_targets_of_several_kinds_go_together_where_the_params_fit_all_of_them(big: Model) -> None:
    create_tenant(name="research", requests_per_minute=5, actor=ACTOR)
    key, _ = make_key(requests_per_minute=4)
    targets = ["tenant:research", f"key:{key.pk}"]
    assert LIMIT_RAISE.clean(targets, {"requests_per_minute": 9}).targets == tuple(targets)


def test_the_description_says_what_is_now_and_what_would_be(big: Model) -> None:
    said = LIMIT_RAISE.describe(["model:big"], {"max_queue": 50, "max_tokens": 4096, "max_prompt_chars": 2_000_000})
    assert said.title == "Raise the limits of model big"
    assert [(line.label, line.value, line.now) for line in said.lines] == [
        ("Most tokens to generate of model big", "4096", "1024"),
        ("Longest prompt in characters of model big", "2000000", str(LIMITS.max_prompt_chars)),
        ("Longest queue in requests of model big", "50", "10"),
    ]


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


def read_offer(text: str) -> str:
    """Return where the page leads to propose it, or nothing."""
    if "Propose it" not in text:
        return ""
    (address,) = re.findall(r'href="(/approvals/propose[^"]*)"', text)
    return unescape(address)


def test_the_page_of_a_model_says_that_approval_is_needed_and_offers_what_is_more(boss: Client, team: Team, big: Model) -> None:
    url = reverse("admin:gateway_model_confirm", args=[big.pk, "caps"])
    page = boss.post(url, {"max_tokens": 4096, "max_prompt_chars": "", "max_queue": ""}).content.decode()
    assert "This needs approval" in page
    offer = read_offer(page)
    assert parse_qs(urlsplit(offer).query) == {
        "operation": ["limit-raise"], "target": ["model:big"], "max_tokens": ["4096"], "max_queue": [str(LIMITS.max_queue)],
    }  # fmt: skip
    form = boss.get(offer).content.decode()
    assert re.search(r'<input type="checkbox" name="targets" value="model:big"[^>]* checked', form)
    for name, value in (("max_tokens", 4096), ("max_queue", LIMITS.max_queue)):
        assert re.search(rf'<input type="number" name="param-{name}" value="{value}"', form)
    assert re.search(r'<input type="number" name="param-max_prompt_chars"(?! value)', form)
    assert boss.post(url, {"max_tokens": 1000, "max_prompt_chars": 5, "max_queue": 10}).status_code == 302
    assert caps_of("big") == (1000, 5, 10)


def test_allowing_a_declared_model_with_more_offers_to_raise_it_and_a_new_one_says_what_to_do(boss: Client, team: Team) -> None:
    remember_models(names=["seen"])
    url, more = reverse("admin:gateway_model_add"), {"max_tokens": 10**6, "max_prompt_chars": "", "max_queue": ""}
    page = boss.post(url, {"name": "seen", **more}).content.decode()
    assert parse_qs(urlsplit(read_offer(page)).query) == {
        "operation": ["limit-raise"], "target": ["model:seen"], "max_tokens": [str(10**6)],
    }  # fmt: skip
    page = boss.post(url, {"name": "new", **more}).content.decode()
    assert "Allow it without, then have it raised." in page
    assert read_offer(page) == ""
    assert not Model.objects.filter(name="new").exists()
    assert not Model.objects.get(name="seen").allowed
    assert boss.post(url, {"name": "new", **more, "max_tokens": ""}).status_code == 302


def test_a_declared_model_is_offered_as_one_and_can_be_raised_before_it_is_allowed(team: Team) -> None:
    remember_models(names=["seen"])
    offered = dict(LIMIT_RAISE.choices()["targets"])  # type: ignore[call-overload]  # what a page reads
    assert offered["model:big"] == f"model big (1,024 tokens, {LIMITS.max_prompt_chars:,} characters, 10 waiting)"
    assert offered["model:seen"].endswith("; not allowed yet)")
    carry_out(team, propose(team, "model:seen", params={"max_tokens": 10**6}))
    assert caps_of("seen") == (10**6, None, None)
    assert not Model.objects.get(name="seen").allowed
    assert allow_model(name="seen", actor=ACTOR).max_tokens == 10**6


def test_commands_go_on_under_a_policy_and_say_what_to_do_where_they_may_not(team: Team) -> None:
    call_command("allow_model", "tiny", "--max-tokens", "100", stdout=StringIO())
    call_command("allow_model", "tiny", "--max-tokens", "99", stdout=StringIO())
    with pytest.raises(CommandError, match="100 tokens to generate is more than the model tiny has today, which is 99"):
        call_command("allow_model", "tiny", "--max-tokens", "100", stdout=StringIO())
    make_credentials({})
    call_command("demo_governance", "--model", "shown", stdout=StringIO())
    assert Model.objects.filter(name__in=(MODEL, "shown"), allowed=True).count() == 2
