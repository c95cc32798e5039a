"""Tenants, keys and the allow-list change through one function each, which also writes the audit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.utils import timezone
from pytest_django import DjangoCaptureOnCommitCallbacks

from core.limits import GatewayLimits
from gateway.catalogue import Catalogue
from gateway.models import ApiKey, Model
from gateway.services import (
    InvalidValue,
    KeyRevoked,
    ModelNotFound,
    NameTaken,
    TenantNotFound,
    allow_model,
    change_key_limits,
    change_model_canary,
    create_api_key,
    create_tenant,
    disallow_model,
    is_model_allowed,
    remember_models,
    revoke_api_key,
)
from gateway.values import Priority
from tests.fakes.nodes import ACTOR, audited
from tests.fakes.tenants import make_key, make_tenant

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
