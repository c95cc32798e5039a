"""Which paths and headers pass through a box."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from runner.serving.headers import headers_to_client, is_allowed_path


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/models/org-x_1.5:q8", "/v1/messages?beta=true", "/v1/threads/t_1/runs", "/v1/models/"],
)
def test_paths_below_v1_are_allowed(path: str) -> None:
    assert is_allowed_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/v1", "/v1/", "/v2/models", "/slots", "/v1/../slots", "/v1/x/..", "/v1/./x", "/v1//slots", "v1/models",
        "/v1/%2e%2e/slots", "/v1/x#y", "/v1/x?a b", "/v1/x\n", "/v1/x\\..\\y", "http://evil/v1/x", "//evil/v1/x", "/v1/é",
        "/v1/x?a=\n",
    ],
)  # fmt: skip
def test_every_other_path_is_refused(path: str) -> None:
    assert not is_allowed_path(path)


def test_answers_lose_hop_by_hop_headers_and_cookies_and_streams_their_length() -> None:
    given = CIMultiDictProxy(
        CIMultiDict([
            ("Content-Type", "text/event-stream"), ("Content-Length", "5"), ("Transfer-Encoding", "chunked"),
            ("Set-Cookie", "a=b"), ("Server", "llama"), ("X-Note", "1"), ("x-note", "2"),
            ("Access-Control-Allow-Origin", "*"),
        ])
    )  # fmt: skip
    assert headers_to_client(given, is_event_stream=True) == {"content-type": "text/event-stream", "x-note": "1, 2"}
    assert headers_to_client(given, is_event_stream=False)["content-length"] == "5"
