"""What the app of nodes says without a database: the status of a node, the wire form of an error, what settings cannot work."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from pytest_django import Settings

from core.limits import NodeLimits
from nodes import errors
from nodes.checks import check_settings
from nodes.states import (
    Freshness,
    NodeFacts,
    Obstacle,
    freshness_windows,
    judge_availability,
    judge_freshness,
)
from tests.fakes.limits import set_limits
from wire.bridge import BRIDGE_V1, MUSTER_V1
from wire.contract import NodeMode, NodeStatus


@pytest.mark.parametrize(
    ("age_s", "freshness"),
    [
        (None, Freshness.OFFLINE),
        (0.0, Freshness.FRESH),
        (9.99, Freshness.FRESH),
        (10.0, Freshness.STALE),
        (14.99, Freshness.STALE),
        (15.0, Freshness.OFFLINE),
        (1e9, Freshness.OFFLINE),
    ],
)
def test_freshness_follows_the_contracts_ten_and_fifteen_seconds(age_s: float | None, freshness: Freshness) -> None:
    assert judge_freshness(age_s, NodeLimits(), protocol="") is freshness


AGES = {Freshness.FRESH: 0.0, Freshness.STALE: 10.0, Freshness.OFFLINE: 15.0}


def test_every_combination_has_the_status_that_overrides_most() -> None:
    for freshness, reported, mode, draining, cordoned, accepting in itertools.product(
        Freshness, NodeStatus, NodeMode, (False, True), (False, True), (False, True)
    ):
        facts = NodeFacts(
            age_s=AGES[freshness],
            protocol="",
            reported=reported,
            mode=mode,
            draining=draining,
            cordoned=cordoned,
            is_accepting_jobs=accepting,
        )
        found = judge_availability(facts, NodeLimits())
        status = found.status
        assert found.freshness is freshness
        is_able = status in {NodeStatus.AVAILABLE, NodeStatus.BUSY} and freshness is Freshness.FRESH
        assert (found.obstacle is None) == is_able
        if freshness is Freshness.OFFLINE or reported is NodeStatus.OFFLINE:
            assert status is NodeStatus.OFFLINE
        elif reported is NodeStatus.ERROR:
            assert status is NodeStatus.ERROR
        elif draining or cordoned or not accepting or mode is NodeMode.SPARE_OFF or reported is NodeStatus.DRAINING:
            assert status is NodeStatus.DRAINING
        else:
            assert status is reported
            assert status in {NodeStatus.AVAILABLE, NodeStatus.BUSY}


def test_a_bridge_v1_worker_is_judged_by_its_pong_window() -> None:
    policy = NodeLimits()
    assert freshness_windows(policy, protocol=BRIDGE_V1) == (45.0, 45.0)
    assert freshness_windows(policy, protocol=MUSTER_V1) == freshness_windows(policy, protocol="") == (10.0, 15.0)


WELL = NodeFacts(
    age_s=1.0,
    protocol=MUSTER_V1,
    reported=NodeStatus.AVAILABLE,
    mode=NodeMode.SPARE_ON,
    draining=False,
    cordoned=False,
    is_accepting_jobs=True,
)


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
        ({"draining": True}, Obstacle.DRAINING),
        ({"draining": True, "is_drained": True}, Obstacle.DRAINED),
        ({"draining": True, "cordoned": True}, Obstacle.DRAINING),
        ({"cordoned": True}, Obstacle.CORDONED),
        ({"mode": NodeMode.SPARE_OFF}, Obstacle.TAKEN_BACK),
        ({"mode": NodeMode.SPARE_OFF, "is_drained": True}, Obstacle.TAKEN_BACK),
        ({"is_accepting_jobs": False}, Obstacle.HOLDS_BACK),
        ({"reported": NodeStatus.DRAINING}, Obstacle.HOLDS_BACK),
        ({"age_s": 10.0}, Obstacle.LATE),
        ({"reported": NodeStatus.BUSY}, None),
    ],
)
def test_of_what_keeps_work_from_a_node_the_first_is_said(changes: dict[str, Any], obstacle: Obstacle | None) -> None:
    assert judge_availability(replace(WELL, **changes), NodeLimits()).obstacle is obstacle


# Errors


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.BadRequest, 400, "BAD_REQUEST"),
        (errors.AddressRefused, 400, "BAD_REQUEST"),
        (errors.EnrolmentRefused, 400, "BAD_REQUEST"),
        (errors.ModelNotAllowed, 400, "MODEL_NOT_ALLOWED"),
        (errors.InvalidNodeToken, 401, "INVALID_NODE_TOKEN"),
        (errors.ProviderUnavailable, 403, "BAD_REQUEST"),
        (errors.NodeNotFound, 404, "BAD_REQUEST"),
        (errors.Conflict, 409, "BAD_REQUEST"),
    ],
)
def test_an_error_has_its_status_and_code(kind: type[errors.NodeError], status: int, code: str) -> None:
    error = kind("what to do", param="field")
    assert (error.status, error.code.value, error.message, error.param, str(error)) == (
        status,
        code,
        "what to do",
        "field",
        "what to do",
    )


# Settings


def found(app_configs: None = None) -> list[str]:
    """Return the ids of what the checks find."""
    return [str(message.id) for message in check_settings(app_configs)]


def test_the_default_settings_are_fine() -> None:
    assert found() == []


@pytest.mark.parametrize(
    "path", ["nowhere.is_model_allowed", "gateway.services.no_such_function", "plain", "nodes.errors.__doc__"]
)
def test_a_model_check_that_cannot_be_called_is_an_error(settings: Settings, path: str) -> None:
    settings.NODE_MODEL_CHECK = path
    assert found() == ["nodes.E001"]


def test_a_direct_host_that_means_nothing_is_an_error(settings: Settings) -> None:
    settings.NODE_DIRECT_HOSTS = ["gpu1.lan", "10.0.0.1/8"]
    assert found() == ["nodes.E002"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"stale_after_s": 5.0}, "nodes.E003"),
        ({"stale_after_s": 16.0}, "nodes.E003"),
        ({"bridge_pong_window_s": 15.0}, "nodes.E004"),
    ],
)
def test_health_windows_that_contradict_each_other_are_an_error(changes: dict[str, float], error: str) -> None:
    set_limits(nodes=changes)
    assert found() == [error]
