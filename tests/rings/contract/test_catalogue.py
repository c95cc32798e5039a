"""What a gateway tells about itself and its models, its keys, and HTTP as careful and careless clients speak it to it."""

from __future__ import annotations

import asyncio
import gzip
import json
import uuid
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fakes.http_client import Reply, call
from tests.fakes.lab import CHAT, MESSAGES, PROBE_TOKENS, RESPONSES, Lab, bearer, chat_body, unique
from tests.fakes.waiting import DEADLINE_S, eventually
from tests.rings.contract.conftest import PAGE

ANTHROPIC = {"anthropic-version": "2023-06-01"}
KEY_FIELDS = {"id", "name", "prefix", "created_at", "last_used_at", "revoked"}


# models


async def listed(lab: Lab, path: str = "/v1/models") -> list[str]:
    """Return the ids in a model list."""
    reply = await call("GET", lab.gateway.url + path, headers=bearer(lab.stack.ready.api_key))
    assert reply.status == 200
    return [row["id"] for row in reply.json["data"]]


async def test_models_endpoint_returns_openai_compatible_catalog_shape_for_advertised_models(lab: Lab) -> None:
    model = await lab.model(prefix="org/with-slash")
    await lab.worker(model)

    async def advertised() -> bool:
        return model in await listed(lab)

    await eventually(advertised, what="the model is listed")
    reply = await call("GET", lab.gateway.url + "/v1/models", headers=bearer(lab.stack.ready.api_key))
    assert reply.json["object"] == "list"
    assert all(set(row) >= {"id", "object", "created", "owned_by"} for row in reply.json["data"])
    assert all(row["object"] == "model" and isinstance(row["created"], int) for row in reply.json["data"])
    one = await call("GET", f"{lab.gateway.url}/v1/models/{model}", headers=bearer(lab.stack.ready.api_key))
    assert one.status == 200
    assert one.json["id"] == model
    assert model in await listed(lab, "/models")

    async def are_the_same() -> bool:
        """Return whether anybody sees what a key sees; the workers of the test before may go between two looks."""
        seen = await call("GET", lab.gateway.url + "/v1/models", headers=bearer(lab.stack.ready.api_key))
        public = await call("GET", lab.gateway.url + "/v1/models")
        assert (seen.status, public.status) == (200, 200)
        return bool(public.json == seen.json)

    await eventually(are_the_same, what="the list is the same without a key")
    missing = await call("GET", f"{lab.gateway.url}/v1/models/no-such", headers=bearer(lab.stack.ready.api_key))
    assert missing.status == 404
    assert missing.error["code"] == "MODEL_NOT_ALLOWED"


async def test_models_endpoint_tracks_live_worker_model_updates_without_stale_entries(lab: Lab) -> None:
    old, new = await lab.model(), await lab.model()
    worker = await lab.worker(old)

    async def shows(present: str, absent: str) -> bool:
        found = await listed(lab)
        return present in found and absent not in found

    await eventually(lambda: shows(old, new), what="only the old model is listed")
    await worker.send({"type": "models_update", "models": [new], "current_load": 0})
    await eventually(lambda: shows(new, old), what="only the new model is listed")
    await worker.close()

    async def gone() -> bool:
        return new not in await listed(lab)

    await eventually(gone, what="the model of a worker that left is not listed")


# operators' API


def assert_key(row: dict[str, Any]) -> None:
    """Check the shape of one key in ModelRelay's admin API."""
    assert str(uuid.UUID(row["id"])) == row["id"]
    assert isinstance(row["created_at"], int)
    assert row["last_used_at"] is None or isinstance(row["last_used_at"], int)
    assert row["prefix"].startswith("mst_")
    assert isinstance(row["revoked"], bool)


async def test_a_key_is_created_listed_used_and_revoked(lab: Lab) -> None:
    """Rows L1 to L3."""
    name = unique("key")
    made = await lab.admin("POST", "/admin/keys", body={"name": name})
    row = made.json
    assert (made.status, set(row)) == (201, {*KEY_FIELDS, "secret"})
    assert_key(row)
    assert (row["name"], row["revoked"], row["last_used_at"]) == (name, False, None)
    assert row["secret"].startswith(row["prefix"])
    reply = await lab.admin("GET", "/admin/keys")
    for listed_key in reply.json["keys"]:
        assert set(listed_key) == KEY_FIELDS
        assert_key(listed_key)
    assert row["secret"] not in reply.body.decode()
    model = await lab.model()

    async def is_answered(status: int) -> bool:
        reply = await lab.post(chat_body(model, max_tokens=PROBE_TOKENS), headers=bearer(row["secret"]))
        return reply.status == status

    await eventually(lambda: is_answered(400), "the new key works")
    deleted = await lab.admin("DELETE", f"/admin/keys/{row['id']}")
    assert (deleted.status, deleted.body) == (204, b"")
    await eventually(lambda: is_answered(401), "the revoked key is refused")
    listed_keys = (await lab.admin("GET", "/admin/keys")).json["keys"]
    assert [one["revoked"] for one in listed_keys if one["id"] == row["id"]] == [True]
    for nobody in (uuid.uuid4(), "not-a-uuid"):
        assert (await lab.admin("DELETE", f"/admin/keys/{nobody}")).status == 404


@pytest.mark.parametrize("path", ["/admin/workers", "/admin/stats", "/admin/keys"])
async def test_the_admin_api_refuses_everyone_but_an_admin(lab: Lab, path: str) -> None:
    ready = lab.stack.ready
    for token in (None, "wrong", ready.api_key, ready.worker_secret):
        headers = {} if token is None else bearer(token)
        reply = await call("GET", lab.gateway.url + path, headers=headers)
        assert reply.status == 403, (path, reply)
    bare = await call("GET", lab.gateway.url + path, headers={"authorization": ready.admin_token})
    assert bare.status == 200


async def test_the_admin_api_lists_workers_and_queue(lab: Lab) -> None:
    model = await lab.model()
    name = unique("listed")
    worker = await lab.worker(model, name=name, max_concurrent=2)
    lab.ask(model)
    await worker.job()
    row = await lab.listed_worker(name)
    assert row is not None
    expected = {
        "worker_id": worker.of_kind("register_ack")[0]["worker_id"],
        "provider": "local",
        "worker_name": name,
        "models": [model],
        "max_concurrent": 2,
        "in_flight_count": 1,
        "is_draining": False,
    }
    assert {field: row[field] for field in expected} == expected
    assert set(row) >= {*expected, "reported_load"}
    stats = (await lab.admin("GET", "/admin/stats")).json
    assert isinstance(stats["queue_depth"], dict)
    assert stats["active_workers"] >= 1


async def test_health_is_public_and_says_that_the_gateway_is_up(lab: Lab) -> None:
    reply = await call("GET", lab.gateway.url + "/health")
    assert reply.status == 200
    assert reply.json["ok"] is True
    assert reply.json["service"] == "gateway"
    assert reply.json["time"].endswith("Z")


async def test_metrics_are_served_and_count_requests(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.spawn(lab.post(chat_body(model)))
    await worker.answer(await worker.job())
    await reply
    metrics = await call("GET", lab.gateway.url + "/metrics")
    assert metrics.status == 200
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b'muster_nodes{status="available"}' in metrics.body
    assert b"muster_node_slots{" in metrics.body
    passed_on = await call("GET", lab.gateway.url + "/metrics", headers={"x-forwarded-for": "203.0.113.9"})
    assert passed_on.status == 403
    assert b"muster_" not in passed_on.body


# HTTP


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/v1/messages/count_tokens"])
async def test_a_compressed_body_is_refused_by_the_header_that_says_so(lab: Lab, path: str) -> None:
    for encoding in ("gzip", "br, zstd"):
        reply = await lab.post(gzip.compress(chat_body("any")), path=path, headers=lab.headers({"content-encoding": encoding}))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (415, "BAD_REQUEST", "Content-Encoding")
        assert encoding in reply.error["message"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "json"):
        reply = await lab.post(chat_body("any"), path=path, headers=lab.headers({"content-type": kind}))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (415, "BAD_REQUEST", "Content-Type")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("content-encoding", "Identity"),
        ("content-type", ""),
        ("content-type", "Application/JSON; charset=utf-8"),
        ("content-type", "application/vnd.api+json"),
    ],
)
async def test_json_by_any_of_its_names_is_read(lab: Lab, name: str, value: str) -> None:
    assert (await lab.post(b"{}", headers=lab.headers({name: value}))).error["param"] == "model"


async def speak(lab: Lab, head: list[str], *, then: bytes) -> tuple[bytes, bytes]:
    """Send a head, wait for what comes back, then send the rest; return the first line of either answer."""
    parts = urlsplit(lab.gateway.url)
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write("\r\n".join([*head, f"host: {parts.netloc}", "", ""]).encode())
            first = await reader.readline()
            if b" 100 " not in first:
                return first, b""
            await reader.readline()
            writer.write(then)
            return first, await reader.readline()
        finally:
            writer.close()


async def test_who_asks_first_whether_a_body_is_welcome_is_told(lab: Lab) -> None:
    key = f"authorization: Bearer {lab.stack.ready.api_key}"
    body = chat_body("a-model-nobody-knows")
    head = [f"POST {CHAT} HTTP/1.1", "expect: 100-continue", f"content-length: {len(body)}"]
    first, last = await speak(lab, [*head, key], then=body)
    assert (first, last) == (b"HTTP/1.1 100 Continue\r\n", b"HTTP/1.1 404 Not Found\r\n")
    first, _ = await speak(lab, [*head, "authorization: Bearer nothing"], then=b"")
    assert first == b"HTTP/1.1 401 Unauthorized\r\n"
    first, _ = await speak(lab, [*head[:2], "content-length: 999999999", key], then=b"")
    assert first.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/v1/models/nothing", "/v1/nothing"])
async def test_every_answer_names_its_request(lab: Lab, path: str) -> None:
    reply = await call("GET", lab.gateway.url + path)
    assert reply.request_id.startswith("req_")
    assert "request-id" not in reply.headers
    reply = await call("GET", lab.gateway.url + path, headers=ANTHROPIC)
    assert reply.headers["request-id"] == reply.request_id


@pytest.mark.parametrize(("path", "status"), [("/", 200), ("/v1/models", 200), (CHAT, 405)])
async def test_a_head_is_the_answer_without_its_body(lab: Lab, path: str, status: int) -> None:
    parts = urlsplit(lab.gateway.url)
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(f"HEAD {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n".encode())
            head, body = (await reader.read()).split(b"\r\n\r\n")
        finally:
            writer.close()
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head
    assert body == b""


async def test_what_is_no_path_is_told_what_is_meant_and_in_which_dialect(lab: Lab) -> None:
    for asked, meant in (("/chat/completions", CHAT), ("/openai/v1/chat/completions/", CHAT), ("/v2/rerank", "/v1/rerank")):
        reply = await lab.post(b"{}", path=asked)
        assert (reply.status, reply.error["code"]) == (404, "NOT_FOUND")
        assert reply.error["message"].endswith(f"Did you mean {meant}?")
    reply = await lab.post(b"{}", path="/v1/messages/batches")
    assert (reply.status, reply.json["type"], reply.error["type"]) == (404, "error", "not_found_error")
    assert reply.json["request_id"] == reply.headers["request-id"]
    icon = await call("GET", lab.gateway.url + "/favicon.ico")
    assert (icon.status, icon.headers["content-type"], icon.body[:4]) == (200, "image/svg+xml", b"<svg")


async def test_of_two_credentials_the_one_that_is_ours_counts(lab: Lab) -> None:
    async def ask(**headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await lab.post(json.dumps({"model": "nobody"}).encode(), headers={"content-type": "application/json", **named})

    key = lab.stack.ready.api_key
    for own in (
        {"x_api_key": key},
        {"x_api_key": key, **bearer(key)},
        {"x_api_key": key, **bearer("sk-ant-oat01-of-another-service")},
        {"x_api_key": "sk-of-another-service", **bearer(key)},
    ):
        assert (await ask(**own)).status == 400
    for foreign in ({"x_api_key": "sk-1", **bearer("sk-2")}, {"x_api_key": "", **bearer("sk-2")}):
        assert (await ask(**foreign)).error["code"] == "INVALID_API_KEY"


ASKING = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/v1/models", "/v1/responses/resp_1"])
async def test_a_page_that_is_let_in_may_ask_and_read(lab: Lab, path: str) -> None:
    reply = await call("OPTIONS", lab.gateway.url + path, headers=ASKING)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["vary"] == "Origin"
    reply = await call("GET", lab.gateway.url + path, headers={"origin": PAGE})
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in reply.headers


async def test_a_page_that_is_let_in_reads_streams_and_errors(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    asked = lab.spawn(lab.post(chat_body(model, stream=True), headers=lab.headers({"origin": "http://localhost:3000"})))
    stream = await box.stream()
    await box.head(stream, content_type="text/event-stream", headers={"access-control-allow-origin": "*"})
    await box.data(stream, b"data: [DONE]\n\n")
    await box.end(stream)
    assert (await asked).headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = await lab.post(b"{", headers=lab.headers({"origin": PAGE}))
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_other_pages_and_what_is_not_for_clients_are_not_let_in(lab: Lab) -> None:
    for origin in ("https://evil.example", "null", PAGE + ".evil.example"):
        for method in ("OPTIONS", "GET"):
            reply = await call(method, lab.gateway.url + CHAT, headers=ASKING | {"origin": origin})
            assert "access-control-allow-origin" not in reply.headers
    for path in ("/metrics", "/admin/keys", "/health"):
        reply = await call("GET", lab.gateway.url + path, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
