"""The one way in for a request from any door: llm-pool's Responses shape, or bytes that pass as they are."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from runner.engines.port import POOL_RESPONSES, RESPONSES
from runner.serving.pool_surface import PoolSurface
from runner.serving.request import Inference
from runner.serving.responses import uses_pool_shape
from runner.serving.service import Answer, Serving


class Door:
    """Chooses between the two ways of serving."""

    def __init__(self, serving: Serving, pool_surface: PoolSurface) -> None:
        self._serving = serving
        self._pool_surface = pool_surface

    def open(self, request: Inference) -> AbstractAsyncContextManager[Answer]:
        """Return the context that serves a request; entering it raises RequestRefused."""
        is_pool_shaped = request.endpoint == RESPONSES and uses_pool_shape(request.body, on_socket=request.on_socket)
        if is_pool_shaped or request.endpoint == POOL_RESPONSES:
            return self._pool_surface.open(request)
        return self._serving.open(request)
