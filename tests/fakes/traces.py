"""Traces that stay in memory, and what tests read of them."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from wire.spans import Traces, make_traces


class Remembered:
    """The traces of one process, and the spans that have ended, in the order in which they did."""

    def __init__(self, sampler: str = "parentbased_always_on", ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.traces: Traces = make_traces(sampler, ratio, {"service.name": "test"}, SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def take(self) -> list[ReadableSpan]:
        """Return them, and forget them."""
        taken = self.spans
        self._exporter.clear()
        return taken

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def told(span: ReadableSpan, *names: str) -> tuple[object, ...]:
    """Return attributes of a span, None for one that it has not."""
    attributes: Mapping[str, object] = span.attributes or {}
    return tuple(attributes.get(name) for name in names)


def name_context(span: ReadableSpan) -> str:
    """Return the ``traceparent`` by which somebody goes on with a span, without its flags."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id
