"""Log lines: the fields of our calls and of libraries', credentials cut out, no line that a value begins, and one request."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from wire.credentials import CredentialKind, mint_credential
from wire.logs import CUT_OUT, bind_request, make_formatter

log = logging.getLogger("muster.tests.of.lines")


class Written:
    """What one handler writes in one format."""

    def __init__(self, said: str) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(make_formatter(said, is_terminal=False))

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def in_json() -> Iterator[Written]:
    yield from attach(Written("auto"))


@pytest.fixture
def in_text() -> Iterator[Written]:
    yield from attach(Written("console"))


def attach(written: Written) -> Iterator[Written]:
    log.setLevel(logging.DEBUG)
    log.addHandler(written.handler)
    yield written
    log.removeHandler(written.handler)
    log.setLevel(logging.NOTSET)


def test_what_a_call_names_is_a_field_of_its_own_and_keeps_its_kind(in_json: Written) -> None:
    log.warning("worker.connected node=%s models=%d seconds=%.1f", "gpu 1 status=2", 3, 0.25)
    log.info("budgets.valkey_away error=%s; each gateway uses what it holds", "TimeoutError")
    log.info("operation refused operation=%s: %s", "load", "no token")
    log.info("100%% of count=%d", 2)
    log.info("notice.sent event=%s level=%s", "approved", "high")
    log.info("a library says %s of %d", "this", 3)
    first, *others = in_json.lines
    assert str(first.pop("time")).endswith("Z")
    assert first == {
        "level": "warning", "logger": log.name, "event": "worker.connected", "node": "gpu 1 status=2", "models": 3,
        "seconds": 0.25,
    }  # fmt: skip
    assert [{**line, "time": "", "level": "", "logger": ""} for line in others] == [
        {"time": "", "level": "", "logger": "", **said}
        for said in (
            {"event": "budgets.valkey_away; each gateway uses what it holds", "error": "TimeoutError"},
            {"event": "operation refused: no token", "operation": "load"},
            {"event": "100% of", "count": 2},
            {"event": "notice.sent", "event_": "approved", "level_": "high"},
            {"event": "a library says this of 3"},
        )
    ]


def test_credentials_are_cut_out_of_values_texts_and_exceptions(in_json: Written, in_text: Written) -> None:
    key = mint_credential(CredentialKind.CLIENT).text
    log.info("key.seen key=%s", key)
    log.info("a library: Authorization: Bearer %s", key)
    log.info("setting.read token=%s url=%s", "hunter2", "postgresql://muster:hunter2@db/muster")
    log.warning("%s: %s", "Gone", "/approvals/invitation/hunter2-_x/passkey")  # as Django says a refusal
    try:
        raise ValueError(f"password=hunter2 {key}")
    except ValueError:
        log.exception("failed")
    assert CUT_OUT in in_json.text
    for text in (in_json.text, in_text.text):
        assert "hunter2" not in text
        assert key not in text


def test_no_value_begins_a_line_of_its_own(in_text: Written, in_json: Written) -> None:
    log.info("a library says %s", "x\n2026-01-01T00:00:00.000Z [info] forged")
    log.warning("model.named model=%s", "x\n2026-01-01T00:00:00.000Z [info] forged\x1b[31m")
    try:
        raise ValueError("one\n2026-01-01T00:00:00.000Z [info] forged")
    except ValueError:
        log.exception("failed")
    said, first, second, *trace = in_text.text.splitlines()
    assert ("x\\n2026-01-01" in said, "x\\n2026-01-01" in first) == (True, True)
    assert "\x1b" not in in_text.text
    assert (second.partition(" ")[2], all(line.startswith("    ") for line in trace)) == (f"[error] failed [{log.name}]", True)
    assert len(in_json.text.splitlines()) == 3


def test_lines_name_the_request_until_it_is_over_and_it_is_asked_for_written_lines_alone(in_json: Written) -> None:
    asked: list[int] = []

    def read() -> dict[str, object]:
        asked.append(1)
        return {"request": "req_1", "node": "of the request"}

    log.setLevel(logging.INFO)
    fields = bind_request(read)
    log.debug("not.written")
    assert not asked
    log.info("lost node=%s", "of the line")
    fields.close()
    log.info("later")
    lost, later = in_json.lines
    assert (lost["request"], lost["node"], "request" in later) == ("req_1", "of the line", False)


@pytest.mark.parametrize(
    ("said", "is_terminal", "begins"), [("auto", True, "\x1b"), ("json", True, "{"), ("console", False, "2")]
)
def test_the_format_is_text_on_a_terminal_unless_another_was_asked_for(said: str, is_terminal: bool, begins: str) -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "started", (), None)
    assert make_formatter(said, is_terminal=is_terminal).format(record).startswith(begins)
