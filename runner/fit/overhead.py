"""What an engine takes beside weights and KV cache: learnt from loads that were measured, a stated guess before that. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from runner.definitions.plan import Observation
from runner.limits import MIB, limits


@dataclass(frozen=True, slots=True)
class FirstGuess:
    """Bytes to reckon with before anything was measured, and where the figure comes from."""

    bytes: int
    reason: str
    gpu_bytes: int = 0
    """With a GPU, where most of it is CUDA's own; 0 = not measured, so no other than ``bytes``."""


FIRST_GUESSES: dict[str, FirstGuess] = {
    "gguf": FirstGuess(
        48 * MIB, "llama.cpp took 37 MB with a 1 MB model, 0.7 GB on a GPU; buffers grow with the model", gpu_bytes=768 * MIB
    ),
    "ct2": FirstGuess(64 * MIB, "CTranslate2 took 52 MB with a 1 MB model, 0.6 GB on a GPU", gpu_bytes=640 * MIB),
    "whisper": FirstGuess(192 * MIB, "faster-whisper without a GPU took 164 MB, its audio decoder and voice detector included"),
    "vllm": FirstGuess(1800 * MIB, "the processes of vLLM without a GPU took 1.7 GB together with a 2 MB model"),
    "exllamav3": FirstGuess(1200 * MIB, "never measured; vLLM in one process, on the same PyTorch, took 1.2 GB"),
}
UNKNOWN = FirstGuess(0, "a server of somebody else's takes nothing here")


@dataclass(frozen=True, slots=True)
class Overhead:
    """``samples``: measured loads behind the figure; with none it is the first guess, and ``reason`` says whence."""

    bytes: int
    is_learnt: bool
    samples: int
    reason: str


def learn_overhead(observations: Sequence[Observation], backend: str, *, has_gpu: bool = False) -> Overhead:
    """Return the median of what the newest loads of a backend took beyond weights and cache; never below zero.

    The median, so that one load beside another program that came or went does not spoil it. Loads of which no memory could
    be measured do not count.
    """
    ours = [seen for seen in observations if seen.backend == backend and seen.measured_bytes > 0]
    newest = sorted(ours, key=lambda seen: seen.loaded_at)[-limits().models.measured_loads :]
    if not newest:
        guess = FIRST_GUESSES.get(backend, UNKNOWN)
        return Overhead((has_gpu and guess.gpu_bytes) or guess.bytes, is_learnt=False, samples=0, reason=guess.reason)
    middle = median(seen.measured_bytes - seen.weights_bytes - seen.kv_bytes for seen in newest)
    return Overhead(max(0, int(middle)), is_learnt=True, samples=len(newest), reason=f"median of {len(newest)} measured loads")
