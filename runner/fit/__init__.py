"""Whether a model fits: what its files say of it, what it will take, what would fit instead. Reads headers, never weights."""

from runner.fit.estimate import CACHE_TYPES, Estimate, estimate
from runner.fit.overhead import Overhead, learn_overhead
from runner.fit.reading import read_shape
from runner.fit.shape import KvLayer, ModelShape
from runner.fit.verdict import Alternative, DoesNotFit, Fits, Suggestion, SuggestionKind, judge

__all__ = [
    "CACHE_TYPES", "Alternative", "DoesNotFit", "Estimate", "Fits", "KvLayer", "ModelShape", "Overhead", "Suggestion",
    "SuggestionKind", "estimate", "judge", "learn_overhead", "read_shape",
]  # fmt: skip
