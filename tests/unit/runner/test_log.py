"""The runner's log as the control plane may ask for it: which lines are told, what is cut out, their form on the wire."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from runner.telemetry.log import LogRing
from tests.fakes.limits import set_runner_limits
from wire.bridge import LogLine, LogQuery, LogTail, decode_server_message, decode_worker_message, encode_message
from wire.credentials import CredentialKind, mint_credential
from wire.logs import CUT_OUT

log = logging.getLogger("runner.pool.loads")


@pytest.fixture
def ring() -> Iterator[LogRing]:
    log.setLevel(logging.DEBUG)
    made = LogRing(secrets=("the key of the owner",))
    with made.attached():
        yield made
    log.setLevel(logging.NOTSET)


def told(ring: LogRing) -> list[tuple[str, str]]:
    tail = ring.answer("q")
    assert tail is not None
    return [(line.level, line.text) for line in tail.lines]


def test_lines_of_the_runner_are_told_and_nothing_of_engines_and_of_other_programs(ring: LogRing) -> None:
    log.info("model loaded model=%s", "tiny")
    log.debug("llama.cpp: the prompt was: tell me a story")
    logging.getLogger("aiohttp.server").error("somebody else's words")
    log.warning("two\nlines \x1b[31m")
    assert told(ring) == [
        ("info", "runner.pool.loads: model loaded model=tiny"),
        ("warning", "runner.pool.loads: two | lines  [31m"),
    ]


def test_of_an_exception_its_kind_and_place_are_told_and_never_its_words(ring: LogRing) -> None:
    try:
        raise ValueError("a prompt stands in here")
    except ValueError:
        log.exception("failed unexpectedly engine=%s", "tiny")
    ((level, text),) = told(ring)
    assert (level, "prompt" in text) == ("error", False)
    assert text.startswith("runner.pool.loads: failed unexpectedly engine=tiny (ValueError in test_log.py:")


@pytest.mark.parametrize(
    "secret",
    [
        mint_credential(CredentialKind.WORKER).text,
        "hf_abcdefghijklmnopqrstuvwxyz",
        "sk-proj-0123456789abcdef",
        "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJub2RlIn0.c2lnbmF0dXJl",
        "the key of the owner",
    ],
    ids=["credential", "hub", "openai", "jwt", "owner"],
)
def test_what_looks_like_a_credential_is_cut_out_also_where_the_line_is_cut(secret: str) -> None:
    set_runner_limits(connection={"log_line_chars": 60})
    ring = LogRing(secrets=("the key of the owner",))
    with ring.attached():
        log.warning("refused %s for good", secret)
        log.warning("%s%s", "x" * 30, f" {secret}")
    for _, text in told(ring):
        assert secret[:12] not in text
        assert CUT_OUT in text


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("Authorization: Bearer abc.def", "abc"),
        ("dialling https://ada:hunter2@hub.lan/x", "hunter2"),
        ('{"api_key": "0123"}', "0123"),
        ("MUSTER_TOKEN=verysecret", "verysecret"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB\n", "MIIB"),
    ],
)
def test_secrets_are_known_by_what_stands_before_them(ring: LogRing, line: str, left: str) -> None:
    log.error("%s", line)
    ((_, text),) = told(ring)
    assert left not in text


def test_a_chatty_hour_pushes_out_no_error_and_the_tail_has_a_size() -> None:
    set_runner_limits(connection={"log_warnings": 3, "log_infos": 2, "log_tail_chars": 10_000})
    ring = LogRing()
    log.setLevel(logging.INFO)
    with ring.attached():
        for number in range(5):
            log.error("error %d", number)
        for number in range(50):
            log.info("info %d", number)
    tail = ring.answer("q")
    assert tail is not None
    assert [line.text.removeprefix("runner.pool.loads: ") for line in tail.lines] == [
        "error 2", "error 3", "error 4", "info 48", "info 49",
    ]  # fmt: skip
    assert tail.left_out == 2
    log.info("after the block nothing is taken")
    assert ring.answer("again") is None, "who asks twice in a second gets one answer"

    set_runner_limits(connection={"log_tail_chars": 60})
    short = LogRing()
    with short.attached():
        for number in range(9):
            log.error("error %d", number)
    assert [text[-1] for _, text in told(short)] == ["7", "8"], "older lines are left out"


def test_question_and_answer_have_this_form_on_the_wire() -> None:
    query = LogQuery(query_id="0190")
    tail = LogTail(query_id="0190", lines=[LogLine(at_ms=1_700_000_000_000, level="error", text="runner: no")], left_out=7)
    assert encode_message(query) == '{"type":"log_query","query_id":"0190"}'
    assert json.loads(encode_message(tail)) == {
        "type": "log_tail", "query_id": "0190", "left_out": 7,
        "lines": [{"at_ms": 1_700_000_000_000, "level": "error", "text": "runner: no"}],
    }  # fmt: skip
    assert decode_server_message(encode_message(query)) == query
    assert decode_worker_message(encode_message(tail)) == tail
