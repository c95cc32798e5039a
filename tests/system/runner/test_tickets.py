"""Tickets on a node's own port: what opens it, once, what the engine never sees, and what a gateway is told."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any  # claims and bodies are JSON

import httpx
import msgspec
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from runner.api.routes import make_routes
from runner.api.server import make_app
from runner.config import ApiConfig, read_config
from runner.engines.port import CHAT
from runner.errors import ConfigError
from runner.parts import Parts
from runner.tickets import TICKET_PATHS, Tickets, apply_cap
from tests.fakes.engines.scripted_server import ScriptedEngine, answer_json, run_engine
from tests.fakes.ledgers import opened
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.parts import assembled
from tests.fakes.waiting import eventually
from wire import clock
from wire.bridge import TicketPublicKey, TicketUsage
from wire.ticket import Caps, Ticket, TicketFault, TicketKey, issue_ticket

SIGNER, STRANGER = (TicketKey(kid, Ed25519PrivateKey.from_private_bytes(kid.encode() * 32)) for kid in "ab")
AUDIENCE, PAGE = "node_1", "https://app.example"
NODE_KEY = "the key of this node's owner"


def public(key: TicketKey) -> TicketPublicKey:
    return TicketPublicKey(kid=key.kid, public_key=base64.urlsafe_b64encode(key.public).rstrip(b"=").decode())


def make_ticket(number: int = 1, *, key: TicketKey = SIGNER, **changes: Any) -> str:
    now = clock.unix_s()
    claims: dict[str, Any] = {
        "ticket_id": f"tkt_{number}", "issued_at": now, "expires_at": now + 5, "gpu_endpoint": "http://gpu1:8090",
        "model": "alpha", "audience": AUDIENCE, "tenant": "acme", "key_id": "key_1", "record_id": f"req_{number}",
        "caps": Caps(max_tokens=100),
    }  # fmt: skip
    return issue_ticket(key, Ticket(**claims | changes))


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with run_engine() as made:
        yield made


@pytest.fixture
async def parts(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Parts]:
    port = ("--backend", engine.url, "--max-concurrent", "1", "--api-port", "0")
    gateway = ("--gateway", "http://127.0.0.1:1", "--token", "msw_x", "--data", str(tmp_path / "node"))
    tickets = ("--ticket-url", "http://gpu1:8090", "--ticket-origins", PAGE)
    async with assembled(tmp_path, *port, *gateway, *tickets) as made:
        await eventually(lambda: made.pool.registry.ready_ids() == ["alpha", "beta"], "the server's models are known")
        made.tickets.hear_audience(AUDIENCE)
        made.tickets.hear_keys([public(SIGNER)])
        made.tickets.hear_time(clock.unix_ms())
        yield made


class Door:
    """The node's own port, as clients with tickets reach it."""

    def __init__(self, parts: Parts) -> None:
        config = ApiConfig("127.0.0.1", 0, NODE_KEY, has_metrics=False, metrics_port=None)
        routes, self.close = make_routes(parts, config)
        self._app = make_app(routes, config, parts.tickets)

    async def ask(
        self, ticket: str, *, path: str = CHAT, method: str = "POST", headers: dict[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        body = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], **fields}
        shown = {"authorization": f"Bearer {ticket}", **(headers or {})}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=self._app), base_url="http://gpu1:8090") as client:
            return await client.request(method, path, json=body if method == "POST" else None, headers=shown)


@pytest.fixture
async def door(parts: Parts) -> Door:
    return Door(parts)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_ticket_opens_one_request_and_the_gateway_is_told_what_it_took(
    parts: Parts, door: Door, engine: ScriptedEngine
) -> None:
    ticket = make_ticket()
    answer = await door.ask(ticket, max_tokens=10)
    assert answer.status_code == 200, answer.text
    again = await door.ask(ticket, max_tokens=10)
    assert code_of(again) == (401, "ticket_spent")
    assert len(engine.seen) == 1, "the engine sees nothing of a ticket that was used"
    (report,) = await parts.tickets.list_reports()
    assert (report.ticket_id, report.record_id, report.status, report.endpoint) == ("tkt_1", "req_1", "completed", CHAT)
    assert report.usage is not None
    assert report.usage.completion_tokens > 0
    await parts.tickets.take_receipts({"tkt_1": "running"})
    assert await parts.tickets.list_reports() == [report], "that it ended is still to be told"
    await parts.tickets.take_receipts({"tkt_1": "completed"})
    assert await parts.tickets.list_reports() == []
    assert code_of(await door.ask(ticket)) == (401, "ticket_spent"), "what is told is not forgotten"


@pytest.mark.parametrize(
    ("changes", "fields", "expected"),
    [
        ({"key": STRANGER}, {}, (401, "ticket_key_unknown")),
        ({"audience": "node_2"}, {}, (401, "ticket_audience_wrong")),
        ({"expires_at": 1.0}, {}, (401, "ticket_expired")),
        ({"issued_at": 4e9, "expires_at": 4e9 + 5}, {}, (401, "ticket_not_yet_valid")),
        ({"model": "beta"}, {}, (403, "ticket_model_wrong")),
        ({}, {"max_tokens": 101}, (403, "ticket_cap_exceeded")),
        ({}, {"max_completion_tokens": 101, "max_tokens": 5}, (403, "ticket_cap_exceeded")),
        ({}, {"n_predict": -1}, (403, "ticket_cap_exceeded")),
        ({}, {"max_tokens": 60, "n": 2}, (403, "ticket_cap_exceeded")),
        ({}, {"max_tokens": 60, "prompt": ["a", "b"]}, (403, "ticket_cap_exceeded")),
    ],
)
async def test_what_a_ticket_does_not_permit_the_engine_never_sees(
    parts: Parts, door: Door, engine: ScriptedEngine, changes: dict[str, Any], fields: dict[str, Any], expected: tuple[int, str]
) -> None:
    assert code_of(await door.ask(make_ticket(**changes), **fields)) == expected
    assert engine.seen == []
    assert await parts.tickets.list_reports() == [], "a ticket that was refused is not used up"


async def test_an_error_is_said_in_the_callers_dialect(door: Door) -> None:
    answer = await door.ask(
        make_ticket(audience="node_2"), path="/v1/messages", headers={"x-api-key": make_ticket(audience="x")}
    )
    assert (answer.status_code, answer.json()["type"]) == (401, "error")
    assert "another node" in answer.json()["error"]["message"]


async def test_a_ticket_opens_inference_alone_and_the_owners_key_still_opens_all(door: Door) -> None:
    for path in ("/v1/models", "/v1/capabilities", "/metrics", "/openapi.json", "/health"):
        assert code_of(await door.ask(make_ticket(), path=path, method="GET")) == (403, "ticket_path_wrong"), path
    for path in ("/v1/models/unload", "/v1/cache/flush", "/v1/tokenize", "/v1/images/generations"):
        assert (await door.ask(make_ticket(), path=path)).status_code == 403, path
    assert (await door.ask(NODE_KEY, path="/v1/models", method="GET")).status_code == 200
    assert (await door.ask("wrong", path="/v1/models", method="GET")).status_code == 401


async def test_the_tenant_is_that_of_the_ticket_and_nobody_rises_above_the_others(
    parts: Parts, door: Door, engine: ScriptedEngine
) -> None:
    answer = await door.ask(make_ticket(), headers={"x-tenant-id": "rival", "x-priority": "high"})
    assert answer.status_code == 200
    assert {tenant for _model, tenant, _status in parts.counters.requests} == {"acme"}


async def test_of_two_requests_that_come_at_once_with_one_ticket_one_is_served(door: Door, engine: ScriptedEngine) -> None:
    ticket = make_ticket()
    answers = await asyncio.gather(*(door.ask(ticket, max_tokens=1) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 401, 401, 401, 401]
    assert len(engine.seen) == 1


async def test_a_page_of_an_origin_that_the_owner_named_may_use_a_ticket_and_no_other(door: Door) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    yes = await door.ask("", method="OPTIONS", headers={"origin": PAGE, **asked})
    assert (yes.status_code, yes.headers["access-control-allow-origin"]) == (204, PAGE)
    assert yes.headers["access-control-allow-headers"] == "authorization, content-type"
    no = await door.ask("", method="OPTIONS", headers={"origin": "https://evil.example", **asked})
    assert not [name for name in no.headers if name.startswith("access-control-")]
    answer = await door.ask(make_ticket(), headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    refused = await door.ask(make_ticket(2, audience="x"), headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE), "a page may read why not"
    other = await door.ask("none", path="/v1/models", method="GET", headers={"origin": PAGE})
    assert not [name for name in other.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("is_drained", [False, True])
async def test_an_owner_who_takes_the_node_back_or_a_drain_whose_time_is_over_ends_what_runs(
    parts: Parts, door: Door, engine: ScriptedEngine, is_drained: bool
) -> None:
    set_runner_limits(tickets={"reclaim_s": 0.05})
    begun = asyncio.Event()

    async def hang(request: web.Request, _body: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n')
        begun.set()
        await asyncio.Event().wait()
        return answer

    engine.handler = hang
    asking = asyncio.create_task(door.ask(make_ticket(), stream=True, max_tokens=5))
    await begun.wait()
    if is_drained:
        parts.tickets.drain(0.05)
    else:
        parts.tickets.reclaim(is_reclaimed=True)
    answer = await asking
    assert ("was drained" if is_drained else "taken this node back") in answer.text, "the stream ends with an error event"
    if not is_drained:
        assert (await door.ask(make_ticket(2))).status_code == 503, "no ticket opens it now"
    await eventually(lambda: parts.serving.load == 0, "its slot is free")
    (report,) = await parts.tickets.list_reports()
    assert report.status == "interrupted"
    parts.tickets.reclaim(is_reclaimed=False)
    engine.handler = answer_json
    assert (await door.ask(make_ticket(3), max_tokens=5)).status_code == 200


async def test_a_body_that_takes_too_long_loses_its_ticket(parts: Parts) -> None:
    verified = parts.tickets.verify(make_ticket())
    late = replace_ticket(verified, expires_at=clock.unix_s() - 61)
    with pytest.raises(Exception, match="expired"):
        await parts.tickets.spend(late, endpoint=CHAT, model="alpha", is_streaming=False)


def replace_ticket(ticket: Ticket, **changes: Any) -> Ticket:
    return msgspec.structs.replace(ticket, **changes)


async def test_the_clock_is_that_of_the_server(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        tickets = Tickets(None, ledger)
        tickets.hear_audience(AUDIENCE)
        tickets.hear_keys([public(SIGNER)])
        ahead = clock.unix_s() + 3600
        ticket = make_ticket(issued_at=ahead, expires_at=ahead + 5)
        with pytest.raises(Exception, match="not valid yet"):
            tickets.verify(ticket)
        tickets.hear_time(int(ahead * 1000))
        assert tickets.verify(ticket).ticket_id == "tkt_1"


async def test_a_restart_remembers_what_was_used_and_tells_what_it_cut_off(tmp_path: Path) -> None:
    report = msgspec.json.encode(TicketUsage(ticket_id="tkt_1", record_id="req_1", model="m", status="running")).decode()
    async with opened(tmp_path) as ledger:
        assert await ledger.spend_ticket("tkt_1", expires_at=4e9, report=report)
        await ledger.forget_tickets([("tkt_1", False)])
        assert await ledger.list_tickets(10) == []
    async with opened(tmp_path) as ledger:
        assert not await ledger.spend_ticket("tkt_1", expires_at=4e9, report=report)
        (told,) = await ledger.list_tickets(10)
        assert json.loads(told)["status"] == "interrupted"


async def test_no_ticket_from_before_the_ledger_began_is_taken(parts: Parts) -> None:
    with pytest.raises(Exception, match="used before"):
        parts.tickets.verify(make_ticket(issued_at=clock.unix_s() - 120))


async def test_the_books_are_bounded_and_expired_tickets_leave_them(tmp_path: Path) -> None:
    set_runner_limits(ledger={"tickets": 2})
    report = msgspec.json.encode(TicketUsage(ticket_id="", record_id="", model="", status="completed")).decode()
    async with opened(tmp_path) as ledger:
        for number in range(2):
            assert await ledger.spend_ticket(f"tkt_{number}", expires_at=0.0, report=report)
        with pytest.raises(Exception, match="holds its 2 entries"):
            await ledger.spend_ticket("tkt_2", expires_at=0.0, report=report)
        await ledger.end_ticket("tkt_0", report)
        await ledger.forget_tickets([("tkt_0", True)])
        assert await ledger.spend_ticket("tkt_2", expires_at=0.0, report=report)


def test_the_cap_is_written_into_a_body_that_has_none() -> None:
    ticket = msgspec.convert({**msgspec.to_builtins(_TICKET)}, Ticket)
    for body, expected in (
        (b' {"model": "m"}', {"max_tokens": 100, "model": "m"}),
        (b'{"model": "m", "max_tokens": null, "n": 3}', {"max_tokens": 33, "model": "m", "n": 3}),
        (b'{"model": "m", "prompt": ["a", "b"]}', {"max_tokens": 50, "model": "m", "prompt": ["a", "b"]}),
        (b'{"model": "m", "prompt": [1, 2]}', {"max_tokens": 100, "model": "m", "prompt": [1, 2]}),
        (b'{"model": "m", "max_tokens": 7}', {"model": "m", "max_tokens": 7}),
    ):
        said = apply_cap(ticket, endpoint=CHAT, fields=json.loads(body), body=body)
        assert json.loads(said) == expected


_TICKET = Ticket(
    ticket_id="t", issued_at=0, expires_at=5, gpu_endpoint="", model="m", audience="n", tenant="t", key_id="k", record_id="r",
    caps=Caps(max_tokens=100),
)  # fmt: skip


def test_every_fault_has_a_refusal_with_its_code() -> None:
    from runner.errors import TICKET_REFUSALS

    assert {fault: kind.code for fault, kind in TICKET_REFUSALS.items()} == {fault: fault.value for fault in TicketFault}
    assert len({kind.words for kind in TICKET_REFUSALS.values()}) == len(TicketFault)
    assert CHAT in TICKET_PATHS


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--ticket-url", "http://h:1", "--api-port", "0"), "--data"),
        (("--ticket-url", "http://h:1", "--data", "{tmp}"), "--api-port"),
        (("--ticket-url", "ftp://h:1", "--api-port", "0", "--data", "{tmp}"), "--ticket-url must look like"),
        (("--ticket-url", "http://h:1", "--api-port", "0", "--data", "{tmp}", "--ticket-origins", "app"), "--ticket-origins"),
    ],
)
def test_an_option_that_cannot_be_used_says_why(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    given = [word.replace("{tmp}", str(tmp_path)) for word in words]
    with pytest.raises(ConfigError, match=why):
        read_config([*given, "--gateway", "http://g:1", "--token", "msw_x", "--backend", "http://b:1"], {})
    config = read_config(
        ["--gateway", "http://g:1", "--backend", "http://b:1", "--data", str(tmp_path)],
        {"MUSTER_TOKEN": "msw_x", "MUSTER_TICKET_URL": "http://h:1/v1/", "MUSTER_API_PORT": "0", "MUSTER_TICKET_ORIGINS": "*"},
    )
    assert config.tickets is not None
    assert (config.tickets.url, config.tickets.origins) == ("http://h:1", frozenset("*"))
