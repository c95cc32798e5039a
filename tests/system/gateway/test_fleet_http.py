"""The HTTP of a whole gateway with whole runners behind it, in memory: what each path takes, says and keeps to itself."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import pytest
import redis
from django.db import connection

from core.db.threads import run_upkeep
from gateway.services.rollups import OUTCOMES
from governance.admin_tokens import create_admin_token
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.fleet import CHAT_PATH, MESSAGES_PATH, Fleet

pytestmark = [pytest.mark.django_db, pytest.mark.asyncio(loop_factories=["virtual"]), pytest.mark.timeout(120)]
RESPONSES_PATH, COUNT_PATH = "/v1/responses", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "hi"}]
EMBEDDINGS_PATH = "/v1/embeddings"


def read(answer: MemoryClient) -> Any:
    """Return the JSON of an answer."""
    return json.loads(answer.body)


def read_error(answer: MemoryClient) -> tuple[int, str, str | None]:
    """Return status, code and parameter of an error, and check its envelope."""
    error = read(answer)["error"]
    assert set(error) == {"code", "message", "retryable", "type", "param"}
    assert error["message"]
    return answer.status, error["code"], error["param"]


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, COUNT_PATH])
async def test_a_body_that_is_not_plain_json_is_refused_by_the_header_that_says_so(fleet: Fleet, path: str) -> None:
    for name, value in (
        ("content-encoding", "gzip"), ("content-encoding", "br, zstd"),
        ("content-type", "text/plain"), ("content-type", "application/xml; charset=utf-8"), ("content-type", "json"),
    ):  # fmt: skip
        refused = await fleet.call(path, b"{}", headers={name: value})
        error = read(refused)["error"]
        assert (refused.status, error["code"], error["param"]) == (415, "BAD_REQUEST", name.title())
        assert (value if name == "content-encoding" else "application/json") in error["message"]
    for name, value in (("content-encoding", "Identity"), ("content-type", "application/vnd.api+json"), ("content-type", "")):
        assert read(await fleet.call(path, b"{}", headers={name: value}))["error"]["param"] == "model"


async def test_of_two_credentials_the_one_that_is_ours_counts(fleet: Fleet) -> None:
    key = fleet.rows.keys["k"]
    for own, other, status in ((key, f"Bearer {key}", 400), (key, "Bearer sk-2", 400), ("sk-1", f"Bearer {key}", 400),
                               ("sk-1", "Bearer sk-2", 401), ("", "Bearer sk-2", 401)):  # fmt: skip
        answer = await fleet.call(CHAT_PATH, b'{"model": "m"}', key="", headers={"x-api-key": own, "authorization": other})
        assert answer.status == status


async def test_a_model_nobody_knows_is_404_and_one_that_is_not_allowed_400(fleet: Fleet) -> None:
    await fleet.add_node(models=["declared"])
    await fleet.until(lambda: "declared" in fleet.runtime.keeper.known_models)
    for model, status in (("unheard-of", 404), ("declared", 400)):
        refused = fleet.ask(model)
        await refused.done()
        assert read_error(refused.client)[:2] == (status, "MODEL_NOT_ALLOWED")
        assert refused.ended_at == refused.asked_at
        assert not refused.calls


async def test_a_key_over_its_rate_is_told_when_to_come_back_and_may_then(fleet: Fleet) -> None:
    await fleet.add_node(slots=4)

    async def ask() -> MemoryClient:
        answer = fleet.ask(key="few")
        await fleet.settle()
        if answer.calls:
            answer.calls[0].finish()
        await answer.done()
        return answer.client

    for left in (2, 1, 0):
        served = await ask()
        assert (served.status, served.headers["x-ratelimit-remaining-requests"]) == (200, str(left))
    refused = await ask()
    assert read_error(refused) == (429, "RATE_LIMITED", None)
    shown = refused.headers
    assert (shown["x-ratelimit-limit-requests"], shown["x-ratelimit-remaining-requests"]) == ("3", "0")
    assert shown["x-ratelimit-reset-requests"]
    await fleet.advance(int(shown["retry-after"]))
    assert (await ask()).status == 200


async def test_unknown_paths_and_methods_are_json_and_say_what_is_meant(fleet: Fleet) -> None:
    assert read_error(await fleet.call("/v1/nonsense", b"{}"))[:2] == (404, "NOT_FOUND")
    wrong = await fleet.call(CHAT_PATH, method="GET")
    assert read_error(wrong)[:2] == (405, "BAD_REQUEST")
    assert wrong.headers["allow"] == "POST"
    for asked, meant in (
        ("/chat/completions", CHAT_PATH),
        ("/v1/v1/chat/completions", CHAT_PATH),
        ("/openai/v1/chat/completions/", CHAT_PATH),
        ("/v1/messages/", MESSAGES_PATH),
        ("/messages/count_tokens", COUNT_PATH),
        ("/v2/rerank", "/v1/rerank"),
        ("/api/v1/models", "/v1/models"),
    ):
        answer = await fleet.call(asked, b"{}")
        assert read(answer)["error"]["message"].endswith(f"Did you mean {meant}?")
        assert answer.status == 404
    for path in ("/v1/messages/batches", "/v1/messages/msg_1"):
        answer = await fleet.call(path, b"{}")
        assert (answer.status, read(answer)["type"], read(answer)["error"]["type"]) == (404, "error", "not_found_error")
        assert read(answer)["request_id"] == answer.headers["request-id"]


async def test_a_path_that_no_node_answers_is_refused_at_once_with_those_that_are(fleet: Fleet) -> None:
    await fleet.add_node(endpoints=[EMBEDDINGS_PATH, "/v1/completions"])
    refused = await fleet.call(CHAT_PATH, json.dumps({"model": "m", "messages": HELLO}).encode())
    assert read_error(refused) == (400, "BAD_REQUEST", "model")
    said = f"The model 'm' does not answer {CHAT_PATH}; it answers /v1/completions, {EMBEDDINGS_PATH}."
    assert read(refused)["error"]["message"] == said
    sent = json.dumps({"model": "m", "max_tokens": 5, "messages": HELLO}).encode()
    refused = await fleet.call(MESSAGES_PATH, sent, headers={"anthropic-version": "2023-06-01"})
    assert (refused.status, read(refused)["type"], read(refused)["error"]["type"]) == (400, "error", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (EMBEDDINGS_PATH, {"input": ["a", "b"]}),
        ("/v1/completions", {"prompt": "once"}),
        ("/v1/images/generations", {"prompt": "a llama", "size": "512x512"}),
        (RESPONSES_PATH, {"input": "hi"}),
        (CHAT_PATH, {"messages": HELLO, "x_pool_options": None}),
    ],
)
async def test_each_path_reaches_a_node_that_answers_it_with_the_keys_tenant(
    fleet: Fleet, path: str, said: dict[str, object]
) -> None:
    other = await fleet.add_node(endpoints=["/v1/rerank"])
    node = await fleet.add_node(endpoints=[path])
    claims = {"x-tenant-id": "somebody-else", "x-priority": "high", "cookie": "a=b", "x-cache-mode": "none"}
    asked = fleet.send(path, json.dumps({"model": "m", **said}).encode(), headers=claims)
    await fleet.until(lambda: node.engine.calls or asked.is_over)
    (made,) = node.engine.calls
    assert (made.call.path, made.call.tenant, made.call.priority, made.call.cache_mode) == (path, "acme", "normal", "none")
    assert not {"authorization", "cookie", "x-tenant-id", "x-priority"} & set(made.call.headers)
    assert said.items() <= {**json.loads(made.call.body), "x_pool_options": None}.items()
    made.finish()
    await asked.done()
    assert (asked.status, other.engine.calls) == (200, [])


async def test_the_admin_api_makes_lists_and_ends_keys_and_refuses_everyone_else(fleet: Fleet) -> None:
    _, token = await fleet.operate(create_admin_token, name=f"t{uuid.uuid4().hex[:8]}")
    node = await fleet.add_node(slots=2)
    admin: dict[str, Any] = {"key": "", "headers": {"authorization": token}}
    running, call = await fleet.begin_stream()
    for path in ("/admin/workers", "/admin/stats", "/admin/keys"):
        for value in ("", "Bearer wrong", f"Bearer {fleet.rows.keys['k']}", f"Bearer {fleet.rows.credential}"):
            refused = await fleet.call(path, method="GET", key="", headers={"authorization": value})
            assert read_error(refused)[:2] == (403, "INVALID_ADMIN_TOKEN")
    (worker,) = read(await fleet.call("/admin/workers", method="GET", **admin))["workers"]
    shown = {"provider": "local", "worker_name": node.name, "models": ["m"], "max_concurrent": 2, "in_flight_count": 1}
    assert {**shown, "is_draining": False}.items() <= worker.items()
    stats = read(await fleet.call("/admin/stats", method="GET", **admin))
    assert (stats["queue_depth"], stats["active_workers"], stats["in_flight"]) == ({"local": 0}, 1, 1)
    local = {"workers": 1, "in_flight": 1, "queue_depth": 0, "requests": dict.fromkeys(OUTCOMES, 0)}
    assert stats["providers"] == {"local": local}
    assert read(await fleet.call("/health", method="GET", **admin))["providers"] == {"local": local}
    assert "providers" not in read(await fleet.call("/health", method="GET", key=""))
    made = await fleet.call("/admin/keys", b'{"name": "new", "tenant": "acme", "priority": "low"}', **admin)
    row = read(made)
    assert (made.status, row["name"], row["revoked"], row["last_used_at"]) == (201, "new", False, None)
    assert row["secret"].startswith(row["prefix"])
    listed = await fleet.call("/admin/keys", method="GET", **admin)
    assert row["id"] in [one["id"] for one in read(listed)["keys"]]
    assert row["secret"].encode() not in listed.body
    body = json.dumps({"model": "m", "messages": HELLO, "max_tokens": 77}).encode()
    asked = fleet.send(CHAT_PATH, body, key="", headers=bearer(row), number=77)
    low = await fleet.next_call(asked)
    assert low.call.priority == "low"
    low.finish()
    ended = await fleet.call(f"/admin/keys/{row['id']}", method="DELETE", **admin)
    assert (ended.status, ended.body) == (204, b"")
    await fleet.advance(1.0)
    assert (await fleet.call(CHAT_PATH, b"{}", key="", headers=bearer(row))).status == 401
    for ident in (str(uuid.uuid4()), "not-a-uuid"):
        assert (await fleet.call(f"/admin/keys/{ident}", method="DELETE", **admin)).status == 404
    wrong = await fleet.call("/admin/keys", b'{"name": "k", "tenant": "acme", "priority": "urgent"}', **admin)
    assert read_error(wrong)[:2] == (400, "BAD_REQUEST")
    call.finish()
    await running.done()


def bearer(key: dict[str, Any]) -> dict[str, str]:
    """Return the header that shows a key."""
    return {"authorization": f"Bearer {key['secret']}"}


async def test_anybody_may_ask_whether_the_gateway_is_well_and_only_neighbours_for_its_numbers(fleet: Fleet) -> None:
    node = await fleet.add_node()
    health = read(await fleet.call("/health", method="GET", key=""))
    assert (health["ok"], health["service"], health["workers_connected"], "workers" in health) == (True, "gateway", 1, False)
    icon = await fleet.call("/favicon.ico", method="GET", key="")
    assert (icon.headers["content-type"], icon.body[:4]) == ("image/svg+xml", b"<svg")
    metrics = await fleet.call("/metrics", method="GET", key="")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b'muster_nodes{status="available"}' in metrics.body
    assert f'muster_node_slots{{node="{node.name}"'.encode() in metrics.body
    passed_on = await fleet.call("/metrics", method="GET", key="", headers={"x-forwarded-for": "203.0.113.9"})
    assert (passed_on.status, b"muster_" in passed_on.body) == (403, False)


async def test_nothing_that_is_said_is_written_anywhere(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    canary = f"canary{uuid.uuid4().hex}"
    await fleet.add_node()
    said = [{"role": "user", "content": canary}]
    for stream in (True, False):
        whole = fleet.ask(stream=stream, messages=said)
        call = await fleet.next_call(whole)
        call.emit(text=canary)
        call.finish()
        await whole.row()
    lost = fleet.ask(stream=True, messages=said)
    (await fleet.next_call(lost)).fail()
    again = await fleet.next_call(lost, count=2)
    again.refuse(500)
    await lost.row()
    await fleet.call(CHAT_PATH, f'{{"model": "{canary}", "messages": "{canary}"}}'.encode())
    await fleet.call(CHAT_PATH, f"{{{canary}".encode())
    await fleet.call(CHAT_PATH, b"{}", key="", headers={"authorization": f"Bearer {canary}"})
    await fleet.advance(2.0)
    words = [canary, *(text.rsplit("_", 1)[1] for text in (*fleet.rows.keys.values(), fleet.rows.credential))]
    assert await run_upkeep(lambda: [place for place in list_kept() for word in words if word in place]) == []
    assert not [word for word in words if word in caplog.text]


def list_kept() -> list[str]:
    """Return every row of every table and every value in Valkey, as text."""
    kept = []
    with connection.cursor() as cursor:
        for name in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT t::text FROM "{name}" AS t')
            kept += [f"{name} {row}" for (row,) in cursor.fetchall()]
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        kept += [f"valkey {key!r} {client.dump(key)!r}" for key in client.scan_iter()]
    return kept
