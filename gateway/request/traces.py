"""The spans of one request in its gateway, by what the request path knows of it: the whole, each wait, each attempt."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import GatewayError
from gateway.request.dispatch import QueuePlace
from gateway.request.outcomes import Broken, Outcome, Retry, Served
from gateway.values import Record, RequestOutcome, judge_outcome
from nodes.links import Link
from nodes.links.http import HttpLink
from wire import clock
from wire.bridge import TokenCounts
from wire.ids import format_id
from wire.traces import find_finish_reasons, name_operation

if TYPE_CHECKING:
    from wire.spans import Span, Traces


@dataclass(slots=True)
class RequestTrace:
    """A request that is traced. ``span`` is the gateway's own, ``attempt`` that of the node which is asked now."""

    span: Span
    path: str
    request_id: str
    attempt: Span | None = None
    _attempt: dict[str, str | int] | None = None
    _asked_at: float = 0.0

    @property
    def trace_id(self) -> str:
        """In hex, for logs."""
        return self.span.trace_id

    def note_wait(self, since: float, *, reason: str, place: QueuePlace | None) -> None:
        """Add that the request waited until now. ``reason``: what for."""
        told: dict[str, str | int] = {"muster.queue.reason": reason}
        if place is not None:
            told |= {"muster.queue.position": place.position, "muster.queue.estimate_ms": place.estimate_ms}
        self.span.begin("queue", at=since).end(clock.monotonic(), told)

    def begin_attempt(self, link: Link, model: str, *, number: int, at: float) -> Mapping[str, str]:
        """Begin an attempt; return the headers by which the node goes on with the trace."""
        operation = name_operation(self.path)
        self._asked_at, self.attempt = at, self.span.begin_call(f"{operation} {model}", at=at)
        self._attempt = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "muster",
            "gen_ai.request.model": model,
            "server.address": link.target.host if isinstance(link, HttpLink) else link.node_name,
            "muster.node.name": link.node_name,
            "muster.attempt": number,
        }
        return self.attempt.headers()

    def end_attempt(self, outcome: Outcome | None, *, first_byte_at: float | None, answer: bytes) -> None:
        """End the attempt, where one was begun. ``outcome`` None: the client left.

        ``first_byte_at``: of a stream, in clock.monotonic() seconds; ``answer``: the end of it.
        """
        usage, error, word = None, "", "left"
        match outcome:
            case Served():
                usage, word = outcome.usage, "served"
                error = "" if outcome.error is None else outcome.error.code
                if not error and (outcome.has_failed or outcome.status >= 400):
                    error = str(outcome.status) if outcome.status >= 400 else "engine_failed"
            case Retry():
                error, word = outcome.error.code, outcome.reason.value
            case Broken():
                error, word = outcome.error.code, "broken"
        status = outcome.status if isinstance(outcome, Served) else 0
        self._end_attempt(word, error=error, status=status, usage=usage, first_byte_at=first_byte_at, answer=answer)

    def end_served(self, status: int, usage: TokenCounts | None, *, first_byte_at: float | None, answer: bytes) -> None:
        """End an attempt with a good answer."""
        self._end_attempt("served", error="", status=status, usage=usage, first_byte_at=first_byte_at, answer=answer)

    def _end_attempt(
        self, word: str, *, error: str, status: int, usage: TokenCounts | None, first_byte_at: float | None, answer: bytes
    ) -> None:
        span, told = self.attempt, self._attempt
        if span is None or told is None:
            return
        self.attempt = self._attempt = None
        said: dict[str, str | int | float | tuple[str, ...]] = {**told, "muster.attempt.outcome": word}
        if status:
            said["http.response.status_code"] = status
        if first_byte_at is not None:
            said["gen_ai.response.time_to_first_chunk"] = first_byte_at - self._asked_at
        if usage is not None:
            said |= write_usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        if reasons := find_finish_reasons(answer):
            said["gen_ai.response.finish_reasons"] = tuple(reasons)
        span.end(clock.monotonic(), said, error=error)

    def finish(self, record: Record | None, error: GatewayError | None = None) -> None:
        """End the request. ``record``: as it ended, None = it got none."""
        status = error.status if error is not None else 0
        told: dict[str, str | int | bool] = {
            "http.request.method": "POST",
            "http.route": self.path,
            "gen_ai.operation.name": name_operation(self.path),
            "muster.request.id": self.request_id,
        }
        outcome = RequestOutcome.REFUSED if 400 <= status < 500 else RequestOutcome.FAILED
        if record is not None:
            status = record.status_code or status
            outcome = judge_outcome(record.state, status) or outcome
            told |= {
                "gen_ai.request.model": record.asked_model or record.model,
                "gen_ai.response.model": record.model,
                "muster.tenant": record.tenant,
                "muster.attempts": record.attempts,
            }
            if record.is_streaming:
                told["gen_ai.request.stream"] = True
            if record.max_tokens is not None:
                told["gen_ai.request.max_tokens"] = record.max_tokens
            if record.prompt_tokens is not None and record.completion_tokens is not None:
                told |= write_usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens or 0)
                if record.tokens_estimated:
                    told["muster.tokens.estimated"] = True
        told |= {"muster.outcome": outcome.value, "http.response.status_code": status}
        # By HTTP's conventions a caller's mistake is no error of the server.
        is_fault = error is not None and outcome is RequestOutcome.FAILED
        self.span.end(clock.monotonic(), told, error=error.code if is_fault and error is not None else "")


def begin_trace(
    traces: Traces, headers: Mapping[str, str], path: str, record_id: uuid.UUID, *, at: float
) -> RequestTrace | None:
    """Begin the trace of a request, or go on with its client's; None = it is left out."""
    span = traces.begin(f"POST {path}", headers, at=at, trace_id=record_id.int)
    return None if span is None else RequestTrace(span, path, format_id("req", record_id))


def write_usage(prompt: int, completion: int, cached: int) -> dict[str, int]:
    told = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": completion}
    return {**told, "gen_ai.usage.cache_read.input_tokens": cached} if cached else told
