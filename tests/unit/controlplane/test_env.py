"""Settings are read from the environment, and what cannot be used says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

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

ROOT = Path(__file__).resolve().parents[3]
NAME = "MUSTER_A_SETTING"


def test_a_secret_may_stand_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from a file\n")
    monkeypatch.setenv(f"{NAME}_FILE", str(path))
    assert read_text(NAME) == "from a file"

    monkeypatch.setenv(NAME, "from the environment")
    assert read_text(NAME) == "from the environment"


def test_a_secret_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "missing"))
    with pytest.raises(SettingError, match="missing"):
        read_text(NAME)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("ten", lambda: read_int(NAME, 1)),
        ("-1", lambda: read_int(NAME, 1)),
        ("ten", lambda: read_float(NAME, 1.0)),
        ("nan", lambda: read_float(NAME, 1.0)),
        ("-0.1", lambda: read_float(NAME, 1.0)),
        ("maybe", lambda: read_bool(NAME, default=True)),
        ("127.0.0.1,proxy.example", lambda: read_networks(NAME)),
        ("10.0.0.0/33", lambda: read_networks(NAME)),
        ("10.0.0.1/8", lambda: read_networks(NAME)),
    ],
)
def test_a_value_that_means_nothing_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(SettingError, match=NAME):
        read()


BOUNDS = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


def test_a_url_may_wait_for_its_server_as_it_likes() -> None:
    options = read_database("postgresql://db/muster?connect_timeout=2&tcp_user_timeout=0")["OPTIONS"]
    assert options == {**BOUNDS, "connect_timeout": "2", "tcp_user_timeout": "0"}


def test_a_database_is_named_by_host_or_by_socket() -> None:
    over_tcp = read_database("postgresql://u%40x:p%3A@db.example:6432/muster?sslmode=require")
    over_socket = read_database("postgresql://postgres@/muster?host=/run/pg&port=5433")

    assert (over_tcp["HOST"], over_tcp["PORT"], over_tcp["USER"], over_tcp["PASSWORD"]) == ("db.example", "6432", "u@x", "p:")
    assert over_tcp["OPTIONS"] == {**BOUNDS, "sslmode": "require"}
    assert (over_socket["HOST"], over_socket["PORT"], over_socket["NAME"]) == ("/run/pg", "5433", "muster")


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("", "INFO"), ("warn", "WARNING"), ("WARNING", "WARNING"), ("Trace", "DEBUG"), (" debug ", "DEBUG"), ("error", "ERROR"),
        ("CRITICAL", "CRITICAL"),
    ],
)  # fmt: skip
def test_a_log_level_has_its_usual_words_in_any_case(monkeypatch: pytest.MonkeyPatch, text: str, level: str) -> None:
    monkeypatch.setenv(NAME, text)
    assert read_log_level(NAME) == level


def test_a_word_that_is_no_log_level_is_answered_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "verbose")
    with pytest.raises(SettingError) as refusal:
        read_log_level(NAME)
    assert str(refusal.value) == f"{NAME} must be one of {', '.join(LOG_LEVELS)}, not 'verbose'"
