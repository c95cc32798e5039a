"""A collector of traces in memory: it takes OTLP over HTTP and keeps what it was sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Received:
    """A span as it came. Times are Unix nanoseconds; ids are hex, an empty parent = the trace begins with it."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    starts: int
    ends: int
    attributes: dict[str, object]
    has_failed: bool


@dataclass
class Collector:
    url: str = ""
    spans: list[Received] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """The ``authorization`` of each batch."""

    def of_trace(self, trace_id: str) -> list[Received]:
        """Return the spans of a trace, the outer before the inner."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: (span.starts, -span.ends))

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {each.key: _read(each.value) for each in span.attributes}
                    found = Received(
                        named["service.name"], span.name, span.kind, span.trace_id.hex(), span.span_id.hex(),
                        span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano, attributes,
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )  # fmt: skip
                    self.spans.append(found)


def print_tree(spans: list[Received]) -> str:
    """Return a trace as text, each span under the one that it is within, with its milliseconds and attributes."""
    known, first = {span.span_id for span in spans}, min(span.starts for span in spans)
    lines: list[str] = []

    def add(span: Received, depth: int) -> None:
        times = f"{(span.starts - first) / 1e6:8.1f} ms +{(span.ends - span.starts) / 1e6:.1f}"
        lines.append(f"{times} {'  ' * depth}{span.service}: {span.name}{' FAILED' if span.has_failed else ''}")
        lines.extend(f"{'':16}{'  ' * depth}{name} = {value}" for name, value in sorted(span.attributes.items()))
        for child in spans:
            if child.parent_id == span.span_id:
                add(child, depth + 1)

    for span in spans:
        if span.parent_id not in known:
            add(span, 0)
    return "\n".join(lines)


@contextlib.contextmanager
def run_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that http.server calls
            collector.tokens.append(self.headers.get("authorization", ""))
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(value: object) -> object:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]  # protobuf's messages are made at run time
    found = getattr(value, kind)
    return [_read(each) for each in found.values] if kind == "array_value" else found
