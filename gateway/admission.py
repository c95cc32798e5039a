"""May this caller ask this, now: rate, model, prompt size, token limit. All from memory, all before a row is written."""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Callable

import msgspec

from gateway.catalogue import Catalogue, ModelEntry
from gateway.errors import MaxTokensTooLarge, ModelNotAllowed, ModelUnknown, PromptTooLarge, RateLimited
from gateway.values import Caller, InferenceRequest

_WINDOW_S = 60.0


class RateState(msgspec.Struct, frozen=True, gc=False):
    """Where a key stands in its window. ``reset_s``: until the oldest request of the window leaves it."""

    limit: int
    remaining: int
    reset_s: float

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit headers."""
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self.limit),
            (b"x-ratelimit-remaining-requests", b"%d" % self.remaining),
            (b"x-ratelimit-reset-requests", b"%ds" % math.ceil(self.reset_s)),
        ]


class RateLimiter:
    """Requests per minute of each key over a moving window; exact within this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: dict[uuid.UUID, deque[float]] = {}

    def take(self, key_id: uuid.UUID, limit: int) -> RateState:
        """Count one request. Raises RateLimited with the wait until one would pass."""
        now = self._clock()
        window = self._windows.get(key_id)
        if window is None:
            window = self._windows[key_id] = deque()
        start = now - _WINDOW_S
        while window and window[0] <= start:
            window.popleft()
        if limit < 1:
            raise RateLimited("This key may send no requests.", retry_after_s=_WINDOW_S)
        if len(window) >= limit:
            # Rounding may put a sum of floats a hair above the window.
            wait = min(_WINDOW_S, window[len(window) - limit] + _WINDOW_S - now)
            raise RateLimited(
                f"Rate limit of {limit} requests per minute exceeded; try again in {math.ceil(wait)} s.",
                retry_after_s=wait,
            )
        window.append(now)
        return RateState(limit, limit - len(window), window[0] + _WINDOW_S - now)

    def peek(self, key_id: uuid.UUID, limit: int) -> RateState:
        """Return where a key stands without counting."""
        window = self._windows.get(key_id)
        if not window:
            return RateState(limit, limit, 0.0)
        return RateState(limit, max(0, limit - len(window)), max(0.0, window[0] + _WINDOW_S - self._clock()))

    def forget_idle(self) -> None:
        """Drop the windows of keys that asked nothing for a minute."""
        start = self._clock() - _WINDOW_S
        for key_id in [k for k, window in self._windows.items() if not window or window[-1] <= start]:
            del self._windows[key_id]


class Admission:
    """Applies the allow-list and the caps."""

    def __init__(self, catalogue: Catalogue, is_known_model: Callable[[str], bool]) -> None:
        self._catalogue = catalogue
        self._is_known_model = is_known_model

    def admit(self, caller: Caller, request: InferenceRequest) -> ModelEntry:
        """Return the model's row. Raises the error of the first rule that is broken."""
        entry = self.find_model(caller, request.model)
        if request.prompt_chars > entry.max_prompt_chars:
            raise PromptTooLarge(
                f"Prompt exceeds the size limit: {request.prompt_chars} characters > {entry.max_prompt_chars} maximum.",
                param="messages",
            )
        if request.max_tokens is not None and request.max_tokens > entry.max_tokens:
            raise MaxTokensTooLarge(
                f"{request.max_tokens_field} exceeds the limit: {request.max_tokens} > {entry.max_tokens} maximum.",
                param=request.max_tokens_field,
            )
        return entry

    def find_model(self, caller: Caller, name: str) -> ModelEntry:
        """Return an allowed model. Raises ModelUnknown (404) or ModelNotAllowed (400)."""
        entry = self._catalogue.models.get(name)
        if entry is None or not entry.allowed:
            if entry is None and not self._is_known_model(name):
                raise ModelUnknown(f"The model '{name}' does not exist. GET /v1/models lists what can be used.", param="model")
            raise ModelNotAllowed(f"The model '{name}' is not allow-listed here; ask an operator to allow it.", param="model")
        if caller.allowed_models and name not in caller.allowed_models:
            raise ModelNotAllowed(f"This API key may not use the model '{name}'.", param="model")
        return entry
