"""How the node's own port says no, in the dialect of the path that was asked."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from runner.api.access import AccessGuard
from runner.api.refusals import render
from runner.config import ApiConfig
from runner.errors import AccessRefused, InvalidRequest, RequestRefused, UnknownModel

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (AccessRefused("no"), "authentication_error"),
        (UnknownModel("no"), "not_found_error"),
        (InvalidRequest("no", param="stream"), "invalid_request_error"),
    ],
)
def test_the_type_of_an_error_is_what_clients_choose_their_exception_by(path: str, refusal: RequestRefused, kind: str) -> None:
    said = json.loads(bytes(render(refusal, path=path).body))
    assert (said["error"]["type"], said["error"]["code"], said["error"]["message"]) == (kind, refusal.code, "no")
    assert said.get("type") == ("error" if path == "/v1/messages" else None)


async def test_a_wrong_key_is_named_in_the_words_that_litellm_looks_for() -> None:
    sent: list[MutableMapping[str, Any]] = []  # Any: ASGI leaves it open

    async def nobody(*_: object) -> None:
        raise AssertionError("the guard let it through")

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    config = ApiConfig(host="127.0.0.1", port=0, key="a key of more than 16 characters", has_metrics=False, metrics_port=None)
    guard = AccessGuard(nobody, config=config)
    await guard({"type": "http", "path": "/v1/models", "headers": []}, receive, send)
    assert sent[0]["status"] == 401
    assert b"Incorrect API key provided" in sent[1]["body"]
