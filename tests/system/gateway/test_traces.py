"""One trace of each request in its gateway: from its client's to the node's, with every wait and every attempt."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.dialects.surface import SURFACES
from nodes.links import EndKind
from tests.fakes.pipeline import CHAT, SSE, STREAM, USAGE, Gateway, Make, Request, chunk
from tests.fakes.traces import Remembered, name_context, parent_of, told
from wire.ids import parse_id

CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "the secret of the prompt"


def continue_trace(gateway: Gateway, headers: Mapping[str, str]) -> Request:
    return gateway.ask_with({"authorization": f"Bearer {gateway.key}", **headers}, SURFACES[CHAT], {})


async def test_a_request_that_waits_and_loses_its_node_is_one_trace_with_each_wait_and_attempt(make_gateway: Make) -> None:
    gateway, seen = make_gateway(), Remembered()
    gateway.pipeline.traces = seen.traces
    first = gateway.link(slots=1)
    ahead = gateway.ask()
    await ahead.on(first)
    request = gateway.ask(stream=True)
    await request.client.wait(lambda: gateway.dispatcher.depth)
    await ahead.served(first, b"{}")
    lost = await request.on(first)
    second = gateway.link()
    lost.end(EndKind.LINK_LOST)
    good = await request.on(second)
    good.answer(*STREAM, headers=SSE)
    await request.done()

    server = seen.of(f"POST {CHAT}")[-1]
    record_id = parse_id("req", request.client.headers["x-request-id"])
    assert record_id is not None
    assert server.context is not None
    assert server.context.trace_id == record_id.int  # whoever has the request's id has the trace's
    mine = [span for span in seen.spans if span.context is not None and span.context.trace_id == record_id.int]
    wait, failed, served = mine[:-1]
    assert {parent_of(span) for span in (wait, failed, served)} == {server.context.span_id}
    assert (wait.name, *told(wait, "muster.queue.reason", "muster.queue.position")) == ("queue", "slot", 1)
    names = ("muster.attempt", "muster.node.name", "muster.attempt.outcome", "error.type")
    assert told(failed, *names) == (1, first.node_name, "lost", "REQUEST_INTERRUPTED")
    assert told(served, *names) == (2, second.node_name, "served", None)
    usage = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
    assert told(served, *usage, "gen_ai.response.finish_reasons") == (3, 4, ("stop",))
    whole = ("muster.outcome", "muster.attempts", "muster.tenant", "http.response.status_code", *usage)
    assert told(server, *whole) == ("served", 2, "t", 200, 3, 4)
    times = [span.start_time or 0 for span in (server, wait, failed, served)]
    assert times == sorted(times)
    assert all((span.end_time or 0) <= (server.end_time or 0) for span in (wait, failed, served))
    for stream, span in ((lost, failed), (good, served)):  # each node goes on with its own attempt
        assert stream.request.headers["traceparent"].startswith(name_context(span))


async def test_a_clients_trace_goes_on_and_its_flag_decides(make_gateway: Make) -> None:
    gateway, seen = make_gateway(), Remembered()
    gateway.pipeline.traces = seen.traces
    link = gateway.link()
    kept = continue_trace(gateway, {"traceparent": CLIENTS, "tracestate": "vendor=1"})
    stream = await kept.on(link)
    assert stream.request.headers["tracestate"] == "vendor=1"
    await kept.served(link, b"{}")
    server = seen.of(f"POST {CHAT}")[0]
    assert CLIENTS.startswith(name_context(server)[:36])
    assert parent_of(server) == 0xB7AD6B7169203331

    not_kept = continue_trace(gateway, {"traceparent": CLIENTS.removesuffix("01") + "00"})
    stream = await not_kept.on(link)
    assert stream.request.headers["traceparent"] == CLIENTS.removesuffix("01") + "00"  # the node leaves it out too
    await not_kept.served(link, b"{}")
    unreadable = continue_trace(gateway, {"traceparent": "00-nonsense"})
    await unreadable.served(link, b"{}")
    roots = [span for span in seen.of(f"POST {CHAT}") if span.parent is None]
    assert len(seen.of(f"POST {CHAT}")) == 2
    assert len(roots) == 1


async def test_without_traces_what_the_client_sent_of_one_reaches_the_node_as_it_is(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = continue_trace(gateway, {"traceparent": CLIENTS})
    assert (await request.on(link)).request.headers["traceparent"] == CLIENTS
    await request.served(link, b"{}")


async def test_no_span_holds_anything_of_prompt_answer_or_key(make_gateway: Make) -> None:
    gateway, seen = make_gateway(), Remembered()
    gateway.pipeline.traces = seen.traces
    link = gateway.link()
    said = (chunk({"content": f'{SECRET} "finish_reason":"leak"'}), chunk({}, "stop"), USAGE, b"data: [DONE]\n\n")
    for parts, options in (
        (said, {"headers": SSE}),
        ((b'{"error":{"message":"%b"}}' % SECRET.encode(),), {"status": 500}),
    ):
        request = gateway.ask(stream="headers" in options, messages=[{"role": "user", "content": SECRET}])
        await request.served(link, *parts, **options)
    await gateway.ask("wrong key").done()
    server = seen.of(f"POST {CHAT}")
    assert [told(span, "muster.outcome", "error.type") for span in server] == [
        ("served", None), ("failed", "FORWARDED_REQUEST_FAILED"), ("refused", None),
    ]  # fmt: skip
    text = "\n".join(span.to_json() for span in seen.spans)
    assert "secret" not in text
    assert "leak" not in text
    assert gateway.key not in text
    assert not re.search("Bearer|wrong key", text)
