"""Does it fit, and if not, what would: shorter context, fewer slots, smaller cache, other quantisation, evictions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations

from runner.fit.estimate import CACHE_TYPES, PAGE_TOKENS, Estimate, estimate
from runner.fit.shape import ModelShape
from runner.limits import MIB, limits


class SuggestionKind(StrEnum):
    """What could be changed."""

    SHORTER_CONTEXT = "shorter_context"
    FEWER_SLOTS = "fewer_slots"
    SMALLER_KV_TYPE = "smaller_kv_type"
    OTHER_QUANTIZATION = "other_quantization"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change after which it fits. ``required_bytes``: what the model takes then. The field of its kind is set."""

    kind: SuggestionKind
    text: str
    required_bytes: int
    context_tokens: int | None = None
    slots: int | None = None
    kv_type: str | None = None
    model_id: str | None = None
    quantization: str | None = None
    evict: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return it as it goes into an answer: camelCase, sizes in MB (rounded up), unset fields left out."""
        fields: dict[str, object | None] = {
            "kind": self.kind.value,
            "text": self.text,
            "requiredMB": _mb(self.required_bytes),
            "maxContextLength": self.context_tokens,
            "slots": self.slots,
            "kvType": self.kv_type,
            "modelId": self.model_id,
            "quantization": self.quantization,
            "evict": list(self.evict) or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same model in another quantisation that is here already."""

    model_id: str
    quantization: str
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class Fits:
    """It fits; ``predicted`` is what it will take."""

    predicted: Estimate


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """It does not; each suggestion alone would do. ``free_bytes`` is what it may have: the smaller of free and budget."""

    required_bytes: int
    free_bytes: int
    suggestions: tuple[Suggestion, ...]


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is to be loaded; every search changes one field of it."""

    shape: ModelShape
    context_tokens: int
    slots: int
    type_k: str
    type_v: str
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return estimate(
            self.shape, context_tokens=self.context_tokens, slots=self.slots, type_k=self.type_k, type_v=self.type_v,
            overhead_bytes=self.overhead_bytes,
        ).total_bytes  # fmt: skip


def judge(
    predicted: Estimate,
    *,
    free_bytes: int,
    budget_bytes: int | None,
    shape: ModelShape,
    context_tokens: int,
    slots: int,
    type_k: str = "f16",
    type_v: str = "f16",
    kv_types: Sequence[str] = (),
    alternatives: Sequence[Alternative] = (),
    loaded: Sequence[tuple[str, int]] = (),
) -> Fits | DoesNotFit:
    """Compare what it takes with what it may have, and look for what would fit.

    ``kv_types``: those that the backend can use, in order of preference. ``loaded``: id and bytes of models that may be
    unloaded for it; that helps when memory is short, not when the budget of the model itself is.
    """
    available = free_bytes if budget_bytes is None else min(free_bytes, budget_bytes)
    if predicted.total_bytes <= available:
        return Fits(predicted)
    wish = _Wish(shape, context_tokens, slots, type_k, type_v, predicted.overhead_bytes)
    found = [
        _shorter_context(wish, available),
        _fewer_slots(wish, available),
        _smaller_cache(wish, available, kv_types),
        *_other_quantization(predicted, available, alternatives),
    ]
    if budget_bytes is None or predicted.total_bytes <= budget_bytes:
        found.append(_evict(predicted.total_bytes, free_bytes, loaded))
    return DoesNotFit(predicted.total_bytes, available, tuple(entry for entry in found if entry is not None))


def _shorter_context(wish: _Wish, available: int) -> Suggestion | None:
    low, high = 0, (wish.context_tokens - 1) // PAGE_TOKENS
    while low < high:  # the largest page count that fits; more context never takes less
        middle = (low + high + 1) // 2
        if replace(wish, context_tokens=middle * PAGE_TOKENS).total_bytes <= available:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return None
    tokens = low * PAGE_TOKENS
    required = replace(wish, context_tokens=tokens).total_bytes
    text = f"A context of {tokens} tokens would fit ({_mb(required)} MB)."
    return Suggestion(SuggestionKind.SHORTER_CONTEXT, text, required, context_tokens=tokens)


def _fewer_slots(wish: _Wish, available: int) -> Suggestion | None:
    low, high = 0, wish.slots - 1
    while low < high:
        middle = (low + high + 1) // 2
        if replace(wish, slots=middle).total_bytes <= available:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        return None
    required = replace(wish, slots=low).total_bytes
    requests = "one request" if low == 1 else f"{low} requests"
    text = f"{requests.capitalize()} at a time instead of {wish.slots} would fit ({_mb(required)} MB)."
    return Suggestion(SuggestionKind.FEWER_SLOTS, text, required, slots=low)


def _smaller_cache(wish: _Wish, available: int, kv_types: Sequence[str]) -> Suggestion | None:
    for kv_type in kv_types:
        if kv_type not in CACHE_TYPES:
            continue
        required = replace(wish, type_k=kv_type, type_v=kv_type).total_bytes
        if required <= available:
            text = f"A KV cache of type {kv_type} would fit ({_mb(required)} MB)."
            return Suggestion(SuggestionKind.SMALLER_KV_TYPE, text, required, kv_type=kv_type)
    return None


def _other_quantization(predicted: Estimate, available: int, alternatives: Sequence[Alternative]) -> list[Suggestion]:
    """Return the largest, so the least degraded, alternative that fits."""
    for other in sorted(alternatives, key=lambda entry: -entry.weights_bytes):
        required = predicted.total_bytes - predicted.weights_bytes + other.weights_bytes
        if required <= available:
            text = f"{other.model_id} ({other.quantization}) would fit ({_mb(required)} MB)."
            kind = SuggestionKind.OTHER_QUANTIZATION
            return [Suggestion(kind, text, required, model_id=other.model_id, quantization=other.quantization)]
    return []


def _evict(required: int, free_bytes: int, loaded: Sequence[tuple[str, int]]) -> Suggestion | None:
    """Return the fewest models whose memory is enough; among equally many, those that give up least."""
    missing = required - free_bytes
    useful = [entry for entry in loaded if entry[1] > 0]
    if sum(size for _, size in useful) < missing:
        return None
    chosen = _fewest(useful, missing)
    names = " and ".join(model_id for model_id, _ in chosen)
    freed = sum(size for _, size in chosen)
    text = f"Unloading {names} would free enough ({_mb(freed)} MB)."
    return Suggestion(SuggestionKind.EVICT, text, required, evict=tuple(model_id for model_id, _ in chosen))


def _fewest(useful: list[tuple[str, int]], missing: int) -> tuple[tuple[str, int], ...]:
    largest_first = sorted(useful, key=lambda entry: -entry[1])
    count, freed = 0, 0
    while freed < missing:
        freed += largest_first[count][1]
        count += 1
    if len(useful) > limits().models.searched_models:
        return tuple(largest_first[:count])
    enough = (entries for entries in combinations(useful, count) if sum(size for _, size in entries) >= missing)
    return min(enough, key=lambda entries: sum(size for _, size in entries))


def _mb(size: int) -> int:
    return -(-size // MIB)
