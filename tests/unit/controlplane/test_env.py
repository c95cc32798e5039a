"""Settings are read from the environment, and what cannot be used says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions

from controlplane.api_errors import describe_error
from controlplane.env import (
    LOG_LEVELS,
    SettingError,
    read_bool,
    read_database,
    read_float,
    read_int,
    read_log_level,
    read_networks,
    read_text,
)
from core.db import Patience, limit_patience, limit_process
from core.db import connection as patient
from core.db.base import DatabaseWrapper
from gateway.services import InvalidValue, NameTaken
from governance.errors import InvalidAdminToken
from nodes.errors import NodeNotFound
from wire.contract import ErrorCode

NAME = "MUSTER_A_SETTING"


def test_a_secret_may_stand_in_a_file_which_is_named_when_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "secret"))
    with pytest.raises(SettingError, match="secret"):
        read_text(NAME)
    (tmp_path / "secret").write_text("from a file\n")
    assert read_text(NAME) == "from a file"
    monkeypatch.setenv(NAME, "from the environment")
    assert read_text(NAME) == "from the environment"


@pytest.mark.parametrize(
    ("text", "read"),
    [("ten", lambda: read_int(NAME, 1)), ("-1", lambda: read_int(NAME, 1)), ("ten", lambda: read_float(NAME, 1.0)), ("nan",
            lambda: read_float(NAME, 1.0)), ("-0.1", lambda: read_float(NAME, 1.0)), ("maybe", lambda: read_bool(NAME,
            default=True)), ("127.0.0.1,proxy.example", lambda: read_networks(NAME)), ("10.0.0.0/33",
            lambda: read_networks(NAME)), ("10.0.0.1/8", lambda: read_networks(NAME))],
)  # fmt: skip
def test_a_value_that_means_nothing_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(SettingError, match=NAME):
        read()


BOUNDS = {
    "connect_timeout": "5", "keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}  # fmt: skip


def test_a_database_is_named_by_host_or_by_socket() -> None:
    over_tcp = read_database("postgresql://u%40x:p%3A@db.example:6432/muster?sslmode=require")
    over_socket = read_database("postgresql://postgres@/muster?host=/run/pg&port=5433")
    assert (over_tcp["HOST"], over_tcp["PORT"], over_tcp["USER"], over_tcp["PASSWORD"]) == ("db.example", "6432", "u@x", "p:")
    assert over_tcp["OPTIONS"] == {**BOUNDS, "sslmode": "require"}
    assert (over_socket["HOST"], over_socket["PORT"], over_socket["NAME"]) == ("/run/pg", "5433", "muster")


def test_a_log_level_has_its_usual_words_in_any_case_and_another_is_answered_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"": "INFO", "warn": "WARNING", "WARNING": "WARNING", "Trace": "DEBUG", " debug ": "DEBUG", "CRITICAL": "CRITICAL"}
    for text, level in words.items():
        monkeypatch.setenv(NAME, text)
        assert read_log_level(NAME) == level
    monkeypatch.setenv(NAME, "verbose")
    with pytest.raises(SettingError, match=f"{NAME} must be one of {', '.join(LOG_LEVELS)}, not 'verbose'"):
        read_log_level(NAME)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [(InvalidValue("limit must be a number.", param="limit"), 400, ErrorCode.BAD_REQUEST, "limit"), (NameTaken("taken",
            param="name"), 409, ErrorCode.BAD_REQUEST, "name"), (InvalidAdminToken("no"), 401, ErrorCode.INVALID_ADMIN_TOKEN,
            None), (NodeNotFound("no"), 404, ErrorCode.BAD_REQUEST, None), (exceptions.NotAuthenticated(), 401,
            ErrorCode.INVALID_ADMIN_TOKEN, None), (exceptions.ValidationError({"node": {"name": ["too long"]}}), 400,
            ErrorCode.BAD_REQUEST, "node.name"), (exceptions.ParseError("JSON parse error"), 400, ErrorCode.BAD_REQUEST, None),
        (exceptions.UnsupportedMediaType("text/plain"), 415, ErrorCode.BAD_REQUEST, None), (exceptions.MethodNotAllowed("PUT"),
            405, ErrorCode.BAD_REQUEST, None), (exceptions.NotFound(), 404, ErrorCode.NOT_FOUND, None), (Http404(), 404,
            ErrorCode.NOT_FOUND, None), (PermissionDenied(), 403, ErrorCode.INVALID_ADMIN_TOKEN, None), (RequestDataTooBig(),
            413, ErrorCode.BODY_TOO_LARGE, None), (exceptions.Throttled(wait=3), 429, ErrorCode.RATE_LIMITED, None),
        (exceptions.APIException("broken"), 500, ErrorCode.INTERNAL_ERROR, None),
        (OperationalError("the server closed the connection"), 503, ErrorCode.INTERNAL_ERROR, None),
        (InterfaceError("the connection is closed"), 503, ErrorCode.INTERNAL_ERROR, None)],
)  # fmt: skip
def test_every_known_error_has_its_status_code_and_parameter(
    error: Exception, status: int, code: ErrorCode, param: str | None
) -> None:
    known = describe_error(error)
    assert known is not None
    assert (known.status, known.code, known.param) == (status, code, param)
    assert set(known.body()["error"]) == {"code", "message", "retryable", "type", "param"}


def test_a_defect_of_ours_is_not_described_to_the_caller() -> None:
    assert describe_error(ZeroDivisionError("division by zero")) is None


@pytest.mark.parametrize(("method", "is_safe"), [("GET", True), ("HEAD", True), ("POST", False), ("DELETE", False)])
def test_without_the_database_only_what_changes_nothing_may_blindly_be_sent_again(method: str, is_safe: bool) -> None:
    known = describe_error(OperationalError("gone"), method=method)
    assert known is not None
    assert known.retryable is is_safe
    assert ("Nothing was changed" in known.message, "may or may not have been done" in known.message) == (is_safe, not is_safe)
    assert "gone" not in known.message


def parameters(**options: str) -> tuple[object, object]:
    """The options and the time limit of a connection whose DATABASE_URL has these."""
    settings = {
        "NAME": "muster", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": options, "CONN_MAX_AGE": 0,
        "CONN_HEALTH_CHECKS": False, "AUTOCOMMIT": True, "TIME_ZONE": None, "ATOMIC_REQUESTS": False,
    }  # fmt: skip
    found = DatabaseWrapper(settings).get_connection_params()
    return found.get("options"), found.get("connect_timeout")


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "_of_process", [])


def test_without_a_bound_the_url_alone_decides() -> None:
    assert parameters(connect_timeout="5") == (None, "5")


@pytest.mark.parametrize(("silence_s", "statement_ms", "connect_s"), [(2.0, 30_000, 2), (10.0, 30_000, 5), (300.0, 300_000, 5)])
def test_the_server_ends_statements_that_the_process_would_give_up(silence_s: float, statement_ms: int, connect_s: int) -> None:
    limit_process(silence_s)
    assert parameters(connect_timeout="5", options="-c lock_timeout=9") == (
        f"-c lock_timeout=9 -c statement_timeout={statement_ms}",
        connect_s,
    )


def test_a_thread_with_an_end_binds_the_server_to_what_is_left() -> None:
    limit_process(30.0)
    with limit_patience(Patience(silence_s=5.0, ends_at=time.monotonic() - 1)):
        assert parameters() == ("-c statement_timeout=1", 2)


@pytest.mark.parametrize("given", ["", "0", "-1", "soon"])
def test_a_url_without_a_usable_limit_for_connecting_gets_ours(given: str) -> None:
    limit_process(7.0)
    assert parameters(**({"connect_timeout": given} if given else {}))[1] == 7
