"""What a connection asks the server and libpq for, when the thread or the process that opens it is bound."""

from __future__ import annotations

import time

import pytest

from core.db import Patience, limit_patience, limit_process
from core.db import connection as patient
from core.db.base import DatabaseWrapper


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
    """Leave this process as it was."""
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
