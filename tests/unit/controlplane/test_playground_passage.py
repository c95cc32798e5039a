"""What the playground lets through between a gateway and a browser."""

from __future__ import annotations

import httpx
import pytest

from controlplane.playground.checks import is_gateway_url
from controlplane.playground.errors import GatewaySilent, GatewayUnreachable
from controlplane.playground.passage import choose_headers, describe_failure


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "https://api.example.com", "http://gateway:8080/", "http://[::1]:80"])
def test_scheme_host_and_port_are_an_address_of_a_gateway(url: str) -> None:
    assert is_gateway_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gateway:8080",
        "ftp://gateway",
        "http://",
        "http://gateway/v1",
        "http://gateway?x=1",
        "http://gateway#x",
        "http://me:secret@gateway",
        "http://gateway:port",
        "http://gateway:0",
        "http://[::1",
    ],
)
def test_anything_else_is_none(url: str) -> None:
    assert not is_gateway_url(url)


def test_only_named_headers_reach_a_browser() -> None:
    named = {"x-request-id": "req_1", "x-muster-node": "attic", "retry-after": "3"}
    others = {"set-cookie": "a=1", "location": "http://evil.test", "access-control-allow-origin": "*", "server": "muster"}
    shown = choose_headers({**named, **others, "content-type": "application/json; charset=utf-8"})
    assert shown == {**named, "content-type": "application/json"}


@pytest.mark.parametrize("kind", ["text/html", "image/svg+xml", "", "application/javascript"])
def test_what_a_browser_could_run_arrives_as_plain_text(kind: str) -> None:
    assert choose_headers({"content-type": kind})["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (httpx.ConnectError("refused"), GatewayUnreachable, "MUSTER_PLAYGROUND_GATEWAY_URL"),
        (httpx.ConnectTimeout("slow"), GatewayUnreachable, "MUSTER_PLAYGROUND_GATEWAY_URL"),
        (httpx.ReadTimeout("silent"), GatewaySilent, "did not answer in time"),
        (TimeoutError(), GatewaySilent, "did not answer in time"),
        (httpx.RemoteProtocolError("gone"), GatewayUnreachable, "broke the connection off"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_each_failure_says_what_to_look_at(error: Exception, expected: type[Exception], words: str) -> None:
    said = describe_failure(error)
    assert type(said) is expected
    assert words in said.message
