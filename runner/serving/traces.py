"""The spans of one request on its node, by what serving knows of it: the whole, its wait for a turn, the engine's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.queue import Turn
from runner.serving.request import Answer, Inference
from wire import clock
from wire.traces import find_finish_reasons, name_operation

if TYPE_CHECKING:
    from wire.spans import Span, Traces


@dataclass(slots=True)
class SlotTrace:
    """A request that is traced. ``span`` is the node's own, ``engine`` that of the engine once it is asked."""

    span: Span
    request: Inference
    engine: Span | None = None
    _engine_name: str = ""
    _model: str = ""

    def ask_engine(self, name: str, model: str, turn: Turn) -> Mapping[str, str]:
        """Note that the engine is asked now; return the headers by which it goes on with the trace."""
        if turn.waited_ms:
            waited_since = turn.started_at - turn.waited_ms / 1000
            self.span.begin("queue", at=waited_since).end(turn.started_at, {"muster.queue.reason": "slot"})
        self._engine_name, self._model = name, model
        operation = name_operation(self.request.endpoint)
        self.engine = self.span.begin_call(f"{operation} {model}", at=clock.monotonic())
        return self.engine.headers()

    def finish(self, answer: Answer | None, word: str, *, error: str) -> None:
        """End it. ``word``: how it ended, in the words of the node's counters; ``error``: the code that its client was told."""
        request, now = self.request, clock.monotonic()
        said: dict[str, str | int | float | bool | tuple[str, ...]] = {
            "gen_ai.operation.name": name_operation(request.endpoint),
        }
        if self._model:  # of one that is refused nobody knows what its client wrote there
            said["gen_ai.request.model"] = self._model
        if request.is_streaming:
            said["gen_ai.request.stream"] = True
        if answer is not None:
            said |= _describe(answer)
        fault = (error or "engine_failed") if word == "error" else ""
        if self.engine is not None:
            told = {"gen_ai.provider.name": self._engine_name, "gen_ai.response.model": self._model}
            self.engine.end(now, {**said, **told}, error=fault)
        own = {
            "http.request.method": request.method, "http.route": request.endpoint,
            "muster.request.id": request.request_id, "muster.tenant": request.tenant, "muster.outcome": word,
        }  # fmt: skip
        self.span.end(now, {**said, **own}, error=fault)


def begin_trace(traces: Traces, request: Inference) -> SlotTrace | None:
    """Go on with the trace of a request, or begin one where no gateway has decided that; None = it is left out."""
    span = traces.begin(f"POST {request.endpoint}", request.headers, at=clock.monotonic(), is_root=not request.on_socket)
    return None if span is None else SlotTrace(span, request)


def _describe(answer: Answer) -> Mapping[str, str | int | float | tuple[str, ...]]:
    numbers = answer.numbers
    told: dict[str, str | int | float | tuple[str, ...]] = {"http.response.status_code": answer.status}
    if numbers.first_byte_ms is not None:
        told["gen_ai.response.time_to_first_chunk"] = numbers.first_byte_ms / 1000
    counts = {
        "gen_ai.usage.input_tokens": numbers.prompt_tokens,
        "gen_ai.usage.output_tokens": numbers.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": numbers.cached_tokens,
        "muster.engine.prompt_ms": numbers.prompt_ms,
        "muster.engine.decode_ms": numbers.decode_ms,
    }
    told |= {name: count for name, count in counts.items() if count is not None}
    said = answer.body if answer.body is not None else answer.ends.recent if answer.ends is not None else b""
    if reasons := find_finish_reasons(said):
        told["gen_ai.response.finish_reasons"] = tuple(reasons)
    return told
