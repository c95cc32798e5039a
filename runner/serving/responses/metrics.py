"""Timers and counters of one pool answer; source: llm-pool specification, "Timing Metrics"."""

from __future__ import annotations

import msgspec


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


def make_metrics(
    *,
    backend_ms: float | None,
    engine_ms: float | None,
    pool_ms: float,
    queue_wait_ms: float | None = None,
    tokenize_ms: float | None = None,
    first_token_ms: float | None = None,
    generate_ms: float | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
) -> PoolMetrics:
    """Return the metrics of measurements that need not come from one clock; an outer timer is never below an inner one.

    ``backend_ms``: from sending the request to the engine to its last byte. ``engine_ms``: the same and the queue before
    it. ``pool_ms``: the whole request. ``first_token_ms``: from sending to the first text. ``generate_ms``: what the engine
    itself reports, prompt and decoding; without it the rate is over ``backend_ms``.
    """
    backend = _round(backend_ms)
    engine = _cover(_round(engine_ms), backend, _round(queue_wait_ms))
    pool = _cover(_round(pool_ms), engine)
    generated = backend_ms if generate_ms is None else generate_ms
    after_first = None if generated is None or first_token_ms is None else max(0.0, generated - first_token_ms)
    rate = None if output_tokens is None or not generated or generated <= 0 else output_tokens * 1000.0 / generated
    return PoolMetrics(
        backend_inference_wall_ms=backend,
        engine_total_wall_ms=engine,
        engine_outside_backend_wall_ms=None if engine is None or backend is None else _round(engine - backend),
        pool_total_wall_ms=pool,
        engine_queue_wait_ms=_round(queue_wait_ms),
        engine_tokenize_ms=_round(tokenize_ms),
        gpu_time_to_first_token_ms=_round(first_token_ms),
        gpu_generate_total_ms=_round(generate_ms),
        gpu_decode_after_first_token_ms=_round(after_first),
        engine_prompt_tokens=prompt_tokens,
        engine_output_tokens=output_tokens,
        engine_tokens_per_second=_round(rate),
    )


def _cover(outer: float | None, *inner: float | None) -> float | None:
    """Return ``outer``, or the sum of what lies within it where that is more; None when the outer was not measured."""
    return None if outer is None else _round(max(outer, sum(part or 0.0 for part in inner)))


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
