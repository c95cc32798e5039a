"""Which pages a browser lets call the API, and what of it an operator can get wrong."""

from __future__ import annotations

import pytest
from pytest_django import Settings

from gateway.checks import check_settings
from gateway.cors import admit_origin, is_preflight

PAGE = "https://chat.example.com"


def test_without_a_list_no_answer_says_anything_of_origins() -> None:
    assert admit_origin({"origin": PAGE}, ()) == ()


def test_a_star_lets_everybody_in_and_caches_need_not_tell_origins_apart() -> None:
    for headers in ({}, {"origin": PAGE}):
        assert dict(admit_origin(headers, ["*"]))[b"access-control-allow-origin"] == b"*"
        assert b"vary" not in dict(admit_origin(headers, ["*"]))


def test_an_origin_is_let_in_by_its_whole_name() -> None:
    assert dict(admit_origin({"origin": PAGE}, [PAGE]))[b"access-control-allow-origin"] == PAGE.encode()
    for other in ("", "null", PAGE + ":8443", PAGE + ".evil.test", "http://chat.example.com", PAGE.upper()):
        assert admit_origin({"origin": other}, [PAGE]) == ((b"vary", b"Origin"),)


def test_a_plain_options_request_is_no_preflight() -> None:
    asking = {"origin": PAGE, "access-control-request-method": "POST"}
    assert is_preflight("OPTIONS", asking)
    assert not is_preflight("POST", asking)
    assert not is_preflight("OPTIONS", {"origin": PAGE})


@pytest.mark.parametrize("wrong", ["chat.example.com", PAGE + "/", "https://*.example.com", "https://Chat.example.com", "null"])
def test_an_origin_that_no_browser_sends_is_an_error_at_start(settings: Settings, wrong: str) -> None:
    settings.CORS_ORIGINS = ["http://localhost:3000", wrong]
    (error,) = check_settings(None)
    assert error.id == "gateway.E002"
    assert wrong in error.msg


@pytest.mark.parametrize("right", [[], ["*"], [PAGE, "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md"]])
def test_origins_as_browsers_send_them_are_fine(settings: Settings, right: list[str]) -> None:
    settings.CORS_ORIGINS = right
    assert check_settings(None) == []
