"""Why a request waits, from the boxes alone; and what the end of one means."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admin.endings import explain_ending
from gateway.admin.stories import split_time
from gateway.errors import GatewayError
from gateway.models import RequestRecord
from gateway.services.waiting import explain_wait
from nodes.services.serving import Has, ServingBox
from nodes.states import Obstacle
from wire.contract import ErrorCode, RequestState
from wire.ids import new_uuid7


def box(name: str = "attic", obstacle: Obstacle | None = None, **changes: Any) -> ServingBox:
    values: dict[str, Any] = {"has": Has.LOADED, "active": 0, "slots": 2}
    return ServingBox(new_uuid7(), name, obstacle=obstacle, **{**values, **changes})


def record(code: ErrorCode | str | None, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"state": RequestState.FAILED.value, "model": "tiny", "endpoint": "/v1/messages"}
    return RequestRecord(error_code=code, **{**values, **changes})


@pytest.mark.parametrize(
    ("boxes", "brief", "said"),
    [
        ([], "no node", "No node has tiny. Start a node that has it."),
        ([box(has=Has.COULD)], "not loaded", "attic could load it. Propose on the page of attic to load it."),
        ([box(has=Has.LOADING, percent=40)], "loading", "attic is loading tiny, 40 % so far."),
        ([box(active=2), box("den", active=3)], "nodes full", "is full: attic 2 of 2, den 3 of 2. It starts when one is done."),
        ([box(active=1)], "starting", "tiny is served by attic (1 of 2 slots free)."),
        ([box(obstacle=Obstacle.CORDONED)], "cordoned", "and it is cordoned. Uncordon attic, or load tiny on another node."),
        ([box(obstacle=Obstacle.TAKEN_BACK, owner="ana")], "taken back", "was taken back by its owner. Ask ana,"),
        ([box(obstacle=Obstacle.PROVIDER_OFF, provider="lab")], "provider off", "Enable the provider lab,"),
        ([box(obstacle=Obstacle.ERROR, last_error="CUDA")], "node in error", "reports an error. attic says: CUDA"),
        ([box(obstacle=Obstacle.ERROR)], "node in error", "Look at the page of attic and at its log."),
        ([box(obstacle=Obstacle.LATE)], "node late", "attic gets no new work until it is heard again."),
        ([box(obstacle=Obstacle.SILENT)], "node offline", "and it is offline. Check the power of attic,"),
        ([box(obstacle=Obstacle.SILENT), box("den", Obstacle.DRAINING)], "draining", "attic is offline, den is being drained."),
        ([box(str(n), Obstacle.SILENT) for n in range(5)], "node offline", "2 is offline and 2 more."),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 16 else "",
)
def test_what_stands_in_the_way_is_said_and_what_to_do(boxes: list[ServingBox], brief: str, said: str) -> None:
    wait = explain_wait("tiny", boxes)
    assert wait.brief == brief
    assert said in f"{wait.reason} {wait.advice}"


UNRECORDED = {ErrorCode.INVALID_API_KEY, ErrorCode.INVALID_ADMIN_TOKEN, ErrorCode.NOT_FOUND, ErrorCode.NOT_PERMITTED}
"""Nobody is known then in whose name a record could be."""


def list_errors(kind: type[GatewayError]) -> list[type[GatewayError]]:
    return [kind, *(found for below in kind.__subclasses__() for found in list_errors(below))]


def test_every_way_in_which_a_gateway_ends_a_request_is_explained() -> None:
    errors = [error for error in list_errors(GatewayError) if error.__module__ == "gateway.errors"]
    codes = {error.code for error in errors} - UNRECORDED
    assert len(codes) > 10
    for code in sorted(codes | {ErrorCode.CLIENT_CLOSED_REQUEST}):
        ending = explain_ending(record(code))
        assert ending is not None, code
        assert "this code" not in ending.what, code


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (record(None), None),
        (record(ErrorCode.NO_AVAILABLE_NODE), "No node took the request in time"),
        (record(ErrorCode.NO_AVAILABLE_NODE, state="rejected"), "The queue of the model was full"),
        (record(ErrorCode.REQUEST_TIMEOUT, attempts=1), "longer than a request may take"),
        (record(ErrorCode.FORWARDED_REQUEST_FAILED, status_code=429), "The engine had no room (HTTP 429)."),
        (record("FORWARDED_REQUEST_FAILED", status_code=200, is_streaming=True, bytes_out=1234), "after 1,234 bytes"),
    ],
)
def test_an_ending_says_what_the_record_knows(ended: RequestRecord, said: str | None) -> None:
    ending = explain_ending(ended)
    assert ending is None if said is None else ending is not None and said in ending.what


def test_the_time_of_a_request_is_split_without_a_rest() -> None:
    split = split_time(record(None, attempts=1, queue_ms=100, ttfb_ms=250, latency_ms=1000))
    assert [(part.name, part.ms, part.start, part.share) for part in split] == [
        ("queue", 100, 0, 10), ("first", 150, 10, 15), ("answer", 750, 25, 75),
    ]  # fmt: skip
    assert [part.ms for part in split_time(record(None, attempts=1, queue_ms=90, ttfb_ms=20, latency_ms=50))] == [50, 0, 0]
    assert split_time(record(None, latency_ms=5)) == split_time(record(None, attempts=1)) == ()
