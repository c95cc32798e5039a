"""What a refusal tells a key about names that it did not use: nothing."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

import pytest

from gateway.admission import Admission
from gateway.catalogue import AliasEntry, Catalogue, ModelEntry
from gateway.errors import GatewayError
from gateway.routing import Alias, Target
from gateway.values import Caller, Limits, PoolOptions

HIDDEN = "project-nightjar-70b"


def make_admission(*, is_allowed: bool) -> Admission:
    def rank(names: Iterable[str], _path: str) -> list[str]:
        return list(names)

    catalogue = Catalogue(Limits())
    row = ModelEntry(HIDDEN, is_allowed, "", max_tokens=9, max_prompt_chars=9, max_queue=9, created=0)
    catalogue.apply_models([row])
    catalogue.apply_aliases([AliasEntry(None, Alias("fast", (Target(HIDDEN), Target("gone"))))])
    return Admission(catalogue, lambda name: False, rank)


@pytest.mark.parametrize("is_allowed", [True, False], ids=["allowed", "not allowed"])
@pytest.mark.parametrize("name", ["fast", "auto", "other"])
def test_a_refusal_names_what_was_asked_for_and_never_the_model_behind_it(name: str, is_allowed: bool) -> None:
    admission = make_admission(is_allowed=is_allowed)
    caller = Caller(uuid.uuid4(), "k", "acme", 60, frozenset({"mine"}))
    with pytest.raises(GatewayError) as refused:
        admission.route(caller, name, "/v1/chat/completions", PoolOptions(fallback_models=("fast",)))
    assert HIDDEN not in refused.value.message
    assert name in refused.value.message or name == "auto"


@pytest.mark.parametrize("name", ["Mine", "mine ", "mine\u200b", "m\u0456ne", "ｍine"], ids=ascii)
def test_a_name_that_looks_like_an_allowed_one_is_another(name: str) -> None:
    admission = make_admission(is_allowed=True)
    with pytest.raises(GatewayError):
        admission.route(Caller(uuid.uuid4(), "k", "acme", 60, frozenset({"mine"})), name, "/v1/chat/completions")
