"""The spans of a request, and their way to a collector, by OpenTelemetry's SDK. Imported where ``wire.traces`` is on.

A span is begun and ended with the times that the request path has noted anyway (``clock.monotonic()`` seconds). A thread of
the SDK sends it on, from a queue with a bound: what finds no room there, or no collector, is lost, and a line in the log says
so now and then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, StatusCode, Tracer, TraceState, set_span_in_context
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.re import parse_env_headers
from opentelemetry.util.types import Attributes, AttributeValue

from wire import clock
from wire.limits import WIRE

logger = logging.getLogger("muster.traces")

_NOTHING = Context()
_ALL_IDS = TraceIdRatioBased.TRACE_ID_LIMIT
_w3c = TraceContextTextMapPropagator()


class Span:
    """A span that was begun. ``shift_s``: what makes a reading of the monotonic clock Unix seconds."""

    __slots__ = ("_sdk", "_shift_s", "_tracer")

    def __init__(self, tracer: Tracer, sdk: SdkSpan, shift_s: float) -> None:
        self._tracer, self._sdk, self._shift_s = tracer, sdk, shift_s

    @property
    def trace_id(self) -> str:
        """In hex, as ``traceparent`` has it."""
        return f"{self._sdk.get_span_context().trace_id:032x}"

    def begin(self, name: str, *, at: float, kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """Begin a span within this one."""
        within = set_span_in_context(self._sdk, _NOTHING)
        return Span(self._tracer, self._tracer.start_span(name, within, kind, start_time=self._to_ns(at)), self._shift_s)

    def begin_call(self, name: str, *, at: float) -> Span:
        """Begin a span of asking somebody else, who is told its ``headers``."""
        return self.begin(name, at=at, kind=SpanKind.CLIENT)

    def end(self, at: float, attributes: Mapping[str, AttributeValue], *, error: str = "") -> None:
        """End it, once. ``error``: the code of what went wrong, empty = nothing did."""
        self._sdk.set_attributes(attributes)
        if error:
            self._sdk.set_attribute("error.type", error)
            self._sdk.set_status(StatusCode.ERROR)
        self._sdk.end(self._to_ns(at))

    def headers(self) -> dict[str, str]:
        """Return the headers by which whoever is asked goes on with the trace."""
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(self._sdk, _NOTHING))
        return carrier

    def _to_ns(self, at: float) -> int:
        return int((at + self._shift_s) * 1_000_000_000)


class Traces:
    """The traces of one process. Its spans are begun in one thread."""

    def __init__(self, provider: TracerProvider, sampler: RequestSampler, ids: RequestIds) -> None:
        self._provider, self._ids = provider, ids
        self._tracer = provider.get_tracer("muster")
        self._any_id = RandomIdGenerator().generate_trace_id
        self.keeps_root = sampler.keeps_root

    def begin(
        self, name: str, headers: Mapping[str, str], *, at: float, trace_id: int = 0, is_root: bool = True
    ) -> Span | None:
        """Begin the span of a request in this process; None = it is not recorded.

        It goes on with the trace of its ``traceparent``. Without one it begins a trace, with this id; where another process of
        ours would have begun that (``is_root`` False), it is part of none.
        """
        context = _NOTHING
        if "traceparent" in headers:
            context = _w3c.extract({name: headers[name] for name in _w3c.fields if name in headers}, _NOTHING)
        if context is _NOTHING:
            trace_id = trace_id or self._any_id()
            if not (is_root and self.keeps_root(trace_id)):
                return None
        self._ids.next_trace_id = trace_id
        shift_s = clock.unix_s() - clock.monotonic()
        sdk = self._tracer.start_span(name, context, SpanKind.SERVER, start_time=int((at + shift_s) * 1_000_000_000))
        return Span(self._tracer, sdk, shift_s) if sdk.is_recording() else None

    def close(self) -> None:
        """Send what waits, and end. Holds up the calling thread for ``traces_flush_s`` at most."""
        # The SDK's own bound is half a minute, to which the time-out of the last attempt is added.
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        ending.join(WIRE.traces_flush_s)
        if ending.is_alive():
            logger.warning("traces.not_flushed within_s=%g", WIRE.traces_flush_s)


class RequestIds(RandomIdGenerator):
    """Gives the next trace the id that is asked for, so that a request and its trace have the same."""

    next_trace_id = 0

    def generate_trace_id(self) -> int:
        return self.next_trace_id


class RequestSampler(Sampler):
    """Which traces are kept, as the standard variables say: by the flag of ``traceparent`` where there is one, or by share.

    OpenTelemetry's share is judged by the last 64 bits of an id. Of those that are request ids (UUIDv7) the first two are
    always the same, so that they are left out.
    """

    def __init__(self, root: Sampler, *, is_parent_based: bool) -> None:
        self._all = ParentBased(root) if is_parent_based else root
        # What the SDK does for a trace that begins, without its eight calls: every request asks.
        self._bound = root.bound if isinstance(root, TraceIdRatioBased) else _ALL_IDS + 1 if root is ALWAYS_ON else 0

    def keeps_root(self, trace_id: int) -> bool:
        """Whether a trace that begins here is kept."""
        return trace_id << 2 & _ALL_IDS < self._bound

    def should_sample(
        self, parent_context: Context | None, trace_id: int, name: str, kind: SpanKind | None = None,
        attributes: Attributes = None, links: Sequence[Link] | None = None, trace_state: TraceState | None = None,
    ) -> SamplingResult:  # fmt: skip
        return self._all.should_sample(parent_context, trace_id << 2, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"of requests: {self._all.get_description()}"


class _Complaints(logging.Handler):
    """Says what the SDK complains of in one line, and then nothing for ``traces_quiet_s``."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_at, self._held = 0.0, 0

    def emit(self, record: logging.LogRecord) -> None:
        now = clock.monotonic()
        if now < self._next_at:
            self._held += 1
            return
        reason = " ".join(record.getMessage().split())[: WIRE.traces_reason_chars]
        logger.warning("traces.not_exported reason=%r unsaid=%d", reason, self._held)
        self._next_at, self._held = now + WIRE.traces_quiet_s, 0


def make_traces(sampler: str, ratio: float, named: Mapping[str, str], *processors: SpanProcessor) -> Traces:
    """Return traces whose spans go to ``processors``. ``sampler``: as the standard variable names it, with its share.

    ``named``: attributes of the process where the variables of the resource say no others.
    """
    kind = sampler.removeprefix("parentbased_")
    root = TraceIdRatioBased(ratio) if kind == "traceidratio" else _ALWAYS[kind]
    chosen, ids = RequestSampler(root, is_parent_based=kind != sampler), RequestIds()
    resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(sampler=chosen, resource=resource, id_generator=ids, shutdown_on_exit=False)
    for processor in processors:
        provider.add_span_processor(processor)
    return Traces(provider, chosen, ids)


_ALWAYS: Mapping[str, Sampler] = {"always_on": ALWAYS_ON, "always_off": ALWAYS_OFF}


def export_traces(sampler: str, ratio: float, named: Mapping[str, str], headers: str = "") -> Traces:
    """Return traces that go to a collector as the variables of the SDK say. ``headers``: beside theirs, as one has them."""
    said = logging.getLogger("opentelemetry")
    said.propagate, said.handlers = False, [_Complaints()]
    sent = parse_env_headers(headers, liberal=True) if headers else None
    return make_traces(sampler, ratio, named, BatchSpanProcessor(OTLPSpanExporter(headers=sent)))
