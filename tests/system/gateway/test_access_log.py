"""Lines of whole requests in the access log and in the log: what they say, and that nothing of a prompt or a key is in them."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from core.limits import GatewayLimits
from gateway.request.access_log import AccessLog, AccessMode, write_json
from nodes.links import EndKind
from tests.fakes.pipeline import REPLY, SSE, STREAM, Gateway, Make
from wire.logs import make_formatter

PROMPT = "the merger with Initech closes on the first of March"
PASSWORD = "sk-live-0123456789abcdefghij"  # what an engine might say


class Lines:
    """The access log of a gateway, read back."""

    def __init__(self, gateway: Gateway) -> None:
        self._stream = io.BytesIO()
        self._log = AccessLog(AccessMode.ON, gateway.limits, stream=self._stream, write_line=write_json)
        gateway.pipeline.recorder.access = self._log

    def read(self) -> list[dict[str, Any]]:
        self._log.stop()
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]


async def test_a_line_says_of_a_served_request_what_its_record_does(make_gateway: Make) -> None:
    gateway = make_gateway()
    lines, link = Lines(gateway), gateway.link()
    request = gateway.ask(stream=True)
    await request.served(link, *STREAM, headers=SSE)
    (line,) = lines.read()
    latency_ms, ttfb_ms, queue_ms = await request.record("latency_ms", "ttfb_ms", "queue_ms")
    assert line.pop("time").endswith("Z")
    assert (line.pop("bytes_in"), line.pop("bytes_out")) == (79, len(request.client.body))
    assert line == {
        "level": "info", "logger": "muster.access", "event": "request", "request": request.client.headers["x-request-id"],
        "outcome": "served", "status": 200, "dialect": "chat", "path": "/v1/chat/completions", "stream": True, "model": "m",
        "node": link.node_name, "tenant": "t", "key": "k", "duration_ms": latency_ms, "ttft_ms": ttfb_ms, "queue_ms": queue_ms,
        "attempts": 1, "tokens_in": 3, "tokens_out": 4,
    }  # fmt: skip


async def test_flags_say_how_each_request_ended(make_gateway: Make) -> None:
    gateway = make_gateway(limits=GatewayLimits(no_node_wait_s=0.05, queue_s=0.05, stream_ping_s=60.0), max_queue=1)
    lines = Lines(gateway)
    for refused in (gateway.ask("nonsense"), gateway.ask(model="unheard-of"), gateway.ask(max_tokens="many"), gateway.ask()):
        await refused.done()
    first, second = gateway.link(), gateway.link()
    lost = gateway.ask()
    await lost.client.wait(lambda: first.streams or second.streams)
    (first if first.streams else second).streams[0].end(EndKind.LINK_LOST)
    await lost.client.wait(lambda: first.streams or second.streams)
    left = gateway.ask()
    await left.client.wait(lambda: first.streams and second.streams)
    waiting, full = gateway.ask(), gateway.ask()
    await full.done()
    await waiting.done()
    streams = {stream.request.request_id: stream for link in (first, second) for stream in link.streams}
    assert len(streams) == 2
    left.client.leave()
    await left.done()
    (last,) = [stream for link in (first, second) for stream in link.streams]
    last.answer(REPLY)
    await lost.done()
    said = [(line["outcome"], line.get("status"), line.get("flags", "")) for line in lines.read()]
    assert said == [
        ("refused", 401, "UA"),
        ("refused", 404, "NM"),
        ("refused", 400, "BR"),
        ("failed", 503, "NN"),
        ("failed", 503, "QF"),
        ("failed", 504, "QT"),
        ("cancelled", 499, "DC"),
        ("served", 200, "RQ"),
    ]


@pytest.mark.parametrize("is_kept", [True, False])
async def test_nothing_of_a_prompt_or_a_key_is_in_any_line_of_a_whole_request(make_gateway: Make, *, is_kept: bool) -> None:
    written, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(written)
    handler.setFormatter(make_formatter("json", is_terminal=False))
    limits = GatewayLimits(no_node_wait_s=29.0, stream_ping_s=60.0, max_engine_error_chars=300 if is_kept else 0)
    gateway = make_gateway(limits=limits)
    lines, before = Lines(gateway), root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        link = gateway.link()
        request = gateway.ask(messages=[{"role": "user", "content": PROMPT}])
        failure = {"error": {"message": f"{PASSWORD} has no template for: {PROMPT}", "type": "x"}}
        await request.served(link, json.dumps(failure).encode(), status=500)
        await gateway.ask(messages=[{"role": "user", "content": PROMPT}], model=gateway.key).done()
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
    failed, refused = lines.read()
    own = [json.loads(line) for line in written.getvalue().splitlines()]
    (warning,) = [line for line in own if line["event"] == "request.engine_error"]
    assert (warning["request"], warning["tenant"]) == (request.client.headers["x-request-id"], "t")
    assert failed.get("error", "") == ("… has no template for:…" if is_kept else "")
    assert (failed["flags"], refused["flags"]) == ("UF", "NM")
    everything = written.getvalue() + json.dumps([failed, refused])
    for secret in (PROMPT, PROMPT[:20], PASSWORD, gateway.key, gateway.key[17:]):
        assert secret not in everything
