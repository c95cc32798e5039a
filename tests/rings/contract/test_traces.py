"""One trace through real processes: a client's SDK, the gateway, the node, the engine; and a collector that is not there."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from urllib.parse import urlsplit

import openai
import pytest

from tests.fakes.collector import Received, print_tree, run_collector
from tests.fakes.stack import Ready, run_stack
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.timeout(300)]
CLIENTS = "0af7651916cd43dd8448eb211c80319c"
PROMPT = "nobody may read this in a trace"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "200"}


def ask_whole(ready: Ready, *, times: int) -> list[str]:
    """Ask with head and body in one piece, as is served without a task once the head is known; return the ids of requests."""
    where = urlsplit(ready.gateway_url)
    body = json.dumps({"model": ready.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {ready.api_key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    found = []
    with socket.create_connection((str(where.hostname), where.port or 80), timeout=30) as line:
        for _ in range(times):
            line.sendall(head.encode() + body)
            answer = b""
            while b"}]" not in answer or b'"usage"' not in answer:
                answer += line.recv(65536)
            found.append(re.findall(rb"x-request-id: (req_[0-9a-f]{32})", answer)[0].decode())
    return found


def test_one_trace_goes_from_the_sdk_through_gateway_and_node_to_the_engine() -> None:
    with contextlib.ExitStack() as held:
        collector = held.enter_context(run_collector())
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **SOON}
        ready = held.enter_context(run_stack("traces", variables, node=True)).ready
        sdk = openai.OpenAI(api_key=ready.api_key, base_url=f"{ready.gateway_url}/v1", max_retries=0, timeout=60)

        def ask(**options: object) -> str:
            raw = sdk.chat.completions.with_raw_response.create(
                model=ready.model, messages=[{"role": "user", "content": PROMPT}], max_tokens=4, **options,  # type: ignore[call-overload]
            )  # fmt: skip
            if options.get("stream"):
                list(raw.parse())
            return str(raw.headers["x-request-id"])

        def of_trace(trace_id: str) -> list[Received]:
            wait_until(lambda: len(collector.of_trace(trace_id)) >= 4, within_s=30, what="its spans came")
            return collector.of_trace(trace_id)

        theirs = ask(stream=True, extra_headers={"traceparent": f"00-{CLIENTS}-b7ad6b7169203331-01"})
        own = [ask(), ask(stream=True), *ask_whole(ready, times=3)]  # of the latter the head is known soon
        for trace_id, request_id in ((CLIENTS, theirs), *((each.removeprefix("req_"), each) for each in own)):
            spans = of_trace(trace_id)
            gateway, attempt, node, engine = spans
            print(print_tree(spans))
            assert [span.service for span in spans] == ["muster-gateway"] * 2 + ["muster-node"] * 2
            assert gateway.parent_id == ("b7ad6b7169203331" if trace_id == CLIENTS else "")
            assert [span.parent_id for span in spans[1:]] == [gateway.span_id, attempt.span_id, node.span_id]
            assert gateway.attributes["muster.request.id"] == node.attributes["muster.request.id"] == request_id
            for span in spans:
                assert span.attributes["gen_ai.operation.name"] == "chat"
                assert span.attributes["gen_ai.usage.output_tokens"] == 4
                assert span.starts <= span.ends <= gateway.ends
            assert attempt.attributes["gen_ai.response.finish_reasons"] == ["length"]
            assert engine.attributes["gen_ai.response.finish_reasons"] == ["length"]
        gateway, attempt, *_ = of_trace(own[-1].removeprefix("req_"))
        assert attempt.starts == gateway.starts  # the path without a task asks the node with the times of the request itself
        assert PROMPT not in repr(collector.spans)
        assert ready.api_key not in repr(collector.spans)
        sdk.close()


def test_a_collector_that_is_not_there_costs_one_line() -> None:
    nowhere = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1", **SOON}
    with run_stack("traces-nowhere", nowhere, node=True) as stack:
        ready = stack.ready
        with openai.OpenAI(api_key=ready.api_key, base_url=f"{ready.gateway_url}/v1", max_retries=0, timeout=60) as sdk:
            for _ in range(20):
                sdk.chat.completions.create(model=ready.model, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        log = stack.directory / "data" / "logs" / "gateway.log"
        wait_until(lambda: "traces.not_exported" in log.read_text(), within_s=30, what="the gateway complains")
        said = log.read_text()
    assert said.count("traces.") == 2  # that they are on, and that one is not taken
