"""Settings that cannot work are named at start."""

from __future__ import annotations

import pytest
from pytest_django import Settings

from nodes.checks import check_settings
from tests.fakes.limits import set_limits


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
