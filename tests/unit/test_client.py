"""``muster.client`` against a scripted gateway and nodes on real sockets: where it asks, what it does when a node is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any  # bodies are JSON

import httpx
import pytest

from muster.client import AsyncClient, Bounds, Client, Event, Interrupted, Restart
from tests.fakes.tls import Authority, make_key, make_server

Parts = list[Any]
MESSAGES = [{"role": "user", "content": "hello"}]
BOUNDS = Bounds(connect_s=5, read_s=30, quiet_s=0.1, follow_s=20)


class Fleet:
    """A gateway and nodes. ``answers``: how each place answers next; ``events``: what followers of a ticket hear."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.tickets: list[str] = []
        """The nodes that tickets are given for, one after the other; then the gateway is to be asked."""
        self.answers: dict[str, list[str]] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.url_of_nodes, self.authorities = "", ""
        """Where nodes answer over TLS, and the CAs (PEM) that the gateway names."""
        self.is_over = threading.Event()
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fleet.serve_events(self)

            def do_POST(self) -> None:
                fleet.serve(self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=[0.005], daemon=True).start()

    def close(self) -> None:
        self.is_over.set()
        self.server.shutdown()
        self.server.server_close()

    def name_ticket(self, node: str, key: str = "ticket") -> dict[str, Any]:
        place = "http://127.0.0.1:9/v1" if node == "down" else f"{self.url_of_nodes or self.url}/{node}/v1"
        said = {key: f"key-{node}", "ticket_id": f"tkt-{node}", "base_url": place, "model": f"m-{node}"}
        return said | ({"ca_url": "http://elsewhere/v1/ca"} if self.url_of_nodes else {})

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        self.bodies.append(json.loads(request.rfile.read(int(request.headers["content-length"]))))
        if request.path == "/v1/tickets":
            self.asked.append("tickets")
            node = self.tickets.pop(0) if self.tickets else ""
            if node.isdigit():
                say_json(request, int(node), {"error": {"message": "no"}})
            elif node:
                say_json(request, 201, self.name_ticket(node))
            else:
                say_json(request, 200, {"relay": True, "base_url": f"{self.url}/v1"})
            return
        place = request.path.split("/")[1].replace("v1", "gateway")
        self.asked.append(place)
        assert request.headers["authorization"] == f"Bearer {'mst_x' if place == 'gateway' else f'key-{place}'}"
        self.answer(request, self.answers.get(place, ["whole"]).pop(0))

    def answer(self, request: BaseHTTPRequestHandler, how: str) -> None:
        if how.isdigit():
            say_json(request, int(how), {"error": {"message": "refused"}})
            return
        begin_events(request)
        say_event(request, {"choices": [{"delta": {"content": "Hello" if how == "whole" else "Hal"}}]})
        if how == "silent":
            self.is_over.wait(30)
        elif how == "whole":
            request.wfile.write(b"data: [DONE]\n\n")
        elif how == "error":
            say_event(request, {"error": {"message": "the engine failed"}})
        elif how.startswith("failover"):
            said = {"type": "x_pool_failover", "reason": "gpu_draining", "new_ticket": None, "base_url": f"{self.url}/v1"}
            node = how.partition(" ")[2]
            say_event(request, said | (self.name_ticket(node, "new_ticket") if node else {}), name="x_pool_failover")
            say_event(request, {"error": {"message": "the node was lost"}})

    def serve_events(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/v1/ca":
            self.asked.append("ca")
            request.send_response(200)
            request.end_headers()
            request.wfile.write(self.authorities.encode())
            return
        node = request.path.split("/")[3].removeprefix("tkt-")
        self.asked.append(f"events-{node}")
        begin_events(request)
        request.wfile.write(b": ping\n\n")
        said = self.events.get(node)
        say_event(request, said or {"type": "x_pool_end"}, name=said["type"] if said else "x_pool_end")

    def lose(self, node: str, successor: str = "") -> None:
        """Have whoever follows a ticket for a node hear that it is lost."""
        new = self.name_ticket(successor, "new_ticket") if successor else {"new_ticket": None, "base_url": f"{self.url}/v1"}
        self.events[node] = {"type": "x_pool_failover", "reason": "gpu_lost", **new}


def say_json(request: BaseHTTPRequestHandler, status: int, body: object) -> None:
    said = json.dumps(body).encode()
    request.send_response(status)
    request.send_header("content-length", str(len(said)))
    request.end_headers()
    request.wfile.write(said)


def begin_events(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("content-type", "text/event-stream")
    request.end_headers()


def say_event(request: BaseHTTPRequestHandler, data: object, *, name: str = "") -> None:
    head = f"event: {name}\n" if name else ""
    request.wfile.write(f"{head}data: {json.dumps(data)}\n\n".encode())
    request.wfile.flush()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.close()


@contextmanager
def serve_tls(fleet: Fleet, folder: Path, authority: Authority) -> Iterator[str]:
    """Yield the address at which the same nodes answer over TLS."""
    key = make_key()
    with ThreadingHTTPServer(("127.0.0.1", 0), fleet.server.RequestHandlerClass) as server:
        context = make_server(folder, key, authority.certify(key, host="127.0.0.1"))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=[0.005], daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Asked:
    """One of the two clients, asked in the same way."""

    def __init__(self, fleet: Fleet, kind: str) -> None:
        self.fleet, self.kind = fleet, kind
        self.direct = self.relayed = 0

    def chat(self, **fields: Any) -> Parts:
        parts = self.stream({"model": "m", "messages": MESSAGES, **fields})
        return [one if isinstance(one, Restart) else one.data["choices"][0]["delta"]["content"] for one in parts]

    def stream(self, body: dict[str, Any], **options: Any) -> list[Event | Restart]:
        if self.kind == "sync":
            with Client(f"{self.fleet.url}/v1", "mst_x", bounds=BOUNDS) as client:
                said = list(client.stream(body, **options))
                self.direct, self.relayed = client.direct, client.relayed
                return said
        return asyncio.run(self._stream(body, **options))

    async def _stream(self, body: dict[str, Any], **options: Any) -> list[Event | Restart]:
        async with AsyncClient(f"{self.fleet.url}/v1", "mst_x", bounds=BOUNDS) as client:
            said = [part async for part in client.stream(body, **options)]
            self.direct, self.relayed = client.direct, client.relayed
            return said


@pytest.fixture(params=["sync", "async"])
def asked(fleet: Fleet, request: pytest.FixtureRequest) -> Asked:
    return Asked(fleet, request.param)


def test_a_request_goes_to_the_node_of_its_ticket(fleet: Fleet, asked: Asked) -> None:
    fleet.tickets = ["a"]
    assert asked.chat(max_tokens=30, x_pool_options={"priority": "low"}) == ["Hello"]
    assert fleet.asked == ["tickets", "a"]
    wish, body = fleet.bodies
    assert (wish["model"], wish["max_tokens"], wish["dialects"], wish["x_pool_options"]["priority"]) == (
        "m",
        30,
        ["chat"],
        "low",
    )
    assert (body["model"], body["stream"], "x_pool_options" in body) == ("m-a", True, False), "a node knows nothing of them"
    assert (asked.direct, asked.relayed) == (1, 0)


def test_a_node_is_verified_with_the_ca_of_the_gateway_and_else_the_gateway_relays(
    fleet: Fleet, asked: Asked, tmp_path: Path
) -> None:
    authority, stranger = Authority(), Authority()
    with serve_tls(fleet, tmp_path, authority) as url:
        fleet.url_of_nodes, fleet.tickets, fleet.authorities = url, ["a"], authority.certificate
        assert asked.chat() == ["Hello"]
        assert fleet.asked == ["tickets", "ca", "a"]
        for unusable in (stranger.certificate, "no certificate"):
            fleet.tickets, fleet.asked, fleet.authorities = ["a"] * 9, [], unusable
            assert asked.chat() == ["Hello"]
            assert (fleet.asked[-1], "a" in fleet.asked) == ("gateway", False)
            assert fleet.asked.count("ca") == BOUNDS.moves, "it is fetched anew each time"


@pytest.mark.parametrize("ticket", ["", "404", "503"])
def test_without_a_ticket_the_gateway_relays(fleet: Fleet, asked: Asked, ticket: str) -> None:
    fleet.tickets = [ticket]
    assert asked.chat() == ["Hello"]
    assert fleet.asked == ["tickets", "gateway"]
    assert (fleet.bodies[1]["model"], fleet.bodies[1]["x_pool_options"]) == ("m", {}), "it wants to hear of lost nodes"
    assert (asked.direct, asked.relayed) == (0, 1)


def test_a_node_that_cannot_be_reached_or_refuses_costs_another_ticket_and_at_last_the_relay(
    fleet: Fleet, asked: Asked
) -> None:
    fleet.tickets, fleet.answers["a"] = ["down", "a", "b"], ["401"]
    assert asked.chat() == ["Hello"]
    assert [place for place in fleet.asked if not place.startswith("events")] == ["tickets", "tickets", "a", "tickets", "b"]
    fleet.tickets, fleet.asked = ["down"] * 9, []
    assert asked.chat() == ["Hello"]
    assert fleet.asked[-1] == "gateway"
    assert fleet.asked.count("tickets") == BOUNDS.moves


@pytest.mark.parametrize("how", ["cut", "silent"])
def test_an_answer_whose_node_is_lost_begins_anew_at_the_one_that_the_gateway_names(
    fleet: Fleet, asked: Asked, how: str
) -> None:
    fleet.tickets, fleet.answers["a"] = ["a"], [how]
    fleet.lose("a", "b")
    assert asked.chat() == ["Hal", Restart("gpu_lost"), "Hello"]
    assert fleet.asked == ["tickets", "a", "events-a", "b"]
    assert fleet.bodies[-1]["model"] == "m-b"


def test_without_another_node_it_begins_anew_through_the_gateway(fleet: Fleet, asked: Asked) -> None:
    for is_told in (True, False):
        fleet.tickets, fleet.answers["a"], fleet.asked = ["a"], ["cut"], []
        if is_told:
            fleet.lose("a")
        else:
            fleet.events.clear()
        assert asked.chat() == ["Hal", Restart("gpu_lost" if is_told else ""), "Hello"]
        assert fleet.asked == ["tickets", "a", "events-a", "gateway"]


@pytest.mark.parametrize("successor", ["b", ""])
def test_a_relayed_stream_that_names_another_node_is_followed(fleet: Fleet, asked: Asked, successor: str) -> None:
    fleet.answers["gateway"] = [f"failover {successor}".strip(), "whole"]
    assert asked.chat() == ["Hal", Restart("gpu_draining"), "Hello"]
    assert fleet.asked == ["tickets", "gateway", successor or "gateway"]


def test_what_nobody_could_do_better_is_raised(fleet: Fleet, asked: Asked) -> None:
    fleet.tickets, fleet.answers["a"] = ["a"], ["error"]
    with pytest.raises(Interrupted, match="the engine failed"):
        asked.chat()
    fleet.answers["gateway"] = ["cut", "failover"] + ["failover"] * 9
    with pytest.raises(Interrupted, match="ended before"):
        asked.chat()
    fleet.asked = []
    with pytest.raises(Interrupted, match="the node was lost"):
        asked.chat()
    assert fleet.asked.count("gateway") == BOUNDS.moves + 1, "it does not go on for ever"


@pytest.mark.parametrize(("place", "status"), [("tickets", 401), ("tickets", 429), ("a", 400), ("gateway", 503)])
def test_a_refusal_that_is_the_callers_is_raised(fleet: Fleet, asked: Asked, place: str, status: int) -> None:
    fleet.tickets = [str(status) if place == "tickets" else "a" if place == "a" else ""]
    fleet.answers[place] = [str(status)]
    with pytest.raises(httpx.HTTPStatusError) as caught:
        asked.chat()
    assert caught.value.response.status_code == status


def test_a_path_that_tickets_do_not_open_goes_to_the_gateway(fleet: Fleet, asked: Asked) -> None:
    asked.stream({"model": "m", "prompt": "a cat"}, path="/v1/images/generations")
    assert fleet.asked == ["gateway"]


def test_the_text_of_a_chat_is_all_that_chat_yields(fleet: Fleet) -> None:
    fleet.tickets, fleet.answers["a"] = ["a"], ["cut"]

    async def read() -> Parts:
        async with httpx.AsyncClient() as http:
            return [part async for part in AsyncClient(fleet.url, "mst_x", http=http).chat("m", MESSAGES)]

    assert list(Client(fleet.url, "mst_x").chat("m", MESSAGES)) == ["Hal", Restart(), "Hello"]
    assert asyncio.run(read()) == ["Hello"]
