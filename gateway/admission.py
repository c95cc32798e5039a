"""May this caller ask this, now: rate, model, prompt size, token limit. All from memory, all before a row is written."""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

from core.limits import limits
from gateway.errors import GatewayError, MaxTokensTooLarge, ModelNotAllowed, ModelUnknown, PromptTooLarge, RateLimited
from gateway.request.models import Catalogue, ModelEntry
from gateway.routing import AUTO, may_use, resolve
from gateway.values import Caller, InferenceRequest, PoolOptions, Priority
from wire import clock

_RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


class RateState(msgspec.Struct, frozen=True, gc=False):
    """Where a key stands in its window. ``reset_s``: until the oldest request of the window leaves it."""

    limit: int
    remaining: int
    reset_s: float

    def headers(self, *, is_anthropic: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit headers, or Anthropic's, whose reset is a moment (RFC 3339)."""
        if is_anthropic:
            return [
                (b"anthropic-ratelimit-requests-limit", b"%d" % self.limit),
                (b"anthropic-ratelimit-requests-remaining", b"%d" % self.remaining),
                (b"anthropic-ratelimit-requests-reset", _write_moment(int(clock.unix_s()) + math.ceil(self.reset_s))),
            ]
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self.limit),
            (b"x-ratelimit-remaining-requests", b"%d" % self.remaining),
            (b"x-ratelimit-reset-requests", b"%ds" % math.ceil(self.reset_s)),
        ]


@lru_cache(maxsize=256)
def _write_moment(second: int) -> bytes:
    """Return a Unix second as RFC 3339 writes it; many answers name the same one."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()


class RateLimiter:
    """Requests per minute of each key over a moving window; exact within this process."""

    def __init__(self) -> None:
        self._window_s = limits().gateway.rate_window_s
        self._windows: dict[uuid.UUID, deque[float]] = {}

    def take(self, key_id: uuid.UUID, limit: int) -> RateState:
        """Count one request. Raises RateLimited with the wait until one would pass."""
        now = clock.monotonic()
        window = self._windows.get(key_id)
        if window is None:
            window = self._windows[key_id] = deque()
        start = now - self._window_s
        while window and window[0] <= start:
            window.popleft()
        if limit < 1:
            raise RateLimited("This key may send no requests.", retry_after_s=self._window_s)
        if len(window) >= limit:
            # Rounding may put a sum of floats a hair above the window.
            wait = min(self._window_s, window[len(window) - limit] + self._window_s - now)
            raise RateLimited(
                f"Rate limit of {limit} requests per minute exceeded; try again in {math.ceil(wait)} s.",
                retry_after_s=wait,
            )
        window.append(now)
        return RateState(limit, limit - len(window), window[0] + self._window_s - now)

    def peek(self, key_id: uuid.UUID, limit: int) -> RateState:
        """Return where a key stands without counting."""
        window = self._windows.get(key_id)
        if not window:
            return RateState(limit, limit, 0.0)
        return RateState(limit, max(0, limit - len(window)), max(0.0, window[0] + self._window_s - clock.monotonic()))

    def forget_idle(self) -> None:
        """Drop the windows of keys that asked nothing for a minute."""
        start = clock.monotonic() - self._window_s
        for key_id in [k for k, window in self._windows.items() if not window or window[-1] <= start]:
            del self._windows[key_id]


class Admission:
    """Applies the allow-list and the caps. ``rank_models``: which of some models boxes serve on an API path, best first."""

    def __init__(
        self,
        catalogue: Catalogue,
        is_known_model: Callable[[str], bool],
        rank_models: Callable[[Iterable[str], str], list[str]],
    ) -> None:
        self._catalogue = catalogue
        self._is_known_model = is_known_model
        self._rank_models = rank_models

    def admit(self, caller: Caller, request: InferenceRequest) -> list[ModelEntry]:
        """Return the rows of the models that may serve a request, best first, at least one.

        Raises the error of the first rule that is broken; a fallback whose caps are too small for it is left out.
        """
        admitted: list[ModelEntry] = []
        refusal: GatewayError | None = None
        for entry in self.route(caller, request.model, request.path, request.options):
            error = _check_caps(entry, request)
            if error is None:
                admitted.append(entry)
            elif refusal is None:
                refusal = error
        if not admitted and refusal is not None:
            raise refusal
        return admitted

    def route(self, caller: Caller, name: str, path: str, options: PoolOptions | None = None) -> list[ModelEntry]:
        """Return the rows of the models behind a name, best first, at least one.

        Raises ModelUnknown (404), ModelNotAllowed (400) or NoAvailableNode.
        """
        models, aliases = self._catalogue.models, self._catalogue.aliases_for(caller.tenant)
        if options is None and name not in aliases and name != AUTO:
            entry = self.find_model(caller, name)
            if not entry.fallbacks:
                return [entry]
        route = resolve(
            name,
            aliases=aliases,
            refuse=lambda model, via: self._refuse(caller, model, via),
            fallbacks_of=lambda model: models[model].fallbacks,
            rank_auto=lambda: self._rank_models([row.name for row in models.values() if row.allowed], path),
            extra=options.fallback_models if options is not None else (),
        )
        return [models[model] for model in route.models]

    def list_unusable(self, caller: Caller, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of some names by which the caller gets no model: unknown, not allowed, or not for this key."""
        aliases = self._catalogue.aliases_for(caller.tenant)

        def is_usable(name: str) -> bool:
            alias = aliases.get(name)
            models = (name,) if alias is None else [target.model for target in alias.by_weight]
            return name == AUTO or any(self._refuse(caller, model, name) is None for model in models)

        return tuple(name for name in names if not is_usable(name))

    def find_model(self, caller: Caller, name: str) -> ModelEntry:
        """Return an allowed model. Raises ModelUnknown (404) or ModelNotAllowed (400)."""
        refusal = self._refuse(caller, name, name)
        if refusal is not None:
            raise refusal
        return self._catalogue.models[name]

    def _refuse(self, caller: Caller, name: str, via: str) -> GatewayError | None:
        """Return why a key may not use a model by asking for ``via``, or None. It names what the client named alone."""
        entry = self._catalogue.models.get(name)
        if entry is None or not entry.allowed:
            if entry is None and not self._is_known_model(name):
                return ModelUnknown(f"The model '{via}' does not exist. GET /v1/models lists what can be used.", param="model")
            return ModelNotAllowed(f"The model '{via}' is not allow-listed here; ask an operator to allow it.", param="model")
        if not may_use(caller.allowed_models, name, via=via):
            return ModelNotAllowed(f"This API key may not use the model '{via}'.", param="model")
        return None


def choose_priority(caller: Caller, options: PoolOptions | None) -> str:
    """Return the key's priority, or the client's wish where that is lower; empty = normal."""
    chosen = caller.priority
    if options is not None and options.priority is not None and _RANKS[options.priority] > _RANKS[chosen]:
        chosen = options.priority
    return "" if chosen is Priority.NORMAL else chosen.value


def _check_caps(entry: ModelEntry, request: InferenceRequest) -> GatewayError | None:
    if request.prompt_chars > entry.max_prompt_chars:
        return PromptTooLarge(
            f"Prompt exceeds the size limit: {request.prompt_chars} characters > {entry.max_prompt_chars} maximum.",
            param="messages",
        )
    if request.max_tokens is not None and request.max_tokens > entry.max_tokens:
        return MaxTokensTooLarge(
            f"{request.max_tokens_field} exceeds the limit: {request.max_tokens} > {entry.max_tokens} maximum.",
            param=request.max_tokens_field,
        )
    return None
