"""HTTP itself, as careful and careless clients speak it to the gateway: headers, methods, paths and keys, on real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.fakes.http_client import Reply, call
from tests.fakes.lab import CHAT, Lab, bearer, chat_body
from tests.fakes.stack import Gateway, Stack
from tests.fakes.waiting import DEADLINE_S

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br, gzip"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/v1/messages/count_tokens"])
async def test_a_compressed_body_is_refused_by_the_header_that_says_so(lab: Lab, path: str, encoding: str) -> None:
    headers = lab.headers({"content-encoding": encoding})
    reply = await lab.post(gzip.compress(chat_body("any")), path=path, headers=headers)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (415, "BAD_REQUEST", "Content-Encoding")
    assert encoding in reply.error["message"]


async def test_an_encoding_that_changes_nothing_is_none(lab: Lab) -> None:
    reply = await lab.post(b"{}", headers=lab.headers({"content-encoding": "Identity"}))
    assert reply.error["param"] == "model"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/xml; charset=utf-8", "json"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/v1/messages/count_tokens"])
async def test_a_body_that_is_not_said_to_be_json_is_refused_by_the_header_that_says_so(lab: Lab, path: str, kind: str) -> None:
    reply = await lab.post(chat_body("any"), path=path, headers=lab.headers({"content-type": kind}))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (415, "BAD_REQUEST", "Content-Type")
    assert "application/json" in reply.error["message"]


@pytest.mark.parametrize("kind", ["", "application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"])
async def test_json_by_any_of_its_names_is_read(lab: Lab, kind: str) -> None:
    reply = await lab.post(b"{}", headers=lab.headers({"content-type": kind}))
    assert reply.error["param"] == "model"


async def test_options_that_are_null_are_none(lab: Lab) -> None:
    body = {"model": "a-model-nobody-knows", "messages": [{"role": "user", "content": "a"}], "x_pool_options": None}
    reply = await lab.post(json.dumps(body).encode())
    assert reply.status == 404


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


async def test_browsers_find_an_icon(lab: Lab) -> None:
    reply = await call("GET", lab.gateway.url + "/favicon.ico")
    assert (reply.status, reply.headers["content-type"]) == (200, "image/svg+xml")
    assert reply.body.startswith(b"<svg")


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


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/openai/v1/chat/completions/", CHAT),
        ("/v1/messages/", MESSAGES),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v2/rerank", "/v1/rerank"),
        ("/api/v1/models", "/v1/models"),
    ],
)
async def test_a_base_url_that_is_too_long_or_too_short_is_told_what_is_meant(lab: Lab, asked: str, meant: str) -> None:
    reply = await lab.post(b"{}", path=asked)
    assert (reply.status, reply.error["code"]) == (404, "NOT_FOUND")
    assert reply.error["message"].endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/messages/msg_1"])
async def test_what_lies_below_messages_speaks_their_dialect(lab: Lab, path: str) -> None:
    reply = await lab.post(b"{}", path=path)
    assert (reply.status, reply.json["type"], reply.error["type"]) == (404, "error", "not_found_error")
    assert reply.json["request_id"] == reply.headers["request-id"]


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


PAGE = "https://chat.example.com"
ASKING = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.fixture(scope="module")
def browsable(stack: Stack) -> Iterator[Gateway]:
    """A gateway that lets pages of one origin in."""
    with stack.lend_gateway("browsable", {"MUSTER_CORS_ORIGINS": f"http://localhost:3000, {PAGE}"}) as gateway:
        yield gateway


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, "/v1/models", "/v1/responses/resp_1"])
async def test_a_page_that_is_let_in_may_ask_and_read(lab: Lab, browsable: Gateway, path: str) -> None:
    reply = await call("OPTIONS", browsable.url + path, headers=ASKING)
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["vary"] == "Origin"
    reply = await call("GET", browsable.url + path, headers={"origin": PAGE})
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in reply.headers


async def test_a_page_that_is_let_in_reads_streams_and_errors(lab: Lab, browsable: Gateway) -> None:
    model = await lab.model(browsable)
    box = await lab.box(model, gateway=browsable)
    asked = lab.spawn(
        lab.post(chat_body(model, stream=True), gateway=browsable, headers=lab.headers({"origin": "http://localhost:3000"}))
    )
    stream = await box.stream()
    await box.head(stream, content_type="text/event-stream", headers={"access-control-allow-origin": "*"})
    await box.data(stream, b"data: [DONE]\n\n")
    await box.end(stream)
    assert (await asked).headers["access-control-allow-origin"] == "http://localhost:3000"
    refused = await lab.post(b"{", gateway=browsable, headers=lab.headers({"origin": PAGE}))
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, PAGE)


async def test_other_pages_are_not_let_in(lab: Lab, browsable: Gateway) -> None:
    for gateway, origin in ((browsable, "https://evil.example"), (browsable, "null"), (lab.gateway, PAGE)):
        for method in ("OPTIONS", "GET"):
            reply = await call(method, gateway.url + CHAT, headers=ASKING | {"origin": origin})
            assert "access-control-allow-origin" not in reply.headers


async def test_what_is_not_for_clients_is_for_no_page(browsable: Gateway) -> None:
    for path in ("/metrics", "/admin/keys", "/health"):
        reply = await call("GET", browsable.url + path, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in reply.headers
