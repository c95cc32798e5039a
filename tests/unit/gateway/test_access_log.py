"""The access log: which requests have a line, that nobody waits for it, and its two forms."""

from __future__ import annotations

import io
import json
import re
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from core.limits import limits
from gateway import errors
from gateway.errors import GatewayError
from gateway.metrics import ACCESS_LINES_DROPPED
from gateway.request.access_log import AccessLine, AccessLog, AccessMode, Refused, make_refusal_line, write_json, write_text
from gateway.values import RequestOutcome
from tests.fakes.limits import set_limits
from wire import clock
from wire.ids import new_uuid7

MOMENT = datetime(2026, 11, 29, 0, 10, 2, tzinfo=UTC)
DOCS = Path(__file__).parents[3] / "docs"


def make_log(mode: AccessMode = AccessMode.ON, stream: io.RawIOBase | io.BytesIO | None = None, **bounds: int) -> AccessLog:
    set_limits(gateway=bounds)
    return AccessLog(mode, limits().gateway, stream=stream or io.BytesIO(), write_line=write_json)  # type: ignore[arg-type]  # one that blocks


def make_line(**said: object) -> AccessLine:
    return AccessLine(**{"time": MOMENT, "level": "info", "logger": "muster.access", "event": "request", "request": "req_1",
                         "outcome": RequestOutcome.SERVED, **said})  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(("mode", "every", "served"), [(AccessMode.ON, 1, 6), (AccessMode.ON, 3, 2), (AccessMode.ERRORS, 1, 0)])
def test_of_served_requests_every_nth_has_a_line_and_of_others_all(mode: AccessMode, every: int, served: int) -> None:
    log = make_log(mode, access_log_every=every)
    assert [log.skips(RequestOutcome.SERVED) for _ in range(6)].count(False) == served
    assert not any(log.skips(outcome) for outcome in RequestOutcome if outcome is not RequestOutcome.SERVED)


class Stuck(io.RawIOBase):
    """A standard error that nobody reads until it is let go."""

    def __init__(self) -> None:
        self.let_go, self.taken = threading.Event(), b""

    def write(self, data: object) -> int:
        assert isinstance(data, bytes)
        self.let_go.wait(30)
        self.taken += data
        return len(data)


async def test_what_nobody_reads_in_time_is_dropped_and_counted_and_nothing_waits_for_it() -> None:
    stuck = Stuck()
    log = make_log(stream=stuck, access_log_waiting=3, access_log_batches=1)
    before = ACCESS_LINES_DROPPED._value.get()
    for _ in range(4):  # one is with the thread, one waits, two are dropped
        for _ in range(4):
            log.add(make_line)
        log.flush()
    dropped = ACCESS_LINES_DROPPED._value.get() - before
    stuck.let_go.set()
    log.stop()
    written = stuck.taken.count(b"\n")
    assert written + dropped == 16
    assert written in (3, 6)  # whether the thread had taken the first one when the second came


async def test_a_line_that_cannot_be_written_is_counted_and_the_next_one_is_written() -> None:
    class Full(Stuck):
        def write(self, data: object) -> int:
            if not self.taken:
                self.taken = b"-"
                raise OSError(28, "No space left on device")
            return super().write(data)

    stream = Full()
    stream.let_go.set()
    log, before = make_log(stream=stream), ACCESS_LINES_DROPPED._value.get()
    log.add(make_line)
    log.stop()
    log.add(make_line)
    log.stop()
    assert (ACCESS_LINES_DROPPED._value.get() - before, stream.taken.count(b"\n")) == (1, 1)


def test_both_forms_say_the_same_and_neither_lets_a_name_begin_a_line_or_a_field() -> None:
    line = make_line(status=200, model="m", key='a "b"\n{"forged": 1} tenant=x')
    assert json.loads(write_json(line)) == {
        "time": "2026-11-29T00:10:02Z", "level": "info", "logger": "muster.access", "event": "request", "request": "req_1",
        "outcome": "served", "status": 200, "model": "m", "key": 'a "b"\n{"forged": 1} tenant=x',
    }  # fmt: skip
    assert write_text(line).decode() == (
        "2026-11-29T00:10:02Z [info] request [muster.access] request=req_1 outcome=served status=200 model=m"
        ' key=\'a "b"\\n{"forged": 1} tenant=x\'\n'
    )


def test_each_error_has_a_flag_of_two_letters_that_the_page_explains() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GatewayError)]
    flags = {kind.flag for kind in kinds} | {"RQ", "TE"}
    page = (DOCS / "observe.md").read_text(encoding="utf-8")
    table = page.partition("| Flag | Means |")[2].partition("\n\n")[0]
    explained = re.findall(r"`([A-Z]{2})`", table)
    assert sorted(flags) == sorted(explained)


def test_a_refusal_says_who_asked_as_far_as_that_is_known() -> None:
    refused = Refused(new_uuid7(), "/v1/messages", "203.0.113.9")
    line = make_refusal_line(clock.now(), errors.InvalidApiKey(), RequestOutcome.REFUSED, refused)
    assert (line.status, line.flags, line.client, line.key, line.dialect) == (401, "UA", "203.0.113.9", "", "messages")
