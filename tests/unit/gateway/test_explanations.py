"""Why a request waits, from the nodes alone; and what the end of one means."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.models import RequestRecord
from gateway.services.explanations import explain_ending
from wire.contract import ErrorCode, RequestState


def record(code: ErrorCode | str | None, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"state": RequestState.FAILED.value, "model": "tiny", "endpoint": "/v1/messages"}
    return RequestRecord(error_code=code, **{**values, **changes})


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (record(None), None),
        (record("A_CODE_OF_LATER"), "ended with this code"),
        (record(ErrorCode.NO_AVAILABLE_NODE), "No node took the request in time"),
        (record(ErrorCode.NO_AVAILABLE_NODE, state="rejected"), "The queue of the model was full"),
        (record(ErrorCode.REQUEST_TIMEOUT), "in the queue"),
        (record(ErrorCode.REQUEST_TIMEOUT, attempts=1), "longer than a request may take"),
        (
            record(ErrorCode.FORWARDED_REQUEST_FAILED, node_name="attic", status_code=502),
            "The engine on attic failed with HTTP 502.",
        ),
        (record(ErrorCode.FORWARDED_REQUEST_FAILED, status_code=429), "The engine had no room (HTTP 429)."),
        (
            record(ErrorCode.FORWARDED_REQUEST_FAILED, status_code=200, is_streaming=True, bytes_out=1234),
            "in the middle of the answer, after 1,234 bytes",
        ),
    ],
    ids=["served", "unknown", "no-box", "queue-full", "queue", "in-all", "engine", "no-room", "middle"],
)
def test_an_ending_says_what_the_record_knows(ended: RequestRecord, said: str | None) -> None:
    ending = explain_ending(ended)

    assert ending is None if said is None else ending is not None and said in str(ending.what)
