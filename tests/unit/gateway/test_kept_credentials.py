"""Credentials inside a request of /v1/responses: whoever reads the answer later has no business with them."""

from __future__ import annotations

import json

import pytest

from gateway.dialects import SURFACES
from gateway.dialects.responses import list_input_items
from gateway.dialects.responses.fields import read_request
from gateway.dialects.responses.object import render_echo

MCP = {
    "type": "mcp",
    "server_label": "tracker",
    "server_url": "https://mcp.example/sse",
    "authorization": "s3cret-token",
    "headers": {"X-Api-Key": "s3cret-header"},
}
SHELL = {
    "type": "shell",
    "environment": {
        "type": "container_auto",
        "network_policy": {
            "type": "allowlist",
            "domain_secrets": [{"domain": "a.example", "name": "K", "value": "s3cret-value"}],
        },
    },
}
PLAIN = {
    "type": "function",
    "name": "send",
    "description": None,
    "strict": None,
    "parameters": {"type": "object", "properties": {"headers": {"type": "string"}, "authorization": {"type": "string"}}},
}
SPACE = {"type": "namespace", "name": "ours", "description": "", "tools": [PLAIN]}


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "input": "Hello", **fields}).encode()


def echo(*tools: object) -> list[dict[str, object]]:
    request, _ = read_request(body(tools=tools))
    found: list[dict[str, object]] = json.loads(b"{%b}" % render_echo(request, previous_response_id=None))["tools"]
    return found


@pytest.mark.parametrize(
    "tool", [MCP, SHELL, {"type": "namespace", "name": "n", "tools": [MCP]}], ids=["mcp", "shell", "namespace"]
)
def test_an_answer_repeats_a_tool_without_its_credentials(tool: dict[str, object]) -> None:
    (shown,) = echo(tool)
    assert "s3cret" not in json.dumps(shown)
    assert shown["type"] == tool["type"]


def test_what_a_function_calls_its_arguments_stays() -> None:
    assert echo(PLAIN, SPACE) == [PLAIN, SPACE]


def test_an_input_item_that_brings_tools_is_kept_without_their_credentials() -> None:
    brought = {"type": "tool_search_output", "call_id": "c1", "tools": [MCP, PLAIN]}
    (kept,) = list_input_items(body(input=[brought]))
    assert b"s3cret" not in kept
    assert json.loads(kept)["tools"][1] == PLAIN
    assert json.loads(kept)["tools"][0]["server_label"] == "tracker"


def test_an_approval_and_a_list_of_tools_are_not_touched() -> None:
    given = {
        "id": "i1",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "authorization: x"}],
        "status": "completed",
    }
    (kept,) = list_input_items(body(input=[given]))
    assert json.loads(kept) == given


def test_the_engine_never_sees_them() -> None:
    surface = SURFACES["/v1/responses"]
    request = surface.parse(body(tools=[MCP, SHELL, PLAIN]), {"content-type": "application/json"})
    assert surface.translate is not None
    assert b"s3cret" not in surface.translate(request).body
