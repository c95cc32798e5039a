"""Providers: made, switched off and on, ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nodes.errors import BadRequest, Conflict, ProviderNotFound
from nodes.models import Provider, ProviderState
from nodes.services import create_provider, delete_provider, disable_provider, enable_provider, find_credential
from tests.fakes.nodes import ACTOR, audited, make_credential, make_provider

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("name", ["", "-a", "a b", "ä", "a/b", "x" * 61, "a\n"])
def test_a_name_that_cannot_stand_in_a_url_is_refused(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        create_provider(name=name, actor=ACTOR)
    assert caught.value.param == "name"


def test_a_name_is_taken_once() -> None:
    make_provider()
    with pytest.raises(Conflict):
        create_provider(name="local", actor=ACTOR)
    assert len(audited("provider.create")) == 1


def test_switching_off_and_on_is_recorded_once_each() -> None:
    make_provider()
    assert disable_provider(name="local", actor=ACTOR).state == ProviderState.DISABLED
    assert disable_provider(name="local", actor=ACTOR).state == ProviderState.DISABLED
    assert enable_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert enable_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert len(audited("provider.disable")) == len(audited("provider.enable")) == 1


def test_every_change_touches_updated_at() -> None:
    before = make_provider().updated_at
    for change in (disable_provider, enable_provider, delete_provider):
        after = change(name="local", actor=ACTOR).updated_at
        assert after > before
        before = after


@pytest.mark.parametrize("change", [enable_provider, disable_provider, delete_provider])
def test_a_provider_that_is_not_there_cannot_be_changed(change: Callable[..., Provider]) -> None:
    make_provider("gone")
    delete_provider(name="gone", actor=ACTOR)
    for name in ("gone", "never"):
        with pytest.raises(ProviderNotFound):
            change(name=name, actor=ACTOR)


def test_deleting_revokes_its_credentials_and_coming_back_does_not_revive_them() -> None:
    _, text = make_credential()
    _, other = make_credential(provider="other")
    delete_provider(name="local", actor=ACTOR)
    assert find_credential(text) is None
    assert find_credential(other) is not None
    assert audited("provider.delete")[0].detail == {"revoked_credentials": 1}
    assert create_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert find_credential(text) is None
