"""llm-pool's ``POST /v1/responses`` as a translation: its request into a chat completion, and that answer back. Pure.

What belongs elsewhere: queues, engines, clocks, sending bytes.
"""

from __future__ import annotations

from runner.serving.responses.builder import ResponseBuilder, make_response_id
from runner.serving.responses.chat import POOL_BACKENDS, ChatTranslation, PoolBackend, to_chat
from runner.serving.responses.metrics import PoolMetrics, make_metrics
from runner.serving.responses.request import PoolRequest, read_pool_request, uses_pool_shape

__all__ = [
    "POOL_BACKENDS",
    "ChatTranslation",
    "PoolBackend",
    "PoolMetrics",
    "PoolRequest",
    "ResponseBuilder",
    "make_metrics",
    "make_response_id",
    "read_pool_request",
    "to_chat",
    "uses_pool_shape",
]
