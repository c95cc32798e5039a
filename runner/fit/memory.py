"""Memory of a model: its shape, what a load of it takes, whether that fits, and what would fit instead. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from statistics import median

from runner.definitions.fields import Backend
from runner.definitions.plan import Observation
from runner.limits import MIB, limits
from wire.memory import CACHE_TYPES, FIRST_GUESSES, PAGE_TOKENS, KvLayer, count_kv_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory a model needs depends on. ``backend``: what loads files of this format. ``weights_bytes`` is the exact sum of
    its tensors as stored.

    ``layers`` counts all blocks, ``kv_layers`` those that keep something per token: recurrent layers, and layers that share
    the cache of another, are not in it. ``context_max`` in tokens.
    """

    backend: Backend
    weights_bytes: int
    layers: int
    kv_layers: tuple[KvLayer, ...]
    context_max: int | None = None
    quantization: str | None = None

    def last_layers(self, count: int) -> ModelShape:
        """Return the part that llama.cpp puts on a GPU for ``n_gpu_layers``: the last blocks, and the output as one more.

        Below zero, and above their number, is all of it.
        """
        if not 0 <= count <= self.layers:
            return self
        # The weights of all blocks, and of the output, are taken to be alike.
        kept = len(self.kv_layers) * count // self.layers if self.layers else 0
        weights_bytes = self.weights_bytes * count // (self.layers + 1)
        return replace(self, weights_bytes=weights_bytes, kv_layers=self.kv_layers[len(self.kv_layers) - kept :])

    def share(self, nodes: int) -> ModelShape:
        """Return the largest part that one of several nodes has, which divide the layers among them."""
        kept = -(-len(self.kv_layers) // nodes)
        return replace(self, weights_bytes=-(-self.weights_bytes // nodes), kv_layers=self.kv_layers[:kept])


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a load takes, in bytes: weights as they are, the KV cache by formula, the engine's own share as given."""

    weights_bytes: int
    kv_bytes: int
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.overhead_bytes


def estimate(
    shape: ModelShape, *, context_tokens: int, slots: int, type_k: str = "f16", type_v: str = "f16", overhead_bytes: int
) -> Estimate:
    """Return what ``slots`` requests of ``context_tokens`` each take. Raises ValueError for an unknown type of cache."""
    kv_bytes = count_kv_bytes(shape.kv_layers, context_tokens=context_tokens, slots=slots, type_k=type_k, type_v=type_v)
    return Estimate(shape.weights_bytes, kv_bytes, overhead_bytes)


def learn_overhead(observations: Sequence[Observation], backend: str, *, has_gpu: bool = False, gpus: int = 1) -> int:
    """Return the bytes that an engine takes beyond weights and cache: the median of the newest measured loads of a backend,
    never below zero; before any, a first guess for each of its ``gpus``, which is 0 for a server of somebody else's.
    """
    # A load of which no memory could be measured has 0 there.
    ours = [seen for seen in observations if seen.backend == backend and seen.measured_bytes > 0]
    newest = sorted(ours, key=lambda seen: seen.loaded_at)[-limits().models.measured_loads :]
    if not newest:
        return FIRST_GUESSES.get(backend, (0, 0))[has_gpu] * max(1, gpus)
    # The median, so that one load beside another program that came or went does not spoil it.
    return max(0, int(median(seen.measured_bytes - seen.weights_bytes - seen.kv_bytes for seen in newest)))


class SuggestionKind(StrEnum):
    SHORTER_CONTEXT = "shorter_context"
    FEWER_SLOTS = "fewer_slots"
    SMALLER_KV_TYPE = "smaller_kv_type"
    OTHER_QUANTIZATION = "other_quantization"
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change after which it fits, in words and as members of an answer. ``required_bytes``: what the model takes then."""

    kind: SuggestionKind
    text: str
    required_bytes: int
    change: dict[str, object]

    def as_dict(self) -> dict[str, object]:
        return {"kind": self.kind.value, "text": self.text, "requiredMB": ceil_mib(self.required_bytes), **self.change}


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same model in another quantisation that is here already."""

    model_id: str
    quantization: str
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class DoesNotFit:
    """Each suggestion alone would do. ``free_bytes`` is what it may have: the smaller of free and budget."""

    required_bytes: int
    free_bytes: int
    suggestions: tuple[Suggestion, ...]


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
) -> DoesNotFit | None:
    """Compare what it takes with what it may have, and look for what would fit; None when it does.

    ``kv_types``: those that the backend can use, in order of preference. ``loaded``: id and bytes of models that may be
    unloaded for it; that helps when memory is short, not when the budget of the model itself is.
    """
    available = free_bytes if budget_bytes is None else min(free_bytes, budget_bytes)
    if predicted.total_bytes <= available:
        return None

    def need(*, tokens: int = context_tokens, slots: int = slots, key: str = type_k, value: str = type_v) -> int:
        changed = estimate(
            shape, context_tokens=tokens, slots=slots, type_k=key, type_v=value, overhead_bytes=predicted.overhead_bytes
        )
        return changed.total_bytes

    found = [
        _shorter_context((context_tokens - 1) // PAGE_TOKENS, lambda pages: need(tokens=pages * PAGE_TOKENS), available),
        _fewer_slots(slots, lambda count: need(slots=count), available),
        _smaller_cache(kv_types, lambda name: need(key=name, value=name), available),
        _other_quantization(alternatives, predicted.total_bytes - predicted.weights_bytes, available),
    ]
    # What others give back does not raise the budget of the model itself.
    if budget_bytes is None or predicted.total_bytes <= budget_bytes:
        found.append(_evict(predicted.total_bytes, free_bytes, loaded))
    return DoesNotFit(predicted.total_bytes, available, tuple(entry for entry in found if entry is not None))


def _most(high: int, fits: Callable[[int], bool]) -> int:
    low = 0
    # More never takes less, so halving finds it.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _shorter_context(pages: int, need: Callable[[int], int], available: int) -> Suggestion | None:
    pages = _most(pages, lambda count: need(count) <= available)
    if pages == 0:
        return None
    tokens, required = pages * PAGE_TOKENS, need(pages)
    text = f"A context of {tokens} tokens would fit ({ceil_mib(required)} MB)."
    return Suggestion(SuggestionKind.SHORTER_CONTEXT, text, required, {"maxContextLength": tokens})


def _fewer_slots(slots: int, need: Callable[[int], int], available: int) -> Suggestion | None:
    count = _most(slots - 1, lambda count: need(count) <= available)
    if count == 0:
        return None
    required = need(count)
    requests = "One request" if count == 1 else f"{count} requests"
    text = f"{requests} at a time instead of {slots} would fit ({ceil_mib(required)} MB)."
    return Suggestion(SuggestionKind.FEWER_SLOTS, text, required, {"slots": count})


def _smaller_cache(kv_types: Sequence[str], need: Callable[[str], int], available: int) -> Suggestion | None:
    for kv_type in kv_types:
        if kv_type in CACHE_TYPES and (required := need(kv_type)) <= available:
            text = f"A KV cache of type {kv_type} would fit ({ceil_mib(required)} MB)."
            return Suggestion(SuggestionKind.SMALLER_KV_TYPE, text, required, {"kvType": kv_type})
    return None


def _other_quantization(alternatives: Sequence[Alternative], beside_bytes: int, available: int) -> Suggestion | None:
    # The largest that fits is the least degraded.
    for other in sorted(alternatives, key=lambda entry: -entry.weights_bytes):
        required = beside_bytes + other.weights_bytes
        if required <= available:
            text = f"{other.model_id} ({other.quantization}) would fit ({ceil_mib(required)} MB)."
            change: dict[str, object] = {"modelId": other.model_id, "quantization": other.quantization}
            return Suggestion(SuggestionKind.OTHER_QUANTIZATION, text, required, change)
    return None


def _evict(required: int, free_bytes: int, loaded: Sequence[tuple[str, int]]) -> Suggestion | None:
    missing = required - free_bytes
    # One whose memory is not known frees nothing that can be counted on.
    useful = [entry for entry in loaded if entry[1] > 0]
    if sum(size for _, size in useful) < missing:
        return None
    chosen = _fewest(useful, missing)
    names = " and ".join(model_id for model_id, _ in chosen)
    text = f"Unloading {names} would free enough ({ceil_mib(sum(size for _, size in chosen))} MB)."
    return Suggestion(SuggestionKind.EVICT, text, required, {"evict": [model_id for model_id, _ in chosen]})


def _fewest(useful: list[tuple[str, int]], missing: int) -> tuple[tuple[str, int], ...]:
    largest_first = sorted(useful, key=lambda entry: -entry[1])
    count, freed = 0, 0
    while freed < missing:
        freed += largest_first[count][1]
        count += 1
    # The number of sets grows with two to the power of the models.
    if len(useful) > limits().models.searched_models:
        return tuple(largest_first[:count])
    enough = (entries for entries in combinations(useful, count) if sum(size for _, size in entries) >= missing)
    # Among equally many, those that give up least.
    return min(enough, key=lambda entries: sum(size for _, size in entries))


def ceil_mib(size: int) -> int:
    return -(-size // MIB)
