"""What every failure looks like on the wire."""

from __future__ import annotations

import json

from tests.rings.contract.client import Reply

BUSY_TEXT = "Service temporarily at capacity, please retry"
TIMED_OUT_TEXT = "Request timed out waiting for worker"
NO_WORKERS_TEXT = "No workers available to handle request"
DISABLED_TEXT = "Provider is currently disabled"
EXHAUSTED_TEXT = "Request could not be processed after multiple attempts"
DELETED_TEXT = "Internal server error processing request"
OVERSIZED_TEXT = "stream exceeded size limit"

RETRYABLE = {
    "NO_AVAILABLE_NODE": True,
    "NODE_STALE": True,
    "NODE_DRAINING": True,
    "NODE_UNHEALTHY": True,
    "MODEL_NOT_ALLOWED": False,
    "PROMPT_TOO_LARGE": False,
    "MAX_TOKENS_TOO_LARGE": False,
    "REQUEST_TIMEOUT": True,
    "FORWARDED_REQUEST_FAILED": True,
    "REQUEST_INTERRUPTED": True,
    "INVALID_API_KEY": False,
    "INVALID_NODE_TOKEN": False,
    "RATE_LIMITED": True,
    "BAD_REQUEST": False,
}


def assert_failure(reply: Reply, status: int, code: str, message: str | None = None) -> None:
    """Check status, envelope and headers of a failure before any byte of a response."""
    assert reply.status == status, (reply.status, reply.body)
    assert reply.headers["content-type"].startswith("application/json"), reply.headers
    assert set(reply.json) == {"error"}, reply.body
    error = reply.error
    assert set(error) == {"code", "message", "retryable", "type", "param"}, error
    assert error["code"] == code, error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    if message is not None:
        assert error["message"] == message, error
    if code in RETRYABLE:
        assert error["retryable"] is RETRYABLE[code], error
    assert reply.headers.get("x-request-id"), reply.headers
    if status in {429, 503, 504}:
        assert int(reply.headers["retry-after"]) >= 1, reply.headers


def assert_stream_failure(reply: Reply, code: str, message: str | None = None) -> None:
    """Check that a stream that had begun ended with exactly one error event and nothing after it."""
    assert reply.status == 200, (reply.status, reply.body)
    events = reply.events
    assert "[DONE]" not in events, events
    failures = [index for index, data in enumerate(events) if data.startswith("{") and "error" in json.loads(data)]
    assert failures == [len(events) - 1], events
    error = json.loads(events[-1])["error"]
    assert error["code"] == code, error
    assert set(error) >= {"code", "message", "type", "param"}, error
    if message is not None:
        assert error["message"] == message, error
