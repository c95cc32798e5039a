"""Parameters of operations in the one form that is signed, and what is refused with which words."""

from __future__ import annotations

import pytest

from governance.errors import InvalidProposal
from nodes.operations.params import DRAIN_FIELDS, EVICT_FIELDS, LOAD_FIELDS, UNLOAD_FIELDS, Field, clean_flush, clean_params
from wire.optoken.approval import canonical

LOAD: dict[str, object] = {"modelId": "org/m", "quantization": "awq", "maxContextLength": 4096, "evictModel": "old"}


def test_a_load_is_signed_as_it_was_asked_for() -> None:
    asked = {**LOAD, "gpuMemoryBudgetMB": 9000, "overrides": {"n_ctx": 5, "flags": ["a"], "deep": {"on": True}}}
    assert clean_params(asked, LOAD_FIELDS) == asked
    assert canonical(clean_params(asked, LOAD_FIELDS))


def test_what_is_null_or_empty_is_left_out() -> None:
    assert clean_params({"modelId": "m", "quantization": None, "evictModel": ""}, LOAD_FIELDS) == {"modelId": "m"}


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"modelId": ""}, "modelId", "must be given"),
        ({"modelId": 7}, "modelId", "printable text"),
        ({"modelId": "a\u202eb"}, "modelId", "printable text"),
        ({"modelId": " m"}, "modelId", "outer blanks"),
        ({"modelId": "m" * 201}, "modelId", "at most 200"),
        ({"maxContextLength": 4096.0}, "maxContextLength", "only whole numbers can be signed"),
        ({"maxContextLength": 0}, "maxContextLength", "from 1 to"),
        ({"maxContextLength": True}, "maxContextLength", "whole number"),
        ({"maxContextLength": "4096"}, "maxContextLength", "whole number"),
        ({"gpuMemoryBudgetMB": 2**31}, "gpuMemoryBudgetMB", "whole number"),
        ({"overrides": {"gpu_memory_utilization": 0.9}}, "overrides.gpu_memory_utilization", "only whole numbers"),
        ({"overrides": {"a": {"b": [1, 0.5]}}}, "overrides.a.b", "only whole numbers"),
        ({"overrides": [1]}, "overrides", "must be an object"),
        ({"overrides": {"a": None}}, "params", "cannot be signed"),
        ({"overrides": {"ä": 1}}, "params", "cannot be signed"),
        ({"overrides": {str(number): 1 for number in range(65)}}, "overrides", "at most 64"),
        ({"reason": "please"}, "reason", "There is no parameter 'reason' here"),
        ({"verifiedOpToken": "x"}, "verifiedOpToken", "There is no parameter"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_a_load_that_cannot_be_signed_is_refused_in_words(changes: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidProposal, match=words) as caught:
        clean_params({**LOAD, **changes}, LOAD_FIELDS)
    assert caught.value.param == param


@pytest.mark.parametrize("force", [1, "true", "yes"])
def test_force_is_true_or_false(force: object) -> None:
    assert clean_params({"modelId": "m", "force": True}, UNLOAD_FIELDS) == {"modelId": "m", "force": True}
    with pytest.raises(InvalidProposal, match="true or false"):
        clean_params({"modelId": "m", "force": force}, UNLOAD_FIELDS)


@pytest.mark.parametrize(
    "params",
    [
        {"scope": "all"},
        {"scope": "all", "modelId": "m"},
        {"scope": "model", "modelId": "m"},
        {"scope": "tenant", "tenantId": "t"},
        {"scope": "tenant", "tenantId": "t", "modelId": "m"},
        {"scope": "tag", "tag": "x"},
        {"scope": "tag", "tag": "x", "tenantId": "t"},
    ],
    ids=lambda params: "-".join(params.values()),
)
def test_a_flush_says_what_its_scope_needs(params: dict[str, object]) -> None:
    assert clean_flush(params) == params


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({}, "scope"),
        ({"scope": "world"}, "scope"),
        ({"scope": "model"}, "modelId"),
        ({"scope": "tenant", "modelId": "m"}, "tenantId"),
        ({"scope": "tag"}, "tag"),
        ({"scope": "all", "tenantId": "t"}, "tenantId"),
        ({"scope": "model", "modelId": "m", "tag": "x"}, "tag"),
    ],
    ids=["no scope", "unknown scope", "no model", "no tenant", "no tag", "tenant of all", "tag of a model"],
)
def test_a_flush_that_would_mean_something_else_is_refused(params: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidProposal) as caught:
        clean_flush(params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({"timeout_s": -1}, DRAIN_FIELDS),
        ({"timeout_s": 1.5}, DRAIN_FIELDS),
        ({}, DRAIN_FIELDS),
        ({"timeout_s": 0}, EVICT_FIELDS),
    ],
    ids=["negative", "a fraction", "missing", "of an eviction"],
)
def test_a_drain_has_whole_seconds_and_an_eviction_nothing(params: dict[str, object], fields: dict[str, Field]) -> None:
    assert clean_params({"timeout_s": 0}, DRAIN_FIELDS) == {"timeout_s": 0}
    with pytest.raises(InvalidProposal):
        clean_params(params, fields)
