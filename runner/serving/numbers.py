"""Numbers of what is served: what an engine says of one answer, and the counts of all of them. Pure.

The counts are plain numbers, so that a box without a metrics reader pays next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import msgspec

from runner.limits import limits
from wire.bridge import TokenCounts
from wire.unreadable import UNREADABLE
from wire.usage import StreamReader

DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
WAIT_BOUNDS_S = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OTHER_TENANTS = "other"
"""What tenants beyond the first ``tenants`` of the limits are counted under: labels must not grow without bound."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's own numbers, which our child servers repeat: milliseconds, and tokens taken from the cache."""

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    tokenize_ms: float | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    timings: _Timings | None = None
    message: _Inner | None = None
    response: _Inner | None = None


_decoder = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class Numbers:
    """Numbers of one answer; None = nobody told. ``engine_ms`` is the engine's own time where it reports it.

    ``wall_ms`` is measured here, from sending the request to the last byte; ``first_byte_ms`` to the first of the body.
    """

    queue_wait_ms: float = 0.0
    wall_ms: float = 0.0
    first_byte_ms: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tokenize_ms: float | None = None
    prompt_ms: float | None = None
    decode_ms: float | None = None
    reported_gpu_ms: float | None = None

    @property
    def gpu_ms(self) -> float:
        """Time the engine worked: what it reports, else what was measured around it."""
        if self.reported_gpu_ms is not None:
            return self.reported_gpu_ms
        if self.prompt_ms is not None and self.decode_ms is not None:
            return self.prompt_ms + self.decode_ms
        return self.wall_ms

    def take(self, answer: bytes) -> TokenCounts | None:
        """Read the JSON of a whole answer, or of one event of a stream; later numbers win. Anything else is ignored.

        Return its usage, None where that is missing or not as ``wire.usage`` wants it.
        """
        try:
            found = _decoder.decode(answer)
        except UNREADABLE:
            return None
        usage = found.usage or next((inner.usage for inner in (found.response, found.message) if inner and inner.usage), None)
        if usage is not None:
            self._take_usage(usage)
        if (timings := found.timings) is not None:
            self.cached_tokens = timings.cache_n if timings.cache_n is not None else self.cached_tokens
            self.prompt_ms = timings.prompt_ms if timings.prompt_ms is not None else self.prompt_ms
            self.decode_ms = timings.predicted_ms if timings.predicted_ms is not None else self.decode_ms
            self.tokenize_ms = timings.tokenize_ms if timings.tokenize_ms is not None else self.tokenize_ms
        return _count_tokens(usage)

    def take_stream(self, reader: StreamReader) -> None:
        """Read what a finished stream said."""
        for event in reader.noted_events():
            for line in event.splitlines():
                if line.startswith(b"data:") and (b'"usage"' in line or b'"timings"' in line):
                    self.take(line[5:].strip())

    def headers(self) -> dict[str, str]:
        """Return the response headers of the model-runner specification, all of them, lower-case."""
        cached = self.cached_tokens or 0
        return {
            "x-cache-hit": "true" if cached > 0 else "false",
            "x-cache-tokens-reused": str(cached),
            "x-queue-wait-ms": str(round(self.queue_wait_ms)),
            "x-gpu-time-ms": str(round(self.gpu_ms)),
        }

    def comment(self) -> bytes:
        """Return the same as an SSE comment, which every client skips."""
        return b": " + "; ".join(f"{name}={value}" for name, value in self.headers().items()).encode() + b"\n\n"

    def _take_usage(self, usage: _Usage) -> None:
        prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
        output = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached = details.cached_tokens if details is not None else usage.cache_read_input_tokens
        self.prompt_tokens = prompt if prompt is not None else self.prompt_tokens
        self.output_tokens = output if output is not None else self.output_tokens
        self.cached_tokens = cached if cached is not None else self.cached_tokens


def _count_tokens(usage: _Usage | None) -> TokenCounts | None:
    """Return usage as a gateway is told it, where prompt and answer are both there and no number is below zero."""
    if usage is None:
        return None
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    output = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    if prompt is None or output is None:
        return None
    total = prompt + output if usage.total_tokens is None else usage.total_tokens
    return (
        TokenCounts(prompt_tokens=prompt, completion_tokens=output, total_tokens=total)
        if min(prompt, output, total) >= 0
        else None
    )


@dataclass(slots=True)
class Histogram:
    """Counts per upper bound in seconds, the last one for everything above."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


@dataclass(slots=True)
class ModelTally:
    """What one model served. Prompt and cached tokens make its cache hit rate."""

    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS_S))
    waits: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache, 0.0 to 1.0."""
        return min(1.0, self.cached_tokens / self.prompt_tokens) if self.prompt_tokens else 0.0


class Tally:
    """All counts of the process."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        """By model, tenant and status: success, error, refused or cancelled."""
        self.refusals: dict[str, int] = {}
        """By code, from whichever door; the codes are those of ``runner.errors``."""
        self.models: dict[str, ModelTally] = {}
        self._tenants: set[str] = set()

    def count(self, *, model: str, tenant: str, status: str) -> None:
        """Count a request that ended, or was refused."""
        if tenant not in self._tenants:
            if len(self._tenants) < limits().serving.tenants:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        key = (model, tenant, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def count_refusal(self, code: str) -> None:
        """Count a request that was not carried out, or broke off, by the code that its client was told."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def of(self, model: str) -> ModelTally:
        """Return the tally of a model; call it for models that exist only."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelTally()
        return found
