"""What the app of nodes says without a database: a node's status, an error's form, what settings and parameters cannot work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from pytest_django import Settings

from core.limits import NodeLimits
from governance.errors import InvalidProposal
from nodes.checks import check_settings
from nodes.operations.params import DRAIN_FIELDS, EVICT_FIELDS, LOAD_FIELDS, UNLOAD_FIELDS, Field, clean_flush, clean_params
from nodes.states import Freshness, NodeFacts, Obstacle, judge_availability
from tests.fakes.limits import set_limits
from wire.bridge import MUSTER_V1
from wire.contract import NodeMode, NodeStatus
from wire.optoken.approval import canonical

FRESH, STALE, OFFLINE = Freshness.FRESH, Freshness.STALE, Freshness.OFFLINE
AGES = {FRESH: 0.0, STALE: 10.0, OFFLINE: 15.0}
WELL = NodeFacts(
    age_s=1.0, protocol=MUSTER_V1, reported=NodeStatus.AVAILABLE, mode=NodeMode.SPARE_ON, draining=False, cordoned=False,
    is_accepting_jobs=True,
)  # fmt: skip


def test_every_combination_has_the_status_that_overrides_most() -> None:
    for freshness, reported, mode, draining, cordoned, accepting in itertools.product(
        Freshness, NodeStatus, NodeMode, (False, True), (False, True), (False, True)
    ):
        facts = replace(
            WELL, age_s=AGES[freshness], protocol="", reported=reported, mode=mode, draining=draining, cordoned=cordoned,
            is_accepting_jobs=accepting,
        )  # fmt: skip
        found = judge_availability(facts, NodeLimits())
        status = found.status
        assert found.freshness is freshness
        is_able = status in {NodeStatus.AVAILABLE, NodeStatus.BUSY} and freshness is FRESH
        assert (found.obstacle is None) == is_able
        if freshness is OFFLINE or reported is NodeStatus.OFFLINE:
            assert status is NodeStatus.OFFLINE
        elif reported is NodeStatus.ERROR:
            assert status is NodeStatus.ERROR
        elif draining or cordoned or not accepting or mode is NodeMode.SPARE_OFF or reported is NodeStatus.DRAINING:
            assert status is NodeStatus.DRAINING
        else:
            assert status is reported


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({}, None),
        ({"age_s": None}, Obstacle.SILENT),
        ({"reported": NodeStatus.OFFLINE}, Obstacle.SILENT),
        ({"unreachable": "answers with 503"}, Obstacle.UNREACHABLE),
        ({"unreachable": "answers with 503", "age_s": 15.0}, Obstacle.SILENT),
        ({"is_enabled": False}, Obstacle.PROVIDER_OFF),
        ({"reported": NodeStatus.ERROR}, Obstacle.ERROR),
        ({"draining": True, "cordoned": True}, Obstacle.DRAINING),
        ({"draining": True, "is_drained": True}, Obstacle.DRAINED),
        ({"cordoned": True}, Obstacle.CORDONED),
        ({"mode": NodeMode.SPARE_OFF, "is_drained": True}, Obstacle.TAKEN_BACK),
        ({"is_accepting_jobs": False}, Obstacle.HOLDS_BACK),
        ({"reported": NodeStatus.DRAINING}, Obstacle.HOLDS_BACK),
        ({"age_s": 10.0}, Obstacle.LATE),
        ({"reported": NodeStatus.BUSY}, None),
    ],
)
def test_of_what_keeps_work_from_a_node_the_first_is_said(changes: dict[str, Any], obstacle: Obstacle | None) -> None:
    assert judge_availability(replace(WELL, **changes), NodeLimits()).obstacle is obstacle


# Settings


@pytest.mark.parametrize(
    ("changes", "limits", "found"),
    [
        ({}, {}, []),
        ({"NODE_MODEL_CHECK": "nowhere.is_model_allowed"}, {}, ["nodes.E001"]),
        ({"NODE_MODEL_CHECK": "gateway.services.no_such_function"}, {}, ["nodes.E001"]),
        ({"NODE_MODEL_CHECK": "plain"}, {}, ["nodes.E001"]),
        ({"NODE_MODEL_CHECK": "nodes.errors.__doc__"}, {}, ["nodes.E001"]),
        ({"NODE_DIRECT_HOSTS": ["gpu1.lan", "10.0.0.1/8"]}, {}, ["nodes.E002"]),
        ({}, {"stale_after_s": 5.0}, ["nodes.E003"]),
        ({}, {"stale_after_s": 16.0}, ["nodes.E003"]),
        ({}, {"bridge_pong_window_s": 15.0}, ["nodes.E004"]),
    ],
)
def test_settings_that_mean_nothing_or_contradict_each_other_are_errors(
    settings: Settings, changes: dict[str, object], limits: dict[str, float], found: list[str]
) -> None:
    for name, value in changes.items():
        setattr(settings, name, value)
    set_limits(nodes=limits)
    assert [str(message.id) for message in check_settings(None)] == found


# Parameters of operations, in the one form that is signed

LOAD: dict[str, object] = {"modelId": "org/m", "quantization": "awq", "maxContextLength": 4096, "evictModel": "old"}


def test_a_load_is_signed_as_it_was_asked_for() -> None:
    asked = {**LOAD, "gpuMemoryBudgetMB": 9000, "overrides": {"n_ctx": 5, "flags": ["a"], "deep": {"on": True}}}
    assert clean_params(asked, LOAD_FIELDS) == asked
    assert canonical(clean_params(asked, LOAD_FIELDS))
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
        ({"verifiedOpToken": "x"}, "verifiedOpToken", "There is no parameter 'verifiedOpToken' here"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_a_load_that_cannot_be_signed_is_refused_in_words(changes: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidProposal, match=words) as caught:
        clean_params({**LOAD, **changes}, LOAD_FIELDS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"scope": "all"}, None),
        ({"scope": "all", "modelId": "m"}, None),
        ({"scope": "model", "modelId": "m"}, None),
        ({"scope": "tenant", "tenantId": "t"}, None),
        ({"scope": "tenant", "tenantId": "t", "modelId": "m"}, None),
        ({"scope": "tag", "tag": "x"}, None),
        ({"scope": "tag", "tag": "x", "tenantId": "t"}, None),
        ({}, "scope"),
        ({"scope": "world"}, "scope"),
        ({"scope": "model"}, "modelId"),
        ({"scope": "tenant", "modelId": "m"}, "tenantId"),
        ({"scope": "tag"}, "tag"),
        ({"scope": "all", "tenantId": "t"}, "tenantId"),
        ({"scope": "model", "modelId": "m", "tag": "x"}, "tag"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_flush_says_what_its_scope_needs_and_nothing_else(params: dict[str, object], param: str | None) -> None:
    if param is None:
        assert clean_flush(params) == params
        return
    with pytest.raises(InvalidProposal) as caught:
        clean_flush(params)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "fields", "is_good"),
    [
        ({"timeout_s": 0}, DRAIN_FIELDS, True),
        ({"timeout_s": -1}, DRAIN_FIELDS, False),
        ({"timeout_s": 1.5}, DRAIN_FIELDS, False),
        ({}, DRAIN_FIELDS, False),
        ({"timeout_s": 0}, EVICT_FIELDS, False),
        ({"modelId": "m", "force": True}, UNLOAD_FIELDS, True),
        ({"modelId": "m", "force": 1}, UNLOAD_FIELDS, False),
        ({"modelId": "m", "force": "true"}, UNLOAD_FIELDS, False),
    ],
)
def test_a_drain_has_whole_seconds_an_eviction_nothing_and_force_is_true_or_false(
    params: dict[str, object], fields: dict[str, Field], is_good: bool
) -> None:
    if is_good:
        assert clean_params(params, fields) == params
        return
    with pytest.raises(InvalidProposal):
        clean_params(params, fields)
