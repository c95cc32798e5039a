"""llm-pool's own fields and numbers, for boxes that do not speak its /v1/responses themselves.

Source: llm-pool specification, "POST /v1/responses" and "Timing Metrics".
"""

from __future__ import annotations

import msgspec

from gateway.dialects.chat import ChatTimings
from gateway.whole_numbers import WholeNumber
from wire.bridge import TokenCounts


class Decoding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``decoding``: how tokens are chosen; what is None was not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    repetition_penalty: float | None = None
    max_tokens: WholeNumber | None = None
    stop: list[str] | None = None
    beam_size: WholeNumber | None = None


_CHAT_NAMES = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),  # vLLM's name and llama.cpp's; each ignores the other
    "max_tokens": ("max_tokens",),
    "stop": ("stop",),
}


def translate_decoding(decoding: Decoding) -> tuple[dict[str, object], list[str]]:
    """Return chat fields, and the names of what no chat engine takes."""
    given = {name: value for name, value in msgspec.structs.asdict(decoding).items() if value is not None}
    fields = {chat: value for name, value in given.items() for chat in _CHAT_NAMES.get(name, ())}
    return fields, [f"decoding.{name}" for name in given if name not in _CHAT_NAMES]


class PoolMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds and token counts; None = unknown. backend ⊂ engine ⊂ pool: each outer timer covers the inner one."""

    backend_inference_wall_ms: float | None = None
    engine_total_wall_ms: float | None = None
    engine_outside_backend_wall_ms: float | None = None
    pool_total_wall_ms: float | None = None
    engine_queue_wait_ms: float | None = None
    engine_tokenize_ms: float | None = None
    gpu_time_to_first_token_ms: float | None = None
    gpu_generate_total_ms: float | None = None
    gpu_decode_after_first_token_ms: float | None = None
    engine_prompt_tokens: int | None = None
    engine_output_tokens: int | None = None
    engine_tokens_per_second: float | None = None


class Stopwatch(msgspec.Struct, kw_only=True):
    """Readings of one monotonic clock, in seconds: request received, sent to the box, first text, end of the answer."""

    received_at: float | None
    opened_at: float
    first_text_at: float | None = None
    ended_at: float


def measure(watch: Stopwatch, *, usage: TokenCounts | None, timings: ChatTimings | None) -> PoolMetrics:
    """Return the numbers of an answer as the gateway sees them, with the engine's own where it says them."""
    backend = (watch.ended_at - watch.opened_at) * 1000.0
    waited = None if watch.received_at is None else max(0.0, (watch.opened_at - watch.received_at) * 1000.0)
    whole = backend + (waited or 0.0)
    first = None if watch.first_text_at is None else (watch.first_text_at - watch.opened_at) * 1000.0
    generated = None
    if timings is not None and timings.predicted_ms is not None:
        generated = (timings.prompt_ms or 0.0) + timings.predicted_ms
    spent = backend if generated is None else generated
    output = usage.completion_tokens if usage is not None else None
    return PoolMetrics(
        backend_inference_wall_ms=round(backend, 1),
        engine_total_wall_ms=round(whole, 1),
        engine_outside_backend_wall_ms=round(whole - backend, 1),
        pool_total_wall_ms=round(whole, 1),
        engine_queue_wait_ms=None if waited is None else round(waited, 1),
        gpu_time_to_first_token_ms=None if first is None else round(first, 1),
        gpu_generate_total_ms=None if generated is None else round(generated, 1),
        gpu_decode_after_first_token_ms=None if first is None else round(max(0.0, spent - first), 1),
        engine_prompt_tokens=usage.prompt_tokens if usage is not None else None,
        engine_output_tokens=output,
        engine_tokens_per_second=None if output is None or spent <= 0 else round(output * 1000.0 / spent, 1),
    )
